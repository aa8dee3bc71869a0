"""What the studies share: the command line, rows that survive an interruption, tables and plots.

A study is a frozen dataclass of settings with `fields`, the names of a point's members; `points()`, what
is measured, in order; and `measure(*point)`, the rows of a point. Rows name their point, and what the
results file holds already is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

Row = dict[str, Any]
ROWS_FILE, TABLE_FILE = "rows.jsonl", "table.md"


class Study(Protocol):
    """What is run."""

    fields: ClassVar[tuple[str, ...]]

    def points(self) -> Sequence[tuple[Any, ...]]:
        """What is measured, in order."""

    def measure(self, *point: Any) -> Iterable[Row]:
        """The rows of a point; JSON can hold them."""


def seed_by_seed(
    tasks: Sequence[Any], arms: Sequence[Any], seeds: Sequence[int]
) -> list[tuple[Any, Any, int]]:
    """(task, arm, seed): tasks, one after the other, each with every arm before it is run again."""
    return [(task, arm, seed) for task, seed, arm in itertools.product(tasks, seeds, arms)]


# ------------------------------------------------------------------ the command


def main(
    text: str,
    full: Any,
    quick: Any,
    write: Callable[[Any, list[Row], Path], str],
    seeds: Callable[[int], Row],
    **options: Row,
) -> int:
    """Runs a study from the command line and prints its tables; Ctrl-C writes those of the rows so far.

    Args:
      text: of the command; its first line describes it.
      full, quick: the study, and with `--quick` its small form.
      write: (study, rows, folder) -> the text to print; also for a part of the rows.
      seeds: count -> the settings that say how often the study repeats.
      options: name of a setting -> how argparse reads it.

    Returns:
      The exit status: 0, or 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small study, below a minute")
    parser.add_argument("--seeds", type=at_least_two, help="repetitions")
    parser.add_argument("--output_dir", type=Path, required=True)
    for name, how in options.items():
        parser.add_argument(f"--{name}", **how)
    words = {
        n: tuple(v) if isinstance(v, list) else v for n, v in vars(parser.parse_args()).items()
    }
    given = {name: value for name, value in words.items() if value is not None}
    folder, study = given.pop("output_dir"), quick if given.pop("quick") else full
    if "seeds" in given:
        given |= seeds(given.pop("seeds"))
    study = replace(study, **given)
    try:
        print(write(study, run(study, folder), folder))
    except KeyboardInterrupt:
        rows = read_rows(folder / ROWS_FILE, study)
        if rows:
            write(study, rows, folder)
        print(f"interrupted: {len(rows)} rows kept; the same command continues.", file=sys.stderr)
        return 130
    return 0


def at_least_two(text: str) -> int:
    """A count of repetitions or steps, for argparse."""
    count = int(text)
    if count < 2:
        raise argparse.ArgumentTypeError(f"{count}: an interval or a schedule needs at least 2.")
    return count


def first_seeds(count: int) -> Row:
    """Seeds 1 .. count, for `main`.

    >>> first_seeds(3)
    {'seeds': (1, 2, 3)}
    """
    return {"seeds": tuple(range(1, count + 1))}


# ------------------------------------------------------------------ rows


def run(study: Study, folder: Path) -> list[Row]:
    """Rows for every point of the study: those that the folder holds, then the new ones.

    Raises:
      ValueError: the folder holds rows of another study.
    """
    from rich.progress import track

    path = folder / ROWS_FILE
    folder.mkdir(parents=True, exist_ok=True)
    rows = read_rows(path, study)
    points = left(study, rows)
    for point in track(points, description=f"{len(points)} points"):
        rows += append_rows(path, study.measure(*point))
    return rows


def left(study: Study, rows: Iterable[Row]) -> list[tuple[Any, ...]]:
    """The points of the study without a row."""
    # JSON has no tuples: points are compared by the members that their rows name.
    done = {tuple(row[field] for field in study.fields) for row in rows}
    return [point for point in study.points() if tuple(point) not in done]


def read_rows(path: Path, study: Any) -> list[Row]:
    """The rows that a study has so far; begins the file, whose first line is the settings, if need be.

    A line that was cut short is dropped.

    Raises:
      ValueError: the file holds rows of another study.
    """
    settings = json.loads(json.dumps(asdict(study)))  # as the file has them: lists for tuples
    if not path.exists():
        path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    first, *rows = whole.splitlines()
    if json.loads(first) != settings:
        raise ValueError(f"{path} holds rows of a study with other settings: use another folder.")
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(row) for row in rows]


def append_rows(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Adds rows in one write; returns them as `read_rows` will."""
    # One write: a point counts as measured by any of its rows, so a kill may not leave some of them.
    lines = [json.dumps(row) for row in rows]
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
    return [json.loads(line) for line in lines]


# ------------------------------------------------------------------ what a study writes


def save(folder: Path, text: str) -> str:
    """Writes table.md; returns the text."""
    (folder / TABLE_FILE).write_text(text, encoding="utf-8")
    return text


def sections(parts: Mapping[str, str]) -> str:
    """Markdown: each text below its title."""
    return "\n".join(f"## {title}\n\n{text}" for title, text in parts.items())


def panels(lines: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Any, Any]:
    """A figure of `size` inches and its axes [lines, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False, **shared)


def error_bars(
    axes: Any, x: Sequence[float], found: Sequence[Interval], label: str, marker: str = "o"
) -> None:
    """Means over x with their intervals, which stay above 0: axes may be logarithmic."""
    means = [i.mean for i in found]
    widths = [min(i.half_width, 0.9 * i.mean) for i in found]
    style = {"marker": marker, "markersize": 4, "capsize": 2}
    axes.errorbar(x, means, yerr=widths, label=label, **style)


class Interval(NamedTuple):
    """Mean over seeds, and half the width of its 95 % confidence interval (Student)."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.2g} ± {self.half_width:.1g}"


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % interval of one value a seed; the half width of a single value is NaN.

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, half_width=2.484...)
    """
    from scipy.stats import t

    k, mean = len(values), float(np.mean(values))
    if k < 2:
        return Interval(mean, math.nan)
    return Interval(mean, float(t.ppf(0.975, k - 1) * np.std(values, ddof=1) / math.sqrt(k)))


# ------------------------------------------------------------------ generators


def philox(*key: int) -> np.random.Generator:
    """A generator for each key."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def pcg64(*key: int) -> np.random.Generator:
    """Another for each key: the figures of some studies are those of its draws."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
