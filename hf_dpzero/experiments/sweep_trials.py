"""Runs the trials of a sweep, each in a process of its own, and remembers them across interrupts.

Where the trials are secret (`SweepSettings.secret`), everything here happens under D/_private, a
folder of mode 0700 whose name is on no allow list: how many trials there are, their settings, their
ledgers, weights, logs and scores.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dpzero.experiments.sweep import Prepared, SweepSettings
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.ledger.trajectory import LEDGER_NAME
from hf_dpzero.training.run_files import SECRET_FOLDER

STATE_FILE, ROWS_FILE, RESULTS_FILE = "trials.json", "trials.jsonl", "all_results.json"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One finished trial.

    Attributes:
      trial: from 0, in the order of running.
      settings: its point of the grid.
      status: "done" or "failed".
      score: of the metric; None if it failed or the metric is not finite.
      metrics: public evaluation metrics.
      message: the last line of a failed trial's log.
    """

    trial: int
    settings: Mapping[str, Any]
    status: str
    score: float | None = None
    metrics: Mapping[str, float] | None = None
    message: str = ""


class Workspace:
    """The files of one sweep: which trials there are, and which are finished.

    Args:
      settings: the sweep.
      prepared: its noise and metric.

    Raises:
      ValueError: the folder holds another sweep, or other files.
    """

    def __init__(self, settings: SweepSettings, prepared: Prepared) -> None:
        self.settings, self.prepared = settings, prepared
        root = settings.output_dir
        self.private = root / SECRET_FOLDER
        self.base = self.private if settings.secret else root
        self._refuse_foreign()
        for folder in (root, self.private):
            folder.mkdir(parents=True, exist_ok=True)
        self.private.chmod(0o700)
        self.trials: list[dict[str, Any]] = self._drawn()

    def _refuse_foreign(self) -> None:
        """A folder in use is continued only by the same sweep."""
        root, state = self.settings.output_dir, self.base / STATE_FILE
        if not state.exists():
            if root.exists() and any(root.iterdir()):
                raise ValueError(f"output_dir={root} holds other files; name an empty folder.")
            return
        found = json.loads(state.read_text(encoding="utf-8"))["fingerprint"]
        if found != self.settings.fingerprint(self.prepared):
            raise ValueError(
                f"output_dir={root} holds a sweep with other settings; repeat its command to "
                "continue it, or name an empty folder. What it spent stays spent."
            )

    def _drawn(self) -> list[dict[str, Any]]:
        """The settings of all trials; drawn once, before the first of them, and kept."""
        state = self.base / STATE_FILE
        if not state.exists():
            points = self.settings.points
            chosen = draw_points(self.settings) if self.settings.secret else points
            fingerprint = self.settings.fingerprint(self.prepared)
            text = json.dumps({"fingerprint": fingerprint, "trials": chosen}, indent=2)
            write_atomically(state, text + "\n")
        return list(json.loads(state.read_text(encoding="utf-8"))["trials"])

    def folder(self, trial: int) -> Path:
        """Where a trial trains."""
        return self.base / "trials" / f"{trial:03d}"

    def rows(self) -> list[Row]:
        """The finished trials, in order; a line cut short by a crash is dropped."""
        path = self.base / ROWS_FILE
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [Row(**json.loads(line)) for line in lines]

    def append(self, row: Row) -> None:
        """Remembers a finished trial."""
        path = self.base / ROWS_FILE
        whole = "".join(json.dumps(vars(old)) + "\n" for old in self.rows())
        write_atomically(path, whole + json.dumps(vars(row)) + "\n")


def draw_points(settings: SweepSettings) -> list[dict[str, Any]]:
    """A secret random number of points, each uniform on the grid, from the system's entropy."""
    points = settings.points
    return [secrets.choice(points) for _ in range(settings.trials.draw())]


