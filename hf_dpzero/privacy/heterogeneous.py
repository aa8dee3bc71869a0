r"""Epsilon of Poisson-subsampled Gaussians with many different noise multipliers, by one FFT.

dp-accounting composes distributions of the privacy loss (PLDs) one after another, which takes minutes
for hundreds of different steps. Here all of them are discretised on one grid, their Fourier transforms
are raised to their counts and multiplied, and one transform goes back.

*Discretisation.* A step's loss between two grid points is split over the two, such that its mass under
both distributions is kept: the pessimistic "connect the dots" estimate (Doroshenko, Ghazi, Kamath, Kumar
and Manurangsi 2022, arXiv:2207.04380), which dp-accounting uses too. The mass is computed from the
Gaussian's distribution function on either side, not from differences of hockey-stick divergences, so
that rounding moves a tiny mass by one grid point and never adds any. What lies below the grid's first
point counts at it; what lies above its last counts as infinite.

*Truncation.* A Chernoff bound on the composed loss gives a window outside of which it has a mass of at
most `_OUTSIDE` of delta. The transforms are cyclic with at least that length: mass that leaves the
window may come back anywhere, so that mass is added to what is infinite.

*Grouping.* More than `MOST_LEVELS` different multipliers are joined into groups that all count as their
smallest multiplier, which can only raise epsilon: less noise is what a step with more is a
post-processing of. Groups are chosen such that each adds equally much to the sum of e^(1/sigma^2) - 1,
on which epsilon mostly depends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_LEVELS = 256
"""So many different noise multipliers are told apart; with 10^4 in truth, epsilon rises by below 1 %."""

_DEVIATIONS = 9.0
"""A step's noise beyond so many standard deviations (1e-19 of it) has an infinite loss."""

_OUTSIDE = 1e-6
"""Share of delta that the composed loss may have outside the window."""

Level = tuple[float, int]
"""(noise multiplier, number of steps)."""


@dataclass(frozen=True)
class _Loss:
    """A discretised loss: masses at (first + i) grid, and at infinity."""

    first: int
    masses: np.ndarray
    infinite: float


def grouped(multipliers: np.ndarray, most: int = MOST_LEVELS) -> list[Level]:
    """Returns at most `most` levels that stand for all steps, each with no more noise than those have.

    Args:
      multipliers: sigma of each step, > 0, any order, float64 [T], T >= 1.
      most: number of levels, >= 1.

    Returns:
      (sigma, count) with rising sigma; counts add up to T.

    >>> grouped(np.array([2.0, 1.0, 2.0]))
    [(1.0, 1), (2.0, 2)]
    >>> grouped(np.array([2.0, 1.0, 2.0]), most=1)
    [(1.0, 3)]
    """
    values, counts = np.unique(np.asarray(multipliers, dtype=np.float64), return_counts=True)
    if len(values) > most:
        values, counts = _joined(values, counts, most)
    return [(float(s), int(n)) for s, n in zip(values, counts, strict=True)]


