r"""A privacy budget spent unevenly over the steps of private gradient descent.

Junyuan Hong, Zhangyang Wang and Jiayu Zhou 2022, "Dynamic privacy budget allocation improves data
efficiency of differentially private gradient descent", FAccT. Numbers of theorems,
lemmas and equations are theirs.

*Symbols.* N examples, D dimensions; f is M-smooth with the Polyak-Lojasiewicz constant mu, and
per-example gradients have norm at most G (clipped). kappa = M / mu; gamma = 1 - 1/kappa is the
contraction of a step of size 1/M; Delta = f(theta_1) - f*. A step adds G sigma_t nu_t / N to the mean
gradient, nu_t ~ N(0, I), and spends 1 / sigma_t^2 of the budget R = sum_t sigma_t^-2: R/2-zCDP for
neighbours that differ by one example more or less (Theorem 3.5; 2G/N, hence 4R, if one is replaced).
alpha = D G^2 / (2 R M N^2 Delta). ERUB is the bound on the expected excess loss over Delta.

*Schedules* are those of `hf_dpzero.privacy.schedules`: uniform is None, their GD-dynamic (Theorem 4.5)
is Exponential(gamma=1 - 1/kappa), *exp* is Exponential with a tuned gamma; Theorem 4.8 is
`PrintedMomentum` here. `multipliers_for` scales any of them to R.

*Corrected here.* Algorithm 1 asks for rho_t < R_t, under which the last step of a schedule that spends
R exactly never runs: here <= with a tolerance. The inverse of Lemma C.4 is printed with a plus in the
place of a minus (Section 4.1.3 and Appendix C). The influence of Theorem 4.8 is no upper bound on that
of Theorem 4.6: see `momentum_influence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.schedules import NoiseSchedule, shape

Floats = NDArray[np.float64]

TOLERANCE = 1e-9
"""A step may exceed what is left of the budget by so much of R: rounding of a sum that ends at R."""


# ------------------------------------------------------------------ schedules


@dataclass(frozen=True, kw_only=True)
class PrintedMomentum(NoiseSchedule):
    """Theorem 4.8 as printed, for momentum beta with bias correction: the noise rises, then falls.

    Its proof counts gamma^That once too often, and the schedule loses against constant noise on
    quadratics and networks; `schedules.Momentum` takes its place in the trainer.

    Attributes:
      gamma: 1 - 1/kappa, in (0, 1).
      beta: in [0, gamma).
    """

    gamma: float
    beta: float = 0.9

    name: ClassVar[str] = "momentum_as_printed"

    def __post_init__(self) -> None:
        if not 0 <= self.beta < self.gamma < 1:
            raise ValueError(
                f"beta={self.beta}, gamma={self.gamma}: the momentum schedule is known for "
                "0 <= beta < gamma < 1; use 'exp' otherwise."
            )

    @property
    def turn(self) -> int:
        """That, the last step (from 1) before influence rises again: the noise is largest there."""
        gamma, beta, t = self.gamma, self.beta, 1
        while gamma**t * (1 - beta ** (t + 1)) >= 1 - beta:
            t += 1
        return t

    def log_influence(self, steps: int) -> np.ndarray:
        """Up to the turn c1 gamma^(T+t), then gamma^(That-1) c2 gamma^(T-t)."""
        t, turn, log = np.arange(1.0, steps + 1), self.turn, math.log(self.gamma)
        rest = math.log(self.gamma - self.beta**2)
        before = math.log(2) - log - rest + (steps + t) * log
        after = (turn - 1) * log + 2 * turn * log - rest + (steps - t) * log
        return np.where(t <= turn, before, after)


# ------------------------------------------------------------------ privacy


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Epsilon of rho-zCDP at delta: rho + 2 sqrt(rho ln(1/delta)) (Lemma C.4).

    Args:
      rho: >= 0.
      delta: in (0, 1).
    """
    return rho + 2 * math.sqrt(rho * _log_inverse(delta))


