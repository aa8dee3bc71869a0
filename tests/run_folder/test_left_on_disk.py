"""What a finished run leaves is named, and `hf-dpzero clean` takes what nothing needs, and only that."""

from __future__ import annotations

import stat
from pathlib import Path

import datasets
import pytest
from tiny_runs import StopAt, build, stopping, tiny_data

from hf_dpzero.cli import main
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.run_folder import left_on_disk
from hf_dpzero.run_folder.keys import FILE, FOLDER

SECRET = {"testing.sampler_key": None, "testing.insecure_noise_seed": None}
SAVES = {"save_strategy": "steps", "save_steps": 3, **SECRET}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(place))
    return place


def read_rows(folder: Path) -> datasets.Dataset:
    """Private rows from a file, as a user reads and maps them."""
    file = folder / "rows.jsonl"
    tiny_data().to_json(file)
    read = datasets.load_dataset("json", data_files=str(file), split="train")
    return read.map(lambda row: {"labels": 1 - row["labels"]})


def kinds(folder: Path) -> set[str]:
    return {left.kind for left in left_on_disk.left_on_disk(folder)}


def test_a_run_on_rows_of_a_file_is_cleaned(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    trainer = build(out, data=read_rows(tmp_path), **SAVES)
    trainer.train()
    trainer.save_model()
    assert kinds(out) == {"caches", "checkpoints", "arguments"}
    copies = list(cache.rglob("*.arrow"))
    assert len(copies) == 2  # the file's rows as Arrow, and what `map` made of them
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert {"trajectory.ledger", "privacy_report.json", "model.safetensors"} <= {
        p.name for p in before
    }

    assert main.main(["clean", str(out)]) == 0  # lists alone
    shown = capsys.readouterr().out
    assert (
        str(copies[0].parent) in shown
        and "PRIVATE ROWS" in shown
        and "nothing was removed" in shown
    )
    assert all(path.exists() for path in copies) and (out / "checkpoint-6").is_dir()

    assert main.main(["clean", str(out), "--yes"]) == 0
    assert not list(cache.rglob("*.arrow")) and (tmp_path / "rows.jsonl").is_file()
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    assert not list(out.glob("checkpoint-*")) and not (out / ".unfinished").exists()
    assert kinds(out) == {"arguments"}
    assert len(read_rows(tmp_path)) == 120  # made again
    assert main.main(["clean", str(out), "--yes"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_rows_that_a_user_saved_stay(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside them lies what `map` made of them, which goes; no folder outside the cache does."""
    saved, out = tmp_path / "csv" / "mine", tmp_path / "out"
    tiny_data().save_to_disk(str(saved))
    rows = datasets.load_from_disk(str(saved)).map(lambda row: {"labels": 1 - row["labels"]})
    made = list(saved.glob("cache-*.arrow"))
    assert len(made) == 1
    trainer = build(out, data=rows, max_steps=2, **SECRET)
    trainer.train()
    trainer.save_model()
    assert main.main(["clean", str(out), "--yes"]) == 0
    assert "not a run's to remove" in capsys.readouterr().out and "rows" in kinds(out)
    assert not made[0].exists() and len(datasets.load_from_disk(str(saved))) == 120


def test_only_its_owner_reads_what_is_secret(tmp_path: Path, cache: Path) -> None:
    given = {"method": "dp-sgd", "sampling": "fixed_batches", "learning_rate": 0.1, **SAVES}
    trainer = build(
        tmp_path, data=read_rows(tmp_path), hub_token="hf_x", trainer_settings=stopping(4), **given
    )
    trainer.train()
    trainer.save_model()
    secret = [*tmp_path.rglob(f"{FOLDER}/*"), *tmp_path.rglob("training_args.bin")]
    assert {path.name for path in secret} == {FILE, left_on_disk.NOTE, "training_args.bin"}
    assert len(secret) >= 4  # arguments lie in checkpoints too
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    left = {entry.kind: str(entry) for entry in left_on_disk.left_on_disk(tmp_path)}
    assert "owner alone" in left["keys"] and "lets others read" in left["caches"]


def test_a_run_that_can_resume_is_left_alone_unless_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build(
        tmp_path, trainer_settings={"callbacks": [StopAt(4, KeyboardInterrupt)]}, **SAVES
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    for words in (["--yes"], []):
        assert main.main(["clean", str(tmp_path), *words]) == 2
        assert "model was not saved" in capsys.readouterr().err
    assert (tmp_path / "checkpoint-3").is_dir()
    assert main.main(["clean", str(tmp_path), "--yes", "--unfinished"]) == 0
    assert not (tmp_path / "checkpoint-3").exists()
    assert Trajectory.load(tmp_path / LEDGER_NAME).next_step == 4  # what was spent stays written


def test_a_run_that_is_being_written_and_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give the output_dir of a run"):
        left_on_disk.remove(tmp_path, dry_run=True)
    build(tmp_path, max_steps=2, **SECRET).train()
    held = Trajectory.open(tmp_path / LEDGER_NAME)
    with pytest.raises(LedgerError, match="is being written"):
        left_on_disk.remove(tmp_path, dry_run=False, unfinished=True)
    held.close()
