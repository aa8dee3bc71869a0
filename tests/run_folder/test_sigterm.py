"""SIGTERM ends a run after its step: a whole checkpoint, status 143, one line; nothing paid is lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_runs import in_child
from safetensors.torch import load_file
from several_processes import in_processes, started
from tiny_runs import build, tiny_data
from transformers import TrainerCallback

from hf_dpzero import Trajectory
from hf_dpzero.ledger.trajectory import LEDGER_NAME
from hf_dpzero.reporting import verification
from hf_dpzero.run_folder import checkpoints
from hf_dpzero.training import termination

KINDS: dict[str, dict[str, Any]] = {
    "dpzero": {},
    "dp-sgd": {"method": "dp-sgd", "clip": 0.5},
    "dp-adamw": {"method": "dp-adamw", "clip": 0.5},
    "correlated": {
        "sampling": "fixed_batches",
        "correlated_noise.kind": "optimized",
        "correlated_noise.hold_direction_for": 2,
    },
}
PLACES = (
    "on_step_begin",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_prediction_step",
    "on_save",
)


class Signal(TrainerCallback):
    """Sends SIGTERM to this process at one place of the loop, once a step has a number."""

    def __init__(self, place: str, step: int = 0, times: int = 1) -> None:
        self.step, self.times = step, times
        setattr(self, place, self.send)

    def send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGTERM)
            self.times = 0


def first_of_all(trainer: Any) -> None:
    """A signal at the begin of training comes before anything of ours looks there."""
    callbacks = trainer.callback_handler.callbacks
    callbacks.sort(key=lambda one: not isinstance(one, Signal))


def settings_of(kind: str, **more: Any) -> dict[str, Any]:
    return {"max_steps": 6, "eval_strategy": "no", "logging_steps": 1, **KINDS[kind], **more}


def stopped(folder: Path, settings: dict[str, Any], *callbacks: Any, resume: bool = False) -> Any:
    """(exit status, what stood on stderr, the highest step whose evaluation ended) of a forked run."""

    def work() -> list[Any]:
        told, evaluated = io.StringIO(), []

        class Evaluated(TrainerCallback):
            def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                evaluated.append(state.global_step)

        given = {"callbacks": [Evaluated(), *callbacks]}
        trainer = build(folder, trainer_settings=given, **settings)
        first_of_all(trainer)
        status, before = 0, signal.getsignal(signal.SIGTERM)
        with contextlib.redirect_stderr(told):
            try:
                trainer.train(resume_from_checkpoint=resume or None)
            except SystemExit as error:
                status = error.code
        assert signal.getsignal(signal.SIGTERM) is before
        return [status, told.getvalue(), max(evaluated, default=-1)]

    ended, told = in_child(work)
    assert ended == 0, f"killed by signal {ended}"
    assert "result" in told, told
    return told["result"]


def steps_of(folder: Path) -> tuple[int, int]:
    """Steps that are paid, and of the last checkpoint, which is read."""
    log = Trajectory.load(folder / LEDGER_NAME)
    found = checkpoints.complete_checkpoints(folder)
    if not found:
        return log.next_step, 0
    checkpoints.load_state(str(found[-1]), log)
    return log.next_step, checkpoints.step_of(found[-1])


def finish(folder: Path, settings: dict[str, Any], resume: bool = True) -> dict[str, Any]:
    trainer = build(folder, **settings)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model()
    assert Trajectory.load(folder / LEDGER_NAME).next_step == settings["max_steps"]
    return load_file(folder / "model.safetensors")


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


WEIGHTS_ALONE = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
STOPS: list[tuple[str, dict[str, Any], tuple[Any, ...], int]] = [
    *((kind, {}, ("on_step_begin", 3), 4) for kind in KINDS),
    # Schedulers tell every process of a job, and launchers pass it on: it comes several times.
    ("dp-sgd", {}, ("on_step_begin", 1, 3), 2),
    # A checkpoint that cannot be resumed from is no reason not to write one.
    ("dp-adamw", WEIGHTS_ALONE, ("on_step_end", 2), 2),
    # All steps are taken and the weights nowhere else: the resume has no step.
    ("dp-adamw", {}, ("on_train_end",), 6),
]
"""A run, its settings, what sends the signal, and the steps that are paid for."""


@pytest.mark.parametrize(("kind", "more", "signals", "paid"), STOPS)
def test_no_paid_step_is_lost(
    tmp_path: Path, kind: str, more: dict[str, Any], signals: tuple[Any, ...], paid: int
) -> None:
    """Also of first-order runs that keep no checkpoints: all steps of these were lost."""
    settings = settings_of(kind, **more)
    status, said, _ = stopped(tmp_path / "run", settings, Signal(*signals))
    assert status == 143
    assert steps_of(tmp_path / "run") == (paid, paid)
    (line,) = [line for line in said.splitlines() if "SIGTERM" in line]
    for words in (f"step {paid}", f"checkpoint-{paid}", "resume_from_checkpoint=True", "exactly"):
        assert words in line
    straight = finish(tmp_path / "straight", settings, resume=False)
    assert same(finish(tmp_path / "run", settings), straight)


@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_comes(tmp_path: Path, place: str) -> None:
    """An evaluation is cut short; a checkpoint is written once."""
    settings = settings_of(
        "dp-adamw", eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        per_device_eval_batch_size=8,
    )  # fmt: skip
    status, said, evaluated = stopped(tmp_path, settings, Signal(place, 2))
    assert status == 143, said
    paid, kept = steps_of(tmp_path)
    assert paid == kept == (3 if place in ("on_step_begin", "on_optimizer_step") else 2)
    assert evaluated < 2 or place in ("on_save", "on_step_begin", "on_optimizer_step")
    finish(tmp_path, settings)


def test_an_evaluation_of_a_callback_ends_first(tmp_path: Path) -> None:
    """Cut short there, the step before it would be in no checkpoint."""

    class Own(Signal):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                self.trainer.evaluate()

    def work() -> Any:
        own = Own("on_prediction_step", 2)
        settings = settings_of("dp-sgd", per_device_eval_batch_size=8)
        own.trainer = build(tmp_path, trainer_settings={"callbacks": [own]}, **settings)
        with pytest.raises(SystemExit):
            own.trainer.train()

    assert in_child(work) == (0, {"result": None})
    assert steps_of(tmp_path) == (2, 2)


def test_until_the_model_is_saved(tmp_path: Path) -> None:
    """Between training and save_model the weights of a first-order run may be nowhere else."""

    def work() -> None:
        trainer = build(tmp_path, **settings_of("dp-sgd", max_steps=1))
        with termination.heeding():
            trainer.train()
            os.kill(os.getpid(), signal.SIGTERM)
            trainer.save_model()

    assert in_child(work) == (signal.SIGTERM, None)
    assert verification.report_of(tmp_path).steps == 1


def test_during_a_checkpoint(tmp_path: Path) -> None:
    settings = settings_of("dp-sgd", save_strategy="steps", save_steps=2)
    save, saved = checkpoints.save_state, []

    def signalled(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        saved.append(given[1])
        save(*given)
        assert saved == [2], "written twice"

    class Patch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            checkpoints.save_state = signalled

    assert stopped(tmp_path, settings, Patch())[0] == 143
    assert steps_of(tmp_path) == (2, 2)


@pytest.mark.parametrize("place", ["on_train_begin", "on_prediction_step"])
def test_before_the_first_step(tmp_path: Path, place: str) -> None:
    settings = settings_of("dpzero", eval_on_start=True, per_device_eval_batch_size=8)
    status, said, evaluated = stopped(tmp_path, settings, Signal(place))
    assert status == 143 and "after step 0 of 6" in said
    assert steps_of(tmp_path) == (0, 0) and evaluated == -1
    finish(tmp_path, {**settings, "eval_on_start": False})


def test_while_a_resumed_run_repeats_its_steps(tmp_path: Path) -> None:
    settings = settings_of("dpzero")
    stopped(tmp_path / "run", settings, Signal("on_step_begin", 3))
    (tmp_path / "run" / "checkpoint-4").rename(tmp_path / "away")
    assert stopped(tmp_path / "run", settings, Signal("on_step_end", 2), resume=True)[0] == 143
    assert steps_of(tmp_path / "run") == (4, 2)
    straight = finish(tmp_path / "straight", settings, resume=False)
    assert same(finish(tmp_path / "run", settings), straight)


def test_a_disk_without_room_is_said(tmp_path: Path) -> None:
    class Full(Signal):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            def full(*given: Any) -> None:
                raise OSError(28, "No space left on device")

            checkpoints.save_state = full

    def work() -> str:
        given = {"callbacks": [Full("on_step_begin", 1)]}
        try:
            build(tmp_path, trainer_settings=given, **settings_of("dpzero")).train()
        except OSError as error:
            return str(error)
        return "not refused"

    assert "could not be written" in in_child(work)[1]["result"]
    assert steps_of(tmp_path) == (2, 0)


def test_workers_leave_it_to_their_parent(tmp_path: Path) -> None:
    """All processes of a job get it: a loader whose workers were killed would break the step."""

    class Group(Signal):
        def send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3 and self.times:
                self.times = 0
                os.killpg(os.getpgid(0), signal.SIGTERM)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.setpgid(0, 0)

    settings = settings_of("dp-adamw", dataloader_num_workers=2)
    assert stopped(tmp_path, settings, Group("on_step_begin"))[0] == 143
    assert steps_of(tmp_path) == (4, 4)


def test_other_threads_and_ignored_signals_are_left_alone(tmp_path: Path) -> None:
    class Handler(TrainerCallback):
        seen: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen = signal.getsignal(signal.SIGTERM)

    def train(name: str) -> Any:
        callback, settings = Handler(), settings_of("dpzero", max_steps=1)
        build(tmp_path / name, trainer_settings={"callbacks": [callback]}, **settings).train()
        return callback.seen

    before = signal.getsignal(signal.SIGTERM)
    assert callable(train("main"))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(train("thread")))
    thread.start()
    thread.join()
    assert found == [before]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert train("ignored") == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dpzero", "from the base model and the ledger, exactly and at no cost in privacy"),
        ("dp-sgd", "no checkpoint has the weights of 2 steps"),
    ],
)
def test_what_ctrl_c_says(tmp_path: Path, capsys: Any, kind: str, words: str) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, trainer_settings={"callbacks": [Interrupt()]}, **settings_of(kind)).train()
    said = capsys.readouterr().err
    assert "interrupted after step 2 of 6" in said and words in said


def test_runs_that_cannot_go_on_say_so(tmp_path: Path) -> None:
    """Group weights from un-noised sums, which must not be written down."""
    data = tiny_data().add_column(
        "where", ["few" if row % 5 == 0 else "many" for row in range(120)]
    )
    settings = settings_of(
        "dpzero", data=data,
        group_robust={"column": "where", "shares": {"few": 0.2, "many": 0.8}, "weights": "prefix_sum"},
        microbatch_size=1, sampling="fixed_batches",
    )  # fmt: skip
    status, said, _ = stopped(tmp_path, settings, Signal("on_step_begin", 2))
    assert status == 143 and "cannot go on" in said and "exactly" not in said
    assert steps_of(tmp_path) == (3, 3)


def test_the_command_exits_with_the_status(tmp_path: Path, monkeypatch: Any) -> None:
    """And leaves no results: the run has not ended."""
    from hf_dpzero.cli import main, train

    given = {"callbacks": [Signal("on_step_begin", 2)]}
    settings = settings_of("dp-adamw")
    monkeypatch.setattr(
        train.build,
        "build_trainer",
        lambda recipe: build(tmp_path, trainer_settings=given, **settings),
    )
    monkeypatch.setattr(train, "unused_settings", lambda recipe: "")
    recipes = Path(train.__file__).resolve().parents[2] / "recipes"
    recipe = next(recipes.rglob("*.yaml"))
    with pytest.raises(SystemExit) as exited:
        main.main(["train", str(recipe), "--output_dir", str(tmp_path)])
    assert exited.value.code == 143
    assert not list(tmp_path.glob("*_results.json")) and steps_of(tmp_path) == (3, 3)


# ---- several processes


class OfRank(Signal):
    """Only the last rank gets it."""

    def send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "1":
            super().send(args, state, control, **kwargs)


PARALLEL: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "dpzero": (settings_of("dpzero", microbatch_size=1), lambda: OfRank("on_step_begin", 2)),
    "adaptive": (settings_of("dpzero", clipping="adaptive"), lambda: OfRank("on_step_begin", 2)),
    "dp-adamw": (settings_of("dp-adamw"), lambda: OfRank("on_step_begin", 2)),
    "evaluation": (
        settings_of("dp-sgd", eval_strategy="steps", eval_steps=3),
        lambda: OfRank("on_evaluate"),
    ),
    "begin": (settings_of("dp-sgd"), lambda: OfRank("on_train_begin")),
    "end": (settings_of("dp-sgd"), lambda: OfRank("on_train_end")),
}
STOPPED = {"begin": 0, "end": 6}


def rank_of(folder: Path, rank: int) -> None:
    told = {}
    for name, (settings, callback) in PARALLEL.items():
        given = {"callbacks": [callback()]}
        trainer = build(folder / name, trainer_settings=given, ddp_backend="gloo", **settings)
        first_of_all(trainer)
        try:
            trainer.train()
        except SystemExit as error:
            told[name] = [error.code, trainer.trajectory.next_step, trainer.state.global_step]
    (folder / f"rank{rank}").write_text(json.dumps(told))


@pytest.mark.slow
def test_two_processes_stop_after_the_same_step(tmp_path: Path) -> None:
    """Whichever got it, with no byte more in a step (`test_distributed` counts those)."""
    log = tmp_path / "log"
    with started(__file__, str(tmp_path), log=log) as process:
        assert process.wait(timeout=400) == 0, log.read_text(errors="replace")[-3000:]
    told = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    expected = {name: [143, STOPPED.get(name, 3), STOPPED.get(name, 3)] for name in PARALLEL}
    assert told == [expected, expected]
    for name, (settings, _) in PARALLEL.items():
        paid, kept = steps_of(tmp_path / name)
        assert paid == kept
        if name in ("dpzero", "dp-adamw"):
            finish(tmp_path / name, settings)


if __name__ == "__main__":
    in_processes(2, lambda rank: rank_of(Path(sys.argv[1]), rank))