def zcdp_rho(epsilon: float, delta: float) -> float:
    """The rho whose `zcdp_epsilon` is epsilon: (sqrt(epsilon + L) - sqrt(L))^2, L = ln(1/delta).

    Args:
      epsilon: > 0.
      delta: in (0, 1).

    >>> round(zcdp_rho(4.0, 1e-8), 6)
    0.196352
    """
    log = _log_inverse(delta)
    # the difference of the roots, without its cancellation at a small epsilon
    root = positive("epsilon", epsilon) / (math.sqrt(epsilon + log) + math.sqrt(log))
    return root**2


def zcdp_budget(epsilon: float, delta: float) -> float:
    """R = 2 rho, the paper's budget for (epsilon, delta)-DP."""
    return 2 * zcdp_rho(epsilon, delta)


def tight_budget(epsilon: float, delta: float) -> float:
    """R under the exact account: full-batch Gaussians with any sigma_t are mu-GDP, mu^2 = R.

    Args:
      epsilon: > 0.
      delta: in (0, 1).

    >>> round(tight_budget(4.0, 1e-8), 5)
    0.51344
    """
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    _log_inverse(delta)
    return float(get_sigma_gaussian(positive("epsilon", epsilon), delta)) ** -2


# ------------------------------------------------------------------ schedules


def optimal_multipliers(log_influence: Floats, budget: float) -> Floats:
    """sigma_t^2 = (1/R) sum_i sqrt(q_i / q_t), the least of sum_t q_t sigma_t^2 (Lemma 4.4, Eq. 10).

    Args:
      log_influence: log q_t, up to a constant, float64 [T].
      budget: R > 0.

    Returns:
      float64 [T]; sum sigma_t^-2 = R.

    Raises:
      ValueError: no steps, an influence of 0 or infinity, or noise beyond floating point.
    """
    log_influence = np.asarray(log_influence, dtype=np.float64)
    if not log_influence.size:
        raise ValueError("steps=0: a schedule needs at least one step.")
    if not np.isfinite(log_influence).all():
        step = int(np.argmin(np.isfinite(log_influence))) + 1
        raise ValueError(
            f"log_influence={log_influence[step - 1]} in step {step}: the best noise of a step without "
            "influence is infinite; leave that step out."
        )
    with np.errstate(over="ignore"):
        found = shape(log_influence) * math.sqrt(len(log_influence) / positive("budget", budget))
    if not np.isfinite(found).all():
        raise ValueError(
            f"influences that differ by e^{np.ptp(log_influence):.3g} over {len(found)} steps: their "
            "noise overflows. Use fewer steps or a gamma nearer to 1."
        )
    return np.asarray(found)


