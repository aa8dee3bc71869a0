"""Runs the trials of a sweep, and remembers across interrupts which ones there are.

Where the trials are secret (`SweepSettings.secret`), everything here happens under D/_private, a
folder of mode 0700 whose name is on no allow list: how many trials there are, their settings, their
ledgers, weights, logs and scores.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from hf_dpzero.experiments.grid import Run
from hf_dpzero.experiments.results import Row
from hf_dpzero.experiments.runner import (
    Attempt,
    Workspace,
    execute,
    locked,
    terminated_as_interrupted,
    train_in_process,
)
from hf_dpzero.experiments.sweep import Prepared, SweepSettings
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.training.run_files import SECRET_FOLDER

STATE_FILE, ROWS_FILE = "trials.json", "trials.jsonl"


def open_workspace(settings: SweepSettings, prepared: Prepared) -> Workspace:
    """The files of a sweep, made or continued; secret trials are drawn once, before the first of them.

    A run that cannot be continued is moved to D/_private/abandoned and begun again: it is never
    released, so the total epsilon does not speak of it.

    Args:
      settings: the sweep.
      prepared: its noise and metric.

    Returns:
      The workspace of all trials.

    Raises:
      ValueError: the folder holds another sweep, or other files.
    """
    root = settings.output_dir
    private = root / SECRET_FOLDER
    base = private if settings.secret else root
    state, fingerprint = base / STATE_FILE, settings.fingerprint(prepared)
    if not state.exists():
        inside = list(root.iterdir()) if root.exists() else []
        if any(path != private or any(private.iterdir()) for path in inside):
            raise ValueError(f"output_dir={root} holds other files; name an empty folder.")
    elif json.loads(state.read_text(encoding="utf-8"))["fingerprint"] != fingerprint:
        raise ValueError(
            f"output_dir={root} holds a sweep with other settings; repeat its command to "
            "continue it, or name an empty folder. What it spent stays spent."
        )
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    if not state.exists():
        drawn = draw_points(settings) if settings.secret else settings.points
        text = json.dumps({"fingerprint": fingerprint, "trials": drawn}, indent=2)
        write_atomically(state, text + "\n")
    trials = json.loads(state.read_text(encoding="utf-8"))["trials"]
    runs = [_run(settings, prepared, trial, point) for trial, point in enumerate(trials)]
    folders = ("trials", "trials", "trials")
    abandoned = private / "abandoned"
    return Workspace(base, runs, rows=ROWS_FILE, folders=folders, abandoned=abandoned)


def _run(settings: SweepSettings, prepared: Prepared, trial: int, point: dict[str, Any]) -> Run:
    unless_told = {"tuning": "not_accounted"}  # until the whole sweep is accounted, if it ever is
    recipe = settings.load(point, {**prepared.extra, **unless_told})
    return Run(
        name=f"{trial:03d}",
        method=recipe.training.method,
        source=settings.recipe,
        epsilon=math.inf,
        recipe=recipe,
        trial=trial,
        point=point,
        metric=prepared.metric,
    )


def draw_points(settings: SweepSettings) -> list[dict[str, Any]]:
    """A secret random number of points, each uniform on the grid, from the system's entropy."""
    points = settings.points
    return [secrets.choice(points) for _ in range(settings.trials.draw())]


def run_trials(
    settings: SweepSettings, prepared: Prepared, say: Callable[[str], None]
) -> Workspace:
    """Runs what is not finished yet.

    Of secret trials nothing is said but that they run. Otherwise a failed trial is a row of the
    table; a secret one stops the sweep, because leaving it out could depend on the data.

    Args:
      settings: the sweep.
      prepared: its noise and metric.
      say: takes lines for the user.

    Returns:
      The workspace with the rows of all trials.

    Raises:
      ChildProcessError: a secret trial failed.
      ValueError: see `open_workspace`.
      OSError: the folder is in use.
    """
    workspace = open_workspace(settings, prepared)
    private = settings.output_dir / SECRET_FOLDER

    def check(row: Row) -> None:
        if settings.secret and not row.done:
            raise ChildProcessError(
                f"a trial failed; its log is in {private}. Mend what it says and repeat "
                "the command: the sweep continues with the same trials."
            )

    def ended(attempt: Attempt, row: Row) -> None:
        if not settings.secret:
            point = ", ".join(f"{name}={value}" for name, value in (row.settings or {}).items())
            result = f"{row.score}" if row.done else f"failed: {row.error}"
            trial = f"trial {(row.trial or 0) + 1} of {len(workspace.runs)}"
            say(f"{trial}: {point}: {prepared.metric} {result}")

    if settings.secret:
        say(f"trials run; how many, and how they score, stays in {private}")
    with locked(private) as lock, terminated_as_interrupted():
        start = train_in_process(1, lock)
        execute(workspace, workspace.pending(), start, check=check, ended=ended)
    return workspace


def best_row(rows: Sequence[Row], metric: str) -> Row | None:
    """The row with the best score, the earliest of equals; a loss or perplexity is minimised.

    Args:
      rows: of the trials; a score that is not finite is worse than every other.
      metric: what scores them.

    Returns:
      None if there are no finished rows.
    """
    sign = -1.0 if metric.endswith(("loss", "perplexity")) else 1.0
    done = [row for row in rows if row.done]
    return max(
        done, key=lambda row: -math.inf if row.score is None else sign * row.score, default=None
    )
