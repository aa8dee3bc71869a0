"""An update may wait for the next pass; nobody may see that it does."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification, TrainerCallback, default_data_collator

from hf_dpzero.estimators.forward_passes import SettleBeforeRead, all_known
from hf_dpzero.ledger.log_file import LedgerWriteError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace


def small_model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def in_the_middle(model: nn.Module) -> ParameterSpace:
    """theta - lambda u stands on the model, and the update of a step waits."""
    space = ParameterSpace.from_model(model)
    u = Direction(1, 0)
    space.move_to_(((u, -1e-3),))
    space.step_([u], [0.5], defer=True)
    return space


def expected() -> dict[str, torch.Tensor]:
    model = small_model()
    space = ParameterSpace.from_model(model)
    space.step_([Direction(1, 0)], [0.5])
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_without_the_guard_the_weights_are_not_theta():
    """The tests below have power: an unguarded read sees other numbers."""
    model = small_model()
    space = in_the_middle(model)
    assert space.waiting
    assert not same(dict(model.state_dict()), expected())


X = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model.state_dict()["2.weight"],
        lambda model: model[2].state_dict()["weight"],
        lambda model: copy.deepcopy(model)[2].weight,
        lambda model: copy.deepcopy(model[2]).weight,
        lambda model: pickle.loads(pickle.dumps(model))[2].weight,
        lambda model: (model(X), model[2].weight)[1],
        lambda model: (model[2](X[:, :30]), model[2].weight)[1],
    ],
    ids=["state_dict", "part_state_dict", "copy", "part_copy", "pickle", "forward", "part_forward"],
)
def test_every_read_between_steps_sees_the_update(read):
    model = small_model()
    space = in_the_middle(model)
    with SettleBeforeRead(model, space) as reads, torch.no_grad():
        assert torch.equal(read(model), expected()["2.weight"])
        u = Direction(1, 1)
        with reads.own_step():
            space.move_to_(((u, 1e-3),))
            model(X)  # a pass of our own leaves the perturbation alone
            assert space.position == ((u, 1e-3),)
            space.step_([u], [0.5], defer=True)
        assert space.waiting
        theta = read(model)
        assert space.settled
        assert torch.equal(theta, model[2].weight)
        assert not torch.equal(theta, expected()["2.weight"])


def test_a_copy_is_an_ordinary_module():
    model = small_model()
    with SettleBeforeRead(model, in_the_middle(model)):
        copied = copy.deepcopy(model)
    assert vars(copied).keys() == vars(small_model()).keys() == vars(model).keys()


def test_a_failure_inside_a_step_leaves_nothing_for_the_next_read():
    """The parameters stand at theta - lambda u when the step breaks off."""
    model = small_model()
    space = in_the_middle(model)
    with SettleBeforeRead(model, space) as reads, torch.no_grad():
        with pytest.raises(KeyError), reads.own_step():
            space.move_to_(((Direction(1, 1), -1e-3),))
            raise KeyError
        model[1](X)  # the forward pass of any module
        assert space.settled
        assert same(dict(model.named_parameters()), expected())


def test_no_hook_is_called_inside_a_step():
    from torch.nn.modules import module as torch_module

    model = small_model()
    space = in_the_middle(model)
    before = len(torch_module._global_forward_pre_hooks)
    with SettleBeforeRead(model, space) as reads:
        assert len(torch_module._global_forward_pre_hooks) == before + 1
        with reads.own_step():
            assert len(torch_module._global_forward_pre_hooks) == before
            assert not any(part._forward_pre_hooks for part in model.modules())
    assert len(torch_module._global_forward_pre_hooks) == before


def test_leaving_settles_also_after_an_exception_and_takes_the_hooks_along():
    model = small_model()
    space = in_the_middle(model)
    with pytest.raises(KeyError), SettleBeforeRead(model, space):
        raise KeyError
    assert space.settled
    assert same(dict(model.state_dict()), expected())
    space.step_([Direction(1, 1)], [0.5], defer=True)
    model.state_dict()
    assert space.waiting


class Peeking(TrainerCallback):
    """Someone else's callback that reads the weights after each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(next(kwargs["model"].parameters()).detach().clone())


