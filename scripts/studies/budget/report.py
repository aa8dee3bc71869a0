"""Table and figure of the study of dynamic privacy budgets."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.studies.budget.study import ARMS, BUDGETS, summary, total_budget

TABLE_FILE, ROWS_FILE, FIGURE_FILE = "table.md", "rows.json", "figure1.png"
CHOICES = ("auxiliary", "private")
DRAWN = {"uniform": "o", "exp": "s", "gd_dynamic": "^", "momentum_uniform": "x"}
"""Arms in the figure -> marker."""
BASES = ("uniform", "momentum_uniform")


def all_rows(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`summary` under both budgets and both choices of T, JSON-safe."""
    return [
        {"chosen_on": chosen_on, **row}
        for kind in BUDGETS
        for chosen_on in CHOICES
        for row in summary(results, kind, chosen_on)
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a section for each budget and choice of T, a line for each data set, N and arm.

    Args:
      rows: of `all_rows`.
    """
    parts = []
    for kind in BUDGETS:
        for chosen_on in CHOICES:
            own = [r for r in rows if (r["budget"], r["chosen_on"]) == (kind, chosen_on)]
            title = f"Budget {kind}, R = {total_budget(kind):.4f}; T chosen on the {chosen_on} data"
            parts.append(f"### {title}\n\n{_lines(own)}")
    return "\n".join(parts)


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| data | N | arm | T | train loss | less than uniform by | test accuracy | more by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        gains = ["", ""]
        if r["arm"] not in BASES:
            gains = [
                f"{sign * r[f'{what}_gain']:.4f} ± {r[f'{what}_gain_se']:.4f}"
                for what, sign in (("loss", -1), ("accuracy", 1))
            ]
        cells = [
            r["source"], str(r["examples"]), ARMS[r["arm"]], str(r["steps"]),
            f"{r['loss']:.4f} ± {r['loss_se']:.4f}", gains[0],
            f"{r['accuracy']:.4f} ± {r['accuracy_se']:.4f}", gains[1],
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(
    results: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], output_dir: Path
) -> Path:
    """Figure 1: influence by step; train loss and test accuracy by N. A row for each data set.

    Args:
      results: of `budget_study.run`.
      rows: of `all_rows`; those of the paper's budget with T from auxiliary data are drawn.
      output_dir: where the image goes.

    Returns:
      Its path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [r for r in rows if (r["budget"], r["chosen_on"]) == ("zcdp", "auxiliary")]
    sources = list(dict.fromkeys(r["source"] for r in shown))
    figure = Figure(figsize=(11.0, 3.2 * len(sources)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(sources), 3, squeeze=False)
    for (left, middle, right), source in zip(panels, sources, strict=True):
        for name in ("auxiliary", source):
            _draw_influence(left, [r for r in results if r["source"] == f"influence of {name}"])
        left.set(yscale="log", xlabel="step", ylabel="influence, loss per $\\sigma_t^2$")
        left.legend(fontsize=8)
        own = [r for r in shown if r["source"] == source]
        for axes, what in ((middle, "loss"), (right, "accuracy")):
            for arm, marker in DRAWN.items():
                _draw_arm(axes, [r for r in own if r["arm"] == arm], what, marker)
            label = "train loss" if what == "loss" else "test accuracy"
            axes.set(xlabel="N", ylabel=label, title=source)
            axes.grid(alpha=0.3)
        middle.legend(fontsize=8)
    path = output_dir / FIGURE_FILE
    figure.savefig(path, dpi=90)
    return path


def _draw_influence(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    for r in results:
        at, q, error = (np.array(r[key]) for key in ("at", "influence", "error"))
        good = q > 0
        line = axes.errorbar(
            at[good], q[good], np.minimum(error[good], 0.9 * q[good]), fmt="o", markersize=4,
            label=f"{r['source'].removeprefix('influence of ')}, $\\gamma$ = {r['gamma']:.3f}",
        )  # fmt: skip
        if math.isfinite(r["gamma"]):
            fit = -np.log(r["gamma"]) * at
            fit += np.mean(np.log(q[good]) - fit[good])
            axes.plot(at, np.exp(fit), color=line[0].get_color(), linewidth=1)


def _draw_arm(axes: Any, rows: Sequence[dict[str, Any]], what: str, marker: str) -> None:
    x, y, error = ([r[key] for r in rows] for key in ("examples", what, f"{what}_se"))
    axes.errorbar(x, y, error, marker=marker, markersize=4, capsize=2, label=ARMS[rows[0]["arm"]])


def write(results: Sequence[dict[str, Any]], output_dir: Path) -> str:
    """Writes table.md, rows.json and figure1.png.

    Args:
      results: of `budget_study.run`.
      output_dir: where they go.

    Returns:
      The table.
    """
    rows = all_rows(results)
    text = table(rows)
    (output_dir / TABLE_FILE).write_text(text, encoding="utf-8")
    (output_dir / ROWS_FILE).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    plot(results, rows, output_dir)
    return text
