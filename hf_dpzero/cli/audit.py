"""`hf-dpzero audit`: attacks what a recipe's plan would release; one line and one row of a file each."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_dpzero.auditing.bounds import epsilon_of_guesses
from hf_dpzero.auditing.membership import Attack, attacks, guesses, largest_area, largest_share
from hf_dpzero.auditing.releases import CONFIDENCES, Audit, audits_of
from hf_dpzero.checks.data import num_units
from hf_dpzero.cli import options
from hf_dpzero.cli.train import evaluator
from hf_dpzero.experiments.plan import overview
from hf_dpzero.ledger.log_file import write_for_owner
from hf_dpzero.objectives import select_objective
from hf_dpzero.objectives.losses import evaluation_mode
from hf_dpzero.recipes.holdout import held_out
from hf_dpzero.recipes.recipe import Recipe, load_recipe, parse_overrides, read_recipe
from hf_dpzero.reporting.model_card import new_figure, optional_plot
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.verification import report_of
from hf_dpzero.run_folder.keys import FOLDER, HOLDOUT_FILE
from hf_dpzero.run_folder.left_on_disk import note_caches
from hf_dpzero.settings.row_groups import column_values
from hf_dpzero.tasks.rows import keyed_digests
from hf_dpzero.values import encode

if TYPE_CHECKING:
    import datasets

    from hf_dpzero.tasks import AnyTask

JSON_FILE, PLOT_FILE = "audit.json", "audit.png"
MEMBERSHIP_FILE, CURVES_FILE = "membership.json", "membership.png"


def run_audit(arguments: options.Audit) -> int:
    """Prints claims and lower bounds and writes them into output_dir; 1 where a claim is refuted."""
    given = parse_overrides(arguments.overrides)
    own = str(read_recipe(arguments.recipe).get("output_dir", "out/run")).rstrip("/")
    folder = Path(arguments.output_dir or f"{(arguments.model or own).rstrip('/')}-audit")
    if arguments.model is not None:
        return _ask_model(arguments, given, folder)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(arguments.recipe, {**given, "output_dir": scratch})
        known = overview(recipe, arguments.num_examples)
    plan, config = known.plan, recipe.training
    if plan is None:
        raise ValueError(f"{arguments.recipe} has no plan yet: {known.rows.source}")
    if (unsafe := config.testing.not_private) or config.not_private:
        names = "".join(f", testing.{name}" for name in unsafe)
        raise ValueError(
            f"{arguments.recipe} is not private (method {config.method}{names}): there is no claim to "
            "audit. Give target_epsilon and a private method, without settings of testing."
        )
    delta = config.delta(plan.sampler.num_examples)
    print(
        f"the run: {plan.steps} steps, noise multiplier {plan.mechanism.noise_multiplier:.6g}, epsilon "
        f"{plan.epsilon(delta):.4g} at delta {delta:.3g}, {plan.relation}",
        flush=True,
    )
    found = []
    for audit in audits_of(plan, delta, arguments.runs, arguments.steps):
        print(_line(audit), flush=True)
        found.append(audit)
    holds = all(audit.holds for audit in found)
    audits = [
        dataclasses.asdict(a) | {"holds": a.holds, "bounds": [b._asdict() for b in a.bounds]}
        for a in found
    ]
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"recipe": arguments.recipe, "holds": holds, "plan": plan.to_dict(), "audits": audits}
    (folder / JSON_FILE).write_text(json.dumps(encode(facts), indent=2) + "\n", encoding="utf-8")
    with optional_plot(PLOT_FILE):
        _plot(found, folder / PLOT_FILE)
    print("no claim is refuted" if holds else "a claim is REFUTED: more is spent than is claimed")
    print("written:", *(str(p) for n in (JSON_FILE, PLOT_FILE) if (p := folder / n).is_file()))
    return int(not holds)


def _line(audit: Audit) -> str:
    likely, sure = (bound.epsilon for bound in audit.bounds)
    return (
        f"{audit.what}: claim {audit.claim:.4g}, at least {likely:.4g} (95 %), {sure:.4g} (1 - 1e-6); "
        f"{audit.runs} runs each, {audit.seconds:.1f} s" + ("" if audit.holds else "  REFUTED")
    )


def _plot(audits: Sequence[Audit], target: Path) -> None:
    """Draws each claim, and below it what is at least spent."""
    figure = new_figure(1, 7.0, 0.6 * len(audits) + 1.2)
    axes, rows = figure.subplots(), range(len(audits))
    axes.barh(rows, [audit.claim for audit in audits], color="lightgrey", label="claim")
    for place, confidence in enumerate(CONFIDENCES):
        found = [audit.bounds[place].epsilon for audit in audits]
        axes.plot(found, rows, "o|"[place], ms=8, label=f"at least, confidence {confidence:.6g}")
    axes.set(yticks=rows, yticklabels=[audit.what for audit in audits], xlabel="epsilon")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(target, dpi=120)


# ---- membership inference


@dataclasses.dataclass(frozen=True)
class _Asked:
    """Rows that a trained model is asked about.

    Attributes:
      task: as the model was trained on it.
      rows: the task with all these rows as its training rows.
      out: which of them it was not trained on, bool [n].
      others: what those are, in words.
      coins: a name for each row, of what was held out by one fair coin: rows that are equal, or of one
        unit. None where it was not so.
      units: whether coins are of units.
    """

    task: AnyTask
    rows: AnyTask
    out: np.ndarray
    others: str
    coins: list[bytes] | None = None
    units: bool = False


def _ask_model(arguments: options.Audit, given: dict[str, Any], folder: Path) -> int:
    """Prints what losses tell of training rows, and writes it for its owner; 1 where that refutes."""
    trained = Path(str(arguments.model))
    if not (trained / REPORT_FILE).is_file():
        raise ValueError(
            f"--model {trained}: no {REPORT_FILE} there. Name the folder of a finished run."
        )
    report = report_of(trained)
    epsilon, delta = report.epsilon if report.private else math.inf, report.delta
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(arguments.recipe, {"output_dir": scratch, **given})
        asked = _rows_of(recipe, trained, report)
        after = _losses(recipe, asked, str(trained), trained)
        before = _losses(recipe, asked, recipe.model.model_name_or_path, trained)
    out = asked.out
    print(
        f"{trained}: {(~out).sum()} rows that it was trained on, {out.sum()} {asked.others}; "
        f"epsilon {epsilon:.4g} permits an area of {largest_area(epsilon, delta):.3f} on average"
    )
    found = attacks(*((losses[~out], losses[out]) for losses in (after, before)))
    for one in found:
        permitted = float(largest_share(one.false_alarms, epsilon, delta))
        print(
            f"  {one.what:<22} area {one.area:.3f} +- {one.error:.3f}; {one.found:.2%} found at "
            f"{one.false_alarms:.2%} false alarms ({permitted:.2%} permitted)"
        )
    one_run = None if asked.coins is None else _one_run(before - after, asked, report)
    print("These are figures of private rows without noise: not for publication.")
    facts = {"model": str(trained), "epsilon": epsilon, "delta": delta, "others": asked.others}
    told = [dataclasses.asdict(one) for one in found]
    for entry in told:
        del entry["curve"]
    facts |= {"attacks": told, "one_run": one_run}
    write_for_owner(folder / MEMBERSHIP_FILE, json.dumps(encode(facts), indent=2) + "\n")
    with optional_plot(CURVES_FILE):
        _plot_curves(found, epsilon, delta, folder / CURVES_FILE)
    return int(one_run is not None and not one_run["holds"])


def _plot_curves(found: Sequence[Attack], epsilon: float, delta: float, target: Path) -> None:
    """Draws how many rows each attack finds at how many false alarms, for the owner's eyes."""
    figure = new_figure(1)
    axes, shares = figure.subplots(), np.linspace(0, 1, 1001)
    for one in found:
        axes.plot(*one.curve, label=f"{one.what}, area {one.area:.3f}")
    permitted = largest_share(shares, epsilon, delta)
    axes.plot(shares, permitted, "k--", lw=1, label=f"epsilon {epsilon:.4g} permits, on average")
    axes.plot(shares, shares, color="lightgrey", zorder=0)
    axes.set(xlabel="false alarms: share of other rows", ylabel="training rows found")
    axes.legend(loc="lower right", fontsize="small")
    write_for_owner(target, "")
    figure.savefig(target, dpi=120)


