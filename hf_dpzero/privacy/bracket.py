r"""A second account of epsilon, from below and from above, that shares nothing with the first.

`accounting` asks dp-accounting. Here each step's privacy loss is rounded to a grid, and a Fourier
transform composes all (Koskela, Jälkö and Honkela 2020, arXiv:1906.03049), with numpy and scipy alone.
The errors of rounding are independent, lie in an interval of length r, and their mean is put back: their
sum over T steps is within t = r sqrt(T log(2 / d) / 2) but for a probability d (Hoeffding; Gopi, Lee and
Wutschitz 2021, arXiv:2106.02848). With D the divergence of the rounded composition

    D(epsilon + t) - d  <=  delta(epsilon)  <=  D(epsilon - t) + d.

The mean is a quadrature's, whose error is far below the last digit that a report shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_dpzero.privacy.events import Part, StepSpec

_LOST = 1e-4
"""d over delta: of rounding, and of each end of the window outside of which losses wrap around."""
_LARGEST = 2**22
"""The window's points, at most; a coarser grid gives a wider bracket."""
_SMALLEST_DELTA = 1e-10
"""Below it the transform's own rounding would show."""
_MOST_KINDS = 16
"""Different steps that are told apart; each takes a second and tens of megabytes."""


def epsilon_bracket(
    parts: Sequence[Part], delta: float, about: float
) -> tuple[float, float] | None:
    """Returns bounds on the epsilon of all steps, about 1 % apart.

    Args:
      parts: as in `accounting.epsilon_together`, noised. Of batches of a fixed size the bounds are those
        of Poisson sampling, of which the lower one holds.
      delta: in [0, 1).
      about: size of the answer, from which the grid follows.

    Returns:
      (low, high); None for truncated batches, Laplace noise, more than 16 kinds of steps (schedules of
      noise), and a delta below 1e-10.
    """
    parts = [(spec, count) for spec, count in parts if count]
    unknown = (s.sampling == "truncated_poisson" or s.distribution != "gaussian" for s, _ in parts)
    if delta < _SMALLEST_DELTA or len(parts) > _MOST_KINDS or any(unknown):
        return None
    if not parts:
        return 0.0, 0.0
    ends = [_one_way(parts, delta, max(about, 0.05), reverse) for reverse in (False, True)]
    return max(low for low, _ in ends), max(high for _, high in ends)


def _one_way(
    parts: Sequence[Part], delta: float, about: float, reverse: bool
) -> tuple[float, float]:
    """Bounds the epsilon of one of two distributions against the other."""
    lost = _LOST * delta
    unit = math.sqrt(math.log(2 / lost) / 2)  # of t, for one step whose errors have r = 1
    grid = about / (400 * unit * math.sqrt(sum(count for _, count in parts)))
    losses = [(*_loss(spec, grid, reverse), count) for spec, count in parts]
    first, last = (_end([(c, m, n) for c, m, *_, n in losses], lost, sign) for sign in (-1, 1))
    size = 2 ** math.ceil(math.log2(last - first + 2))
    if size > _LARGEST:
        return _one_way(parts, delta, about * size / _LARGEST, reverse)
    product = np.ones(size // 2 + 1, dtype=np.complex128)
    for cells, masses, *_, count in losses:
        product *= np.fft.rfft(np.bincount(cells % size, masses, size)) ** count
    composed = np.roll(np.fft.irfft(product, size), -(first % size)).clip(min=0)
    error = math.fsum(n * error for *_, error, _, n in losses)
    moved = unit * math.sqrt(math.fsum(n * (grid + width) ** 2 for *_, width, n in losses))
    values = (first + np.arange(size)) * grid + error
    low, high = (_epsilon(values, composed, delta + sign * 3 * lost) for sign in (1, -1))
    return max(low - moved, 0.0), high + moved


def _loss(
    spec: StepSpec, grid: float, reverse: bool
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """The log ratio of (1-q) N(0) + q N(s) over N(0), or over its mirror image where rows are replaced.

    Returns:
      Its values on the grid, as rising integers; their masses under the first; the mean of what rounding
      took away; the widest piece that was rounded as a whole. In reverse of the ratio's inverse, under
      the second.
    """
    from scipy.special import ndtr

    sigma, q = spec.noise_multiplier, spec.probability
    shift = 1.0 if q < 1 else float(spec.sensitivity)
    other = -shift if spec.relation == "replace_one" and q < 1 else 0.0
    reach = 10 * sigma + shift
    x = np.linspace(-reach, reach, int(min(max(4 * reach / sigma**2 / grid, 2e4), 2e6)))

    def log_ratio(s: float) -> np.ndarray:  # of (1-q) N(0) + q N(s) over N(0)
        moved = math.log(q) + (x * s - s**2 / 2) / sigma**2
        return np.logaddexp(moved, math.log1p(-q)) if q < 1 else moved

    def masses(s: float) -> np.ndarray:  # of the former, each from the smaller tail
        below, above = (
            (1 - q) * ndtr(z * x / sigma) + q * ndtr(z * (x - s) / sigma) for z in (1, -1)
        )
        return np.where(x[:-1] > 0, -np.diff(above), np.diff(below))

    ends, mass = log_ratio(shift) - log_ratio(other), masses(other if reverse else shift)
    values = (ends[:-1] + ends[1:]) / (-2 if reverse else 2)
    cells = np.rint(values / grid).astype(np.int64)
    joined = np.bincount(cells - cells.min(), mass)
    error, width = float(mass @ (values - cells * grid)), float(np.diff(ends).max())
    return cells.min() + np.arange(len(joined)), joined, error, width


def _end(losses: Sequence[tuple[np.ndarray, np.ndarray, int]], lost: float, sign: int) -> int:
    """What the composition passes, above or below, with probability `lost` at most (Chernoff)."""
    found = float(sum(n * (sign * cells).max() for cells, _, n in losses))
    unit = 1 / max(len(cells) for cells, *_ in losses)
    for order in unit * 2.0 ** np.arange(-4, 12):
        cumulants = 0.0
        for cells, masses, count in losses:
            exponents = sign * order * cells
            top = float(exponents.max())
            cumulants += count * (top + math.log(float(np.exp(exponents - top) @ masses)))
        found = min(found, (cumulants - math.log(lost)) / order)
    return sign * math.ceil(found)


def _epsilon(values: np.ndarray, masses: np.ndarray, delta: float) -> float:
    """The epsilon >= 0 at which the hockey-stick divergence of a discrete loss is delta."""
    low, high = 0.0, max(float(values[-1]), 0.0)
    for _ in range(50):
        middle = (low + high) / 2
        i = int(np.searchsorted(values, middle))
        excess = float(masses[i:] @ -np.expm1(middle - values[i:])) - delta
        low, high = (middle, high) if excess > 0 else (low, middle)
    return high if low else 0.0
