"""What a run leaves on disk beside its results, what of it is private or secret, and its removal.

`datasets` keeps what was made of the training rows (converted, tokenised, encoded) in folders of its
own, outside `output_dir`. A run notes in `_private` which they are, for `hf-dpzero clean`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import datasets
from torch.utils.data import Subset
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_dpzero.ledger.log_file import LedgerError, write_for_owner
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.parallel import collectives
from hf_dpzero.reporting.weights import weight_files
from hf_dpzero.run_folder.checkpoints import UNFINISHED
from hf_dpzero.run_folder.earlier import is_saved
from hf_dpzero.run_folder.keys import FILE, FOLDER, HOLDOUT_FILE

logger = logging.get_logger(__name__)

NOTE = "caches.json"

_CONVERTED = {"arrow", "csv", "generator", "json", "parquet", "text"}
"""Folders of `datasets`' cache for rows that lie in files elsewhere, or that a script makes."""

_CHECKPOINT = f"{PREFIX_CHECKPOINT_DIR}-"
_LOGS = ("runs", "logs", "train_results.json", "all_results.json")


class Left(NamedTuple):
    """What a run left of one kind, for a terminal; `str` reads the disk."""

    kind: str
    holds: str
    paths: list[Path]
    goes: bool = True  # `remove` takes it

    def __str__(self) -> str:
        files = [file for path in self.paths for file in _files(path)]
        size = sum(file.stat().st_size for file in files) / 1e6
        shared = any(file.stat().st_mode & 0o077 for file in files)
        who = "its mode lets others read it" if shared else "its owner alone may read it"
        named = "".join(f"\n    {path}" for path in self.paths)
        return f"  {self.kind} ({self.holds}): {len(files)} files, {size:.1f} MB, {who}{named}"


def note_caches(output_dir: Path, rows: object) -> None:
    """Notes, on rank 0, in which folders `datasets` keeps private rows, and says so."""
    while isinstance(rows, Subset):
        rows = rows.dataset
    files = [Path(file["filename"]) for file in getattr(rows, "cache_files", ())]
    if files and collectives.is_main():
        known = {*_noted(output_dir), *(str(file.resolve().parent) for file in files)}
        write_for_owner(output_dir / FOLDER / NOTE, json.dumps(sorted(known)))
        logger.warning_once(
            f"datasets keeps copies of the private rows outside {output_dir}: `hf-dpzero clean "
            f"{output_dir}` lists them, and removes them with --yes."
        )


def left_on_disk(output_dir: Path) -> list[Left]:
    """Lists what the run in a folder left there and in the cache of `datasets`, by kind."""
    folders = list(map(Path, _noted(output_dir)))
    caches = [path for folder in folders for path in _caches(folder)]
    kept = {path for folder in {*folders} - {*caches} for path in folder.glob("*.arrow")}

    def there(*patterns: str) -> list[Path]:
        return sorted(path for pattern in patterns for path in output_dir.glob(pattern))

    found = [
        Left("caches", "PRIVATE ROWS", caches),
        Left("rows", "PRIVATE ROWS, not a run's to remove", sorted(kept - {*caches}), goes=False),
        Left("keys", "SECRETS, for resuming", there(f"{FOLDER}/*{FILE}*")),
        Left("key", "SECRET, of held-out rows", there(f"{FOLDER}/{HOLDOUT_FILE}"), goes=False),
        Left("checkpoints", "of steps before the end", there(f"{_CHECKPOINT}*", UNFINISHED)),
        Left(
            "arguments", "SECRET where hub_token was given", there(TRAINING_ARGS_NAME), goes=False
        ),
        Left("logs", "times of steps, which tell of batches", there(*_LOGS), goes=False),
    ]
    return [left for left in found if left.paths]


def said(output_dir: Path) -> str:
    """Returns the list of `left_on_disk` for a terminal; "" where nothing was left."""
    lines = [str(left) for left in left_on_disk(output_dir)]
    end = f"`hf-dpzero clean {output_dir}` says what of it may go, and removes it with --yes"
    return "\n".join(["left on disk:", *lines, end]) if lines else ""


def said_of_runs(folder: Path) -> str:
    """Returns, for a terminal, of what kinds the runs below a folder left something."""
    runs = {path.parent for path in folder.rglob(LEDGER_NAME)}
    kinds = {left.kind: left.holds for run in sorted(runs) for left in left_on_disk(run)}
    named = ", ".join(f"{kind} ({holds})" for kind, holds in kinds.items())
    return f"left on disk by its runs: {named or 'nothing'}; of each, `hf-dpzero clean FOLDER` lists it"


def remove(output_dir: Path, *, dry_run: bool, unfinished: bool = False) -> list[Left]:
    """Removes caches of private rows, checkpoints and keys; ledger, report and weights stay.

    `unfinished` gives up a run that has not saved its model. Returns what goes.

    Raises:
      FileNotFoundError: no run's folder.
      LedgerError: the run goes on, or could.
    """
    path = output_dir / LEDGER_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: give the output_dir of a run, with its ledger."
        )
    with closing(Trajectory.open(path)) as ledger:  # held, so that nobody resumes meanwhile
        saved = is_saved(output_dir, ledger) and weight_files(output_dir)
        if not (unfinished or saved):
            raise LedgerError(
                f"{output_dir} holds a run of {ledger.next_step} releases whose model was not saved: it "
                "resumes from its checkpoints and keys. Finish it (--resume_from_checkpoint), or give "
                "it up (--unfinished): what it spent stays spent."
            )
        going = [left for left in left_on_disk(output_dir) if left.goes]
        if not dry_run:
            for place in (place for left in going for place in left.paths):
                _remove(place, output_dir / UNFINISHED)
            shutil.rmtree(output_dir / UNFINISHED, ignore_errors=True)
    return going


def _remove(path: Path, aside: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.name.startswith(_CHECKPOINT):
        # Renamed first: a crash leaves no half checkpoint, over which the folder would be refused.
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)
    else:
        shutil.rmtree(path)


def _noted(output_dir: Path) -> list[str]:
    file = output_dir / FOLDER / NOTE
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def _caches(folder: Path) -> Iterator[Path]:
    """What of a noted folder is made again when asked for: all of it, or what `map` wrote there."""
    root = Path(datasets.config.HF_DATASETS_CACHE).resolve()
    parts = folder.relative_to(root).parts if folder.is_relative_to(root) else ()
    if len(parts) > 1 and parts[0] in _CONVERTED:
        yield from [folder] if folder.is_dir() else ()
    else:  # a data set of the Hub, or one that the user saved
        yield from sorted(folder.glob("cache-*.arrow"))


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
