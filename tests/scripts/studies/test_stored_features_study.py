"""The study on stored features: what its simulated steps are, and its lines."""

from __future__ import annotations

from dataclasses import replace

import torch

from scripts.studies.stored_features import (
    Data,
    Plan,
    Rows,
    accuracy,
    gradient,
    guide,
    mean_of_last,
    noise_for,
    train,
)


def blobs(count: int, seed: int = 0) -> Rows:
    """Two classes on both sides of a plane through 0, with a feature that is 1."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (count,), generator=draw)
    x = torch.randn(count, 5, generator=draw)
    x[:, 0] += 4.0 * y - 2.0
    x[:, -1] = 1.0
    return Rows(x, y)


START = torch.zeros(2, 5)
NOISELESS = Plan(batch=50, steps=4, noise_multiplier=0.0, rate=0.1, falls=False)


def test_the_mean_of_the_last_two_is_that_of_two_runs():
    """A shorter run of the same seed is the beginning of a longer one."""
    rows = blobs(200)
    third = train(rows, START, 1.0, replace(NOISELESS, steps=3), seed=1)[0]
    fourth, both = train(rows, START, 1.0, NOISELESS, seed=1, keep=(1, 2))
    assert torch.allclose(both, (third + fourth) / 2, atol=1e-7)
    assert not torch.allclose(third, fourth)


def test_an_update_follows_the_gradient():
    """Its estimate is unbiased: over many directions, of all rows and without a clip that binds."""
    rows = blobs(50)
    plan = replace(NOISELESS, steps=1, batch=51, rate=1.0)  # every row is drawn
    moves = torch.stack([-train(rows, START, 1.0, plan, seed)[0] for seed in range(200)])
    exact, error = gradient(START, rows, 1.0) * 50 / 51, moves.std(0) / 200**0.5
    assert ((moves.mean(0) - exact).abs() < 5 * error).all()
    spanned = train(rows, START, 1.0, replace(plan, public=rows, spanned=True), seed=0)[0]
    assert torch.cosine_similarity(-spanned.flatten(), exact.flatten(), 0) > 0.95
    alone = train(rows, START, 1.0, replace(plan, rate=0.0, public=rows, public_rate=1.0), 0)[0]
    assert torch.cosine_similarity(-alone.flatten(), exact.flatten(), 0) > 0.95


def test_both_studies_say_what_they_ran():
    data = Data(blobs(2100), blobs(100, seed=1), START, 1.0)
    head, *lines = mean_of_last(data, "trec", range(2), steps=10)
    assert head[3:] == ["last weights", "mean of 2", "mean of 2", "mean of 3", "mean of 6"]
    assert [line[1] for line in lines] == ["0.5", "0.5", "2", "2"]
    assert [line[2] for line in lines] == ["stays", "falls to 0"] * 2
    head, *lines = guide(data, "trec", True, range(1), steps=2)
    assert head == ["public rows", "trec, n = 500"] and len(lines) == 13
    assert float(dict(lines)["512, no private rows"].split()[0]) > 90 > accuracy(START, blobs(100))
    assert 1.0 < noise_for(2.0, 1e-5, 1000, 64, 100) < noise_for(0.5, 1e-5, 1000, 64, 100)
