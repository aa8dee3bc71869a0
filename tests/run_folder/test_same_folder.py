"""A folder that holds a run already: a finished one, one without its end, one of other processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import SECRET, build, stopping, tiny_data

from hf_dpzero import Trajectory
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME
from hf_dpzero.reporting import hub, verification

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


def test_a_finished_run_is_set_aside_and_counted(tmp_path: Path, heard: Any) -> None:
    """Three runs of one script: the second and the third say what all of them spent."""
    (tmp_path / "README.md").write_text("mine")
    trainers = []
    for _ in range(3):
        trainers.append(build(tmp_path, **SAVED))
        trainers[-1].train()
        trainers[-1].save_model()
    assert "earlier-2: 4 of 4 steps of dpzero" in heard.text
    for name in ("earlier-1", "earlier-2"):  # whole folders of runs
        assert verification.report_of(tmp_path / name).steps == 4
        assert (tmp_path / name / "checkpoint-4").is_dir()
    assert (tmp_path / "README.md").read_text() == "mine"
    report = verification.report_of(tmp_path)
    delta, plan = report.delta, trainers[0].plan
    own = plan.epsilon(delta)
    # four steps, each as four times as many of one plan: three equal runs compose as one of 12
    all_three = replace(plan, steps=12).epsilon(delta)
    assert report.epsilon == own and own < all_three < 3 * own
    assert [run["epsilon"] for run in report.set_aside["runs"]] == [own, own]
    assert report.set_aside["epsilon"] == pytest.approx(all_three, rel=1e-3)
    assert "NOT COVERED by this epsilon: on the same rows, epsilon" in str(report)
    assert "| set aside | earlier-1" in hub.write_model_card(tmp_path).read_text()
    extending = build(tmp_path, extends_run=str(tmp_path / "earlier-1"), **SAVED)
    assert extending.plan.after  # a folder that another run can extend


def test_an_interrupted_private_run_is_not_paid_for_twice(tmp_path: Path, monkeypatch: Any) -> None:
    build(tmp_path, **SAVED, trainer_settings=stopping(3)).train()
    before = sorted(path for path in tmp_path.rglob("*"))
    monkeypatch.setattr("hf_dpzero.training.trainer.prepare", lambda run: pytest.fail("too late"))
    with pytest.raises(
        LedgerError, match="run, interrupted after 3 of 4 steps: go on with it at no"
    ):
        build(tmp_path, **SAVED).train()
    with pytest.raises(LedgerError, match=r"clip: 5.0 -> 4.0"):
        build(tmp_path, **{**SAVED, "clip": 4.0}).train(resume_from_checkpoint=True)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    (tmp_path / LEDGER_NAME).rename(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match=r"made by \d steps that trajectory.ledger does not"):
        build(tmp_path, **SAVED).train()
    with pytest.raises(LedgerError, match="trajectory.ledger is missing"):
        build(tmp_path, **SAVED).train(resume_from_checkpoint=True)


def test_runs_without_privacy_start_anew(tmp_path: Path, heard: Any) -> None:
    plain = {
        **SAVED,
        "method": "mezo",
        **dict.fromkeys(("noise_multiplier", "target_delta", "clip")),
    }
    build(tmp_path, **plain, trainer_settings=stopping(3)).train()
    again = build(tmp_path, **plain)
    again.train()
    assert again.privacy_report().set_aside == {}
    assert Trajectory.load(tmp_path / "earlier-1" / LEDGER_NAME).next_step == 3
    private = build(tmp_path, **SAVED)  # on the same rows nothing bounds what all of them released
    private.train()
    assert private.privacy_report().set_aside["epsilon"] is None
    assert "steps of mezo, NOT PRIVATE" in str(private.privacy_report())


def test_a_run_with_noise_that_is_not_secret_has_no_epsilon_to_add(tmp_path: Path) -> None:
    seeded = {**SAVED, "testing.insecure_noise_seed": 3}
    build(tmp_path, **seeded).train()
    private = build(tmp_path, **SAVED)
    private.train()
    found = private.privacy_report().set_aside
    assert (found["runs"][0]["epsilon"], found["epsilon"]) == (None, None)
    assert "steps of dpzero, NOT PRIVATE" in str(private.privacy_report())


def test_epsilons_for_different_units_are_not_added_up(tmp_path: Path) -> None:
    """Twenty people, then twenty topics: a person's rows lie in several topics."""
    data = tiny_data(60).add_column("who", [i // 3 for i in range(60)])
    data = data.add_column("topic", [i % 20 for i in range(60)])
    given = {**SAVED, "expected_batch_size": 4, "data": data}
    for unit in ("who", "topic", "topic"):
        trainer = build(tmp_path, unit_column=unit, **given)
        trainer.train()
        trainer.save_model()
    assert trainer.privacy_report().set_aside["epsilon"] is None
    assert len(trainer.privacy_report().set_aside["runs"]) == 2


def test_a_run_that_starts_from_the_folder_is_refused(tmp_path: Path) -> None:
    first = build(tmp_path, **SAVED)
    first.train()
    first.save_model()
    model = type(first.model).from_pretrained(tmp_path)
    with pytest.raises(LedgerError, match="whose weights this one starts from"):
        build(tmp_path, model, **SAVED).train()
    with pytest.raises(LedgerError, match="whose weights this one starts from"):
        build(tmp_path, extends_run=str(tmp_path), **SAVED).train()
