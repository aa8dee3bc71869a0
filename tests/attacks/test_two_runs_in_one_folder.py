"""Two processes that start, or resume, in one folder at the same time: one of them trains."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from attacked_runs import SECRET
from killed_runs import die, in_child
from tiny_runs import build

from hf_dpzero import Trajectory
from hf_dpzero.ledger.trajectory import LEDGER_NAME

REAL: dict[str, Any] = {
    **SECRET,
    "max_steps": 2,
    "eval_strategy": "no",
    "testing.direction_key": None,
}


def started(folder: Path, resume: bool, told: Path, other: Path, ready: Path) -> int:
    """A child that trains as soon as `ready` is there, and writes what came of it.

    It releases nothing before the other has told: else a run of two steps may end before the other
    begins, which may then train too.
    """
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    append, latest = Trajectory.append, time.monotonic() + 60

    def awaiting(self: Trajectory, release: Any, wait: bool = True) -> None:
        while self.path and not other.exists() and time.monotonic() < latest:
            time.sleep(1e-3)
        append(self, release, wait)

    Trajectory.append = awaiting  # type: ignore[method-assign]
    try:
        trainer = build(folder, **REAL)
        while not ready.exists():
            time.sleep(1e-3)
        trainer.train(resume_from_checkpoint=resume or None)
        told.write_text("trained")
    except BaseException as error:
        told.write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


def killed_after_a_step(folder: Path) -> None:
    def work() -> None:
        append = Trajectory.append

        def dying(self: Trajectory, release: Any, wait: bool = True) -> None:
            append(self, release)
            die()

        Trajectory.append = dying  # type: ignore[method-assign]
        build(folder, **REAL).train()

    assert in_child(work)[0] == 9


@pytest.mark.parametrize("resume", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_of_two_trains(tmp_path: Path, resume: bool) -> None:
    """Every step is released once; the other is refused, whichever was there first."""
    folder, ready = tmp_path / "run", tmp_path / "ready"
    paid = None
    if resume:
        killed_after_a_step(folder)
        paid = Trajectory.load(folder / LEDGER_NAME).releases
    told = [tmp_path / name for name in ("one", "two")]
    children = [
        started(folder, resume, path, other, ready)
        for path, other in zip(told, reversed(told), strict=True)
    ]
    ready.write_text("")
    for child in children:
        os.waitpid(child, 0)
    words = [path.read_text() for path in told]
    refused = [w for w in words if w != "trained"]
    assert len(refused) == 1 and refused[0].startswith("LedgerError"), words
    log = Trajectory.load(folder / LEDGER_NAME)
    assert [release.step for release in log.releases] == [0, 1]
    assert paid is None or log.releases[:1] == paid
