"""Whether a run's report, trajectory and weights belong together, and what its numbers say in words.

A reader sees sentences. They are derived again from the numbers whenever they are shown: what the file
says in words is not trusted.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.weights import digest_weights, weight_files
from hf_dpzero.reporting.wording import counted_steps

if TYPE_CHECKING:
    from hf_dpzero.ledger.trajectory import Trajectory

TRAJECTORY_FILE = "trajectory.safetensors"
_LAST_BITS, _GRIDS = 1e-6, 1e-2
"""Epsilon of several rows is an upper bound on a grid, which this version may choose finer: 0.4 %."""


def report_of(folder: str | os.PathLike[str]) -> PrivacyReport:
    """The report in `folder`, compared with the trajectory and the weights that lie beside it.

    Where there is no trajectory its words are taken as they are.

    Raises:
      FileNotFoundError: there is no report.
      ValueError: it cannot be read, or it is not of what lies beside it.
    """
    source = Path(folder)
    report = PrivacyReport.load(source / REPORT_FILE)
    if (source / TRAJECTORY_FILE).is_file():
        report, _ = agreeing(report, source)
    if weight_files(source):
        check_weights(report, source)
    return report


def agreeing(report: PrivacyReport, source: Path) -> tuple[PrivacyReport, Trajectory]:
    """Compares a report with the trajectory beside it.

    Args:
      report: its numbers are recomputed from the public plan and the releases.
      source: the folder.

    Returns:
      The report, its statement and caveats derived from its numbers; and the trajectory.

    Raises:
      ValueError: they disagree, or the trajectory is missing or damaged.
    """
    from hf_dpzero.ledger.trajectory import Trajectory
    from hf_dpzero.privacy.plan import PrivacyPlan

    trajectory = Trajectory.load(source / TRAJECTORY_FILE)
    header = trajectory.header
    plan = PrivacyPlan.from_dict(header["plan"])
    steps, kind = counted_steps(header, trajectory.next_step), plan.mechanism
    planned = plan.values_per_release, getattr(kind, "num_directions", trajectory.num_directions)
    if planned != (trajectory.num_values, trajectory.num_directions):
        raise ValueError(
            f"{TRAJECTORY_FILE} has {trajectory.num_values} numbers a step of "
            f"{trajectory.num_directions} directions, and its plan {planned[0]} of {planned[1]}."
        )
    shipped = {name: getattr(trajectory, name) for name in ("shipped_step", "average_last")}
    shipped |= {"plan": plan, "in_other_terms": bool(report.other_terms)}
    found = PrivacyReport.from_header(header, steps=steps, delta=report.delta, **shipped)
    # A sweep replaces what its trials say, by an entry and the target of the whole.
    if isinstance(report.tuning, dict) and found.tuning in ("not_accounted", report.tuning):
        of_one = report.tuning.get("repeat_and_select", {}).get("epsilon_one_run", found.epsilon)
        if not _same(of_one, found.epsilon):
            raise ValueError(
                f"{REPORT_FILE} says epsilon_one_run: {of_one}, and {TRAJECTORY_FILE} {found.epsilon}."
            )
        alone, aim = found, report.target_epsilon
        found = found.with_tuning(report.tuning, plan, header)
        found = dataclasses.replace(
            found,
            # A lower bound: trials of other settings may cost more than the run that won.
            epsilon=max(found.epsilon, alone.epsilon, report.epsilon),
            planned_epsilon=max(
                found.planned_epsilon, alone.planned_epsilon, report.planned_epsilon
            ),
            target_epsilon=None if aim is None else max(aim, report.epsilon),
        )
    stated, recomputed = dataclasses.asdict(report), dataclasses.asdict(found)
    words = {"deployment", "statement", "caveats", "caveat_grades", "versions", "weights_digest"}
    numbers = stated.keys() - words
    wrong = [
        f"{name}: {str(stated[name])[:200]} / {str(recomputed[name])[:200]}"
        for name in sorted(numbers)
        if not _same(stated[name], recomputed[name])
    ]
    if wrong:
        raise ValueError(
            f"{REPORT_FILE} and {TRAJECTORY_FILE} are not of the same run (report / trajectory): "
            f"{', '.join(wrong)}. Write the report again from the run that made the weights."
        )
    # In words of the stated numbers, which may differ from those found here in a last bit.
    reported = dataclasses.replace(report, statement=found.statement)
    return reported.in_words(plan, header), trajectory


def _same(stated: Any, expected: Any, tolerance: float = _LAST_BITS) -> bool:
    if isinstance(expected, float) and isinstance(stated, int | float):
        # Another machine's exp and erfc differ in last bits, which a root search for epsilon amplifies.
        above = expected < stated <= expected * (1 + tolerance)
        return above or math.isclose(stated, expected, rel_tol=_LAST_BITS)
    if isinstance(expected, list) and isinstance(stated, list):
        pairs = zip(stated, expected, strict=False)
        return len(stated) == len(expected) and all(_same(*pair, tolerance) for pair in pairs)
    if isinstance(expected, dict) and isinstance(stated, dict):
        same_keys = stated.keys() == expected.keys()
        wider = {"epsilon_of_rows": _GRIDS}
        return same_keys and all(
            _same(stated[key], expected[key], wider.get(key, tolerance)) for key in expected
        )
    return bool(stated == expected)


def check_weights(report: PrivacyReport, source: Path) -> None:
    """Refuses weights in `source` other than those that the report was written for.

    Raises:
      ValueError: the report names none, or others.
    """
    found = digest_weights(source)
    if report.weights_digest is None:
        raise ValueError(
            f"{source / REPORT_FILE} does not say which weights it is about: `trainer.save_model()` "
            "writes both together."
        )
    if found != report.weights_digest:
        raise ValueError(
            f"the weights in {source} are not those that {REPORT_FILE} was written for (digest "
            f"{str(found)[:12]}, in the report {report.weights_digest[:12]}): they were changed or "
            "replaced after the run saved them, and nothing is known about their privacy. Save the "
            "run's weights again with `trainer.save_model()`."
        )


def bound_to(report: PrivacyReport, folder: str | os.PathLike[str]) -> PrivacyReport:
    """Ties a report to the weights that were just saved in `folder`, by their digest."""
    return dataclasses.replace(report, weights_digest=digest_weights(folder))
