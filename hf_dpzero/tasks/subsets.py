"""Which rows a recipe takes: columns that must be there, subsets drawn by a seed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np

from hf_dpzero.tasks.arguments import DataArguments


def column_of(splits: datasets.DatasetDict, namings: Sequence[str]) -> str:
    """The first naming that is a column of the rows; where none is, the first naming."""
    there = next(iter(splits.values())).column_names
    return next((naming for naming in namings if naming in there), namings[0])


def check_columns(
    splits: datasets.DatasetDict, text_columns: Sequence[str], label_column: str
) -> None:
    """Refuses rows without the text or label columns, naming the columns that there are.

    Raises:
      ValueError: a column is missing, or some row of it is empty (None).
    """
    settings = dict(zip(text_columns, ("text_column", "text_pair_column"), strict=False))
    settings[label_column] = "label_column"
    require_columns(splits, [*text_columns, label_column], settings)


def require_columns(
    splits: datasets.DatasetDict, columns: Sequence[str], settings: Mapping[str, str] | None = None
) -> None:
    """`check_columns` for any columns; `settings` names the setting that would choose another.

    Raises:
      ValueError: a column is missing, or some row of it is empty (None).
    """
    for split, rows in splits.items():
        for column in columns:
            if column not in rows.column_names:
                setting = (settings or {}).get(column, "the fields of the task")
                raise ValueError(
                    f"the {split} rows have no column {column!r} (they have "
                    f"{', '.join(rows.column_names)}); set {setting}."
                )
            empty = rows.data.column(column).null_count
            if empty:
                raise ValueError(
                    f"column {column!r} of the {split} rows is empty in {empty} of {len(rows)} rows; "
                    "fill or drop them."
                )


def subset(splits: datasets.DatasetDict, data: DataArguments) -> datasets.DatasetDict:
    """The rows that a recipe asks for, drawn by `subset_seed`, never by position.

    `num_examples_per_class` is drawn first, `max_train_samples` from what it leaves. The rows that
    are left are the n of the accounting.

    Raises:
      ValueError: a class has fewer rows than num_examples_per_class, and no
        `allow_fewer_per_class`.
    """
    train, validation = splits["train"], splits["validation"]
    seeds = ([data.subset_seed, split] for split in range(2))
    generators = [np.random.Generator(np.random.PCG64(seed)) for seed in seeds]
    if data.num_examples_per_class is not None:
        train = _few_shot(train, data, generators[0])
    return datasets.DatasetDict(
        train=_at_most(train, data.max_train_samples, generators[0]),
        validation=_at_most(validation, data.max_eval_samples, generators[1]),
    )


def _at_most(
    rows: datasets.Dataset, size: int | None, generator: np.random.Generator
) -> datasets.Dataset:
    """`size` rows without replacement, in their old order; all of them if there are no more."""
    if size is None or size >= len(rows):
        return rows
    return rows.select(np.sort(generator.choice(len(rows), size, replace=False)))


def _few_shot(
    rows: datasets.Dataset, data: DataArguments, generator: np.random.Generator
) -> datasets.Dataset:
    """`num_examples_per_class` rows of each class, in their old order."""
    labels, wanted = np.asarray(rows["label"][:]), int(data.num_examples_per_class or 0)
    classes, sizes = np.unique(labels, return_counts=True)
    counts = dict(zip(classes.tolist(), sizes.tolist(), strict=True))
    _check_class_sizes(counts, data, rows.features["label"])
    chosen = [
        generator.choice(np.flatnonzero(labels == label), min(wanted, count), replace=False)
        for label, count in counts.items()
    ]
    return rows.select(np.sort(np.concatenate(chosen)))


def _check_class_sizes(counts: Mapping[int, int], data: DataArguments, feature: Any) -> None:
    """Refuses, or with `allow_fewer_per_class` names, classes with too few rows."""
    wanted = int(data.num_examples_per_class or 0)
    few = {label: count for label, count in counts.items() if count < wanted}
    if not few:
        return
    names = getattr(feature, "names", list(range(max(counts) + 1)))
    said = ", ".join(
        f"label {names[label]} has {count} training rows" for label, count in few.items()
    )
    if not data.allow_fewer_per_class:
        raise ValueError(
            f"num_examples_per_class={wanted}, but {said}; lower it, or set allow_fewer_per_class "
            "to take all rows of such a class."
        )
    warnings.warn(
        f"num_examples_per_class={wanted}, but {said}, all of which are taken.", stacklevel=2
    )
