"""The results file of a study that can be interrupted: its settings first, then a row a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


def read_rows(path: Path, study: Any) -> list[dict[str, Any]]:
    """The rows that a study has so far; begins the file where there is none.

    Args:
      path: JSON lines, the first of them the study's settings; a line that was cut short is dropped.
      study: a dataclass, whose rows they must be.

    Returns:
      JSON-safe rows.

    Raises:
      ValueError: the file holds rows of another study.
    """
    settings = json.loads(json.dumps(asdict(study)))
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


def append_rows(path: Path, rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Adds rows at the end of the file, in one write.

    Args:
      path: of `read_rows`.
      rows: what JSON can hold.

    Returns:
      The rows as `read_rows` will give them back.
    """
    lines = [json.dumps(row) for row in rows]
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
    return [json.loads(line) for line in lines]


def measure_points(
    path: Path,
    study: Any,
    points: Iterable[Any],
    fields: Sequence[str],
    measure: Callable[..., Iterable[Any]],
    unit: str = "points",
) -> list[dict[str, Any]]:
    """Rows for every point of a study; points that the file holds already are not measured again.

    Args:
      path: of `read_rows`; its folder is made.
      study: a dataclass.
      points: tuples, in the order in which they are measured.
      fields: names in a row of a point's members, in order; they tell which points are done.
      measure: called with a point's members; its rows, written down before the next point begins.
      unit: what the progress bar calls points.

    Returns:
      JSON-safe rows: those that were there, then the new ones.

    Raises:
      ValueError: the file holds rows of another study.
    """
    from rich.progress import track

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(path, study)
    done = {tuple(row[field] for field in fields) for row in rows}
    left = [point for point in points if tuple(point) not in done]
    for point in track(left, description=f"{len(left)} {unit}"):
        rows += append_rows(path, measure(*point))
    return rows
