"""One noised count: its law, what a row moves, and intervals that cover by the exact law."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hf_dpzero.privacy.counting import COVERAGE, PrivateCount
from hf_dpzero.privacy.noise import InsecureSeededNoise, SecureNoise

EPSILONS = (0.05, 0.2, 0.5, math.log(2), 1.0, 3.0, 8.0)
FALSE_ALARM = 1e-7


def law(epsilon: float, reach: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    """z and P(Z = z) = (1 - a) / (1 + a) a^|z|, a = exp(-epsilon), from the formula alone."""
    z, a = np.arange(-reach, reach + 1), math.exp(-epsilon)
    return z, (1 - a) / (1 + a) * a ** np.abs(z)


@pytest.mark.false_alarm(1e-7)
def test_the_noise_has_the_stated_law_and_no_other():
    draws = np.array([PrivateCount(0.5).release(100, SecureNoise()) for _ in range(6000)]) - 100

    def p_value(epsilon: float) -> float:
        z, mass = law(epsilon)
        inside = np.abs(z) <= 12
        expected = 6000 * np.append(mass[inside], 1 - mass[inside].sum())
        near = np.clip(draws, -13, 13)
        observed = [*(np.sum(near == k) for k in z[inside]), np.sum(np.abs(near) == 13)]
        return float(stats.chisquare(observed, expected).pvalue)

    assert p_value(0.5) > FALSE_ALARM
    assert p_value(0.4) < 1e-20 and p_value(0.6) < 1e-20


@pytest.mark.parametrize("rows_of_a_unit", [1, 3])
def test_one_unit_more_costs_at_most_epsilon_and_all_of_it(rows_of_a_unit):
    """The worst ratio of two neighbouring laws is exp(m / scale), never above exp(epsilon)."""
    for epsilon in EPSILONS:
        mechanism = PrivateCount(epsilon, sensitivity=rows_of_a_unit)
        z = np.arange(-200, 200)
        mass = mechanism.beyond(z) - mechanism.beyond(z + 1)
        kept = mass > 1e-8  # of differences of tails the others have few digits
        wanted = law(1 / mechanism.scale, 200)[1][:-1]
        np.testing.assert_allclose(mass[kept], wanted[kept], rtol=1e-6)
        spent = rows_of_a_unit / mechanism.scale
        assert epsilon * (1 - 1e-15) < spent <= epsilon


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_no_shorter_interval_of_integers_covers(epsilon):
    z, mass = law(epsilon)
    low, high = PrivateCount(epsilon).noise_interval()
    covered = mass[(z >= low) & (z <= high)].sum()
    sums = np.convolve(mass, np.ones(high - low), mode="valid") if high > low else np.zeros(1)
    assert covered >= COVERAGE > sums.max()


def test_the_interval_of_noise_covers_every_count():
    """P(count lies in the interval of its release), summed over the exact law; also at the ends."""
    for epsilon in (0.2, 1.0):
        mechanism, (z, mass) = PrivateCount(epsilon), law(epsilon, 200)
        for count in (0, 1, 7, 20):
            ends = [mechanism.count_interval(count + int(k), 20) for k in z]
            inside = np.array([low <= count <= high for low, high in ends])
            assert all(0 <= low <= high <= 20 for low, high in ends)
            assert mass[inside].sum() >= COVERAGE - 1e-12


def test_the_interval_of_noise_and_sampling_covers_every_share():
    """Over binomial counts and noise; and it is not wider than needed: two tails of at most 2.5 %."""
    rows, mechanism, (z, mass) = 12, PrivateCount(0.7), law(0.7, 60)
    released = np.arange(z[0], z[-1] + rows + 1)
    ends = np.array([mechanism.share_interval(int(r), rows) for r in released])
    missed = []
    for share in np.linspace(0.0, 1.0, 41):
        together = np.convolve(stats.binom.pmf(np.arange(rows + 1), rows, share), mass)
        below, above = together[ends[:, 1] < share].sum(), together[ends[:, 0] > share].sum()
        assert max(below, above) <= (1 - COVERAGE) / 2
        missed.append(below + above)
    assert max(missed) > 0.03


@pytest.mark.false_alarm(0)  # nothing is drawn
def test_without_noise_it_is_clopper_and_pearsons():
    """At epsilon = 60 the noise is 0 but for 1e-26."""
    for count in (0, 3, 10):
        known = stats.binomtest(count, 10).proportion_ci(method="exact")
        found = PrivateCount(60.0).share_interval(count, 10)
        assert found == pytest.approx((known.low, known.high), abs=1e-6)


def test_seeded_noise_is_repeated_and_says_so():
    noise = InsecureSeededNoise(3)
    assert PrivateCount(0.1).release(5, noise, 1) == PrivateCount(0.1).release(5, noise, 1)
    assert PrivateCount(0.1).release(5, noise, 1) != PrivateCount(0.1).release(5, noise, 2)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan, 1e-30])
def test_a_budget_that_is_none_is_refused(epsilon):
    with pytest.raises(ValueError, match="a number above 0 such as 0.5"):
        PrivateCount(epsilon)
