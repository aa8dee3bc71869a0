"""Rows of one comparison become means over seeds, kept with them in comparison.json."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_dpzero.experiments.results import Row
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.values import decode, encode

JSON_FILE = "comparison.json"
ZERO_SHOT = "zero-shot"


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


def _mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard error of the mean: sample standard deviation / sqrt(n).

    >>> _mean_and_error([0.25, 0.75]), _mean_and_error([0.5]), _mean_and_error([])
    ((0.5, 0.25), (0.5, None), (None, None))
    """
    if not values:
        return None, None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def aggregate(
    rows: Iterable[Row], planned: Mapping[tuple[str, float], int]
) -> tuple[list[Cell], list[Cell]]:
    """Means over seeds.

    Args:
      rows: the last row of each run.
      planned: (method, epsilon) -> runs of the grid.

    Returns:
      Cells of the methods, in the order of `planned`, and cells of the zero-shot models: one a kind of
      untrained model, in which runs of one seed count once. Methods whose models differ before training
      (another head, say) are named in the label.
    """
    done = [row for row in rows if row.done]
    cells = [_cell(method, epsilon, count, done) for (method, epsilon), count in planned.items()]
    groups: dict[str, list[Row]] = {}
    for row in done:
        if row.zero_shot is not None:
            groups.setdefault(row.zero_shot_group, []).append(row)
    return cells, [_zero_shot(rows, alone=len(groups) == 1) for rows in groups.values()]


def _cell(method: str, epsilon: float, planned: int, done: Sequence[Row]) -> Cell:
    rows = [row for row in done if (row.method, row.target_epsilon) == (method, epsilon)]

    def known(figure: str) -> list[Any]:
        return [value for row in rows if (value := getattr(row, figure)) is not None]

    mean, error = _mean_and_error(known("score"))
    return Cell(
        method=method,
        epsilon=epsilon,
        planned=planned,
        finished=len(rows),
        mean=mean,
        standard_error=error,
        seconds_per_step=_mean_and_error(known("seconds_per_step"))[0],
        peak_memory_bytes=max(known("peak_memory_bytes"), default=None),
        epsilon_spent=max(known("epsilon"), default=None),
        forwards=max(known("forwards"), default=None),
        backwards=max(known("backwards"), default=None),
    )


def _zero_shot(rows: Sequence[Row], alone: bool) -> Cell:
    by_seed: dict[int, list[float]] = {}
    for row in rows:
        by_seed.setdefault(row.seed, []).append(row.zero_shot or 0.0)
    mean, error = _mean_and_error([statistics.fmean(scores) for scores in by_seed.values()])
    methods = ", ".join(dict.fromkeys(row.method for row in rows))
    return Cell(
        method=ZERO_SHOT if alone else f"{ZERO_SHOT} ({methods})",
        epsilon=0.0,
        planned=len(by_seed),
        finished=len(by_seed),
        mean=mean,
        standard_error=error,
        epsilon_spent=0.0,
    )


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

    @property
    def relation(self) -> str | None:
        """The neighbouring relation of its epsilons; None if no method is private."""
        return self.settings.get("neighboring_relation")

    @property
    def jobs(self) -> int:
        """The most runs that shared the machine."""
        return max((row.jobs for row in self.rows), default=1)

    def cell(self, method: str, epsilon: float) -> Cell | None:
        """A cell of the table.

        Args:
          method: as in the grid.
          epsilon: target, as in the grid.

        Returns:
          The cell, or None where the grid has none.
        """
        return next((c for c in self.cells if (c.method, c.epsilon) == (method, epsilon)), None)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes comparison.json; atomic."""
        path = Path(folder) / JSON_FILE
        write_atomically(path, json.dumps(encode(asdict(self)), indent=1, allow_nan=False) + "\n")
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Record:
        """Reads what `save` wrote."""
        path = Path(folder) / JSON_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} not found; give folders that `hf-dpzero compare` has written."
            )
        try:
            values = decode(json.loads(path.read_text(encoding="utf-8")))
            return cls(
                settings=values["settings"],
                rows=[Row.from_dict(row) for row in values["rows"]],
                cells=[Cell(**cell) for cell in values["cells"]],
                zero_shot=[Cell(**cell) for cell in values["zero_shot"]],
                pending=values["pending"],
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not the record of a comparison: {error!r}.") from error
