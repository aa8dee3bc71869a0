"""The grid of the DPZero paper's quadratic study, and the best of what is measured on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.papers.quadratic import Cell, Floats, Quadratic, gradient_descent, zeroth_order

METHODS = ("dpzero", "dpgd-0th", "dp-gd")
NUM_EXAMPLES = 10_000
DIMENSIONS = (20, 50, 100, 200, 500, 1000, 2000)
STEPS = tuple(10 * 2**k for k in range(10))  # 10, 20, ..., 5120
RATES = (*(c * 10.0**e for e in range(-5, 0) for c in (1, 3)), 1.0)  # 1e-5, 3e-5, ..., 1
CLIPS = tuple(c * 10.0**e for e in range(-1, 3) for c in (1, 3))  # 0.1, 0.3, ..., 300
GRADIENT_STEPS = tuple(t for t in STEPS if t <= 160)


def _exponent(power: float) -> Callable[[int], Floats]:
    return lambda d: (np.arange(1, d + 1, dtype=np.float64) ** -power).astype(np.float32)


SPECTRA: dict[str, Callable[[int], Floats]] = {
    "d": _exponent(0.0),
    "sqrt(d)": _exponent(0.5),
    "log(d)": _exponent(1.0),
}
"""Order of the effective rank Tr(A) / ||A|| -> the diagonal of A: 1, 1/sqrt(i), 1/i."""


class Best(NamedTuple):
    """The best over a grid, each figure by itself, and the cell with the best train gradient."""

    train_gradient: float
    test_gradient: float
    train_loss: float
    test_loss: float
    cell: Cell


def grid(steps: Sequence[int], rates: Sequence[float], clips: Sequence[float]) -> list[Cell]:
    """Every combination."""
    return [Cell(*values) for values in itertools.product(steps, rates, clips)]


def useful(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of a DP-GD grid that move at all: alpha T >= 1/2 (the largest curvature is 1).

    A step shrinks the distance along that axis by at most 1 - alpha, so the others end at more than
    half of the initial gradient there.
    """
    return [cell for cell in cells if cell.rate * cell.steps >= 0.5]


def figures(problem: Quadratic, method: str, cells: Sequence[Cell], seed: int) -> NDArray[Any]:
    """Runs a method over a grid: [P, 4] as `Quadratic.measure`, infinite where a run diverged.

    Raises:
      ValueError: an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}.")
    if method == "dp-gd":
        x = gradient_descent(problem, cells, seed=seed)
    else:
        x = zeroth_order(problem, cells, vector_noise=method == "dpgd-0th", seed=seed)
    return np.nan_to_num(problem.measure(x), nan=np.inf)


def best(measured: NDArray[Any], cells: Sequence[Cell]) -> Best:
    """The best of each column of [P, 4], and the cell with the best train gradient."""
    gradients, test_gradients, losses, test_losses = measured.min(axis=0).tolist()
    winner = cells[int(measured[:, 0].argmin())]
    return Best(gradients, test_gradients, losses, test_losses, winner)
