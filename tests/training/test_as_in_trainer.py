"""Epochs, evaluations and what callbacks set are those of `transformers.Trainer`, run beside."""

from __future__ import annotations

import inspect
from typing import Any

import huggingface_hub
import pytest
from test_overrides import rates, schedule
from tiny_runs import SECRET, build, same, tiny_data, tiny_model, weights
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME

PER_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": -1}


class Seen(TrainerCallback):
    """What happened when: (event, step, epoch)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, float]] = []

    def _note(self, name: str, state: Any) -> None:
        self.events.append((name, state.global_step, state.epoch))

    def on_step_end(self, args, state, control, **kwargs):
        self._note("step", state)

    def on_evaluate(self, args, state, control, **kwargs):
        self._note("evaluate", state)

    def on_save(self, args, state, control, **kwargs):
        self._note("save", state)

    def on_epoch_end(self, args, state, control, **kwargs):
        self._note("epoch", state)


class EndEpochs(TrainerCallback):
    """Ends an epoch after some of its steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step in self.steps


def plain(tmp_path, rows: int, size: int, callbacks: list[Any], **settings: Any) -> Trainer:
    args = TrainingArguments(
        str(tmp_path / "plain"), per_device_train_batch_size=size, report_to="none", use_cpu=True,
        disable_tqdm=True, **settings,
    )  # fmt: skip
    return Trainer(
        tiny_model(),
        args,
        default_data_collator,
        tiny_data(rows),
        tiny_data(8, 2),
        callbacks=callbacks,
    )


def beside(tmp_path, rows: int, size: int, ends: set[int] | None = None, **settings: Any) -> Any:
    """Both trainers after `train`, which saw the same."""
    seen = Seen(), Seen()
    given = [[saw, EndEpochs(ends or set())] for saw in seen]
    theirs = plain(tmp_path, rows, size, given[0], **settings)
    ours = build(
        tmp_path / "ours", data=tiny_data(rows), expected_batch_size=size,
        trainer_settings={"callbacks": given[1], "eval_dataset": tiny_data(8, 2)}, **settings,
    )  # fmt: skip
    theirs.train()
    ours.train()
    assert seen[0].events == seen[1].events != []
    for name in ("global_step", "epoch", "num_train_epochs", "max_steps"):
        assert getattr(ours.state, name) == getattr(theirs.state, name), name
    return ours, theirs, seen[1].events


@pytest.mark.parametrize(
    ("rows", "size", "epochs", "ends"),
    [(1000, 16, 3, [63, 126, 189]), (100, 16, 2.5, [7, 14, 18]), (96, 16, 2, [6, 12])],
)
def test_an_epoch_has_as_many_steps_as_in_trainer(tmp_path, rows, size, epochs, ends):
    ours, _, events = beside(tmp_path, rows, size, num_train_epochs=epochs, **PER_EPOCH)
    for name in ("evaluate", "save", "epoch"):
        assert [step for event, step, _ in events if event == name] == ends
    assert ours.plan.steps == ours.privacy_report().steps == ends[-1]
    assert ours.args.steps(rows) == ends[-1]
    assert ours.trajectory.get(ends[-1] - 1).learning_rate == pytest.approx(1e-2 / ends[-1])


@pytest.mark.parametrize(
    ("method", "sampling", "steps"),
    [("dp-sgd", "fixed_batches", 21), ("dpzero", "full_batch", 3), ("dpzero", "poisson", 21)],
)
def test_steps_of_epochs_are_those_of_the_sampler(tmp_path, method, sampling, steps):
    """A fixed batch epoch visits every row once; an epoch of full batches is one step."""
    settings = {"method": method, "sampling": sampling, "num_train_epochs": 3, "max_steps": -1}
    ours = build(tmp_path, data=tiny_data(100), expected_batch_size=16, **settings)
    ours.train()
    assert ours.state.global_step == ours.plan.steps == steps
    assert ours.state.epoch == ours.state.num_train_epochs == 3


