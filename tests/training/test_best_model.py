"""`load_best_model_at_end`: weights of the step that evaluated best, epsilon of the whole run."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny_runs import SECRET, build, config, same, tiny_model, weights, with_lora
from transformers import (
    EarlyStoppingCallback,
    MixtralConfig,
    MixtralForSequenceClassification,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)

from hf_dpzero import Trajectory
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME
from hf_dpzero.reporting import hub
from hf_dpzero.reporting.provenance import read_extended
from hf_dpzero.reporting.verification import report_of
from hf_dpzero.run_folder.base_model import Comparison, compare_with_named
from hf_dpzero.run_folder.checkpoints import complete_checkpoints, load_state

BEST: dict[str, Any] = {
    "max_steps": 6,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_x",
    "greater_is_better": True,
    **{"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
    **SECRET,
}
SCORES = {2: 0.1, 4: 0.9, 6: 0.2}


class Scores(TrainerCallback):
    """Metrics by the step that is evaluated, so that a resumed run finds those of a straight one."""

    step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step

    def metrics(self, _: Any) -> dict[str, float]:
        return {"x": SCORES.get(self.step, 0.0)}


def build_best(folder: Path, *callbacks: Any, model: Any = None, **settings: Any) -> Any:
    scores = Scores()
    given = {"compute_metrics": scores.metrics, "callbacks": [scores, *callbacks]}
    if "evaluation" in settings:
        given["eval_dataset"] = settings.pop("evaluation")
    return build(folder, model, trainer_settings=given, **{**BEST, **settings})


def replayed(
    trajectory: Trajectory, upto: int | None = None, model: Any = None, last: int | None = None
) -> Any:
    model = tiny_model() if model is None else model
    replay(model, trajectory, upto, last)
    return weights(model)


def steps_kept(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder)]


def test_the_weights_are_those_of_the_best_step_and_the_epsilon_that_of_the_run(
    tmp_path: Path,
) -> None:
    trainer = build_best(tmp_path, update_rule="momentum")
    output = trainer.train()
    trainer.save_model()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.9, 4)
    ledger = Trajectory.load(tmp_path / LEDGER_NAME)
    assert same(weights(trainer.model), replayed(ledger, upto=4))
    assert not same(weights(trainer.model), replayed(ledger))
    shipped = Trajectory.load(tmp_path / SHIPPING_NAME)
    assert (shipped.shipped_step, shipped.next_step) == (4, 6)
    assert shipped.digest() == ledger.digest()
    assert same(weights(trainer.model), replayed(shipped))
    report = report_of(tmp_path)  # compared with the trajectory and the weights
    assert (report.steps, report.shipped_step, report.private) == (6, 4, True)
    assert report.epsilon == trainer.plan.epsilon(report.delta) == output.metrics["epsilon"]
    assert report.epsilon > trainer.plan.epsilon(report.delta, at=4)
    assert "6 of 6 planned; the weights are of step 4" in str(report)
    # A checkpoint is of its own step, with its own epsilon.
    assert report_of(tmp_path / "checkpoint-4").shipped_step is None
    pushed = Path(hub.push(tmp_path, "somebody/some", dry_run=True))
    assert "the weights are of step 4" in (pushed / hub.CARD_FILE).read_text()
    assert read_extended(str(tmp_path))[0].steps == 6  # a run that extends it counts all six


def test_weights_that_are_saved_under_other_names_than_the_modules(tmp_path: Path) -> None:
    """Trainer leaves them out: the layers stayed those of the last step, the head was of the best."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, **sizes, "num_labels": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = ViTForImageClassification(ViTConfig(**shape, hidden_dropout_prob=0.0))
    first.save_pretrained(tmp_path / "base")
    load = partial(ViTForImageClassification.from_pretrained, tmp_path / "base")
    assert compare_with_named(load()) == Comparison([], [], [])
    changed = load()
    changed.vit.layers[0].mlp.fc1.bias.data += 1
    assert compare_with_named(changed).differing == ["vit.layers.0.mlp.fc1.bias"]
    pixels = torch.randn(80, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    rows = [{"pixel_values": x.tolist(), "labels": i % 2} for i, x in enumerate(pixels)]
    trainer = build_best(
        tmp_path / "out", model=load(), data=Dataset.from_list(rows[:60]), evaluation=rows[60:]
    )
    trainer.train()
    ledger = Trajectory.load(tmp_path / "out" / LEDGER_NAME)
    assert ledger.header["base_weights"] == "equal_to_named"
    assert same(weights(trainer.model), replayed(ledger, 4, load()))


def test_experts_that_are_saved_one_by_one_are_loaded_and_not_called_fresh(tmp_path: Path) -> None:
    shape = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = MixtralForSequenceClassification(
            MixtralConfig(**shape, **heads, num_local_experts=2)
        )
    first.save_pretrained(tmp_path / "base")
    load = partial(MixtralForSequenceClassification.from_pretrained, tmp_path / "base")
    assert compare_with_named(load()) is None
    changed = load()
    changed.model.norm.weight.data += 1
    assert "model.norm.weight" in (compare_with_named(changed) or Comparison([], [], [])).differing
    rows = [{"input_ids": [1 + i % 50, 2, 3], "labels": i % 2} for i in range(80)]
    settings = {"model": load(), "data": Dataset.from_list(rows[:60]), "evaluation": rows[60:]}
    trainer = build_best(tmp_path / "out", **settings, method="mezo", target_epsilon=None)
    trainer.train()
    ledger = Trajectory.load(tmp_path / "out" / LEDGER_NAME)
    assert same(weights(trainer.model), replayed(ledger, 4, load()))


def test_a_report_of_another_step_than_the_trajectory_says_is_refused(tmp_path: Path) -> None:
    trainer = build_best(tmp_path)
    trainer.train()
    trainer.save_model()
    shipped = Trajectory.load(tmp_path / SHIPPING_NAME)
    shipped.shipped_step = None
    shipped.to_safetensors(tmp_path / SHIPPING_NAME)
    with pytest.raises(ValueError, match="shipped_step: 4 / None"):
        report_of(tmp_path)


def test_a_finished_run_that_was_moved_finds_its_best_step(tmp_path: Path) -> None:
    build_best(tmp_path / "out").train()
    (tmp_path / "out").rename(tmp_path / "moved")
    resumed = build_best(tmp_path / "moved")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.privacy_report().shipped_step == 4


@pytest.mark.parametrize("method", [{}, {"method": "dp-adamw", "clip": 0.5}])
def test_a_run_that_was_killed_near_its_end_ships_the_same_step(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    """Step 6 is paid for, and neither evaluated nor saved."""
    with pytest.raises(KeyboardInterrupt):
        build_best(tmp_path, StopBeforeSave(6), **method).train()
    assert Trajectory.load(tmp_path / LEDGER_NAME).next_step == 6
    resumed = build_best(tmp_path, **method)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    assert report_of(tmp_path).shipped_step == 4
    kept = report_of(tmp_path / "checkpoint-4")
    assert report_of(tmp_path).weights_digest == kept.weights_digest


class StopBeforeSave(TrainerCallback):
    """Ctrl-C after a step's update, before anything of it is evaluated or written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_checkpoints_of_a_resumed_run_say_which_step_they_hold(tmp_path: Path) -> None:
    """Their trajectory has all six releases, which rebuilt the weights of another step."""
    with pytest.raises(KeyboardInterrupt):
        build_best(tmp_path, StopBeforeSave(6)).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    build_best(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    shipped = Trajectory.load(tmp_path / "checkpoint-4" / SHIPPING_NAME)
    assert (shipped.next_step, shipped.shipped_step) == (6, 4)
    report = report_of(tmp_path / "checkpoint-4")
    assert (report.steps, report.shipped_step) == (6, 4)


def test_a_run_that_stops_early_says_both(tmp_path: Path) -> None:
    trainer = build_best(tmp_path, EarlyStoppingCallback(1), max_steps=20)
    trainer.train()
    trainer.save_model()
    report = report_of(tmp_path)
    assert (report.shipped_step, report.steps, report.planned_steps) == (4, 6, 20)


@pytest.mark.parametrize(("limit", "kept"), [(0, "246"), (1, "4")])
def test_save_total_limit_keeps_the_best(tmp_path: Path, limit: int, kept: str) -> None:
    trainer = build_best(tmp_path, save_total_limit=limit)
    trainer.train()
    assert steps_kept(tmp_path) == [f"checkpoint-{step}" for step in kept]


def test_save_strategy_best_and_no_optimizer_states(tmp_path: Path) -> None:
    settings = {"save_strategy": "best", "save_only_model": True, "eval_steps": 2}
    trainer = build_best(tmp_path, **settings)
    trainer.train()
    assert steps_kept(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    ledger = Trajectory.load(tmp_path / LEDGER_NAME)
    assert same(weights(trainer.model), replayed(ledger, upto=4))


def test_adapters(tmp_path: Path) -> None:
    trainer = build_best(tmp_path, model=with_lora(tiny_model()), learning_rate=1.0)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    trainer.save_model()
    ledger = Trajectory.load(tmp_path / LEDGER_NAME)
    found = weights(trainer.model)
    assert same(found, replayed(ledger, upto=4, model=with_lora(tiny_model())))
    assert {name for name, p in trainer.model.named_parameters() if p.requires_grad} == trained
    assert report_of(tmp_path).shipped_step == 4


def test_the_last_step_may_be_the_best(tmp_path: Path) -> None:
    trainer = build_best(tmp_path, greater_is_better=None, metric_for_best_model=None)
    assert (trainer.args.metric_for_best_model, trainer.args.greater_is_better) == ("loss", False)
    trainer = build_best(tmp_path, max_steps=4)
    trainer.train()
    assert trainer.privacy_report().shipped_step is None


def test_a_best_checkpoint_of_another_run_is_not_loaded(tmp_path: Path) -> None:
    class Swap(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                path = tmp_path / "checkpoint-4" / "model.safetensors"
                shutil.copy(tmp_path / "checkpoint-2" / path.name, path)

    trainer = build_best(tmp_path, Swap())
    with pytest.raises(ValueError, match="checkpoint-4: model.safetensors is not what this run"):
        trainer.train()


def test_strategies_must_match_as_in_trainer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save and eval strategy to match"):
        config(tmp_path, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="steps")


@pytest.mark.parametrize("place", ["on_log", "on_train_end"])
def test_sigterm_at_the_end_never_saves_the_best_weights_under_the_last_step(
    tmp_path: Path, place: str
) -> None:
    """Before the best weights are loaded, and after; 'best' has no checkpoint of step 6."""

    class Asked(TrainerCallback):
        pass

    def ask(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    setattr(Asked, place, ask)
    with pytest.raises(SystemExit):
        build_best(tmp_path, Asked(), save_strategy="best").train()
    ledger = Trajectory.load(tmp_path / LEDGER_NAME)
    assert ledger.next_step == 6
    for path in complete_checkpoints(tmp_path):
        load_state(str(path), ledger)
        found = load_file(path / "model.safetensors")
        expected = replayed(ledger, upto=int(path.name.split("-")[1]))
        assert all(torch.equal(found[name], expected[name]) for name in expected), path
    resumed = build_best(tmp_path, save_strategy="best")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.privacy_report().shipped_step == 4


# ---------------------------------------------------------------- the average of the last steps


def test_a_replayed_average_is_the_mean_of_the_weights_that_a_run_had(tmp_path: Path) -> None:
    """Also with momentum and weight decay, whose updates depend on what came before."""
    every = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    terms = {"update_rule": "momentum", "weight_decay": 0.1}
    trainer = build(tmp_path, **every, **terms, **SECRET)
    trainer.train()
    trainer.save_model()
    saved = [load_file(folder / "model.safetensors") for folder in complete_checkpoints(tmp_path)]
    shipped = Trajectory.load(tmp_path / SHIPPING_NAME)
    for last, upto in ((4, None), (6, None), (2, 5)):
        model = tiny_model()
        replay(model, shipped, upto, average_last=last)
        of = saved[:upto][-last:]
        assert len(of) == last
        expected = {name: sum(each[name].double() for each in of) / last for name in of[0]}
        assert same(weights(model), {name: mean.float() for name, mean in expected.items()})
    assert not same(weights(model), saved[4])
    for last, upto in ((0, None), (-1, None), (7, None), (3, 2)):
        with pytest.raises(LedgerError, match=f"average_last={last} must be between 1"):
            replay(tiny_model(), shipped, upto, average_last=last)


def test_an_average_ends_at_the_step_that_was_shipped(tmp_path: Path) -> None:
    build_best(tmp_path).train()
    ledger = Trajectory.load(tmp_path / LEDGER_NAME)
    ledger.average_last, ledger.shipped_step = 2, 4
    ledger.to_safetensors(tmp_path / "two.safetensors")
    two = replayed(Trajectory.load(tmp_path / "two.safetensors"))
    third, fourth = replayed(ledger, upto=3, last=1), replayed(ledger, upto=4, last=1)
    mean = {name: ((third[name].double() + fourth[name].double()) / 2).float() for name in third}
    assert same(two, mean) and not same(two, fourth)
    assert Trajectory.load(tmp_path / "two.safetensors").digest() == ledger.digest()