def test_callbacks_of_others_turn_deferral_off():
    from transformers.trainer_callback import PrinterCallback

    assert all_known([PrinterCallback()])
    assert not all_known([PrinterCallback(), Peeking()])


def test_a_foreign_callback_sees_the_weights_of_each_step(tmp_path):
    """What it sees after step t is what a run of t steps ends in."""
    from tiny_runs import build, weights

    peeking, steady = Peeking(), {"lr_scheduler_type": "constant"}
    build(
        tmp_path / "all", max_steps=3, trainer_settings={"callbacks": [peeking]}, **steady
    ).train()
    for steps in (1, 3):
        shorter = build(tmp_path / str(steps), max_steps=steps, **steady)
        shorter.train()
        assert torch.equal(peeking.seen[steps - 1], next(iter(weights(shorter.model).values())))


def test_deferred_and_eager_training_end_in_the_same_weights(tmp_path):
    from tiny_runs import build, same, weights

    runs = []
    for defer in (True, False):
        trainer = build(
            tmp_path / str(defer),
            max_steps=3,
            num_directions=2,
            performance={"defer_updates": defer},
        )
        trainer.train()
        assert trainer.step.defer is defer
        assert trainer.space.settled
        runs.append(weights(trainer.model))
    assert same(*runs)


def test_nobody_sees_a_release_whose_sync_still_runs(tmp_path, monkeypatch):
    """A slow disk: only the next batch is fetched meanwhile; losses, logs and checkpoints come after."""
    from tiny_runs import build

    sync, running, seen = os.fsync, list[int](), list[tuple[str, int]]()

    def slow(descriptor: int) -> None:
        running.append(descriptor)
        time.sleep(0.05)
        sync(descriptor)
        running.pop()

    def loss(model: nn.Module, inputs: Any) -> torch.Tensor:
        seen.append(("loss", len(running)))
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
        return nn.functional.cross_entropy(logits, inputs["labels"], reduction="none")

    def collator(rows: list[Any]) -> Any:
        seen.append(("rows", len(running)))
        return default_data_collator(rows)

    class Watching(TrainerCallback):
        def on_log(self, *given: Any, **named: Any) -> None:
            seen.append(("log", len(running)))

        on_save = on_evaluate = on_train_end = on_log

    Watching.__module__ = "transformers"  # updates wait
    trainer = build(
        tmp_path,
        **{"max_steps": 6, "logging_steps": 3, "save_strategy": "steps", "save_steps": 4},
        trainer_settings={"compute_per_example_loss": loss, "callbacks": [Watching()]},
    )
    trainer.data_collator = collator
    monkeypatch.setattr(os, "fsync", slow)
    trainer.train()
    assert trainer.step.defer and {what for what, _ in seen} == {"loss", "rows", "log"}
    assert {what for what, syncs in seen if syncs} == {"rows"}


def test_a_sync_that_fails_beside_a_deferring_run_takes_the_step_back(tmp_path, monkeypatch):
    """The weights and the ledger are those of the steps before it."""
    from tiny_runs import build, same, tiny_model, weights

    sync, beside = os.fsync, list[int]()

    def failing(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            beside.append(descriptor)
        if len(beside) == 3:
            raise OSError(5, "Input/output error")
        sync(descriptor)

    trainer = build(tmp_path)
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(LedgerWriteError, match="step 2 could not be written"):
        trainer.train()
    assert len(beside) == 3
    log, rebuilt = Trajectory.load(tmp_path / "trajectory.ledger"), tiny_model()
    assert log.releases == trainer.trajectory.releases and log.next_step == 2
    replay(rebuilt, log)
    assert same(weights(trainer.model), weights(rebuilt))


def test_a_checkpoint_of_a_deferring_run_holds_theta(tmp_path):
    """Saved in the middle of the run, between a step and the pass that would make its update."""
    from tiny_runs import build, same, tiny_model, weights

    trainer = build(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    assert trainer.step.defer
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    rebuilt = tiny_model()
    replay(rebuilt, Trajectory.load(tmp_path / "trajectory.ledger"), upto=2)
    assert same(weights(saved), weights(rebuilt))
