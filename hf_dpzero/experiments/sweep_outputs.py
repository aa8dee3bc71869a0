"""What a sweep leaves: sweep.json, sweep.md, the best recipe or the best run.

Of a private selection only what the theorem releases is written outside D/_private: the winner's
settings, score and shippable files, and the distribution of the number of trials. Its score is a
function of its weights and of public validation data.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_dpzero.experiments.results import Row
from hf_dpzero.experiments.runner import Workspace
from hf_dpzero.experiments.sweep import Prepared, SweepSettings
from hf_dpzero.experiments.tables import grid
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.ledger.trajectory import SHIPPING_NAME, Trajectory
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.selection import WORDS, composed_epsilon
from hf_dpzero.reporting.hub import build_hub_folder, write_page
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.wording import delta_words, number, round_up
from hf_dpzero.values import encode

TABLE_FILE = "sweep.md"


def write(settings: SweepSettings, prepared: Prepared, workspace: Workspace) -> dict[str, Any]:
    """Writes everything that the sweep may leave of its trials; returns the content of sweep.json."""
    rows, root = workspace.rows(), settings.output_dir
    best = _best_row(rows, prepared.metric)
    for row in rows:
        if row.done and (not settings.secret or row is best):
            _report_tuning(settings, prepared, workspace.run_folder / row.folder)
    content = _summary(settings, prepared, rows, best)
    if settings.secret and best is not None:  # copied by the allow list of the Hub push
        build_hub_folder(workspace.run_folder / best.folder, root / "best")
    elif best is not None:
        write_atomically(root / "best.yaml", _best_recipe(settings, prepared, best))
    write_atomically(root / "sweep.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_atomically(root / TABLE_FILE, _table(settings, prepared, content))
    return content


def _best_row(rows: Sequence[Row], metric: str) -> Row | None:
    """Returns the finished row with the best score, the earliest of equals."""
    # Of a loss or a perplexity the least is the best.
    sign = -1.0 if metric.endswith(("loss", "perplexity")) else 1.0

    def worth(row: Row) -> float:
        return -math.inf if row.score is None else sign * row.score

    # max keeps the first of equals: which one wins depends on no later trial
    return max((row for row in rows if row.done), key=worth, default=None)


def _report_tuning(settings: SweepSettings, prepared: Prepared, folder: Path) -> None:
    """Writes into a run's privacy report how its settings were chosen, and the total epsilon."""
    trajectory = Trajectory.load(folder / SHIPPING_NAME)
    plan = PrivacyPlan.from_dict(trajectory.header["plan"])
    tuned = PrivacyReport.load(folder).with_tuning(
        prepared.tuning, plan, trajectory.header, at_least=prepared.epsilon or 0.0
    )
    if settings.tuning == "composed":
        # The run itself had a noise multiplier and no target: the sweep's was the recipe's.
        target = settings.load({}).training.target_epsilon
        tuned = dataclasses.replace(tuned, target_epsilon=target)
    tuned.save(folder)
    write_page(folder, tuned, trajectory)


def _summary(
    settings: SweepSettings, prepared: Prepared, rows: Sequence[Row], best: Row | None
) -> dict[str, Any]:
    """Returns the content of sweep.json; infinite numbers become the string "inf"."""
    content: dict[str, Any] = {
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
        "best": None,
    }
    if best is not None:
        folder = "best" if settings.secret else f"trials/{best.folder}"
        content["best"] = {"settings": best.settings, "score": best.score, "folder": folder}
    if settings.tuning == "composed":
        content["selection"] = settings.selection
    if settings.secret:
        content["mean_trials"] = settings.trials.mean
    else:
        names = ("trial", "settings", "status", "score", "metrics")
        content["trials"] = [
            {**{name: getattr(row, name) for name in names}, "message": row.error or ""}
            for row in rows
        ]
    if settings.tuning == "not_accounted":
        # What composition of the whole grid would have claimed; None where it has no accounting.
        n, total = prepared.num_examples, math.inf
        try:
            trainings = [settings.load(point).training for point in settings.points]
            plans = [training.plan(n) for training in trainings]
            total = composed_epsilon(plans, max(training.delta(n) for training in trainings))
        except ValueError:
            pass
        content["epsilon_if_composed"] = total if math.isfinite(total) else None
    return dict(encode(content))


