"""How many processes take a run's steps: a note beside the ledger, an entry for each start that differs.

The ledger itself says nothing of it: its bytes are the same whatever the number of processes, and any
number goes on with it. The note is public, and only the privacy report reads it. A run whose note is
missing, damaged or of another run goes on all the same; its report says that those steps are not
recorded. The note tells where a run was interrupted only if other processes went on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.ledger.log_file import LedgerWriteError, write_atomically
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.reporting.process_words import check_processes
from hf_dpzero.training import distributed

NOTE_NAME = "trajectory.processes.json"


def note_start(trainer: Any, ledger: Trajectory, resumes: bool) -> list[dict[str, Any]]:
    """Adds this start of a run to its note, before it releases anything. Called on all processes.

    Args:
      trainer: a `DPZeroTrainer` whose split is chosen.
      ledger: of the run, just opened; a finished one takes no step, and nothing is added.
      resumes: False for a run that starts, which replaces what lies there.

    Returns:
      Entries of `PrivacyReport.processes`, the same on all ranks.

    Raises:
      LedgerWriteError: the note cannot be written; on all ranks.
    """
    path = Path(trainer.output_dir) / NOTE_NAME
    run, taken = str(ledger.header["direction_key"]), ledger.next_step

    def written() -> list[dict[str, Any]]:
        entries = _read(path, run, taken) if resumes else []
        if taken < trainer.plan.steps:
            entries = added(entries, layout(trainer), taken)
            _write(path, json.dumps({"run": run, "processes": entries}) + "\n")
        return entries

    return distributed.shared(distributed.on_main(written, list))


def layout(trainer: Any) -> dict[str, Any]:
    """How a run's processes share rows, directions and parameters: an entry without its first step."""
    split = trainer.split
    return {
        "processes": split.rows * split.directions,
        "row_shares": split.rows,
        "direction_parallel_size": split.directions,
        "sharded": bool(trainer.shards),
    }


def added(
    entries: Sequence[Mapping[str, Any]], shares: Mapping[str, Any], step: int
) -> list[dict[str, Any]]:
    """The entries, and one for a start at `step` if it shares the work otherwise than the last one.

    >>> one, two = ({"processes": n} for n in (1, 2))
    >>> added(added(added([], two, 0), two, 3), one, 5)
    [{'first_step': 0, 'processes': 2}, {'first_step': 5, 'processes': 1}]
    """
    known = [dict(entry) for entry in entries]
    if known and {k: v for k, v in known[-1].items() if k != "first_step"} == dict(shares):
        return known
    return [*known, {"first_step": step, **shares}]


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise LedgerWriteError(
            f"{path} cannot be written ({error.strerror}), so the report could not say how many "
            "processes ran: make room, or give an output_dir that can be written."
        ) from error


def _read(path: Path, run: str, taken: int) -> list[dict[str, Any]]:
    """The entries of a run's note; none for a run that starts, and for a note that is not its own."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        entries = [entry for entry in note["processes"] if entry["first_step"] <= taken]
        check_processes(entries, taken)
        return entries if note["run"] == run else []
    except (OSError, ValueError, LookupError, TypeError):
        return []