def _joined(values: np.ndarray, counts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds the partition with the smallest excess per group that needs no more than `most` groups."""
    cost = np.expm1(np.minimum(values, 2.0**25) ** -2.0 * np.where(values < 0.2, 25 * values**2, 1))
    sums = np.concatenate([[0.0], np.cumsum(cost * counts)])
    steps = np.concatenate([[0], np.cumsum(counts)])
    low, high = 0.0, float(cost[0] * steps[-1])
    starts = np.array([0])
    for _ in range(40):
        middle = (low + high) / 2
        found = _starts(cost, sums, steps, middle, most)
        if found is None:
            low = middle
        else:
            high, starts = middle, found
    return values[starts], np.diff(np.append(steps[starts], steps[-1]))


def _starts(
    cost: np.ndarray, sums: np.ndarray, steps: np.ndarray, excess: float, most: int
) -> np.ndarray | None:
    """Returns the first index of each group whose excess over its own costs stays within `excess`."""
    starts: list[int] = []
    i = 0
    while i < len(cost):
        if len(starts) == most:
            return None
        starts.append(i)
        over = cost[i] * (steps[i + 1 :] - steps[i]) - (sums[i + 1 :] - sums[i])
        i += max(1, int(np.searchsorted(over, excess, side="right")))
    return np.array(starts)


def composed_epsilon(steps: Sequence[tuple[float, float, int]], delta: float, grid: float) -> float:
    """Returns a bound on epsilon of Poisson-subsampled Gaussians on sums that an example moves by 1.

    For neighbours that differ by one example more or less, or by one that contributes zero.

    Args:
      steps: of each kind the noise multiplier > 0, q, the probability in (0, 1] that an example is in a
        step's batch, and how many there are, >= 1.
      delta: in (0, 1).
      grid: spacing of losses, > 0; a coarser one gives a looser bound.

    Returns:
      Epsilon >= 0, or infinity where no finite loss on the grid has so small a delta.
    """
    kinds = [(_losses(sigma, q, grid), count) for sigma, q, count in steps]
    return max(
        _epsilon([(losses[way], count) for losses, count in kinds], delta, grid) for way in (0, 1)
    )


def _losses(sigma: float, q: float, grid: float) -> tuple[_Loss, _Loss]:
    """Returns losses of (1-q) N(0) + q N(1) against N(0), and the reverse; noise sigma."""
    from scipy.special import ndtr

    tail = _DEVIATIONS * sigma
    ends = [_log_ratio(x, sigma, q) for x in (-tail, 1 + tail)]
    first, last = math.ceil(ends[0] / grid), math.ceil(ends[1] / grid)
    if q < 1:
        first = max(first, math.floor(math.log1p(-q) / grid) + 1)
    last = max(last, first + 1)
    x = _where(np.arange(first, last + 1) * grid, sigma, q)
    plain, moved = _mass_between(x / sigma), _mass_between((x - 1) / sigma)
    mixed = (1 - q) * plain + q * moved
    below = np.array([ndtr(x[0] / sigma), ndtr((x[0] - 1) / sigma)])
    above = np.array([ndtr(-x[-1] / sigma), ndtr((1 - x[-1]) / sigma)])
    weights = np.array([1 - q, q])
    removal = _split(first, mixed, plain, float(weights @ below), grid)
    addition = _split(-last, plain[::-1], mixed[::-1], float(above[0]), grid)
    removed = _Loss(first, removal, float(weights @ above))
    if q < 1:  # the loss of an addition stays below -log(1 - q), which is before the next point
        return removed, _Loss(-last, np.append(addition, float(below[0])), 0.0)
    return removed, _Loss(-last, addition, float(below[0]))


def _log_ratio(x: float, sigma: float, q: float) -> float:
    """Returns the log of the mixture's density over N(0)'s at x."""
    exponent = (x - 0.5) / sigma**2
    if exponent > 30:
        return exponent + math.log(q) + math.log1p((1 - q) / q * math.exp(-exponent))
    return math.log1p(q * math.expm1(exponent))


def _where(losses: np.ndarray, sigma: float, q: float) -> np.ndarray:
    """Inverts the log density ratio of the subsampled Gaussian, at losses > log(1 - q)."""
    inner = np.where(
        losses > 30,
        losses - math.log(q) + np.log1p(-(1 - q) * np.exp(-losses)),
        # a grid point that rounds to log(1 - q) itself has no x: it gets a very small one
        np.log1p(np.maximum(np.expm1(np.minimum(losses, 30.0)) / q, -1 + 1e-300)),
    )
    return np.asarray(sigma**2 * inner + 0.5)


def _mass_between(z: np.ndarray) -> np.ndarray:
    """Returns the standard normal mass between neighbouring points, from the smaller tail."""
    from scipy.special import ndtr

    lower, upper = ndtr(z), ndtr(-z)
    return np.where(z[:-1] > 0, upper[:-1] - upper[1:], lower[1:] - lower[:-1])


def _split(
    first: int, mass: np.ndarray, other: np.ndarray, below: float, grid: float
) -> np.ndarray:
    """Puts each interval's mass on its two ends; `other` is its mass under the other distribution."""
    with np.errstate(invalid="ignore", over="ignore"):
        start = np.exp(np.arange(first, first + len(mass)) * grid)
        share = (mass - other * start) / -math.expm1(-grid)
    # beyond what a float holds all of it counts with the larger loss
    right = np.where(np.isfinite(start), np.clip(np.nan_to_num(share, nan=0.0), 0.0, mass), mass)
    masses = np.zeros(len(mass) + 1)
    masses[:-1] += mass - right
    masses[1:] += right
    masses[0] += below
    return masses


def _epsilon(losses: Sequence[tuple[_Loss, int]], delta: float, grid: float) -> float:
    """Returns epsilon of the composition of discretised losses, `count` of each."""
    from scipy.fft import irfft, next_fast_len, rfft

    infinite = -math.expm1(math.fsum(n * math.log1p(-loss.infinite) for loss, n in losses))
    low, high = _window(losses, delta, grid)
    size = next_fast_len(high - low + 1, real=True)
    product = np.ones(size // 2 + 1, dtype=np.complex128)
    for loss, count in losses:
        product *= _power(rfft(_folded(loss, size)), count)
    composed = np.roll(irfft(product, size), -(low % size))
    return _epsilon_of(low, composed, infinite + _OUTSIDE * delta, delta, grid)


def _folded(loss: _Loss, size: int) -> np.ndarray:
    """Adds up masses by the index of their loss modulo `size`."""
    start = loss.first % size
    padded = np.zeros(-(-(start + len(loss.masses)) // size) * size)
    padded[start : start + len(loss.masses)] = loss.masses
    return padded.reshape(-1, size).sum(axis=0)


def _power(values: np.ndarray, exponent: int) -> np.ndarray:
    """Returns values ** exponent by repeated squaring: zeros stay zeros."""
    result = np.ones_like(values)
    while exponent:
        if exponent & 1:
            result = result * values
        exponent >>= 1
        values = values * values if exponent else values
    return result


def _window(losses: Sequence[tuple[_Loss, int]], delta: float, grid: float) -> tuple[int, int]:
    """Returns grid indices between which the composed loss lies but for `_OUTSIDE` delta."""
    points = [(np.arange(len(a.masses)) + a.first, a.masses, n) for a, n in losses]
    means = [float(index @ masses) for index, masses, _ in points]
    variance = sum(
        n * float(((index - mean) ** 2) @ masses)
        for (index, masses, n), mean in zip(points, means, strict=True)
    )
    bits = math.log(2 / (_OUTSIDE * delta))
    best = math.sqrt(2 * bits / max(variance, 1e-12))
    low = sum(n * a.first for a, n in losses)
    high = sum(n * (a.first + len(a.masses) - 1) for a, n in losses)
    widest = bits / max(len(a.masses) for a, _ in losses)
    orders = [best * x for x in (0.25, 0.5, 0.7, 1.0, 1.4, 2.0)] + [widest * x for x in (0.5, 1, 2)]
    for size in orders:  # Chernoff bounds
        for order in (size, -size):
            cumulants = math.fsum(n * _log_mean_exp(index, order, w) for index, w, n in points)
            bound = (cumulants + bits) / order
            if order > 0 and math.isfinite(bound):
                high = min(high, math.ceil(bound))
            elif math.isfinite(bound):
                low = max(low, math.floor(bound))
    return low, max(high, low + 1)


def _log_mean_exp(index: np.ndarray, order: float, weights: np.ndarray) -> float:
    exponents = index * order
    top = float(exponents.max())
    return top + math.log(float(np.exp(exponents - top) @ weights) + 1e-300)


def _epsilon_of(
    first: int, masses: np.ndarray, infinite: float, delta: float, grid: float
) -> float:
    """Returns the smallest epsilon >= 0 with hockey-stick divergence at most delta."""
    losses = (np.arange(len(masses)) + first) * grid
    start, stop = np.searchsorted(losses, [0.0, 600.0], side="right")
    infinite += float(masses[stop:].sum())
    losses, masses = losses[start:stop], masses[start:stop]
    if infinite >= delta:
        return math.inf
    if not len(losses):
        return 0.0
    tail = np.cumsum(masses[::-1])[::-1]
    scaled = np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
    at = infinite + tail - np.exp(losses) * scaled  # divergence at each loss itself
    if not (at <= delta).any():
        return math.inf
    i = int(np.argmax(at <= delta))
    # between the loss before and this one the divergence is infinite + tail_i - e^epsilon scaled_i
    if scaled[i] <= 0:
        return float(losses[i])
    ratio = (infinite + tail[i] - delta) / scaled[i]
    return float(min(max(math.log(ratio), 0.0), losses[i])) if ratio > 1 else 0.0
