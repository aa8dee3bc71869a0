"""Tables and plots of the online federated study."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpzero.privacy.correlated import factorization as f
from scripts.markdown import table
from scripts.studies.harness import Row, interval, panels, philox, save, sections
from scripts.studies.online_federated.algorithm import (
    NOISES,
    Federation,
    calibrated,
    paper_column_bound,
    paper_deviation,
    paper_tree_norm,
    true_epsilon,
)
from scripts.studies.online_federated.study import Point, Study, made
from scripts.studies.online_federated.theory import drifting


def _key(row: Row) -> Point:
    return Point(*(row[name] for name in Point._fields))


def _names(rows: Iterable[Row]) -> list[str]:
    """The noises of some rows, in the order of `NOISES`."""
    known = {row["noise"] for row in rows}
    return [name for name in NOISES if name in known]


def _accuracy(row: Row, clear: Row) -> str:
    values = np.array(row["accuracy"])
    spread = f" ({values.std(ddof=1):.3f})" if len(values) > 1 else ""
    return f"{values.mean():.3f}{spread}"


def _gap(row: Row, clear: Row) -> str:
    """Points below the noiseless run, over the same seeds."""
    gap = interval((np.array(clear["accuracy"]) - np.array(row["accuracy"])).tolist())
    return f"{100 * gap.mean:.1f} ± {100 * gap.half_width:.1f}"


def accuracy_table(
    rows: Sequence[Row], experiment: str, pick: str, show: Callable[[Row, Row], str] = _accuracy
) -> str:
    """A line for each setting, a column for each noise: the rows that are `chosen` or `shared`."""
    mine = [r for r in rows if r["experiment"] == experiment]
    names = [n for n in _names(mine) if n != "noiseless" or show is not _gap]
    lines = []
    for key in dict.fromkeys(map(_key, mine)):
        own = [r for r in mine if _key(r) == key]
        cells = {r["noise"]: r for r in own if r[pick]}
        cells["noiseless"] = next(r for r in own if r["noise"] == "noiseless" and r["chosen"])
        known = {f"{r['true_epsilon']:.3g}" for r in cells.values() if r["true_epsilon"]}
        true = sorted(known, key=float)
        setting = [key.local_steps, key.calibration, f"{key.epsilon:g}", f"{key.delta:g}"]
        shown = [show(cells[n], cells["noiseless"]) if n in cells else "" for n in names]
        lines.append([*setting, " to ".join(true[:: max(1, len(true) - 1)]), *shown])
    return table(["τ", "calibration", "ε", "δ", "true ε", *names], lines)


def chosen_table(rows: Sequence[Row], experiment: str) -> str:
    """The server step that each noise has chosen."""
    mine = [r for r in rows if r["experiment"] == experiment and r["chosen"]]
    names, lines = _names(mine), []
    for key in dict.fromkeys(map(_key, mine)):
        steps = {r["noise"]: f"{r['step']:.3g}" for r in mine if _key(r) == key}
        setting = [key.local_steps, key.calibration, f"{key.epsilon:g}", f"{key.delta:g}"]
        lines.append([*setting, *(steps.get(n, "") for n in names)])
    return table(["τ", "calibration", "ε", "δ", *names], lines)


def step_table(rows: Sequence[Row], point: Point) -> str:
    """Accuracy of a setting at each server step."""
    mine = [r for r in rows if _key(r) == point]
    at = {(r["step"], r["noise"]): f"{np.mean(r['accuracy']):.3f}" for r in mine}
    names = _names(mine)
    steps = sorted({r["step"] for r in mine})
    lines = [[f"{s:g}", *(at.get((s, n), "") for n in names)] for s in steps]
    return table(["etilde", *names], lines)


def noise_table(rounds: Sequence[int]) -> str:
    """max ||c_col||^2 ||B||_F^2 / R of each noise, and of the paper's tree with all 2R - 1 nodes."""
    names = [n for n in NOISES if n != "noiseless"]
    lines = []
    for r in rounds:
        errors = [f"{noise.prefix_error:.4g}" for n in names if (noise := made(n, r))]
        tree = float(paper_tree_norm(r) ** 2 * f.tree(r).prefix_variances.mean())
        lines.append([r, *errors, f"{tree:.4g}"])
    return table(["R", *names, "tree, all nodes"], lines)


