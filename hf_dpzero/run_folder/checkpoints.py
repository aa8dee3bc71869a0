"""Checkpoints of a run: written whole or not at all, and read only as they were written.

Trainer writes into `checkpoint-N` file by file, and removes older ones before the last file is there: a
crash could leave none to go on from, which loses a first-order run. Here Trainer writes the same files
into `.unfinished/checkpoint-N`; that folder is synced and renamed, and only then do older ones go, each
by one rename.

`dpzero_state.json` holds step, grids, the ledger's digest, digests of every file of the folder, and a
digest of itself. A file's digest is SHA-256 of its bytes. Of the weights' files it is that of their
headers, which say where each tensor lies, and `weights` digests the tensors: with both every byte is
named, and the pass over the tensors that a privacy report needs is the only one over them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_dpzero.ledger.log_file import LedgerError, flush_folder, write_atomically
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.parallel import collectives
from hf_dpzero.reporting.privacy_report import REPORT_FILE
from hf_dpzero.reporting.weights import digest_weights, weight_files
from hf_dpzero.run import Run

STATE_NAME = "dpzero_state.json"
UNFINISHED, REPLACED = ".unfinished", "replaced-"

_LOADED = {".safetensors", ".bin", ".pt", ".pth", ".distcp"}
"""Suffixes of what Trainer would load of a checkpoint where it finds it."""

_PIECE = 1 << 24


class CheckpointError(OSError):
    """A checkpoint that could not be written; the ones before it are as they were."""


class DamagedError(LedgerError):
    """A checkpoint that is not what the run wrote; says which file, not yet what to do."""


def step_of(checkpoint: Path) -> int:
    """Returns N of `checkpoint-N`; -1 for another name."""
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """Returns the checkpoints that were written to their end, oldest step first.

    Returns:
      Their folders; of one that a crash left half replaced, the old one.
    """
    aside = (output_dir / UNFINISHED).glob(f"{REPLACED}*")
    found = [*aside, *output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    return sorted((path for path in found if (path / STATE_NAME).is_file()), key=step_of)


def refuse_checkpoint(run: Path, folder: Path) -> None:
    """Refuses to save final weights where a checkpoint lies, or where one of the run would.

    Raises:
      ValueError: says what to use instead.
    """
    named = folder.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-") and step_of(folder) >= 0
    if (named and folder.absolute().parent == run.absolute()) or (folder / STATE_NAME).is_file():
        raise ValueError(
            f"save_model({str(folder)!r}) would put these weights over a checkpoint: give another "
            "folder. A checkpoint has its own report and trajectory: to keep the one that evaluates "
            "best, copy its folder, or publish it by `hf-dpzero push`."
        )


def save_checkpoint(run: Run, state: TrainerState, write: Callable[[str], None]) -> None:
    """Has a checkpoint written aside and put in place; then removes what `save_total_limit` leaves out.

    Guarantee: at every moment `checkpoint-N` is missing, the old one, or all of the new one, and no
    other is removed before it is there. Called on all processes.

    Args:
      run: whose ledger is open.
      state: the Trainer's; its step names the checkpoint.
      write: has Trainer write `checkpoint-N` into a folder, where it finds no older one to remove.

    Raises:
      CheckpointError: a full disk, or a folder that cannot be written.
    """
    from safetensors import SafetensorError

    folder = run.output_dir
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    draft, place = folder / UNFINISHED / name, folder / name
    saves = run.args.should_save
    if saves:
        shutil.rmtree(draft, ignore_errors=True)  # a crash may have left it
    collectives.wait()  # nobody writes while the first process still removes
    try:
        write(str(draft.parent))
        if state.best_global_step:  # Trainer looked for the best one among the unfinished
            best = f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best == name or (folder / best).is_dir():
                state.best_model_checkpoint = os.path.join(folder, best)
        collectives.wait()  # every process writes the state of its random generators
        if saves and draft.is_dir():
            if (draft / TRAINER_STATE_NAME).is_file():  # written before the best one had its name
                state.save_to_json(str(draft / TRAINER_STATE_NAME))
            save_state(draft, state.global_step, run.method.state_dict(), run.opened)
            _flush(draft)
        collectives.wait()
        if saves and draft.is_dir():
            if place.exists():  # an earlier attempt's: renamed, so that a crash leaves one of both
                aside = draft.with_name(REPLACED + place.name)
                shutil.rmtree(aside, ignore_errors=True)
                place.rename(aside)
            draft.rename(place)
            flush_folder(place.parent)
    # torch says RuntimeError of a full disk
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"{place} could not be written ({type(error).__name__}: {error}) and was left out: the "
            f"checkpoints before it and the ledger with its {run.opened.next_step} steps are "
            "whole. Make room (save_total_limit keeps fewer; save_strategy='no' none, which a run of "
            "released numbers can resume without), then resume_from_checkpoint=True."
        ) from error
    if saves:
        remove_older(run.args.save_total_limit, state, Path(folder), place)
        shutil.rmtree(draft.parent, ignore_errors=True)


def _flush(draft: Path) -> None:
    """Syncs files before the rename: else a loss of power could leave the name without the bytes."""
    for folder, _, files in os.walk(draft):
        for file in files:
            with open(os.path.join(folder, file), "rb") as opened:
                os.fsync(opened.fileno())
        flush_folder(Path(folder))


def remove_older(limit: int | None, state: TrainerState, run: Path, newest: Path) -> None:
    """As Trainer's rotation, but one is gone at once; those of a later step are an earlier attempt's."""
    if limit is None or limit <= 0:
        return
    # The best is loaded last.
    kept = {newest.name, Path(state.best_model_checkpoint or newest).name}
    found = [path for path in run.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    found.sort(key=lambda path: (step_of(path) <= step_of(newest), step_of(path)))
    spare = [path for path in found if path.name not in kept]
    for path in spare[: max(0, len(found) - max(limit, len(kept)))]:
        # Renamed first: a crash in the middle of removing leaves no half checkpoint to resume from.
        gone = run / UNFINISHED / path.name
        shutil.rmtree(gone, ignore_errors=True)
        gone.parent.mkdir(exist_ok=True)
        path.rename(gone)
    shutil.rmtree(run / UNFINISHED, ignore_errors=True)


def save_state(
    checkpoint: Path, step: int, space: Mapping[str, Any], trajectory: Trajectory
) -> None:
    """Writes a checkpoint's state, once all of its other files are there.

    Every file is read once, but for the weights' tensors: their digest is taken from the report, for
    which they were read.

    Args:
      checkpoint: a folder with weights and their report.
      step: steps taken.
      space: `state_dict` of the training method.
      trajectory: its first `step` releases are digested.
    """
    report = json.loads((checkpoint / REPORT_FILE).read_text(encoding="utf-8"))
    state = {
        "step": step,
        "space": dict(space),
        "trajectory_digest": trajectory.digest(step),
        "weights": report["weights_digest"],
        "files": dict(_digests(checkpoint)),
    }
    write_atomically(checkpoint / STATE_NAME, _sealed(state))


def _sealed(state: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    return json.dumps({**state, "digest": digest})


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Returns what `save_state` wrote.

    Raises:
      OSError: it cannot be read.
      ValueError: it was changed, or another version of this package wrote it.
    """
    text = (checkpoint / STATE_NAME).read_text(encoding="utf-8")
    state = json.loads(text)
    # Compared as text, so that a space or an order that was changed counts too.
    if not isinstance(state, dict) or not state.pop("digest", None) or _sealed(state) != text:
        raise ValueError("not what this version of hf_dpzero writes, or changed since")
    return state


