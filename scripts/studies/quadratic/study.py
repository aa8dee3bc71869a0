"""Runs the quadratic study over dimensions and spectra, resumably, and draws its two figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpzero.papers.quadratic import Cell, Quadratic
from scripts.studies.quadratic import grid
from scripts.studies.quadratic.grid import METHODS, SPECTRA, Best
from scripts.studies.rows import measure_points

ROWS_FILE, TABLE_FILE = "rows.jsonl", "table.md"
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


QUICK = Study(
    dimensions=(20, 200, 2000),
    steps=(40, 160, 640),
    gradient_steps=(10, 40, 160),
    rates=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    clips=(0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
    num_examples=1000,
)
"""A coarse grid on fewer examples: the shape of the figures in about 15 seconds."""


def run(study: Study, output_dir: Path) -> list[dict[str, Any]]:
    """Rows for every point of the study; those that `output_dir` holds already are not run again.

    Args:
      study: what to run.
      output_dir: holds the rows.

    Returns:
      JSON-safe rows.

    Raises:
      ValueError: the folder holds rows of another study.
    """

    def measure(spectrum: str, dimension: int, method: str) -> list[dict[str, Any]]:
        best = _run_point(study, spectrum, dimension, method)
        return [{"spectrum": spectrum, "dimension": dimension, "method": method, **best._asdict()}]

    fields = ("spectrum", "dimension", "method")
    return measure_points(output_dir / ROWS_FILE, study, study.points(), fields, measure)


def _run_point(study: Study, spectrum: str, dimension: int, method: str) -> Best:
    cells, total = study.cells(method), np.zeros(())
    for seed in study.seeds:
        problem = Quadratic.draw(SPECTRA[spectrum](dimension), study.num_examples, seed)
        total = total + grid.figures(problem, method, cells, seed) / len(study.seeds)
    return grid.best(total, cells)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Train gradient norms as Markdown: a row for each spectrum and dimension."""
    norms = {(r["spectrum"], r["dimension"], r["method"]): r["train_gradient"] for r in rows}
    lines = [
        "| Tr(A) | d | " + " | ".join(LABELS[m] for m in METHODS) + " |",
        "|---|---|---|---|---|",
    ]
    for spectrum, dimension in dict.fromkeys((s, d) for s, d, _ in norms):
        values = [norms.get((spectrum, dimension, m)) for m in METHODS]
        shown = ["" if v is None else f"{v:.4g}" for v in values]
        lines.append(f"| {spectrum} | {dimension} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], output_dir: Path) -> list[Path]:
    """The paper's Figures 1 (gradient norms) and 2 (losses), train above test.

    Args:
      rows: those of `run`.
      output_dir: where the images go.

    Returns:
      Paths of the images.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = []
    for name, quantities in FIGURES.items():
        figure = Figure(figsize=(11.0, 6.0), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, len(SPECTRA), sharex=True)
        for line, (key, label) in zip(panels, quantities, strict=True):
            for axes, spectrum in zip(line, SPECTRA, strict=True):
                _draw(axes, [row for row in rows if row["spectrum"] == spectrum], key)
                axes.set(xscale="log", yscale="log", xlabel="d", ylabel=label)
                axes.set_title(f"Tr(A) = O({spectrum})", fontsize=10)
        panels[0][0].legend()
        figure.savefig(output_dir / name, dpi=120)
        paths.append(output_dir / name)
    return paths


def _draw(axes: Any, rows: Sequence[dict[str, Any]], key: str) -> None:
    for method, marker in zip(METHODS, "o^s", strict=True):
        points = sorted((r["dimension"], r[key]) for r in rows if r["method"] == method)
        axes.plot(*zip(*points, strict=True), marker=marker, label=LABELS[method])
    axes.grid(alpha=0.3)
