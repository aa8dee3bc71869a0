"""Attack: have a run that extends another report less than both of them spent."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
import torch
from attacked_runs import SAVED, SECRET, Calls, finished, loaded
from dp_accounting import pld
from peft import IA3Config, get_peft_model
from tiny_runs import build

from hf_dpzero import Trajectory
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.reporting.verification import report_of

SHORT: dict[str, Any] = {**SECRET, "max_steps": 3}
LONG: dict[str, Any] = {**SAVED, "max_steps": 6}


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that stopped after 2 of 6 steps, and can go on."""

    def stop(state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= 2

    callbacks = {"callbacks": [Calls("on_step_end", stop)]}
    finished(tmp_path / "first", trainer_settings=callbacks, **LONG)
    return tmp_path / "first"


def go_on(folder: Path) -> Any:
    trainer = build(folder, **LONG)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    return trainer


def test_a_first_run_that_goes_on_under_a_plan_that_was_made_before(
    stopped: Path, tmp_path: Path
) -> None:
    """Reading the plan's epsilon fixed it at 2 steps: 1.28 was reported where 1.54 was spent."""
    second = build(tmp_path / "second", loaded(stopped), extends_run=str(stopped), **SHORT)
    before = second.plan.epsilon(1e-3)
    first = go_on(stopped)
    second.model.load_state_dict(first.model.state_dict())
    with pytest.raises(ValueError, match="holds 6 steps, which this trainer's plan does not count"):
        second.train()
    finished(tmp_path / "second", loaded(stopped), extends_run=str(stopped), **SHORT)
    assert report_of(tmp_path / "second").epsilon > before + 0.1


def test_a_run_that_is_extended_after_the_plan_was_made(stopped: Path, tmp_path: Path) -> None:
    """The plan knew of no run before, and its own steps were all that was reported: it is made anew."""
    second = build(tmp_path / "second", loaded(stopped), **SHORT)
    alone = second.plan.epsilon(1e-3)
    assert second.privacy_report().parts == []
    second.args.extends_run = str(stopped)
    second.train()
    report = second.privacy_report()
    assert len(second.plan.after) == 1 and len(report.parts) == 2
    assert report.epsilon > 1.1 * alone


def test_a_first_run_that_was_rolled_back(stopped: Path, tmp_path: Path) -> None:
    """Put back to its first 2 steps, all but the checkpoints that know of 6."""
    kept = tmp_path / "kept"
    shutil.copytree(stopped, kept)
    go_on(stopped)
    for path in kept.iterdir():
        if path.is_file():
            shutil.copy(path, stopped)
    second = build(tmp_path / "second", loaded(stopped), extends_run=str(stopped), **SHORT)
    with pytest.raises(LedgerError, match="does not hold"):
        second.train()


def test_an_adapter_that_the_first_run_does_not_know(stopped: Path, tmp_path: Path) -> None:
    """It may have been trained on the rows by anyone; the report called all of it the first run's."""
    adapter = IA3Config(
        task_type="SEQ_CLS", target_modules=["query", "value"], feedforward_modules=[]
    )
    model = get_peft_model(loaded(stopped), adapter)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ia3" in name:
                parameter.mul_(1.5)
    finished(tmp_path / "second", model, extends_run=str(stopped), **SHORT)
    report = report_of(tmp_path / "second")
    assert report.base_weights == "equal_to_named_but_new_parts"
    assert any("freshly initialised" in caveat for caveat in report.caveats)


def test_a_chain_with_nothing_chosen_costs_what_its_header_says(tmp_path: Path) -> None:
    """Adaptive clips and their count noise, as chosen, composed from the shipped file alone."""
    chosen = SHORT | {"learning_rate": None, "clip": None}
    finished(tmp_path / "first", **chosen)
    aim = {"noise_multiplier": None, "target_epsilon": 4.0, "expected_batch_size": 24}
    folder = str(tmp_path / "first")
    extended = {**chosen, **aim, "extends_run": folder}
    finished(tmp_path / "second", loaded(Path(folder)), **extended)
    plan = Trajectory.load(tmp_path / "second" / "trajectory.safetensors").header["plan"]
    accountant = pld.PLDAccountant(
        dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4
    )
    for run in (plan["after"][0]["plan"], plan):
        mechanism, q = run["mechanism"], run["mechanism"]["expected_batch_size"] / 120
        assert mechanism["name"] == "dpzero-adaptive"
        event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(mechanism["noise_multiplier"]))
        accountant.compose(dp.SelfComposedDpEvent(event, run["steps"]))
    epsilon = report_of(tmp_path / "second").epsilon
    assert accountant.get_epsilon(1e-3) == pytest.approx(epsilon, abs=1e-3)
