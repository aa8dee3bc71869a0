"""Evaluation: rows by length, losses of objectives that predict; metrics of groups, and of the worst."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import SequentialSampler
from transformers import EvalPrediction, Trainer, TrainingArguments
from transformers.utils import logging

from hf_dpzero.checks.overrides import overriding
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.heads import is_classifier
from hf_dpzero.objectives.prompted import PromptObjective
from hf_dpzero.privacy.group_losses import metric_keys, places
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.plan_of import groups_of
from hf_dpzero.settings.row_groups import column_values

logger = logging.get_logger(__name__)

Metrics = Callable[[EvalPrediction], dict[str, float]]

_SMALLER_IS_BETTER = re.compile(
    r"(^|_)(loss|nll|perplexity|ppl|error|mse|rmse|mae|wer|cer|brier|ece)(_|$)", re.IGNORECASE
)


class RowOrder(SequentialSampler):
    """Evaluation rows in the order of their data, or in that of `order`: row numbers, int [n]."""

    order: np.ndarray | None = None

    def __iter__(self) -> Iterator[int]:
        return super().__iter__() if self.order is None else iter(self.order.tolist())

    def restored(self, value: Any) -> Any:
        """Returns arrays of rows that were evaluated in this order in that of the data."""
        return value if self.order is None else _taken(value, np.argsort(self.order))

    def metrics(self, compute: Metrics | None) -> Metrics | None:
        """Has metrics see rows in the order of the data."""
        if compute is None or self.order is None:
            return compute
        places = np.argsort(self.order)
        return lambda prediction: compute(_rows_of(prediction, places))


def longest_first(trainer: Any, loader: Any) -> RowOrder:
    """Has a loader's rows come by their number of tokens, where what is shown of them stays the same.

    Batches then hold little padding. Rows stay where they are if a batch's loss is no mean over rows (of
    language models it is one over tokens), or if functions of the user's see batches or their order.

    Args:
      trainer: evaluates.
      loader: of its evaluation rows, or another.

    Returns:
      The loader's order, to be set to None afterwards; of other loaders one that is not set.
    """
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # of several processes: around another
    rows, args, own = getattr(batches, "sampler", None), trainer.args, trainer.per_example_loss
    if not isinstance(rows, RowOrder):
        return RowOrder(())
    tells = bool(args.batch_eval_metrics or args.include_for_metrics or args.dataloader_drop_last)
    tells |= bool(trainer.compute_loss_func or trainer.preprocess_logits_for_metrics)
    own_methods = ("evaluation_loop", "prediction_step", "compute_loss")
    tells |= any(overriding(type(trainer), name)[0] for name in own_methods)
    by_row = is_classifier(trainer.model) if own is None else isinstance(own, PromptObjective)
    if by_row and args.eval_do_concat_batches and not tells:
        rows.order = _by_tokens(rows.data_source)
    return rows


def _by_tokens(dataset: Any) -> np.ndarray | None:
    """Row numbers, those with most tokens first, int [n]; None where no column has the tokens."""
    if not isinstance(dataset, datasets.Dataset) or "input_ids" not in dataset.column_names:
        return None
    table = dataset.with_format("arrow")
    for name in {"labels", "label"} & set(dataset.column_names):
        labels = table.select_columns(name)[:][name]
        if pa.types.is_integer(labels.type) and (pc.min(labels).as_py() or 0) < 0:
            return None  # rows without one: a batch's loss is no mean over its rows
    column = table.select_columns("input_ids")[:]["input_ids"]
    if not str(column.type).partition("<")[0].endswith("list"):
        return None
    return np.argsort(-np.asarray(pc.list_value_length(column)), kind="stable")


@dataclass(frozen=True)
class RowGroups:
    """The groups that evaluation data has.

    Attributes:
      rows: row numbers of each group that has rows, by its name in metrics.
      count: rows in all, also those of no group.
    """

    rows: Mapping[str, np.ndarray]
    count: int

    def losses(self, losses: np.ndarray) -> dict[str, float]:
        """`loss_of_NAME`, each group's mean, and `worst_group_loss`, the largest of them.

        Args:
          losses: of each row, float [count].

        Returns:
          Nothing if there is not one loss for each row.
        """
        if len(losses) != self.count:
            return _unmatched("loss")
        return _named({k: {"loss": float(losses[own].mean())} for k, own in self.rows.items()})


def groups_of_rows(config: DPZeroConfig, dataset: Any) -> RowGroups | None:
    """Reads the groups of evaluation data from its own `group_robust.column`.

    Returns:
      None without `group_robust.column`, and where no row has a group (a warning says so). Rows
      of groups that `group_robust.shares` does not name are in none; a warning tells of the first one.
    """
    groups = None if dataset is None else groups_of(config)
    if groups is None:
        return None
    column = str(config.group_robust.column)
    values = column_values(dataset, column)
    if values is None:
        logger.warning_once(
            f"the evaluation data has no column {column!r} (group_robust.column): no "
            "metrics of single groups."
        )
        return None
    of = places(values, groups.names)
    if (of < 0).any():
        logger.warning_once(
            f"row {int(np.argmax(of < 0)) + 1} (counted from 1) of the evaluation data, and perhaps "
            f"others, has in column {column!r} a group that group_robust.shares does not "
            "name: these rows "
            "count in the metrics of all rows, and in those of no group."
        )
    keys = dict(enumerate(metric_keys(groups.names)))
    rows = {key: np.flatnonzero(of == i) for i, key in keys.items() if (of == i).any()}
    return RowGroups(rows, len(of)) if rows else None


def by_group(
    compute: Metrics | None, groups: RowGroups | None, config: DPZeroConfig
) -> Metrics | None:
    """The metrics of all rows, of each group (`accuracy_of_NAME`) and of the worst one.

    `worst_group_accuracy` is the smallest accuracy of a group, and so for every number that `compute`
    returns; of names like loss, error or perplexity it is the largest. What is no number, or not finite,
    is left out. A group whose metrics cannot be computed (the area under a curve of rows of one class)
    is left out, with a warning.

    Args:
      compute: of the trainer, or None; called once for all rows and once for each group.
      groups: of the evaluation data, or None.
      config: the trainer's arguments.

    Returns:
      Metrics; `compute` itself where there is nothing to add.
    """
    if compute is None or groups is None:
        return compute
    if config.batch_eval_metrics:
        logger.warning_once(
            "batch_eval_metrics=True: no metrics of single groups (group_robust.column)."
        )
        return compute

    def measured(prediction: EvalPrediction) -> dict[str, float]:
        whole = dict(compute(prediction))
        if groups.count != _rows(prediction.label_ids):
            return whole | _unmatched("prediction")
        parts: dict[str, Mapping[str, Any]] = {}
        for key, rows in groups.rows.items():
            try:
                parts[key] = compute(_rows_of(prediction, rows))
            except (ValueError, ArithmeticError, LookupError) as error:
                kind = type(error).__name__
                logger.warning_once(
                    f"compute_metrics raised {kind} for group {key!r}: no metrics of it."
                )
        return whole | _named(parts)

    return measured


def try_metrics(trainer: Trainer) -> None:
    """Evaluates two batches without showing anything, for a mistake in a metric is to cost no budget.

    What fails on so few rows alone (an area under a curve needs two classes) is tried on all of them.

    Args:
      trainer: with public evaluation rows; state, callbacks and random numbers stay as they are.

    Raises:
      Exception: what evaluation of all rows raises; nothing was released.
    """
    rows: Any = trainer.eval_dataset
    rows = next(iter(rows.values()), None) if isinstance(rows, Mapping) else rows
    known = hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
    if trainer.compute_metrics is None or not known or trainer.args.eval_on_start:
        return  # eval_on_start evaluates all of them
    count = 2 * trainer.args.eval_batch_size * trainer.args.world_size
    first = range(min(count, len(rows)))
    subset: Callable[..., Any] = torch.utils.data.Subset
    few = rows.select(first) if isinstance(rows, datasets.Dataset) else subset(rows, first)
    shown, logged = trainer.callback_handler.callbacks, list(trainer.state.log_history)
    trainer.callback_handler.callbacks = []
    try:
        with isolated_randomness():
            try:
                trainer.evaluate(few)
            except Exception:
                trainer.evaluate(rows)
    except Exception:
        logger.error("evaluation fails before step 0: no budget was spent.")
        raise
    finally:
        trainer.callback_handler.callbacks, trainer.state.log_history = shown, logged
        vars(trainer).pop("model_preparation_time", None)  # or each later evaluation logs it


def _unmatched(what: str) -> dict[str, float]:
    logger.warning_once(f"not one {what} for each row: no metrics of single groups.")
    return {}


def _named(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """{group: {metric: value}} as metrics of their own, and the worst of each."""
    single: dict[str, float] = {}
    every: dict[str, list[float]] = {}
    for name, part in parts.items():
        for metric, value in part.items():
            if isinstance(value, Real) and math.isfinite(value):
                single[f"{metric}_of_{name}"] = value  # type: ignore[assignment]
                every.setdefault(metric, []).append(value)  # type: ignore[arg-type]
    worst = {m: max if _SMALLER_IS_BETTER.search(m) else min for m in every}
    return single | {f"worst_group_{m}": worst[m](values) for m, values in every.items()}


def _rows_of(prediction: EvalPrediction, rows: np.ndarray) -> EvalPrediction:
    names = ("predictions", "label_ids", "inputs", "losses")
    fields = {name: getattr(prediction, name, None) for name in names}
    return EvalPrediction(**{n: _taken(v, rows) for n, v in fields.items() if v is not None})


def _taken(value: Any, rows: np.ndarray) -> Any:
    if isinstance(value, Mapping):
        return type(value)({k: _taken(v, rows) for k, v in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return type(value)(_taken(v, rows) for v in value)
    return None if value is None else value[rows]


def _rows(labels: object) -> int:
    first = labels[0] if isinstance(labels, tuple | list) else labels
    if isinstance(first, Sequence | np.ndarray):
        return len(first)
    return -1


@contextlib.contextmanager
def own_mean(args: TrainingArguments) -> Iterator[None]:
    """Inside, transformers takes a batch's loss as the mean over that batch, on every process.

    It would multiply the loss by the number of processes otherwise, for models that divide by the
    labels of all processes. Most that take `**kwargs` do not (classification, spans), and their
    `eval_loss` would be 2 times that of one process with two. Processes evaluate the batches that one
    would, so a mean for each batch is also what one process reports.
    """
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before
