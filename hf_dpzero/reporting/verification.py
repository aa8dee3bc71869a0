"""Whether a run's report, trajectory and weights belong together, and what its numbers say in words.

A reader sees sentences. They are derived again from the numbers whenever they are shown: what the file
says in words is not trusted.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.selection import total_epsilon
from hf_dpzero.reporting.plan_facts import noise_name, parts_of, plan_facts
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.weights import digest_weights, weight_files
from hf_dpzero.reporting.wording import (
    EXAMPLE,
    NOT_COMPARED,
    counted_steps,
    federated_caveats,
    needs_secret_batches,
    why_not_private,
)

if TYPE_CHECKING:
    from hf_dpzero.ledger.trajectory import Trajectory
    from hf_dpzero.privacy.plan import PrivacyPlan

TRAJECTORY_FILE = "trajectory.safetensors"


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
    steps = counted_steps(header, trajectory.next_step)
    plan = PrivacyPlan.from_dict(header["plan"])
    why_not = why_not_private(
        method=plan.mechanism.name,
        epsilon=0.0 if plan.private else math.inf,
        noise_source=str(header["noise_source"]),
        log_private_diagnostics=bool(header["log_private_diagnostics"]),
        batches_secret=bool(header["sampler_key_is_secret"]) or not needs_secret_batches(plan),
    )
    facts = _facts(report, header, plan, steps) | {"private": why_not is None}
    wrong = [name for name, value in facts.items() if not _same(getattr(report, name), value)]
    if wrong:
        stated = ", ".join(f"{name}: {getattr(report, name)} / {facts[name]}" for name in wrong)
        raise ValueError(
            f"{REPORT_FILE} and {TRAJECTORY_FILE} are not of the same run (report / trajectory): "
            f"{stated}. Write the report again from the run that made the weights."
        )
    derived = report.in_words(plan, why_not)
    words = [derived.caveats[0], *federated_caveats(header), *derived.caveats[1:]]
    return dataclasses.replace(derived, caveats=words), trajectory


def _facts(
    report: PrivacyReport, header: Mapping[str, Any], plan: PrivacyPlan, steps: int
) -> dict[str, Any]:
    """What the public plan and the releases say of what the report states."""
    facts = plan_facts(plan, report.delta, min(steps, plan.steps)) | {
        "steps": steps,
        "direction": header["direction"],
        "log_private_diagnostics": header["log_private_diagnostics"],
        "privacy_unit": header.get("privacy_unit", EXAMPLE),
        "noise_source": noise_name(plan, str(header["noise_source"])),
        "earlier_runs": header.get("earlier_runs", report.earlier_runs),
        "base_weights": header.get("base_weights", NOT_COMPARED),
        "forward_passes": header.get("forward_passes", ""),
        "processes": header.get("processes", ""),
        "parts": parts_of(plan, report.delta, min(steps, plan.steps), header.get("extends", ())),
    }
    if plan.private:
        facts["target_delta"] = header.get("target_delta", report.target_delta)
    tuning = header.get("tuning", report.tuning)
    if not isinstance(report.tuning, dict):
        facts["tuning"] = tuning
        facts["target_epsilon"] = header.get("target_epsilon", report.target_epsilon)
        return facts
    # A sweep replaces what its trials say, by an entry and the target of the whole.
    facts["tuning"] = report.tuning if tuning in ("not_accounted", report.tuning) else tuning
    if report.target_epsilon is not None:
        facts["target_epsilon"] = max(report.target_epsilon, report.epsilon)
    if report.steps != report.planned_steps:
        raise ValueError(
            f"{REPORT_FILE} accounts for tuning over whole runs, and this one stopped after "
            f"{report.steps} of {report.planned_steps} steps; finish it with `hf-dpzero sweep`."
        )
    # A lower bound: trials of other settings may cost more than the run that won.
    least = total_epsilon(plan, report.tuning, report.delta)
    return facts | {
        name: max(getattr(report, name), least) for name in ("epsilon", "planned_epsilon")
    }


def _same(stated: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(stated, int | float):
        return math.isclose(stated, expected, rel_tol=1e-6)
    if isinstance(expected, list) and isinstance(stated, list):
        return len(stated) == len(expected) and all(map(_same, stated, expected))
    if isinstance(expected, dict) and isinstance(stated, dict):
        same_keys = stated.keys() == expected.keys()
        return same_keys and all(_same(stated[key], expected[key]) for key in expected)
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
