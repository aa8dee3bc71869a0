"""Tables and plot of the averaged-clipping study, and what the theorems' parameters give."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hf_dpzero.papers import averaged_clipping
from hf_dpzero.papers.averaged_clipping import Cells, calibrated, true_epsilon
from hf_dpzero.papers.averaged_clipping_parameters import (
    Parameters,
    Problem,
    constrained,
    hoelder,
    paper_calibration,
    restarted,
    unconstrained,
)
from hf_dpzero.papers.averaged_clipping_study import METHODS, Study
from hf_dpzero.papers.heavy_tails import DIMENSION, LINEAR, RADIUS, draw, optimum

TABLE_FILE, JSON_FILE, PLOT_FILE = "table.md", "table.json", "excess.png"
Row = dict[str, Any]


class Interval(NamedTuple):
    """Mean over seeds, and half the width of its 95 % confidence interval (Student)."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.2g} ± {self.half_width:.1g}"


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % interval.

    Args:
      values: one a seed.

    Returns:
      Half width NaN for a single value.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, half_width=2.484...)
    """
    from scipy.stats import t

    k = len(values)
    if k < 2:
        return Interval(float(np.mean(values)), math.nan)
    return Interval(
        float(np.mean(values)), float(t.ppf(0.975, k - 1) * np.std(values, ddof=1) / math.sqrt(k))
    )


def summary(rows: Sequence[Row]) -> list[Row]:
    """The rows with mean and 95 % half width in the place of the seeds' figures.

    Args:
      rows: those of the study.

    Returns:
      JSON-safe rows; `excess_over_dp_sgd` is the ratio to DP-SGD under the same calibration.
    """
    reference = {
        _key(row): interval(row["excess"]).mean for row in rows if row["method"] == "DP-SGD"
    }
    found = []
    for row in rows:
        kept = {k: v for k, v in row.items() if k not in ("excess", "loss_ratio")}
        excess, ratio = interval(row["excess"]), interval(row["loss_ratio"])
        base = reference.get(_key(row))
        found.append(
            {
                **kept,
                "excess": excess.mean,
                "excess_half_width": excess.half_width,
                "loss_ratio": ratio.mean,
                "loss_ratio_half_width": ratio.half_width,
                "excess_over_dp_sgd": excess.mean / base if base else None,
            }
        )
    return found


def _key(row: Row) -> tuple[Any, ...]:
    return row["calibration"], row["objective"], row["noise"], row["epsilon"]


def _table(
    rows: Sequence[Row], calibration: str, cell: Callable[[Row], str], methods: Sequence[str]
) -> list[str]:
    """Markdown: a row for each objective, noise and epsilon, a column for each method."""
    at = {(r["objective"], r["noise"], r["epsilon"], r["method"]): r for r in rows}
    mine = {k: r for k, r in at.items() if r["calibration"] == calibration}
    lines = [
        "| model | noise | ε | " + " | ".join(methods) + " |",
        "|---|---|---|" + "---|" * len(methods),
    ]
    for o, n, e in dict.fromkeys((o, n, e) for o, n, e, _ in mine if e is not None):
        found = [mine.get((o, n, e, m)) or mine.get((o, n, None, m)) for m in methods]
        lines.append(
            f"| {o} | {n} | {e:g} | " + " | ".join(cell(r) if r else "" for r in found) + " |"
        )
    return lines


def tables(rows: Sequence[Row]) -> str:
    """All tables as Markdown.

    Args:
      rows: those of the study.

    Returns:
      Excess risk and loss over initial loss under correct accounting, the same excess risk under Eq. 9
      with the true epsilon, and the cells that were chosen.
    """
    correct = [r for r in rows if r["calibration"] == "correct"]
    paper = [r for r in rows if r["calibration"] == "paper"]
    methods = list(METHODS)
    private = [m for m in methods if m not in ("baseline", "DP-GD")]

    def risk(row: Row) -> str:
        return str(interval(row["excess"]))

    def ratio(row: Row) -> str:
        mean, half = interval(row["loss_ratio"])
        return f"{mean:.4f} ± {half:.1g}"

    def with_epsilon(row: Row) -> str:
        return f"{risk(row)} (ε = {row['true_epsilon']:.3g})"

    def cell(row: Row) -> str:
        return f"{row['steps']} x {row['batch_size']}, {row['clip']:.3g}, {row['rate']:.3g}"

    parts = [
        ("Excess risk, correct accounting", _table(correct, "correct", risk, methods)),
        ("Loss / initial loss, correct accounting", _table(correct, "correct", ratio, methods)),
        (
            "Excess risk under Eq. 9 (not private; true ε in brackets)",
            _table(paper, "paper", with_epsilon, private),
        ),
        ("Chosen: steps x batch, clip, learning rate", _table(correct, "correct", cell, methods)),
    ]
    return "\n".join(f"## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in parts)


def theorem_table(study: Study, noise: str = "laplace", epsilon: float = 1.0) -> str:
    """What the theorems' parameters ask for and reach, linear regression, constants as published.

    Args:
      study: n, delta and seeds.
      noise: a key of `NOISES` with a variance.
      epsilon: the target.

    Returns:
      Markdown: parameters, Eq. 9's noise and its true epsilon, the noise needed, and the excess risk of
      each; or why a theorem's parameters cannot be used.
    """
    lines = [
        "| theorem | N | m | λ | γ | Eq. 9 noise / λ | its true ε | needed noise / λ "
        "| excess, Eq. 9 | excess, correct |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    problem = linear_problem(study, epsilon)
    makers: dict[str, Callable[[], Parameters]] = {
        "3 (CC)": lambda: constrained(problem),
        "4 (UC)": lambda: unconstrained(problem),
        "6 (R-AClip)": lambda: restarted(problem, strong_convexity=LINEAR.smoothness),
        "7 (ν = 1)": lambda: hoelder(problem, 1.0, LINEAR.smoothness, accuracy=0.1),
    }
    for name, make in makers.items():
        try:
            lines.append(f"| {name} | {_theorem_row(study, make(), noise, epsilon)} |")
        except ValueError as error:
            lines.append(f"| {name} | refused: {str(error).split(':')[0]} |" + " |" * 8)
    return "\n".join(lines) + "\n"


def linear_problem(study: Study, epsilon: float) -> Problem:
    """The constants of linear regression with noise of variance 2.

    sigma^2 at the start: E ||2 xi (<xi, w> - e)||^2 - ||2 w||^2 = 4 (d + 1) R^2 + 8 d, w = x - x*.

    Args:
      study: n and delta.
      epsilon: the target.
    """
    variance = 4 * (DIMENSION + 1) * RADIUS**2 + 8 * DIMENSION
    return Problem(
        smoothness=LINEAR.smoothness,
        distance=RADIUS,
        variance=variance,
        dimension=DIMENSION,
        num_examples=study.num_examples,
        epsilon=epsilon,
        delta=study.delta,
    )


def _theorem_row(study: Study, parameters: Parameters, noise: str, epsilon: float) -> str:
    descent, rate, clip = parameters
    n, delta = study.num_examples, study.delta
    published = paper_calibration(descent, n, epsilon, delta)
    needed = calibrated(descent, n, epsilon, delta)
    cells = Cells(*np.array([(rate, clip, published), (rate, clip, needed)]).T)
    excess = []
    for seed in study.seeds:
        data = draw(LINEAR, noise, n, np.random.default_rng([seed, 0]))
        x = averaged_clipping.run(LINEAR, data, descent, cells, np.random.default_rng([seed, 1]))
        excess.append(((x - optimum()) ** 2).sum(axis=1).tolist())
    risks = [str(interval(values)) for values in zip(*excess, strict=True)]
    spent = true_epsilon(descent, n, published, delta)
    shown = [
        str(descent.steps * descent.stages),
        str(descent.batch_size),
        *(f"{v:.3g}" for v in (clip, rate, published, spent, needed)),
    ]
    return " | ".join(shown + risks)


def plot(rows: Sequence[Row], path: Path) -> Path:
    """Excess risk against epsilon with 95 % intervals under correct accounting.

    Args:
      rows: those of the study.
      path: of the image.

    Returns:
      `path`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["calibration"] == "correct"]
    objectives = list(dict.fromkeys(row["objective"] for row in rows))
    noises = list(dict.fromkeys(row["noise"] for row in rows))
    figure = Figure(figsize=(10.0, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(objectives), len(noises), sharex=True, sharey="row", squeeze=False)
    for line, objective in zip(panels, objectives, strict=True):
        for axes, noise in zip(line, noises, strict=True):
            _draw(axes, [r for r in rows if (r["objective"], r["noise"]) == (objective, noise)])
            axes.set(xscale="log", yscale="log", title=f"{objective}, {noise}")
        line[0].set_ylabel("excess risk")
    for axes in panels[-1]:
        axes.set_xlabel("ε")
    panels[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=90)
    return path


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    for method, marker in zip(METHODS, "*o^vsD", strict=True):
        mine = [r for r in rows if r["method"] == method]
        found = [interval(r["excess"]) for r in mine]
        if method == "baseline":
            for i in found:
                axes.axhline(i.mean, color="grey", linestyle=":", label="baseline (no noise)")
        elif mine:
            axes.errorbar(
                [r["epsilon"] for r in mine],
                [i.mean for i in found],
                yerr=[i.half_width for i in found],
                marker=marker,
                markersize=4,
                capsize=2,
                label=method,
            )
    axes.grid(alpha=0.3)


def write(study: Study, rows: Sequence[Row], output_dir: Path, *, theorems: bool = True) -> str:
    """Writes table.md, table.json and excess.png.

    Args:
      study: what was run.
      rows: all or some of its rows.
      output_dir: an existing folder.
      theorems: adds the theorems' table, which runs for some seconds.

    Returns:
      The text of table.md.
    """
    text = tables(rows)
    if theorems:
        text += f"\n## Theorems' parameters, linear, Laplace, ε = 1\n\n{theorem_table(study)}"
    (output_dir / TABLE_FILE).write_text(text, encoding="utf-8")
    values = json.dumps(summary(rows), indent=1)
    (output_dir / JSON_FILE).write_text(values + "\n", encoding="utf-8")
    if rows:
        plot(rows, output_dir / PLOT_FILE)
    return text
