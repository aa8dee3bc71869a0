"""Metrics of each group of the evaluation data, and of the group that is worst off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import EvalPrediction
from transformers.utils import logging

from hf_dpzero.training.group_settings import column_values, groups_of, metric_key

logger = logging.get_logger(__name__)

Metrics = Callable[[EvalPrediction], dict[str, float]]


def by_group(compute: Metrics | None, config: Any, dataset: Any) -> Metrics | None:
    """The metrics of all rows, of each group (`accuracy_of_NAME`) and the least one over groups.

    `worst_group_accuracy` is the smallest accuracy of a group, and so for every metric: larger is taken
    to be better. Groups without a row are left out.

    Args:
      compute: of the trainer, or None.
      config: its arguments; those without `group_column` change nothing.
      dataset: the evaluation data, whose own column of groups is read.

    Returns:
      Metrics; `compute` itself where there are no groups, or no column with them (a warning says so).

    Raises:
      ValueError: a row of a group that `group_shares` does not name.
    """
    column = getattr(config, "group_column", None)
    if column is None or compute is None or dataset is None or config.batch_eval_metrics:
        return compute
    groups = groups_of(config)
    values = column_values(dataset, column)
    if values is None or groups is None:
        logger.warning_once(
            f"the evaluation data has no column {column!r} (group_column): no metrics of single groups."
        )
        return compute
    of, names = groups.index_of(values), groups.names

    def measured(prediction: EvalPrediction) -> dict[str, float]:
        whole = dict(compute(prediction))
        if len(of) != _rows(prediction.label_ids):
            logger.warning_once("not one prediction for each row: no metrics of single groups.")
            return whole
        parts = {
            metric_key(name): compute(_chosen(prediction, np.flatnonzero(of == i)))
            for i, name in enumerate(names)
            if (of == i).any()
        }
        return whole | _named(parts)

    return measured


def _named(parts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """{group: {metric: value}} as metrics of their own, and the least of each."""
    metrics = list(next(iter(parts.values())))
    single = {f"{m}_of_{name}": part[m] for name, part in parts.items() for m in metrics}
    worst = {f"worst_group_{m}": min(part[m] for part in parts.values()) for m in metrics}
    return single | worst


def _chosen(prediction: EvalPrediction, rows: np.ndarray) -> EvalPrediction:
    """The prediction of some rows."""
    fields = {"predictions": prediction.predictions, "label_ids": prediction.label_ids}
    for name in ("inputs", "losses"):
        if getattr(prediction, name, None) is not None:
            fields[name] = getattr(prediction, name)
    return EvalPrediction(**{name: _taken(value, rows) for name, value in fields.items()})


def _taken(value: Any, rows: np.ndarray) -> Any:
    if isinstance(value, Mapping):
        return type(value)({k: _taken(v, rows) for k, v in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return type(value)(_taken(v, rows) for v in value)
    return value[rows]


def _rows(labels: Any) -> int:
    first = labels[0] if isinstance(labels, tuple | list) else labels
    if isinstance(first, Sequence | np.ndarray):
        return len(first)
    return -1
