"""The parameters that the theorems of the averaged-clipping paper give, and its own calibration.

Theorems 3, 4, 6 and 7 leave constants open ("proportional to"); they are those of the proofs where the
appendix states them, and 1 in N. The batch sizes are rounded up, and an m above n is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from scripts.studies.averaged_clipping.algorithm import Descent, check_batch_size


class Parameters(NamedTuple):
    """What Algorithm 1 runs with: the algorithm, gamma, lambda."""

    descent: Descent
    rate: float
    clip: float


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the theorems know of a problem.

    Attributes:
      smoothness: L (Theorem 7 takes M_nu by itself).
      distance: R, the bound of ||x0 - x*||.
      variance: sigma^2 >= E ||grad f(x, xi) - grad f(x)||^2.
      dimension: d.
      num_examples: n.
      epsilon, delta: of the guarantee.
      beta: probability of failure, in (0, 1).

    Raises:
      ValueError: beta is outside (0, 1), where ln(4/beta) is below 1 from 4/e on.
    """

    smoothness: float
    distance: float
    variance: float
    dimension: int
    num_examples: int
    epsilon: float
    delta: float
    beta: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta={self.beta} is not in (0, 1); from 4/e on ln(4/beta) is below 1 and no theorem "
                "holds. Use 0.1 or less."
            )

    @property
    def steps(self) -> int:
        """N = (n eps / sqrt(d ln(1/delta)))^(2/7), rounded, at least 1."""
        noise = math.sqrt(self.dimension * math.log(1 / self.delta))
        return max(1, round((self.num_examples * self.epsilon / noise) ** (2 / 7)))


def constrained(problem: Problem) -> Parameters:
    """Theorem 3: lambda = 2 L R, m = 81 N^2 sigma^2 / (2 L^2 R^2 ln^2(4/beta)).

    gamma = 1/(2 L ln(4/beta)). X is the ball of radius R around the start, which holds x*; the paper's
    own ball is around x*, where nobody can project without knowing it.

    Raises:
      ValueError: m > n.
    """
    p, log = problem, math.log(4 / problem.beta)
    scale = p.smoothness * p.distance
    m = _batch_size(81 * p.steps**2 * p.variance / (2 * scale**2 * log**2), p.num_examples)
    descent = Descent(steps=p.steps, batch_size=m, radius=p.distance)
    return Parameters(descent, 1 / (2 * p.smoothness * log), 2 * scale)


def unconstrained(problem: Problem, steps: int | None = None) -> Parameters:
    """Theorem 4: lambda = 4 L R + 2 sqrt(D), m = 162 N^2 sigma^2 / (lambda^2 ln^2(4N/beta)).

    gamma = 1/(24 L ln(4N/beta)), and
    D = 648 gamma L N^3 sigma^2 sqrt(d N ln(4N^2/beta) ln(1/delta)) / (n eps ln^2(4N/beta)), the proof's
    constant with the theorem's beta, which is the proof's times N. Another N is `steps`.

    Raises:
      ValueError: m > n.
    """
    p, count = problem, problem.steps if steps is None else steps
    log = math.log(4 * count / p.beta)
    rate = 1 / (24 * p.smoothness * log)
    wide = math.log(4 * count**2 / p.beta)
    root = math.sqrt(p.dimension * count * wide * math.log(1 / p.delta))
    spread = 648 * rate * p.smoothness * count**3 * p.variance * root
    spread /= p.num_examples * p.epsilon * log**2
    clip = 4 * p.smoothness * p.distance + 2 * math.sqrt(spread)
    m = _batch_size(162 * count**2 * p.variance / (clip * log) ** 2, p.num_examples)
    return Parameters(Descent(steps=count, batch_size=m), rate, clip)


