"""Rows of a data set become prompts or token rows, labels and scores.

Promises: every batch has one row an example; what a refusal says quotes no row; metrics need no network.
The number of training rows that a task keeps is the n of the privacy accounting. May import
`objectives`, `shipped` and `values` only. Start with `build_task`; then `classification.py` (heads) or
`prompted.py` (prompts), and `description.py` (how to describe your own).

Tasks have names: those of `TASKS`, by `register_task`, or the path of a YAML file.

| file | what it answers |
|---|---|
| `description` | what a task is, in a YAML file |
| `rows` | where rows come from, and which of them are kept |
| `classification` | labels, and the inputs of a model with a head; where texts are cut |
| `prompted`, `templates` | rows as prompts; their tokens, and where prompts are cut |
| `answers` | generated answers and their scores |
| `quickstart` | the rows of the quickstart |
"""

from __future__ import annotations

import filecmp
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dpzero.shipped import shipped_folder
from hf_dpzero.tasks.description import DataArguments, TaskDescription, read_task

if TYPE_CHECKING:
    from hf_dpzero.tasks.classification import Task
    from hf_dpzero.tasks.prompted import PromptTask

    AnyTask = Task | PromptTask

BENCHMARKS = ("boolq", "drop", "mnli", "rte", "snli", "squad", "sst2", "sst5", "trec")
"""The tasks of the paper (DPZero, Zhang et al. 2024, Tables 2, 4 and 5), in `configs/tasks`."""

TASKS = ("quickstart", "text_classification", *BENCHMARKS)
"""All tasks that come with the package."""

_REGISTERED: dict[str, TaskDescription] = {}


def register_task(description: TaskDescription) -> None:
    """Makes a task known by its name, for this process."""
    if description.name in TASKS:
        raise ValueError(
            f"task {description.name!r} comes with this package; give yours another name."
        )
    _REGISTERED[description.name] = description


def build_task(data: DataArguments, private_file: str | None = None) -> AnyTask:
    """Loads the task that a recipe names: of the package, registered, or in a .yaml file.

    Args:
      data: the recipe's.
      private_file: rows for a third split, "private", which are to be evaluated with noise.

    Raises:
      ValueError: an unknown task, or rows that the task refuses.
      OSError: data that can be found neither locally nor on the Hub, or no such .yaml file.
    """
    description = description_of(data.task)
    # These load `datasets`, which a command that only names a task does without.
    from hf_dpzero.tasks.answers import prompted_generation
    from hf_dpzero.tasks.classification import classification_task
    from hf_dpzero.tasks.prompted import prompted_classification

    if description is not None and description.generates:
        return prompted_generation(data, description, private_file)
    task = classification_task(data, description, private_file)
    return task if data.prompt is None else prompted_classification(task, data, description)


def description_of(name: str) -> TaskDescription | None:
    """Returns what is known of a task without its rows; None if only its data describes it.

    Raises:
      ValueError: an unknown task; names the known ones.
      FileNotFoundError: no such file.
    """
    if name == "text_classification":
        return None
    if name in TASKS:
        return _shipped(name)
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name.endswith((".yaml", ".yml")):
        return read_task(name)
    raise ValueError(
        f"task={name!r} is not one of {', '.join([*TASKS, *_REGISTERED])}; a task of your own is a "
        ".yaml file (see docs/tasks.md)."
    )


@functools.cache
def _shipped(name: str) -> TaskDescription:
    return read_task(str(shipped_folder("configs") / "tasks" / f"{name}.yaml"))


def same_rows(one: DataArguments, other: DataArguments) -> bool:
    """Returns whether two recipes draw their training rows from one file (or a copy), or data set.

    Subsets, columns and prompts do not matter.
    """
    if one.train_file and other.train_file:
        files = Path(one.train_file), Path(other.train_file)
        # A published recipe comes without its rows: then the names are all there is to compare.
        there = all(file.is_file() for file in files)
        return filecmp.cmp(*files, shallow=False) if there else files[0] == files[1]
    return _source(one) == _source(other)


def _source(data: DataArguments) -> tuple[str | None, ...]:
    """A file, or a data set and its configuration, or a task that makes its rows."""
    if data.train_file or data.dataset_name:
        return (data.train_file or data.dataset_name, data.dataset_config_name)
    description = description_of(data.task)
    if description is None or description.source is None:
        return (data.task,)
    return (description.source.name, data.dataset_config_name or description.source.config)
