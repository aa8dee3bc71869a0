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

Vectors
-------
A d-vector m (the sum, float64) is released as g round((m + z) / g), z of deviation s = sigma C in each
coordinate and g the power of two in (2^-9 s, 2^-8 s]. Were m + z a real number with exact Gaussian z,
rounding it would be post-processing of the Gaussian mechanism and cost nothing. What runs differs from
that by the floating-point error of m + z alone, because the grid hides everything finer:

1. z = s Z, Z the normal quantile of a uniform number drawn to a relative 2^-52 (`noise.py`). |Z - Z*| <=
   2^-46 for an exactly Gaussian Z* and |Z*| <= 16: 2^-52.6 for the uniform, |Z| 2^-50 for the quantile
   function (a test compares it with 200-bit arithmetic). m / g is split into an integer and a rest in
   [-1/2, 1/2], exactly, and only the rest meets the noise: two more roundings of numbers below 2^14. In
   units of g the error is at most 2^-46 2^9 + 2 * 2^-40 <= 2^-36.6.
2. So the computed cell is the ideal one unless m + z* is that close to a cell's edge. Inside 16 s the
   density changes by less than e^(16 / 2^8) over a cell: P[computed = k] is within a factor
   1 +- 2 * 1.07 * 2^-36.6 of P[ideal = k], so its logarithm is within h = 2^-35 of the ideal one.
