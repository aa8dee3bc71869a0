"""The training curve beside the model card."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PLOT_FILE = "training_curve.png"

_CURVES = {
    "eval_accuracy": "evaluation accuracy",
    "eval_macro_f1": "evaluation macro-F1",
    "eval_f1": "evaluation F1",
    "eval_loss": "evaluation loss",
    "epsilon": "spent epsilon (upper bound)",
}


def plot_run(
    log_history: Sequence[Mapping[str, Any]],
    output_dir: str | os.PathLike[str],
    schedules: Mapping[str, Sequence[float]] | None = None,
) -> Path | None:
    """Draws evaluation metrics, the spent epsilon and what is scheduled against steps.

    Args:
      log_history: the trainer's; entries without `step`, absent metrics and values that are not
        finite are left out.
      output_dir: folder for `training_curve.png`.
      schedules: values of each step, from step 1, by name (`privacy.words.schedule_curves`).

    Returns:
      The file, or None if there is nothing to draw.
    """
    curves = []
    for key, label in _CURVES.items():
        rows = [row for row in log_history if row.get(key) is not None and "step" in row]
        points = {row["step"]: row[key] for row in rows if math.isfinite(row[key])}
        if points:
            curves.append((label, sorted(points.items())))
    curves += [(name, list(enumerate(sizes, 1))) for name, sizes in (schedules or {}).items()]
    if not curves:
        return None
    figure = new_figure(len(curves), 4.0, 3.0)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (label, curve) in zip(panels, curves, strict=True):
        axes.plot(*zip(*curve, strict=True), marker="." if len(curve) < 100 else None)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
    target = Path(output_dir) / PLOT_FILE
    figure.savefig(target, dpi=120)
    return target


@contextlib.contextmanager
def optional_plot(name: str) -> Iterator[None]:
    """Inside, a missing matplotlib costs the plot and not the run; standard error says so.

    Args:
      name: of the file that would be drawn.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print(f"{name} was not drawn: it needs pip install 'hf-dpzero[plots]'", file=sys.stderr)


def new_figure(panels: int, width: float = 5.0, height: float = 4.0) -> Any:
    """A matplotlib figure on the Agg canvas: no display, no global state.

    Args:
      panels: side by side.
      width: of each, in inches.
      height: in inches.

    Returns:
      The figure, without axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