def test_a_resumed_run_counts_epochs_as_a_straight_one(tmp_path):
    """From the middle of an epoch."""
    settings = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 5, "max_steps": -1}
    settings |= {"expected_batch_size": 16, "data": tiny_data(100), "logging_steps": 1}
    straight, resumed = Seen(), Seen()
    whole = build(tmp_path, trainer_settings={"callbacks": [straight]}, **settings)
    whole.train()
    again = build(tmp_path, trainer_settings={"callbacks": [resumed]}, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert resumed.events and resumed.events == [e for e in straight.events if e[1] > 10]
    assert again.state.epoch == whole.state.epoch == 3


# ---- callbacks that end epochs


@pytest.mark.parametrize("ends", [{4}, {4, 12}, {1, 2}])
def test_a_callback_ends_the_epoch_and_not_the_run(tmp_path, ends):
    ours, _, events = beside(tmp_path, 64, 8, ends, num_train_epochs=3, **PER_EPOCH)
    taken, whole = ours.state.global_step, ours.plan.epsilon(ours.run.delta)
    assert max(ends) < taken < ours.plan.steps == 24
    assert len([event for event in events if event[0] == "epoch"]) == 3
    report = ours.privacy_report()
    assert ours.trajectory.next_step == report.steps == taken
    assert report.epsilon == ours.plan.epsilon(ours.run.delta, at=taken) < whole


# ---- callbacks that set the rate


class SetRate(TrainerCallback):
    """Sets the optimizer's rate before some steps."""

    def __init__(
        self, rates: dict[int, float], event: str = "on_step_begin", groups: int = 9
    ) -> None:
        def set_rate(args, state, control, optimizer, **kwargs):
            if state.global_step in rates:
                for group in optimizer.param_groups[:groups]:
                    group["lr"] = rates[state.global_step]

        setattr(self, event, set_rate)


@pytest.mark.parametrize("method", ["dpzero", "mezo", "dp-sgd", "dp-adamw"])
@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_optimizer_step"])
def test_a_rate_that_a_callback_sets_is_taken_written_and_logged(tmp_path, method, event):
    """As long as in Trainer: its scheduler sets the next one."""
    chosen, fields = {1: 0.5, 3: 0.25}, {"max_steps": 5, "lr_scheduler_type": "constant"}
    fields |= {"learning_rate": 0.125, "logging_steps": 1}
    used: list[float] = []

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            used.append(optimizer.param_groups[0]["lr"])

    plain(tmp_path, 40, 8, [SetRate(chosen, event), Note()], **fields).train()
    ours = build(
        tmp_path / "ours", method=method, trainer_settings={"callbacks": [SetRate(chosen, event)]},
        noise_multiplier=None if method == "mezo" else 1.0, **fields,
    )  # fmt: skip
    ours.train()
    late = event == "on_optimizer_step"  # then the scheduler sets the next one
    assert rates(ours) == used == [0.125, *([0.125] * 4 if late else [0.5, 0.125, 0.25, 0.125])]
    assert [log["learning_rate"] for log in ours.state.log_history if "epsilon" in log] == used


def test_rates_of_a_callback_and_of_a_given_scheduler_survive_a_resume(tmp_path):
    """The scheduler is one of another optimizer."""
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    given = {"optimizers": (None, schedule()), "callbacks": [SetRate({2: 0.5}, "on_step_end")]}
    whole = build(tmp_path, trainer_settings=given, **fields)
    whole.train()
    assert rates(whole) == [0.02, 0.01, 0.5, 0.0025]
    again = build(tmp_path, trainer_settings={"optimizers": (None, schedule())}, **fields)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(weights(whole.model), weights(again.model))


def test_rates_that_the_ledger_could_not_say_are_refused(tmp_path):
    given = {"callbacks": [SetRate({1: 0.5}, groups=1)]}
    trainer = build(tmp_path / "groups", method="dp-adamw", trainer_settings=given)
    with pytest.raises(
        ValueError, match=r"learning rates \[0.00.*, 0.5\] of several groups.*set the same"
    ):
        trainer.train()
    assert trainer.trajectory.next_step == 1  # before the data was read
    for method in ("dpzero", "dp-sgd"):
        given = {"callbacks": [SetRate({1: 0.5}, "on_pre_optimizer_step")]}
        trainer = build(tmp_path / method, method=method, trainer_settings=given)
        with pytest.raises(ValueError, match="to 0.5 between a step's release.*in on_step_begin"):
            trainer.train()


# ---- pushes, and where a run goes on


class Api:
    """The Hub's, which keeps what it is asked."""

    calls: dict[str, Any]

    def __init__(self, **settings: Any) -> None:
        self.calls.update(settings)

    def create_repo(self, repo_id: str, **settings: Any) -> Any:
        self.calls.update(settings)
        return type("Url", (str,), {"repo_id": repo_id})(f"https://hub.example/{repo_id}")

    def repo_info(self, *args: Any, **settings: Any) -> Any:
        return type("Info", (), {"private": True})

    def upload_folder(self, **settings: Any) -> None:
        self.calls.update(settings)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    Api.calls = {}
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return Api.calls


def test_a_push_honours_what_trainers_push_takes(tmp_path, pushed, caplog):
    """All that `Trainer.push_to_hub` names; entries of the card, which follow from the run, are told."""
    given = {"commit_message": "Mine", "token": "hf_t", "revision": "trial", "private": False}
    taken = inspect.signature(Trainer.push_to_hub).parameters.keys()
    assert {*given, "blocking"} == taken - {"self", "kwargs"}
    begun: list[str] = []

    class Watch(TrainerCallback):
        def on_push_begin(self, args, state, control, **kwargs):
            begun.append(args.hub_model_id)

    fields = {"noise_multiplier": None, "target_epsilon": 3.0, "hub_model_id": "me/x", **SECRET}
    trainer = build(tmp_path, trainer_settings={"callbacks": [Watch()]}, max_steps=1, **fields)
    trainer.train()
    trainer.push_to_hub(**given, tags=["a"], model_name="b")
    assert {name: pushed[name] for name in given} == given
    assert "not used by the model card, which follows from the run: tags, model_name" in caplog.text
    trainer.args.hub_revision = "other"
    trainer.push_to_hub(token="hf_t")
    found = {name: pushed[name] for name in ("commit_message", "revision", "private")}
    assert found == {"commit_message": "End of training", "revision": "other", "private": True}
    assert begun == ["me/x"] * 2
    pushed.clear()
    for refused in ({"blocking": False}, {"create_pr": True}):
        ((name, value),) = refused.items()
        with pytest.raises(ValueError, match=rf"push_to_hub\({name}={value}\) is not done here"):
            trainer.push_to_hub(token="hf_t", **refused)
    assert not pushed and len(begun) == 2


def test_a_checkpoint_of_another_folder_names_that_folder(tmp_path):
    """Its run goes on there, where its ledger is."""
    there, here = tmp_path / "there", tmp_path / "here"
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    build(there, **fields).train()
    checkpoint = there / "checkpoint-2"
    words = rf"that of {checkpoint} is in {there}: set output_dir to it"
    with pytest.raises(LedgerError, match=words):
        build(here, **fields).train(resume_from_checkpoint=str(checkpoint))
    again = build(there, **fields)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == 4
    (there / LEDGER_NAME).unlink()
    with pytest.raises(LedgerError, match="is missing, .* put it back there, or start afresh"):
        build(there, **fields).train(resume_from_checkpoint=str(checkpoint))


def test_an_error_of_a_scripts_metrics_says_that_going_on_is_exact_and_costs_nothing(
    tmp_path, capsys
):
    saved = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    straight = build(tmp_path / "straight", **saved)
    straight.train()
    counted = iter([1.0, 0.5, 1 / 3])  # the first is of the trial before step 0

    def metrics(_: Any) -> dict[str, float]:
        return {"share": 1 / next(counted, 0)}

    broken = build(tmp_path / "run", trainer_settings={"compute_metrics": metrics}, **saved)
    with pytest.raises(ZeroDivisionError):
        broken.train()
    said = capsys.readouterr().err
    assert "stopped by ZeroDivisionError after step 6 of 6: resume_from_checkpoint=True" in said
    assert "checkpoint-4 and the ledger, exactly and at no cost in privacy" in said
    mended = build(tmp_path / "run", **saved)
    mended.train(resume_from_checkpoint=True)
    assert same(weights(mended.model), weights(straight.model))
    assert mended.privacy_report().epsilon == straight.privacy_report().epsilon


def test_a_mistake_in_a_metric_shows_before_any_budget_is_spent(tmp_path, caplog):
    seen = []

    def wrong(prediction):
        seen.append(len(prediction.label_ids))
        raise KeyError("accuracy")

    settings = {"eval_dataset": tiny_data(40, seed=5), "compute_metrics": wrong}
    trainer = build(tmp_path, per_device_eval_batch_size=4, trainer_settings=settings)
    with pytest.raises(KeyError):
        trainer.train()
    assert seen == [8, 40] and "no budget was spent" in caplog.text
    assert not (tmp_path / LEDGER_NAME).exists()
    trainer.compute_metrics = None  # the folder may be used
    trainer.train()


def test_a_metric_that_needs_many_rows_and_a_good_one_change_nothing(tmp_path):
    """Nor does the trial show: neither to callbacks, nor in logs, nor in what is released."""
    plain = build(tmp_path / "plain", tiny_model())
    plain.train()
    for name, least in (("all", 40), ("few", 1)):
        seen: list[int] = []

        def metric(prediction, least=least, seen=seen):
            seen.append(len(prediction.label_ids))
            if seen[-1] < least:
                raise ValueError("one class alone")
            return {"rows": float(seen[-1])}

        events = Seen()
        settings = {"eval_dataset": tiny_data(40, seed=5), "compute_metrics": metric}
        trainer = build(
            tmp_path / name,
            tiny_model(),
            per_device_eval_batch_size=4,
            trainer_settings={**settings, "callbacks": [events]},
        )
        trainer.train()
        assert seen == ([8, 40] if least == 40 else [8])
        assert {event for event, *_ in events.events} == {"step", "epoch"}
        assert not [entry for entry in trainer.state.log_history if "eval_rows" in entry]
        assert same(weights(trainer.model), weights(plain.model))


def test_eval_on_start_evaluates_all_rows(tmp_path):
    seen = []

    def metric(prediction):
        seen.append(len(prediction.label_ids))
        return {}

    settings = {"eval_dataset": tiny_data(40, seed=5), "compute_metrics": metric}
    on_start = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 100}
    build(tmp_path, **on_start, trainer_settings=settings).train()
    assert seen == [40, 40]  # and at the end, as in Trainer
