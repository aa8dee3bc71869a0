"""Tables and plot of the averaged-clipping study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.studies.averaged_clipping.study import COLUMNS, Study
from scripts.studies.averaged_clipping.sweeps import shown_epsilon, sweep_table, theorem_table
from scripts.studies.harness import Row, interval, left, panels, save, table

PLOT_FILE = "excess.png"


def summary(rows: Sequence[Row]) -> list[Row]:
    """The rows with mean and 95 % half width in the place of the seeds' figures."""
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
) -> str:
    """Markdown: a row for each objective, noise and epsilon, a column for each method."""
    at = {(r["objective"], r["noise"], r["epsilon"], r["method"]): r for r in rows}
    mine = {k: r for k, r in at.items() if r["calibration"] == calibration}
    lines = []
    for o, n, e in dict.fromkeys((o, n, e) for o, n, e, _ in mine if e is not None):
        found = [mine.get((o, n, e, m)) or mine.get((o, n, None, m)) for m in methods]
        lines.append([o, n, f"{e:g}", *(cell(r) if r else "" for r in found)])
    return table(("model", "noise", "ε", *methods), lines)


def tables(rows: Sequence[Row]) -> str:
    """All tables as Markdown."""
    correct = [r for r in rows if r["calibration"] == "correct"]
    paper = [r for r in rows if r["calibration"] == "paper"]
    methods = COLUMNS["correct"]

    def risk(row: Row) -> str:
        return str(interval(row["excess"]))

    def ratio(row: Row) -> str:
        mean, half = interval(row["loss_ratio"])
        return f"{mean:.4f} ± {half:.1g}"

    def with_epsilon(row: Row) -> str:
        return f"{risk(row)} (ε = {shown_epsilon(row['true_epsilon'])})"

    def cell(row: Row) -> str:
        return f"{row['steps']} x {row['batch_size']}, {row['clip']:.3g}, {row['rate']:.3g}"

    parts = [
        ("Excess risk, correct accounting", _table(correct, "correct", risk, methods)),
        ("Loss / initial loss, correct accounting", _table(correct, "correct", ratio, methods)),
        (
            "Excess risk under Eq. 9 (not private; true ε in brackets, ∞: beyond what is proved)",
            _table(paper, "paper", with_epsilon, COLUMNS["paper"]),
        ),
        ("Chosen: steps x batch, clip, learning rate", _table(correct, "correct", cell, methods)),
    ]
    return "\n".join(f"## {title}\n\n{text}" for title, text in parts)


def plot(rows: Sequence[Row], path: Path) -> Path:
    """Excess risk against epsilon with 95 % intervals under correct accounting."""
    rows = [row for row in rows if row["calibration"] == "correct"]
    objectives = list(dict.fromkeys(row["objective"] for row in rows))
    noises = list(dict.fromkeys(row["noise"] for row in rows))
    shared = {"sharex": True, "sharey": "row"}
    figure, axes_of = panels(len(objectives), len(noises), (10.0, 5.6), **shared)
    for line, objective in zip(axes_of, objectives, strict=True):
        for axes, noise in zip(line, noises, strict=True):
            _draw(axes, [r for r in rows if (r["objective"], r["noise"]) == (objective, noise)])
            axes.set(xscale="log", yscale="log", title=f"{objective}, {noise}")
        line[0].set_ylabel("excess risk")
    epsilons = sorted({row["epsilon"] for row in rows if row["epsilon"] is not None})
    for axes in axes_of[-1]:
        axes.set_xlabel("ε")
        axes.set_xticks(epsilons, [f"{e:g}" for e in epsilons], minor=False)
        axes.minorticks_off()
    handles, labels = axes_of[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=90)
    return path


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    for method, marker in zip(COLUMNS["correct"], "*o^vsD", strict=True):
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


def write(study: Study, rows: Sequence[Row], output_dir: Path) -> str:
    """Writes the tables and excess.png; with all rows also the tables on one problem, in a minute."""
    text = tables(rows)
    if not left(study, rows):
        text += f"\n## Theorems' parameters, linear, Laplace, ε = 1\n\n{theorem_table(study)}"
        text += f"\n## Groups, batch size and steps, linear, Laplace, ε = 1\n\n{sweep_table(study)}"
    plot(rows, output_dir / PLOT_FILE)
    return save(output_dir, text, summary(rows))
