"""Earlier runs in a run's folder: refused where they were interrupted, else set aside and counted.

A run that starts where a finished one lies moves that run's files to `earlier-N`, a run's folder of its
own. What it spent stays spent: the new run's report lists it (`set_aside`), with the epsilon of all
together if they were on the same rows. An interrupted private run is refused: it goes on at no cost, and
another start would pay a second time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME, Trajectory
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting.hub import CARD_FILE, COPIED, FOLDER_NAME, INITIAL_VALUES_FILE, WRITTEN
from hf_dpzero.reporting.model_card import PLOT_FILE
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.provenance import base_origins
from hf_dpzero.reporting.public import RECIPE_FILE
from hf_dpzero.reporting.wording import set_aside_words
from hf_dpzero.run import Run
from hf_dpzero.run_folder import keys
from hf_dpzero.run_folder.checkpoints import UNFINISHED

logger = logging.get_logger(__name__)

NAME = "earlier-"
"""What folders of runs that were set aside begin with."""

_RESULTS = ("*_results.json", RECIPE_FILE, PLOT_FILE, INITIAL_VALUES_FILE)
_FILES = (
    *(*COPIED, *WRITTEN, *_RESULTS, TRAINER_STATE_NAME, TRAINING_ARGS_NAME),
    *(f"{PREFIX_CHECKPOINT_DIR}-*", UNFINISHED, FOLDER_NAME),
)


def refuse_interrupted(folder: Path) -> None:
    """Refuses to start a run where a private one did not end, or where one is being written.

    A run has ended with its last step, or with `save_model` after its last release.

    Raises:
      LedgerError: says how to go on with it.
    """
    path = folder / LEDGER_NAME
    if not path.exists():
        return
    with closing(Trajectory.open(path)) as ledger:
        plan, taken = PrivacyPlan.from_dict(ledger.header["plan"]), ledger.next_step
        saved = is_saved(folder, ledger)
    if plan.private and 0 < taken < plan.steps and not saved:
        raise LedgerError(
            f"{path} is the ledger of an earlier run, interrupted after {taken} of {plan.steps} "
            "steps: go on with it at no further cost (--resume_from_checkpoint, or "
            "train(resume_from_checkpoint=True)), or train into another output_dir. Its privacy budget "
            "stays spent either way."
        )


def is_saved(folder: Path, ledger: Trajectory) -> bool:
    """Whether `save_model` wrote what lies in a folder after the ledger's last release."""
    shipped = folder / SHIPPING_NAME
    return shipped.is_file() and Trajectory.load(shipped).digest() == ledger.digest()


def refuse_own_base(run: Run) -> None:
    """Refuses to set aside the files that the model was loaded from, or the run that it extends.

    Raises:
      LedgerError: the run could not be resumed or replayed without them.
    """
    folder, extended = run.output_dir.resolve(), run.args.extends_run
    names = [origin.path for origin in base_origins(run.model)] + [extended] * bool(extended)
    used = {Path(str(name)).resolve() for name in names}
    if (folder / LEDGER_NAME).exists() and used & {folder, *_files_of(folder)}:
        raise LedgerError(
            f"{folder / LEDGER_NAME} is the ledger of an earlier run, whose weights this one starts "
            "from: train into another output_dir (extends_run adds up the budgets of both)."
        )


def set_aside(run: Run) -> dict[str, Any]:
    """Moves the run that lies in a run's folder to `earlier-N`, its ledger last; removes its keys.

    Args:
      run: that starts, after `refuse_interrupted` and `refuse_own_base`.

    Returns:
      The report's `set_aside`; {} for a run that is not private, and where nothing was spent.
    """
    folder, said = run.output_dir, ""
    refuse_interrupted(folder)  # again: another process may have begun there
    began = (folder / LEDGER_NAME).exists()
    # Without a ledger, weights may be a base model's; the rest would be shipped as this run's.
    found = _files_of(folder, _FILES if began else _RESULTS)
    if began or found:
        numbers = (folder / f"{NAME}{number}" for number in itertools.count(1))
        place = next(path for path in numbers if not path.exists())
        place.mkdir()
        for secret in (folder / keys.FOLDER).glob(f"*{keys.FILE}*") if began else ():
            secret.unlink()  # an upload of the folder would take them along
        for path in (*found, *[folder / LEDGER_NAME] * began):
            path.rename(place / path.name)
        said = f"what another run left in {folder} is set aside in {place.name}"
    spent = _spent(run) if run.plan.private else {}
    if said or spent:
        parts = [said, f"runs before this one: {set_aside_words(spent)}" if spent else ""]
        logger.warning("; ".join(filter(None, parts)))
    return spent


def _files_of(folder: Path, patterns: Sequence[str] = _FILES) -> list[Path]:
    """What a run writes into its folder, but for its ledger and keys, and a README.md of others."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    card = folder / CARD_FILE
    if card in found and REPORT_FILE not in card.read_text(errors="replace"):
        found.remove(card)
    return sorted(found)


def _spent(run: Run) -> dict[str, Any]:
    """What the runs that were set aside spent, each alone and all with this one's whole plan."""
    covered = {entry["trajectory_digest"] for entry in run.extended}
    runs, plans, units = [], [], {run.args.privacy_unit}
    for path in sorted(run.output_dir.glob(f"{NAME}*/{LEDGER_NAME}")):
        ledger = Trajectory.load(path)
        if not ledger.releases or ledger.digest() in covered:
            continue
        plan, steps = PrivacyPlan.from_dict(ledger.header["plan"]), ledger.next_step
        report = PrivacyReport.from_header(ledger.header, steps=steps, delta=run.delta, plan=plan)
        plans += [*plan.after, (replace(plan, after=()), steps)]
        facts = {"folder": path.parent.name, "method": plan.mechanism.name, "steps": steps}
        units.add(report.privacy_unit)
        spent = report.epsilon if report.private else None
        runs.append({**facts, "planned_steps": plan.steps, "epsilon": spent})
    if not runs:
        return {}
    together = None
    if len(units) == 1 and all(entry["epsilon"] is not None for entry in runs):
        with suppress(ValueError):  # of other rows, or another relation
            together = replace(run.plan, after=(*run.plan.after, *plans)).epsilon(run.delta)
    return {"runs": runs, "epsilon": together}
