"""Synthetic data for linear queries as a bilinear saddle point (Algorithm 5 of the saddle point paper).

The x-player is a distribution over the cells Z of a table, the y-player one over queries q_j from Z to
[-1, 1] that come with their negations. Each step draws one query by its hidden score, moves x along that
query and adds every query's error under x, on the full data set, to its score. Here x is private: it
follows from the drawn queries.

Replacing one of n examples moves each q_j(S) by at most 2 / n, and the scores of step t, which hold
t - 1 errors, by 2 (t - 1) tau_y / n: each draw has its own sensitivity, and rho is the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.papers.saddle_point_parameters import Calibration
from hf_dpzero.privacy.mechanisms.vertex import (
    HiddenScores,
    VertexDraw,
    draws_epsilon,
    total_rho,
    zcdp_rho,
)
from hf_dpzero.privacy.noise import NoiseSource, SecureNoise

Array = NDArray[np.float64]


MAX_SIZE = 1 << 32
"""n |Z|: an answer is off by |Z| 2^-53 at most, which is within 2^-21 of its sensitivity 2 / n."""


@dataclass(frozen=True, kw_only=True)
class SyntheticPlan:
    """Algorithm 5 and what its privacy depends on.

    Attributes:
      num_examples: n >= 1.
      num_cells: |Z| >= 3 (the step sizes divide by log |Z|, and the theorem needs it above 1).
      num_queries: |Q| >= 2, negations included.
      steps: T >= 1.
      step_x, step_y: tau_x and tau_y, >= 0.
    """

    num_examples: int
    num_cells: int
    num_queries: int
    steps: int
    step_x: float
    step_y: float

    def __post_init__(self) -> None:
        least = {"num_examples": 1, "num_cells": 3, "num_queries": 2, "steps": 1}
        for name, value in vars(self).items():
            if name in least and value < least[name]:
                raise ValueError(f"{name}={value} must be at least {least[name]}.")
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be finite and >= 0.")
        if self.num_examples * self.num_cells > MAX_SIZE:
            raise ValueError(
                f"{self.num_examples} examples on {self.num_cells} cells: the answers' rounding is "
                f"accounted for up to n |Z| = {MAX_SIZE}; merge cells."
            )

    def draws(self) -> list[tuple[VertexDraw, int]]:
        """One draw a step; the first is from scores without data."""
        unit = 2 * self.step_y / self.num_examples
        return [(VertexDraw(sensitivity=t * unit), 1) for t in range(self.steps)]

    def epsilon(self, delta: float) -> float:
        """Epsilon at `delta` in [0, 1), replace-one, an upper bound."""
        return draws_epsilon(self.draws(), delta)

    def calibrated(self, epsilon: float, delta: float) -> SyntheticPlan:
        """The same with the largest tau_y that keeps to epsilon.

        Args:
          epsilon: > 0.
          delta: in (0, 1).

        Returns:
          A plan; where one step only is taken, this one.

        Raises:
          ValueError: epsilon or delta out of range.
        """
        budget, unit = zcdp_rho(epsilon, delta), total_rho(replace(self, step_y=1.0).draws())
        if unit == 0:
            return self
        return replace(self, step_y=math.sqrt(budget / unit) * (1 - 1e-12))


def parameters(
    num_examples: int,
    num_cells: int,
    num_queries: int,
    *,
    epsilon: float,
    delta: float,
    calibration: Calibration = "corrected",
    steps: int | None = None,
) -> SyntheticPlan:
    """The parameters of Theorem G.1.

    Args:
      num_examples: n.
      num_cells: |Z|.
      num_queries: |Q|.
      epsilon, delta: the target.
      calibration: "paper" takes the theorem's tau_y, "corrected" the largest that the account allows.
      steps: T; by default the theorem's, max(1, floor(6 n eps / (16 sqrt(2 log 1/delta) log |Q|))).

    Raises:
      ValueError: a size too small, a target out of range, or epsilon >= 1 for the paper's calibration.
    """
    if calibration == "paper" and not 0 < epsilon < 1:
        raise ValueError(
            f"epsilon={epsilon}: Theorem G.1 is for epsilon < 1; use calibration='corrected'."
        )
    rho = zcdp_rho(epsilon, delta)  # checks both
    assert rho > 0
    log_z, log_q = math.log(max(num_cells, 2)), math.log(max(num_queries, 2))
    if steps is None:
        wanted = 6 * num_examples * epsilon / (16 * math.sqrt(2 * math.log(1 / delta)) * log_q)
        steps = max(1, math.floor(wanted))
    plan = SyntheticPlan(
        num_examples=num_examples,
        num_cells=num_cells,
        num_queries=num_queries,
        steps=steps,
        step_x=math.sqrt(log_z / (9 * steps)),
        step_y=log_q / (6 * math.sqrt(log_z * steps)),
    )
    return plan if calibration == "paper" else plan.calibrated(epsilon, delta)


@dataclass(frozen=True)
class Synthetic:
    """What Algorithm 5 releases.

    Attributes:
      weights: the mean of x^t, a distribution over cells, float64 [|Z|]; private.
      plan: what ran.
      noise: name of the source of randomness.
      private: whether it is secure.
    """

    weights: Array
    plan: SyntheticPlan
    noise: str
    private: bool

    def rows(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """A synthetic data set: cells drawn from the weights (post-processing), int64 [count].

        Args:
          count: how many; the paper takes n.
          generator: need not be secret.
        """
        return generator.choice(len(self.weights), count, p=self.weights)

    def epsilon(self, delta: float) -> float:
        """Of the release at `delta`; infinity if the source of randomness was not secure."""
        return self.plan.epsilon(delta) if self.private else math.inf


def synthesize(
    queries: Array,
    examples: NDArray[np.int64],
    plan: SyntheticPlan,
    noise: NoiseSource | None = None,
) -> Synthetic:
    """Algorithm 5.

    Args:
      queries: q_j(z) in [-1, 1], [|Q|, |Z|], closed under negation (`with_negations`); public.
      examples: the cell of each example, int64 [n].
      plan: for these sizes.
      noise: where draws come from; `SecureNoise` by default.

    Returns:
      A private distribution over cells.

    Raises:
      ValueError: queries out of range or not closed under negation, cells out of range, or a plan for
        other sizes.
    """
    check_queries(queries)
    sizes = (len(examples), queries.shape[1], len(queries))
    if sizes != (plan.num_examples, plan.num_cells, plan.num_queries):
        raise ValueError(
            f"(n, |Z|, |Q|) = {sizes}, the plan is for "
            f"{(plan.num_examples, plan.num_cells, plan.num_queries)}: make one for these data."
        )
    noise = SecureNoise() if noise is None else noise
    answers = queries @ histogram(examples, plan.num_cells)
    unit = max(2 * plan.step_y / plan.num_examples, 2.0**-512)
    hidden = HiddenScores(plan.num_queries, unit, 2 * plan.steps * plan.step_y)
    log_x, total = np.zeros(plan.num_cells), np.zeros(plan.num_cells)
    for t in range(plan.steps):
        x = np.exp(log_x - log_x.max())
        x /= x.sum()
        total += x
        drawn = int(hidden.draw(1, noise, t)[0])
        log_x += plan.step_x * queries[drawn]  # the gradient in x is -q
        hidden.add_(plan.step_y * (answers - queries @ x))
    return Synthetic(total / total.sum(), plan, noise.name, noise.secure)


def with_negations(queries: Array) -> Array:
    """Queries followed by their negations, [2 |Q|, |Z|].

    Args:
      queries: [|Q|, |Z|].

    Returns:
      A set that is closed under negation.
    """
    return np.concatenate([queries, -queries])


def check_queries(queries: Array) -> None:
    """Refuses what Theorem G.1 and the sensitivity 2 / n do not cover.

    Args:
      queries: [|Q|, |Z|].

    Raises:
      ValueError: no matrix, a value that is not in [-1, 1], or a query without its negation.
    """
    if queries.ndim != 2:
        raise ValueError(f"queries of shape {queries.shape}; give a row for each query.")
    if not np.all(np.abs(queries) <= 1):  # also NaN
        raise ValueError("a query has values outside [-1, 1]; divide it by its largest one.")
    # zeros of either sign have other bytes: adding 0.0, or subtracting from it, makes them one
    rows = {row.tobytes() for row in np.ascontiguousarray(queries + 0.0)}
    if not all(row.tobytes() in rows for row in np.ascontiguousarray(0.0 - queries)):
        raise ValueError(
            "the queries are not closed under negation, so errors of one sign are not seen; give "
            "with_negations(queries)."
        )


def histogram(examples: NDArray[np.int64], num_cells: int) -> Array:
    """Shares of the cells, float64 [|Z|], not private.

    Args:
      examples: cells, int64 [n], n >= 1.
      num_cells: |Z|.

    Returns:
      Sums to 1.

    Raises:
      ValueError: no examples, or a cell that is not in 0 .. |Z| - 1.
    """
    if not len(examples) or examples.min() < 0 or examples.max() >= num_cells:
        raise ValueError(f"examples must be at least one cell, each in 0 .. {num_cells - 1}.")
    return np.bincount(examples, minlength=num_cells) / len(examples)
