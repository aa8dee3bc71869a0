"""Runs what a comparison still lacks, and keeps comparison.{json,md,png} true."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.experiments.aggregate import Record, aggregate
from hf_dpzero.experiments.grid import Run, delta_of
from hf_dpzero.experiments.plots import plot_comparison
from hf_dpzero.experiments.progress import Lines
from hf_dpzero.experiments.results import Row
from hf_dpzero.experiments.runner import (
    Attempt,
    Comparison,
    Start,
    cores,
    discard_weights,
    execute,
    locked,
    terminated_as_interrupted,
    train_in_process,
)
from hf_dpzero.experiments.tables import TABLE_FILE, markdown
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.reporting.privacy_report import versions


def compare(
    folder: Path,
    runs: Sequence[Run],
    settings: dict[str, Any],
    *,
    jobs: int = 1,
    retry_failed: bool = False,
    keep_weights: bool = True,
    start: Start | None = None,
) -> Record:
    """Runs those of `runs` that have no row in `folder`, and returns what all of them came to.

    Args:
      folder: made, or continued; one comparison at a time.
      runs: the grid.
      settings: `settings_of` the grid; kept in comparison.json.
      jobs: runs at once, >= 1.
      retry_failed: also run again those whose row is no success.
      keep_weights: otherwise the models and checkpoints of finished runs are removed.
      start: starts an attempt; default a training process.

    Raises:
      ValueError: `jobs` < 1.
      OSError: the folder is in use.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1.")
    with locked(folder) as lock, terminated_as_interrupted():
        comparison = Comparison(folder, runs)
        waiting = comparison.pending(retry_failed)
        with Lines(len(runs), len(runs) - len(waiting)) as lines:

            def ended(attempt: Attempt, row: Row) -> None:
                if row.done and not keep_weights:
                    discard_weights(attempt.folder)
                lines.ended(attempt, row)
                write(comparison, settings)

            begin = start or train_in_process(jobs, lock)
            execute(comparison, waiting, begin, jobs=jobs, started=lines.started, ended=ended)
        record = write(comparison, settings)
        plot_comparison(record, folder)
    return record


def write(comparison: Comparison, settings: dict[str, Any]) -> Record:
    """Writes comparison.json and comparison.md as the rows are now."""
    record = record_of(comparison, settings)
    record.save(comparison.folder)
    write_atomically(comparison.folder / TABLE_FILE, markdown(record))
    return record


def record_of(comparison: Comparison, settings: dict[str, Any]) -> Record:
    """The rows so far, what they come to, and what is missing."""
    rows = comparison.rows()
    cells, zero_shot = aggregate(rows, planned(comparison.runs))
    pending = [run.name for run in comparison.pending()]
    return Record(settings=settings, rows=rows, cells=cells, zero_shot=zero_shot, pending=pending)


def planned(runs: Sequence[Run]) -> dict[tuple[str, float], int]:
    """(method, epsilon) -> runs; methods as they were given, then by epsilon."""
    methods = list(dict.fromkeys(run.arm.name for run in runs))
    keys = [(run.arm.name, run.epsilon) for run in runs]
    ordered = sorted(dict.fromkeys(keys), key=lambda key: (methods.index(key[0]), key[1]))
    return {key: keys.count(key) for key in ordered}


def settings_of(
    runs: Sequence[Run], *, recipe: str, overrides: Sequence[str] = (), jobs: int = 1
) -> dict[str, Any]:
    """What comparison.json says about the grid: task, arms, epsilons, seeds, guarantee, machine."""
    arms = {run.arm.name: run.arm for run in runs}
    private = [arm for arm in arms.values() if arm.private]
    return {
        "task": runs[0].recipe.data.task,
        "recipe": recipe,
        "arms": [
            {
                "name": arm.name,
                "source": arm.source,
                "method": arm.recipe.training.method,
                "private": arm.private,
            }
            for arm in arms.values()
        ],
        "epsilons": sorted({run.epsilon for run in runs if run.arm.private}),
        "seeds": list(dict.fromkeys(run.seed for run in runs)),
        "overrides": list(overrides),
        "delta": delta_of(private[0]) if private else None,
        "neighboring_relation": (
            private[0].recipe.training.neighboring_relation if private else None
        ),
        "jobs": jobs,
        "cores": cores(),
        "versions": versions(),
    }
