"""Noise that ends somewhere: an epsilon so large that the draws nobody sees would have to pay for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_dpzero.privacy.discretization import DENSE_TAILS, correlated_draws, dense_slack
from hf_dpzero.privacy.mechanisms import DPSGD
from hf_dpzero.privacy.noise import normal_quantiles
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FullBatchSampler


def plan(noise_multiplier: float) -> PrivacyPlan:
    mechanism = DPSGD(
        clip=1.0, noise_multiplier=noise_multiplier, expected_batch_size=10, dimension=10**6
    )
    sampler = FullBatchSampler(num_examples=10, expected_batch_size=10)
    return PrivacyPlan(mechanism=mechanism, sampler=sampler, steps=1)


def test_runs_that_computed_noise_cannot_make_overlap_have_no_epsilon():
    """A row moves the sum by 20 s and noise ends at 16.1 s: epsilon 285 of N(0, s^2) does not hold."""
    words = np.array([0, 1], dtype=np.uint64)
    ends = normal_quantiles(words, lambda count: np.zeros(count, dtype=np.uint64))
    noise_multiplier = 0.05
    assert 2 * np.abs(ends).max() < 2 / noise_multiplier  # replaced by its opposite: disjoint
    assert np.abs(ends).max() < 1 / noise_multiplier  # and told by most draws where it was added
    assert plan(noise_multiplier).epsilon(1e-5) == math.inf
    assert 4 < plan(1.0).epsilon(1e-5) < 6


def test_a_target_beyond_what_is_covered_is_met_by_less():
    calibrated = plan(1.0).calibrate(epsilon=300.0, delta=1e-5)
    assert calibrated.epsilon(1e-5) < DENSE_TAILS


@pytest.mark.parametrize("draws", [1, 10**6, 10**13])
def test_what_is_covered_is_paid_for(draws):
    """Events of either run: draws beyond 16 deviations, Laplace draws beyond 128, a long Z*."""
    delta = 1e-6
    epsilon = DENSE_TAILS - math.log(draws / delta)
    tails = draws * (math.erfc(16 / math.sqrt(2)) + math.exp(-128)) + math.exp(-256)
    slack = dense_slack(draws, epsilon * (1 - 1e-9), delta)
    failure = 2.0**-10 * delta * math.exp(-(epsilon + 1))
    both = 1 + math.exp(epsilon + slack)
    assert tails * both < 1e-3 * delta
    whole = math.exp(slack) * (1 - 2.0**-8) * delta + (failure + tails) * both
    assert slack < 2.0**-9 and whole <= delta
    assert dense_slack(draws, epsilon + 1e-6, delta) == math.inf


def test_the_squares_of_a_run_exceed_the_bound_on_them_with_a_probability_that_is_counted():
    """By Chernoff's bound, P[sum Z^2 > x] <= exp(-(x - N - N log(x / N)) / 2), here below e^-256."""
    for count in (1, 10, 1000, 6000, 10**5, 10**9):
        bound = 1.25 * count + 1536
        assert (bound - count - count * math.log(bound / count)) / 2 > 256
        assert correlated_draws(1, count, 1.0) >= count
