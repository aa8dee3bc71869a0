"""Code around training that writes to the trained weights: clipping, averaging, steps of its own.

The report would speak of the ledger's releases, and the weights would be something else.
"""

from __future__ import annotations

import copy

import pytest
import torch
from attacked_runs import SAVED, SECRET, Calls
from tiny_runs import build, same, tiny_model, weights
from transformers import default_data_collator

from hf_dpzero.checks import between_steps
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.perturbation.segments import GridSegment

METHODS = ["dpzero", "dp-sgd"]


def trained(model) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def clip(model, rows):
    for p in trained(model):
        p.data.clamp_(-0.03, 0.03)


def average(model, rows):
    for p in trained(model):
        p.data.mul_(0.999)


def copy_in_place(model, rows):
    with torch.no_grad():
        for p in trained(model):
            p.copy_(p * 0.5)


def swap_averages_in(model, rows):
    for p in trained(model):
        p.data = p.data.clone()


def replace(model, rows):
    model.classifier.weight = torch.nn.Parameter(model.classifier.weight.detach().clone())


def step_on_private_rows(model, rows):
    batch = default_data_collator([rows[i] for i in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.enable_grad():
        model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


WRITES = [clip, average, copy_in_place, swap_averages_in, replace, step_on_private_rows]


def writing(event: str, write, rows=None) -> Calls:
    """Writes to the weights at one event, after the third step."""

    def called(state, control, model=None, **_):
        if state.global_step >= 3 or event == "on_train_begin":
            write(model, rows)

    return Calls(event, called)


def refused(tmp_path, event, write, method="dpzero", **settings):
    """A run that the callback was refused in, and what it had paid for."""
    trainer = build(tmp_path, method=method, **{**SAVED, **settings})
    trainer.add_callback(writing(event, write, trainer.train_dataset))
    with pytest.raises(
        ValueError, match=r"(?s)between two steps.*on a copy.*resume_from_checkpoint"
    ):
        trainer.train()
    return trainer


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("method", METHODS)
def test_weights_that_a_callback_writes_to_are_refused_and_not_saved(tmp_path, method, write):
    trainer = refused(tmp_path, "on_step_end", write, method)
    with pytest.raises(ValueError, match="between two steps"):
        trainer.save_model()
    assert not (tmp_path / "privacy_report.json").exists()
    assert not (tmp_path / "checkpoint-4").exists()
    assert Trajectory.load(tmp_path / "trajectory.ledger").next_step == 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "event",
    [
        *("on_train_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"),
        *("on_log", "on_evaluate", "on_save", "on_epoch_end", "on_train_end"),
    ],
)
def test_at_whatever_event_it_writes(tmp_path, method, event):
    every = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}
    refused(tmp_path, event, average, method, **every)


@pytest.mark.parametrize("saved", ["no", "steps"])
@pytest.mark.parametrize("method", METHODS)
def test_frozen_weights_that_a_callback_writes_to_are_refused(tmp_path, method, saved):
    """A step of its own on the private rows, into a backbone that the run does not train."""

    def write(model, rows):
        model.bert.embeddings.word_embeddings.weight.data.add_(0.1)

    settings = {**SECRET, "trainable": "classifier", "save_strategy": saved, "save_steps": 2}
    trainer = build(tmp_path, method=method, **settings)
    trainer.add_callback(writing("on_step_end", write))
    with pytest.raises(LedgerError, match="frozen parameters are not those that this run began"):
        trainer.train()
    with pytest.raises(ValueError, match="not saved: the frozen parameters"):
        trainer.save_model()
    assert not (tmp_path / "privacy_report.json").exists()
    assert not (tmp_path / "checkpoint-4").exists()


