"""The budget as a currency: reports at any time, runs that extend others, stops and resumes."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_runs
import torch
from tiny_runs import build, same, stopping, tiny_data, tiny_model, weights, with_lora
from transformers import BertForSequenceClassification, EarlyStoppingCallback, TrainerCallback

from hf_dpzero import PrivacyPlan, PrivacyReport, Trajectory
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.verification import report_of
from hf_dpzero.reporting.wording import round_up

SECRET = {**tiny_runs.SECRET, "max_steps": 4}


def loaded(folder: Path) -> Any:
    return BertForSequenceClassification.from_pretrained(folder)


def first_run(folder: Path, **settings: Any) -> Any:
    trainer = build(folder, **{**SECRET, **settings})
    trainer.train()
    trainer.save_model()
    return trainer


# ---- the report at any time


def test_the_report_before_during_and_after(tmp_path: Path) -> None:
    seen: list[PrivacyReport] = []

    class Asking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(trainer.privacy_report())

    aim = {"target_epsilon": 3.0, "noise_multiplier": None}
    trainer = build(tmp_path, trainer_settings={"callbacks": [Asking()]}, **SECRET, **aim)
    planned = trainer.privacy_report()
    assert planned.steps == 0 and planned.epsilon == 0.0 and planned.target_epsilon == 3.0
    assert 2.9 < planned.planned_epsilon <= 3.0
    assert "after 0 of 4 steps; the whole plan costs epsilon = " in str(planned)
    output = trainer.train()
    assert [report.steps for report in seen] == [1, 2, 3, 4]
    epsilons = [report.epsilon for report in seen]
    assert epsilons == sorted(epsilons) and epsilons[-1] == planned.planned_epsilon
    assert {report.planned_epsilon for report in seen} == {planned.planned_epsilon}
    assert output.metrics["epsilon"] == epsilons[-1]
    assert output.metrics["delta"] == 1e-3 and output.metrics["target_epsilon"] == 3.0
    trainer.save_metrics("train", output.metrics)
    for name in ("all_results.json", "train_results.json"):
        written = json.loads((tmp_path / name).read_text())
        assert written["epsilon"] == epsilons[-1] and written["delta"] == 1e-3


def test_a_run_that_is_not_private_claims_no_epsilon_in_its_results(tmp_path: Path) -> None:
    output = build(tmp_path, max_steps=1).train()  # seeded noise
    assert not {"epsilon", "delta", "target_epsilon"} & output.metrics.keys()


# ---- stopping


@pytest.mark.parametrize("way", ["callback", "early_stopping", "interrupt"])
def test_a_stopped_run_claims_its_completed_steps_beside_the_plan(tmp_path: Path, way: str) -> None:
    settings = {**SECRET, "max_steps": 9, "logging_steps": 1}
    if way == "early_stopping":
        better = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
        settings |= {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0, **better}
        given: dict[str, Any] = {"callbacks": [EarlyStoppingCallback(2)]}
    else:
        given = stopping(3, KeyboardInterrupt if way == "interrupt" else None)
    trainer = build(tmp_path, trainer_settings=given, **settings)
    if way == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    else:
        assert trainer.train().metrics["epsilon"] == trainer.plan.epsilon(1e-3, at=3)
    trainer.save_model()
    report = report_of(tmp_path)
    assert (report.steps, report.planned_steps) == (3, 9)
    assert report.epsilon == trainer.plan.epsilon(1e-3, at=3) < report.planned_epsilon
    assert report.planned_epsilon == trainer.plan.epsilon(1e-3)
    headline = str(report).splitlines()[0]
    assert "after 3 of 9 steps; the whole plan costs epsilon = " in headline
    planned = round_up(report.planned_epsilon)
    assert report.statement.endswith(f"claim the epsilon of the whole plan, {planned}.")


# ---- resuming


@pytest.mark.parametrize("direction", ["rademacher", "sphere"])
def test_an_interrupted_run_resumes_from_its_ledger_alone(tmp_path: Path, direction: str) -> None:
    settings = {
        "max_steps": 7,
        "warmup_steps": 3,
        "direction": direction,
        "update_rule": "momentum",
    }
    straight = build(tmp_path / "straight", **settings)
    straight.train()
    cut = build(tmp_path / "cut", trainer_settings=stopping(4, KeyboardInterrupt), **settings)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    interrupted = weights(cut.model)
    rebuilt = tiny_model()
    replay(rebuilt, Trajectory.load(tmp_path / "cut" / "trajectory.ledger"))
    assert same(interrupted, weights(rebuilt))

    class Replayed(TrainerCallback):
        at_four: dict[str, torch.Tensor] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                self.at_four |= weights(kwargs["model"])

    resumed = build(tmp_path / "cut", trainer_settings={"callbacks": [Replayed()]}, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert same(Replayed.at_four, interrupted)
    assert resumed.trajectory.releases == straight.trajectory.releases
    assert same(weights(resumed.model), weights(straight.model))


def test_a_ledger_resumes_on_its_own_base_only(tmp_path: Path) -> None:
    given = stopping(2, KeyboardInterrupt)
    trainer = build(tmp_path, trainer_settings=given, **SECRET)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    for model in (tiny_model(seed=1), trainer.model):
        with pytest.raises(LedgerError, match="not the base that they began with.*load it again"):
            build(tmp_path, model, **SECRET).train(resume_from_checkpoint=True)
    build(tmp_path, **SECRET).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"No valid checkpoint found.*no trajectory\.ledger"):
        build(tmp_path / "nothing", **SECRET).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("method", ["dp-sgd", "dpgd-0th"])
def test_releases_that_only_weights_held_are_not_replayed(tmp_path: Path, method: str) -> None:
    settings = {**SECRET, "method": method}
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, trainer_settings=stopping(2, KeyboardInterrupt), **settings).train()
    with pytest.raises(LedgerError, match=f"2 steps of {method}, which released vectors"):
        build(tmp_path, **settings).train(resume_from_checkpoint=True)


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    settings = {**SECRET, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, trainer_settings=stopping(3, KeyboardInterrupt), **settings).train()
    (tmp_path / "checkpoint-3" / "dpzero_state.json").unlink()
    trainer = build(tmp_path, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.privacy_report().steps == 4


# ---- runs that extend others


def test_a_second_run_states_the_total(tmp_path: Path) -> None:
    first = first_run(tmp_path / "first")
    settings = {**SECRET, "max_steps": 3, "noise_multiplier": 1.5}
    second = build(
        tmp_path / "second",
        loaded(tmp_path / "first"),
        extends_run=str(tmp_path / "first"),
        **settings,
    )
    alone = build(tmp_path / "alone", **settings)
    planned = second.privacy_report()
    assert planned.steps == 0 and planned.epsilon == first.privacy_report().epsilon
    output = second.train()
    second.save_model()
    report = report_of(tmp_path / "second")
    assert report.private and report.epsilon == second.plan.epsilon(1e-3)
    assert report.epsilon > max(first.plan.epsilon(1e-3), alone.plan.epsilon(1e-3))
    assert report.epsilon < first.plan.epsilon(5e-4) + alone.plan.epsilon(5e-4)
    assert output.metrics["epsilon"] == report.epsilon
    logged = [row["epsilon"] for row in second.state.log_history if "epsilon" in row]
    assert (
        all(first.plan.epsilon(1e-3) < epsilon <= report.epsilon for epsilon in logged) and logged
    )
    assert [(p["folder"], p["steps"], p["epsilon"]) for p in report.parts] == [
        ("first", 4, first.plan.epsilon(1e-3)),
        ("this run", 3, alone.plan.epsilon(1e-3)),
    ]
    assert report.earlier_runs == [] and report.base_weights == "of_the_extended_run"
    assert "this run and of 1 before it are together" in report.statement
    assert "first: 4 of 4 steps of dpzero" in report.statement and "first: 4 of 4" in str(report)
    assert any("that it extends together" in caveat for caveat in report.caveats)
    shipped = PrivacyReport.load(build_hub_folder(tmp_path / "second", tmp_path / "hub"))
    assert shipped.parts == report.parts
    header = Trajectory.load(tmp_path / "hub" / "trajectory.safetensors").header
    assert PrivacyPlan.from_dict(header["plan"]).epsilon(1e-3) == report.epsilon
    again = loaded(tmp_path / "first")
    replay(again, second.trajectory)
    assert same(weights(again), weights(second.model))


def test_a_chain_of_three_meets_the_total_target(tmp_path: Path) -> None:
    """`target_epsilon` is the total; the noise of each part is calibrated for what is left."""
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for number, folder in enumerate(folders):
        aim = {"noise_multiplier": None, "target_epsilon": 1.0 + number}
        extends = {"extends_run": str(folders[number - 1])} if number else {}
        model = loaded(folders[number - 1]) if number else None
        trainer = build(folder, model, **SECRET, **aim, **extends)
        trainer.train()
        trainer.save_model()
        report = report_of(folder)
        assert 0.98 * (1 + number) < report.epsilon <= 1 + number == report.target_epsilon
        assert [part["folder"] for part in report.parts[:-1]] == ["a", "b"][:number]
        assert report.earlier_runs == []
    with pytest.raises(ValueError, match="nothing is left"):
        aim = {"noise_multiplier": None, "target_epsilon": 2.9}
        build(tmp_path / "d", loaded(folders[2]), extends_run=str(folders[2]), **SECRET, **aim).plan  # noqa: B018


def test_an_extended_run_resumes_with_what_it_extends(tmp_path: Path) -> None:
    first_run(tmp_path / "first")
    settings = {**SECRET, "extends_run": str(tmp_path / "first")}
    given = stopping(2, KeyboardInterrupt)
    run = tmp_path / "second"
    with pytest.raises(KeyboardInterrupt):
        build(run, loaded(tmp_path / "first"), trainer_settings=given, **settings).train()
    with pytest.raises(LedgerError, match=r"plan\.after: "):
        build(run, loaded(tmp_path / "first"), **SECRET).train(resume_from_checkpoint=True)
    trainer = build(run, loaded(tmp_path / "first"), **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.privacy_report().epsilon == trainer.plan.epsilon(1e-3)
    assert len(trainer.privacy_report().parts) == 2


def test_a_run_that_stopped_counts_with_its_steps(tmp_path: Path) -> None:
    first = first_run(tmp_path / "first", trainer_settings=stopping(2))
    assert first.privacy_report().steps == 2
    settings = {**SECRET, "extends_run": str(tmp_path / "first")}
    second = build(tmp_path / "b", loaded(tmp_path / "first"), **settings)
    assert second.plan.after[0][1] == 2
    second.train()
    assert any("counts with the 2 of 4 steps" in text for text in second.privacy_report().caveats)


# ---- the same model object


def test_the_same_model_object_goes_on_under_the_total_only(tmp_path: Path) -> None:
    first = first_run(tmp_path / "first")
    model, settings = first.model, {**SECRET, "extends_run": str(tmp_path / "first")}
    with pytest.raises(ValueError, match="trained on the private data already.*extends_run"):
        build(tmp_path / "plain", model, **SECRET).train()
    changed = copy.deepcopy(model)
    with torch.no_grad():
        next(changed.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="trained in this process and then changed"):
        build(tmp_path / "changed", changed, **settings).train()
    second = build(tmp_path / "second", model, **settings)
    second.train()
    assert second.privacy_report().epsilon > 1.2 * first.privacy_report().epsilon
    with pytest.raises(ValueError, match="are not what the run in .*first' ended in"):
        build(tmp_path / "third", model, **settings).train()


def test_an_adapter_is_extended_on_its_base(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    trainer = build(tmp_path / "first", with_lora(loaded(tmp_path / "base")), **SECRET)
    trainer.train()
    trainer.save_model()

    def adapter(base: Any) -> Any:
        return peft.PeftModel.from_pretrained(base, tmp_path / "first", is_trainable=True)

    settings = {**SECRET, "extends_run": str(tmp_path / "first")}
    second = build(tmp_path / "second", adapter(loaded(tmp_path / "base")), **settings)
    second.train()
    second.save_model()
    assert report_of(tmp_path / "second").base_weights == "of_the_extended_run"
    base = loaded(tmp_path / "base")
    with torch.no_grad():
        base.bert.embeddings.word_embeddings.weight.add_(1.0)
    for model in (adapter(base), with_lora(loaded(tmp_path / "base"))):
        with pytest.raises(ValueError, match="are not what the run in"):
            build(tmp_path / "third", model, **settings).train()


# ---- what is refused


def test_what_cannot_be_extended(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first_run(first, save_strategy="steps", save_steps=2)

    def refused(words: str, model: Any = None, folder: Path = first, **settings: Any) -> None:
        given = {**SECRET, "extends_run": str(folder), **settings}
        with pytest.raises((ValueError, LedgerError), match=words):
            build(tmp_path / "second", model or loaded(first), **given).train()
        assert not (tmp_path / "second" / "trajectory.ledger").exists()

    refused("number of examples=60, and 120", data=tiny_data(60))
    refused("neighboring_relation=replace_one", neighboring_relation="replace_one")
    refused("no common account", accountant="rdp")
    refused("is not private and extends", method="mezo", noise_multiplier=None)
    refused("nothing bounds what this run would add", noise_multiplier=0.0)
    refused("are not what the run in", tiny_model())
    refused(r"has no trajectory\.ledger.*a checkpoint", folder=first / "checkpoint-2")
    refused("not those that privacy_report.json was written for", folder=_other_weights(tmp_path))
    refused("holds 3 steps and the saved model is of 4", folder=_cut_ledger(tmp_path))
    leaky = tmp_path / "leaky"
    first_run(leaky, testing={"insecure_noise_seed": 3})
    refused("says: NOT PRIVATE", folder=leaky)


def _other_weights(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tmp_path / "first", tmp_path / "other"))
    tiny_model(seed=5).save_pretrained(folder)
    return folder


def _cut_ledger(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tmp_path / "first", tmp_path / "cut"))
    ledger = folder / "trajectory.ledger"
    ledger.write_bytes(ledger.read_bytes()[: -(8 + 8 + 4 + 4)])
    return folder


def test_an_edited_report_of_a_chain_is_refused(tmp_path: Path) -> None:
    first_run(tmp_path / "first")
    model, folder = loaded(tmp_path / "first"), tmp_path / "second"
    trainer = build(folder, model, extends_run=str(tmp_path / "first"), **SECRET)
    trainer.train()
    trainer.save_model()
    path = folder / "privacy_report.json"
    report = json.loads(path.read_text())
    assert math.isfinite(report["epsilon"])
    for change in ({"parts": []}, {"epsilon": report["parts"][1]["epsilon"]}):
        path.write_text(json.dumps({**report, **change}))
        with pytest.raises(ValueError, match="not of the same run"):
            report_of(folder)


def test_delta_is_printed_in_full(tmp_path, capsys):
    build(tmp_path).log_metrics("train", {"delta": 1e-5, "epsilon": 1.23451})
    shown = capsys.readouterr().out
    assert "delta   =  1e-05" in shown and "1.2346" in shown  # rounded up
