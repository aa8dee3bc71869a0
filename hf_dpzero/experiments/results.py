"""One row for each finished run, in a file that only grows; and how a finished process becomes one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_dpzero.experiments.grid import Run
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.reporting.hub import public_results
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.wording import round_up
from hf_dpzero.values import decode, encode

RESULTS_FILE = "all_results.json"
DONE = "done"
STATUSES = {
    DONE: "finished, and private as claimed where the method is private",
    "not_private": "finished, but its privacy report does not bear out the epsilon asked for",
    "failed": "ended with an error",
    "out_of_memory": "killed by SIGKILL, or an allocation failed",
    "refused": "exit status 2: the settings or the data were refused",
}

_NO_MEMORY = re.compile(
    "MemoryError|out of memory|not enough memory|can't allocate memory|Cannot allocate memory"
)
_AN_ERROR = re.compile(r"error: |[\w.]*(Error|Exception|Interrupt|Exit)\b")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one run; a field is None where the run did not get that far."""

    method: str  # its name in the comparison
    algorithm: str  # the `method` of its recipe
    private: bool  # whether the method is private
    target_epsilon: float  # what was asked for; inf without privacy
    seed: int  # of the few-shot draw, the initial weights and the directions
    digest: str  # of the run's settings (`Run.digest`)
    folder: str  # name of the folder that the run left
    status: str  # a key of `STATUSES`
    error: str | None = None  # the last line of what went wrong
    exit_status: int = 0  # of the process; -n if signal n ended it
    wall_seconds: float | None = None  # of the last process: loading and evaluation included
    jobs: int = 1  # runs that shared the machine, this one included
    resumed: bool = False  # it continued from a checkpoint, so that wall_seconds is a part only
    metric: str | None = None  # of the score
    score: float | None = None  # after training
    zero_shot: float | None = None  # before training
    zero_shot_group: str = ""  # equal for runs whose untrained models classify alike
    seconds_per_step: float | None = None  # of training steps alone (`StepMeter`)
    peak_memory_bytes: int | None = None  # of training steps alone
    device: str | None = None  # "cpu" or "cuda", what peak_memory_bytes is measured on
    epsilon: float | None = None  # spent, from the privacy report; inf without privacy
    delta: float | None = None  # of that epsilon
    neighboring_relation: str | None = None  # of that epsilon
    steps: int | None = None  # completed
    expected_batch_size: float | None = None  # B
    forwards: float | None = None  # expected example-forwards of all steps
    backwards: float | None = None  # expected example-backwards of all steps
    trial: int | None = None  # in a sweep: its number
    settings: Mapping[str, Any] | None = None  # in a sweep: its point of the grid
    metrics: Mapping[str, float] | None = None  # in a sweep: all evaluation metrics

    @property
    def done(self) -> bool:
        """Whether its figures count."""
        return self.status == DONE

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: numbers that are not finite are strings."""
        return encode(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """The inverse of `to_dict`."""
        try:
            return cls(**decode(dict(values)))
        except TypeError as error:
            raise ValueError(f"not a row: {error}.") from error


def append_row(path: Path, row: Row) -> None:
    """Adds a line to the file and flushes it to disk.

    Args:
      path: of the file; made if it is not there.
      row: the line.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row.to_dict(), allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """All rows of the file, oldest first; none if there is no file.

    A last line without its end was torn by a crash while it was written: it is cut off, and its run
    counts as unfinished.
    """
    if not path.exists():
        return []
    whole, end, torn = path.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        with path.open("r+b") as file:
            file.truncate(len((whole + end).encode()))
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(Row.from_dict(json.loads(line)))
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: {error} Repair or remove the line, or give another "
                "--output_dir."
            ) from error
    return rows


class Exit(NamedTuple):
    """How a process ended: its exit status (-n for signal n) and its seconds."""

    status: int
    seconds: float


def row_of(
    run: Run, folder: Path, errors: str, ended: Exit, *, resumed: bool = False, jobs: int = 1
) -> Row:
    """The row of a run whose process has ended.

    Args:
      run: of the grid.
      folder: its output_dir.
      errors: what the process wrote to stderr.
      ended: how it ended.
      resumed: whether it continued from a checkpoint.
      jobs: runs that shared the machine.

    Returns:
      The row. The error of a private run is reduced to its kind, for a message may quote a row of data.

    Raises:
      ValueError: the results do not hold the metric that the run names.
    """
    row = Row(
        method=run.method,
        algorithm=run.recipe.training.method,
        private=run.private,
        target_epsilon=run.epsilon,
        seed=run.seed,
        digest=run.digest,
        folder=folder.name,
        status=DONE,
        exit_status=ended.status,
        wall_seconds=round(ended.seconds, 2),
        jobs=jobs,
        resumed=resumed,
        zero_shot_group=zero_shot_group(run.recipe.model),
        trial=run.trial,
        settings=run.point,
    )
    if ended.status != 0:
        status, error = _failure(ended.status, errors)
        if row.private and status != "refused":
            error = _error_kind(error)
        return dataclasses.replace(row, status=status, error=error)
    try:
        results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        report = PrivacyReport.load(folder / REPORT_FILE)
        key = run.metric or f"eval_{_metric_of(results)}"
    except (OSError, ValueError, KeyError) as error:
        text = f"left no readable results: {type(error).__name__}: {error}"
        return dataclasses.replace(row, status="failed", error=text[:400])
    if key not in results:
        known = ", ".join(sorted(name for name in results if name.startswith("eval_")))
        raise ValueError(f"metric={key!r} is not among the results: {known}. Give --metric.")
    return _with_results(row, run, results, report, key)


