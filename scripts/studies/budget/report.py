"""Table and figure of the study of dynamic privacy budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.markdown import table
from scripts.studies.budget.study import ARMS, BUDGETS, Study, summary, total_budget
from scripts.studies.harness import Row, panels, save, sections

DRAWN = {"uniform": "o", "exp": "s", "gd_dynamic": "^", "momentum_uniform": "x"}
"""Arms in the figure -> marker."""
BASES = ("uniform", "momentum_uniform")


def _lines(rows: Sequence[Row]) -> str:
    """Markdown: a line for each data set, N and arm."""
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


def plot(results: Sequence[Row], shown: Sequence[Row], path: Path) -> None:
    """Figure 1: influence by step; train loss and test accuracy by N. A row for each data set.

    Args:
      results: of the study.
      shown: their summary under one budget and choice of T.
      path: of the image.
    """
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
                at = [r for r in own if r["arm"] == arm]
                x, y, error = ([r[key] for r in at] for key in ("examples", what, f"{what}_se"))
                style = {"marker": marker, "markersize": 4, "capsize": 2}
                axes.errorbar(x, y, error, label=ARMS[arm], **style)
            label = "train loss" if what == "loss" else "test accuracy"
            axes.set(xlabel="N", ylabel=label, title=source)
            axes.grid(alpha=0.3)
        middle.legend(fontsize=8)
    figure.savefig(path, dpi=90)


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


def write(study: Study, results: Sequence[Row], output_dir: Path) -> str:
    """Writes table.md, a section for each budget and choice of T, and figure1.png of compared arms."""
    parts = {}
    for kind in BUDGETS:
        for chosen_on in ("auxiliary", "private"):
            title = f"Budget {kind}, R = {total_budget(kind):.4f}; T chosen on the {chosen_on} data"
            parts[title] = _lines(summary(results, kind, chosen_on))
    if shown := summary(results, "zcdp"):
        plot(results, shown, output_dir / "figure1.png")
    return save(output_dir, sections(parts))
