"""A process that ended, and the files it left -> a `Row`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

from hf_dpzero.experiments.grid import Run
from hf_dpzero.experiments.results import DONE, Row, passes_of
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.reporting.privacy_report import REPORT_FILE, PrivacyReport
from hf_dpzero.reporting.wording import round_up

RESULTS_FILE = "all_results.json"

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


class Exit(NamedTuple):
    """How a process ended: exit status (-n for signal n), its seconds and peak resident bytes."""

    status: int
    seconds: float
    max_rss_bytes: int | None = None


def row_of(
    run: Run, folder: Path, errors: str, ended: Exit, *, resumed: bool = False, jobs: int = 1
) -> Row:
    """The row of a run whose process has ended.

    Args:
      folder: its output_dir.
      errors: what the process wrote to stderr.
      resumed: whether it continued from a checkpoint.
      jobs: runs that shared the machine.
    """
    row = Row(
        method=run.arm.name,
        algorithm=run.recipe.training.method,
        private=run.arm.private,
        target_epsilon=run.epsilon,
        seed=run.seed,
        digest=run.digest,
        folder=folder.name,
        status=DONE,
        exit_status=ended.status,
        wall_seconds=round(ended.seconds, 2),
        jobs=jobs,
        resumed=resumed,
        max_rss_bytes=ended.max_rss_bytes,
        zero_shot_group=zero_shot_group(run.recipe.model),
    )
    if ended.status != 0:
        status, error = why(ended.status, errors)
        if run.arm.private and status != "refused":
            error = error_kind(error)
        return dataclasses.replace(row, status=status, error=error)
    try:
        return _with_results(row, run, folder)
    except (OSError, ValueError, KeyError) as error:
        text = f"left no readable results: {type(error).__name__}: {error}"
        return dataclasses.replace(row, status="failed", error=text[:_LONGEST_ERROR])


def why(status: int, errors: str) -> tuple[str, str]:
    """The row's status and error of a process that failed.

    >>> why(2, "warming up\\nerror: clip=0 must be positive.")
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


def _with_results(row: Row, run: Run, folder: Path) -> Row:
    results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    metric = metric_of(results)
    row = dataclasses.replace(
        row,
        metric=metric,
        score=results[f"eval_{metric}"],
        zero_shot=results[f"zero_shot_{metric}"],
        seconds_per_step=results.get("seconds_per_step"),
        peak_memory_bytes=results.get("peak_memory_bytes"),
        device=run.recipe.training.device.type,
    )
    return _with_report(row, run, PrivacyReport.load(folder / REPORT_FILE))


def metric_of(results: dict[str, Any]) -> str:
    """The name of the task's metric: what stands beside the loss and the timing of an evaluation.

    Of several, the one that the task is about: macro-F1 stands beside accuracy only where a task asks
    for it, F1 beside exact match.

    Raises:
      ValueError: there is none that was taken before training as well.
    """
    names = [name.removeprefix("eval_") for name in results if name.startswith("eval_")]
    found = [n for n in names if n not in _NOT_A_METRIC and f"zero_shot_{n}" in results]
    if not found:
        raise ValueError(f"there is no metric among the results {', '.join(results)}.")
    return next((name for name in ("macro_f1", "f1", "accuracy") if name in found), found[0])


def _with_report(row: Row, run: Run, report: PrivacyReport) -> Row:
    forwards, backwards = passes_of(
        first_order=run.recipe.training.first_order,
        steps=report.steps,
        batch_size=report.expected_batch_size,
        num_directions=run.recipe.training.num_directions,
    )
    row = dataclasses.replace(
        row,
        epsilon=report.epsilon if row.private else math.inf,
        delta=report.delta if row.private else None,
        neighboring_relation=report.neighboring_relation if row.private else None,
        steps=report.steps,
        expected_batch_size=report.expected_batch_size,
        forwards=forwards,
        backwards=backwards,
    )
    wrong = broken_promise(report, run.epsilon) if row.private else None
    return dataclasses.replace(row, status="not_private", error=wrong) if wrong else row


def broken_promise(report: PrivacyReport, target: float) -> str | None:
    """Why a private run may not stand under `target`, or None if its report bears it out."""
    if not report.private:
        return report.statement
    if report.epsilon > target:
        return f"spent epsilon = {round_up(report.epsilon)}, more than the {target:g} asked for"
    return None
