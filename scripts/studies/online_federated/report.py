"""Tables and plots of the online federated study."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpzero.papers.online_federated import (
    NOISES,
    Federation,
    calibrated,
    paper_column_bound,
    paper_deviation,
    paper_tree_norm,
    true_epsilon,
)
from hf_dpzero.privacy.correlated import factorization as f
from scripts.studies.harness import Row, interval, panels, philox, save, table
from scripts.studies.online_federated.study import Study, made
from scripts.studies.online_federated.theory import drifting

PLOT_FILES = {"logistic": "logistic.png", "digits": "digits.png"}
KEY = ("experiment", "local_steps", "calibration", "epsilon", "delta")


def summary(rows: Sequence[Row]) -> list[Row]:
    """The rows with means, deviations and gaps in the place of the seeds' figures."""
    clear = {_key(r): r["accuracy"] for r in rows if r["noise"] == "noiseless" and r["chosen"]}
    found = []
    for row in rows:
        kept = {k: v for k, v in row.items() if k not in ("accuracy", "at", "curve", "spread")}
        values = np.array(row["accuracy"])
        gap = interval((values - np.array(clear[_key(row)])).tolist())
        figures = {
            "accuracy": float(values.mean()),
            "accuracy_std": float(values.std(ddof=1)) if len(values) > 1 else None,
            "gap": gap.mean,
            "gap_half_width": gap.half_width,
        }
        found.append({**kept, **figures})
    return found


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in KEY)


def accuracy_table(
    rows: Sequence[Row], experiment: str, pick: Callable[[Row], bool], *, gaps: bool = False
) -> str:
    """A line for each setting, a column for each noise."""
    mine = [r for r in rows if r["experiment"] == experiment]
    names = [
        n for n in NOISES if any(r["noise"] == n for r in mine) and not (gaps and n == "noiseless")
    ]
    lines = []
    for key in dict.fromkeys(_key(r) for r in mine):
        cells = {r["noise"]: r for r in mine if _key(r) == key and pick(r)}
        clear = next(
            r for r in mine if _key(r) == key and r["noise"] == "noiseless" and r["chosen"]
        )
        cells["noiseless"] = clear
        show = _gap if gaps else _accuracy
        lines.append([*_setting(key, cells), *(show(cells.get(name)) for name in names)])
    return table(["τ", "calibration", "ε", "δ", "true ε", *names], lines)


def _setting(key: tuple[Any, ...], cells: dict[str, Row]) -> list[str]:
    """tau, calibration, epsilon, delta and what the epsilons really are."""
    _, tau, calibration, epsilon, delta = key
    true = sorted(
        {f"{r['true_epsilon']:.3g}" for r in cells.values() if r["true_epsilon"]}, key=float
    )
    return [
        str(tau),
        calibration,
        f"{epsilon:g}",
        f"{delta:g}",
        " to ".join(true[:: max(1, len(true) - 1)]),
    ]


def _accuracy(row: Row | None) -> str:
    if row is None:
        return ""
    spread = row["accuracy_std"]
    return f"{row['accuracy']:.3f}" + ("" if spread is None else f" ({spread:.3f})")


def _gap(row: Row | None) -> str:
    return "" if row is None else f"{-100 * row['gap']:.1f} ± {100 * row['gap_half_width']:.1f}"


def step_table(rows: Sequence[Row], calibration: str, epsilon: float) -> str:
    """Accuracy of logistic regression at each server step, tau = 5, delta = 1e-3."""
    wanted = ("logistic", 5, calibration, epsilon, 1e-3)
    mine = [r for r in rows if _key(r) == wanted]
    names = [n for n in NOISES if any(r["noise"] == n for r in mine)]
    at = {(r["step"], r["noise"]): r for r in mine}
    steps = sorted({r["step"] for r in mine})
    return table(
        ["etilde", *names],
        [
            [f"{s:g}", *(f"{at[s, n]['accuracy']:.3f}" if (s, n) in at else "" for n in names)]
            for s in steps
        ],
    )


