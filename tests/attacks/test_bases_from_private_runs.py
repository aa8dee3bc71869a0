"""Attack: train on what came out of a private run, without a word of that run in the second report."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from attacked_runs import SECRET, finished, hub_cache, loaded
from tiny_runs import tiny_model

from hf_dpzero.cli import main
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.provenance import Origin, earlier_runs, trained_as


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished private run on "base", which lies beside it."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_model().save_pretrained(folder / "base")
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    finished(folder / "first", loaded(folder / "base"), **saved)
    return folder / "first"


def runs_of_base(folder: Path, base: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Of the report of a second run, on a model from `base`."""
    model = loaded(base)
    model.config._name_or_path = name or str(base)
    finished(folder / "second", model, max_steps=2, **SECRET)
    return PrivacyReport.load(build_hub_folder(folder / "second", folder / "hub")).earlier_runs


@pytest.mark.parametrize("revision", ["main", "the commit"])
def test_a_base_in_the_hub_cache_is_recognised(
    first: Path, tmp_path: Path, monkeypatch: Any, revision: str
) -> None:
    hub = build_hub_folder(first, tmp_path / "hub1")
    ref = "main" if revision == "main" else "v2"
    snapshot = hub_cache(tmp_path / "cache", "me/run1", hub, monkeypatch, ref)
    if revision == "main":
        (entry,) = runs_of_base(tmp_path, snapshot, "me/run1")
    else:
        (entry,) = earlier_runs([Origin("me/run1", snapshot.name)])
    statement = PrivacyReport.load(first).statement
    assert entry == {"folder": "me/run1", "private": True, "statement": statement}


@pytest.mark.parametrize("lost", ["report", "report and trajectory"])
def test_a_base_that_lost_its_report_is_recognised(first: Path, tmp_path: Path, lost: str) -> None:
    copied = Path(shutil.copytree(first, tmp_path / "copied"))
    (copied / REPORT_FILE).unlink()
    if lost == "report and trajectory":
        (copied / "trajectory.safetensors").unlink()
    (entry,) = runs_of_base(tmp_path, copied)
    assert not entry["private"]
    assert entry["statement"].startswith("NOT PRIVATE as far as can be told: it was trained")


def test_a_checkpoint_that_lost_its_report_is_recognised(first: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(first, tmp_path / "copied"))
    for name in (REPORT_FILE, "trajectory.safetensors"):
        (copied / "checkpoint-1" / name).unlink(missing_ok=True)
    (entry,) = earlier_runs([Origin.of(str(copied / "checkpoint-1"), None)])
    assert entry["private"] and entry["statement"] == PrivacyReport.load(first).statement


def test_rebuilt_weights_bring_report_and_trajectory(first: Path, tmp_path: Path) -> None:
    words = ["replay", "--base", str(first.parent / "base"), "--output_dir", str(tmp_path / "new")]
    assert main.main([*words, "--trajectory", str(first / "trajectory.safetensors")]) == 0
    statement = PrivacyReport.load(first).statement
    (entry,) = runs_of_base(tmp_path, tmp_path / "new")
    assert entry == {"folder": "new", "private": True, "statement": statement}
    assert (trained_as(Origin.of(str(tmp_path / "new"), None)) or "").startswith(statement)


def test_a_part_of_a_run_under_the_report_of_the_whole_is_not_published(
    first: Path, tmp_path: Path
) -> None:
    model = loaded(first.parent / "base")
    replay(model, Trajectory.load(first / "trajectory.safetensors"), upto=1)
    part = Path(shutil.copytree(first, tmp_path / "part"))
    model.save_pretrained(part)
    (entry,) = runs_of_base(tmp_path, part)
    assert not entry["private"]
    assert (trained_as(Origin.of(str(part), None)) or "").startswith("NOT KNOWN")
    with pytest.raises(ValueError, match="not those that"):
        build_hub_folder(part, tmp_path / "hub2")
