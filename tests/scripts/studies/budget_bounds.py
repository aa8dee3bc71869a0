"""Bounds on the excess loss under a noise schedule, and choices of T.

Symbols and source as in `budget`: Hong, Wang and Zhou 2022.
"""

from __future__ import annotations

import math

from scripts.studies.budget.algorithm import positive


def contraction(kappa: float) -> float:
    """gamma = 1 - 1/kappa (Eq. 6); 0 at kappa = 1, where one step of size 1/M ends at the optimum."""
    if not kappa >= 1:
        raise ValueError(f"kappa={kappa}: the condition number M/mu is at least 1.")
    return 1 - 1 / kappa


def noise_constant(
    dimension: int, clip: float, budget: float, smoothness: float, examples: int, gap: float
) -> float:
    """alpha = D G^2 / (2 R M N^2 Delta) (Eq. 4), Delta = f(theta_1) - f*."""
    values = {"D": dimension, "G": clip, "R": budget, "M": smoothness, "N": examples, "Delta": gap}
    d, g, r, m, n, delta = (positive(name, value) for name, value in values.items())
    return d * g**2 / (2 * r * m * n**2 * delta)


def uniform_bound(steps: float, alpha: float, gamma: float) -> float:
    """ERUB of uniform noise: gamma^T + alpha T (1 - gamma^T) / (1 - gamma) (Eq. 9)."""
    kept = gamma**steps
    return kept + alpha * steps * (steps if gamma == 1 else (1 - kept) / (1 - gamma))


def dynamic_bound(steps: float, alpha: float, gamma: float) -> float:
    """ERUB of the best noise: gamma^T + alpha ((1 - gamma^(T/2)) / (1 - sqrt gamma))^2."""
    root = math.sqrt(gamma)
    return gamma**steps + alpha * (steps if gamma == 1 else (1 - root**steps) / (1 - root)) ** 2


def uniform_steps(alpha: float, gamma: float) -> float:
    """The paper's T for uniform noise: ln(1 + ln(1/gamma) / alpha) / ln(1/gamma) (Eq. 24).

    Near the least of `uniform_bound`, but for gamma -> 1, where it tends to 1/alpha, not to 0 as the
    paper says, and the bound to 1 + 1/alpha.
    """
    rate = -math.log(gamma)
    return math.log1p(rate / positive("alpha", alpha)) / rate if rate else 1 / alpha


def dynamic_steps(alpha: float, gamma: float) -> float:
    """T of the least `dynamic_bound`: 2 log_gamma(alpha / (alpha + (1 - sqrt gamma)^2)) (Eq. 27).

    Theorem 4.5 prints a larger T, which its own proof does not have.
    """
    rate = -math.log(gamma)
    ratio = math.expm1(-rate / 2) ** 2 / positive("alpha", alpha)
    return 2 * math.log1p(ratio) / rate if rate else 0.0
