"""Runs what a comparison still lacks, and keeps comparison.{json,md,png} true."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.experiments import runner
from hf_dpzero.experiments.aggregate import Record, aggregate
from hf_dpzero.experiments.grid import Run, delta_of
from hf_dpzero.experiments.plots import PLOT_FILE, plot_comparison
from hf_dpzero.experiments.results import Row
from hf_dpzero.experiments.runner import Attempt, Start, Workspace
from hf_dpzero.experiments.tables import TABLE_FILE, markdown, percent
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.reporting.model_card import optional_plot
from hf_dpzero.reporting.privacy_report import versions


def compare(
    folder: Path,
    runs: Sequence[Run],
    *,
    recipe: str,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    retry_failed: bool = False,
    keep_weights: bool = True,
    start: Start | None = None,
) -> Record:
    """Runs those of `runs` that have no row in `folder`.

    Args:
      folder: made, or continued; one comparison at a time.
      runs: the grid.
      recipe: path of the recipe compared with.
      overrides: command-line words that hold for every run.
      jobs: runs at once, >= 1.
      retry_failed: also run again those whose row is no success.
      keep_weights: otherwise the models and checkpoints of finished runs are removed.
      start: starts an attempt; default a training process.

    Returns:
      The results of all of them.

    Raises:
      ValueError: `jobs` < 1.
      OSError: the folder is in use.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1.")
    with runner.locked(folder) as lock, runner.terminated_as_interrupted():
        workspace, settings = Workspace(folder, runs), _settings_of(runs, recipe, overrides, jobs)
        waiting = workspace.pending(retry_failed)
        if len(waiting) < len(runs):
            _say(f"{len(runs) - len(waiting)} of {len(runs)} runs are in the table already")

        def started(attempt: Attempt) -> None:
            continued = f" from {attempt.checkpoint.name}" if attempt.checkpoint else ""
            _say(f"{attempt.folder.name} starts{continued}")

        def ended(attempt: Attempt, row: Row) -> None:
            if row.done and not keep_weights:
                runner.discard_weights(attempt.folder)
            left = len(_write(workspace, settings).pending)
            result = f"{row.status}: {row.error}"
            if row.done and row.score is not None:
                result = f"{row.metric} {percent(row.score)} %"
            _say(f"{attempt.folder.name}: {result} in {row.wall_seconds or 0:.0f} s; {left} to go")

        begin = start or runner.train_in_process(jobs, lock)
        runner.execute(workspace, waiting, begin, jobs=jobs, started=started, ended=ended)
        record = _write(workspace, settings)
        with optional_plot(PLOT_FILE):
            plot_comparison(record, folder)
    return record


def _write(workspace: Workspace, settings: dict[str, Any]) -> Record:
    """Writes comparison.json and comparison.md as the rows are now."""
    keys = [(run.method, run.epsilon) for run in workspace.runs]
    methods = [method for method, _ in keys]
    ordered = sorted(dict.fromkeys(keys), key=lambda key: (methods.index(key[0]), key[1]))
    rows = workspace.rows()
    cells, zero_shot = aggregate(rows, {key: keys.count(key) for key in ordered})
    pending = [run.name for run in workspace.pending()]
    record = Record(settings=settings, rows=rows, cells=cells, zero_shot=zero_shot, pending=pending)
    record.save(workspace.folder)
    write_atomically(workspace.folder / TABLE_FILE, markdown(record))
    return record


def _settings_of(
    runs: Sequence[Run], recipe: str, overrides: Sequence[str] = (), jobs: int = 1
) -> dict[str, Any]:
    """What comparison.json says about the grid: task, methods, epsilons, seeds, guarantee, machine."""
    methods = {run.method: run for run in runs}
    private = [run.recipe for run in methods.values() if run.private]
    return {
        "task": runs[0].recipe.data.task,
        "recipe": recipe,
        "methods": [
            {
                "name": n,
                "source": r.source,
                "method": r.recipe.training.method,
                "private": r.private,
            }
            for n, r in methods.items()
        ],
        "epsilons": sorted({run.epsilon for run in runs if run.private}),
        "seeds": list(dict.fromkeys(run.seed for run in runs)),
        "overrides": list(overrides),
        "delta": delta_of(private[0]) if private else None,
        "neighboring_relation": private[0].training.neighboring_relation if private else None,
        "jobs": jobs,
        "cores": runner.cores(),
        "versions": versions(),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
