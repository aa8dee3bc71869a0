"""The exponential mechanism over the vertices of a simplex, and what a composition of its draws costs.

A hidden log-weight s_j belongs to each vertex; a draw is vertex j with probability proportional to
exp(s_j). Entropic mirror descent keeps its iterate as such log-weights, and lets only draws out.

*One draw.* Let the scores of neighbours differ by d_j, and eta = max_j d_j - min_j d_j. The log
likelihood ratio of vertex j is d_j plus a constant: it lies in [-eta, eta] and its range is eta. Hence a
draw is eta-DP, has bounded range eta, and is eta^2 / 8-zCDP (Cesar and Rogers 2021, "Bounding,
Concentrating, and Truncating: Unifying Privacy Loss Composition for Data Analytics", Lemma 3.2). With
|d_j| <= Delta, eta is 2 Delta; where all d_j have one sign it is Delta.

*An average.* A draw from a weighted average of softmaxes whose scores all differ by the same d_j between
neighbours. Each softmax's likelihood ratio is exp(d_j) times its ratio of normalizers, which lies in
[exp(-max d), exp(-min d)], and so does the average of these ratios: the log ratio is within eta of 0, as
before, but its range may be 2 eta. The draw is eta-DP and eta^2 / 2-zCDP.

*Composition* is adaptive: later scores may depend on earlier draws. zCDP adds up and dp-accounting turns
it into epsilon; so do pure epsilons, and the smaller of the two is reported. (The best composition of
pairs of distributions with bounded range, Dong, Durfee and Rogers 2020, does not hold adaptively.)

*Floating point.* A draw is exact for the scores it is given (`NoiseSource.vertices`). `HiddenScores`
puts each increment on a public grid, finer than its sensitivity by 2^22, where sums are exact: what
neighbours have in common cancels, and rounding widens the range by a factor below 1 + `ROUNDING`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.described import bisected
from hf_dpzero.privacy.noise import NoiseSource

ROUNDING = 2.0**-20
"""Relative margin on the range for increments rounded to the grid and summed in floating point."""

_GRID, _MANTISSA = 2.0**-22, 2.0**53


@dataclass(frozen=True, kw_only=True)
class VertexDraw:
    """One draw of a vertex, as the accounting sees it.

    Where examples have places in forward passes, a row displaced by one more is part of what that one
    moves (`batches.placement`): scale what each adds by 1 / (1 + 2^-8), as `group_losses` does.

    Attributes:
      sensitivity: Delta, how much one example can move any one score; 0 for scores without data.
      one_sided: an example moves all scores the same way (one more example, which only ever raises
        scores, and displaces none); halves the range.
      averaged: the draw is from an average over steps of the softmaxes instead of from the last one.

    Raises:
      ValueError: a sensitivity that is negative or not finite.
    """

    sensitivity: float
    one_sided: bool = False
    averaged: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sensitivity) and self.sensitivity >= 0):
            raise ValueError(
                f"sensitivity={self.sensitivity} of the scores must be finite and >= 0; clip what an "
                "example adds to them."
            )

    @property
    def score_range(self) -> float:
        """Returns eta: the range of the scores' differences between neighbours, rounding included."""
        return self.sensitivity * (1 if self.one_sided else 2) * (1 + ROUNDING)

    @property
    def pure_epsilon(self) -> float:
        """Returns eta: a draw is eta-DP."""
        return self.score_range

    @property
    def rho(self) -> float:
        """Returns the zCDP of a draw: eta^2 / 8, or eta^2 / 2 for an average."""
        return self.score_range**2 / (2 if self.averaged else 8)


Draws = Sequence[tuple[VertexDraw, int]]
"""Kinds of draws and how many of each."""


def total_rho(draws: Draws) -> float:
    """Returns the zCDP of all draws together; it adds to that of other releases about the same data."""
    return math.fsum(count * draw.rho for draw, count in draws)


def draws_epsilon(draws: Draws, delta: float) -> float:
    """Returns epsilon >= 0 at `delta` of all draws together, an upper bound.

    Args:
      draws: kinds and counts; the scores may follow from earlier draws.
      delta: in [0, 1); 0 gives the pure epsilon.

    Raises:
      ValueError: a delta out of range.
    """
    pure = math.fsum(count * draw.pure_epsilon for draw, count in draws)
    return min(pure, zcdp_epsilon(total_rho(draws), delta))


@lru_cache(maxsize=4096)
def zcdp_epsilon(rho: float, delta: float) -> float:
    """Returns epsilon at `delta` of a rho-zCDP mechanism, at orders around the best one.

    Args:
      rho: >= 0.
      delta: in [0, 1); 0 gives infinity unless rho is 0.

    Returns:
      Epsilon, at most rho + 2 sqrt(rho log(1 / delta)).

    Raises:
      ValueError: a negative rho or a delta out of range.
    """
    if not (rho >= 0 and 0 <= delta < 1):
        raise ValueError(f"rho={rho} must be >= 0 and delta={delta} in [0, 1).")
    if rho == 0:
        return 0.0
    if delta == 0 or math.isinf(rho):
        return math.inf
    from dp_accounting import rdp
    from dp_accounting.dp_event import ZCDpEvent

    best = math.sqrt(math.log(1 / delta) / rho)  # of the simpler bound: alpha - 1
    accountant = rdp.RdpAccountant(orders=[1 + best * 2 ** (i / 64) for i in range(-192, 193)])
    accountant.compose(ZCDpEvent(rho=rho))
    closed = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    return min(float(accountant.get_epsilon(delta)), closed)


