"""A folder that holds a run already: a finished one, one without its end, one of other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import SECRET, build, stopping, tiny_data

from hf_dpzero import Trajectory
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME
from hf_dpzero.reporting import hub

SAVED: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **SECRET}


@pytest.fixture
def heard(caplog: Any, monkeypatch: Any) -> Any:
    for name in ("transformers", "hf_dpzero"):
        monkeypatch.setattr(__import__("logging").getLogger(name), "propagate", True)
    return caplog


def test_a_finished_run_says_so_and_goes_on_elsewhere(tmp_path: Path, heard: Any) -> None:
    build(tmp_path, **SAVED).train()
    assert "finished" not in heard.text
    build(tmp_path, **SAVED).train(resume_from_checkpoint=True)
    assert "this run is finished" in heard.text and "holds all 4 steps" in heard.text
    assert "single sample" not in heard.text
    with pytest.raises(LedgerError, match=r"plan.steps: 4 -> 9(.|\n)*extends_run='.*' trains on"):
        build(tmp_path, **{**SAVED, "max_steps": 9}).train(resume_from_checkpoint=True)
    with pytest.raises(LedgerError) as shorter:
        build(tmp_path, **{**SAVED, "max_steps": 3}).train(resume_from_checkpoint=True)
    assert "extends_run" not in str(shorter.value)


def test_a_run_without_its_end_is_resumed_before_it_is_pushed(tmp_path: Path) -> None:
    build(tmp_path, **SAVED, trainer_settings=stopping(3)).train()
    with pytest.raises(FileNotFoundError, match=r"Resume it first.*or push one of its checkpoints"):
        hub.push(tmp_path, "me/some", dry_run=True)
    assert hub.push(tmp_path / "checkpoint-2", "me/some", dry_run=True)
    with pytest.raises(FileNotFoundError, match="`hf-dpzero train RECIPE` writes it"):
        hub.push(tmp_path / "nothing", "me/some", dry_run=True)


def test_a_batch_made_of_accumulation_stays_on_other_processes(tmp_path: Path, heard: Any) -> None:
    """3 x 2 rows on two processes are 12, which 6 x 2 stand for; one process alone would make 6."""
    given = {
        **SAVED,
        "expected_batch_size": None,
        **{"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    }
    began = {**given, "per_device_train_batch_size": 6}
    build(tmp_path, data=tiny_data(60), trainer_settings=stopping(3), **began).train()
    resumed = build(tmp_path, data=tiny_data(60), **given)
    assert resumed.plan.sampler.expected_batch_size == 6
    resumed.train(resume_from_checkpoint=True)
    assert resumed.plan.sampler.expected_batch_size == 12
    assert "expected_batch_size stays 12, as this run began, on 2 processes" in heard.text
    assert Trajectory.load(tmp_path / LEDGER_NAME).next_step == 4
    other = {**given, "gradient_accumulation_steps": 5}  # 12 is no multiple of 15
    with pytest.raises(LedgerError, match="expected_batch_size: 12.0 -> 15.0"):
        build(tmp_path, data=tiny_data(60), **other).train(resume_from_checkpoint=True)
