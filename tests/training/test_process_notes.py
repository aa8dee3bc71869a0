"""The report says how many processes took which steps, also where another number of them went on."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest
import torch
from several_processes import Stop, in_processes, started
from tiny_runs import build

from hf_dpzero import PrivacyReport
from hf_dpzero.ledger.log_file import LedgerWriteError
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.verification import report_of
from hf_dpzero.training import process_notes
from hf_dpzero.training.process_notes import NOTE_NAME

ALONE = {"processes": 1, "row_shares": 1, "direction_parallel_size": 1, "sharded": False}
TWO = {**ALONE, "processes": 2, "row_shares": 2}
SECRET = {"insecure_noise_seed": None, "sampler_key": None, "microbatch_size": 1}
RUNS = {
    "rows": {},
    "directions": {
        "num_directions": 2, "direction_parallel_size": 2, "perturbation_strategy": "whole_model",
    },
    "parts": {"fsdp": True, "fsdp_config": {"version": 2}},  # last: Accelerate keeps its plugin
}  # fmt: skip


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


def first(step: int, shares: dict) -> dict:
    return {"first_step": step, **shares}


def links(report: PrivacyReport) -> list[str]:
    return [caveat for caveat in report.caveats if "torch.distributed" in caveat]


def test_one_process_is_told_and_assumes_nothing(tmp_path: Path) -> None:
    trainer = made(tmp_path, "one")
    assert trainer.privacy_report().processes == []  # nothing ran yet
    trainer.add_callback(Stop())
    trainer.train()
    trainer.save_model()
    for again in range(2):  # the second resumes, and then has nothing left to do
        resumed = made(tmp_path, "one")
        resumed.train(resume_from_checkpoint=True)
        resumed.save_model()
        report = PrivacyReport.load(tmp_path / "one")
        assert report.processes == [first(0, ALONE)] and report.steps == 6, again
    assert ("processes", "1") in report.rows() and links(report) == []
    assert not any("not recorded" in caveat for caveat in report.caveats)


def test_a_folder_whose_report_is_older_is_shipped_as_it_was(tmp_path: Path, caplog) -> None:
    trainer = made(tmp_path, "one")
    trainer.train()
    trainer.save_model()
    path = tmp_path / "one" / "privacy_report.json"
    old = json.loads(path.read_text())
    assert old.pop("processes") == [first(0, ALONE)]
    path.write_text(json.dumps(old))
    hub = build_hub_folder(tmp_path / "one", tmp_path / "hub")
    assert (
        "written anew" not in caplog.text and "| processes |" not in (hub / "README.md").read_text()
    )
    assert report_of(hub) == PrivacyReport.load(path)


def test_a_note_that_is_not_the_runs_own_says_nothing(tmp_path: Path) -> None:
    """Lost, damaged, of a run with another key, or of steps that this ledger does not hold."""
    trainer = made(tmp_path, "run")
    trainer.add_callback(Stop())
    trainer.train()
    note = tmp_path / "run" / NOTE_NAME
    own = note.read_text()
    run = json.loads(own)["run"]
    for text in (
        None,
        own[:-9],
        own.replace(run, "0" * 32),
        own.replace('"processes": 1', '"processes": 3'),
    ):
        note.unlink() if text is None else note.write_text(text)
        found = process_notes._read(note, run, 3)
        assert found == [], text
    later = {"run": run, "processes": [first(0, TWO), first(4, ALONE)]}
    note.write_text(json.dumps(later))
    assert process_notes._read(note, run, 3) == [first(0, TWO)]
    note.unlink()
    resumed = made(tmp_path, "run")
    resumed.train(resume_from_checkpoint=True)
    report = resumed.privacy_report()
    assert report.processes == [first(3, ALONE)]
    assert ("processes", "steps 0 to 2: not recorded; steps 3 to 5: 1") in report.rows()
    assert sum("steps 0 to 2 is not recorded" in caveat for caveat in report.caveats) == 1


def test_a_run_that_starts_afresh_does_not_go_on_with_a_note(tmp_path: Path) -> None:
    """The same key again, given by hand, in a folder whose ledger is gone."""
    (tmp_path / "run").mkdir()
    trainer = made(tmp_path, "run")
    run = f"{trainer.args.direction_key:032x}"
    stale = {"run": run, "processes": [first(0, TWO)]}
    (tmp_path / "run" / NOTE_NAME).write_text(json.dumps(stale))
    trainer.train()
    assert trainer.privacy_report().processes == [first(0, ALONE)]


def test_a_note_that_cannot_be_written_stops_a_start(tmp_path: Path, monkeypatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(process_notes, "write_atomically", full)
    with pytest.raises(LedgerWriteError, match=f"{NOTE_NAME} cannot be written .No space left"):
        made(tmp_path, "run").train()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("of2")
    with started(__file__, str(folder), log=folder / "log") as process:
        status = process.wait(timeout=900)
    assert status == 0, (folder / "log").read_text(errors="replace")[-3000:]
    return folder


SHARES = {
    "rows": (TWO, "2 (2 shares of the rows)"),
    "directions": (
        {**TWO, "row_shares": 1, "direction_parallel_size": 2},
        "2 (2 shares of the directions)",
    ),
    "parts": (
        {**TWO, "sharded": True},
        "2 (2 shares of the rows, parameters in parts by FSDP2)",
    ),
}
SENT = {
    "rows": (True, False, False),
    "directions": (True, True, False),
    "parts": (True, False, True),
}
"""Sums before noise, losses of single examples, numbers of forward passes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_and_what_is_assumed_of_their_links(of_two: Path, name: str) -> None:
    report = PrivacyReport.load(of_two / name)
    shares, words = SHARES[name]
    assert report.private and report.processes == [first(0, shares)]
    assert ("processes", words) in report.rows()
    (caveat,) = links(report)
    told = (
        "sums of clipped finite differences of losses before noise",
        "losses of single examples",
        "numbers of forward passes",
    )
    assert tuple(words in caveat for words in told) == SENT[name]
    assert "neither encrypted nor authenticated" in caveat and "secret key" in caveat
    ranks = [json.loads((of_two / f"{name}.rank{rank}").read_text()) for rank in (0, 1)]
    assert ranks[0]["processes"] == ranks[1]["processes"] == report.processes


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_another_number_goes_on_and_both_are_told(of_two: Path, name: str) -> None:
    settings = {"num_directions": 2} if name == "directions" else {}
    resumed = made(of_two, name, **settings)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    report = PrivacyReport.load(of_two / name)
    shares, words = SHARES[name]
    assert report.steps == 6 and report.processes == [first(0, shares), first(3, ALONE)]
    assert ("processes", f"steps 0 to 2: {words}; steps 3 to 5: 1") in report.rows()
    assert len(links(report)) == 1
    card = (build_hub_folder(of_two / name, of_two / f"{name}-hub") / "README.md").read_text()
    assert f"| processes | steps 0 to 2: {words}; steps 3 to 5: 1 |" in card
    assert links(report)[0] in card


if __name__ == "__main__":
    assert torch.distributed.is_available()
    in_processes(2, lambda rank: both(Path(sys.argv[1])))