@lru_cache(maxsize=4096)
def zcdp_rho(epsilon: float, delta: float) -> float:
    """Returns the largest rho, to 1e-9, whose `zcdp_epsilon` is at most `epsilon`.

    Args:
      epsilon: > 0.
      delta: in (0, 1).

    Returns:
      rho >= (sqrt(epsilon + log(1/delta)) - sqrt(log(1/delta)))^2.

    Raises:
      ValueError: epsilon or delta out of range.

    >>> round(zcdp_rho(1.0, 1e-6), 4)
    0.0244
    """
    if not (math.isfinite(epsilon) and epsilon > 0 and 0 < delta < 1):
        raise ValueError(
            f"epsilon={epsilon} must be finite and positive and delta={delta} in (0, 1): vertex draws "
            "are accounted by zCDP."
        )
    root = math.sqrt(math.log(1 / delta))
    low = (math.sqrt(epsilon + root**2) - root) ** 2
    return bisected(lambda rho: zcdp_epsilon(rho, delta) <= epsilon, low, 2 * low, 1e-9)[0]


class _Hidden:
    """Neither copied nor stored."""

    __slots__ = ()  # without one here, subclasses would have a __dict__, which `vars` shows

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        # `copy` and `deepcopy` come here too
        raise TypeError("hidden scores are secret: they are neither copied nor stored.")


class HiddenScores(_Hidden):
    """Log-weights of vertices that follow private data: can be added to and drawn from, not read.

    Guarantee: with increments that one example moves by at most Delta each coordinate (given the draws),
    a draw is a `VertexDraw(sensitivity=Delta)`. There is no public attribute, no text form with numbers,
    and neither a copy nor a pickle.

    Args:
      dimension: d >= 1; all scores start at 0, the uniform distribution.
      sensitivity: Delta of one increment, > 0.
      largest: bound on the absolute value of any score at any time, public; a score beyond it is cut off
        there, which no example can make more than Delta of.

    Raises:
      ValueError: d < 1, a sensitivity out of range, or 2^30 sensitivities and more in `largest`.
    """

    __slots__ = ("_grid", "_largest", "_levels")

    def __init__(self, dimension: int, sensitivity: float, largest: float) -> None:
        if dimension < 1:
            raise ValueError(f"dimension={dimension} must be at least 1: a simplex has a vertex.")
        if not 2.0**-512 <= sensitivity <= 2.0**512:
            raise ValueError(
                f"sensitivity={sensitivity} of an increment must be positive (2^-512 to 2^512)."
            )
        self._grid = 2.0 ** math.floor(math.log2(sensitivity * _GRID))
        if not 0 <= largest < self._grid * _MANTISSA:
            raise ValueError(
                f"scores up to {largest:g} are more than 2^30 times the sensitivity {sensitivity:g} of "
                "an increment: their rounding could not be accounted for; use fewer steps or examples."
            )
        self._largest = math.floor(largest / self._grid)
        self._levels = np.zeros(dimension)

    def add_(self, increment: NDArray[np.float64]) -> None:
        """Adds a vector [d], rounded to the grid.

        Raises:
          ValueError: another shape, or a number that is not finite (clip each example's part first).
        """
        if increment.shape != self._levels.shape:
            raise ValueError(
                f"an increment of shape {increment.shape} for {len(self._levels)} vertices; give one "
                "number a vertex."
            )
        if not np.isfinite(increment).all():
            raise ValueError("an increment is not finite; clip what each example adds to it.")
        # Whole numbers below 2^53: sums are exact, so that what neighbours have in common cancels.
        moved = self._levels + np.rint(increment / self._grid)
        self._levels = np.clip(moved, -self._largest, self._largest)

    def draw(self, count: int, noise: NoiseSource, step: int, part: int = 0) -> NDArray[np.int64]:
        """Draws independent vertices, int64 [count], with P(j) proportional to exp(s_j).

        Args:
          count: how many; 0 gives none.
          noise: the source; `SecureNoise` for anything that leaves the process.
          step: matters to insecure sources only.
          part: tells apart the calls of a step; matters to insecure sources only.
        """
        return noise.vertices(self._values(), count, step, part)

    def __repr__(self) -> str:
        return f"HiddenScores(dimension={len(self._levels)})"

    def _values(self) -> NDArray[np.float64]:
        return self._levels * self._grid


class HiddenAverage(_Hidden):
    """The average over time of the softmaxes of hidden scores; hidden itself.

    Guarantee: if one example moves the scores by the same vector, at most Delta in each coordinate, from
    some time on and not before (given the draws), a draw is a
    `VertexDraw(sensitivity=Delta, averaged=True)`. The times before count as a vector of zeros, whose
    ratio 1 lies in the same interval.

    A draw takes a time at random and then a vertex of it, so it is as exact as one from `HiddenScores`.
    Memory: d numbers a time.
    """

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: list[NDArray[np.float64]] = []

    def add_(self, scores: HiddenScores) -> None:
        """Adds the present softmax of `scores` with the weight of one time."""
        self._times.append(scores._values())

    def draw(self, count: int, noise: NoiseSource, step: int) -> NDArray[np.int64]:
        """Draws `count` independent vertices of the average, int64; `step` is for insecure sources.

        Raises:
          ValueError: nothing was added yet.
        """
        if not self._times:
            raise ValueError("no scores were added: the average of nothing has no vertices.")
        times = noise.uniform(len(self._times), count, step)
        drawn = np.zeros(count, dtype=np.int64)
        for part, time in enumerate(np.unique(times).tolist(), start=1):
            at = np.flatnonzero(times == time)
            drawn[at] = noise.vertices(self._times[time], len(at), step, part)
        return drawn

    def __repr__(self) -> str:
        return f"HiddenAverage(times={len(self._times)})"