def statement(settings: SweepSettings, prepared: Prepared) -> str:
    """Returns what the sweep cost, in one or two sentences."""
    if settings.tuning == "public":
        return (
            "The trials' training data was declared public by the user, so the sweep spent nothing. "
            "The declaration is the user's; nothing here can check it."
        )
    if prepared.epsilon is None or prepared.delta is None:
        return (
            "Tuning is NOT ACCOUNTED: the grid was run on the private data, and each printed epsilon "
            "holds for one run whose settings were fixed beforehand, not for the best of several."
        )
    total = f"({round_up(prepared.epsilon)}, {delta_words(prepared.delta)})-differentially private"
    if settings.secret:
        return (
            f"The best run and its settings are {total} in total: private selection among a secret "
            f"random number of trials (geometric, mean {number(settings.trials.mean)}), "
            "each with settings drawn uniformly from the grid. How many trials ran, and all but the "
            "best, stay secret."
        )
    return (
        f"All {len(settings.points)} runs of the grid together are {total}, by composition: all of "
        "them, their scores and the choice among them may be released."
    )


def _table(settings: SweepSettings, prepared: Prepared, content: Mapping[str, Any]) -> str:
    """Returns what the sweep cost, then settings and scores (the winner's alone if secret)."""
    names, best = list(settings.grid), content["best"]
    rows = content.get("trials") or ([{**best, "status": "done"}] if best else [])
    body = []
    for row in rows:
        score = "-" if row["score"] is None else f"{row['score']:.4g}"
        shown = score if row["status"] == "done" else "failed"
        chosen = "best" if best and row["settings"] == best["settings"] else ""
        body.append([*(str(row["settings"][name]) for name in names), shown, chosen])
    labels = {
        "epsilon": "epsilon in total",
        "epsilon_one_run": "epsilon of one run alone",
        "epsilon_if_composed": "epsilon if all runs were accounted by composition",
    }
    epsilons = [
        f"- {label}: {round_up(content[key])}"
        for key, label in labels.items()
        if isinstance(content.get(key), float)
    ]
    parts = ["# Sweep", f"> {content['statement']}", "\n".join(epsilons)]
    parts.append(grid([*names, prepared.metric, ""], body))
    swept = [f"- `{name}`: {', '.join(map(str, v))}" for name, v in content["grid"].items()]
    return "\n\n".join([*filter(None, parts), "Swept:", "\n".join(swept)]) + "\n"


def _best_recipe(settings: SweepSettings, prepared: Prepared, best: Row) -> str:
    """Returns a recipe with the winning settings, to train the private data with."""
    plain = settings.for_private_rows() if settings.tuning == "public" else settings
    values = yaml.safe_load(plain.load(best.settings or {}).to_yaml())
    values.pop("output_dir", None)
    values["tuning"] = settings.tuning if settings.tuning in WORDS else "not_accounted"
    values["output_dir"] = str(settings.output_dir / "trained")
    costs = {
        "public": "Training with this recipe on private data costs what its own report says, "
        "and no more.",
        "not_accounted": "A report of training with it holds for that one run and ignores the sweep.",
        "composed": "Training with it on the same data again costs again, beside the sweep.",
    }
    score = "-" if best.score is None else f"{best.score:.4g}"
    comment = (
        f"The best of {len(settings.points)} settings of a sweep over {', '.join(settings.grid)}: "
        f"{prepared.metric} {score}.",
        statement(settings, prepared),
        costs[settings.tuning],
    )
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comment) + "\n" + text
