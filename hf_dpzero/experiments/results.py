"""A run, the row it leaves in a file that only grows, and means over the seeds of a comparison."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import signal
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_dpzero.estimators.finite_differences import passes_of
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.recipe import Recipe
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.public import public_results
from hf_dpzero.reporting.wording import round_up
from hf_dpzero.settings.defaults import differences_for
from hf_dpzero.values import decode, encode

RESULTS_FILE = "all_results.json"
JSON_FILE = "comparison.json"
ZERO_SHOT = "zero-shot"
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
class Run:
    """One training run, of a comparison or a sweep."""

    name: str  # of its folder, for example "dp-adamw-eps2-seed42", or "003" in a sweep
    method: str  # its name: as given in --methods, or the stem of the recipe that was given
    source: str  # which files its settings come from
    epsilon: float  # the target that its privacy report is held to; inf if there is none
    recipe: Recipe  # all settings but output_dir
    trial: int | None = None  # its number in a sweep, from 0
    point: Mapping[str, Any] | None = None  # the swept settings
    metric: str | None = None  # key of `all_results.json` that scores it; None: the task's metric

    @property
    def private(self) -> bool:
        """True if the run spends a privacy budget."""
        return not self.recipe.training.not_private

    @property
    def digest(self) -> str:
        """16 hex digits that change with every setting of the run, and from trial to trial."""
        # Only what was written down: a default that changes does not run everything again.
        values = {k: v for k, v in self.recipe.values.items() if k != "output_dir"}
        if self.trial is not None:  # two trials of a sweep may draw the same settings
            values["trial"] = self.trial
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self, output_dir: str) -> str:
        """Returns the run as a recipe of its own, that trains into `output_dir`."""
        values = {**self.recipe.values, "output_dir": output_dir}
        return dataclasses.replace(self.recipe, values=values).to_yaml()


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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """Reads what `append_row` wrote; numbers that are not finite are strings there."""
        try:
            return cls(**decode(dict(values)))
        except TypeError as error:
            raise ValueError(f"not a row: {error}.") from error


def append_row(path: Path, row: Row) -> None:
    """Adds a line to the file, which is made if it is not there, and flushes it to disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(encode(asdict(row)), allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())  # a run that took hours is not run again after a power cut