def test_weights_that_were_left_half_way_are_not_saved(tmp_path, monkeypatch):
    trainer = build(tmp_path, **SECRET)
    moved = GridSegment.apply_

    def breaks(segment, *given):
        moved(segment, *given)
        if trainer.trajectory.next_step == 3:
            raise MemoryError

    monkeypatch.setattr(GridSegment, "apply_", breaks)
    with pytest.raises((MemoryError, RuntimeError)):
        trainer.train()
    with pytest.raises(RuntimeError, match="half-way"):
        trainer.save_model()
    assert not (tmp_path / "privacy_report.json").exists()


def test_what_was_paid_is_not_paid_again(tmp_path):
    """Without the callback the run goes on from its checkpoint, to weights that the ledger rebuilds."""
    refused(tmp_path, "on_step_end", clip)
    trainer = build(tmp_path, **SAVED)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    assert trainer.privacy_report().steps == 6
    rebuilt = tiny_model()
    replay(rebuilt, trainer.trajectory)
    assert same(weights(rebuilt), weights(trainer.model))


@pytest.mark.parametrize("asked", ["_get_learning_rate", "compute_metrics"])
def test_code_that_is_no_callback_and_writes_is_seen(tmp_path, asked):
    """Also while an update waits: weights stand perturbed between steps, and are settled later."""
    trainer = build(tmp_path, eval_strategy="steps", eval_steps=2, **SAVED)
    rate = trainer._get_learning_rate

    def asks(*given):
        if trainer.state.global_step == 3 or given:
            average(trainer.model, None)
        return {} if given else rate()

    setattr(trainer, asked, asks)
    with pytest.raises(ValueError, match=r"written to through `\.data` between two steps"):
        trainer.train()
    assert trainer.step.defer


def ordinary(state, control, model=None, **_) -> None:
    """Reads, evaluates a copy of an average, and changes modes, as callbacks do."""
    beside = copy.deepcopy(model)
    with torch.no_grad():
        for p in beside.parameters():
            p.mul_(0.9)
    beside(**default_data_collator([{"input_ids": [5, 6, 7], "labels": 1}]))
    model.train()
    model.zero_grad()
    torch.nn.utils.parameters_to_vector(model.parameters())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("method", ["dpzero", "dpgd-0th", "dp-sgd", "dp-adamw", "mezo"])
def test_ordinary_callbacks_evaluation_and_checkpoints_are_not_refused(tmp_path, method, own):
    noise = {"noise_multiplier": None} if method == "mezo" else {}
    given = {"compute_metrics": lambda _: {"one": 1.0}}
    given |= {"callbacks": [Calls("on_step_end", ordinary)]} if own else {}
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 2, "logging_steps": 1}
    trainer = build(tmp_path, method=method, trainer_settings=given, **{**SAVED, **every, **noise})
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "privacy_report.json").exists()
    again = build(tmp_path, method=method, trainer_settings=given, **{**SAVED, **every, **noise})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_run_that_claims_nothing_may_clip_weights(tmp_path):
    trainer = build(tmp_path, method="sgd", noise_multiplier=None, **SAVED)
    trainer.add_callback(writing("on_step_end", clip))
    trainer.train()
    assert trainer.trajectory.next_step == 6


def test_of_many_weights_some_are_compared(monkeypatch):
    """Beyond WHOLE every so many-th: what changes all of them is seen, one element is not always."""
    monkeypatch.setattr(between_steps, "WHOLE", 1000)
    monkeypatch.setattr(between_steps, "SAMPLED", 100)
    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 3).bfloat16())
    watch = between_steps.WeightsBetweenSteps(model)
    watch.note()
    model[0].weight.data.view(-1)[1] += 1.0
    watch.check()
    model[1].weight.data.mul_(1.5)
    with pytest.raises(ValueError, match="through `.data`"):
        watch.check()


def test_weights_that_are_not_numbers_are_equal_to_themselves():
    model = torch.nn.Linear(3, 3)
    model.weight.data.fill_(float("nan"))
    watch = between_steps.WeightsBetweenSteps(model)
    watch.note()
    watch.check()
    model.weight.data[0, 0] = 0.0
    with pytest.raises(ValueError, match="through `.data`"):
        watch.check()