def _with_results(
    row: Row, run: Run, results: Mapping[str, Any], report: PrivacyReport, key: str
) -> Row:
    training, metric = run.recipe.training, key.removeprefix("eval_")
    examples = float(report.steps * report.expected_batch_size)
    per_example = (1, 1) if training.first_order else (2 * report.num_directions, 0)
    row = dataclasses.replace(
        row,
        metric=metric,
        score=_finite(results[key]),
        zero_shot=_finite(results.get(f"zero_shot_{metric}")),
        seconds_per_step=results.get("seconds_per_step"),
        peak_memory_bytes=results.get("peak_memory_bytes"),
        device=training.device.type,
        epsilon=report.epsilon if row.private else math.inf,
        delta=report.delta if row.private else None,
        neighboring_relation=report.neighboring_relation if row.private else None,
        steps=report.steps,
        expected_batch_size=report.expected_batch_size,
        forwards=per_example[0] * examples,
        backwards=per_example[1] * examples,
    )
    if run.trial is not None:
        return dataclasses.replace(row, metrics=metrics_of_trial(results))
    status, error = DONE, None
    if row.score is None:
        status, error = "failed", f"its {metric} is {results[key]} after training"
    elif row.private and not report.private:
        status, error = "not_private", report.statement
    elif row.private and report.epsilon > run.epsilon:
        spent = f"spent epsilon = {round_up(report.epsilon)}"
        status, error = "not_private", f"{spent}, more than the {run.epsilon:g} asked for"
    return dataclasses.replace(row, status=status, error=error)


def metrics_of_trial(results: Mapping[str, Any]) -> dict[str, float]:
    """What a sweep's table may hold of a trial: metrics of the validation rows, no time or memory."""
    public = public_results(results).items()
    return {name: v for name, v in public if name.startswith(("eval_", "zero_shot_"))}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _failure(status: int, errors: str) -> tuple[str, str]:
    """The status and the error line of a process that failed; `errors` is what it wrote to stderr."""
    line = _error_line(errors)
    if status == -signal.SIGKILL:
        return "out_of_memory", f"killed by SIGKILL, as a system without memory does; {line}"
    if _NO_MEMORY.search(line):
        return "out_of_memory", line
    if status < 0:
        return "failed", f"ended by {signal.Signals(-status).name}; {line}"
    return ("refused" if status == 2 else "failed"), line


def _error_line(text: str) -> str:
    """The last line that names an error, else the last line; at most 400 characters of it.

    >>> _error_line("ValueError: no\\nresource_tracker.py: leaked semaphore")
    'ValueError: no'
    """
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    telling = [line for line in lines if _AN_ERROR.match(line)] or lines or ["it said nothing"]
    return telling[-1][:400]


def _error_kind(line: str) -> str:
    """What an error is called, without what it says: that may quote a private row.

    >>> _error_kind("KeyError: 'Dear doctor'")
    'KeyError (its message may be private: see the log)'
    """
    kind = _AN_ERROR.search(line)
    named = kind[0].removesuffix(": ") if kind else "an error"
    ended = f"{line.split(';')[0]}; " if ";" in line else ""
    return f"{ended}{named} (its message may be private: see the log)"


def zero_shot_group(model: ModelArguments) -> str:
    """Equal for settings whose untrained models classify alike (LoRA starts at zero, say)."""
    ignored = {"init_seed", "lora_r", "lora_alpha", "lora_target_modules", "precompute_features"}
    if model.peft_method != "prefix":
        ignored |= {"peft_method", "num_virtual_tokens"}
    kept = {name: v for name, v in dataclasses.asdict(model).items() if name not in ignored}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]


def _metric_of(results: Mapping[str, Any]) -> str:
    """The name of the task's metric: what stands beside the loss and the timing of an evaluation.

    Of several, the one that the task is about: macro-F1 stands beside accuracy only where a task asks
    for it, F1 beside exact match.
    """
    others = ("loss", "runtime", "samples", "samples_per_second", "steps_per_second")
    names = [name.removeprefix("eval_") for name in results if name.startswith("eval_")]
    metrics = [n for n in names if n not in others and f"zero_shot_{n}" in results]
    if not metrics:
        raise ValueError(f"there is no metric among the results {', '.join(results)}.")
    return next((name for name in ("macro_f1", "f1", "accuracy") if name in metrics), metrics[0])
