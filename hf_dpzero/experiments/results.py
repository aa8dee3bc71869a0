"""One row for each finished run, in a file that only grows; and how a finished process becomes one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_dpzero.experiments.grid import Run
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.wording import round_up

RESULTS_FILE = "all_results.json"
DONE = "done"
STATUSES = {
    DONE: "finished, and private as claimed where the method is private",
    "not_private": "finished, but its privacy report does not bear out the epsilon asked for",
    "failed": "ended with an error",
    "out_of_memory": "killed by SIGKILL, or an allocation failed",
    "refused": "exit status 2: the settings or the data were refused",
}

_NO_MEMORY = (
    "MemoryError",
    "OutOfMemoryError",
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "Cannot allocate memory",
)
_NOT_A_METRIC = ("loss", "runtime", "samples", "samples_per_second", "steps_per_second")
_NO_MATTER_BEFORE_TRAINING = frozenset(
    {"init_seed", "lora_r", "lora_alpha", "lora_target_modules", "precompute_features"}
)
_AN_ERROR = re.compile(r"error: |[\w.]*(Error|Exception|Interrupt|Exit)\b")
_LONGEST_ERROR = 400


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one run; a field is None where the run did not get that far.

    Attributes:
      method: the method's name in the comparison.
      algorithm: the `method` of its recipe.
      private: whether the method is private.
      target_epsilon: what was asked for; inf without privacy.
      seed: of the few-shot draw, the initial weights and the directions.
      digest: of the run's settings (`Run.digest`).
      folder: name of the folder that the run left.
      status: a key of `STATUSES`.
      error: the last line of what went wrong.
      exit_status: of the process; -n if signal n ended it.
      wall_seconds: of the process that ended the run: loading, encoding and evaluation included.
      jobs: runs that shared the machine, this one included.
      resumed: it continued from a checkpoint, so that wall_seconds is a part only.
      metric, score: name and value of the evaluation metric after training.
      zero_shot: the metric before training.
      zero_shot_group: equal for runs whose untrained models classify alike.
      seconds_per_step, peak_memory_bytes: of training steps alone (`StepMeter`).
      device: "cpu" or "cuda", what peak_memory_bytes is measured on.
      epsilon: spent, from the privacy report; inf without privacy.
      delta: of that epsilon.
      neighboring_relation: of that epsilon.
      steps: completed.
      expected_batch_size: B.
      forwards, backwards: example-passes of all steps, see `example_passes`.
      trial, settings, metrics: in a sweep, its number, its swept settings, and all evaluation metrics.
    """

    method: str
    algorithm: str
    private: bool
    target_epsilon: float
    seed: int
    digest: str
    folder: str
    status: str
    error: str | None = None
    exit_status: int = 0
    wall_seconds: float | None = None
    jobs: int = 1
    resumed: bool = False
    metric: str | None = None
    score: float | None = None
    zero_shot: float | None = None
    zero_shot_group: str = ""
    seconds_per_step: float | None = None
    peak_memory_bytes: int | None = None
    device: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    neighboring_relation: str | None = None
    steps: int | None = None
    expected_batch_size: float | None = None
    forwards: float | None = None
    backwards: float | None = None
    trial: int | None = None
    settings: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] | None = None

    @property
    def done(self) -> bool:
        """Whether its figures count."""
        return self.status == DONE

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: numbers that are not finite are strings."""
        return encode(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """The inverse of `to_dict`.

        Raises:
          ValueError: keys that are missing or unknown.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if not known >= values.keys():
            raise ValueError(f"unknown keys in a row: {', '.join(sorted(values.keys() - known))}.")
        try:
            return cls(**decode(dict(values)))
        except TypeError as error:
            raise ValueError(f"not a row of a comparison: {error}.") from error


def encode(value: Any) -> Any:
    """JSON has no infinity and no NaN: they are written as strings, as in privacy_report.json."""
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


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

    Raises:
      ValueError: any other line is not a row.
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


def latest(rows: Iterable[Row]) -> dict[str, Row]:
    """digest -> the last row of that run."""
    return {row.digest: row for row in rows}


# ---------------------------------------------------------------- a process that ended -> a row


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
        status, error = failure(ended.status, errors)
        if row.private and status != "refused":
            error = error_kind(error)
        return dataclasses.replace(row, status=status, error=error)
    try:
        results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        report = PrivacyReport.load(folder / REPORT_FILE)
        key = run.metric or f"eval_{metric_of(results)}"
    except (OSError, ValueError, KeyError) as error:
        text = f"left no readable results: {type(error).__name__}: {error}"
        return dataclasses.replace(row, status="failed", error=text[:_LONGEST_ERROR])
    if key not in results:
        known = ", ".join(sorted(name for name in results if name.startswith("eval_")))
        raise ValueError(f"metric={key!r} is not among the results: {known}. Give --metric.")
    return _with_results(row, run, results, report, key)


