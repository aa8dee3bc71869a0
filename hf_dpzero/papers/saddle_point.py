"""DP stochastic saddle points on simplices by mirror descent that shows vertices only (González, Guzmán
and Paquette, "Mirror Descent Algorithms with Nearly Dimension-Independent Rates for
Differentially-Private Stochastic Saddle-Point Problems").

min over x, max over y, both on simplices, of the mean of convex-concave f(x, y; z). Iterates are the
log-weights of an exponential mechanism. Gradients are taken at averages of vertices drawn from them
(Maurey's sparsification), and only averages of vertices are returned: the iterates are never shown.
`saddle_point_plans` says what that costs, `saddle_point_parameters` has the theorems' parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.papers.saddle_point_plans import (
    AnytimePlan,
    BiasReducedPlan,
    MirrorDescentPlan,
    Plan,
    level_factor,
)
from hf_dpzero.privacy.mechanisms.vertex import HiddenAverage, HiddenScores
from hf_dpzero.privacy.noise import NoiseSource, SecureNoise

Array = NDArray[np.float64]
Pair = tuple[Array, Array]

GRADIENT_GRID = 2.0**-30
"""Of an example's gradient, over L0: sums of 2^22 examples are exact in double precision."""


class Oracle(Protocol):
    """First-order access to f; what a user supplies.

    Attributes:
      num_examples: n.
      dimensions: (d_x, d_y); d_y = 1 for min over x alone.
    """

    num_examples: int
    dimensions: tuple[int, int]

    def gradients(self, x: Array, y: Array, examples: NDArray[np.int64]) -> Pair:
        """Gradients of f(x, y; z) for each example.

        An example's rows must depend on it alone (and x, y). They are clipped to [-L0, L0] by
        coordinates; a NaN or an infinity counts as zero.

        Args:
          x, y: points on the simplices, [d_x] and [d_y].
          examples: indices, int64 [b]; each index is asked for in one batch only.

        Returns:
          In x, [b, d_x], and in y, [b, d_y]; both are gradients, though y maximizes.
        """


@dataclass(frozen=True)
class Solution:
    """What a run releases.

    Attributes:
      x, y: averages of vertices, [d_x] and [d_y], on the simplices.
      plan: what ran.
      noise: name of the source of randomness.
      private: whether that source is secure.
    """

    x: Array
    y: Array
    plan: Plan
    noise: str
    private: bool

    def epsilon(self, delta: float) -> float:
        """Of the whole run at `delta`; infinity if the source of randomness was not secure."""
        return self.plan.epsilon(delta) if self.private else float("inf")


def solve(oracle: Oracle, plan: Plan, noise: NoiseSource | None = None) -> Solution:
    """Runs the algorithm of a plan.

    Guarantee: the solution, and the points that the oracle is shown, are (epsilon, delta)-DP for
    replace-one neighbours with epsilon = plan.epsilon(delta).

    Args:
      oracle: gradients of single examples.
      plan: for as many examples and dimensions.
      noise: where draws come from; `SecureNoise` by default.

    Returns:
      Averages of vertices.

    Raises:
      ValueError: oracle and plan disagree, or gradients have another shape.
      TypeError: a plan of another kind.
    """
    if (oracle.num_examples, tuple(oracle.dimensions)) != (plan.num_examples, plan.dimensions):
        raise ValueError(
            f"the oracle has {oracle.num_examples} examples and dimensions {oracle.dimensions}, the "
            f"plan {plan.num_examples} and {plan.dimensions}: make the plan for this oracle."
        )
    noise = SecureNoise() if noise is None else noise
    match plan:
        case MirrorDescentPlan() | BiasReducedPlan():
            x, y = _mirror_descent(plan, oracle, noise)
        case AnytimePlan():
            x, y = _anytime(plan, oracle, noise)
        case _:
            raise TypeError(f"{type(plan).__name__} is none of the plans of saddle_point_plans.")
    return Solution(x=x, y=y, plan=plan, noise=noise.name, private=noise.secure)


def _mirror_descent(
    plan: MirrorDescentPlan | BiasReducedPlan, oracle: Oracle, noise: NoiseSource
) -> Pair:
    """Algorithm 1, and Algorithm 3, which takes its gradients by Algorithm 2."""
    hidden = _hidden(plan)
    sums = tuple(np.zeros(d) for d in plan.dimensions)
    batches = _batches(plan)
    for t, batch in enumerate(batches):

        def gradient(x: Array, y: Array, batch: NDArray[np.int64] = batch) -> Pair:
            return batch_gradient(plan, oracle, x, y, batch)

        count = plan.vertices if isinstance(plan, MirrorDescentPlan) else 2 ** (plan.levels[t] + 1)
        # one vertex more, for the output alone: the oracle sees none of what is returned
        drawn = [h.draw(count + 1, noise, t, part) for part, h in enumerate(hidden)]
        for total, vertices in zip(sums, drawn, strict=True):
            total[vertices[-1]] += 1
        used = (drawn[0][:-1], drawn[1][:-1])
        if isinstance(plan, MirrorDescentPlan):
            x, y = (mean_vertex(v, d) for v, d in zip(used, plan.dimensions, strict=True))
            found = gradient(x, y)
        else:
            found = bias_reduced(gradient, used, plan.dimensions, plan.max_level)
        _step(plan, hidden, found)
    return sums[0] / len(batches), sums[1] / len(batches)