def _digests(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """(path in the folder, digest) of every file but the state; see the module."""
    weights = set(weight_files(checkpoint))
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path != checkpoint / STATE_NAME:
            yield path.relative_to(checkpoint).as_posix(), file_digest(path, path in weights)


def file_digest(path: Path, header_only: bool = False) -> str:
    """SHA-256 (hex) of a file's bytes, or of a safetensors file's header."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if header_only:
            digest.update(size := file.read(8))
            digest.update(file.read(min(int.from_bytes(size, "little"), path.stat().st_size)))
        else:
            while piece := file.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()


def load_state(checkpoint: str, trajectory: Trajectory, goes_on: bool = True) -> dict[str, Any]:
    """Returns the grid state of a complete checkpoint of this run. Reads each of its files once.

    Args:
      checkpoint: its folder.
      trajectory: the run's ledger.
      goes_on: a run resumes from it; False where only its weights are taken.

    Returns:
      What `save_state` was given as `space`.

    Raises:
      ValueError: the checkpoint was written with save_only_model.
      LedgerError: it was made by other releases than the ledger's first steps, or one of its files is
        not what was written with them: says which, and from where the run can go on.
    """
    try:
        return _checked(Path(checkpoint), trajectory, goes_on)
    except DamagedError as error:
        folder = Path(checkpoint).absolute()
        run = folder.parent if trajectory.path is None else trajectory.path.parent.absolute()
        words = (
            f"It is no checkpoint of the run in {run}; leave it as it is. resume_from_checkpoint=True "
            "goes on from that run's last checkpoint, or from the base model and its ledger."
        )
        if folder.parent == run and step_of(folder) >= 0:
            words = way_out(Path(checkpoint), trajectory)
        raise LedgerError(f"{error} {words}") from error


def _checked(checkpoint: Path, trajectory: Trajectory, goes_on: bool = True) -> dict[str, Any]:
    path = checkpoint / STATE_NAME
    if not path.exists():
        raise DamagedError(f"{checkpoint} is not DPZeroTrainer's: it has no {STATE_NAME}.")
    try:
        state = read_state(checkpoint)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} is not what this run wrote there ({error}).") from error
    if state["trajectory_digest"] != trajectory.digest(state["step"]):
        raise LedgerError(
            f"{checkpoint} was made by another run, or by releases that {LEDGER_NAME} does not hold: "
            "resume from a checkpoint of this ledger, or start afresh in another output_dir."
        )
    _check_files(checkpoint, state)
    if goes_on and SCHEDULER_NAME not in state["files"]:
        raise ValueError(
            f"{checkpoint} has no {SCHEDULER_NAME} (save_only_model=True), so the schedule of learning "
            "rates would start anew: resume from a checkpoint that was saved with save_only_model=False."
        )
    step = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]
    if step != state["step"]:
        raise DamagedError(
            f"{checkpoint / TRAINER_STATE_NAME} says step {step}, and {STATE_NAME} step "
            f"{state['step']}: the steps between would be taken twice or left out."
        )
    return dict(state["space"])


def _check_files(checkpoint: Path, state: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError

    expected, names = state["files"], [path.name for path in weight_files(checkpoint)]
    try:
        found = dict(_digests(checkpoint))
        if missing := sorted(expected.keys() - found.keys()):
            raise DamagedError(f"{checkpoint / missing[0]} is not there any more.")
        for name in found:
            if name in expected and found[name] != expected[name]:
                raise DamagedError(f"{checkpoint / name} is not what this run wrote there.")
            # A file that users put beside the others is theirs, if Trainer does not load it.
            if name not in expected and Path(name).suffix in _LOADED:
                raise DamagedError(f"{checkpoint / name} is not of this run, and would be loaded.")
        weights = digest_weights(checkpoint)
    except OSError as error:
        raise DamagedError(f"{error.filename or checkpoint} cannot be read ({error}).") from error
    except SafetensorError as error:
        raise DamagedError(f"{checkpoint}: {', '.join(names)} is cut short ({error}).") from error
    if weights != state["weights"]:
        raise DamagedError(f"{checkpoint}: {', '.join(names)} is not what this run wrote there.")


def way_out(checkpoint: Path, trajectory: Trajectory) -> str:
    """Says from where a run can go on without this checkpoint, in words."""
    run, found = checkpoint if trajectory.path is None else trajectory.path, None
    for path in reversed(complete_checkpoints(run.parent)):
        with contextlib.suppress(ValueError):
            _checked(path, trajectory)
            found = path
            break
    without = f"remove {checkpoint} and resume with resume_from_checkpoint=True"
    if trajectory.header["replayable"]:
        start = "the base model" if found is None else f"{found.name}, which is whole,"
        return (
            f"What to do: {without}. The run then goes on from {start} and the ledger's "
            f"{trajectory.next_step} steps, exactly and at no cost in privacy."
        )
    if found is None:
        return (
            "What to do: restore it from a copy. No other checkpoint is whole, and without one what the "
            f"{trajectory.next_step} steps spent is lost."
        )
    return (
        f"What to do: restore it from a copy, or {without}. The run then goes on from {found.name}, "
        "which is whole; the updates of later steps are lost, and they stay paid."
    )
