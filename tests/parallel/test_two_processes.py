"""Two processes: what both hold alike is compared, the report names them, and one goes on from theirs.

They are started once for all of this file (`in_both`), and once to be killed (`killed`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from several_processes import Stop, in_processes, started
from tiny_runs import build, tiny_data, tiny_model
from transformers import TrainerCallback

from hf_dpzero import PrivacyReport, Trajectory
from hf_dpzero.checks import processes
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Release
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.collectives import RankError
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.verification import report_of

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2}, "ddp_backend": "gloo"}


def buffered() -> torch.nn.Module:
    """With a buffer that is saved, and one that is not."""
    model = tiny_model()
    model.classifier.register_buffer("scales", torch.ones(3))
    model.classifier.register_buffer("cache", torch.ones(3), persistent=False)
    return model


def nudge_weight(trainer: Any) -> None:
    next(trainer.model.parameters()).data.view(-1)[3] += 2.0**-10


def nudge_release(trainer: Any) -> None:
    step, values, rate = trainer.trajectory.releases[-1]
    changed = (values[0] + 2.0**-20, *values[1:])
    trainer.trajectory.appended[-1] = Release(step, changed, rate)


def nudge_rate(trainer: Any) -> None:
    step, values, rate = trainer.trajectory.releases[-1]
    trainer.trajectory.appended[-1] = Release(step, values, rate * (1 + 2.0**-50))


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
    monkeypatch.setattr(collectives, "active", lambda: True)

    def gathered(own: int) -> list[int]:
        """The first rank's number of what is asked: all of it first, then one after another."""
        return [asked.pop(0), own]

    monkeypatch.setattr(collectives, "gather_numbers", gathered)
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
    monkeypatch.setattr(collectives, "active", lambda: True)
    monkeypatch.setattr(collectives, "gather_numbers", lambda own: compared.append(step) or [own])
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


def drifted(folder: Path, rank: int) -> None:
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


