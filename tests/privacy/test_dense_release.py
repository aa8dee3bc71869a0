"""Noised d-vectors on a public grid: what leaves a step says nothing beyond the Gaussian mechanism."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hf_dpzero.privacy.accounting import epsilon_after
from hf_dpzero.privacy.discretization import (
    DENSE_DELTA,
    DENSE_LOG_RATIO,
    dense_grid,
    dense_slack,
    noised_on_grid,
)
from hf_dpzero.privacy.events import StepSpec
from hf_dpzero.privacy.mechanisms import DPSGD
from hf_dpzero.privacy.noise import SecureNoise

SCALES = [0.3, 1.0, 1.7, 3e-9, 5e11]


@pytest.mark.parametrize("scale", SCALES)
def test_what_is_released_lies_on_the_grid_whatever_the_total(scale):
    grid = dense_grid(scale)
    assert math.frexp(grid)[0] == 0.5
    assert 2.0**-9 * scale < grid <= 2.0**-8 * scale
    normals = SecureNoise().normals(1000, 0, 0)
    for total in (np.zeros(1000), scale * normals[::-1] * 7, np.full(1000, scale * 2.0**-40)):
        released = noised_on_grid(total, normals, scale)
        assert (released / grid == np.rint(released / grid)).all()
        assert abs(released - total - scale * normals).max() <= 0.5 * grid * (1 + 1e-9)


@pytest.mark.parametrize("scale", SCALES)
def test_large_totals_lose_nothing_of_their_rest(scale):
    """10^9 grid units and a half, plus noise of a quarter: the next cell, exactly."""
    grid = dense_grid(scale)
    quarter = np.array([0.25 * grid / scale])
    assert noised_on_grid(np.array([(1e9 + 0.5) * grid]), quarter, scale) == (1e9 + 1) * grid
    assert noised_on_grid(np.array([(1e9 + 0.5) * grid]), -quarter, scale) == 1e9 * grid


def test_the_log_ratio_covers_the_error_that_the_proof_adds_up():
    error = (2.0**-46 + 2.0**-52) * 2**9 + 2 * 2.0**-40  # in cells: normals, two roundings
    inside = math.exp(16 / 2**8)
    assert -math.log1p(-2 * inside * error) <= DENSE_LOG_RATIO


def test_the_slack_is_advanced_composition():
    draws, epsilon, delta = 10**9, 8.0, 1e-6
    failure = delta * 2.0**-10 * math.exp(-(epsilon + 1))
    h = DENSE_LOG_RATIO
    expected = h * math.sqrt(2 * draws * math.log(1 / failure)) + draws * h * math.expm1(h)
    assert dense_slack(draws, epsilon, delta) == pytest.approx(expected, rel=1e-12)
    assert dense_slack(0, epsilon, delta) == 0
    with pytest.raises(ValueError, match="train fewer parameters"):
        dense_slack(10**15, epsilon, delta)
    # what the proof needs of d' and h' so that (eps + 2 h', delta) holds
    spent = math.exp(2.0**-9) * DENSE_DELTA + (1 + math.exp(epsilon + 2.0**-9)) * failure / delta
    assert spent <= 1


def test_the_plan_pays_for_the_grid():
    spec = StepSpec(sampling="full_batch", num_examples=10, batch_size=10.0, noise_multiplier=9.0)
    dense = StepSpec(**{**spec.__dict__, "dense_draws": 10**8})
    ideal, paid = epsilon_after(spec, 1000, 1e-5 * DENSE_DELTA), epsilon_after(dense, 1000, 1e-5)
    assert paid - ideal == pytest.approx(2 * dense_slack(10**11, ideal, 1e-5), rel=1e-3)
    assert 0 < paid - epsilon_after(spec, 1000, 1e-5) < 1e-3 * ideal


@pytest.mark.false_alarm(2e-9)  # two of 1e-9
def test_the_low_bits_do_not_tell_a_total_from_zero():
    """The attack on y = fl(m + z) in float32: small y keep the binary grid of m. Here both worlds
    have the same support, and the counts of cells are those of the rounded Gaussian."""
    m = DPSGD(clip=1.0, noise_multiplier=20.0, expected_batch_size=1, dimension=10_000)
    total = np.full(10_000, 2.0**-7 / 3)
    grid = dense_grid(20.0)
    cells = [m.release_part(t, SecureNoise(), 0, 0) / grid for t in (total, np.zeros(10_000))]
    assert all((c == np.rint(c)).all() for c in cells)
    for c in cells:
        residues = np.bincount(c.astype(np.int64) % 16, minlength=16)
        assert stats.chisquare(residues).pvalue > 1e-9
