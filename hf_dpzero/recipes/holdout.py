"""Rows of the training data that are held out for private evaluation, by a keyed hash of each.

On which side a row lies follows from the row and the key alone; rows of one unit go together. So one row
more or less changes one side, and training and evaluation together cost it the larger of the two
epsilons. A row put in another's place may change both, where they would add up: such relations are
refused. The guarantee holds for every key; it is kept with the run's keys to find the rows again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dpzero.ledger.log_file import write_for_owner
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.reporting.private_evaluations import EVALUATIONS_FILE
from hf_dpzero.run_folder.earlier import NAME as EARLIER
from hf_dpzero.run_folder.keys import FOLDER, HOLDOUT_FILE
from hf_dpzero.settings.row_groups import column_values
from hf_dpzero.tasks.rows import keyed_digests

if TYPE_CHECKING:
    import datasets

    from hf_dpzero.recipes.recipe import Recipe


def hold_out(splits: datasets.DatasetDict, recipe: Recipe) -> None:
    """Moves `holdout` of the rows from "train" to "private", in place, with the key of the run's folder.

    Raises:
      ValueError: a relation under which a row may change sides; a run that goes on with other rows.
    """
    args, file = recipe.training, recipe.output_dir / FOLDER / HOLDOUT_FILE
    if args.neighboring_relation != "add_or_remove_one":
        raise ValueError(
            f"holdout={recipe.data.holdout} with neighboring_relation={args.neighboring_relation!r}: a "
            "row put in another's place may change both sides, whose epsilons would add up. Use "
            "add_or_remove_one, or split the file yourself."
        )
    resumes = (args.resume_from_checkpoint or "false").lower() != "false"
    if resumes and (recipe.output_dir / LEDGER_NAME).is_file():
        return held_out(splits, recipe.output_dir)
    for folder in (recipe.output_dir, Path(args.extends_run or recipe.output_dir)):
        if (folder / EVALUATIONS_FILE).is_file():
            raise ValueError(
                f"{folder} has private evaluations on record, and a new run with holdout="
                f"{recipe.data.holdout} would have the same rows evaluated as if for the first time: "
                "evaluate after the last run, or take another output_dir."
            )
    if args.extends_run is not None:  # what it trained on is not to be held out now
        held_out(splits, Path(args.extends_run))
        return write_for_owner(file, (Path(args.extends_run) / FOLDER / HOLDOUT_FILE).read_text())
    with args.main_process_first(local=False):  # the others find the key of the first
        asked = {"share": recipe.data.holdout, "unit_column": args.unit_column}
        stored: dict[str, Any] = {"key": secrets.token_hex(32), **asked}
        if file.is_file():
            stored = json.loads(file.read_text())
        if not asked.items() <= stored.items():
            raise ValueError(
                f"{file} is of a run with holdout={stored['share']}, unit_column="
                f"{stored['unit_column']}: rows that it trained on would be held out now. Set them as "
                "they were, or take another output_dir."
            )
        stored["rows"] = _move(splits, **stored)
        _refuse_other_rows(recipe.output_dir, splits["train"], args.unit_column)
        if args.should_save:
            write_for_owner(file, json.dumps(stored))


def held_out(splits: datasets.DatasetDict, folder: Path, unit_column: str | None = None) -> None:
    """Moves the rows that the run in a folder held out from "train" to "private", in place.

    Raises:
      ValueError: it held none out, or they are other ones now, so that some may have been trained on;
        or other rows of a unit of `unit_column` were.
    """
    file = folder / FOLDER / HOLDOUT_FILE
    if not (file.is_file() and (folder / LEDGER_NAME).is_file()):
        raise ValueError(
            f"{file} is missing: the run there held no rows out (holdout: 0.1 of its recipe), or is a "
            "copy without its keys. --private_file names rows to evaluate."
        )
    stored = json.loads(file.read_text())
    if unit_column not in (None, stored["unit_column"]):
        raise ValueError(
            f"unit_column={unit_column!r}, and {file} held rows out with unit_column="
            f"{stored['unit_column']}: other rows of the same units were trained on. Leave it out."
        )
    if _move(splits, **stored) != stored["rows"]:
        raise ValueError(
            f"the rows that {file} knows are not those of the training data now: it was changed, or is "
            "read otherwise. Load it as it was when the run began; else rows that were trained on would "
            "be evaluated."
        )
    _refuse_other_rows(folder, splits["train"], stored["unit_column"])


def _refuse_other_rows(folder: Path, train: datasets.Dataset, column: str | None) -> None:
    """Refuses rows held out where a run in the folder, or one set aside there, was not on the others.

    Of one key, sides of other shares differ in number, so numbers are compared.
    """
    kept = len(train) if column is None else len(set(column_values(train, column) or ()))
    for ledger in (folder / LEDGER_NAME, *folder.glob(f"{EARLIER}*/{LEDGER_NAME}")):
        if not ledger.is_file():
            continue
        trained = Trajectory.load(ledger).header["plan"]["sampler"]["num_examples"]
        if trained != kept:
            raise ValueError(
                f"{ledger} is of a run on {trained} units of privacy, and holdout leaves {kept} for "
                "training: rows that it trained on would be evaluated. Take another output_dir, or to "
                "evaluate, --private_file with other rows."
            )


def _move(
    splits: datasets.DatasetDict, key: str, share: float, unit_column: str | None, rows: str = ""
) -> str:
    """Moves each row, or unit, with probability `share`; returns a keyed digest of all rows' sides."""
    train = splits["train"]
    units = None if unit_column is None else column_values(train, unit_column)
    words = keyed_digests(key, train if units is None else units)
    aside = np.array([int.from_bytes(word[:8], "big") < share * 2.0**64 for word in words], bool)
    splits["train"] = train.select(np.flatnonzero(~aside))
    splits["private"] = train.select(np.flatnonzero(aside))
    if not 0 < aside.sum() < len(train):
        raise ValueError(
            f"holdout={share} of {len(train)} rows leaves none on one side: take another share."
        )
    return hashlib.sha256(b"".join(words)).hexdigest()
