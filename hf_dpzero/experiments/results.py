"""One row for each finished run, in a file that only grows: `rows.jsonl`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROWS_FILE = "rows.jsonl"

DONE = "done"
STATUSES = {
    DONE: "finished, and private as claimed where the method is private",
    "not_private": "finished, but its privacy report does not bear out the epsilon asked for",
    "failed": "ended with an error",
    "out_of_memory": "killed by SIGKILL, or an allocation failed",
    "refused": "exit status 2: the settings or the data were refused",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one run came to; None where it did not get that far.

    Attributes:
      method: the arm's name in the comparison.
      algorithm: the `method` of its recipe.
      private: whether the method is private.
      target_epsilon: what was asked for; inf without privacy.
      seed: of the few-shot draw, the initial weights and the directions.
      digest: of the run's settings (`Run.digest`).
      folder: name under runs/ of what the run left.
      status: a key of `STATUSES`.
      error: the last line of what went wrong.
      exit_status: of the process; -n if signal n ended it.
      wall_seconds: of the process that ended the run: loading, encoding and evaluation included.
      jobs: runs that shared the machine, this one included.
      resumed: it continued from a checkpoint, so that wall_seconds is a part only.
      max_rss_bytes: peak resident memory of that process, from start to end.
      metric, score: name and value of the evaluation metric after training, in 0..1.
      zero_shot: the metric before training.
      zero_shot_group: equal for runs whose untrained models classify alike.
      seconds_per_step, peak_memory_bytes: of training steps alone (`callbacks.StepMeter`).
      device: "cpu" or "cuda", what peak_memory_bytes is measured on.
      epsilon: spent, from the privacy report; inf without privacy.
      delta: of that epsilon.
      neighboring_relation: of that epsilon.
      steps: completed.
      expected_batch_size: B.
      forwards, backwards: example-passes of all steps, see `passes_of`.
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
    max_rss_bytes: int | None = None
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

    @property
    def done(self) -> bool:
        """Whether its figures count."""
        return self.status == DONE

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe: infinite numbers are the string "inf"."""
        return encode(asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """The inverse of `to_dict`.

        Raises:
          ValueError: keys that are missing or unknown.
        """
        known = {field.name for field in fields(cls)}
        if not known >= values.keys():
            raise ValueError(f"unknown keys in a row: {', '.join(sorted(values.keys() - known))}.")
        try:
            return cls(**decode(dict(values)))
        except TypeError as error:
            raise ValueError(f"not a row of a comparison: {error}.") from error


def encode(value: Any) -> Any:
    """JSON has no infinity: it is written as the string "inf", as in privacy_report.json."""
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return math.inf if value == "inf" else value


def append_row(path: Path, row: Row) -> None:
    """Adds one line and flushes it to disk."""
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
    return [_parsed(path, n, line) for n, line in enumerate(whole.splitlines(), 1) if line.strip()]


def _parsed(path: Path, number: int, line: str) -> Row:
    try:
        return Row.from_dict(json.loads(line))
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}, line {number}: {error} Repair or remove the line, or compare into another "
            "--output_dir."
        ) from error


def latest(rows: Iterable[Row]) -> dict[str, Row]:
    """digest -> the last row of that run."""
    return {row.digest: row for row in rows}


def passes_of(
    *, first_order: bool, steps: int, batch_size: float, num_directions: int
) -> tuple[float, float]:
    """Expected example-forwards and example-backwards of a run's training steps.

    Zeroth order: steps x B x 2 K forwards and none backwards; first order: steps x B of each.

    >>> passes_of(first_order=False, steps=10, batch_size=64, num_directions=3)
    (3840.0, 0.0)
    >>> passes_of(first_order=True, steps=10, batch_size=64, num_directions=1)
    (640.0, 640.0)
    """
    examples = float(steps * batch_size)
    return (examples, examples) if first_order else (2.0 * num_directions * examples, 0.0)
