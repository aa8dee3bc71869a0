r"""An epsilon that is at least spent, from how well a test tells two neighbouring data sets apart.

A test that says "present" of a share FPR of the runs without a row and "absent" of a share FNR of the
runs with it obeys, under (epsilon, delta) (Kairouz, Oh, Viswanath 2015, Theorem 2.1),

    1 - FNR <= e^epsilon FPR + delta,        1 - FPR <= e^epsilon FNR + delta.

Upper confidence limits of both rates give a lower bound on epsilon. Under mu-Gaussian privacy (Dong,
Roth, Su 2019, Definition 2.1) more follows from the same limits (Nasr et al. 2023, "Tight auditing of
differentially private machine learning"):

    mu >= Phi^-1(1 - FPR) - Phi^-1(FNR),

and the epsilon of a smaller mu is smaller. This one assumes that the trade-off has the form of a
Gaussian: of every step without sampling, whatever the deviation of its noise is; not of sampled ones.

An audit in one run guesses r of m fair coins, each of which put a row in or left it out. With W of
Binomial(r, e^epsilon / (1 + e^epsilon)), v right guesses or more have a probability of at most

    P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i

(Steinke, Nasr, Jagielski 2023, arXiv:2305.08846, Theorem 5.2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

TRIED = 400
"""Thresholds that are tried on the first half of the runs."""


class Bound(NamedTuple):
    """What a test shows.

    Attributes:
      epsilon: a lower bound at the delta that was given; 0 where nothing is shown.
      confidence: of the two limits on error rates together, hence of the bound.
      threshold: scores above it are called "present"; of drawn rows, their share at least.
      false_positive_rate: upper limit.
      false_negative_rate: upper limit.
    """

    epsilon: float
    confidence: float
    threshold: float
    false_positive_rate: float
    false_negative_rate: float


def upper_limit(errors: np.ndarray | int, trials: int, alpha: float) -> np.ndarray:
    """Returns the share that Clopper and Pearson's one-sided interval ends at.

    Guarantee: below the true share with a probability of at most `alpha`.

    >>> float(upper_limit(3, trials=3, alpha=0.05)), round(float(upper_limit(0, 3, 0.125)), 9)
    (1.0, 0.5)
    """
    from scipy.stats import beta

    errors = np.asarray(errors)
    limit = beta.ppf(1 - alpha, errors + 1, np.maximum(trials - errors, 1))
    return np.where(errors < trials, limit, 1.0)


def epsilon_of_rates(fpr: np.ndarray, fnr: np.ndarray, delta: float) -> np.ndarray:
    """Returns the larger epsilon of the two inequalities above, at least 0; both rates are above 0.

    >>> round(float(epsilon_of_rates(np.array(0.1), np.array(0.2), delta=0.1)), 6)  # log(0.7 / 0.1)
    1.94591
    """
    with np.errstate(divide="ignore"):  # the logarithm of 0
        shares = [np.log(np.maximum(1 - delta - a, 0) / b) for a, b in ((fnr, fpr), (fpr, fnr))]
    return np.maximum(np.maximum(*shares), 0.0)


def mu_of_rates(fpr: np.ndarray, fnr: np.ndarray) -> np.ndarray:
    """Returns the mu above, at least 0."""
    from scipy.special import ndtri

    return np.maximum(-ndtri(np.asarray(fpr)) - ndtri(np.asarray(fnr)), 0.0)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Returns the exact epsilon of mu-Gaussian privacy at `delta` > 0."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    return float(get_epsilon_gaussian(1 / mu, delta)) if mu > 1e-6 else 0.0


def lower_bound(
    absent: np.ndarray, present: np.ndarray, delta: float, confidence: float, gaussian: bool
) -> Bound:
    """Chooses a threshold on the first half of the scores and tests it on the second.

    Guarantee: above the true epsilon with a probability of at most 1 - `confidence`, where the scores
    are independent and, with `gaussian`, the trade-off is that of a Gaussian mechanism.

    Args:
      absent: a score of each run without the row, float64 [n].
      present: of each run with it, float64 [n]; larger ones speak for the row.
      delta: in [0, 1).
      confidence: in (0, 1).
      gaussian: whether the Gaussian bound counts too; it needs delta > 0.
    """
    half = len(absent) // 2
    threshold = _chosen(absent[:half], present[:half], delta, confidence, gaussian)
    fpr, fnr = _limits(absent[half:], present[half:], np.array([threshold]), confidence)
    epsilon = float(epsilon_of_rates(fpr, fnr, delta)[0])
    if gaussian:  # of the same two limits, so that both bounds hold together
        epsilon = max(epsilon, epsilon_of_mu(float(mu_of_rates(fpr, fnr)[0]), delta))
    return Bound(epsilon, confidence, threshold, float(fpr[0]), float(fnr[0]))


def _chosen(
    absent: np.ndarray, present: np.ndarray, delta: float, confidence: float, gaussian: bool
) -> float:
    shares = 1 / (1 + np.exp(-np.linspace(-9, 9, TRIED + 1)))  # also far out
    tried = np.quantile(np.concatenate([absent, present]), shares)
    fpr, fnr = _limits(absent, present, tried, confidence)
    epsilons = epsilon_of_rates(fpr, fnr, delta)
    best = int(np.argmax(epsilons))
    if gaussian:
        mus = mu_of_rates(fpr, fnr)
        steep = int(np.argmax(mus))
        if epsilon_of_mu(float(mus[steep]), delta) > epsilons[best]:
            best = steep
    return float(tried[best])


def _limits(
    absent: np.ndarray, present: np.ndarray, thresholds: np.ndarray, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns upper limits of both error rates at each threshold; a pair fails by 1 - confidence."""
    alpha = (1 - confidence) / 2
    below = [np.searchsorted(np.sort(x), thresholds, side="right") for x in (absent, present)]
    fpr = upper_limit(len(absent) - below[0], len(absent), alpha)
    return fpr, upper_limit(below[1], len(present), alpha)


def epsilon_of_guesses(
    right: int, guesses: int, coins: int, delta: float, confidence: float
) -> float:
    """Returns the smallest epsilon that so many right guesses are not unlikely under, at least 0.

    Guarantee: above the true epsilon with a probability of at most 1 - `confidence`, where the coins
    are fair, secret and independent, and guesses follow from what was released.

    Args:
      right: v, of the guesses.
      guesses: r, at most `coins`.
      coins: m.
      delta: in [0, 1).
      confidence: in (0, 1).

    >>> round(epsilon_of_guesses(100, 100, 100, delta=0.0, confidence=0.95), 4)  # q^100 = 0.05
    3.493
    """
    low, high = 0.0, 50.0
    if _likely(right, guesses, coins, delta, low) > 1 - confidence:
        return low
    while high - low > 1e-9:
        middle = (low + high) / 2
        above = _likely(right, guesses, coins, delta, middle) > 1 - confidence
        low, high = (low, middle) if above else (middle, high)
    return low


def _likely(right: int, guesses: int, coins: int, delta: float, epsilon: float) -> float:
    from scipy.stats import binom

    share = 1 / (1 + np.exp(-epsilon))
    below = binom.pmf(np.arange(right)[::-1], guesses, share).cumsum()  # P[v - i <= W < v]
    steepest = float((below / np.arange(1, right + 1)).max(initial=0.0))
    return float(binom.sf(right - 1, guesses, share)) + 2 * coins * delta * steepest