def _rows_of(recipe: Recipe, trained: Path, report: PrivacyReport) -> _Asked:
    """Returns training rows and rows that the run held out, in the data's order; else validation rows.

    Raises:
      ValueError: they are not those of the run, as far as that can be seen.
    """
    import datasets

    from hf_dpzero.tasks import build_task

    task, file = build_task(recipe.data), trained / FOLDER / HOLDOUT_FILE
    rows, column = task.splits["train"], recipe.training.unit_column
    if file.is_file() or recipe.data.holdout:
        held_out(task.splits, trained)
        stored = json.loads(file.read_text())  # of the run, whatever the recipe says
        column = stored["unit_column"]
        names = _names(rows, column)
        aside = {*_names(task.splits["private"], column)}
        out = np.array([name in aside for name in names])
        coins = names if stored["share"] == 0.5 else None
        joined = dataclasses.replace(task, splits=type(task.splits)(train=rows))
        return _Asked(task, joined, out, "held out", coins, column is not None)
    if (count := num_units(rows, recipe.training)) > report.num_examples:
        raise ValueError(
            f"the recipe has {count} training rows or units, and {trained} was trained on "
            f"{report.num_examples}: give --train_file and subset of the run."
        )
    both = datasets.concatenate_datasets([rows, task.splits["validation"]])
    joined = dataclasses.replace(task, splits=type(task.splits)(train=both))
    return _Asked(task, joined, np.arange(len(both)) >= len(rows), "validation rows")


