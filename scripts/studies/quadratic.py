"""Figures 1 and 2 of the DPZero paper: DPZero, DPGD-0th and DP-GD on quadratics of d = 20 ... 2000.

    python -m scripts.studies.quadratic --output_dir out/quadratic           # the paper's grid
    python -m scripts.studies.quadratic --quick --output_dir out/quadratic-quick

The table has the best train gradient norm over the grid, of one draw or the mean of `--seeds`. Writes
rows.jsonl, table.md, figure1.png and figure2.png.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.papers.quadratic import Cell, Floats, Quadratic, gradient_descent, zeroth_order
from scripts.markdown import table
from scripts.studies import harness
from scripts.studies.harness import Row, panels, save

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
