"""Lower bounds on epsilon against formulas written out here, and how often they are wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import beta, norm

from hf_dpzero.auditing.bounds import (
    epsilon_of_guesses,
    epsilon_of_mu,
    epsilon_of_rates,
    lower_bound,
    mu_of_rates,
    upper_limit,
)


def test_limits_in_closed_form():
    """No error in n: (1 - p)^n = alpha. All but one: 1 - p^n = alpha. All: 1."""
    assert upper_limit(0, 100, 0.025) == pytest.approx(1 - 0.025 ** (1 / 100))
    assert upper_limit(99, 100, 0.025) == pytest.approx(0.975 ** (1 / 100))
    assert upper_limit(100, 100, 0.025) == 1


@pytest.mark.parametrize("confidence", [0.95, 1 - 1e-6])
@pytest.mark.parametrize(("fp", "fn", "delta"), [(50, 100, 1e-5), (400, 10, 1e-2), (0, 0, 0.0)])
def test_the_bound_is_that_of_two_clopper_pearson_limits(confidence, fp, fn, delta):
    """As jax-privacy writes it: both limits at alpha / 2, the larger of the two logarithms."""
    n, alpha = 1000, 1 - confidence
    absent, present = np.zeros(2 * n), np.ones(2 * n)
    for half in (0, n):
        absent[half : half + fp], present[half : half + fn] = 1, 0
    bound = lower_bound(absent, present, delta, confidence, gaussian=False)
    fpr = beta.ppf(1 - alpha / 2, fp + 1, n - fp)
    fnr = beta.ppf(1 - alpha / 2, fn + 1, n - fn)
    assert (bound.false_positive_rate, bound.false_negative_rate) == pytest.approx((fpr, fnr))
    wanted = max(math.log((1 - delta - fnr) / fpr), math.log((1 - delta - fpr) / fnr))
    assert bound.epsilon == pytest.approx(wanted) and wanted > 1


def test_rates_that_show_nothing_bound_nothing():
    fpr, fnr = np.array([0.5, 1.0, 0.9]), np.array([0.5, 0.01, 0.9])
    assert epsilon_of_rates(fpr, fnr, 1e-5).tolist() == [0, 0, 0]
    assert mu_of_rates(fpr, fnr).tolist()[0] == 0 and mu_of_rates(fpr, fnr)[2] == 0
    same = np.random.default_rng(1).normal(size=2000)
    assert lower_bound(same, same, 1e-5, 0.95, gaussian=True).epsilon == 0


@pytest.mark.parametrize("mu", [0.27, 1.0, 3.0])
def test_mu_and_its_epsilon(mu):
    """Dong, Roth, Su 2019, Corollary 2.13, solved for delta."""
    rate = norm.cdf(-mu / 2)
    assert mu_of_rates(rate, rate) == pytest.approx(mu)
    e = epsilon_of_mu(mu, 1e-5)
    delta = norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2)
    assert delta == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.false_alarm(0)  # a fixed seed
@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
def test_bounds_are_wrong_no_more_often_than_they_say(mu):
    """Of 200 at 95 % at most 10 are expected above the truth; 25 would be 4.8 deviations more."""
    rng, truth = np.random.default_rng(7), epsilon_of_mu(mu, 1e-5)
    sure, wrong = [], 0
    for _ in range(200):
        absent, present = rng.normal(size=400), mu + rng.normal(size=400)
        wrong += lower_bound(absent, present, 1e-5, 0.95, gaussian=True).epsilon > truth
        sure.append(lower_bound(absent, present, 1e-5, 1 - 1e-6, gaussian=True).epsilon)
    assert wrong < 25 and max(sure) <= truth


@pytest.mark.parametrize("delta", [0.0, 1e-4])
@pytest.mark.parametrize(("right", "guesses", "coins"), [(34, 40, 100), (90, 100, 100)])
def test_guesses_bound_epsilon_where_their_probability_is_what_is_left(
    right, guesses, coins, delta
):
    """Steinke, Nasr, Jagielski 2023, Theorem 5.2, summed term by term."""
    epsilon = epsilon_of_guesses(right, guesses, coins, delta, 0.95)
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    law = [math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(guesses + 1)]
    steps = [sum(law[right - i : right]) / i for i in range(1, right + 1)]
    assert sum(law[right:]) + 2 * coins * delta * max(steps) == pytest.approx(0.05)
    assert (epsilon > 0.5) and epsilon_of_guesses(right, guesses, coins, 0.3, 0.95) == 0


def test_guesses_that_show_nothing_bound_nothing():
    assert epsilon_of_guesses(50, 100, 100, 0.0, 0.95) == 0
    assert epsilon_of_guesses(0, 0, 0, 0.0, 0.95) == 0


@pytest.mark.false_alarm(0)  # a fixed seed
def test_bounds_of_coins_told_truly_with_a_known_probability():
    """Randomized response of 500 coins: below its epsilon in 95 of 100 runs, and not by much."""
    draws, truth = np.random.default_rng(5), math.exp(1.0) / (1 + math.exp(1.0))
    right = draws.binomial(500, truth, size=400)
    found = np.array([epsilon_of_guesses(int(v), 500, 500, 0.0, 0.95) for v in right])
    assert (found > 1.0).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert np.median(found) > 0.8
    twice = [
        epsilon_of_guesses(int(v), 500, 500, 0.0, 1 - 1e-6) for v in draws.binomial(500, 0.9, 20)
    ]
    assert min(twice) > 1.0  # epsilon 2.2 and a claim of 1
