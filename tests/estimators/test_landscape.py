"""Slope, scatter and curvature of public rows, and the learning rate that follows from them."""

from __future__ import annotations

import math

import pytest
import torch
from estimator_bench import Bench, bits, same
from tiny_runs import build
from torch import nn
from whole_directions import direction_vector

from hf_dpzero.estimators.landscape import DIRECTIONS, Landscape, measure
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.settings.defaults import STEEP, rate_on

SIZE, ROWS = 32, 50
CURVES = torch.linspace(0.1, 4.0, SIZE, dtype=torch.float64)


def bowl() -> tuple[Bench, dict[str, torch.Tensor]]:
    """f_i(w) = b_i'w + w'Aw / 2 with A = diag(CURVES)."""
    model = nn.Linear(SIZE, 1, bias=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, SIZE, generator=generator))
    rows = torch.randn(ROWS, SIZE, generator=generator) + 0.5

    def losses(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        w = module.weight.double()
        bent = (CURVES * w.square()).sum(dim=1) / 2
        return ((inputs["b"].double() * w).sum(dim=1) + bent).float()

    return Bench(model, losses), {"b": rows}


@pytest.mark.parametrize("draws", [DIRECTIONS, 64])
def test_a_bowl_has_the_landscape_of_its_formula(draws):
    bench, batch = bowl()
    theta = bits(bench.space.tensors)
    found = measure(bench.estimator("whole_model"), [batch], draws)
    assert same(bits(bench.space.tensors), theta)
    u = torch.stack(
        [direction_vector(Direction(0, 0, k), "rademacher", [(0, SIZE)]) for k in range(draws)],
        dim=1,
    ).double()
    w = bench.space.tensors[0].detach().double().flatten()
    x = (batch["b"].double() + CURVES * w) @ u
    mean = x.mean(dim=0)
    scatter = float(x.var(dim=0).mean())
    slope = float(mean.square().mean()) - scatter / ROWS
    cross = mean.outer(mean) * (u.T * CURVES @ u)
    cross = float(cross.sum() - cross.diagonal().sum())
    along = cross / ((draws - 1) * float(mean.square().sum()))
    expected = (slope, scatter, float(CURVES.sum()), along, ROWS)
    assert tuple(found) == pytest.approx(expected, rel=0.02, abs=0.05)
    if draws == 64:  # many directions tell the curvature along the gradient
        g = batch["b"].double().mean(dim=0) + CURVES * w
        assert found.along == pytest.approx(float((g * CURVES * g).sum() / g.dot(g)), rel=0.5)


def test_rows_without_finite_losses_do_not_count():
    bench, batch = bowl()
    broken = batch["b"].clone()
    broken[3:7, 0] = torch.nan
    found = measure(bench.estimator("whole_model"), [{"b": broken}])
    left = measure(bench.estimator("whole_model"), [{"b": batch["b"][[0, 1, 2, *range(7, ROWS)]]}])
    assert tuple(found) == pytest.approx(tuple(left)) and found.rows == ROWS - 4
    assert measure(bench.estimator("whole_model"), [{"b": broken[2:5]}]) is None


def plan(tmp_path, **settings):
    return build(tmp_path, learning_rate=1.0, **settings).plan


@pytest.mark.parametrize("directions", [1, 8])
def test_the_rate_gains_most_in_one_step(tmp_path, directions):
    """Against steps that are drawn: E s'g / E s'As, with s = sum_k (u_k'(g + e) + z_k) u_k.

    Of the curvature along the gradient half counts: the drawn steps' part of it is found by itself.
    """
    generator = torch.Generator().manual_seed(1)
    batch, sigma, clip, draws = 12, 2.0, 10.0, 40_000
    g = torch.randn(SIZE, generator=generator, dtype=torch.float64) * 0.2
    spread = 0.3
    slope, scatter = float(g.dot(g)), SIZE * spread**2
    assert math.sqrt(directions * (slope + scatter)) < clip  # nothing is clipped
    size = (draws, directions, SIZE)
    u = torch.randint(2, size, generator=generator).double() * 2 - 1
    e = torch.randn(draws, 1, SIZE, generator=generator, dtype=torch.float64)
    e *= spread / math.sqrt(batch)
    z = torch.randn(draws, directions, generator=generator, dtype=torch.float64)
    x = (u * (g + e)).sum(dim=2) + z * sigma * clip / batch
    s = (x[:, :, None] * u).sum(dim=1)
    each = (x.square()[:, :, None] * CURVES).sum(dim=(1, 2))  # of one direction with itself
    pairs = (s.square() * CURVES).sum(dim=1) - each
    best = float((s @ g).mean() / (each + STEEP * pairs).mean())
    along = float((g * CURVES * g).sum() / slope)
    found = Landscape(slope, scatter, float(CURVES.sum()), along, ROWS)
    settings = {"noise_multiplier": sigma, "clip": clip, "num_directions": directions}
    assert rate_on(found, plan(tmp_path, **settings), "constant") == pytest.approx(best, rel=0.05)


def test_a_clip_below_the_norms_shrinks_the_signal_and_not_the_noise(tmp_path):
    found = Landscape(1.0, 99.0, 50.0, 5.0, ROWS)  # norms of about 10
    whole = rate_on(found, plan(tmp_path, noise_multiplier=1e-3, clip=10.0), "constant")
    half = rate_on(found, plan(tmp_path, noise_multiplier=1e-3, clip=5.0), "constant")
    assert half == pytest.approx(2 * whole, rel=1e-3)


def test_what_public_rows_do_not_tell_is_bounded(tmp_path):
    """No slope, a negative curvature: h is at least s^2, and g^2 a quarter of its error in a batch."""
    flat = Landscape(0.0, 4.0, -9.0, -9.0, 8)
    rate = rate_on(flat, plan(tmp_path, noise_multiplier=2**-9, clip=9), "constant")
    slope = 0.25 * 4.0 / 12
    assert rate == pytest.approx(slope / ((slope + 4.0 / 12) * (4.0 + slope)), rel=1e-3)


def test_a_loss_that_never_moves_has_no_rate(tmp_path):
    assert rate_on(Landscape(0.0, 0.0, 0.0, 0.0, 8), plan(tmp_path), "constant") == 0.0


@pytest.mark.false_alarm(0)
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_random_movement_of_all_steps_is_a_share_of_the_weights(tmp_path, schedule):
    """Steps are drawn along fresh directions, of what a direction is taken by: slope and scatter / B."""
    generator = torch.Generator().manual_seed(3)
    size, steps, directions, batch = 4000, 40, 4, 12
    found = Landscape(1.0, 24.0, 60.0, 0.0, ROWS)
    settings = {"noise_multiplier": 1e-3, "clip": 20.0, "num_directions": directions}
    own = plan(tmp_path, max_steps=steps, **settings)
    rate = rate_on(found, own, schedule, size=0.2)
    assert rate < rate_on(found, own, schedule) == rate_on(found, own, schedule, size=100.0)
    u = torch.randint(2, (steps, directions, size), generator=generator).double() * 2 - 1
    x = torch.randn(steps, directions, generator=generator).double() * math.sqrt(1 + 24.0 / batch)
    left = 1 - torch.arange(steps) / steps if schedule == "linear" else torch.ones(steps)
    moved = torch.einsum("t,tk,tkd->d", rate * left, x, u)
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.15 * 0.2, rel=0.12)
