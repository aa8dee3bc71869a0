"""The second accountant: around exact values and the first accountant's, on every kind that it knows."""

from __future__ import annotations

import math

import pytest
from scipy import optimize, stats
from step_specs import spec

from hf_dpzero.privacy.accounting import epsilon_together
from hf_dpzero.privacy.bracket import epsilon_bracket

N = 10_000


def exact_gaussian(mu: float, delta: float) -> float:
    """Balle and Wang 2018, equation 6, with mu = sensitivity / sigma."""

    def excess(e: float) -> float:
        tails = stats.norm.logcdf([mu / 2 - e / mu, -mu / 2 - e / mu])
        return float(stats.norm.cdf(mu / 2 - e / mu) - math.exp(e + tails[1])) - delta

    return float(optimize.brentq(excess, 0, 100))


def test_full_batches_are_one_gaussian():
    """100 steps of sigma 30 and 50 of sigma 20, sensitivity 1: mu^2 = 100 / 900 + 50 / 400."""
    full = {"sampling": "full_batch", "num_examples": N, "batch_size": N}
    parts = [(spec(**full, noise_multiplier=30.0), 100), (spec(**full, noise_multiplier=20.0), 50)]
    low, high = epsilon_bracket(parts, 1e-5, about=2.0)
    exact = exact_gaussian((100 / 900 + 50 / 400) ** 0.5, 1e-5)
    assert low < exact < high < 1.02 * low
    twice = {**full, "relation": "replace_one", "noise_multiplier": 60.0}
    low, high = epsilon_bracket([(spec(**twice), 100)], 1e-5, about=2.0)
    assert low < exact_gaussian(1 / 3, 1e-5) < high < 1.02 * low


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "relation"),
    [(1 / 16, 3.48, 200, "add_or_remove_one"), (1 / 128, 0.3, 3, "add_or_remove_one"),
     (0.016, 2.0, 1000, "add_or_remove_one"), (0.3, 5.0, 200, "replace_one"),
     (0.01, 0.8, 30, "replace_special")],
)  # fmt: skip
def test_the_first_accountant_lies_in_the_middle(q, sigma, steps, relation):
    step = spec(num_examples=N, batch_size=q * N, noise_multiplier=sigma, relation=relation)
    claim = epsilon_together(((step, steps),), 1e-5)
    low, high = epsilon_bracket([(step, steps)], 1e-5, about=claim)
    assert low < claim < high < 1.02 * low
    assert claim == pytest.approx((low + high) / 2, rel=1e-3)


def test_different_steps_and_batches_of_a_fixed_size():
    steps = [
        (spec(num_examples=N, batch_size=100, noise_multiplier=s), n) for s, n in ((1, 8), (2, 20))
    ]
    claim = epsilon_together(tuple(steps), 1e-5)
    low, high = epsilon_bracket(steps, 1e-5, about=claim)
    assert low < claim < high < 1.02 * low
    fixed = spec(
        sampling="fixed_size_without_replacement", relation="replace_one",
        num_examples=N, batch_size=100, noise_multiplier=2.0,
    )  # fmt: skip
    assert epsilon_bracket([(fixed, 50)], 1e-5, 1.0)[0] < epsilon_together(((fixed, 50),), 1e-5)


def test_what_it_does_not_know_and_no_steps():
    step = spec(num_examples=N, batch_size=100, noise_multiplier=2.0)
    assert epsilon_bracket([(step, 0)], 1e-5, 0.0) == (0.0, 0.0)
    assert epsilon_bracket([(step, 3)], 1e-11, 1.0) is None
    schedule = [(spec(noise_multiplier=2.0 + i), 1) for i in range(17)]
    assert epsilon_bracket(schedule, 1e-5, 1.0) is None
    laplace = spec(num_examples=N, batch_size=100, noise_multiplier=2.0, distribution="laplace")
    capped = spec(sampling="truncated_poisson", num_examples=N, batch_size=100, max_batch_size=200)
    assert (
        epsilon_bracket([(laplace, 3)], 1e-5, 1.0)
        is epsilon_bracket([(capped, 3)], 1e-5, 1.0)
        is None
    )
