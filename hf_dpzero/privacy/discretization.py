r"""Clipped rows on an integer grid: exact sums, and why the Gaussian epsilon holds for them.

All arithmetic before the release is on integers. The grid is gamma = C * 2^-30, so one example
moves the integer total by a vector of norm at most R = 2^30, exactly, and the noise is a discrete
Gaussian with parameter s = sigma * 2^30 per coordinate (Canonne, Kamath, Steinke 2020,
arXiv:2004.00010; their Theorem 4 gives it the zCDP of the continuous Gaussian, which is what an
RDP accountant needs). For accountants that need the whole privacy-loss distribution, compare the
discrete Gaussian Y with X = the continuous N(0, s^2) rounded to the nearest integer:

1. X + k, for an integer vector k, is a rounding of (noise + k), hence a post-processing of the
   continuous mechanism. The continuous accounting applies to X without any loss.
2. For |y| <= t s, P[X = y] is the integral of the Gaussian density over [y - 1/2, y + 1/2], so
   |log(P[Y = y] / P[X = y])| <= (t^2 + 3) / (24 s^2) + 1e-16 <= (t^2 + 2) / (12 s^2) for s >= 2^20
   and t >= 1 (log(sinh(a)/a) <= a^2/6 for the tilt, 1/(8 s^2) for the curvature, Poisson summation
   for the normalising constants).
3. Both distributions put at most 2 exp(-(t - 1)^2 / 2) outside that range.

Over T steps of K coordinates the two runs are therefore (h, d0)-close, h = T K (t^2 + 2)/(12 s^2)
and d0 = 2 T K exp(-(t - 1)^2 / 2), and if the continuous run is (eps, delta)-DP then the discrete
one is (eps + 2 h, e^h delta + (1 + e^(eps + h)) d0)-DP. With t = 40, d0 is below 1e-320 for every
run of fewer than 10^9 draws, and stays negligible beside any delta for eps up to 600.
`discretisation_slack` returns h: 1.2e-16 / sigma^2 per draw, 2e-11 for T = 10^4, K = 16, sigma = 1.
The plan evaluates its accountant at e^-h delta and adds 2 h to the epsilon that it reports. A noise
multiplier below 2^-10 (integer scale 2^20) is refused, which keeps h small in every accepted plan.
Coordinates may have scales of their own (the count of adaptive clipping does): nothing above needs
them equal, and h taken at the smallest scale is an upper bound.

For Laplace noise the discrete distribution has exactly the pure epsilon of the continuous one, and its
(eps, delta) curve interpolates the continuous curve between integers. The curve of a continuous
shift longer by 1/(4 b) grid units lies above that interpolation, so the accounting shrinks b by a
relative 1e-12, many times what is needed. K coordinates with total L1 shift S are dominated by one
coordinate shifted by S (lemma and proof in `events.py`; a test checks it).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GRID_BITS = 30
GRID_RADIUS = 2**GRID_BITS
"""C in units of the grid: one example moves the integer total by at most this norm."""


def discretisation_slack(noise_multiplier: float, draws: int) -> float:
    """h: the log-likelihood distance between a run with discrete and one with rounded noise.

    (eps, delta) of the continuous Gaussian becomes (eps + 2h, e^h delta); see the proof in this
    module's docstring, steps 1 to 3, with t = 40.

    Args:
      noise_multiplier: sigma > 0, the smallest of the run; the integer scale is sigma * 2^30.
      draws: number of coordinates that receive noise in the whole run, T * K.

    Returns:
      h >= 0.

    >>> discretisation_slack(1.0, 10_000 * 16) < 1e-10
    True
    """
    scale = math.ldexp(noise_multiplier, GRID_BITS)
    return draws * (40.0**2 + 2.0) / (12.0 * scale**2)


def finite_rows(x: Tensor, num_directions: int) -> tuple[np.ndarray, np.ndarray]:
    """Replaces rows that hold NaN or infinity by zeros.

    Args:
      x: finite differences [B, K], any dtype and device.
      num_directions: K.

    Returns:
      (rows as float64 [B, K], which rows were finite as bool [B]).

    Raises:
      ValueError: another shape.
    """
    if x.ndim != 2 or x.shape[1] != num_directions:
        raise ValueError(
            f"finite differences of shape {tuple(x.shape)} given; expected [B, {num_directions}], "
            "one row per example and one column per direction."
        )
    rows = x.detach().cpu().double().numpy()
    finite = np.isfinite(rows).all(axis=1)
    return np.where(finite[:, None], rows, 0.0), finite


def on_grid(rows: np.ndarray, clip: float, order: int) -> np.ndarray:
    """Integer rows v with ||v||_order <= 2^30 exactly: rows * min(1, C/||row||) / gamma, truncated.

    The floating-point scaling is wrong by a few units in the last place, a relative 1e-15 K or
    less, so a row whose norm is at the bound may land just above it. The integers of such a row
    are pulled one unit toward zero until the exact integer check holds: the bound is verified, not
    estimated. No int64 overflow: before the check the norm is at most 2^30 (1 + 1e-12), so the sum
    of squares is below 2^61.

    Dividing by the largest entry first keeps 1e300 and 1e-300 from overflowing or vanishing.

    Args:
      rows: finite, float64 [B, K].
      clip: C > 0, in their units.
      order: 2 for Gaussian noise, 1 for Laplace.

    Returns:
      int64 [B, K].
    """
    inside, unit, norm = _inside(rows, clip, order)
    direction = np.divide(unit, norm, out=np.zeros_like(unit), where=norm > 0)
    kept = np.divide(rows, clip, out=np.zeros_like(rows), where=inside)
    integers = np.trunc(np.where(inside, kept, direction) * GRID_RADIUS).astype(np.int64)
    while (over := _exceeds(integers, order)).any():
        integers[over] -= np.sign(integers[over])
    return integers


def within(rows: np.ndarray, clip: float, order: int = 2) -> np.ndarray:
    """Which rows have norm at most C, to float64's accuracy.

    Args:
      rows: finite, float64 [B, K].
      clip: C > 0, in their units.
      order: of the norm.

    Returns:
      bool [B].

    >>> within(np.array([[3.0, 4.0], [6.0, 8.0], [1e300, 1e300]]), clip=5.0).tolist()
    [True, False, False]
    """
    return _inside(rows, clip, order)[0][:, 0]


def float32s(values: Iterable[float]) -> tuple[float, ...]:
    """The values rounded to float32."""
    return tuple(float(np.float32(v)) for v in values)


def _inside(rows: np.ndarray, clip: float, order: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(norm <= C, rows over their largest entry, norms of those), [B, 1], [B, K], [B, 1]."""
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    unit = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)
    norm = np.linalg.norm(unit, ord=order, axis=1, keepdims=True)
    inside = largest <= np.divide(clip, norm, out=np.full_like(norm, np.inf), where=norm > 0)
    return inside, unit, norm


def _exceeds(integers: np.ndarray, order: int) -> np.ndarray:
    """Which integer rows have norm above 2^30, decided in integer arithmetic."""
    if order == 1:
        return np.abs(integers).sum(axis=1) > GRID_RADIUS
    return (integers * integers).sum(axis=1) > GRID_RADIUS**2