def noise_table(rounds: Sequence[int]) -> str:
    """max ||c_col||^2 ||B||_F^2 / R of each noise, and of the paper's tree with all 2R - 1 nodes."""
    names = [n for n in NOISES if n != "noiseless"]
    lines = []
    for r in rounds:
        found = [made(n, r) for n in names]
        errors = [f"{n.prefix_error:.4g}" for n in found if n]
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


def tables(rows: Sequence[Row], study: Study) -> str:
    """All tables as Markdown."""
    found, parts = summary(rows), []
    for experiment in dict.fromkeys(r["experiment"] for r in found):
        args = (found, experiment)
        parts += [
            (f"{experiment}: own best step", accuracy_table(*args, lambda r: r["chosen"])),
            ("Points below noiseless", accuracy_table(*args, lambda r: r["chosen"], gaps=True)),
            ("All at Toeplitz' step", accuracy_table(*args, lambda r: r["shared"])),
            ("Chosen steps", _chosen(found, experiment)),
        ]
    for tau, calibration, epsilon, delta in study.targets:
        if tau == 5 and delta == 1e-3:
            title = f"logistic, {calibration}, ε = {epsilon:g}: each step"
            parts.append((title, step_table(found, calibration, epsilon)))
    parts += [
        (
            "Prefix error",
            noise_table([r for r in (4, 16, 64, 256, 1000) if r <= study.records // 5]),
        ),
        ("Eq. (8)", column_table()),
        ("Lemma IV.9 on quadratics", theory_table(min(512, study.records // 5))),
    ]
    return "\n".join(f"## {title}\n\n{text}" for title, text in parts)


def _chosen(rows: Sequence[Row], experiment: str) -> str:
    mine = [r for r in rows if r["experiment"] == experiment and r["chosen"]]
    names = [n for n in NOISES if any(r["noise"] == n for r in mine)]
    lines = []
    for key in dict.fromkeys(_key(r) for r in mine):
        steps = {r["noise"]: f"{r['step']:.3g}" for r in mine if _key(r) == key}
        lines.append(
            [key[1], key[2], f"{key[3]:g}", f"{key[4]:g}", *(steps.get(n, "") for n in names)]
        )
    return table(["τ", "calibration", "ε", "δ", *names], lines)


def plot(rows: Sequence[Row], experiment: str, path: Path) -> Path:
    """Curves of accuracy with a band of one standard deviation, each noise at its own best step."""
    mine = [r for r in rows if r["experiment"] == experiment and r["chosen"] and r["delta"] == 1e-3]
    if experiment == "logistic":
        mine = [r for r in mine if r["local_steps"] == mine[0]["local_steps"]]
    order = (lambda k: (k[2], k[3], k[1])) if experiment == "digits" else (lambda k: 0)
    keys = sorted(dict.fromkeys(_key(r) for r in mine), key=order)
    columns = min(3, len(keys))
    lines = math.ceil(len(keys) / columns)
    figure, grid = panels(lines, columns, (3.6 * columns, 2.8 * lines), sharey=True)
    for axes, key in zip(grid.flat, keys, strict=False):
        for row in (r for r in mine if _key(r) == key):
            at, curve, spread = (np.array(row[k], float) for k in ("at", "curve", "spread"))
            style = "k:" if row["noise"] == "noiseless" else f"C{list(NOISES).index(row['noise'])}-"
            axes.plot(at, curve, style, label=row["noise"], linewidth=1.2)
            axes.fill_between(at, curve - spread, curve + spread, color=style[:-1], alpha=0.12)
        axes.set(title=f"{key[2]}, ε = {key[3]:g}, τ = {key[1]}", xlabel="round")
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(keys) :]:
        axes.set_visible(False)
    grid.flat[0].set_ylabel("accuracy")
    handles = {h.get_label(): h for axes in grid.flat for h in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=90)
    return path


def write(study: Study, rows: Sequence[Row], output_dir: Path) -> str:
    """Writes table.md, table.json and a plot of each experiment."""
    for experiment, name in PLOT_FILES.items():
        if any(row["experiment"] == experiment for row in rows):
            plot(rows, experiment, output_dir / name)
    return save(output_dir, tables(rows, study), summary(rows))
