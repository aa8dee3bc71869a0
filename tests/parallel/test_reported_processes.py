"""The report says in how many processes a run began, also where another number of them went on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from several_processes import Stop, in_processes, started
from tiny_runs import build

from hf_dpzero import PrivacyReport
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.verification import report_of

SECRET = {"insecure_noise_seed": None, "sampler_key": None, "microbatch_size": 1}
RUNS = {
    "rows": {},
    "directions": {
        "num_directions": 2, "direction_parallel_size": 2, "perturbation_strategy": "whole_model",
    },
    "parts": {"fsdp": True, "fsdp_config": {"version": 2}},  # last: Accelerate keeps its plugin
}  # fmt: skip
WORDS = {
    "rows": "2 (2 shares of the rows)",
    "directions": "2 (2 shares of the directions)",
    "parts": "2 (2 shares of the rows, parameters in parts by FSDP2)",
}


def made(folder: Path, name: str, **more):
    return build(folder / name, max_steps=6, **SECRET, **more)


def both(folder: Path) -> None:
    """What two processes do: three steps of six, of each run."""
    for name, settings in RUNS.items():
        trainer = made(folder, name, ddp_backend="gloo", **settings)
        trainer.add_callback(Stop())
        trainer.train()
        trainer.save_model()
        told = trainer.privacy_report().to_dict()
        (folder / f"{name}.rank{trainer.args.process_index}").write_text(json.dumps(told))


def links(report: PrivacyReport) -> list[str]:
    return [caveat for caveat in report.caveats if "torch.distributed" in caveat]


def test_one_process_is_told_and_assumes_nothing(tmp_path: Path) -> None:
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


def test_a_shipped_report_says_what_the_ledger_says(tmp_path: Path) -> None:
    trainer = made(tmp_path, "one")
    trainer.train()
    trainer.save_model()
    path = tmp_path / "one" / "privacy_report.json"
    own = json.loads(path.read_text())
    hub = build_hub_folder(tmp_path / "one", tmp_path / "hub")
    assert report_of(hub).processes == own["processes"] == "1"
    shipped = hub / path.name
    shipped.write_text(json.dumps({**own, "processes": "2 (2 shares of the rows)"}))
    with pytest.raises(ValueError, match="not of the same run.*processes"):
        report_of(hub)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("of2")
    with started(__file__, str(folder), log=folder / "log") as process:
        status = process.wait(timeout=900)
    assert status == 0, (folder / "log").read_text(errors="replace")[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_and_what_is_assumed_of_their_links(of_two: Path, name: str) -> None:
    """In the report of all ranks, and still when one process went on."""
    report = PrivacyReport.load(of_two / name)
    assert report.private and report.processes == WORDS[name]
    assert ("processes", f"{WORDS[name]} at the start") in report.rows()
    (caveat,) = links(report)
    ranks = [json.loads((of_two / f"{name}.rank{rank}").read_text()) for rank in (0, 1)]
    assert ranks[0]["processes"] == ranks[1]["processes"] == report.processes

    settings = {"num_directions": 2} if name == "directions" else {}
    resumed = made(of_two, name, **settings)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    report = PrivacyReport.load(of_two / name)
    assert report.steps == 6 and report.processes == WORDS[name] and links(report) == [caveat]
    card = (build_hub_folder(of_two / name, of_two / f"{name}-hub") / "README.md").read_text()
    assert f"| processes | {WORDS[name]} at the start |" in card and caveat in card


if __name__ == "__main__":
    assert torch.distributed.is_available()
    in_processes(2, lambda rank: both(Path(sys.argv[1])))