def multipliers_for(schedule: NoiseSchedule | None, steps: int, budget: float) -> Floats:
    """The schedule's sigma_t as Lemma 4.4 has them for its influence, with sum sigma_t^-2 = R.

    Args:
      schedule: None is uniform, sigma_t^2 = T / R.
      steps: T >= 1.
      budget: R > 0.

    Returns:
      float64 [T].

    >>> (multipliers_for(None, 4, 1.0) ** 2).tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: a schedule needs at least one step.")
    log_influence = np.zeros(steps) if schedule is None else schedule.log_influence(steps)
    return optimal_multipliers(log_influence, budget)


def momentum_influence(steps: int, gamma: float, beta: float) -> Floats:
    r"""log of the exact coefficient of sigma_i^2 in U_3 of Theorem 4.6.

    q_i = sum_{t >= i} gamma^(T-t) ((1-beta) / (1-beta^t))^2 beta^(2(t-i)). Theorem 4.8 bounds it by c1
    gamma^(T+t), then gamma^(That-1) c2 gamma^(T-t), but its last line counts gamma^(That) once too
    often: with the printed c2 the "bound" lies below q right after the turn, by gamma^That, and its
    schedule is worse than uniform noise. What is returned here is best under Theorem 4.6; as that adds
    up variances of steps that share noise, `schedules.quadratic_influence` is nearer to the truth.

    Args:
      steps: T >= 1.
      gamma: contraction, in (0, 1].
      beta: in [0, 1).

    Returns:
      log q_t, float64 [T]; (T-t) log gamma if beta = 0.
    """
    if not (steps >= 1 and 0 < gamma <= 1 and 0 <= beta < 1):
        raise ValueError(
            f"steps={steps}, gamma={gamma}, beta={beta}: use steps >= 1, gamma in (0, 1] and beta in "
            "[0, 1)."
        )
    t = np.arange(1.0, steps + 1)
    own = (steps - t) * math.log(gamma) + 2 * (math.log1p(-beta) - np.log1p(-(beta**t)))
    decay = 2 * math.log(beta) if beta else -math.inf
    q = own.copy()
    for i in range(steps - 2, -1, -1):
        q[i] = np.logaddexp(own[i], decay + q[i + 1])
    return q


# ------------------------------------------------------------------ Algorithm 1


def affordable_steps(multipliers: Floats, budget: float) -> int:
    """Steps of Algorithm 1 before one asks for more than is left of R.

    Args:
      multipliers: sigma_t > 0, [T].
      budget: R > 0; infinity allows all.

    Returns:
      0..T. sum of sigma_t^-2 of these is at most R (1 + `TOLERANCE`).

    >>> affordable_steps(np.sqrt([2.0, 2.0, 2.0]), 1.0)
    2
    """
    if not budget > 0:
        raise ValueError(f"budget R={budget} must be above 0.")
    spent = np.cumsum(np.asarray(multipliers, dtype=np.float64) ** -2.0)
    return int(np.searchsorted(spent, budget * (1 + TOLERANCE), side="right"))


class Descent(NamedTuple):
    """Last iterate [D], the steps done, and what they spent of R."""

    theta: Floats
    steps: int
    spent: float


def private_gradient_descent(
    gradients: Callable[[Floats], Floats],
    start: Floats,
    multipliers: Floats,
    *,
    rates: Floats | float,
    clip: float,
    budget: float,
    generator: np.random.Generator,
    beta: float = 0.0,
) -> Descent:
    """Algorithm 1, full batch. A simulation from a seeded generator: no private release.

    Args:
      gradients: theta [D] -> per-example gradients [N, D].
      start: theta_1, [D].
      multipliers: sigma_t, [T].
      rates: eta_t, [T], or one for all steps.
      clip: G, bound on each per-example gradient's norm.
      budget: R; the run ends before a step that asks for more than is left.
      generator: of the noise.
      beta: of momentum with bias correction (Eq. 3); 0 is gradient descent (Eq. 2).

    Returns:
      The descent, over at most T steps.
    """
    done = affordable_steps(multipliers, budget)
    eta = np.broadcast_to(np.asarray(rates, dtype=np.float64), np.shape(multipliers))
    theta = np.asarray(start, dtype=np.float64)
    average = np.zeros_like(theta)
    for t in range(done):
        rows = np.asarray(gradients(theta))
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        mean = (rows * (clip / np.maximum(norms, clip))).mean(axis=0)
        noise = clip * multipliers[t] / len(rows) * generator.standard_normal(len(theta))
        average = momentum_average(average, mean + noise, t + 1, beta)
        theta = theta - eta[t] * average
    return Descent(theta, done, float((np.asarray(multipliers)[:done] ** -2.0).sum()))


def momentum_average(average: Floats, gradient: Floats, step: int, beta: float) -> Floats:
    """[beta (1 - beta^(t-1)) m_t + (1 - beta) g_t] / (1 - beta^t) (Eq. 3); g_t if beta = 0.

    Args:
      average: m_t, any shape.
      gradient: g_t, the same shape.
      step: t, from 1.
      beta: in [0, 1).
    """
    kept = beta * (1 - beta ** (step - 1))
    return np.asarray((kept * average + (1 - beta) * gradient) / (1 - beta**step))


def positive(name: str, value: float) -> float:
    """The value, or a ValueError that names it where it is not above 0 and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be above 0 and finite.")
    return float(value)


def _log_inverse(delta: float) -> float:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must be in (0, 1).")
    return -math.log(delta)
