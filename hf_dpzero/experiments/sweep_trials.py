"""Runs the trials of a sweep, and remembers across interrupts which ones there are.

Where the trials are secret (`SweepSettings.secret`), everything here happens under D/_private, a
folder of mode 0700 whose name is on no allow list: how many trials there are, their settings, their
ledgers, weights, logs and scores.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
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


def _open_workspace(settings: SweepSettings, prepared: Prepared) -> Workspace:
    """The files of a sweep, made or continued; secret trials are drawn once, before the first of them.

    A run that cannot be continued is moved to D/_private/abandoned and begun again: it is never
    released, so the total epsilon does not speak of it.
    """
    root = settings.output_dir
    private = root / SECRET_FOLDER
    base = private if settings.secret else root
    state, fingerprint = base / "trials.json", settings.fingerprint(prepared)
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
        drawn = _draw_points(settings) if settings.secret else settings.points
        text = json.dumps({"fingerprint": fingerprint, "trials": drawn}, indent=2)
        write_atomically(state, text + "\n")
    trials = json.loads(state.read_text(encoding="utf-8"))["trials"]
    extra = {**prepared.extra, "tuning": "not_accounted"}  # until the whole sweep is accounted
    runs = []
    for trial, point in enumerate(trials):
        recipe = settings.load(point, extra)
        run = Run(
            name=f"{trial:03d}",
            method=recipe.training.method,
            source=settings.recipe,
            epsilon=math.inf,
            recipe=recipe,
            trial=trial,
            point=point,
            metric=prepared.metric,
        )
        runs.append(run)
    folders, abandoned = ("trials", "trials", "trials"), private / "abandoned"
    return Workspace(base, runs, rows="trials.jsonl", folders=folders, abandoned=abandoned)


def _draw_points(settings: SweepSettings) -> list[dict[str, Any]]:
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
      ValueError: the folder holds another sweep, or other files.
      OSError: the folder is in use.
    """
    workspace = _open_workspace(settings, prepared)
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
