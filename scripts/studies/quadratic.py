"""Figures 1 and 2 of the DPZero paper (Section 5): DPZero, DPGD-0th and DP-GD on quadratics.

    python -m scripts.studies.quadratic --output_dir out/quadratic           # the paper's grid
    python -m scripts.studies.quadratic --quick --output_dir out/quadratic-quick

F(x) = (1/2n) sum_i (x - x_i)^T A (x - x_i),   A = diag(a),   coordinates of x_i ~ N(1, 1)

DPZero (Algorithm 2), DPGD-0th (Algorithm 1) and DP-GD are run from 0 over a grid of steps T, step sizes
alpha and clips C, and the best gradient norm and loss over the grid are kept, as the paper does. On a
quadratic the central difference equals the directional derivative whatever the smoothing:
s_i = u^T A (x - x_i). All cells of a grid share the directions and the noise vectors of a step, so that
a step needs one projection of the data; each cell by itself is a run of its algorithm.

The table has the best train gradient norm over the grid, of one draw or the mean of `--seeds`. Writes
rows.jsonl, table.md, figure1.png and figure2.png. Seeded generators: nothing here is a private release.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.accounting import lemma_noise_multiplier
from scripts.markdown import table
from scripts.studies import harness
from scripts.studies.harness import Row, panels, philox, save

Floats = NDArray[np.float32]

EPSILON, DELTA = 2.0, 1e-6
BLOCK = 16  # directions that are projected at a time


class Cell(NamedTuple):
    """One run of a grid: T, alpha, C."""

    steps: int
    rate: float
    clip: float


@dataclass(frozen=True)
class Quadratic:
    """Data and Hessian.

    Attributes:
      spectrum: the diagonal a of A, float32 [d].
      train, test: x_i, float32 [n, d].
    """

    spectrum: Floats
    train: Floats
    test: Floats

    @classmethod
    def draw(cls, spectrum: Floats, num_examples: int, seed: int) -> Quadratic:
        """Train and test data, coordinates N(1, 1), from a generator of their own.

        Args:
          spectrum: the diagonal of A, float32 [d].
          num_examples: n, of each.
          seed: of the generator.

        Returns:
          The problem.
        """
        generator = philox(seed, 0)
        shape = (2, num_examples, len(spectrum))
        train, test = generator.standard_normal(shape, dtype=np.float32) + np.float32(1.0)
        return cls(spectrum, train, test)

    def measure(self, x: Floats) -> NDArray[np.float64]:
        """[P, 4]: train and test gradient norm, train and test loss at the points x [P, d]."""
        a, norms, losses = self.spectrum.astype(np.float64), [], []
        with np.errstate(over="ignore", invalid="ignore"):
            for data in (self.train, self.test):
                # ||A (x - mean)||, and F(x) = (||x - mean||_A^2 + mean_i ||x_i - mean||_A^2) / 2
                away = x.astype(np.float64) - data.mean(axis=0, dtype=np.float64)
                spread = float(a @ data.var(axis=0, dtype=np.float64))
                norms.append(np.linalg.norm(a * away, axis=1))
                losses.append(((away**2) @ a + spread) / 2)
        return np.stack([*norms, *losses], axis=1)


def noise_std(clip: float, steps: int, num_examples: int) -> float:
    """Deviation of the noise on the clipped mean: 4 C sqrt(2 T log(e + eps/delta)) / (n eps).

    The paper's calibration (Lemma 2.2): replace-one neighbours, full batch.

    Args:
      clip: C.
      steps: T.
      num_examples: n.

    Returns:
      The standard deviation, in the units of C.
    """
    return clip * lemma_noise_multiplier(EPSILON, steps, DELTA) / num_examples


def zeroth_order(
    problem: Quadratic, cells: Sequence[Cell], *, vector_noise: bool, seed: int
) -> Floats:
    """Last iterates [P, d] of Algorithm 2, or with `vector_noise` of Algorithm 1, from 0.

    Directions are uniform on the sphere of radius sqrt(d). Algorithm 1 clips |s_i| at C / ||u||.

    Args:
      problem: data and Hessian.
      cells: P runs.
      vector_noise: Algorithm 1 in place of 2.
      seed: of directions and noise.

    Returns:
      float32 [P, d].
    """
    d, n = len(problem.spectrum), len(problem.train)
    x = np.zeros((len(cells), d), np.float32)
    rates, clips, noises = _columns(cells, n)
    bounds = clips / math.sqrt(d) if vector_noise else clips
    ends = np.array([cell.steps for cell in cells])
    noise = philox(seed, 2)
    for step, (u, projected) in enumerate(_projections(problem, int(ends.max()), seed)):
        on = np.flatnonzero(ends > step)
        at = x[on] @ (problem.spectrum * u)
        mean = clipped_mean(at.astype(np.float64), projected, bounds[on])
        z = noise.standard_normal(d if vector_noise else 1, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            amounts, spread = rates[on] * mean, rates[on] * noises[on]
            if not vector_noise:
                amounts += spread * float(z[0])
            x[on] -= amounts.astype(np.float32)[:, None] * u
            if vector_noise:
                x[on] -= spread.astype(np.float32)[:, None] * z
    return x


def _projections(
    problem: Quadratic, steps: int, seed: int
) -> Iterator[tuple[Floats, NDArray[np.float64]]]:
    """(u [d], the sorted u^T A x_i [n]) of each step, computed for a block of steps at a time."""
    d, generator = len(problem.spectrum), philox(seed, 1)
    for start in range(0, steps, BLOCK):
        drawn = generator.standard_normal((min(BLOCK, steps - start), d), dtype=np.float32)
        block = drawn * (math.sqrt(d) / np.linalg.norm(drawn, axis=1, keepdims=True))
        block = block.astype(np.float32)
        projected = np.sort((problem.train @ (problem.spectrum * block).T).T.astype(np.float64))
        yield from zip(block, projected, strict=True)


def clipped_mean(
    at: NDArray[np.float64], projected: NDArray[np.float64], bounds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """mean_i clip(at - projected_i, +-bound) for each cell, float64 [P].

    Args:
      at: u^T A x of each cell, [P].
      projected: u^T A x_i in ascending order, [n].
      bounds: [P], > 0.

    Returns:
      float64 [P]; NaN where `at` is not finite.

    >>> clipped_mean(np.array([1.0]), np.array([-9.0, 0.0, 3.0]), np.array([4.0]))
    array([1.])
    """
    # sorted once, a cell costs two searches, not a pass over all n terms
    sums = np.concatenate([[0.0], np.cumsum(projected)])
    n = len(projected)
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.searchsorted(projected, at - bounds)  # before it: clipped to +bound
        high = np.searchsorted(projected, at + bounds)  # from it on: clipped to -bound
        inside = at * (high - low) - (sums[high] - sums[low])
        means = (inside + bounds * low - bounds * (n - high)) / n
    return np.where(np.isfinite(at), means, np.nan)


def gradient_descent(problem: Quadratic, cells: Sequence[Cell], *, seed: int) -> Floats:
    """Last iterates of DP-GD: per-example gradients A (x - x_i) clipped to norm C, from 0.

    Args:
      problem: data and Hessian.
      cells: P runs.
      seed: of the noise.

    Returns:
      float32 [P, d].
    """
    a, n = problem.spectrum, len(problem.train)
    x = np.zeros((len(cells), len(a)), np.float32)
    rates, clips, noises = _columns(cells, n)
    ends = np.array([cell.steps for cell in cells])
    squares = (problem.train**2) @ a**2
    noise = philox(seed, 3)
    for step in range(int(ends.max())):
        on = np.flatnonzero(ends > step)
        z = noise.standard_normal(len(a), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = _clipped_gradients(problem, x[on], clips[on].astype(np.float32), squares)
            spread = (rates[on] * noises[on]).astype(np.float32)
            x[on] -= rates[on].astype(np.float32)[:, None] * mean + spread[:, None] * z
    return x


def _clipped_gradients(problem: Quadratic, x: Floats, clips: Floats, squares: Floats) -> Floats:
    """mean_i min(1, C / ||g_i||) g_i with g_i = A (x - x_i), float32 [P, d]."""
    a, data = problem.spectrum, problem.train
    norms = squares[:, None] - 2 * (data @ (a**2 * x).T) + ((a * x) ** 2).sum(axis=1)
    weights = np.minimum(1.0, clips / np.sqrt(np.maximum(norms, 1e-12)))
    return np.asarray(a * (x * weights.sum(axis=0)[:, None] - weights.T @ data) / len(data))


def _columns(cells: Sequence[Cell], n: int) -> tuple[NDArray[np.float64], ...]:
    """(alpha, C, noise deviation) of the cells, float64 [P] each."""
    rows = [(cell.rate, cell.clip, noise_std(cell.clip, cell.steps, n)) for cell in cells]
    rates, clips, noises = np.array(rows, dtype=np.float64).T
    return rates, clips, noises


# ------------------------------------------------------------------ the study

LABELS = {"dpzero": "DPZero", "dpgd-0th": "DPGD-0th", "dp-gd": "DP-GD"}
MEASURES = ("train_gradient", "test_gradient", "train_loss", "test_loss")
"""Columns of `Quadratic.measure`: figure1.png has the first two, figure2.png the others."""


def _exponent(power: float) -> Callable[[int], Floats]:
    return lambda d: (np.arange(1, d + 1, dtype=np.float64) ** -power).astype(np.float32)


SPECTRA = {"d": _exponent(0.0), "sqrt(d)": _exponent(0.5), "log(d)": _exponent(1.0)}
"""Order of the effective rank Tr(A) / ||A|| -> the diagonal of A: 1, 1/sqrt(i), 1/i."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run: the paper's grid.

    Attributes:
      dimensions: d.
      seeds: the figures of a cell are averaged over them before the best is taken.
      steps, gradient_steps: T of the zeroth-order methods and of DP-GD.
      rates, clips: alpha and C.
      num_examples: n, of the train and of the test data.
    """

    fields: ClassVar = ("spectrum", "dimension", "method")

    dimensions: tuple[int, ...] = (20, 50, 100, 200, 500, 1000, 2000)
    seeds: tuple[int, ...] = (1,)
    steps: tuple[int, ...] = tuple(10 * 2**k for k in range(10))  # 10, 20, ..., 5120
    gradient_steps: tuple[int, ...] = tuple(10 * 2**k for k in range(5))
    # 1e-5, 3e-5, ..., 1 and 0.1, 0.3, ..., 300
    rates: tuple[float, ...] = (*(c * 10.0**e for e in range(-5, 0) for c in (1, 3)), 1.0)
    clips: tuple[float, ...] = tuple(c * 10.0**e for e in range(-1, 3) for c in (1, 3))
    num_examples: int = 10_000

    def cells(self, method: str) -> list[Cell]:
        """The grid of a method; of DP-GD the cells that move at all: alpha T >= 1/2.

        The largest curvature is 1, and a step shrinks the distance along that axis by at most
        1 - alpha, so the others end at more than half of the initial gradient there.
        """
        steps = self.gradient_steps if method == "dp-gd" else self.steps
        cells = [Cell(*values) for values in itertools.product(steps, self.rates, self.clips)]
        return [cell for cell in cells if method != "dp-gd" or cell.rate * cell.steps >= 0.5]

    def points(self) -> list[tuple[str, int, str]]:
        """(spectrum, d, method), small dimensions first."""
        return [(s, d, m) for d in self.dimensions for s in SPECTRA for m in LABELS]

    def measure(self, spectrum: str, dimension: int, method: str) -> list[Row]:
        """The best of each figure over the grid, and the cell with the best train gradient."""
        cells, total = self.cells(method), np.zeros(())
        for seed in self.seeds:
            problem = Quadratic.draw(SPECTRA[spectrum](dimension), self.num_examples, seed)
            # Means before the best is taken: the best of each draw would be chosen by its noise.
            total = total + figures(problem, method, cells, seed) / len(self.seeds)
        key = {"spectrum": spectrum, "dimension": dimension, "method": method}
        best = dict(zip(MEASURES, total.min(axis=0).tolist(), strict=True))
        return [{**key, **best, "cell": cells[int(total[:, 0].argmin())]}]


QUICK = Study(
    dimensions=(20, 200, 2000), steps=(40, 160, 640), gradient_steps=(10, 40, 160),
    rates=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0), clips=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    num_examples=1000,
)  # fmt: skip
"""A coarse grid on fewer examples: the shape of the figures in about 15 seconds."""


def figures(problem: Quadratic, method: str, cells: Sequence[Cell], seed: int) -> NDArray[Any]:
    """Runs a method over a grid: [P, 4] as `Quadratic.measure`, infinite where a run diverged."""
    if method == "dp-gd":
        x = gradient_descent(problem, cells, seed=seed)
    else:
        x = zeroth_order(problem, cells, vector_noise=method == "dpgd-0th", seed=seed)
    return np.nan_to_num(problem.measure(x), nan=np.inf)


def write(study: Study, rows: Sequence[Row], output_dir: Path) -> str:
    """Writes the figures, and table.md: a line for each spectrum and dimension."""
    plot(rows, output_dir)
    norms = {(r["spectrum"], r["dimension"], r["method"]): r["train_gradient"] for r in rows}
    lines = []
    for spectrum, dimension in dict.fromkeys((s, d) for s, d, _ in norms):
        values = [norms.get((spectrum, dimension, m)) for m in LABELS]
        lines.append([spectrum, dimension, *("" if v is None else f"{v:.4g}" for v in values)])
    return save(output_dir, table(("Tr(A)", "d", *LABELS.values()), lines))


def plot(rows: Sequence[Row], output_dir: Path) -> None:
    """The paper's Figures 1 (gradient norms) and 2 (losses), train above test."""
    for number in (1, 2):
        figure, axes_of = panels(2, len(SPECTRA), (11.0, 6.0), sharex=True)
        for line, key in zip(axes_of, MEASURES[2 * number - 2 : 2 * number], strict=True):
            for axes, spectrum in zip(line, SPECTRA, strict=True):
                for method, marker in zip(LABELS, "o^s", strict=True):
                    mine = [r for r in rows if (r["spectrum"], r["method"]) == (spectrum, method)]
                    points = sorted((r["dimension"], r[key]) for r in mine)
                    x, y = zip(*points, strict=True) if points else ((), ())
                    axes.plot(x, y, marker=marker, label=LABELS[method])
                label = key.replace("_", " ") + " norm" * (number == 1)
                axes.set(xscale="log", yscale="log", xlabel="d", ylabel=label)
                axes.set_title(f"Tr(A) = O({spectrum})", fontsize=10)
                axes.grid(alpha=0.3)
        axes_of[0][0].legend()
        figure.savefig(output_dir / f"figure{number}.png", dpi=120)


if __name__ == "__main__":
    sys.exit(harness.main(__doc__, Study(), QUICK, write, harness.first_seeds))