def column_table(rounds: Sequence[int] = (4, 16, 64, 256, 1000, 10_000)) -> str:
    """The square of Toeplitz' column norm, Eq. (8)'s bound, and epsilon at (2, 1e-3) with that bound.

    The last columns calibrate with the bound, by the exact Gaussian mechanism and by Lemma IV.8.
    """
    lines = []
    for r in rounds:
        norm, bound = f.toeplitz(r).sensitivity, paper_column_bound(r)
        exact = true_epsilon(calibrated(2, 1e-3, bound), 1e-3, norm)
        lemma = true_epsilon(paper_deviation(2, 1e-3, bound), 1e-3, norm)
        lines.append([r, f"{norm**2:.4f}", f"{bound**2:.4f}", f"{exact:.3f}", f"{lemma:.3f}"])
    return table(["R", "‖c‖²", "Eq. (8)", "ε, exact Gaussian", "ε, Lemma IV.8"], lines)


def theory_table(rounds: int = 512, steps: Sequence[float] = (0.125, 0.03, 0.01, 0.003)) -> str:
    """Expected dynamic regret on quadratics and Lemma IV.9's bound: tau = 5, n = d = 20, (2, 1e-3)."""
    federation = Federation(rounds=rounds, local_steps=5, learners=20)
    problem = drifting(federation, 20, philox(1, 0))
    lines = []
    for step in steps:
        for name in ("independent", "tree", "optimized", "toeplitz"):
            noise = made(name, rounds)
            v = calibrated(2, 1e-3, federation.sensitivity() * noise.sensitivity) if noise else 0.0
            r = problem.regret(federation, noise, v, step)
            figures = (r.path, r.noise, r.noise_bound, r.path + r.noise, r.bound)
            lines.append([f"{step:g}", name, *(f"{x:.4g}" for x in figures)])
    return table(["etilde", "noise", "path", "noise part", "its bound", "regret", "bound"], lines)


def tables(rows: Sequence[Row], study: Study) -> dict[str, str]:
    """Title -> table."""
    parts: list[tuple[str, str]] = []
    for experiment in dict.fromkeys(r["experiment"] for r in rows):
        at = (rows, experiment)
        parts += [
            (f"{experiment}: own best step", accuracy_table(*at, "chosen")),
            (f"{experiment}: points below noiseless", accuracy_table(*at, "chosen", _gap)),
            (f"{experiment}: all at Toeplitz' step", accuracy_table(*at, "shared")),
            (f"{experiment}: chosen steps", chosen_table(*at)),
        ]
    for point in (Point("logistic", *target) for target in study.targets):
        if point.local_steps == 5 and point.delta == 1e-3:
            title = f"logistic, {point.calibration}, ε = {point.epsilon:g}: each step"
            parts.append((title, step_table(rows, point)))
    most = study.records // 5
    return dict(parts) | {
        "Prefix error": noise_table([r for r in (4, 16, 64, 256, 1000) if r <= most]),
        "Eq. (8)": column_table(),
        "Lemma IV.9 on quadratics": theory_table(min(512, most)),
    }


def _order(key: Point) -> tuple[Any, ...]:
    return (key.calibration, key.epsilon, key.local_steps) if key.experiment == "digits" else ()


def plot(rows: Sequence[Row], experiment: str, path: Path) -> None:
    """Curves of accuracy with a band of one standard deviation, each noise at its own best step."""
    mine = [r for r in rows if r["experiment"] == experiment and r["chosen"] and r["delta"] == 1e-3]
    if experiment == "logistic":
        mine = [r for r in mine if r["local_steps"] == mine[0]["local_steps"]]
    keys = sorted(dict.fromkeys(map(_key, mine)), key=_order)
    columns = min(3, len(keys))
    lines = math.ceil(len(keys) / columns)
    figure, grid = panels(lines, columns, (3.6 * columns, 2.8 * lines), sharey=True)
    for axes, key in zip(grid.flat, keys, strict=False):
        for row in (r for r in mine if _key(r) == key):
            at, curve, spread = (np.array(row[k], float) for k in ("at", "curve", "spread"))
            style = "k:" if row["noise"] == "noiseless" else f"C{list(NOISES).index(row['noise'])}-"
            axes.plot(at, curve, style, label=row["noise"], linewidth=1.2)
            axes.fill_between(at, curve - spread, curve + spread, color=style[:-1], alpha=0.12)
        title = f"{key.calibration}, ε = {key.epsilon:g}, τ = {key.local_steps}"
        axes.set(title=title, xlabel="round")
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(keys) :]:
        axes.set_visible(False)
    grid.flat[0].set_ylabel("accuracy")
    handles = {h.get_label(): h for axes in grid.flat for h in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=90)


def write(study: Study, rows: Sequence[Row], output_dir: Path) -> str:
    """Writes table.md and logistic.png and digits.png, as far as there are rows of them."""
    for experiment in dict.fromkeys(row["experiment"] for row in rows):
        plot(rows, experiment, output_dir / f"{experiment}.png")
    return save(output_dir, sections(tables(rows, study)))