def restarted(problem: Problem, strong_convexity: float) -> Parameters:
    """Theorem 6 (Algorithm 2): N0 / ln(4 N0 / beta) >= 768 L / mu (c = 1), the rest as in Theorem 4.

    tau = (L/mu) ln n, rounded up; R^t = R 2^{-t/2}. Stage t clips at lambda 2^{-t/2} here (the
    theorem shrinks only the part 4 L R^t of it; the clip returned is lambda) and keeps m (the
    theorem's grows with 1/lambda^2). The accounting composes the steps of all stages, in place of the
    paper's split of epsilon.

    Raises:
      ValueError: m > n.
    """
    ratio = problem.smoothness / strong_convexity
    need, count = 768 * ratio, 1.0
    for _ in range(100):  # the fixed point of N0 = need ln(4 N0 / beta), from below
        count = need * math.log(4 * max(count, need) / problem.beta)
    base = unconstrained(problem, math.ceil(count))
    stages = math.ceil(ratio * math.log(problem.num_examples))
    return base._replace(descent=replace(base.descent, stages=stages))


def hoelder(problem: Problem, exponent: float, constant: float, accuracy: float) -> Parameters:
    """Theorem 7: gradients with ||grad f(x) - grad f(y)|| <= M_nu ||x - y||^nu on the ball of radius 7R.

    nu is `exponent`, in [0, 1], M_nu `constant`, a (alpha in the paper) `accuracy`; L is not used.

    lambda = 2 M 7^nu R^nu, m = 27 N sigma^2 / (lambda^2 ln(8/beta)), and gamma the least of
    a^{(1-nu)/(1+nu)} / (8 M^{2/(1+nu)}), R / (sqrt(2N) a^{nu/(1+nu)} M^{1/(1+nu)}),
    R / (2 lambda ln(8/beta)) and lambda R / (2 D N), where D is
    108 N^1.5 sigma^2 sqrt(d ln(8N/beta) ln(1/delta)) / (n eps ln(8/beta)).

    Raises:
      ValueError: nu outside [0, 1], or m > n.
    """
    p, nu, count = problem, exponent, problem.steps
    if not 0 <= nu <= 1:
        raise ValueError(f"exponent={nu} must be in [0, 1].")
    log = math.log(8 / p.beta)
    clip = 2 * constant * (7 * p.distance) ** nu
    m = _batch_size(27 * count * p.variance / (clip**2 * log), p.num_examples)
    root = math.sqrt(p.dimension * math.log(8 * count / p.beta) * math.log(1 / p.delta))
    spread = 108 * count**1.5 * p.variance * root / (p.num_examples * p.epsilon * log)
    power = accuracy ** (nu / (1 + nu)) * constant ** (1 / (1 + nu))
    rate = min(
        accuracy ** ((1 - nu) / (1 + nu)) / (8 * constant ** (2 / (1 + nu))),
        p.distance / (math.sqrt(2 * count) * power),
        p.distance / (2 * clip * log),
        clip * p.distance / (2 * spread * count),
    )
    return Parameters(Descent(steps=count, batch_size=m), rate, clip)


def paper_calibration(descent: Descent, num_examples: int, epsilon: float, delta: float) -> float:
    """Eq. 9: noise deviation over the clip, c m sqrt(N ln(1/delta)) / (n eps); not private.

    On the clipped mean; per-example: on the sum. It takes the sensitivity for lambda, leaves c open (1
    here) and needs eps <= c2 N m^2/n^2, which the paper's parameters break. For per-example clipping
    it is Theorem 1 of Abadi et al. 2016, with the same conditions. `averaged_clipping.true_epsilon`
    says what it really gives.

    >>> round(paper_calibration(Descent(steps=14, batch_size=222), 100_000, 1.0, 1e-5), 4)
    0.0282
    """
    steps = descent.steps * descent.stages
    root = math.sqrt(steps * math.log(1 / delta))
    return descent.batch_size * root / (num_examples * epsilon)


def _batch_size(wanted: float, num_examples: int) -> int:
    check_batch_size(wanted, num_examples)
    return max(1, math.ceil(wanted))