def _names(rows: datasets.Dataset, column: str | None) -> list[bytes]:
    return keyed_digests("", rows if column is None else column_values(rows, column) or ())


def _one_run(scores: np.ndarray, asked: _Asked, report: PrivacyReport) -> dict[str, Any]:
    """Guesses the coins, prints what follows, and returns it.

    The verdict is on epsilon at the smallest delta of the report: m coins times a larger one would
    leave nothing that is as unlikely as 1e-6.
    """
    names = np.array(asked.coins, dtype=object)
    sides = [scores[~asked.out], scores[asked.out]]
    right, count, number = guesses(sides, [names[~asked.out], names[asked.out]], asked.units)
    likely = epsilon_of_guesses(right, count, number, report.delta, 0.95)
    found = {"right": right, "guesses": count, "coins": number, "bound": likely, "holds": True}
    said = f"at least {likely:.4g} (95 %)"
    curve = report.other_terms.get("epsilon_at_delta", {})
    # Else the curve is not all that these weights cost, or no claim.
    if curve and report.private and report.tuning == "none" and not report.earlier_runs:
        delta, claim = min((float(delta), float(epsilon)) for delta, epsilon in curve.items())
        sure = epsilon_of_guesses(right, count, number, delta, 1 - 1e-6)
        found |= {"delta": delta, "claim": claim, "sure": sure, "holds": sure <= claim}
        said += f"; at delta {delta:.3g} claim {claim:.4g}, at least {sure:.4g} (1 - 1e-6)"
    print(
        f"  audit in one run: {right} of {count} guesses of {number} coins are right: {said}"
        + ("" if found["holds"] else "  REFUTED")
    )
    return found


def _losses(recipe: Recipe, asked: _Asked, model: str, trained: Path) -> np.ndarray:
    """A model's losses of all rows, float [n]; `trained` notes the copies of `datasets`."""
    named = dataclasses.replace(recipe.model, model_name_or_path=model)
    renamed, base = dataclasses.replace(recipe, model=named), recipe.model.model_name_or_path
    trainer = evaluator(renamed, asked.task, base, "train", asked.rows)
    note_caches(trained, trainer.eval_dataset)
    rows, size = trainer.rows_of(trainer.eval_dataset), recipe.training.per_device_eval_batch_size
    objective = trainer.per_example_loss or select_objective(trainer.model)
    objective = getattr(objective, "objective", objective)  # behind one that is not smooth
    losses = []
    with torch.no_grad(), evaluation_mode(trainer.model):
        for first in range(0, len(rows.dataset), size):
            numbers = list(range(first, min(first + size, len(rows.dataset))))
            inputs = trainer._prepare_inputs(dict(rows.collate_rows(numbers)))
            losses.append(objective(trainer.model, inputs).float().cpu())
    return torch.cat(losses).numpy()
