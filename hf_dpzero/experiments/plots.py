"""Plots of a comparison: score against epsilon, and against peak memory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.experiments.aggregate import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_FILE = "comparison.png"
MIB = 2**20


def plot_comparison(record: Record, folder: str | os.PathLike[str]) -> Path | None:
    """Draws comparison.png: score against epsilon, and score against peak memory.

    Private methods are points with error bars (standard error) joined by lines; methods without
    privacy and zero-shot models are horizontal lines.

    Returns:
      its path, or None if no run has finished.
    """
    if not any(cell.mean is not None for cell in record.cells):
        return None
    figure = _figure(2)
    left, right = figure.subplots(1, 2)
    draw_against_epsilon(left, record)
    draw_against_memory(right, record)
    return _saved(figure, folder)


def plot_tasks(
    records: Sequence[tuple[str, Record]], folder: str | os.PathLike[str]
) -> Path | None:
    """Draws comparison.png with score against epsilon, one panel a task."""
    drawn = [(name, r) for name, r in records if any(c.mean is not None for c in r.cells)]
    if not drawn:
        return None
    figure = _figure(len(drawn))
    panels = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axes, (name, record) in zip(panels, drawn, strict=True):
        draw_against_epsilon(axes, record)
        axes.set_title(name)
    return _saved(figure, folder)


def draw_against_epsilon(axes: Any, record: Record) -> None:
    """Points where a method is private, horizontal lines where there is no epsilon."""
    colours = _colours(record)
    for method in record.methods:
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
                color=colours[method],
            )
        for cell in cells:
            if math.isinf(cell.epsilon):
                style = {"linestyle": "--", "color": colours[method]}
                axes.axhline(100 * cell.mean, label=f"{method} (ε = ∞)", **style)  # type: ignore[operator]
    for cell in record.zero_shot:
        axes.axhline(100 * (cell.mean or 0.0), linestyle=":", color="grey", label=cell.method)
    finite = [e for e in record.epsilons if math.isfinite(e)]
    if finite:
        axes.set_xscale("log")
        axes.set_xticks(finite, [f"{e:g}" for e in finite])
        axes.minorticks_off()
        axes.set_xlim(min(finite) / 1.3, max(finite) * 1.3)
    axes.set(xlabel="ε", ylabel="score (%)")
    _finish(axes)


def draw_against_memory(axes: Any, record: Record) -> None:
    """One point a method and epsilon."""
    colours = _colours(record)
    for cell in record.cells:
        if cell.mean is None or cell.peak_memory_bytes is None:
            continue
        epsilon = "∞" if math.isinf(cell.epsilon) else f"{cell.epsilon:g}"
        x, y = cell.peak_memory_bytes / MIB, 100 * cell.mean
        error = 100 * (cell.standard_error or 0.0)
        axes.errorbar(x, y, yerr=error, marker="o", capsize=3, color=colours[cell.method])
        axes.annotate(
            f"{cell.method}, ε = {epsilon}",
            (x, y),
            textcoords="offset points",
            xytext=(5, 4),
            fontsize=7,
        )
    axes.set(xlabel="peak memory of training steps (MiB)", ylabel="score (%)")
    axes.margins(x=0.25)
    axes.grid(alpha=0.3)


def _colours(record: Record) -> dict[str, str]:
    return {method: f"C{index % 10}" for index, method in enumerate(record.methods)}


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)


def _figure(panels: int) -> Figure:
    """A figure on the Agg canvas: no display, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * panels, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Figure, folder: str | os.PathLike[str]) -> Path:
    target = Path(folder) / PLOT_FILE
    figure.savefig(target, dpi=120)
    return target
