"""What a sweep leaves: sweep.json, sweep.md, sweep.png, the best recipe or the best run.

Of a private selection only what the theorem releases is written outside D/_private: the winner's
settings, score and shippable files, and the distribution of the number of trials. Its score is a
function of its weights and of public validation data.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_dpzero.experiments.sweep import Prepared, SweepSettings, composed_anyway
from hf_dpzero.experiments.sweep_trials import Row, Workspace, best_row
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.private_selection import WORDS
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.wording import number, round_up
from hf_dpzero.tasks.arguments import DataArguments

JSON_FILE, TABLE_FILE, PLOT_FILE = "sweep.json", "sweep.md", "sweep.png"
BEST_RECIPE, BEST_FOLDER = "best.yaml", "best"


def write(workspace: Workspace, rows: list[Row]) -> dict[str, Any]:
    """Writes everything that the sweep may leave and returns the content of sweep.json."""
    settings, prepared = workspace.settings, workspace.prepared
    best = best_row(rows, prepared.metric)
    for row in rows:
        if row.status == "done" and (not settings.secret or row is best):
            tune_report(workspace, row.trial)
    found = summary(settings, prepared, rows, best)
    root = settings.output_dir
    if settings.secret:
        _release(workspace, best)
    else:
        if best is not None:
            write_atomically(root / BEST_RECIPE, best_recipe(settings, prepared, best))
        plot(settings, prepared, rows)
    write_atomically(root / JSON_FILE, json.dumps(found, indent=2, allow_nan=False) + "\n")
    write_atomically(root / TABLE_FILE, table(settings, prepared, found))
    return found


def tune_report(workspace: Workspace, trial: int) -> None:
    """Writes into a run's privacy report how its settings were chosen, and the total epsilon."""
    folder, prepared = workspace.folder(trial), workspace.prepared
    report = PrivacyReport.load(folder).with_tuning(prepared.tuning, _plan(folder))
    if isinstance(prepared.tuning, dict):
        total = max(report.epsilon, prepared.epsilon or 0.0)
        target = workspace.settings.load({}).training.target_epsilon
        report = dataclasses.replace(report, epsilon=total, target_epsilon=target)
    report.save(folder)


def _plan(folder: Path) -> PrivacyPlan:
    return PrivacyPlan.from_dict(Trajectory.load(folder / SHIPPING_NAME).header["plan"])


def _release(workspace: Workspace, best: Row | None) -> None:
    """Copies the winner, by the allow list of the Hub push, to D/best; nothing if no trial ran."""
    if best is not None:
        target = workspace.settings.output_dir / BEST_FOLDER
        build_hub_folder(workspace.folder(best.trial), target)


# ------------------------------------------------------------------ sweep.json


def summary(
    settings: SweepSettings, prepared: Prepared, rows: Sequence[Row], best: Row | None
) -> dict[str, Any]:
    """The content of sweep.json; infinite numbers become the string "inf"."""
    found: dict[str, Any] = {
        "tuning": settings.tuning,
        "statement": statement(settings, prepared),
        "recipe": Path(settings.recipe).name,
        "grid": {name: list(values) for name, values in settings.grid.items()},
        "metric": prepared.metric,
        "epsilon": prepared.epsilon,
        "epsilon_one_run": prepared.epsilon_one_run,
        "delta": prepared.delta,
        "noise_multiplier": prepared.noise_multiplier,
        "num_examples": prepared.num_examples,
        "best": _best(settings, best),
    }
    if settings.tuning == "composed":
        found["selection"] = settings.selection
    if settings.secret:
        found["trial_count"] = {"law": settings.trials.name, "mean": settings.trials.mean}
    else:
        found["trials"] = [_public_row(row) for row in rows]
    if settings.tuning == "not_accounted":
        found["epsilon_if_composed"] = composed_anyway(settings, prepared.num_examples)
    return dict(_finite(found))


def _best(settings: SweepSettings, best: Row | None) -> dict[str, Any] | None:
    if best is None:
        return None
    folder = BEST_FOLDER if settings.secret else f"trials/{best.trial:03d}"
    return {"settings": dict(best.settings), "score": best.score, "folder": folder}


def _public_row(row: Row) -> dict[str, Any]:
    return {"trial": row.trial, **{k: v for k, v in vars(row).items() if k != "trial"}}


