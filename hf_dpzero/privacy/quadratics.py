"""How the noise of a step reaches the result of gradient descent on a quadratic, exactly.

f(theta) = (1/2) sum_j h_j theta_j^2, theta_(t+1) = theta_t - eta m_(t+1), with m the average of the
gradients with momentum beta and bias correction (Hong, Wang and Zhou 2022, Eq. 3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def quadratic_responses(
    curvature: Floats, rate: float, steps: int, beta: float = 0.0
) -> tuple[Floats, Floats]:
    """How theta_(T+1) answers to theta_1 and to an error in the gradient of each step.

    Args:
      curvature: h_j, [D].
      rate: eta.
      steps: T >= 1.
      beta: of momentum with bias correction (Eq. 3); 0 is gradient descent.

    Returns:
      theta_(T+1) = a theta_1 - eta sum_t k_t error_t: a, float64 [D], and k, float64 [T, D].
    """
    h = np.asarray(curvature, dtype=np.float64)
    k = np.empty((steps, len(h)))
    to_theta, to_average = np.ones_like(h), np.zeros_like(h)  # of theta_(T+1) by theta_t, by m_t
    for t in range(steps, 0, -1):
        unbias = 1 - beta**t
        by_new = to_average - rate * to_theta  # by m_(t+1), which theta_(t+1) contains
        k[t - 1] = -by_new * (1 - beta) / unbias / rate
        to_average = by_new * beta * (1 - beta ** (t - 1)) / unbias
        to_theta = to_theta + by_new * (1 - beta) / unbias * h
    return to_theta, k


def quadratic_influence(curvature: Floats, rate: float, steps: int, beta: float = 0.0) -> Floats:
    """q_t = (1/2) eta^2 sum_j h_j k_tj^2: E f's share of noise of variance 1 in step t, exactly.

    Args:
      curvature: h_j, [D].
      rate: eta.
      steps: T.
      beta: of momentum.

    Returns:
      float64 [T].
    """
    _, k = quadratic_responses(curvature, rate, steps, beta)
    return np.asarray(rate**2 / 2 * k**2 @ np.asarray(curvature, dtype=np.float64))
