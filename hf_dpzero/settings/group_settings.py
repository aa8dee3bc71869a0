"""Settings of group-robust training: the column with groups, their shares, and what is released."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_dpzero.privacy.group_losses import (
    GROUP_LOSSES,
    BudgetedGroups,
    GroupLosses,
    VertexGroups,
)

GROUP_WEIGHTS = tuple(GROUP_LOSSES)
OF_GROUPS = (
    *("group_shares", "group_weights", "group_loss_bound"),
    *("group_rate", "group_budget", "group_draws"),
)


def groups_of(config: Any) -> GroupLosses | None:
    """What the settings of a `DPZeroConfig` say of groups.

    Args:
      config: its fields `group_*`.

    Returns:
      None without `group_column`.

    Raises:
      ValueError: a setting that is missing, or of no effect or sense.
    """
    if config.group_column is None:
        _refuse_alone(config)
        return None
    kind = GROUP_LOSSES[config.group_weights]
    shares = _shares(config)
    values: dict[str, Any] = {
        "names": tuple(shares),
        "shares": tuple(shares.values()),
        "loss_bound": config.group_loss_bound,
    }
    if issubclass(kind, VertexGroups) and config.group_rate is not None:
        raise ValueError(
            f"group_rate={config.group_rate} with group_weights='vertex', whose rate follows from the "
            "budget (each draw costs in proportion to its square): set group_budget, or use another "
            "group_weights."
        )
    if not issubclass(kind, VertexGroups):
        values["rate"] = config.group_rate
    if issubclass(kind, BudgetedGroups):
        values["budget"] = config.group_budget
    if issubclass(kind, VertexGroups):
        values["draws"] = config.group_draws
    return kind(**values)


def _refuse_alone(config: Any) -> None:
    """Refuses settings of groups that have no column to work on."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in OF_GROUPS:
        if getattr(config, name) != defaults[name]:
            raise ValueError(
                f"{name}={getattr(config, name)!r} without group_column: name the column of "
                f"train_dataset that holds each row's group, or leave {name} out."
            )


def _shares(config: Any) -> dict[str, float]:
    """`group_shares` as {name: share}, also where it was given as a text of JSON."""
    shares = config.group_shares
    if isinstance(shares, str):
        try:
            shares = json.loads(shares)
        except json.JSONDecodeError as error:
            raise ValueError(f"group_shares={config.group_shares!r} is no JSON: {error}.") from None
    if not isinstance(shares, Mapping) or not shares:
        raise ValueError(
            f"group_shares={config.group_shares!r} with group_column={config.group_column!r}: give "
            "every "
            "group's name and public share, {urban: 0.8, rural: 0.2}, from a source outside of the "
            "private "
            "rows (a census, say). Counted on these, both would be published without noise."
        )
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise ValueError(
                f"group_shares gives {name!r} the share {share!r}: give a number in (0, 1]."
            )
    return {str(name): float(share) for name, share in shares.items()}


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
            f"group_column={column!r} is no column of train_dataset: keep it where the rows are "
            "tokenised "
            "(the trainer takes it away from the model's inputs itself), or name another."
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
    return [row.get(column) if isinstance(row, Mapping) else None for row in rows]
