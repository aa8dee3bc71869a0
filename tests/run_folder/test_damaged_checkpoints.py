"""A checkpoint is resumed as it was written, in every file, or refused in words without a loss."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_runs import in_child
from tiny_runs import build, same, tiny_model, weights

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.reporting import hub
from hf_dpzero.run_folder import checkpoints

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "logging_steps": 1,
}
FIRST_ORDER: dict[str, Any] = {**SETTINGS, "method": "dp-adamw", "clip": 0.5}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    """A run of six steps with checkpoints 2, 4 and 6, and its weights."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    trainer = build(folder, **SETTINGS)
    trainer.train()
    return folder, weights(trainer.model)


def cut(run: tuple[Path, dict[str, Any]], place: Path) -> Path:
    """A copy that was killed after step 5: checkpoint 4 is its last one."""
    folder = Path(shutil.copytree(run[0], place / "run"))
    shutil.rmtree(folder / "checkpoint-6")
    ledger = folder / LEDGER_NAME
    ledger.write_bytes(ledger.read_bytes()[:-24])
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(folder: Path, words: str, resume: Any = True, **settings: Any) -> str:
    """The message of a resume that is refused, after which everything is as it was and may go on."""
    before, trainer = files_of(folder), build(folder, **{**SETTINGS, **settings})
    with pytest.raises((LedgerError, ValueError), match=words) as error:
        trainer.train(resume_from_checkpoint=resume)
    assert files_of(folder) == before
    Trajectory.open(folder / LEDGER_NAME).close()  # nobody holds it
    return str(error.value)


def goes_on(folder: Path, expected: dict[str, Any]) -> None:
    trainer = build(folder, **SETTINGS)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.privacy_report().steps == 6
    assert same(weights(trainer.model), expected)


NAMES = (
    "config.json", "dpzero_state.json", "model.safetensors", "optimizer.pt", "privacy_report.json",
    "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin",
    "trajectory.safetensors",
)  # fmt: skip


def test_these_are_all_files(finished: Any) -> None:
    assert sorted(p.name for p in (finished[0] / "checkpoint-4").iterdir()) == sorted(NAMES)


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "first byte": lambda path: flip(path, 0.0),
    "a byte in the middle": lambda path: flip(path, 0.5),
    "last byte": lambda path: flip(path, 1.0),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe" * 40),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", NAMES)
def test_any_file_that_is_not_as_it_was_written(finished: Any, tmp_path: Path, name: str) -> None:
    folder = cut(finished, tmp_path)
    checkpoint, log = folder / "checkpoint-4", Trajectory.load(folder / LEDGER_NAME)
    content = (checkpoint / name).read_bytes()
    checkpoints.load_state(str(checkpoint), log)
    for damage, do in DAMAGES.items():
        do(checkpoint / name)
        with pytest.raises(LedgerError) as error:
            checkpoints.load_state(str(checkpoint), log)
        said = str(error.value)
        assert name in said and f"remove {checkpoint}" in said and "no cost in privacy" in said, (
            damage
        )
        assert "checkpoint-2, which is whole" in said, damage
        (checkpoint / name).write_bytes(content)


RECORDS = ("dpzero_state.json", "privacy_report.json", "trajectory.safetensors")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in (*RECORDS, "model.safetensors")
        for damage in ("a byte in the middle", "empty")
    ],
)
def test_train_refuses_the_last_checkpoint(
    finished: Any, tmp_path: Path, name: str, damage: str
) -> None:
    """Rather than choosing an older one in silence."""
    folder = cut(finished, tmp_path)
    DAMAGES[damage](folder / "checkpoint-4" / name)
    said = refused(folder, name.replace(".", r"\."))
    assert "checkpoint-4" in said and "remove" in said and "no cost in privacy" in said
    assert "checkpoint-2, which is whole" in said and "rolled back" not in said


@pytest.mark.parametrize("left", [["checkpoint-2"], []])
def test_without_the_damaged_folder_the_run_goes_on_exactly(
    finished: Any, tmp_path: Path, left: list[str]
) -> None:
    """From an older checkpoint, or from the base alone: the bits of the run that was not interrupted."""
    folder = cut(finished, tmp_path)
    flip(folder / "checkpoint-4" / "model.safetensors", 0.5)
    if not left:
        shutil.rmtree(folder / "checkpoint-2")
    said = refused(folder, r"model\.safetensors")
    assert (left[0] if left else "the base") in said
    shutil.rmtree(folder / "checkpoint-4")
    goes_on(folder, finished[1])


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("pytorch_model.bin", True),
        ("second/adapter_model.safetensors", True),
        ("pytorch_model_fsdp_0/__0_0.distcp", True),
        ("scaler.pt", True),
        ("eval_results.json", False),
    ],
)
def test_files_that_were_added(finished: Any, tmp_path: Path, name: str, is_refused: bool) -> None:
    """What Trainer would load is refused; somebody's results may lie there."""
    folder = cut(finished, tmp_path)
    path = folder / "checkpoint-4" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"{}")
    if is_refused:
        refused(folder, f"{path.name} is not")
    else:
        goes_on(folder, finished[1])


