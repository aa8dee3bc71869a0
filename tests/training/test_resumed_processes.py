"""A run that two processes began goes on in one, and the other way round, as if nothing had happened."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
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


def run(folder: Path, steps: int, resume: bool, processes: int) -> None:
    """`train` in so many new processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    given = [str(folder), str(steps), str(int(resume)), str(processes)]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, *given],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank),
                 "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    for process in started:
        _, words = process.communicate(timeout=240)
        wanted = {-signal.SIGKILL, 1, -signal.SIGABRT} if steps else {0}
        assert process.returncode in wanted, words


@pytest.mark.parametrize(("first", "second"), [(2, 1)])  # others: test_distributed.py
def test_the_number_of_processes_may_change(tmp_path: Path, first: int, second: int) -> None:
    train(tmp_path / "straight", 0, False, 1)
    run(tmp_path / "run", 2, False, first)
    assert Trajectory.open(tmp_path / "run" / "ledger" / "trajectory.ledger").next_step == 2
    run(tmp_path / "run", 0, True, second)
    for name in ("saved", "ledger"):
        folders = [tmp_path / place / name for place in ("straight", "run")]
        logs = [Trajectory.load(folder / "trajectory.ledger").releases for folder in folders]
        assert logs[0] == logs[1] and len(logs[0]) == 4
        saved = [load_file(folder / "model.safetensors") for folder in folders]
        assert saved[0].keys() == saved[1].keys()
        assert all((saved[0][key] == saved[1][key]).all() for key in saved[0])


if __name__ == "__main__":
    folder, steps, resume, processes = sys.argv[1:]
    train(Path(folder), int(steps), bool(int(resume)), int(processes))
