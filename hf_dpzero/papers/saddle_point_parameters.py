"""Steps, vertices and step sizes of the saddle point paper's theorems, under two calibrations.

"corrected" takes the largest step size that the plan's own accounting allows. "paper" takes the step
size that the paper's propositions allow, whatever it really costs: print `plan.epsilon(delta)` beside
it. Steps and vertices are the theorems' in both: T = max(1, floor(.)), K = max(1, ceil(.)) and
q = max(1, floor(.)); where it says only "of the order of", the constant is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hf_dpzero.papers.saddle_point_plans import (
    AnytimePlan,
    BiasReducedPlan,
    MirrorDescentPlan,
    draw_levels,
)

Calibration = Literal["corrected", "paper"]
CALIBRATIONS: tuple[Calibration, ...] = ("corrected", "paper")
Smoothness = Literal["bilinear", "second", "first"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the theorems ask to know.

    Attributes:
      num_examples: n.
      dimensions: (d_x, d_y); d_y = 1 for minimization alone.
      epsilon, delta: the target, both in (0, inf) and (0, 1). The paper's propositions want epsilon < 1.
      lipschitz, smoothness, second_order: L0, L1, L2 with respect to the 1-norm.

    Raises:
      ValueError: no simplex with two vertices (there is nothing to choose), or a value out of range.
    """

    num_examples: int
    dimensions: tuple[int, int]
    epsilon: float
    delta: float
    lipschitz: float = 1.0
    smoothness: float = 1.0
    second_order: float = 0.0

    def __post_init__(self) -> None:
        if min(self.dimensions) < 1 or max(self.dimensions) < 2:
            raise ValueError(
                f"dimensions={self.dimensions}: a simplex with one vertex has one point and log d = 0; "
                "the parameters need two vertices somewhere."
            )
        if not (self.num_examples >= 1 and 0 < self.epsilon < math.inf and 0 < self.delta < 1):
            raise ValueError(
                f"num_examples={self.num_examples}, epsilon={self.epsilon}, delta={self.delta}: give at "
                "least one example, a finite positive epsilon and delta in (0, 1)."
            )
        if not (self.lipschitz > 0 and self.smoothness >= 0 and self.second_order >= 0):
            raise ValueError("lipschitz must be positive, smoothness and second_order >= 0.")

    @property
    def log_dimension(self) -> float:
        """ell = log d_x + log d_y > 0."""
        return math.log(self.dimensions[0]) + math.log(self.dimensions[1])

    @property
    def log_delta(self) -> float:
        """log(1 / delta)."""
        return math.log(1 / self.delta)

    def check_paper(self) -> None:
        """Refuses targets outside the composition theorem that the paper's calibration uses.

        Raises:
          ValueError: epsilon >= 1.
        """
        if self.epsilon >= 1:
            raise ValueError(
                f"epsilon={self.epsilon}: the paper's calibration composes by a theorem for epsilon < 1;"
                " use calibration='corrected', which accounts by zCDP."
            )


def mirror_descent(
    problem: Problem, smoothness: Smoothness = "bilinear", calibration: Calibration = "corrected"
) -> MirrorDescentPlan:
    """Algorithm 1 with the parameters of Theorem 4.1 or 4.2.

    Args:
      problem: the problem.
      smoothness: "bilinear" (L2 = 0, quadratics too) and "second" of Theorem 4.1, "first" of 4.2.
      calibration: of the step size.

    Returns:
      The plan; tau = min(sqrt(2 ell / (5 T)) / L0, what privacy allows).

    Raises:
      ValueError: an unknown smoothness, or what `Problem.check_paper` refuses.
    """
    n, ell, log = problem.num_examples, problem.log_dimension, problem.log_delta
    signal = n * problem.epsilon
    counts = {
        "bilinear": (signal / math.sqrt(ell * log), lambda t: 1.0),
        "second": ((signal / (ell**0.25 * math.sqrt(log))) ** 0.8, lambda t: math.sqrt(t / ell)),
        "first": (signal ** (2 / 3) / log ** (1 / 3), lambda t: t / ell),
    }
    if smoothness not in counts:
        raise ValueError(f"smoothness={smoothness!r} is unknown; use one of {sorted(counts)}.")
    wanted, vertices = counts[smoothness]
    steps = max(1, math.floor(min(n, wanted)))
    plan = MirrorDescentPlan(
        num_examples=n,
        dimensions=problem.dimensions,
        lipschitz=problem.lipschitz,
        step_size=math.sqrt(2 * ell / (5 * steps)) / problem.lipschitz,
        steps=steps,
        vertices=max(1, math.ceil(vertices(steps))),
    )
    if calibration == "corrected":
        return plan.calibrated(problem.epsilon, problem.delta)
    problem.check_paper()
    # Proposition 4.1: B eps / (8 L0 sqrt(2 T (K + 1) log(1 / delta)))
    root = math.sqrt(2 * plan.steps * (plan.vertices + 1) * log)
    allowed = plan.batch_sizes[0] * problem.epsilon / (8 * plan.lipschitz * root)
    return replace(plan, step_size=min(plan.step_size, allowed))


