"""Groups of rows: the column of a data set that `group_robust.column` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_dpzero.privacy.group_losses import GroupLosses


def row_groups(groups: GroupLosses, column: str, dataset: Any) -> np.ndarray:
    """The group of each row as a number, int64 [n]; private.

    Args:
      groups: their names.
      column: of the data set.
      dataset: rows by number, each {column: value}, or a `datasets.Dataset`.

    Raises:
      ValueError: no such column, or a row of a group that has no share.
    """
    names = column_values(dataset, column)
    if names is None:
        raise ValueError(
            f"group_robust.column={column!r} is no column of train_dataset: keep it where the rows are "
            "tokenised (the trainer takes it away from the model's inputs itself), or name another."
        )
    return groups.index_of(names)


def column_values(dataset: Any, column: str) -> list[Any] | None:
    """A column of a map-style data set, class labels by their names; None if it has none.

    Values that a row lacks are None, class labels of -1 ("no label") too.
    """
    features = getattr(dataset, "features", None)
    if features is not None:
        if column not in features:
            return None
        # A format of tensors would give values that equal no name.
        plain = dataset.with_format(None) if hasattr(dataset, "set_transform") else dataset
        values = list(plain[column][:])
        names = getattr(features[column], "names", None)
        if names is None:
            return values
        return [None if value is None or value < 0 else names[value] for value in values]
    if not hasattr(dataset, "__len__"):  # a stream
        return None
    rows = [dataset[i] for i in range(len(dataset))]
    if not any(isinstance(row, Mapping) and column in row for row in rows):
        return None
    return [_plain(row.get(column)) if isinstance(row, Mapping) else None for row in rows]


def _plain(value: Any) -> Any:
    """A number out of its array: arrays and tensors with equal values are different keys."""
    return value.item() if getattr(value, "shape", None) == () else value