def _anytime(plan: AnytimePlan, oracle: Oracle, noise: NoiseSource) -> Pair:
    """Algorithm 4; the running average is an average of softmaxes, drawn from as such."""
    hidden, one = _hidden(plan), np.ones(1)
    average = HiddenAverage()
    for t, batch in enumerate(_batches(plan), start=1):
        average.add_(hidden[0])
        if plan.refreshes(t):
            point = mean_vertex(average.draw(plan.vertices, noise, t), plan.dimensions[0])
        _step(plan, hidden, batch_gradient(plan, oracle, point, one, batch))
    final = average.draw(plan.vertices, noise, plan.steps + 1)
    return mean_vertex(final, plan.dimensions[0]), one


def mean_vertex(vertices: NDArray[np.int64], dimension: int) -> Array:
    """The average of vertices (Maurey), float64 [d].

    Args:
      vertices: indices, int64 [K], K >= 1.
      dimension: d.

    Returns:
      A point of the simplex.

    >>> mean_vertex(np.array([0, 2, 2, 2]), 3).tolist()
    [0.25, 0.0, 0.75]
    """
    return np.bincount(vertices, minlength=dimension) / len(vertices)


def bias_reduced(
    gradient: Callable[[Array, Array], Pair],
    vertices: tuple[NDArray[np.int64], NDArray[np.int64]],
    dimensions: tuple[int, int],
    max_level: int,
) -> Pair:
    """Algorithm 2: C_M 2^N (grad(+) - grad(-)) + grad(0).

    Over the vertices and over N its mean is that of the gradient at 2^(M + 1) vertices.

    Args:
      gradient: (x, y) -> gradients, on one batch.
      vertices: 2^(N + 1) for each player.
      dimensions: (d_x, d_y).
      max_level: M >= N.

    Returns:
      Gradients in x and y.

    Raises:
      ValueError: the number of vertices is no 2^(N + 1) with N <= M, or not the same for both.
    """
    count = len(vertices[0])
    half = count // 2
    if count != len(vertices[1]) or count < 2 or count & half or count > 2 ** (max_level + 1):
        raise ValueError(
            f"{count} and {len(vertices[1])} vertices: Algorithm 2 takes 2^(N + 1) of each player, "
            f"0 <= N <= {max_level}."
        )

    def at(number: int) -> Pair:
        x, y = (mean_vertex(v[:number], d) for v, d in zip(vertices, dimensions, strict=True))
        return gradient(x, y)

    every, first_half, first = at(count), at(half), at(1)
    weight = level_factor(max_level) * half
    gx, gy = (weight * (a - b) + c for a, b, c in zip(every, first_half, first, strict=True))
    return gx, gy


def batch_gradient(
    plan: Plan, oracle: Oracle, x: Array, y: Array, examples: NDArray[np.int64]
) -> Pair:
    """Means over a batch of the examples' clipped gradients.

    Guarantee: replacing one of b examples moves each coordinate by at most 2 L0 / b. Each example's
    gradient is rounded to multiples of L0 2^-30 and the sum is exact, so the others' parts cancel.

    Args:
      plan: has L0 and the dimensions.
      oracle: the gradients.
      x, y: points.
      examples: int64 [b], b >= 1.

    Returns:
      In x, [d_x], and y, [d_y].

    Raises:
      ValueError: gradients of another shape.
    """
    means = []
    for rows, d in zip(oracle.gradients(x, y, examples), plan.dimensions, strict=True):
        if rows.shape != (len(examples), d):
            raise ValueError(
                f"gradients of shape {rows.shape} for {len(examples)} examples and {d} vertices: "
                "return one row for each example, not their mean."
            )
        unit = plan.lipschitz * GRADIENT_GRID
        total = np.rint(clip_coordinates(rows, plan.lipschitz) / unit).sum(axis=0)
        means.append(total * unit / len(examples))
    return means[0], means[1]


def clip_coordinates(rows: Array, bound: float) -> Array:
    """Rows with each coordinate in [-bound, bound]; a row that is not finite counts as zero.

    Args:
      rows: [b, d].
      bound: L0 > 0.

    Returns:
      [b, d].

    >>> clip_coordinates(np.array([[3.0, -0.5], [np.nan, 1.0]]), 1.0).tolist()
    [[1.0, -0.5], [0.0, 0.0]]
    """
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    return np.clip(np.where(finite, rows, 0.0), -bound, bound)


def _hidden(plan: Plan) -> tuple[HiddenScores, HiddenScores]:
    """Uniform iterates; without a step size nothing is ever added."""
    increment = max(min(plan.increments), 2.0**-512)
    largest = len(plan.batch_sizes) * plan.largest_increment
    x, y = (HiddenScores(d, increment, largest) for d in plan.dimensions)
    return x, y


def _batches(plan: Plan) -> list[NDArray[np.int64]]:
    """Fresh examples for each step, in the order of the data set."""
    ends = np.cumsum(plan.batch_sizes)
    return np.split(np.arange(ends[-1]), ends[:-1])


def _step(plan: Plan, hidden: tuple[HiddenScores, HiddenScores], gradients: Pair) -> None:
    """The multiplicative update: x descends and y ascends."""
    hidden[0].add_(-plan.step_size * gradients[0])
    hidden[1].add_(plan.step_size * gradients[1])
