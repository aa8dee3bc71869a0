"""Tables and plot of the averaged-clipping study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.markdown import table
from scripts.studies.averaged_clipping.study import COLUMNS, Calibration, Study
from scripts.studies.averaged_clipping.sweeps import shown_epsilon, sweep_table, theorem_table
from scripts.studies.harness import Row, error_bars, interval, left, panels, save, sections


def _risk(row: Row) -> str:
    return str(interval(row["excess"]))


def _ratio(row: Row) -> str:
    mean, half = interval(row["loss_ratio"])
    return f"{mean:.4f} ± {half:.1g}"


def _risk_with_epsilon(row: Row) -> str:
    return f"{_risk(row)} (ε = {shown_epsilon(row['true_epsilon'])})"


def _cell(row: Row) -> str:
    return f"{row['steps']} x {row['batch_size']}, {row['clip']:.3g}, {row['rate']:.3g}"


TABLES: dict[str, tuple[Calibration, Callable[[Row], str]]] = {
    "Excess risk, correct accounting": ("correct", _risk),
    "Loss / initial loss, correct accounting": ("correct", _ratio),
    "Excess risk under Eq. 9 (not private; true ε in brackets, ∞: beyond what is proved)": (
        *("paper", _risk_with_epsilon),
    ),
    "Chosen: steps x batch, clip, learning rate": ("correct", _cell),
}


def _table(rows: Sequence[Row], calibration: Calibration, cell: Callable[[Row], str]) -> str:
    """Markdown: a row for each objective, noise and epsilon, a column for each method."""
    methods = COLUMNS[calibration]
    at = {
        (r["objective"], r["noise"], r["epsilon"], r["method"]): r
        for r in rows
        if r["calibration"] == calibration
    }
    lines = []
    for o, n, e in dict.fromkeys((o, n, e) for o, n, e, _ in at if e is not None):
        found = [at.get((o, n, e, m)) or at.get((o, n, None, m)) for m in methods]
        lines.append([o, n, f"{e:g}", *(cell(r) if r else "" for r in found)])
    return table(("model", "noise", "ε", *methods), lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Excess risk against epsilon with 95 % intervals under correct accounting."""
    rows = [row for row in rows if row["calibration"] == "correct"]
    objectives = list(dict.fromkeys(row["objective"] for row in rows))
    noises = list(dict.fromkeys(row["noise"] for row in rows))
    shared = {"sharex": True, "sharey": "row"}
    figure, axes_of = panels(len(objectives), len(noises), (10.0, 5.6), **shared)
    for line, objective in zip(axes_of, objectives, strict=True):
        for axes, noise in zip(line, noises, strict=True):
            own = [r for r in rows if (r["objective"], r["noise"]) == (objective, noise)]
            for method, marker in zip(COLUMNS["correct"], "*o^vsD", strict=True):
                mine = [r for r in own if r["method"] == method]
                found = [interval(r["excess"]) for r in mine]
                if method == "baseline":
                    for i in found:
                        style = {"color": "grey", "linestyle": ":"}
                        axes.axhline(i.mean, label="baseline (no noise)", **style)
                elif mine:
                    error_bars(axes, [r["epsilon"] for r in mine], found, method, marker)
            axes.grid(alpha=0.3)
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


def write(study: Study, rows: Sequence[Row], output_dir: Path) -> str:
    """Writes the tables and excess.png; with all rows also the tables on one problem, in a minute."""
    parts = {title: _table(rows, *how) for title, how in TABLES.items()}
    if not left(study, rows):
        parts["Theorems' parameters, linear, Laplace, ε = 1"] = theorem_table(study)
        parts["Groups, batch size and steps, linear, Laplace, ε = 1"] = sweep_table(study)
    plot(rows, output_dir / "excess.png")
    return save(output_dir, sections(parts))
