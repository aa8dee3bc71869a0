"""What a finished run leaves: the header of its ledger, the report of that, a folder to ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.reporting.privacy_report import PrivacyReport
from hf_dpzero.reporting.verification import bound_to


def header_of(plan: PrivacyPlan, **entries: Any) -> dict[str, Any]:
    """The header that a run of one parameter `w` writes, with these entries."""
    return {
        **{"plan": plan.to_dict(), "target_epsilon": 2.0, "noise_source": SecureNoise.name},
        **{"log_private_diagnostics": False, "sampler_key_is_secret": True},
        **{"base_model_digest": "ab" * 32, "direction_key": "0" * 32, "direction": "rademacher"},
        **{"num_directions": 1, "num_values": 1, "smoothing": 1e-3, "weight_decay": 0.0},
        **{"trainable": ["w"], "decayed": [], "replayable": True},
        **entries,
    }


def trajectory_of(plan: PrivacyPlan, steps: int, **entries: Any) -> Trajectory:
    """The ledger of the first steps of a run."""
    return Trajectory(header_of(plan, **entries), [Release(t, (0.5,), 1e-6) for t in range(steps)])


def report_of(
    plan: PrivacyPlan,
    steps: int | None = None,
    delta: float = 1e-5,
    in_other_terms: bool = False,
    **entries: Any,
) -> PrivacyReport:
    """The report of the first steps of a run; default: of all."""
    steps, terms = plan.steps if steps is None else steps, {"in_other_terms": in_other_terms}
    return PrivacyReport.from_header(header_of(plan, **entries), steps=steps, delta=delta, **terms)


def write_run(folder: Path, plan: PrivacyPlan, report: PrivacyReport, **entries: Any) -> Path:
    """Writes weights, configuration, trajectory and report."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.zeros(3)}, folder / "model.safetensors")
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "trajectory.safetensors"
    trajectory_of(plan, report.steps, **entries).to_safetensors(path)
    bound_to(report, folder).save(folder)
    return folder