SECRET = dict.fromkeys(("testing.insecure_noise_seed", "testing.sampler_key"))
FIRST_IS_BEST = {
    "load_best_model_at_end": True, "metric_for_best_model": "x", "greater_is_better": True,
    "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip
RUNS = {
    "rows": FIRST_IS_BEST,
    "directions": {
        "num_directions": 2, "performance.direction_parallel_size": 2,
        "performance.perturbation_strategy": "whole_model",
    },
    # last: Accelerate keeps its plugin
    "parts": {"fsdp": True, "fsdp_config": {"version": 2}, **FIRST_IS_BEST},
}  # fmt: skip
MESHES = {
    "rows": "2 (2 shares of the rows)",
    "directions": "2 (2 shares of the directions)",
    "parts": "2 (2 shares of the rows, parameters in parts by FSDP2)",
}


def made(folder: Path, name: str, **more):
    return build(folder / name, max_steps=6, microbatch_size=1, **SECRET, **more)


def reported(folder: Path) -> None:
    """Three steps of six, of each run."""
    for name, settings in RUNS.items():
        trainer = made(folder, name, ddp_backend="gloo", **settings)
        trainer.compute_metrics = lambda _, now=trainer: {"x": -now.state.global_step}
        trainer.add_callback(Stop())
        trainer.train()
        trainer.save_model()
        told = trainer.privacy_report().to_dict()
        (folder / f"{name}.rank{trainer.args.process_index}").write_text(json.dumps(told))


SETTINGS: dict[str, Any] = {
    "max_steps": 4, "microbatch_size": 1, "num_directions": 2,
    "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1,
}  # fmt: skip


class Lost(TrainerCallback):
    """Kills all processes of a run when the first one has taken its second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index == 0:
            os.killpg(0, signal.SIGKILL)


def killed(folder: Path, rank: int) -> None:
    given = {"callbacks": [Lost()]}
    build(folder / "lost", trainer_settings=given, ddp_backend="gloo", **SETTINGS).train()


BY_UNIT = {"unit_column": "who", "max_rows_per_unit": 2, "microbatch_size": 1, "max_steps": 4}


def by_unit(folder: Path, **more: Any) -> None:
    """People of one to five rows, zeroth and first order."""
    data = tiny_data(90).add_column("who", [int(i**0.5 * 4) for i in range(90)])
    for method in ("dpzero", "dp-sgd"):
        trainer = build(folder / method, data=data, method=method, **BY_UNIT, **more)
        trainer.train()
        trainer.save_model()


def in_both(folder: Path, rank: int) -> None:
    by_unit(folder / "units", ddp_backend="gloo")
    reported(
        folder
    )  # its last run cuts the model, and Accelerate keeps its plugin: so do the others
    drifted(folder, rank)


def ended(folder: Path, work: str) -> int:
    """Has two processes do one of `WORK`; returns the exit status of the first."""
    with started(__file__, str(folder), work, log=folder / work) as process:
        return process.wait(timeout=900)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("of2")
    assert ended(folder, "in_both") == 0, (folder / "in_both").read_text(errors="replace")[-3000:]
    return folder


@pytest.fixture(scope="module")
def lost(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    assert ended(folder, "killed") == -signal.SIGKILL, (folder / "killed").read_text()[-3000:]
    return folder / "lost"


def links(report: PrivacyReport) -> list[str]:
    return [caveat for caveat in report.caveats if "torch.distributed" in caveat]


def test_one_process_is_told_and_assumes_nothing(tmp_path: Path) -> None:
    """And a shipped report must say what its ledger says."""
    trainer = made(tmp_path, "one")
    assert trainer.privacy_report().processes == ""  # nothing ran yet
    trainer.add_callback(Stop())
    trainer.train()
    trainer.save_model()
    for again in range(2):  # the second resumes, and then has nothing left to do
        resumed = made(tmp_path, "one")
        resumed.train(resume_from_checkpoint=True)
        resumed.save_model()
        report = PrivacyReport.load(tmp_path / "one")
        assert report.processes == "1" and report.steps == 6, again
    assert ("processes", "1 at the start") in report.rows() and links(report) == []
    hub = build_hub_folder(tmp_path / "one", tmp_path / "hub")
    assert report_of(hub).processes == "1"
    shipped = hub / "privacy_report.json"
    own = json.loads(shipped.read_text())
    shipped.write_text(json.dumps({**own, "processes": "2 (2 shares of the rows)"}))
    with pytest.raises(ValueError, match="not of the same run.*processes"):
        report_of(hub)


@pytest.mark.slow
def test_processes_with_parts_stop_where_one_drifts(of_two: Path) -> None:
    told = [json.loads((of_two / f"told.{rank}").read_text()) for rank in (0, 1)]
    assert told[0] == told[1] and set(told[0]) == {nudge.__name__ for nudge in IN_PARTS}
    for nudge in IN_PARTS:
        error = told[0][nudge.__name__]
        assert f"rank 1 differs from rank 0 in the {WORDS[nudge]} before step 2" in error
        ledger = Trajectory.load(of_two / nudge.__name__ / "trajectory.ledger")
        assert ledger.next_step == 2  # nothing was released after it was noticed
    assert Trajectory.load(of_two / "none" / "trajectory.ledger").next_step == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_and_what_is_assumed_of_their_links(of_two: Path, name: str) -> None:
    """In the report of all ranks, and still when one process went on."""
    report = PrivacyReport.load(of_two / name)
    assert report.private and report.processes == MESHES[name]
    assert ("processes", f"{MESHES[name]} at the start") in report.rows()
    (caveat,) = links(report)
    ranks = [json.loads((of_two / f"{name}.rank{rank}").read_text()) for rank in (0, 1)]
    assert ranks[0]["processes"] == ranks[1]["processes"] == report.processes
    assert report_of(of_two / name).shipped_step == (None if name == "directions" else 1)
    rebuilt = tiny_model()
    replay(rebuilt, Trajectory.load(of_two / name / "trajectory.safetensors"))
    saved = load_file(of_two / name / "model.safetensors")
    assert all((p == saved[key]).all() for key, p in rebuilt.named_parameters())

    settings = {"num_directions": 2} if name == "directions" else {}
    resumed = made(of_two, name, **settings)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    report = PrivacyReport.load(of_two / name)
    assert report.steps == 6 and report.processes == MESHES[name] and links(report) == [caveat]
    card = (build_hub_folder(of_two / name, of_two / f"{name}-hub") / "README.md").read_text()
    assert f"| processes | {MESHES[name]} at the start |" in card and caveat in card


@pytest.mark.slow
def test_two_processes_take_the_units_that_one_would(of_two: Path, tmp_path: Path) -> None:
    by_unit(tmp_path)
    for method in ("dpzero", "dp-sgd"):
        saved = [load_file(f / method / "model.safetensors") for f in (of_two / "units", tmp_path)]
        for name, value in saved[0].items():
            torch.testing.assert_close(value, saved[1][name], atol=1e-6, rtol=1e-5)
    logs = [
        Trajectory.load(f / "dpzero" / "trajectory.ledger") for f in (of_two / "units", tmp_path)
    ]
    assert logs[0].releases == logs[1].releases


@pytest.mark.slow
@pytest.mark.parametrize("left", ["checkpoint", "ledger"])
def test_a_run_of_two_killed_processes_goes_on_in_one(
    lost: Path, tmp_path: Path, left: str
) -> None:
    """As if nothing had happened. The other way round: test_distributed.py."""
    folders = tmp_path / "straight", tmp_path / "lost"
    shutil.copytree(lost, folders[1])
    assert Trajectory.load(lost / "trajectory.ledger").next_step == 2
    assert not (lost / "checkpoint-2").exists()  # killed before it
    if left == "ledger":
        shutil.rmtree(folders[1] / "checkpoint-1")
    for folder in folders:
        trainer = build(folder, **SETTINGS)
        trainer.train(resume_from_checkpoint=folder == folders[1] or None)
        trainer.save_model()
    logs = [Trajectory.load(folder / "trajectory.ledger").releases for folder in folders]
    assert logs[0] == logs[1] and len(logs[0]) == 4
    saved = [load_file(folder / "model.safetensors") for folder in folders]
    assert saved[0].keys() == saved[1].keys()
    assert all((saved[0][key] == saved[1][key]).all() for key in saved[0])


WORK = {"in_both": in_both, "killed": killed}

if __name__ == "__main__":
    in_processes(2, lambda rank: WORK[sys.argv[2]](Path(sys.argv[1]), rank))
