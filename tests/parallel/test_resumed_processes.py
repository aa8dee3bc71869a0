"""A run that two processes began goes on in one as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from several_processes import in_processes, started
from tiny_runs import build
from transformers import TrainerCallback

from hf_dpzero import Trajectory

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"max_steps": 4, "microbatch_size": 1, "num_directions": 2}
SAVED = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


class _KilledAfter(TrainerCallback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, steps: int, resume: bool, processes: int) -> None:
    """Trains with and without checkpoints; of the run without, `steps` > 0 kills all processes."""
    backend = "gloo" if processes > 1 else None
    for name, more in (("saved", SAVED), ("ledger", {})):
        last = name == "ledger"
        killed = {"callbacks": [_KilledAfter(steps)]} if steps and last else {}
        stopped = {"callbacks": [_Stopped(steps)]} if steps and not last else {}
        given = {**SETTINGS, **more, "ddp_backend": backend}
        trainer = build(folder / name, trainer_settings={**killed, **stopped}, **given)
        assert trainer.args.world_size == processes
        trainer.train(resume_from_checkpoint=resume or None)
        if not steps:
            trainer.save_model()


class _Stopped(TrainerCallback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.steps


def in_two(folder: Path, steps: int) -> None:
    """`train` in two new processes, which are killed."""
    log = folder.with_suffix(".log")
    with started(__file__, str(folder), str(steps), log=log) as process:
        status = process.wait(timeout=900)
    assert status in (-signal.SIGKILL, 1, -signal.SIGABRT), log.read_text(errors="replace")[-3000:]


def test_a_run_of_two_processes_goes_on_in_one(tmp_path: Path) -> None:
    """The other way round: test_distributed.py."""
    train(tmp_path / "straight", 0, False, 1)
    in_two(tmp_path / "run", 2)
    assert Trajectory.open(tmp_path / "run" / "ledger" / "trajectory.ledger").next_step == 2
    train(tmp_path / "run", 0, True, 1)
    for name in ("saved", "ledger"):
        folders = [tmp_path / place / name for place in ("straight", "run")]
        logs = [Trajectory.load(folder / "trajectory.ledger").releases for folder in folders]
        assert logs[0] == logs[1] and len(logs[0]) == 4
        saved = [load_file(folder / "model.safetensors") for folder in folders]
        assert saved[0].keys() == saved[1].keys()
        assert all((saved[0][key] == saved[1][key]).all() for key in saved[0])


if __name__ == "__main__":
    in_processes(2, lambda rank: train(Path(sys.argv[1]), int(sys.argv[2]), False, 2))