3. Over N = T d draws, each conditional on the past, the log-likelihood ratios of the two runs add up
   to at most h' = h sqrt(2 N log(1 / d')) + N h (e^h - 1), except with probability d' (advanced
   composition, Dwork, Rothblum and Vadhan 2010; either run may be the reference). If the ideal run is
   (eps, (1 - 2^-8) delta)-DP, the computed one is (eps + 2 h', delta)-DP for h' <= 2^-9 and
   d' = 2^-10 delta e^-(eps + 1); draws beyond 16 s have probability below 2^-188 each.

`dense_slack` returns h': 7e-6 for d = 10^6, T = 1000, epsilon 8, delta 1e-6. The plan evaluates its
accountant at (1 - 2^-8) delta and adds 2 h'. The grid adds 2^-16 / 12 of the noise's variance at most.

Vectors with noise that is correlated over R steps
--------------------------------------------------
Step t releases g round((m_t + s n_t) / g), n = C^{-1} Z, on the grid of s, the deviation of s Z. With
real numbers that is post-processing of m + s C^{-1} Z, one Gaussian mechanism on C m. What runs differs
by the floating-point error of m_t / g + n_t s / g alone:

1. A row of C^{-1} has a sum w of absolute values. Within 16 deviations of every draw the error of n_t is
   at most w 2^-46 for the draws, and 16 f 2^-53 for the sum, f of `matrices.summation_error`; the grid
   adds two roundings as above. In units of g, which is more than 2^-9 s, that is at most
   e = w (2^-37 + 2 * 2^-40) + 1.01 f 2^-40.
2. Take one coordinate, and any sequence of R cells. The computed cells are these only if n lies in the
   box of the cells after widening it by a = 2e about its centre, and whenever n lies in the box
   after narrowing it by a. Widening multiplies the volume by (1 + a)^R <= e^(aR), and moves the density
   exp(-|C n|^2 / 2) at n by at most exp(a sum_j |<c_j, C n>| / 2^9), the half width of a cell being at
   most 2^-9. <c_j, Z> is Gaussian of deviation ||c_j|| <= S, beyond 16 S with probability below 2^-188,
   and changes by at most R S^2 2^-9 inside the box. So the logarithm of the probability of any R cells
   is within H = 1.01 R a (1 + 2^-9 (16 S + 2^-9 R S^2)) of the ideal one, whatever totals m_t were
   chosen after seeing earlier cells.
3. A coordinate is thus an interactive mechanism whose computed and ideal form are H-indistinguishable.
   d of them run side by side, with totals that depend on all: concurrent composition of such
   mechanisms is no worse than that of randomised responses (Vadhan and Wang 2021, arXiv:2105.14427),
   so step 3 above holds with d terms of H in place of T d terms of h.

Where noise begins anew after each R steps there are d such mechanisms a block. `correlated_draws`
returns the number of independent draws whose slack is at least as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GRID_BITS = 30
DENSE_GRID_BITS = 8
"""The grid of a noised d-vector is at most 2^-8 of the noise's standard deviation."""
DENSE_LOG_RATIO = 2.0**-35
"""h of one coordinate: see the module's docstring on vectors, step 2."""
DENSE_DELTA = 1.0 - 2.0**-8
"""Share of delta at which a run that releases d-vectors is accounted; the rest pays for the grid."""
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
    scale = noise_multiplier * 2.0**GRID_BITS
    return draws * (40.0**2 + 2.0) / (12.0 * scale * scale)


def dense_slack(draws: int, epsilon: float, delta: float) -> float:
    """h': the log-likelihood distance between a run's noised d-vectors and ideal ones.

    (epsilon, (1 - 2^-8) delta) of the real-valued Gaussian becomes (epsilon + 2 h', delta); see the
    module's docstring on vectors, step 3.

    Args:
      draws: N, coordinates that receive noise in the whole run, T d.
      epsilon: of the ideal run at (1 - 2^-8) delta.
      delta: of the run, in (0, 1).

    Returns:
      h' >= 0; 0 for no draws.

    Raises:
      ValueError: so many draws that h' exceeds 2^-9.

    >>> round(dense_slack(10**9, 8.0, 1e-6), 6)
    7e-06
    """
    if draws == 0 or not math.isfinite(epsilon):
        return 0.0
    h, log_failure = DENSE_LOG_RATIO, math.log(1 / delta) + 10 * math.log(2) + epsilon + 1
    slack = h * math.sqrt(2.0 * draws * log_failure) + draws * h * math.expm1(h)
    if slack > 2.0**-9:
        raise ValueError(
            f"{draws:.3g} noisy coordinates in one run: the rounding of so many is not covered by the "
            "proof; train fewer parameters (PEFT), or take fewer steps."
        )
    return slack


def correlated_draws(
    dimension: int, steps: int, block: int, rounding: float, row: float, sensitivity: float
) -> int:
    """Independent noised coordinates whose slack covers a run with noise correlated over steps.

    See the module's docstring, on vectors with noise that is correlated.

    Args:
      dimension: d, coordinates of a step.
      steps: of the run.
      block: R, steps after which noise begins anew; 1 is independent noise.
      rounding: f, largest `summation_error` of a row of C^{-1}.
      row: w, largest sum of absolute values in a row of C^{-1}.
      sensitivity: S, largest column norm of C.

    Returns:
      What to pass to `dense_slack` as `draws`; dimension * steps for independent noise.
    """
    if block == 1:
        return dimension * steps
    error = row * (2.0**-37 + 2.0**-39) + 1.01 * rounding * 2.0**-40
    density = 16 * sensitivity + 2.0**-9 * block * sensitivity**2
    ratio = 1.01 * block * 2 * error * (1 + 2.0**-9 * density)
    blocks = math.ceil(steps / block)
    return math.ceil(dimension * blocks * max(1.0, ratio / DENSE_LOG_RATIO) ** 2 * (1 + 2.0**-10))


def dense_grid(scale: float) -> float:
    """The grid of a d-vector with noise of deviation `scale`: a power of two in (2^-9, 2^-8] scale.

    >>> dense_grid(1.0), dense_grid(1.99)
    (0.00390625, 0.00390625)
    """
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - DENSE_GRID_BITS)


def noised_on_grid(total: np.ndarray, normals: np.ndarray, scale: float) -> np.ndarray:
    """total + scale * normals, rounded to `dense_grid(scale)`.

    The guarantee is in the module's docstring, on vectors. A total beyond 2^52 grid units, or one that
    is not finite, keeps its own spacing.

    Args:
      total: float64 [n], in the units of `scale`.
      normals: standard normal draws [n] of a `NoiseSource`, float64.
      scale: standard deviation > 0.

    Returns:
      float64 [n], multiples of the grid.
    """
    grid = dense_grid(scale)
    units = total / grid
    whole = np.rint(units)
    return (whole + np.rint((units - whole) + normals * (scale / grid))) * grid


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
