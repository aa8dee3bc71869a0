"""Comparisons of several tasks in one table: methods down, tasks across, as in the paper's Table 2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_dpzero.experiments.aggregate import JSON_FILE, Cell, Record
from hf_dpzero.experiments.plots import plot_tasks
from hf_dpzero.experiments.results import encode
from hf_dpzero.experiments.tables import (
    NONE,
    TABLE_FILE,
    at,
    grid,
    mebibytes,
    passes,
    score,
    seconds,
    spent,
    trouble,
)
from hf_dpzero.ledger.log_file import write_atomically
from hf_dpzero.reporting.wording import relation_words

Records = Sequence[tuple[str, Record]]


def merge(folders: Sequence[str | os.PathLike[str]], output_dir: str | os.PathLike[str]) -> str:
    """Writes comparison.json, comparison.md and comparison.png of all tasks; returns the Markdown.

    Raises:
      FileNotFoundError: a folder holds no comparison.
      ValueError: none or one folder, or their epsilons are of different neighbouring relations.
    """
    records = named([Record.load(folder) for folder in folders], [Path(f).name for f in folders])
    check_mergeable(records)
    target = Path(output_dir)
    if target.resolve() in {Path(folder).resolve() for folder in folders}:
        raise ValueError(f"--output_dir {output_dir} is one of the folders; name another one.")
    target.mkdir(parents=True, exist_ok=True)
    text = markdown(records)
    write_atomically(target / TABLE_FILE, text)
    write_atomically(target / JSON_FILE, json.dumps(summary(records), indent=1) + "\n")
    plot_tasks(records, target)
    return text


def named(records: Sequence[Record], folders: Sequence[str]) -> Records:
    """Each record under its task's name, or its folder's where two are of one task."""
    tasks = [str(record.settings["task"]) for record in records]
    names = [f if tasks.count(t) > 1 else t for t, f in zip(tasks, folders, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} stands for two comparisons; rename one of their folders.")
    return list(zip(names, records, strict=True))


def check_mergeable(records: Records) -> None:
    """Refuses fewer than two comparisons, and epsilons of different neighbouring relations."""
    if len(records) < 2:
        raise ValueError(f"{len(records)} comparison to merge; give the folders of two or more.")
    first_name, first = next(((n, r) for n, r in records if _relation(r)), records[0])
    for name, record in records:
        if _relation(record) not in (None, _relation(first)):
            raise ValueError(
                f"{first_name} and {name} mean different things by epsilon: neighboring_relation is "
                f"{_relation(first)} in the first and {_relation(record)} in the second."
            )


def _relation(record: Record) -> str | None:
    return record.settings.get("neighboring_relation")


def summary(records: Records) -> dict[str, object]:
    """The merged comparison.json: task -> settings and cells."""
    tasks = {
        name: {
            "settings": record.settings,
            "cells": [vars(cell) for cell in record.cells],
            "zero_shot": [vars(cell) for cell in record.zero_shot],
            "failures": [row.to_dict() for row in record.rows if not row.done],
            "pending": record.pending,
        }
        for name, record in records
    }
    return {"tasks": encode(tasks)}


def markdown(records: Records) -> str:
    """Tables of score, seconds, memory, spent epsilon and forwards; captions; failures."""
    tasks = ", ".join(name for name, _ in records)
    parts = [f"# {tasks}", _table(records, "score (%)", score, zero_shot=True), *_caption(records)]
    for title, show in _COSTS.items():
        parts += [f"## {title}", _table(records, "", show, zero_shot=False)]
    return "\n\n".join([*parts, *_settings(records), *_troubles(records)]) + "\n"


def _shown(figure: str, show: Callable[[float], str]) -> Callable[[Cell | None], str]:
    def text(cell: Cell | None) -> str:
        value = None if cell is None else getattr(cell, figure)
        return NONE if value is None else show(value)

    return text


_COSTS: dict[str, Callable[[Cell | None], str]] = {
    "Seconds per step": _shown("seconds_per_step", seconds),
    "Peak memory of training steps (MiB)": _shown("peak_memory_bytes", mebibytes),
    "Epsilon spent": _shown("epsilon_spent", spent),
    "Example-forwards": _shown("forwards", passes),
    "Example-backwards": _shown("backwards", passes),
}


def _table(
    records: Records, unit: str, show: Callable[[Cell | None], str], *, zero_shot: bool
) -> str:
    head = [f"method{f', {unit}' if unit else ''}", *(name for name, _ in records)]
    body = [
        [f"{method}, {at(epsilon)}", *(show(r.cell(method, epsilon)) for _, r in records)]
        for method, epsilon in _lines(records)
    ]
    return grid(head, [*body, *(_zero_shot(records) if zero_shot else [])])


def _lines(records: Records) -> list[tuple[str, float]]:
    """(method, epsilon) of all tables: methods as they first appear, largest epsilon first."""
    found = dict.fromkeys((c.method, c.epsilon) for _, r in records for c in r.cells)
    methods = list(dict.fromkeys(method for method, _ in found))
    return sorted(found, key=lambda line: (methods.index(line[0]), -line[1]))


def _zero_shot(records: Records) -> list[list[str]]:
    names = dict.fromkeys(cell.method for _, record in records for cell in record.zero_shot)
    return [[name, *(score(_zero_shot_cell(r, name)) for _, r in records)] for name in names]


def _zero_shot_cell(record: Record, name: str) -> Cell | None:
    return next((cell for cell in record.zero_shot if cell.method == name), None)


def _caption(records: Records) -> list[str]:
    relation = next((r for _, record in records if (r := _relation(record))), None)
    told = f" under {relation_words(relation, 'example')}" if relation else ""
    per_task = "; ".join(
        f"{name}: seeds {', '.join(map(str, record.settings['seeds']))}, δ = "
        f"{record.settings['delta']}"
        for name, record in records
    )
    shared = max((row.jobs for _, record in records for row in record.rows), default=1)
    texts = [
        "Mean ± standard error over seeds, in per cent; figures are cut off, not rounded, and spent "
        f"epsilons are rounded up. {per_task}.",
        f"Each epsilon is that of one run{told}; it does not add up the runs of the table. Private "
        "runs cannot be repeated bit for bit, by design: noise and batches come from the operating "
        "system's entropy. Their seconds and memory depend on the secret batches; no epsilon covers "
        "them.",
    ]
    if shared > 1:
        texts.append("Some runs shared their machine: seconds per step are noisy.")
    return texts


def _settings(records: Records) -> list[str]:
    lines = [
        f"- {name}, {arm['name']}: `{arm['source']}`"
        for name, record in records
        for arm in record.settings["arms"]
    ]
    return ["## Settings", "\n".join(lines)]


def _troubles(records: Records) -> list[str]:
    lines = [f"- {n}: {trouble(row)}" for n, r in records for row in r.rows if not row.done]
    lines += [f"- {name}: {run} is still to be made" for name, r in records for run in r.pending]
    return ["## Runs that do not count", "\n".join(lines)] if lines else []
