"""Table and figure of the study of dynamic privacy budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.studies.budget.study import ARMS, BUDGETS, Study, summary, total_budget
from scripts.studies.harness import Row, panels, save, table

FIGURE_FILE = "figure1.png"
CHOICES = ("auxiliary", "private")
DRAWN = {"uniform": "o", "exp": "s", "gd_dynamic": "^", "momentum_uniform": "x"}
"""Arms in the figure -> marker."""
BASES = ("uniform", "momentum_uniform")


def all_rows(results: Sequence[Row]) -> list[Row]:
    """`summary` under both budgets and both choices of T, JSON-safe."""
    return [
        {"chosen_on": chosen_on, **row}
        for kind in BUDGETS
        for chosen_on in CHOICES
        for row in summary(results, kind, chosen_on)
    ]


def tables(rows: Sequence[Row]) -> str:
    """Markdown: a section for each budget and choice of T, a line for each data set, N and arm."""
    parts = []
    for kind in BUDGETS:
        for chosen_on in CHOICES:
            own = [r for r in rows if (r["budget"], r["chosen_on"]) == (kind, chosen_on)]
            title = f"Budget {kind}, R = {total_budget(kind):.4f}; T chosen on the {chosen_on} data"
            parts.append(f"### {title}\n\n{_lines(own)}")
    return "\n".join(parts)


def _lines(rows: Sequence[Row]) -> str:
    lines = []
    for r in rows:
        gains = ["", ""]
        if r["arm"] not in BASES:
            gains = [
                f"{sign * r[f'{what}_gain']:.4f} ± {r[f'{what}_gain_se']:.4f}"
                for what, sign in (("loss", -1), ("accuracy", 1))
            ]
        lines.append([
            r["source"], str(r["examples"]), ARMS[r["arm"]], str(r["steps"]),
            f"{r['loss']:.4f} ± {r['loss_se']:.4f}", gains[0],
            f"{r['accuracy']:.4f} ± {r['accuracy_se']:.4f}", gains[1],
        ])  # fmt: skip
    gains = ("less than uniform by", "test accuracy", "more by")
    return table(("data", "N", "arm", "T", "train loss", *gains), lines)


def plot(results: Sequence[Row], rows: Sequence[Row], output_dir: Path) -> Path:
    """Figure 1: influence by step; train loss and test accuracy by N. A row for each data set."""
    shown = [r for r in rows if (r["budget"], r["chosen_on"]) == ("zcdp", "auxiliary")]
    sources = list(dict.fromkeys(r["source"] for r in shown))
    figure, axes_of = panels(len(sources), 3, (11.0, 3.2 * len(sources)))
    for (left, middle, right), source in zip(axes_of, sources, strict=True):
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


def _draw_influence(axes: Any, results: Sequence[Row]) -> None:
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


def _draw_arm(axes: Any, rows: Sequence[Row], what: str, marker: str) -> None:
    x, y, error = ([r[key] for r in rows] for key in ("examples", what, f"{what}_se"))
    axes.errorbar(x, y, error, marker=marker, markersize=4, capsize=2, label=ARMS[rows[0]["arm"]])


def write(study: Study, results: Sequence[Row], output_dir: Path) -> str:
    """Writes table.md, table.json and, once some arms are compared, figure1.png."""
    rows = all_rows(results)
    if rows:
        plot(results, rows, output_dir)
    return save(output_dir, tables(rows), rows)
