"""How many rows a recipe trains on and how many labels they have, without a download."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_dpzero.tasks.arguments import DataArguments

_FLAGS = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_DATASETS_OFFLINE"),
)


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """What a plan needs to know of the data.

    Attributes:
      train: n, rows of training data; None if nobody knows.
      validation: rows of validation data; None if they are not here.
      labels: number of classes; 0 where answers are generated; None if it is not known.
      source: where `train` comes from, in words; or what to give if it is None.
      task: with its rows, if they are here.
    """

    train: int | None
    validation: int | None = None
    labels: int | None
    source: str
    task: Any = None


def count_rows(data: DataArguments, given: int | None = None) -> RowCounts:
    """Counts the rows if they are here, else derives n from the recipe, else takes `given`.

    Rows that are here are those of local files, of the data sets cache and of the quickstart, after
    the recipe's own choice of rows.

    Args:
      given: n as the user says, for data that is not here.

    Raises:
      ValueError, OSError: what the task refuses; `given` is not what is here.
    """
    task = _task_that_is_here(data)
    if task is None:
        return _derived(data, given)
    here = len(task.splits["train"])
    if given is not None and given != here:
        raise ValueError(
            f"num_examples={given}, but the recipe's data is here and has {here} training rows: "
            "leave --num_examples out, or change the data settings."
        )
    return RowCounts(
        train=here,
        validation=len(task.splits["validation"]),
        labels=len(task.label_names),
        source=f"the training rows of task {task.name}, which are here",
        task=task,
    )


def _task_that_is_here(data: DataArguments) -> Any:
    """The task with its rows, or None if they would have to be downloaded."""
    from hf_dpzero.tasks import build_task

    try:
        with offline():
            return build_task(data)
    except OSError:
        if data.train_file or data.validation_file:
            raise
        return None


def _derived(data: DataArguments, given: int | None) -> RowCounts:
    labels = known_labels(data.task)
    if given is not None:
        return RowCounts(train=given, labels=labels, source="--num_examples")
    per_class, most = data.num_examples_per_class, data.max_train_samples
    if per_class is not None and labels:
        count = per_class * labels
        source = f"num_examples_per_class={per_class} x {labels} classes, if each has so many"
        if most is not None and most < count:
            count, source = most, f"max_train_samples={most}"
        return RowCounts(train=count, labels=labels, source=source)
    if per_class is None and most is not None:
        source = f"max_train_samples={most}, if the data has so many"
        return RowCounts(train=most, labels=labels, source=source)
    return RowCounts(
        train=None,
        labels=labels,
        source="the data is not here: give --num_examples N, its number of training rows",
    )


def known_labels(task: str) -> int | None:
    """The number of classes of a built-in task, 0 if its answers are generated; None: not known."""
    description = description_of(task)
    return None if description is None else len(description.label_names)


def description_of(task: str) -> Any:
    """What is known of a described task without its rows; None for the others."""
    from hf_dpzero import tasks

    return tasks.description_of(task)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Inside, Hugging Face's libraries read their caches and call nobody."""
    import datasets  # noqa: F401 (its flag is set below)

    saved = [(sys.modules[m], name, getattr(sys.modules[m], name, None)) for m, name in _FLAGS]
    try:
        for module, name, _ in saved:
            setattr(module, name, True)
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)
