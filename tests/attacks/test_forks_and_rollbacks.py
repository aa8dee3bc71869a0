"""A copied or rolled-back folder may not release the same batches a second time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from attacked_runs import SAVED, finished, killed
from tiny_runs import build

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.run_folder import keys as run_keys

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {**SAVED, "max_steps": 8}


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """(step, examples) of every batch that is drawn from here on."""
    drawn: list[tuple[int, tuple[int, ...]]] = []
    sample = PoissonSampler.batch

    def recorded(self: PoissonSampler, step: int, key: bytes) -> Any:
        chosen = sample(self, step, key)
        drawn.append((step, tuple(chosen.tolist())))
        return chosen

    monkeypatch.setattr(PoissonSampler, "batch", recorded)
    return drawn


def test_two_copies_of_a_killed_run_draw_other_batches(tmp_path: Path, batches: list) -> None:
    first = killed(tmp_path / "a", max_steps=8)
    second = Path(shutil.copytree(first, tmp_path / "b"))
    resumed = []
    for folder in (first, second):
        batches.clear()
        trainer = build(folder, **SETTINGS)
        trainer.train(resume_from_checkpoint=True)
        resumed.append(dict(batches))
        assert trainer.privacy_report().steps == 8
    assert set(resumed[0]) == set(resumed[1]) == {5, 6, 7}
    for step in resumed[0]:
        assert resumed[0][step] != resumed[1][step]


def test_a_resumed_run_forgets_how_it_drew_before(tmp_path: Path, monkeypatch: Any) -> None:
    keys: list[bytes] = []
    draw = run_keys.new_sampler_key

    def recorded() -> bytes:
        keys.append(draw())
        return keys[-1]

    monkeypatch.setattr(run_keys, "new_sampler_key", recorded)
    folder = killed(tmp_path / "run", max_steps=8)
    build(folder, **SETTINGS).train(resume_from_checkpoint=True)
    assert len(keys) == 2 and keys[0] != keys[1]
    for path in folder.rglob("*"):
        assert path.is_dir() or not any(
            secret in path.read_bytes() for key in keys for secret in (key, key.hex().encode())
        )


def cut_back(folder: Path, steps: int) -> None:
    """Removes the last `steps` records of the ledger."""
    ledger = folder / "trajectory.ledger"
    record = 8 + 8 + 4 + 4
    ledger.write_bytes(ledger.read_bytes()[: -steps * record])


def whole(folder: Path) -> Path:
    finished(folder, **SETTINGS)
    return folder


REPORT, TRAJECTORY, STATE = "privacy_report.json", "trajectory.safetensors", "dpzero_state.json"


@pytest.mark.parametrize("witness", [REPORT, TRAJECTORY, "checkpoint-8/" + STATE,
                                     "checkpoint-6/" + REPORT, "hub/" + TRAJECTORY])  # fmt: skip
def test_a_ledger_that_was_cut_back_is_refused(tmp_path: Path, witness: str) -> None:
    """Whatever alone is left to tell of the steps that were cut."""
    folder = whole(tmp_path / "run")
    shutil.copytree(folder / "checkpoint-8", folder / "hub")
    start = folder / "checkpoint-2"
    for name in (REPORT, TRAJECTORY, STATE):
        for path in folder.rglob(name):
            if path.parent != start and path != folder / witness:
                path.unlink()
    cut_back(folder, 5)
    with pytest.raises(LedgerError, match=r"does not hold.*rolled back"):
        build(folder, **SETTINGS).train(resume_from_checkpoint=str(start))
    (folder / witness).unlink()
    build(folder, **SETTINGS).train(resume_from_checkpoint=str(start))  # nothing tells any more


def test_a_ledger_of_other_releases_is_refused(tmp_path: Path) -> None:
    """As long as the run's own, but not of the steps that made what lies beside it."""
    first = killed(tmp_path / "a", max_steps=8)
    second = Path(shutil.copytree(first, tmp_path / "b"))
    for folder in (first, second):
        build(folder, **SETTINGS).train(resume_from_checkpoint=True)
    shutil.copyfile(first / "trajectory.ledger", second / "trajectory.ledger")
    with pytest.raises(LedgerError, match="another run's"):
        build(second, **SETTINGS).train(resume_from_checkpoint=str(second / "checkpoint-4"))


def test_a_removed_ledger_is_no_fresh_start(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run")
    (folder / "trajectory.ledger").unlink()
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    with pytest.raises(LedgerError, match="removed or rolled back"):
        build(folder, **SETTINGS).train()


def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    folder = whole(tmp_path / "run")
    (folder / REPORT).write_text(json.dumps({"epsilon": 1.0}))
    with pytest.raises(LedgerError, match=r"privacy_report\.json cannot be read"):
        build(folder, **SETTINGS).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert Trajectory.load(folder / "trajectory.ledger").next_step == 8
