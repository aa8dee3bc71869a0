"""What every process holds alike is compared during a run, also where parameters lie in parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from several_processes import in_processes, started
from tiny_runs import build, tiny_model
from transformers import TrainerCallback

from hf_dpzero import Trajectory
from hf_dpzero.checks import processes
from hf_dpzero.parallel.collectives import RankError

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2}, "ddp_backend": "gloo"}


def buffered() -> torch.nn.Module:
    """With a buffer that is saved, and one that is not."""
    model = tiny_model()
    model.classifier.register_buffer("scales", torch.ones(3))
    model.classifier.register_buffer("cache", torch.ones(3), persistent=False)
    return model


def nudge_weight(trainer: Any) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[3] += 2.0**-10


def nudge_release(trainer: Any) -> None:
    last = trainer.trajectory.releases[-1]
    values = (last.values[0] + 2.0**-20, *last.values[1:])
    trainer.trajectory.releases[-1] = last._replace(values=values)


def nudge_rate(trainer: Any) -> None:
    last = trainer.trajectory.releases[-1]
    rate = last.learning_rate * (1 + 2.0**-50)
    trainer.trajectory.releases[-1] = last._replace(learning_rate=rate)


def nudge_exponent(trainer: Any) -> None:
    trainer.space._grids[0].exponents[0] += 1


def nudge_bound(trainer: Any) -> None:
    trainer.space._grids[0].bounds[0] *= 1 + 2.0**-40


def nudge_buffer(trainer: Any) -> None:
    trainer.model.classifier.scales[2] += 2.0**-20


WORDS = {
    nudge_weight: "trained weights",
    nudge_release: "releases",
    nudge_rate: "releases",
    nudge_exponent: "grids of the trained weights",
    nudge_bound: "grids of the trained weights",
    nudge_buffer: "saved buffers",
}
IN_PARTS = [nudge_release, nudge_bound, nudge_buffer]


@pytest.mark.parametrize("nudge", WORDS)
def test_one_changed_bit_is_noticed_and_named(tmp_path: Path, monkeypatch, nudge) -> None:
    """The second of two ranks drifts; what the first one holds is what this one held before."""
    trainer = build(tmp_path, buffered(), max_steps=2)
    trainer.train()
    trainer.model.classifier.cache += 1.0  # follows from the rows that a rank saw last: may differ
    before = processes.replicated(trainer.run, 2)
    whole = processes.number_of(list(before.values()))
    monkeypatch.setattr(processes, "active", lambda: True)

    def gathered(own: int) -> list[int]:
        """The first rank's number of what is asked: all of it first, then one after another."""
        return [asked.pop(0), own]

    monkeypatch.setattr(processes, "gather_numbers", gathered)
    asked = [whole]
    processes.check_weights(trainer.run, 2)
    assert asked == []
    nudge(trainer)
    asked = [whole, *before.values()]
    trainer.run.compared = False
    with pytest.raises(RankError) as raised:
        processes.check_weights(trainer.run, 2)
    assert str(raised.value).startswith(
        f"rank 1 differs from rank 0 in the {WORDS[nudge]} before step 2:"
    )
    others = before.keys() - {WORDS[nudge]}
    assert not any(f"in the {other} " in str(raised.value) for other in others)


def test_it_is_compared_at_the_first_step_and_every_so_many(tmp_path: Path, monkeypatch) -> None:
    trainer = build(tmp_path, max_steps=2)
    trainer.train()
    compared, trainer.run.compared = [], False
    monkeypatch.setattr(processes, "active", lambda: True)
    monkeypatch.setattr(processes, "gather_numbers", lambda own: compared.append(step) or [own])
    for step in (*range(7, 210), None):
        processes.check_weights(trainer.run, step)
    assert compared == [7, 100, 200, None]


class Drift(TrainerCallback):
    """Changes something on the last rank after the first step."""

    def __init__(self, trainer: Any, nudge: Any) -> None:
        self.trainer, self.nudge = trainer, nudge

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and args.process_index:
            self.nudge(self.trainer)


def in_parts(folder: Path, rank: int) -> None:
    """Runs of two processes that hold halves, of which the last one drifts; and one without."""
    processes.EVERY = 2
    told = {}
    for nudge in (None, *IN_PARTS):
        name = nudge.__name__ if nudge else "none"
        trainer = build(folder / name, buffered(), max_steps=4, microbatch_size=1, **SHARDED)
        assert trainer.shards
        if nudge:
            trainer.add_callback(Drift(trainer, nudge))
        try:
            trainer.train()
        except RankError as error:
            told[name] = str(error)
    (folder / f"told.{rank}").write_text(json.dumps(told))


@pytest.mark.slow
def test_processes_with_parts_stop_where_one_drifts(tmp_path: Path) -> None:
    with started(__file__, str(tmp_path), log=tmp_path / "log") as process:
        status = process.wait(timeout=900)
    assert status == 0, (tmp_path / "log").read_text(errors="replace")[-3000:]
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in (0, 1)]
    assert told[0] == told[1] and set(told[0]) == {nudge.__name__ for nudge in IN_PARTS}
    for nudge in IN_PARTS:
        error = told[0][nudge.__name__]
        assert f"rank 1 differs from rank 0 in the {WORDS[nudge]} before step 2" in error
        ledger = Trajectory.load(tmp_path / nudge.__name__ / "trajectory.ledger")
        assert ledger.next_step == 2  # nothing was released after it was noticed
    assert Trajectory.load(tmp_path / "none" / "trajectory.ledger").next_step == 4


if __name__ == "__main__":
    in_processes(2, lambda rank: in_parts(Path(sys.argv[1]), rank))
