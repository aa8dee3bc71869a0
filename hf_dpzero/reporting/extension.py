"""A run that continues an earlier one with more budget: what the earlier folder proves.

The later run starts from the earlier one's weights on the same private data. Its plan lists the earlier
plans with their completed steps (`PrivacyPlan.after`), so that its epsilon is the total.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME, Trajectory
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.selection import WORDS
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.verification import agreeing, check_weights

_ENTRY = ("folder", "base_weights", "tuning", "weights_digest", "trajectory_digest")


def read_extended(folder: str) -> tuple[PrivacyReport, Trajectory]:
    """The report and the ledger of a run that is to be extended, compared with each other.

    Args:
      folder: its output_dir, after `save_model`.

    Returns:
      The report, its words derived from its numbers, and the trajectory.

    Raises:
      LedgerError: the folder has no ledger, or one with other steps than were saved.
      ValueError: the report is missing, of something else, not private, or accounts for a search.
    """
    source = Path(folder)
    for name in (LEDGER_NAME, REPORT_FILE, SHIPPING_NAME):
        if not (source / name).is_file():
            raise LedgerError(
                f"extends_run={folder!r} has no {name}: give the output_dir of a run whose model was "
                "saved there (trainer.save_model()); a checkpoint or a downloaded model is none."
            )
    ledger = Trajectory.load(source / LEDGER_NAME)
    report, shipped = agreeing(PrivacyReport.load(source / REPORT_FILE), source)
    if ledger.digest() != shipped.digest():
        raise LedgerError(
            f"extends_run={folder!r}: {LEDGER_NAME} holds {ledger.next_step} steps and the saved model "
            f"is of {shipped.next_step}, or of another run: save the model again, or restore the folder."
        )
    if not report.private:
        raise ValueError(
            f"extends_run={folder!r} says: {report.statement} There is no budget to add to: start from "
            "the base model."
        )
    if report.tuning not in WORDS:
        raise ValueError(
            f"extends_run={folder!r} is a run of a sweep, whose report accounts for all its trials: a "
            "single run can be extended."
        )
    return report, ledger


def earlier_plans(folder: str | None) -> tuple[tuple[PrivacyPlan, int], ...]:
    """`PrivacyPlan.after` of a run that extends the one in `folder`; empty for None."""
    if folder is None:
        return ()
    report, ledger = read_extended(folder)
    plan = PrivacyPlan.from_dict(ledger.header["plan"])
    return (*plan.after, (dataclasses.replace(plan, after=()), report.steps))


def header_entries(folder: str | None) -> list[dict[str, Any]]:
    """The `extends` entry of a ledger's header: one for each plan of `earlier_plans`, in order."""
    if folder is None:
        return []
    report, ledger = read_extended(folder)
    values = (
        Path(folder).absolute().name,
        report.base_weights,
        report.tuning,
        report.weights_digest,
        ledger.digest(),
    )
    return [*ledger.header.get("extends", []), dict(zip(_ENTRY, values, strict=True))]


def check_extended(
    folder: str, privacy_unit: str, after: Sequence[tuple[PrivacyPlan, int]]
) -> Trajectory:
    """Refuses what may not be extended: weights that are not the run's, another unit of privacy.

    Args:
      folder: of the run.
      privacy_unit: of the run that extends it.
      after: `PrivacyPlan.after` of that run, which was read when its plan was made.

    Returns:
      The ledger of the run in `folder`.

    Raises:
      ValueError: says what differs.
    """
    report, ledger = read_extended(folder)
    check_weights(report, Path(folder))
    if earlier_plans(folder) != tuple(after):
        raise ValueError(
            f"extends_run={folder!r} holds {report.steps} steps, which this trainer's plan does not "
            "count: the run went on, or extends_run was set, after it was made. Make a new trainer."
        )
    if report.privacy_unit != privacy_unit:
        raise ValueError(
            f"extends_run={folder!r} is private for one {report.privacy_unit}, this run for one "
            f"{privacy_unit}: the two do not add up. Set rows_are as it was."
        )
    return ledger


def worst_tuning(own: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """How the settings of all runs together were chosen.

    >>> worst_tuning("public", [{"tuning": "none"}]), worst_tuning("none", [{"tuning": "not_accounted"}])
    ('none', 'not_accounted')
    """
    order = ("public", "none", "not_accounted")
    return max((own, *(str(entry["tuning"]) for entry in entries)), key=order.index)
