"""Checkpoints that are there whole or not at all: written aside, made durable, then renamed.

Trainer writes into `checkpoint-N` file by file, and removes older ones before the last file is there. A
crash could so leave none to go on from, which loses a first-order run. Here Trainer writes the same
files into `.unfinished/checkpoint-N`; that folder is synced and renamed, and only then do older ones go,
each by one rename.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_dpzero.ledger.log_file import flush_folder
from hf_dpzero.parallel import distributed
from hf_dpzero.run import Run
from hf_dpzero.run_folder.checkpoint_state import (
    REPLACED,
    STATE_NAME,
    UNFINISHED,
    save_state,
    step_of,
)


class CheckpointError(OSError):
    """A checkpoint that could not be written; the ones before it are as they were."""


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


def save_whole(run: Run, state: TrainerState, write: Callable[[str], None]) -> None:
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

    folder = str(run.args.output_dir)
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    draft, place = Path(folder) / UNFINISHED / name, Path(folder) / name
    saves = run.args.should_save
    if saves:
        shutil.rmtree(draft, ignore_errors=True)  # a crash may have left it
    distributed.wait()
    try:
        write(str(draft.parent))
        _name_best(state, folder, name)
        distributed.wait()  # every process writes the state of its random generators
        if saves and draft.is_dir():
            _complete(run, state, draft)
        distributed.wait()
        if saves and draft.is_dir():
            _put(draft, place)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"{place} could not be written ({type(error).__name__}: {error}) and was left out: the "
            f"checkpoints before it and the ledger with its {run.opened.next_step} steps are "
            "whole. Make room (save_total_limit keeps fewer; save_strategy='no' none, which a run of "
            "released numbers can resume without), then resume_from_checkpoint=True."
        ) from error
    if saves:
        _remove_older(run.args.save_total_limit, state, Path(folder), place)
        shutil.rmtree(draft.parent, ignore_errors=True)


def _name_best(state: TrainerState, run: str, name: str) -> None:
    """The best checkpoint's place, as Trainer notes it, which looked for it among the unfinished."""
    if state.best_global_step:
        best = f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if best == name or os.path.isdir(os.path.join(run, best)):
            state.best_model_checkpoint = os.path.join(run, best)


def _complete(run: Run, state: TrainerState, draft: Path) -> None:
    if (draft / TRAINER_STATE_NAME).is_file():
        state.save_to_json(str(draft / TRAINER_STATE_NAME))
    save_state(draft, state.global_step, run.method.state_dict(), run.opened)
    for folder, _, files in os.walk(draft):
        for file in files:
            with open(os.path.join(folder, file), "rb") as opened:
                os.fsync(opened.fileno())
        flush_folder(Path(folder))


def _put(draft: Path, place: Path) -> None:
    if place.exists():
        aside = draft.with_name(REPLACED + place.name)
        shutil.rmtree(aside, ignore_errors=True)
        place.rename(aside)
    draft.rename(place)
    flush_folder(place.parent)


def _remove_older(limit: int | None, state: TrainerState, run: Path, newest: Path) -> None:
    """As Trainer's rotation, but one is gone at once; those of a later step are an earlier attempt's."""
    if limit is None or limit <= 0:
        return
    kept = {newest, Path(state.best_model_checkpoint or newest)}
    found = [path for path in run.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    found.sort(key=lambda path: (step_of(path) <= step_of(newest), step_of(path)))
    spare = [path for path in found if path not in kept]
    for path in spare[: max(0, len(found) - max(limit, len(kept)))]:
        gone = newest.parent / UNFINISHED / path.name
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
