"""Bounds on the excess loss under a noise schedule, choices of T, and a zeroth-order quadratic, exactly.

Symbols and source as in `budget`: Hong, Wang and Zhou 2022.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.papers.budget import positive

Floats = NDArray[Any]


def contraction(kappa: float) -> float:
    """gamma = 1 - 1/kappa (Eq. 6); 0 at kappa = 1, where one step of size 1/M ends at the optimum."""
    if not kappa >= 1:
        raise ValueError(f"kappa={kappa}: the condition number M/mu is at least 1.")
    return 1 - 1 / kappa


def noise_constant(
    dimension: int, clip: float, budget: float, smoothness: float, examples: int, gap: float
) -> float:
    """alpha = D G^2 / (2 R M N^2 Delta) (Eq. 4).

    Args:
      dimension: D.
      clip: G.
      budget: R.
      smoothness: M.
      examples: N.
      gap: Delta = f(theta_1) - f*.
    """
    values = {"D": dimension, "G": clip, "R": budget, "M": smoothness, "N": examples, "Delta": gap}
    d, g, r, m, n, delta = (positive(name, value) for name, value in values.items())
    return d * g**2 / (2 * r * m * n**2 * delta)


def excess_bound(multipliers: Floats, budget: float, alpha: float, gamma: float) -> float:
    """ERUB = gamma^T + R sum_t gamma^(T-t) alpha sigma_t^2 (Theorem 4.2), for rates 1/M.

    Args:
      multipliers: sigma_t, [T].
      budget: R that alpha was computed with; it cancels.
      alpha: `noise_constant`.
      gamma: contraction, in [0, 1].
    """
    left = np.arange(len(multipliers) - 1, -1, -1)
    noise = float(np.asarray(gamma, np.float64) ** left @ np.square(multipliers))
    return float(gamma ** len(multipliers)) + budget * alpha * noise


def uniform_bound(steps: float, alpha: float, gamma: float) -> float:
    """ERUB of uniform noise: gamma^T + alpha T (1 - gamma^T) / (1 - gamma) (Eq. 9).

    Args:
      steps: T > 0, perhaps no integer.
      alpha: `noise_constant`.
      gamma: in [0, 1]; at 1 the limit 1 + alpha T^2.
    """
    kept = gamma**steps
    return kept + alpha * steps * (steps if gamma == 1 else (1 - kept) / (1 - gamma))


def dynamic_bound(steps: float, alpha: float, gamma: float) -> float:
    """ERUB of the best noise: gamma^T + alpha ((1 - gamma^(T/2)) / (1 - sqrt gamma))^2.

    Args:
      steps: T > 0, perhaps no integer.
      alpha: `noise_constant`.
      gamma: in [0, 1]; at 1 the limit 1 + alpha T^2.
    """
    root = math.sqrt(gamma)
    return gamma**steps + alpha * (steps if gamma == 1 else (1 - root**steps) / (1 - root)) ** 2


def uniform_steps(alpha: float, gamma: float) -> float:
    """The paper's T for uniform noise: ln(1 + ln(1/gamma) / alpha) / ln(1/gamma) (Eq. 24).

    Near the least of `uniform_bound`, but for gamma -> 1, where it tends to 1/alpha, not to 0 as the
    paper says, and the bound to 1 + 1/alpha.

    Raises:
      ValueError: alpha <= 0, or gamma outside (0, 1]; at 0 (kappa = 1) one step is best.
    """
    rate = -math.log(_steps_gamma(gamma))
    return math.log1p(rate / positive("alpha", alpha)) / rate if rate else 1 / alpha


def dynamic_steps(alpha: float, gamma: float) -> float:
    """T of the least `dynamic_bound`: 2 log_gamma(alpha / (alpha + (1 - sqrt gamma)^2)) (Eq. 27).

    Theorem 4.5 prints a larger T, which its own proof does not have.

    Raises:
      ValueError: as `uniform_steps`.
    """
    rate = -math.log(_steps_gamma(gamma))
    ratio = math.expm1(-rate / 2) ** 2 / positive("alpha", alpha)
    return 2 * math.log1p(ratio) / rate if rate else 0.0


# ------------------------------------------------------------------ quadratics


def zeroth_order_quadratic(
    curvature: Floats,
    second_moments: Floats,
    *,
    rate: float,
    noise_std: float,
    steps: int,
    sphere: bool = True,
) -> Floats:
    """Diagonal of E[theta theta^T] after each step of theta -= eta (u^T h theta + s z) u, exactly.

    S_j' = S_j (1 - 2 eta h_j + 2 c eta^2 h_j^2) + c eta^2 sum_k h_k^2 S_k + eta^2 s^2, with c = 1 for
    Gaussian u and d/(d+2) for u uniform on the sphere of radius sqrt(d). Off-diagonal moments stay out
    of it.

    Args:
      curvature: h_j, [d].
      second_moments: diagonal of E[theta theta^T] at the start, [d].
      rate: eta.
      noise_std: s, of the noise on the scalar.
      steps: T >= 0.
      sphere: or Gaussian directions.

    Returns:
      float64 [T+1, d]; E f is half of its product with h.
    """
    h = np.asarray(curvature, dtype=np.float64)
    c = len(h) / (len(h) + 2) if sphere else 1.0
    moments = [np.asarray(second_moments, dtype=np.float64)]
    for _ in range(steps):
        s = moments[-1]
        kept = s * (1 - 2 * rate * h + 2 * c * rate**2 * h**2)
        moments.append(kept + c * rate**2 * (h**2 @ s) + rate**2 * noise_std**2)
    return np.stack(moments)


def _steps_gamma(gamma: float) -> float:
    if gamma == 0:
        raise ValueError("gamma=0 (kappa=1): one step of size 1/M ends at the optimum; use T=1.")
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma={gamma} must be in (0, 1].")
    return gamma