def _with_results(
    row: Row, run: Run, results: Mapping[str, Any], report: PrivacyReport, key: str
) -> Row:
    training, metric = run.recipe.training, key.removeprefix("eval_")
    forwards, backwards = example_passes(
        first_order=training.first_order,
        steps=report.steps,
        batch_size=report.expected_batch_size,
        num_directions=training.num_directions,
    )
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
        forwards=forwards,
        backwards=backwards,
    )
    if run.trial is not None:
        public = {k: v for k, v in results.items() if k.startswith(("eval_", "zero_shot_"))}
        return dataclasses.replace(row, metrics=public)
    if row.score is None:
        text = f"its {metric} is {results[key]} after training"
        return dataclasses.replace(row, status="failed", error=text)
    wrong = broken_promise(report, run.epsilon) if row.private else None
    return dataclasses.replace(row, status="not_private", error=wrong) if wrong else row


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def failure(status: int, errors: str) -> tuple[str, str]:
    """The row's status and error of a process that failed.

    Args:
      status: exit status, not 0.
      errors: what the process wrote to stderr.

    Returns:
      A key of `STATUSES`, and one line.

    >>> failure(2, "warming up\\nerror: clip=0 must be positive.")
    ('refused', 'error: clip=0 must be positive.')
    """
    line = error_line(errors)
    if status == -signal.SIGKILL:
        return "out_of_memory", f"killed by SIGKILL, as a system without memory does; {line}"
    if any(words in line for words in _NO_MEMORY):
        return "out_of_memory", line
    if status < 0:
        return "failed", f"ended by {signal.Signals(-status).name}; {line}"
    return ("refused" if status == 2 else "failed"), line


def error_line(text: str) -> str:
    """The last line that names an error, else the last line; at most 400 characters of it.

    >>> error_line("ValueError: no\\nresource_tracker.py: leaked semaphore")
    'ValueError: no'
    """
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    telling = [line for line in lines if _AN_ERROR.match(line)] or lines or ["it said nothing"]
    return telling[-1][:_LONGEST_ERROR]


def error_kind(line: str) -> str:
    """What an error is called, without what it says: that may quote a private row.

    >>> error_kind("KeyError: 'Dear doctor'")
    'KeyError (its message may be private: see the log)'
    """
    kind = _AN_ERROR.search(line)
    named = kind[0].removesuffix(": ") if kind else "an error"
    ended = f"{line.split(';')[0]}; " if ";" in line else ""
    return f"{ended}{named} (its message may be private: see the log)"


def zero_shot_group(model: ModelArguments) -> str:
    """Equal for settings whose untrained models classify alike (LoRA starts at zero, say)."""
    values = {
        name: value
        for name, value in dataclasses.asdict(model).items()
        if name not in _NO_MATTER_BEFORE_TRAINING
    }
    if values["peft_method"] != "prefix":
        del values["peft_method"], values["num_virtual_tokens"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def metric_of(results: Mapping[str, Any]) -> str:
    """The name of the task's metric: what stands beside the loss and the timing of an evaluation.

    Of several, the one that the task is about: macro-F1 stands beside accuracy only where a task asks
    for it, F1 beside exact match.

    Raises:
      ValueError: there is none that was taken before training as well.
    """
    names = [name.removeprefix("eval_") for name in results if name.startswith("eval_")]
    metrics = [n for n in names if n not in _NOT_A_METRIC and f"zero_shot_{n}" in results]
    if not metrics:
        raise ValueError(f"there is no metric among the results {', '.join(results)}.")
    return next((name for name in ("macro_f1", "f1", "accuracy") if name in metrics), metrics[0])


def broken_promise(report: PrivacyReport, target: float) -> str | None:
    """Why a private run may not stand under an epsilon.

    Args:
      report: of the run.
      target: the epsilon asked for.

    Returns:
      One sentence, or None if the report bears the epsilon out.
    """
    if not report.private:
        return report.statement
    if report.epsilon > target:
        return f"spent epsilon = {round_up(report.epsilon)}, more than the {target:g} asked for"
    return None


def example_passes(
    *, first_order: bool, steps: int, batch_size: float, num_directions: int
) -> tuple[float, float]:
    """Expected example-forwards and example-backwards of a run's training steps.

    Args:
      first_order: whether a step takes gradients.
      steps: T.
      batch_size: B, expected.
      num_directions: K.

    Returns:
      Zeroth order: T x B x 2K forwards and none backwards; first order: T x B of each.

    >>> example_passes(first_order=False, steps=10, batch_size=64, num_directions=3)
    (3840.0, 0.0)
    >>> example_passes(first_order=True, steps=10, batch_size=64, num_directions=1)
    (640.0, 640.0)
    """
    examples = float(steps * batch_size)
    return (examples, examples) if first_order else (2.0 * num_directions * examples, 0.0)
