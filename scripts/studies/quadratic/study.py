"""Runs the quadratic study over dimensions and spectra, resumably, and draws its two figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hf_dpzero.papers.quadratic import Cell, Quadratic
from scripts.studies.harness import Row, panels, save, table
from scripts.studies.quadratic import grid
from scripts.studies.quadratic.grid import METHODS, SPECTRA

FIGURES = {
    "figure1.png": (
        ("train_gradient", "train gradient norm"),
        ("test_gradient", "test gradient norm"),
    ),
    "figure2.png": (("train_loss", "train loss"), ("test_loss", "test loss")),
}
LABELS = {"dpzero": "DPZero", "dpgd-0th": "DPGD-0th", "dp-gd": "DP-GD"}


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run.

    Attributes:
      dimensions: d.
      seeds: the figures of a cell are averaged over them before the best is taken.
      steps, gradient_steps: T of the zeroth-order methods and of DP-GD.
      rates, clips: alpha and C.
      num_examples: n, of the train and of the test data.
    """

    fields: ClassVar = ("spectrum", "dimension", "method")

    dimensions: tuple[int, ...] = grid.DIMENSIONS
    seeds: tuple[int, ...] = (1,)
    steps: tuple[int, ...] = grid.STEPS
    gradient_steps: tuple[int, ...] = grid.GRADIENT_STEPS
    rates: tuple[float, ...] = grid.RATES
    clips: tuple[float, ...] = grid.CLIPS
    num_examples: int = grid.NUM_EXAMPLES

    def cells(self, method: str) -> list[Cell]:
        """The grid of a method."""
        if method == "dp-gd":
            return grid.useful(grid.grid(self.gradient_steps, self.rates, self.clips))
        return grid.grid(self.steps, self.rates, self.clips)

    def points(self) -> list[tuple[str, int, str]]:
        """(spectrum, d, method), small dimensions first."""
        return [(s, d, m) for d in self.dimensions for s in SPECTRA for m in METHODS]

    def measure(self, spectrum: str, dimension: int, method: str) -> list[Row]:
        """The best figures over the grid."""
        cells, total = self.cells(method), np.zeros(())
        for seed in self.seeds:
            problem = Quadratic.draw(SPECTRA[spectrum](dimension), self.num_examples, seed)
            total = total + grid.figures(problem, method, cells, seed) / len(self.seeds)
        best = grid.best(total, cells)
        return [{"spectrum": spectrum, "dimension": dimension, "method": method, **best._asdict()}]


QUICK = Study(
    dimensions=(20, 200, 2000),
    steps=(40, 160, 640),
    gradient_steps=(10, 40, 160),
    rates=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    clips=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    num_examples=1000,
)
"""A coarse grid on fewer examples: the shape of the figures in about 15 seconds."""


def gradient_table(rows: Sequence[Row]) -> str:
    """Train gradient norms: a line for each spectrum and dimension."""
    norms = {(r["spectrum"], r["dimension"], r["method"]): r["train_gradient"] for r in rows}
    lines = []
    for spectrum, dimension in dict.fromkeys((s, d) for s, d, _ in norms):
        values = [norms.get((spectrum, dimension, m)) for m in METHODS]
        lines.append([spectrum, dimension, *("" if v is None else f"{v:.4g}" for v in values)])
    return table(("Tr(A)", "d", *(LABELS[m] for m in METHODS)), lines)


def write(study: Study, rows: Sequence[Row], output_dir: Path) -> str:
    """Writes table.md and the figures."""
    plot(rows, output_dir)
    return save(output_dir, gradient_table(rows))


def plot(rows: Sequence[Row], output_dir: Path) -> list[Path]:
    """The paper's Figures 1 (gradient norms) and 2 (losses), train above test."""
    paths = []
    for name, quantities in FIGURES.items():
        figure, axes_of = panels(2, len(SPECTRA), (11.0, 6.0), sharex=True)
        for line, (key, label) in zip(axes_of, quantities, strict=True):
            for axes, spectrum in zip(line, SPECTRA, strict=True):
                _draw(axes, [row for row in rows if row["spectrum"] == spectrum], key)
                axes.set(xscale="log", yscale="log", xlabel="d", ylabel=label)
                axes.set_title(f"Tr(A) = O({spectrum})", fontsize=10)
        axes_of[0][0].legend()
        figure.savefig(output_dir / name, dpi=120)
        paths.append(output_dir / name)
    return paths


def _draw(axes: Any, rows: Sequence[Row], key: str) -> None:
    for method, marker in zip(METHODS, "o^s", strict=True):
        points = sorted((r["dimension"], r[key]) for r in rows if r["method"] == method)
        axes.plot(
            [d for d, _ in points], [v for _, v in points], marker=marker, label=LABELS[method]
        )
    axes.grid(alpha=0.3)