def test_a_nested_adapter_is_looked_at(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def model() -> Any:
        adapter = LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
        found = get_peft_model(tiny_model(), adapter)
        found.add_adapter("second", LoraConfig(r=2, target_modules=["query"]))
        return found

    build(tmp_path, model(), **SETTINGS).train()
    nested = tmp_path / "checkpoint-6" / "second" / "adapter_model.safetensors"
    flip(nested, 1.0)
    trainer = build(tmp_path, model(), **SETTINGS)
    with pytest.raises(LedgerError, match=r"second.adapter_model\.safetensors is not"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("shard", [1, 2])
def test_weights_in_several_files(tmp_path: Path, shard: int) -> None:
    """Each is named with the others: their tensors have one digest."""
    trainer = build(tmp_path, **SETTINGS)
    save = trainer.model.save_pretrained
    trainer.model.save_pretrained = lambda *a, **k: save(*a, **{**k, "max_shard_size": "8KB"})
    trainer.train()
    shards = sorted((tmp_path / "checkpoint-6").glob("model-*.safetensors"))
    assert len(shards) > 1
    flip(shards[shard - 1], 1.0)
    refused(tmp_path, shards[shard - 1].name.replace(".", r"\."))


def test_a_number_that_was_wrong_when_it_was_written(finished: Any, tmp_path: Path) -> None:
    """All digests agree, and Trainer would go on from another step."""
    folder = cut(finished, tmp_path)
    checkpoint = folder / "checkpoint-4"
    path = checkpoint / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "global_step": 3}))
    space = json.loads((checkpoint / checkpoints.STATE_NAME).read_text())["space"]
    (checkpoint / checkpoints.STATE_NAME).unlink()
    log = Trajectory.load(folder / LEDGER_NAME)
    checkpoints.save_state(checkpoint, 4, space, log)
    refused(folder, r"trainer_state\.json says step 3, and dpzero_state\.json step 4")


def test_a_checkpoint_of_another_run(finished: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    build(other, **{**SETTINGS, "max_steps": 4}).train()
    folder = cut(finished, tmp_path)
    before = files_of(folder)
    with pytest.raises(LedgerError, match="made by another run"):
        build(folder, **SETTINGS).train(resume_from_checkpoint=str(other / "checkpoint-4"))
    assert files_of(folder) == before


@pytest.mark.parametrize("given", ["the run's folder", "a plain Trainer's checkpoint"])
def test_nobody_is_told_to_remove_what_is_no_checkpoint_of_the_run(
    finished: Any, tmp_path: Path, given: str
) -> None:
    """Whoever followed that advice removed the ledger, and the next message said nothing was spent."""
    folder = cut(finished, tmp_path)
    plain = tmp_path / "plain" / "checkpoint-4"
    shutil.copytree(folder / "checkpoint-4", plain)
    (plain / checkpoints.STATE_NAME).unlink()
    words = refused(
        folder, "leave it as it is", str(plain if given.startswith("a plain") else folder)
    )
    assert "remove " not in words and "resume_from_checkpoint=True" in words


def test_a_state_without_digests_of_all_files(finished: Any, tmp_path: Path) -> None:
    folder = cut(finished, tmp_path)
    path = folder / "checkpoint-4" / checkpoints.STATE_NAME
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "files": {"weights": "0", "optimizer": "0"}}))
    refused(folder, r"dpzero_state\.json cannot be read \(not what this version")


@pytest.mark.parametrize("older", [True, False])
def test_first_order_runs_are_told_what_is_left(tmp_path: Path, older: bool) -> None:
    build(tmp_path, **FIRST_ORDER).train()
    flip(tmp_path / "checkpoint-6" / "optimizer.pt", 0.5)
    flip(tmp_path / "checkpoint-4" / "optimizer.pt", 0.5)
    if not older:
        shutil.rmtree(tmp_path / "checkpoint-2")
    said = refused(tmp_path, r"optimizer\.pt", **FIRST_ORDER)
    assert ("checkpoint-2, which is whole" in said) == older
    assert ("updates of later steps are lost" in said) == older
    assert ("restore" in said) and "no cost in privacy" not in said


@pytest.mark.parametrize("place", ["checkpoint-4", "checkpoint-9"])
def test_the_final_weights_do_not_go_into_a_checkpoint(
    finished: Any, tmp_path: Path, place: str
) -> None:
    """A folder named for the best step, taken for a place of one's own, was a checkpoint's."""
    folder = Path(shutil.copytree(finished[0], tmp_path / "run"))
    trainer = build(folder, **SETTINGS)
    trainer.train(resume_from_checkpoint=True)
    before = files_of(folder)
    with pytest.raises(ValueError, match=rf"save_model\(.*{place}.*hf-dpzero push"):
        trainer.save_model(str(folder / place))
    assert files_of(folder) == before
    trainer.save_model(str(folder / "best-4"))
    shipped = hub.push(
        str(folder / "checkpoint-4"), "somebody/some", dry_run=True, allow_not_private=True
    )
    assert (Path(shipped) / "trajectory.safetensors").is_file()


def test_a_folder_that_became_read_only(finished: Any) -> None:
    """For a user without rights, whom root becomes for the while: nothing is released or changed."""
    with tempfile.TemporaryDirectory() as place:
        folder = cut(finished, Path(place))
        for path in (Path(place), *Path(place).rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)

        def work() -> str:
            codecs.lookup("latin1")  # of torch.load; root's Python may not be readable below
            if os.geteuid() == 0:
                os.seteuid(65534)
            try:
                build(folder, **SETTINGS).train(resume_from_checkpoint=True)
            except LedgerError as error:
                return str(error)
            return "not refused"

        before = files_of(folder)
        ended, told = in_child(work)
        words = "could not be written (Permission denied), so it was not released"
        assert ended == 0 and words in told["result"], told
        assert files_of(folder) == before
        for path in (Path(place), *Path(place).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        goes_on(folder, finished[1])
