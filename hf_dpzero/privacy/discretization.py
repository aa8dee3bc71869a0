r"""Clipped rows on an integer grid: exact sums, and why the Gaussian epsilon holds for them.

All arithmetic before the release is on integers. The grid is gamma = C * 2^-30. An example adds an
integer vector of norm at most floor(2^30 / (1 + 2^-8)), exactly, and what it adds in another place
differs by 2^-8 of that at most (A2 of `batches.placement`, which is meant of these integers; the
tests behind it leave room for a truncation). So one example moves the integer total by a vector of
norm at most R = 2^30, and the noise is a discrete Gaussian with parameter s = sigma * 2^30 per
coordinate (Canonne, Kamath, Steinke 2020, arXiv:2004.00010; their Theorem 4 gives it the zCDP of the
continuous Gaussian, which is what an RDP accountant needs). For accountants that need the whole
privacy-loss distribution, compare the discrete Gaussian Y with X = the continuous N(0, s^2) rounded
to the nearest integer:

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
   d' = 2^-10 delta e^-(eps + 1), up to events of either run that are not covered: draws beyond 16 s, of
   probability below 2^-188 each. They cost N 2^-183 e^(eps + 1) at most, also with what correlated noise
   adds below, and there is 2^-10 delta for them while eps + log(N / delta) <= 118. Beyond that nothing
   is claimed (h' is infinite): computed noise ends at 16.1 s, and runs that are farther apart do not
   overlap.

`dense_slack` returns h': 7e-6 for d = 10^6, T = 1000, epsilon 8, delta 1e-6. The plan evaluates its
accountant at (1 - 2^-8) delta and adds 2 h'. The grid adds 2^-16 / 12 of the noise's variance at most.

Vectors with noise that is correlated over steps
------------------------------------------------
Step t releases g round((m_t + s n_t) / g + b L), n = C^{-1} Z, on the grid of s, the deviation of s Z,
with a fresh standard Laplace draw L for each number and b = 1/4. With real numbers that is
post-processing of m + s C^{-1} Z, one Gaussian mechanism on C m. What runs differs by floating-point
errors. A base draw is in the noise of many steps, so their errors depend on each other; L belongs to one
step alone. (Without it the bound of a coordinate's R steps is R times that of one, not its root.)

1. The error of x = (m_t + s n_t) / g before L is added. |Z - Z*| <= 2^-53 (8 |Z*| + 1.4) as above. A sum
   in the order of `matrices.groups_of` is wrong by 2^-53 sum_j k_tj |w_tj Z_j|, w = C^{-1} and k of
   `matrices.roundings`; the product with s / g and the sum with the rest of m / g are two roundings
   more. As s / g < 2^9 the error is at most e_t = 2^-44 sum_j v_tj (|Z*_j| + 1/4), where v_tj =
   |w_tj| (10 + k_tj).
2. Let V^2 be the largest sum of v over a row times that over a column. By Cauchy's inequality the sum
   of e_t^2 is at most 2^-88 V^2 sum_j (|Z*_j| + 1/4)^2. Each of those is at most 5/4 Z*^2 + 5/16, and
   over N = T d draws sum Z*^2 <= N + 2 sqrt(256 N) + 512 <= 5/4 N + 1536 but with probability e^-256
   (Laurent and Massart 2000, Lemma 1). So the sum of all e_t^2 is at most 2^-88 V^2 (2 N + 1920).
3. Take all Z* as known; they have one law in the computed and in the ideal run. Given them and the past,
   a cell depends on its L alone. An error e of x changes the probability of a cell by a factor within
   e^(+-e / b), the density of b L being what it is. x is split into an integer and a rest, exactly; L,
   the logarithm of a uniform number, is within 2^-51 + |L| 2^-50 of an exact one, and below 128 but with
   probability 2^-184; the sum with the rest is one rounding of a number below 33. In cells these are at
   most r = 2^-44, and a cell whose edges are off by r has its probability within e^(+-(2.01 + 1 / b) r).
4. So the logarithms of a run's N cells are within h_i = e_i / b + 6.01 r of the ideal ones, and the sum
   of h_i^2 is at most N H^2, H = 4 * 2^-44 V sqrt(2 + 1920 / N) + 6.01 * 2^-44. Given Z* the h_i are
   fixed numbers, so that step 3 above holds with H in place of h: the deviation is that of Azuma and
   Hoeffding for terms that differ, and the mean of each term is at most h_i^2 / 2 (Bun and Steinke 2016,
   Proposition 3.3), in all N H^2 / 2.

`correlated_draws` returns the number of independent draws whose slack is as large; 2^31 coordinates over
10^4 steps of 32 bands need no more than independent noise does. What L adds to the noise's variance,
g^2 / 8, does not cancel over steps; with the grid's g^2 / 12 it is at most 2^-18 s^2 a step.
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
DENSE_TAILS = 118.0
"""Largest epsilon + log(draws / delta) for which draws beyond 16 deviations are paid for: step 3."""
DITHER = 0.25
"""b, scale of the Laplace draws under noise that is correlated over steps, in cells of the grid."""
GRID_RADIUS = 2**GRID_BITS
"""C in units of the grid: one example more moves the integer total by at most this norm."""


def discretisation_slack(noise_multiplier: float, draws: int) -> float:
    """Returns h, the log-likelihood distance between a run with discrete and one with rounded noise.

    (eps, delta) of the continuous Gaussian becomes (eps + 2h, e^h delta); see the proof in this
    module's docstring, steps 1 to 3, with t = 40.

    Args:
      noise_multiplier: sigma > 0, the smallest of the run; the integer scale is sigma * 2^30.
      draws: number of coordinates that receive noise in the whole run, T * K.

    >>> discretisation_slack(1.0, 10_000 * 16) < 1e-10
    True
    """
    scale = noise_multiplier * 2.0**GRID_BITS
    return draws * (40.0**2 + 2.0) / (12.0 * scale * scale)


def dense_slack(draws: int, epsilon: float, delta: float) -> float:
    """Returns h', the log-likelihood distance between a run's noised d-vectors and ideal ones.

    (epsilon, (1 - 2^-8) delta) of the real-valued Gaussian becomes (epsilon + 2 h', delta); see the
    module's docstring on vectors, step 3.

    Args:
      draws: N, coordinates that receive noise in the whole run, T d.
      epsilon: of the ideal run at (1 - 2^-8) delta.
      delta: of the run, in (0, 1).

    Returns:
      h' >= 0; 0 for no draws, infinite for an epsilon so large that rare draws are not paid for
      (above 74 for delta = 1e-6 and 10^13 draws).

    Raises:
      ValueError: so many draws that h' exceeds 2^-9.

    >>> round(dense_slack(10**9, 8.0, 1e-6), 6)
    7e-06
    """
    if draws == 0 or not math.isfinite(epsilon):
        return 0.0
    if epsilon + math.log(draws / delta) > DENSE_TAILS:
        return math.inf
    h, log_failure = DENSE_LOG_RATIO, math.log(1 / delta) + 10 * math.log(2) + epsilon + 1
    slack = h * math.sqrt(2.0 * draws * log_failure) + draws * h * math.expm1(h)
    if slack > 2.0**-9:
        raise ValueError(
            f"{draws:.3g} noisy coordinates in one run: the rounding of so many is not covered by the "
            "proof; train fewer parameters (PEFT), or take fewer steps."
        )
    return slack


def correlated_draws(dimension: int, steps: int, rounding: float) -> int:
    """Returns how many independent coordinates have a slack that covers correlated noise.

    See the module's docstring, on vectors with noise that is correlated.

    Args:
      dimension: d, coordinates of a step.
      steps: of the run.
      rounding: V, `Factorization.rounding`.

    Returns:
      What to pass to `dense_slack` as `draws`; at least dimension * steps.
    """
    draws = dimension * steps
    shift = 2.0**-44 * rounding * math.sqrt(2.0 + 1920.0 / draws) / DITHER
    ratio = shift + (2.01 + 1.0 / DITHER) * 2.0**-44
    return math.ceil(draws * max(1.0, ratio / DENSE_LOG_RATIO) ** 2 * (1 + 2.0**-10))


def dense_grid(scale: float) -> float:
    """Returns the grid for noise of deviation `scale`: a power of two in (2^-9, 2^-8] scale.

    >>> dense_grid(1.0), dense_grid(1.99)
    (0.00390625, 0.00390625)
    """
    return math.ldexp(1.0, math.frexp(scale)[1] - 1 - DENSE_GRID_BITS)


def noised_on_grid(
    total: np.ndarray, normals: np.ndarray, scale: float, dither: np.ndarray | None = None
) -> np.ndarray:
    """Returns total + scale * normals, rounded to `dense_grid(scale)`.

    The guarantee is in the module's docstring, on vectors. A total beyond 2^52 grid units, or one that
    is not finite, keeps its own spacing.

    Args:
      total: float64 [n], in the units of `scale`.
      normals: standard normal draws [n] of a `NoiseSource`, float64.
      scale: standard deviation > 0.
      dither: standard Laplace draws, float64 [n], added in units of `DITHER` cells; None for no.

    Returns:
      float64 [n], multiples of the grid.
    """
    grid = dense_grid(scale)
    units = total / grid
    whole = np.rint(units)
    noised = (units - whole) + normals * (scale / grid)
    cells = np.rint(noised)
    if dither is not None:
        cells += np.rint((noised - cells) + DITHER * dither)
    return (whole + cells) * grid


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


def on_grid(rows: np.ndarray, radius: float, grid: float, order: int) -> np.ndarray:
    """Returns rows * min(1, r/||row||) / gamma, truncated: int64 [B, K].

    Guarantee: ||v||_order <= r / gamma for every row v, checked in integer arithmetic.

    Args:
      rows: finite, float64 [B, K].
      radius: r > 0, in their units; at most 2^30 gamma.
      grid: gamma, the spacing.
      order: 2 for Gaussian noise, 1 for Laplace.

    >>> on_grid(np.array([[3.0, 4.0], [-60.0, 80.0]]), radius=10.0, grid=0.125, order=2).tolist()
    [[24, 32], [-48, 64]]
    """
    # Dividing by the largest entry first keeps 1e300 and 1e-300 from overflowing or vanishing.
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    unit = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)
    norm = np.linalg.norm(unit, ord=order, axis=1, keepdims=True)
    inside = largest <= np.divide(radius, norm, out=np.full_like(norm, np.inf), where=norm > 0)
    clipped = np.divide(unit, norm, out=np.zeros_like(unit), where=norm > 0) * (radius / grid)
    kept = np.divide(rows, grid, out=clipped, where=inside)
    integers, most = np.trunc(kept).astype(np.int64), math.floor(radius / grid)
    # The floating-point scaling is wrong by a few units in the last place, a relative 1e-15 K or less:
    # a row whose norm is at the bound may land just above it. Its integers are pulled one unit toward
    # zero until the exact check holds. No int64 overflow: before the check the norm is at most
    # 2^30 (1 + 1e-12), so the sum of squares is below 2^61.
    while (over := _exceeds(integers, most, order)).any():
        integers[over] -= np.sign(integers[over])
    return integers


def float32s(values: Iterable[float]) -> tuple[float, ...]:
    """Rounds the values to float32."""
    return tuple(float(np.float32(v)) for v in values)


def _exceeds(integers: np.ndarray, most: int, order: int) -> np.ndarray:
    """Says which integer rows have norm above `most`, in integer arithmetic."""
    if order == 1:
        return np.abs(integers).sum(axis=1) > most
    return (integers * integers).sum(axis=1) > most**2
