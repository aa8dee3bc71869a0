"""Plots: score against epsilon and against peak memory; of a sweep, score against each setting."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.experiments.aggregate import Record
from hf_dpzero.experiments.results import Row
from hf_dpzero.reporting.model_card import new_figure

PLOT_FILE = "comparison.png"


def plot_comparison(record: Record, folder: str | os.PathLike[str]) -> Path | None:
    """Draws comparison.png: score against epsilon, and score against peak memory.

    Private methods are points with error bars (standard error) joined by lines; methods without
    privacy and zero-shot models are horizontal lines.

    Args:
      record: the comparison.
      folder: for comparison.png.

    Returns:
      Its path, or None if no run has finished.
    """
    if all(cell.mean is None for cell in record.cells):
        return None
    figure = new_figure(2)
    left, right = figure.subplots(1, 2)
    _draw_against_epsilon(left, record)
    _draw_against_memory(right, record)
    figure.savefig(Path(folder) / PLOT_FILE, dpi=120)
    return Path(folder) / PLOT_FILE


def plot_tasks(records: Sequence[tuple[str, Record]], folder: str | os.PathLike[str]) -> None:
    """Draws comparison.png with score against epsilon, one panel a task that has a finished run.

    Args:
      records: task -> its comparison.
      folder: for comparison.png.
    """
    drawn = [(name, r) for name, r in records if any(c.mean is not None for c in r.cells)]
    if drawn:
        figure = new_figure(len(drawn))
        panels = figure.subplots(1, len(drawn), squeeze=False)[0]
        for axes, (name, record) in zip(panels, drawn, strict=True):
            _draw_against_epsilon(axes, record)
            axes.set_title(name)
        figure.savefig(Path(folder) / PLOT_FILE, dpi=120)


def _draw_against_epsilon(axes: Any, record: Record) -> None:
    """Points where a method is private, horizontal lines where there is no epsilon."""
    for index, method in enumerate(record.methods):
        colour = f"C{index % 10}"
        cells = [c for c in record.cells if c.method == method and c.mean is not None]
        private = sorted((c for c in cells if math.isfinite(c.epsilon)), key=lambda c: c.epsilon)
        if private:
            axes.errorbar(
                [c.epsilon for c in private],
                [100 * c.mean for c in private],  # type: ignore[operator]
                yerr=[100 * (c.standard_error or 0.0) for c in private],
                marker="o",
                capsize=3,
                label=method,
                color=colour,
            )
        for cell in cells:
            if math.isinf(cell.epsilon):
                label = f"{method} (ε = ∞)"
                axes.axhline(100 * cell.mean, label=label, linestyle="--", color=colour)  # type: ignore[operator]
    for cell in record.zero_shot:
        axes.axhline(100 * (cell.mean or 0.0), linestyle=":", color="grey", label=cell.method)
    finite = [e for e in record.epsilons if math.isfinite(e)]
    if finite:
        axes.set_xscale("log")
        axes.set_xticks(finite, [f"{e:g}" for e in finite])
        axes.minorticks_off()
        axes.set_xlim(min(finite) / 1.3, max(finite) * 1.3)
    axes.set(xlabel="ε", ylabel="score (%)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)


def _draw_against_memory(axes: Any, record: Record) -> None:
    """One point a method and epsilon."""
    for cell in record.cells:
        if cell.mean is None or cell.peak_memory_bytes is None:
            continue
        epsilon = "∞" if math.isinf(cell.epsilon) else f"{cell.epsilon:g}"
        x, y = cell.peak_memory_bytes / 2**20, 100 * cell.mean
        error = 100 * (cell.standard_error or 0.0)
        colour = f"C{record.methods.index(cell.method) % 10}"
        axes.errorbar(x, y, yerr=error, marker="o", capsize=3, color=colour)
        where: Any = {"textcoords": "offset points", "xytext": (5, 4), "fontsize": 7}
        axes.annotate(f"{cell.method}, ε = {epsilon}", (x, y), **where)
    axes.set(xlabel="peak memory of training steps (MiB)", ylabel="score (%)")
    axes.margins(x=0.25)
    axes.grid(alpha=0.3)


def plot_sweep(
    path: Path, swept: Mapping[str, Sequence[Any]], rows: Sequence[Row], metric: str
) -> bool:
    """Draws score against each swept setting: a point a run over evenly spaced values, and means.

    Args:
      path: of the PNG.
      swept: setting -> values.
      rows: of the runs.
      metric: label of the scores.

    Returns:
      False if nothing was drawn, for nothing was scored or nothing varies.
    """
    scores = [(row.settings or {}, row.score) for row in rows if row.score is not None]
    names = [name for name, values in swept.items() if len(values) > 1]
    if not scores or not names:
        return False
    figure = new_figure(len(names), 4.0, 3.0)
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        values = list(swept[name])
        points = [(values.index(settings[name]), value) for settings, value in scores]
        axes.plot(*zip(*points, strict=True), ".", alpha=0.6)
        groups = {i: [score for place, score in points if place == i] for i in range(len(values))}
        means = [(i, sum(group) / len(group)) for i, group in groups.items() if group]
        axes.plot(*zip(*means, strict=True), "-", alpha=0.6)
        axes.set_xticks(range(len(values)), [str(value) for value in values])
        axes.set(xlabel=name)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(metric)
    figure.savefig(path, dpi=120)
    return True
