"""How many rows a recipe trains on and how many labels they have, without a download."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_dpzero.tasks import build_task, description_of
from hf_dpzero.tasks.arguments import DataArguments


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """What a plan needs to know of the data."""

    train: int | None  # n, rows of training data; None if nobody knows
    labels: int | None  # number of classes; 0 where answers are generated; None if it is not known
    source: str  # where `train` comes from, in words; or what to give if it is None
    task: Any = None  # with its rows, if they are here


def count_rows(data: DataArguments, given: int | None = None) -> RowCounts:
    """Counts the rows if they are here, else takes `given`, else derives n from the recipe.

    Rows that are here are those of local files, of the data sets cache and of the quickstart, after
    the recipe's own choice of rows.

    Args:
      data: the recipe's.
      given: n as the user says, for data that is not here.

    Returns:
      The counts.

    Raises:
      ValueError, OSError: what the task refuses; `given` is not what is here.
    """
    task = _task_that_is_here(data)
    if task is None:
        description = description_of(data.task)
        labels = None if description is None else len(description.label_names)
        train, source = (given, "--num_examples") if given is not None else _derived(data, labels)
        return RowCounts(train=train, labels=labels, source=source)
    here = len(task.splits["train"])
    if given is not None and given != here:
        raise ValueError(
            f"num_examples={given}, but the recipe's data is here and has {here} training rows: "
            "leave --num_examples out, or change the data settings."
        )
    source = f"the training rows of task {task.name}, which are here"
    return RowCounts(train=here, labels=len(task.label_names), source=source, task=task)


def _task_that_is_here(data: DataArguments) -> Any:
    """The task with its rows, or None if they would have to be downloaded."""
    try:
        with offline():
            return build_task(data)
    except OSError:
        if data.train_file or data.validation_file:
            raise
        return None


def _derived(data: DataArguments, labels: int | None) -> tuple[int | None, str]:
    """n from the recipe's choice of rows, and where it comes from."""
    per_class, most = data.num_examples_per_class, data.max_train_samples
    if per_class is not None and labels:
        count = per_class * labels
        if most is not None and most < count:
            return most, f"max_train_samples={most}"
        return count, f"num_examples_per_class={per_class} x {labels} classes, if each has so many"
    if per_class is None and most is not None:
        return most, f"max_train_samples={most}, if the data has so many"
    return None, "the data is not here: give --num_examples N, its number of training rows"


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Inside, Hugging Face's libraries read their caches and call nobody."""
    import datasets.config
    import huggingface_hub.constants

    hub, data = huggingface_hub.constants, datasets.config
    flags = ((hub, "HF_HUB_OFFLINE"), (data, "HF_HUB_OFFLINE"), (data, "HF_DATASETS_OFFLINE"))
    saved = [getattr(module, name, None) for module, name in flags]
    try:
        for module, name in flags:
            setattr(module, name, True)
        yield
    finally:
        for (module, name), value in zip(flags, saved, strict=True):
            setattr(module, name, value)
