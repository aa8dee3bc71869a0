"""Attacks on runs in several processes: ranks that differ, releases that outrun the ledger."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import several_processes as several
import torch

from hf_dpzero import Trajectory
from hf_dpzero.ledger.trajectory import Release
from hf_dpzero.objectives.heads import sequence_classification_objective


def turned(rows: list[Any]) -> Any:
    """A collator that turns rows round on the last rank: who evaluates a row then decides its loss."""
    order = -1 if os.environ["RANK"] == "1" else 1
    return several.padded([{**row, "input_ids": row["input_ids"][::order]} for row in rows])


def rounded(model: Any, inputs: Any) -> Any:
    """A loss that the last rank rounds otherwise, by its last bits."""
    losses = sequence_classification_objective(model, inputs)
    return losses * (1 + 2.0**-22) if os.environ["RANK"] == "1" else losses


def shuffled() -> Any:
    """Rows of one origin in an order of each process' own, as an unseeded shuffle in `map` leaves."""
    rows = several.texts()
    order = range(len(rows)) if os.environ["RANK"] == "0" else reversed(range(len(rows)))
    mixed = rows.select(list(order))
    mixed._fingerprint = rows._fingerprint
    return mixed


def drawn(rows: list[Any]) -> Any:
    """Replaces half the tokens by the global generator's, so that no two draws of a row are alike."""
    batch = several.padded(rows)
    ids = batch["input_ids"]
    random = torch.randint(5, 50, ids.shape)
    return {**batch, "input_ids": torch.where(torch.rand(ids.shape) < 0.5, random, ids)}


def refusals(folder: Path, rank: int) -> dict[str, str]:
    """What each kind of disagreement is refused with, and what it left."""
    told = {}
    runs = {
        "collator": {"collator": turned},
        "objective": {"trainer_settings": {"compute_per_example_loss": rounded}},
        "rows": {"data": shuffled()},
        "strategy": {
            "performance.perturbation_strategy": "stacked" if rank else "whole_model",
            "trainable": "classifier",
            "performance.direction_parallel_size": 1,
        },
    }  # fmt: skip
    for name, settings in runs.items():
        trainer = several.trainer_of(folder, f"refused-{name}", **settings)
        try:
            trainer.train()
            told[name] = "released"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    several.trainer_of(folder, "drawn", collator=drawn).train()
    return told


def outrun(folder: Path, rank: int) -> list[int]:
    """Releases in rank 0's file, on a slow disk, whenever another rank learns of one."""
    append, seen, ledger = Trajectory.append, [], folder / "outrun" / "trajectory.ledger"

    def slow(self: Trajectory, release: Release, wait: bool = True) -> None:
        if rank:
            Trajectory.append = append  # reading a ledger appends too
            seen.append(len(Trajectory.load(ledger).releases))
            Trajectory.append = slow
        else:
            time.sleep(0.5)
        append(self, release, wait)

    Trajectory.append = slow  # type: ignore[method-assign]
    try:
        several.trainer_of(folder, "outrun").train()
    finally:
        Trajectory.append = append  # type: ignore[method-assign]
    return seen


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("of2")
    with several.started(__file__, str(folder), log=folder / "log") as process:
        status = process.wait(timeout=900)
    words = (folder / "log").read_text(errors="replace")[-3000:]
    assert status == 0, words
    return folder, [json.loads((folder / f"told.rank{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("collator", "in the losses of the same rows"),
        ("objective", "in the losses of the same rows"),
        ("rows", "in the rows, their number or order"),
        ("strategy", "in the way to perturb the model"),
    ],
)
def test_what_one_rank_does_otherwise_is_refused_on_all(launched, name: str, words: str):
    """Else an example's part of the sum would follow from its rank, and so from the other examples."""
    folder, told = launched
    for one in told:
        assert (
            words in one["refusals"][name] and "rank 1 differs from rank 0" in one["refusals"][name]
        )
    assert not (folder / f"refused-{name}" / "trajectory.ledger").exists()


@pytest.mark.slow
def test_collators_that_draw_from_global_generators_are_no_disagreement(launched):
    folder, _ = launched
    assert len(Trajectory.load(folder / "drawn" / "trajectory.ledger").releases) == 2


@pytest.mark.slow
def test_no_rank_learns_of_a_release_that_is_not_in_the_ledger(launched):
    """Were rank 0 killed in between, the others would hold a release that nobody paid for."""
    _, told = launched
    assert told[1]["outrun"] == [1, 2]


def everything(folder: Path, rank: int) -> None:
    told = {"outrun": outrun(folder, rank), "refusals": refusals(folder, rank)}
    (folder / f"told.rank{rank}").write_text(json.dumps(told))


if __name__ == "__main__":
    several.in_processes(2, lambda rank: everything(Path(sys.argv[1]), rank))
