"""Many different Gaussians at once, against dp-accounting, exact Gaussians and finer groups."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from step_specs import spec

from hf_dpzero.privacy import accounting
from hf_dpzero.privacy.accounting import epsilon_after
from hf_dpzero.privacy.heterogeneous import _losses, grouped
from hf_dpzero.privacy.heterogeneous import composed_epsilon as epsilon_of_kinds


def composed_epsilon(levels, q: float, delta: float, grid: float) -> float:
    return epsilon_of_kinds([(sigma, q, count) for sigma, count in levels], delta, grid)


def by_library(parts, delta: float) -> float:
    """dp-accounting's own composition of the parts, one after another, on the same kind of grid."""
    import dp_accounting as dp
    from dp_accounting import pld

    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    for one, count in parts:
        gaussian = dp.GaussianDpEvent(one.noise_multiplier)
        event = dp.PoissonSampledDpEvent(one.probability, gaussian)
        accountant.compose(dp.SelfComposedDpEvent(event, count))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 5.0])
def test_agrees_with_dp_accounting(sigma, delta):
    parts = (
        (spec(sigma, batch=100.0), 60),
        (spec(1.4 * sigma, batch=50.0), 40),
        (spec(0.8 * sigma, batch=100.0), 20),
    )
    kinds = [(s.noise_multiplier, s.probability, k) for s, k in parts]
    ours = epsilon_of_kinds(kinds, delta, 1e-3)
    assert ours == pytest.approx(by_library(parts, delta), rel=1e-3)


@pytest.mark.parametrize(("n", "batch"), [(65_536, 1024.0), (1000, 100.0), (64_000, 64.0)])
def test_equal_steps_cost_what_one_kind_costs(n, batch):
    one = spec(1.0, n, batch)
    nearly = dataclasses.replace(one, noise_multiplier=1.0 + 1e-10)
    together = accounting.epsilon_together(((one, 250), (nearly, 250)), 1e-5)
    assert together == pytest.approx(epsilon_after(one, 500, 1e-5), rel=1e-4)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
def test_without_sampling_precisions_add_up(delta):
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    levels = [(3.0 + 0.1 * i, 2) for i in range(20)]
    total = math.fsum(count / sigma**2 for sigma, count in levels)
    exact = get_epsilon_gaussian(total**-0.5, delta)
    found = composed_epsilon(levels, 1.0, delta, 5e-4)
    assert exact * (1 - 1e-6) <= found <= exact * (1 + 2e-3)


def test_both_losses_keep_their_mass_and_their_mean_likelihood_ratio():
    """sum p = 1 and sum p e^-loss just below 1 (what was rounded up), for each direction."""
    for sigma, q in ((0.6, 0.01), (2.0, 0.3), (1.0, 1.0)):
        for loss in _losses(sigma, q, 1e-3):
            losses = (np.arange(len(loss.masses)) + loss.first) * 1e-3
            assert (loss.masses >= 0).all()
            assert loss.masses.sum() + loss.infinite == pytest.approx(1.0, abs=1e-12)
            assert 1 - 1e-5 < float(loss.masses @ np.exp(-losses)) <= 1 + 1e-12


def test_a_coarser_grid_is_never_below_a_finer_one():
    levels = [(1.0, 50), (1.3, 50)]
    finest = composed_epsilon(levels, 0.05, 1e-5, 1e-4)
    for grid in (3e-4, 1e-3, 1e-2, 1e-1):
        assert composed_epsilon(levels, 0.05, 1e-5, grid) >= finest * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_groups_are_few_and_never_have_more_noise(seed):
    generator = np.random.default_rng(seed)
    most = int(generator.integers(1, 13))
    sigmas = np.exp(generator.uniform(-3, 9, generator.integers(1, 201)))
    truth = np.sort(np.repeat(sigmas, generator.integers(1, 4, len(sigmas))))
    levels = grouped(truth, most)
    assert len(levels) <= most
    stand_in = np.concatenate([np.full(count, sigma) for sigma, count in levels])
    assert len(stand_in) == len(truth) and (stand_in <= truth).all()


def test_groups_of_ten_thousand_levels_cost_below_one_percent():
    sigmas = 4.0 * np.exp(np.linspace(0.7, -0.7, 10_000))
    finest = composed_epsilon(grouped(sigmas, 600), 1 / 64, 1e-5, 4e-4)
    assert finest <= composed_epsilon(grouped(sigmas), 1 / 64, 1e-5, 4e-4) <= 1.01 * finest


def test_no_finite_epsilon_where_delta_is_below_what_is_infinite():
    assert composed_epsilon([(1.0, 10**6)], 1.0, 1e-14, 1.0) == math.inf