def bias_reduced_descent(
    problem: Problem, generator: np.random.Generator, calibration: Calibration = "corrected"
) -> BiasReducedPlan:
    """Algorithm 3 with the parameters of Theorem 4.3.

    The paper's U and alpha follow from its bounds (scores move by 4.5 tau alpha L0, 6 U draws, advanced
    composition). "corrected" starts at the same U, takes the smallest alpha with which the levels find
    enough examples, and raises U by tenths while the exact account of the theorem's step size keeps to
    epsilon; where it does not to begin with, tau is lowered.

    Args:
      problem: second-order smooth.
      generator: of the public levels.
      calibration: of U, alpha and tau.

    Returns:
      The plan; M = floor(log2 sqrt U), tau = sqrt(ell / U) / G or less.

    Raises:
      ValueError: U < 4, too little data for its privacy; or what `Problem.check_paper` refuses.
    """
    n, ell, log = problem.num_examples, problem.log_dimension, problem.log_delta
    size, l0 = _gradient_size(problem), problem.lipschitz
    wanted = n * problem.epsilon * size / (l0 * math.sqrt(4 * 48 * 81 * ell * log))
    budget = min(wanted, n / 2)
    if calibration == "paper":
        problem.check_paper()
        move = (math.sqrt(ell / budget) / size * l0) ** 2
        alpha = (2 * problem.epsilon**2 / (48 * 81 * log * move * n)) ** (1 / 3)
        return _bias_reduced(problem, budget, generator, alpha)
    plan = _bias_reduced(problem, budget, generator)
    while budget < n / 2:
        budget = min(1.1 * budget, n / 2)
        larger = _bias_reduced(problem, budget, generator)
        if larger.epsilon(problem.delta) > problem.epsilon:
            break
        plan = larger
    return plan.calibrated(problem.epsilon, problem.delta)


def _gradient_size(problem: Problem) -> float:
    """G = sqrt(L0^2 + L2^2 + ell L1^2)."""
    squares = problem.lipschitz**2 + problem.second_order**2
    return math.sqrt(squares + problem.log_dimension * problem.smoothness**2)


def _bias_reduced(
    problem: Problem, budget: float, generator: np.random.Generator, alpha: float | None = None
) -> BiasReducedPlan:
    """The plan of U and alpha; by default the smallest alpha that n allows."""
    max_level = max(0, math.floor(math.log2(max(budget, 1.0)) / 2))
    levels = draw_levels(budget, max_level, generator)
    if alpha is None:
        sizes = 2.0 ** np.array(levels)
        alpha = float(sizes.sum()) / problem.num_examples
        # each batch is rounded up: by steps of 1 %, until sum ceil(2^N / alpha) <= n
        while np.ceil(sizes / alpha).sum() > problem.num_examples:
            alpha *= 1.01
    return BiasReducedPlan(
        num_examples=problem.num_examples,
        dimensions=problem.dimensions,
        lipschitz=problem.lipschitz,
        step_size=math.sqrt(problem.log_dimension / budget) / _gradient_size(problem),
        levels=levels,
        max_level=max_level,
        batch_factor=alpha,
    )


def anytime(
    problem: Problem,
    smoothness: Literal["second", "first"] = "second",
    calibration: Calibration = "corrected",
) -> AnytimePlan:
    """Algorithm 4 with the parameters of Theorem 5.1.

    Args:
      problem: with dimensions (d, 1).
      smoothness: "first" or "second".
      calibration: of the step size.

    Returns:
      The plan; tau is also at most 1 / (8 q L0).

    Raises:
      ValueError: an unknown smoothness, two players, or what `Problem.check_paper` refuses.
    """
    n, ld, log = problem.num_examples, problem.log_dimension, problem.log_delta
    l0, l1, l2 = problem.lipschitz, problem.smoothness, problem.second_order
    signal = n * problem.epsilon
    if smoothness not in ("second", "first"):
        raise ValueError(f"smoothness={smoothness!r} is unknown; use 'second' or 'first'.")
    if smoothness == "first":
        steps = max(1, math.floor(min(n, signal**0.8 / (ld * log) ** 0.4)))
        vertices = max(1, math.ceil(steps / ld))
        refresh = max(1, math.floor(math.sqrt(steps) / ld))
        moment = l0**2 + (l0**2 + l1**2) * refresh * math.sqrt(ld / vertices)
        moment += l1**2 * refresh / (math.sqrt(ld) * vertices**1.5)
    else:
        steps = max(1, math.floor(min(n, signal / (ld * math.sqrt(log)))))
        vertices = max(1, math.ceil(math.sqrt(steps * ld)))
        refresh = max(1, math.floor(math.sqrt(steps / ld)))
        moment = l0**2 + l1**2 * refresh * ld / vertices + l2**2 * refresh / vertices**2
    plan = AnytimePlan(
        num_examples=n,
        dimensions=problem.dimensions,
        lipschitz=l0,
        step_size=min(math.sqrt(ld / (moment * steps)), 1 / (8 * refresh * l0)),
        steps=steps,
        vertices=vertices,
        refresh=refresh,
    )
    if calibration == "corrected":
        return plan.calibrated(problem.epsilon, problem.delta)
    problem.check_paper()
    draws = 2 * (steps * vertices / refresh + refresh * vertices)
    allowed = plan.batch_sizes[0] * problem.epsilon / (8 * l0 * math.sqrt(draws * log))
    return replace(plan, step_size=min(plan.step_size, allowed))
