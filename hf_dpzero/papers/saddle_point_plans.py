"""What a run of a saddle point algorithm does and what it costs (González, Guzmán and Paquette, "Mirror
Descent Algorithms with Nearly Dimension-Independent Rates for Differentially-Private Stochastic
Saddle-Point Problems").

All plans are for replace-one neighbours with n fixed. Each example is in one batch, at a place that
follows from its number alone, so that it displaces no other row (`batches.placement`). If it is in
that of step r, the increment of that step moves by at most Delta_r in each coordinate, the scores of all
later steps by the same vector, and those of the steps up to r not at all. So the cost is that of the
draws after the worst r: as zCDP, max_r D_r (2 Delta_r)^2 / 8, D_r being the vertices drawn after step r
from simplices with two vertices or more. `privacy.mechanisms.vertex` has the proofs for a draw.

Where the paper differs: Proposition 4.1 counts T(K + 1) draws, those of one of the two players;
Proposition E.1 bounds the move of the scores by 4.5 tau alpha L0, where the two points of each gradient
and the factor C_M give (4 C_M + 2 / 2^N) tau alpha L0, up to 10; Proposition F.1 leaves the last K draws
out of its statement. Its advanced composition is loose enough to make up for much of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hf_dpzero.privacy.mechanisms.vertex import (
    ROUNDING,
    VertexDraw,
    total_rho,
    zcdp_epsilon,
    zcdp_rho,
)

if TYPE_CHECKING:
    from typing_extensions import Self  # of the standard library from Python 3.11 on

MAX_BATCH = 1 << 22
"""Largest batch; see `saddle_point.batch_gradient`."""


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """An algorithm and everything that its privacy depends on.

    Attributes:
      num_examples: n.
      dimensions: (d_x, d_y), vertices of the simplices; d_y = 1 for plain convex optimization.
      lipschitz: L0; the coordinates of each example's gradients are clipped to [-L0, L0].
      step_size: tau; 0 is allowed and learns nothing at no cost.
    """

    num_examples: int
    dimensions: tuple[int, int]
    lipschitz: float
    step_size: float

    def __post_init__(self) -> None:
        if not (len(self.dimensions) == 2 and min(self.dimensions) >= 1):
            raise ValueError(f"dimensions={self.dimensions} must be two counts of at least 1.")
        if not (math.isfinite(self.lipschitz) and self.lipschitz > 0):
            raise ValueError(
                f"lipschitz={self.lipschitz} must be finite and positive: the clip L0."
            )
        if not (math.isfinite(self.step_size) and self.step_size >= 0):
            raise ValueError(f"step_size={self.step_size} must be finite and >= 0.")
        sizes = self.batch_sizes
        if not (len(sizes) and min(sizes) >= 1 and sum(sizes) <= self.num_examples):
            raise ValueError(
                f"{len(sizes)} steps ask for {sum(sizes)} fresh examples of num_examples="
                f"{self.num_examples}: each is used once; take fewer steps."
            )
        if max(sizes) > MAX_BATCH:
            raise ValueError(
                f"a batch of {max(sizes)} examples is more than {MAX_BATCH}, whose gradients are still "
                "summed exactly; take more steps."
            )

    @property
    def players(self) -> int:
        """Simplices with more than one vertex: a draw from the others says nothing."""
        return sum(d > 1 for d in self.dimensions)

    @property
    @abstractmethod
    def batch_sizes(self) -> tuple[int, ...]:
        """B_1 .. B_T; the remaining examples are not used."""

    @property
    @abstractmethod
    def increments(self) -> tuple[float, ...]:
        """Delta_1 .. Delta_T: how much an example of step t moves a coordinate of its increment."""

    @abstractmethod
    def vertices_after(self) -> tuple[int, ...]:
        """D_1 .. D_T: vertices drawn from scores that follow the batch of step t."""

    @property
    def largest_increment(self) -> float:
        """Bound on the absolute value of one coordinate of an increment."""
        pairs = zip(self.increments, self.batch_sizes, strict=True)
        return max(delta * size / 2 for delta, size in pairs)

    def draws(self) -> list[tuple[VertexDraw, int]]:
        """The draws that an example can influence, for the worst place of it.

        Returns:
          One kind and its count.
        """
        increments, after = np.array(self.increments), np.array(self.vertices_after())
        worst = int(np.argmax(increments**2 * after))
        kind = VertexDraw(sensitivity=float(increments[worst]), averaged=self._averaged)
        return [(kind, int(after[worst]))]

    _averaged = False

    def epsilon(self, delta: float) -> float:
        """Epsilon at `delta`, an upper bound.

        Args:
          delta: in [0, 1).

        Returns:
          Epsilon >= 0.
        """
        ranges = 2 * np.array(self.increments) * (1 + ROUNDING)
        pure = float(np.max(ranges * np.array(self.vertices_after())))
        return min(pure, zcdp_epsilon(total_rho(self.draws()), delta))

    def largest_step_size(self, epsilon: float, delta: float) -> float:
        """The largest tau that keeps to epsilon, everything else unchanged.

        Args:
          epsilon: > 0.
          delta: in (0, 1).

        Returns:
          tau; infinity if no draw follows an example.

        Raises:
          ValueError: epsilon or delta out of range.
        """
        budget, unit = zcdp_rho(epsilon, delta), replace(self, step_size=1.0)
        (draw, count), *_ = unit.draws()
        if count == 0 or self.players == 0:
            return math.inf
        return math.sqrt(budget / (count * draw.rho)) * (1 - 1e-12)

    def calibrated(self, epsilon: float, delta: float) -> Self:
        """The same plan with tau lowered, where necessary, to keep to epsilon.

        Args:
          epsilon, delta: as in `largest_step_size`.

        Returns:
          A plan with `epsilon(delta) <= epsilon`.
        """
        largest = self.largest_step_size(epsilon, delta)
        return self if self.step_size <= largest else replace(self, step_size=largest)


@dataclass(frozen=True, kw_only=True)
class _EqualBatches(Plan):
    """T steps with floor(n / T) fresh examples each."""

    steps: int
    vertices: int = 1

    def __post_init__(self) -> None:
        counts = {"steps": self.steps, "vertices": self.vertices}
        if isinstance(self, AnytimePlan):
            counts["refresh"] = self.refresh
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        super().__post_init__()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """floor(n / T) each."""
        return (self.num_examples // self.steps,) * self.steps

    @property
    def increments(self) -> tuple[float, ...]:
        """2 L0 tau / B."""
        return (2 * self.lipschitz * self.step_size / self.batch_sizes[0],) * self.steps


@dataclass(frozen=True, kw_only=True)
class MirrorDescentPlan(_EqualBatches):
    """Algorithm 1: T steps; gradients at the mean of K vertices of each player.

    Attributes:
      steps: T.
      vertices: K.
    """

    def vertices_after(self) -> tuple[int, ...]:
        """K + 1 for each player and later step."""
        each = self.players * (self.vertices + 1)
        return tuple(each * (self.steps - t) for t in range(1, self.steps + 1))


def level_factor(max_level: int) -> float:
    """C_M = 2 - 2^-M, the normalizer of the truncated geometric law (the paper puts it in [1/2, 1]).

    >>> level_factor(0), level_factor(2)
    (1.0, 1.75)
    """
    return 2.0 - 2.0**-max_level


def level_probabilities(max_level: int) -> np.ndarray:
    """P[N = k] = 2^-k / C_M, k = 0 .. M, float64 [M + 1]; E[2^N] = (M + 1) / C_M."""
    return 2.0 ** -np.arange(max_level + 1) / level_factor(max_level)


def draw_levels(budget: float, max_level: int, generator: np.random.Generator) -> tuple[int, ...]:
    """N^1 .. N^T of Algorithm 3: until their 2^N together are more than U - 2^M.

    They do not depend on the data and are public.

    Args:
      budget: U >= 2^M + 1.
      max_level: M >= 0.
      generator: of the levels.

    Returns:
      At least one level; sum 2^N <= U.

    Raises:
      ValueError: the budget is below 4 or the largest level above it.
    """
    if not (4 <= budget < math.inf and max_level >= 0 and 2**max_level <= budget):
        raise ValueError(
            f"U={budget:g} with M={max_level}: Algorithm 3 needs U of at least 4 and 2^M; take more "
            "examples, a larger epsilon, or Algorithm 1."
        )
    probabilities, levels, spent = level_probabilities(max_level), [], 0
    while spent <= budget - 2**max_level:
        levels.append(int(generator.choice(max_level + 1, p=probabilities)))
        spent += 2 ** levels[-1]
    return tuple(levels)


@dataclass(frozen=True, kw_only=True)
class BiasReducedPlan(Plan):
    """Algorithm 3: mirror descent on the bias-reduced gradients of Algorithm 2.

    Attributes:
      levels: N^1 .. N^T, drawn before (`draw_levels`).
      max_level: M.
      batch_factor: alpha; step t uses ceil(2^N / alpha) fresh examples.
    """

    levels: tuple[int, ...]
    max_level: int
    batch_factor: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.batch_factor) and self.batch_factor > 0):
            raise ValueError(f"batch_factor={self.batch_factor} (alpha) must be positive.")
        if not self.levels or min(self.levels) < 0 or max(self.levels) > self.max_level:
            raise ValueError(
                f"levels must be at least one of 0 .. max_level={self.max_level}; see draw_levels."
            )
        super().__post_init__()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """ceil(2^N / alpha)."""
        return tuple(max(1, math.ceil(2**level / self.batch_factor)) for level in self.levels)

    @property
    def increments(self) -> tuple[float, ...]:
        """tau L0 (4 C_M 2^N + 2) / B: two means times C_M 2^N, and one mean."""
        factor, scale = level_factor(self.max_level), self.step_size * self.lipschitz
        pairs = zip(self.levels, self.batch_sizes, strict=True)
        return tuple(scale * (4 * factor * 2**level + 2) / size for level, size in pairs)

    def vertices_after(self) -> tuple[int, ...]:
        """2^(N + 1) + 1 for each player and later step."""
        drawn = [2 ** (level + 1) + 1 for level in self.levels]
        later = np.cumsum(drawn[::-1])[::-1] - drawn
        return tuple(int(self.players * count) for count in later)


@dataclass(frozen=True, kw_only=True)
class AnytimePlan(_EqualBatches):
    """Algorithm 4: gradients at K vertices of the running average, drawn anew now and then.

    Attributes:
      steps: T.
      vertices: K.
      refresh: q; vertices are drawn at every t <= q, then where q divides t.
    """

    refresh: int

    _averaged = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dimensions[1] != 1:
            raise ValueError(
                f"dimensions={self.dimensions}: Algorithm 4 minimizes over one simplex; give (d, 1)."
            )

    def refreshes(self, step: int) -> bool:
        """Whether vertices are drawn at step t = 1 .. T."""
        return step <= self.refresh or step % self.refresh == 0

    def vertices_after(self) -> tuple[int, ...]:
        """K for each later refresh, and K for the output, which follows the batches up to T - 1."""
        later = np.cumsum([self.refreshes(t) for t in range(self.steps, 0, -1)])[::-1]
        refreshed = [*later[1:].tolist(), 0]
        output = [1] * (self.steps - 1) + [0]
        pairs = zip(refreshed, output, strict=True)
        return tuple(self.players * self.vertices * (r + o) for r, o in pairs)
