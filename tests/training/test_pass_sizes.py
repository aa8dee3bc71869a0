"""Rows of a forward pass: the least expected time by public numbers, checked by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from hf_dpzero.training.fixed_shapes import FixedShapes
from hf_dpzero.training.pass_sizes import (
    PassSizes,
    expected_passes,
    one_size,
    pass_cost,
    pass_sizes,
)


@pytest.mark.parametrize("mean", [1e-3, 0.7, 6.0, 300.0])
def test_expected_passes_are_those_of_poisson_draws(mean):
    draws = np.random.default_rng(0).poisson(mean, 200_000)
    counts = [1, 3, 16, 400]
    for count, found in zip(counts, expected_passes(mean, counts), strict=True):
        passes = -(-draws // count)
        assert found == pytest.approx(
            passes.mean(), abs=5 * passes.std() / math.sqrt(len(draws)) + 1e-6
        )
    assert expected_passes(mean, [1])[0] == pytest.approx(mean, rel=1e-9)


def time(rows: dict[int, int], expected: float, cost: float) -> float:
    mean = expected / len(rows)
    return sum(expected_passes(mean, [n])[0] * (cost + n * w) for w, n in rows.items())


@pytest.mark.parametrize("cost", [0.0, 40.0, 140.0, 4000.0])
@pytest.mark.parametrize("expected", [3.0, 16.0, 64.0])
def test_no_other_sizes_are_expected_to_be_quicker(expected, cost):
    """Against every choice of powers of two, at every narrowest width."""
    found = pass_sizes(expected, 64, 32, cost).rows
    for widths in ([8, 16, 32], [16, 32], [32]):
        for counts in itertools.product([1, 2, 4, 8, 16, 32], repeat=len(widths)):
            if max(counts) <= one_size(expected, 64):
                other = dict(zip(widths, counts, strict=True))
                assert time(found, expected, cost) <= time(other, expected, cost) * (1 + 1e-12)


def test_free_passes_take_one_row_and_costly_ones_take_all():
    assert set(pass_sizes(64.0, 512, 64, cost=0.0).rows.values()) == {1}
    assert pass_sizes(64.0, 512, 64, cost=1e9).rows == {64: 80}
    assert pass_cost("cuda", 125_000_000, True) > pass_cost("cuda", 13_000_000_000, True) > 140.0


@pytest.mark.parametrize("widest", [None, 3, 8, 48, 1000])
def test_widths_end_with_the_longest_row(widest):
    sizes = pass_sizes(16.0, 8, widest, cost=0.0)
    assert max(sizes.rows) == max(8, widest or 512) and sizes.narrowest == 8
    assert sizes.of(10**6) == sizes.rows[max(sizes.rows)] >= 1
    assert list(sizes.rows) == sorted(sizes.rows)


def test_microbatches_have_the_rows_of_their_width():
    def row(tokens: int) -> dict[str, torch.Tensor]:
        ids = torch.full((1, tokens), 5)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": torch.tensor([1]),
        }

    rows = [row(n) for n in (3, 20, 9, 16, 40, 12, 7)]
    shapes = FixedShapes(
        lambda chosen: [rows[i] for i in chosen], 4, PassSizes({16: 4, 32: 2, 64: 1}), pad=0
    )
    found = shapes.microbatches(range(7))
    places = [(tuple(m["input_ids"].shape), m.examples, list(m.places)) for m in found]
    assert places == [
        ((4, 16), 4, [0, 2, 3, 5]), ((4, 16), 1, [6]), ((2, 32), 1, [1]), ((1, 64), 1, [4]),
    ]  # fmt: skip
    alone = FixedShapes(lambda chosen: [rows[i] for i in chosen], 1, PassSizes({16: 4}))
    assert all(len(m["labels"]) == 1 for m in alone.microbatches(range(7)))