def run_trials(workspace: Workspace, say: Say) -> list[Row]:
    """Runs what is not finished yet and returns every row.

    Of secret trials nothing is said but that they run. Otherwise a failed trial is a row of the
    table; a secret one stops the sweep, because leaving it out could depend on the data.

    Raises:
      ChildProcessError: a secret trial failed.
    """
    done = {row.trial for row in workspace.rows()}
    secret = workspace.settings.secret
    if secret:
        say(f"trials run; how many, and how they score, stays in {workspace.private}")
    for trial, point in enumerate(workspace.trials):
        if trial in done:
            continue
        row = _run_trial(workspace, trial, point)
        if secret and row.status == "failed":
            raise ChildProcessError(
                f"a trial failed; its log is in {workspace.private}. Mend what it says and repeat "
                "the command: the sweep continues with the same trials."
            )
        workspace.append(row)
        if not secret:
            say(_progress(row, workspace))
    return workspace.rows()


def _progress(row: Row, workspace: Workspace) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in row.settings.items())
    score = "failed: " + row.message if row.status == "failed" else f"{row.score}"
    count = f"trial {row.trial + 1} of {len(workspace.trials)}"
    return f"{count}: {settings}: {workspace.prepared.metric} {score}"


def _run_trial(workspace: Workspace, trial: int, point: Mapping[str, Any]) -> Row:
    folder, log = workspace.folder(trial), workspace.base / "trials" / f"{trial:03d}.log"
    folder.parent.mkdir(parents=True, exist_ok=True)
    unless_told = {"tuning": "not_accounted"}  # until the whole sweep is accounted, if it ever is
    extra = {**workspace.prepared.extra, **unless_told, "output_dir": str(folder)}
    recipe = workspace.settings.load(point, extra)
    path = folder.with_suffix(".yaml")
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    resume = _resume(workspace, folder)
    status = 0 if (folder / RESULTS_FILE).exists() else train(path, resume, log)
    if status == 130:
        raise KeyboardInterrupt
    if status != 0:
        message = _last_line(log)
        return Row(trial=trial, settings=dict(point), status="failed", message=message)
    metrics = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    score = score_of(metrics, workspace.prepared.metric)
    public = {k: v for k, v in metrics.items() if k.startswith(("eval_", "zero_shot_"))}
    return Row(trial=trial, settings=dict(point), status="done", score=score, metrics=public)


def _resume(workspace: Workspace, folder: Path) -> bool:
    """Whether a checkpoint continues the trial; a run without one is set aside and begun again.

    What was set aside is never released, so it is not part of what the total epsilon is about.
    """
    if any(folder.glob("checkpoint-*")):
        return True
    if (folder / LEDGER_NAME).exists() and not (folder / RESULTS_FILE).exists():
        aside = workspace.private / "abandoned"
        aside.mkdir(exist_ok=True)
        shutil.move(folder, aside / f"{folder.name}-{len(list(aside.iterdir()))}")
    return False


def train(recipe: Path, resume: bool, log: Path) -> int:
    """`hf-dpzero train` in a child process, its output in `log`; returns the exit status."""
    words = [sys.executable, "-m", "hf_dpzero.cli.main", "train", str(recipe)]
    with log.open("ab") as file:
        rest = ["--resume_from_checkpoint"] if resume else []
        return subprocess.run([*words, *rest], stdout=file, stderr=subprocess.STDOUT).returncode


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


# ------------------------------------------------------------------ scores


def lower_is_better(metric: str) -> bool:
    """Losses and perplexities are minimised, every other metric is maximised.

    >>> lower_is_better("eval_loss"), lower_is_better("eval_accuracy")
    (True, False)
    """
    return metric.endswith(("loss", "perplexity"))


def score_of(metrics: Mapping[str, Any], metric: str) -> float | None:
    """The trial's score; None if it is not finite.

    Raises:
      ValueError: the results do not hold the metric.
    """
    if metric not in metrics:
        known = ", ".join(sorted(name for name in metrics if name.startswith("eval_")))
        raise ValueError(f"metric={metric!r} is not among the results: {known}. Give --metric.")
    value = float(metrics[metric])
    return value if math.isfinite(value) else None


def best_row(rows: list[Row], metric: str) -> Row | None:
    """The row with the best score, the earliest of equals; None if there are no finished rows.

    A score that is not finite is worse than every other.
    """
    sign = -1.0 if lower_is_better(metric) else 1.0
    done = [row for row in rows if row.status == "done"]
    return max(
        done, key=lambda row: -math.inf if row.score is None else sign * row.score, default=None
    )