def read_rows(path: Path) -> list[Row]:
    """Returns all rows of the file, oldest first; none if there is no file.

    Raises:
      ValueError: a line that is no row; names it.
    """
    if not path.exists():
        return []
    whole, end, torn = path.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        # A crash tore the last line while it was written: its run counts as unfinished.
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
    """Returns the row of a run whose process has ended and wrote `errors` to stderr.

    Raises:
      ValueError: the results do not hold the metric that the run names.
    """
    training = run.recipe.training
    row = Row(
        method=run.method,
        algorithm=training.method,
        private=run.private,
        target_epsilon=run.epsilon,
        seed=training.seed,
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
        status, error = _failure(ended.status, errors, secret=row.private)
        return dataclasses.replace(row, status=status, error=error)
    try:
        results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        report = PrivacyReport.load(folder / REPORT_FILE)
        metric = run.metric.removeprefix("eval_") if run.metric else _metric_of(results)
    except (OSError, ValueError, KeyError) as problem:
        text = f"left no readable results: {type(problem).__name__}: {problem}"
        return dataclasses.replace(row, status="failed", error=text[:400])
    if (key := f"eval_{metric}") not in results:
        known = ", ".join(sorted(name for name in results if name.startswith("eval_")))
        raise ValueError(f"metric={key!r} is not among the results: {known}. Give --metric.")
    score, zero_shot = results[key], results.get(f"zero_shot_{metric}")
    examples = float(report.steps * report.expected_batch_size)
    # A first-order step runs each example forwards and backwards, one of zeroth order forwards
    # alone: at both ends of each difference.
    forwards, backwards = 1, 1
    if not training.first_order:
        kind = differences_for(training, report.num_directions)
        forwards, backwards = passes_of(kind, report.num_directions), 0
    status, wrong = DONE, None
    if run.trial is None:  # a sweep scores its trials itself, and no target is theirs
        if not math.isfinite(score):
            status, wrong = "failed", f"its {metric} is {score} after training"
        elif row.private and not report.private:
            status, wrong = "not_private", report.statement
        elif row.private and report.epsilon > run.epsilon:
            spent = f"spent epsilon = {round_up(report.epsilon)}"
            status, wrong = "not_private", f"{spent}, more than the {run.epsilon:g} asked for"
    return dataclasses.replace(
        row,
        status=status,
        error=wrong,
        metric=metric,
        score=score if math.isfinite(score) else None,
        zero_shot=zero_shot if zero_shot is not None and math.isfinite(zero_shot) else None,
        seconds_per_step=results.get("seconds_per_step"),
        peak_memory_bytes=results.get("peak_memory_bytes"),
        device=training.device.type,
        epsilon=report.epsilon if row.private else math.inf,
        delta=report.delta if row.private else None,
        neighboring_relation=report.neighboring_relation if row.private else None,
        steps=report.steps,
        expected_batch_size=report.expected_batch_size,
        forwards=forwards * examples,
        backwards=backwards * examples,
        metrics=None if run.trial is None else metrics_of_trial(results),
    )


def metrics_of_trial(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns what a sweep's table may hold of a trial: metrics of the validation rows, no time."""
    public = public_results(results).items()
    return {name: v for name, v in public if name.startswith(("eval_", "zero_shot_"))}


def _failure(status: int, errors: str, secret: bool = False) -> tuple[str, str]:
    """Returns the status and the error line of a process that failed.

    Of what it wrote to stderr the last line that names an error counts, else the last one.

    >>> _failure(1, "ValueError: no\\nresource_tracker.py: leaked semaphore")
    ('failed', 'ValueError: no')
    >>> _failure(1, "KeyError: 'Dear doctor'", secret=True)
    ('failed', 'KeyError (its message may be private: see the log)')
    """
    lines = [line.strip() for line in errors.replace("\r", "\n").splitlines() if line.strip()]
    telling = [line for line in lines if _AN_ERROR.match(line)] or lines or ["it said nothing"]
    line, kind = telling[-1][:400], "failed"
    if status == -signal.SIGKILL:
        kind, line = "out_of_memory", f"killed by SIGKILL, as a system without memory does; {line}"
    elif _NO_MEMORY.search(line):
        kind = "out_of_memory"
    elif status < 0:
        line = f"ended by {signal.Signals(-status).name}; {line}"
    elif status == 2:
        return "refused", line  # settings are quoted, no rows
    if secret:
        # A message may quote a row of the data, so only what the error is called is kept.
        name = _AN_ERROR.search(line)
        ended = f"{line.split(';')[0]}; " if ";" in line else ""
        line = f"{ended}{name[0].removesuffix(': ') if name else 'an error'}"
        line += " (its message may be private: see the log)"
    return kind, line


def zero_shot_group(model: ModelArguments) -> str:
    """Returns 8 hex digits, equal for settings whose untrained models classify alike."""
    # stored features are the encoder's own outputs, and LoRA's second matrix starts at zero
    ignored = {"init_seed", "lora_r", "lora_alpha", "lora_target_modules", "precompute_features"}
    if model.peft_method != "prefix":  # other adapters start as no change
        ignored |= {"peft_method", "num_virtual_tokens"}
    kept = {name: v for name, v in asdict(model).items() if name not in ignored}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]


def _metric_of(results: Mapping[str, Any]) -> str:
    """Returns the name of the task's metric: what stands beside loss and timing of an evaluation."""
    others = ("loss", "runtime", "samples", "samples_per_second", "steps_per_second")
    names = [name.removeprefix("eval_") for name in results if name.startswith("eval_")]
    metrics = [n for n in names if n not in others and f"zero_shot_{n}" in results]
    if not metrics:
        raise ValueError(f"there is no metric among the results {', '.join(results)}.")
    # Macro-F1 stands beside accuracy only where a task asks for it, F1 beside exact match.
    return next((name for name in ("macro_f1", "f1", "accuracy") if name in metrics), metrics[0])


# ---- means over seeds


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method at one epsilon, over the seeds."""

    method: str  # its name, or "zero-shot" and what tells it from other zero-shot models
    epsilon: float  # the target; inf without privacy, 0 for zero-shot
    planned: int  # runs of the grid
    finished: int  # runs whose figures count, n below
    mean: float | None = None  # of their scores, in 0..1
    standard_error: float | None = None  # sample standard deviation (n - 1) / sqrt(n); n >= 2
    seconds_per_step: float | None = None  # mean over runs, of each run's median
    peak_memory_bytes: int | None = None  # the highest of the runs
    epsilon_spent: float | None = None  # the highest of the runs
    forwards: float | None = None  # example-passes, the most of the runs
    backwards: float | None = None


def known(of: Iterable[Row] | Iterable[Cell], figure: str) -> list[float]:
    """Returns a figure of those rows or cells that have it."""
    return [value for one in of if (value := vars(one)[figure]) is not None]


def aggregate(
    rows: Iterable[Row], planned: Mapping[tuple[str, float], int]
) -> tuple[list[Cell], list[Cell]]:
    """Returns means over seeds.

    Args:
      rows: the last row of each run.
      planned: (method, epsilon) -> runs of the grid.

    Returns:
      Cells of the methods, in the order of `planned`, and cells of the zero-shot models: one a kind of
      untrained model, in which runs of one seed count once. Methods whose models differ before training
      (another head, say) are named in the label.
    """
    done = [row for row in rows if row.done]
    cells, groups = [], dict[str, list[Row]]()
    for (method, epsilon), count in planned.items():
        own = [row for row in done if (row.method, row.target_epsilon) == (method, epsilon)]
        mean, error = _mean_and_error(known(own, "score"))
        seconds = known(own, "seconds_per_step")
        peak = max(known(own, "peak_memory_bytes"), default=None)
        cell = Cell(
            method=method,
            epsilon=epsilon,
            planned=count,
            finished=len(own),
            mean=mean,
            standard_error=error,
            seconds_per_step=statistics.fmean(seconds) if seconds else None,
            peak_memory_bytes=None if peak is None else int(peak),
            epsilon_spent=max(known(own, "epsilon"), default=None),
            forwards=max(known(own, "forwards"), default=None),
            backwards=max(known(own, "backwards"), default=None),
        )
        cells.append(cell)
    for row in done:
        if row.zero_shot is not None:
            groups.setdefault(row.zero_shot_group, []).append(row)
    zero_shot = []
    for alike in groups.values():
        # Methods and epsilons of one seed start from one model: their figures are one figure.
        seeds = dict[int, list[float]]()
        for row in alike:
            seeds.setdefault(row.seed, []).append(row.zero_shot or 0.0)
        mean, error = _mean_and_error([statistics.fmean(scores) for scores in seeds.values()])
        methods = ", ".join(dict.fromkeys(row.method for row in alike))
        name = ZERO_SHOT if len(groups) == 1 else f"{ZERO_SHOT} ({methods})"
        cell = Cell(method=name, epsilon=0.0, planned=len(seeds), finished=len(seeds))
        cell = dataclasses.replace(cell, mean=mean, standard_error=error, epsilon_spent=0.0)
        zero_shot.append(cell)
    return cells, zero_shot


def _mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Returns the mean and its standard error: sample standard deviation / sqrt(n).

    >>> _mean_and_error([0.25, 0.75]), _mean_and_error([0.5]), _mean_and_error([])
    ((0.5, 0.25), (0.5, None), (None, None))
    """
    if len(values) < 2:
        return (values[0] if values else None), None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, kw_only=True)
class Record:
    """All of a comparison: the content of comparison.json."""

    settings: dict[str, Any]  # what was asked for, and what the methods are
    rows: list[Row]  # the last row of each run that has one
    cells: list[Cell]  # in the order of the grid, one a method and epsilon
    zero_shot: list[Cell]  # one a kind of untrained model
    pending: list[str]  # names of runs without a row

    @property
    def methods(self) -> list[str]:
        """Names in the order of the grid."""
        return list(dict.fromkeys(cell.method for cell in self.cells))

    @property
    def epsilons(self) -> list[float]:
        """Targets in ascending order, inf last."""
        return sorted({cell.epsilon for cell in self.cells})

    def cell(self, method: str, epsilon: float) -> Cell | None:
        """Returns a cell of the table, or None where the grid has none."""
        return next((c for c in self.cells if (c.method, c.epsilon) == (method, epsilon)), None)

    def save(self, folder: Path) -> None:
        """Writes comparison.json; atomic."""
        text = json.dumps(encode(asdict(self)), indent=1, allow_nan=False)
        write_atomically(folder / JSON_FILE, text + "\n")
