"""`hf-dpzero audit`: attacks what a recipe's plan would release; one line and one row of a file each."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_dpzero.auditing.bounds import epsilon_of_guesses
from hf_dpzero.auditing.membership import attacks, guesses, largest_area, largest_share
from hf_dpzero.auditing.releases import CONFIDENCES, Audit, audits_of
from hf_dpzero.cli import options
from hf_dpzero.cli.train import evaluator
from hf_dpzero.experiments.plan import overview
from hf_dpzero.ledger.log_file import write_for_owner
from hf_dpzero.objectives import select_objective
from hf_dpzero.objectives.losses import evaluation_mode
from hf_dpzero.recipes.holdout import held_out
from hf_dpzero.recipes.recipe import Recipe, load_recipe, parse_overrides, read_recipe
from hf_dpzero.reporting.model_card import new_figure, optional_plot
from hf_dpzero.reporting.verification import report_of
from hf_dpzero.run_folder.left_on_disk import note_caches
from hf_dpzero.settings.row_groups import column_values
from hf_dpzero.tasks.rows import keyed_digests
from hf_dpzero.values import encode

if TYPE_CHECKING:
    from hf_dpzero.tasks import AnyTask

JSON_FILE, PLOT_FILE, MEMBERSHIP_FILE = "audit.json", "audit.png", "membership.json"


def run_audit(arguments: options.Audit) -> int:
    """Prints claims and lower bounds and writes them into output_dir; 1 where a claim is refuted."""
    given = parse_overrides(arguments.overrides)
    own = str(read_recipe(arguments.recipe).get("output_dir", "out/run")).rstrip("/")
    folder = Path(arguments.output_dir or f"{own}-audit")
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


def _ask_model(arguments: options.Audit, given: dict[str, Any], folder: Path) -> int:
    """Prints what losses tell of training rows, and writes it for its owner; 1 where that refutes."""
    trained = Path(str(arguments.model))
    report = report_of(trained)
    epsilon, delta = report.epsilon, report.delta
    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(arguments.recipe, {"output_dir": scratch, **given})
        others, sides = _sides(recipe, trained)
        after = [_losses(recipe, side, str(trained), trained) for side in sides]
        before = [_losses(recipe, side, recipe.model.model_name_or_path, trained) for side in sides]
    print(
        f"{trained}: {len(after[0])} rows that it was trained on, {len(after[1])} others ({others}); "
        f"epsilon {epsilon:.4g} permits an area of {largest_area(epsilon, delta):.3f} on average"
    )
    found = attacks(after, before)
    for one in found:
        permitted = float(largest_share(one.false_alarms, epsilon, delta))
        print(
            f"  {one.what:<22} area {one.area:.3f} +- {one.error:.3f}; {one.found:.2%} found at "
            f"{one.false_alarms:.2%} false alarms ({permitted:.2%} permitted)"
        )
    one_run = None
    if recipe.data.holdout == 0.5:  # fair coins
        fell = [start - end for start, end in zip(before, after, strict=True)]
        one_run = _one_run(fell, sides, recipe.training.unit_column, epsilon, delta)
    print("These are figures of private rows without noise: not for publication.")
    facts = {"model": str(trained), "epsilon": epsilon, "delta": delta, "others": others}
    facts |= {"attacks": [dataclasses.asdict(one) for one in found], "one_run": one_run}
    write_for_owner(folder / MEMBERSHIP_FILE, json.dumps(encode(facts), indent=2) + "\n")
    return int(one_run is not None and one_run["bounds"][-1] > epsilon)


def _sides(recipe: Recipe, trained: Path) -> tuple[str, list[AnyTask]]:
    """What the other rows are, and the task twice, with training rows and the others as its "train"."""
    from hf_dpzero.tasks import build_task

    task = build_task(recipe.data)
    if recipe.data.holdout:
        held_out(task.splits, trained, recipe.training.unit_column)
    others = "private" if recipe.data.holdout else "validation"
    splits = [type(task.splits)(train=task.splits[name]) for name in ("train", others)]
    return others, [dataclasses.replace(task, splits=split) for split in splits]


def _one_run(
    scores: Sequence[np.ndarray],
    sides: Sequence[AnyTask],
    column: str | None,
    epsilon: float,
    delta: float,
) -> dict[str, Any]:
    """Guesses the coins of training rows and others, prints what follows, and returns it."""
    names = []
    for side in sides:  # rows that are held out together, equal ones or a unit's, have one name
        rows = side.splits["train"]
        names.append(
            keyed_digests("", rows if column is None else column_values(rows, column) or ())
        )
    right, count, coins = guesses(scores, names, column is not None)
    bounds = [epsilon_of_guesses(right, count, coins, delta, c) for c in CONFIDENCES]
    print(
        f"  audit in one run: {right} of {count} guesses of {coins} coins are right: at least "
        f"{bounds[0]:.4g} (95 %), {bounds[1]:.4g} (1 - 1e-6)"
        + ("  REFUTED" if bounds[1] > epsilon else "")
    )
    return {"right": right, "guesses": count, "coins": coins, "bounds": bounds}


def _losses(recipe: Recipe, task: AnyTask, model: str, trained: Path) -> np.ndarray:
    """A model's losses of all rows in "train", float [n]; `trained` notes the copies of `datasets`."""
    base = recipe.model.model_name_or_path
    named = dataclasses.replace(recipe.model, model_name_or_path=model)
    trainer = evaluator(dataclasses.replace(recipe, model=named), task, base, "train")
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