def statement(settings: SweepSettings, prepared: Prepared) -> str:
    """What the sweep cost, in words."""
    if settings.tuning == "public":
        return (
            "The trials' training data was declared public by the user, so the sweep spent nothing. "
            "The declaration is the user's; nothing here can check it."
        )
    if settings.tuning == "not_accounted":
        return (
            "Tuning is NOT ACCOUNTED: the grid was run on the private data, and each printed epsilon "
            "holds for one run whose settings were fixed beforehand, not for the best of several."
        )
    assert prepared.epsilon is not None and prepared.delta is not None
    total = f"({round_up(prepared.epsilon)}, {number(prepared.delta)})-differentially private"
    if settings.secret:
        return (
            f"The best run and its settings are {total} in total: private selection among a secret "
            f"random number of trials ({settings.trials.name}, mean {number(settings.trials.mean)}), "
            "each with settings drawn uniformly from the grid. How many trials ran, and all but the "
            "best, stay secret."
        )
    return (
        f"All {len(settings.points)} runs of the grid together are {total}, by composition: all of "
        "them, their scores and the choice among them may be released."
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


# ------------------------------------------------------------------ sweep.md


def table(settings: SweepSettings, prepared: Prepared, found: Mapping[str, Any]) -> str:
    """The sweep for people: what it cost, then settings and scores (the winner's alone if secret)."""
    names = list(settings.grid)
    rows = found.get("trials") or [{**found["best"], "status": "done"}] if _any(found) else []
    lines = [
        "# Sweep",
        "",
        f"> {found['statement']}",
        "",
        *_epsilon_lines(found),
        *_markdown([*names, prepared.metric, ""], [_cells(row, names, found) for row in rows]),
    ]
    if not rows:
        lines += ["", "No trial ran: their random number came out as 0. Nothing is released."]
    swept = [f"- `{name}`: {', '.join(map(str, values))}" for name, values in found["grid"].items()]
    return "\n".join([*lines, "", "Swept:", "", *swept, ""])


def _any(found: Mapping[str, Any]) -> bool:
    return bool(found.get("trials") or found["best"])


def _epsilon_lines(found: Mapping[str, Any]) -> list[str]:
    labels = {
        "epsilon": "epsilon in total",
        "epsilon_one_run": "epsilon of one run alone",
        "epsilon_if_composed": "epsilon if all runs were accounted by composition",
    }
    shown = [
        f"- {text}: {round_up(found[key])}"
        for key, text in labels.items()
        if isinstance(found.get(key), float)
    ]
    return [*shown, ""] if shown else []


def _cells(row: Mapping[str, Any], names: Iterable[str], found: Mapping[str, Any]) -> list[str]:
    score = row["score"]
    shown = "failed" if row["status"] == "failed" else "-" if score is None else f"{score:.4g}"
    best = found["best"] and row["settings"] == found["best"]["settings"]
    return [*(str(row["settings"][name]) for name in names), shown, "best" if best else ""]


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


# ------------------------------------------------------------------ best.yaml


def best_recipe(settings: SweepSettings, prepared: Prepared, best: Row) -> str:
    """A recipe with the winning settings, to train the private data with.

    For public tuning the data of the recipe itself is kept: overrides of data fields named the
    public stand-in, and stay out.
    """
    overrides = dict(settings.overrides)
    if settings.tuning == "public":
        data = {field.name for field in dataclasses.fields(DataArguments)}
        overrides = {name: value for name, value in overrides.items() if name not in data}
    plain = dataclasses.replace(settings, overrides=overrides)
    values = yaml.safe_load(plain.load(best.settings).to_yaml())
    values.pop("output_dir", None)
    values["tuning"] = settings.tuning if settings.tuning in WORDS else "not_accounted"
    score = "-" if best.score is None else f"{best.score:.4g}"
    header = (
        f"The best of {len(settings.points)} settings of a sweep over {', '.join(settings.grid)}: "
        f"{prepared.metric} {score}.\n{statement(settings, prepared)}\n{_WARNINGS[settings.tuning]}"
    )
    comment = "".join(f"# {line}\n" for line in header.split("\n"))
    folder = settings.output_dir / "trained"
    values["output_dir"] = str(folder)
    return comment + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


_WARNINGS = {
    "public": "Training with this recipe on private data costs what its own report says, and no more.",
    "not_accounted": "A report of training with it holds for that one run and ignores the sweep.",
    "composed": "Training with it on the same data again costs again, beside the sweep.",
}


# ------------------------------------------------------------------ sweep.png


def plot(settings: SweepSettings, prepared: Prepared, rows: Sequence[Row]) -> Path | None:
    """Score against each swept setting; None if nothing was scored or nothing varies."""
    scored = [row for row in rows if row.score is not None]
    names = [name for name, values in settings.grid.items() if len(values) > 1]
    if not scored or not names:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(names), 3.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        _panel(axes, name, settings.grid[name], scored)
    panels[0].set_ylabel(prepared.metric)
    target = settings.output_dir / PLOT_FILE
    figure.savefig(target, dpi=120)
    return target


def _panel(axes: Any, name: str, values: Sequence[Any], rows: Sequence[Row]) -> None:
    """One point a run over evenly spaced values, and their mean as a line."""
    places = [values.index(row.settings[name]) for row in rows]
    scores = [float(row.score) for row in rows if row.score is not None]
    axes.plot(places, scores, ".", alpha=0.6)
    groups = [
        [s for p, s in zip(places, scores, strict=True) if p == i] for i in range(len(values))
    ]
    means = [(i, sum(found) / len(found)) for i, found in enumerate(groups) if found]
    axes.plot(*zip(*means, strict=True), "-", alpha=0.6)
    axes.set_xticks(range(len(values)), [str(value) for value in values])
    axes.set(xlabel=name)
    axes.grid(alpha=0.3)
