"""Rows of a data set become prompts or token rows, labels and scores.

Promises: every batch has one row an example; what a refusal says quotes no row; metrics need no network.
The number of training rows that a task keeps is the n of the privacy accounting. May import
`objectives`, `shipped` and `values` only. Start with `build_task`; then `task.py` (classification heads)
or `prompted.py` (prompts), `benchmarks.py` (the paper's tasks) and `description.py` (how to describe
your own).

Tasks have names: by one line in `TASKS`, by `register_task`, or in a YAML file.
"""

from __future__ import annotations

import filecmp
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dpzero.tasks.arguments import DataArguments

if TYPE_CHECKING:
    from hf_dpzero.tasks.description import TaskDescription
    from hf_dpzero.tasks.prompted import PromptTask
    from hf_dpzero.tasks.task import Task

    AnyTask = Task | PromptTask

_BENCHMARKS = ("boolq", "drop", "mnli", "rte", "snli", "squad", "sst2", "sst5", "trec")
TASKS = {
    "quickstart": "hf_dpzero.tasks.quickstart",
    "text_classification": "hf_dpzero.tasks.text_classification",
    **dict.fromkeys(_BENCHMARKS, "hf_dpzero.tasks.benchmarks"),
}
"""Task name -> the module that describes it, or that has `build(DataArguments) -> Task`."""

_REGISTERED: dict[str, TaskDescription] = {}


def register_task(description: TaskDescription) -> None:
    """Makes a task known by its name, for this process."""
    if description.name in TASKS:
        raise ValueError(
            f"task {description.name!r} comes with this package; give yours another name."
        )
    _REGISTERED[description.name] = description


def build_task(data: DataArguments) -> AnyTask:
    """Loads the task that a recipe names: of the package, registered, or in a .yaml file.

    Raises:
      ValueError: an unknown task, or rows that the task refuses.
      OSError: data that can be found neither locally nor on the Hub, or no such .yaml file.
    """
    description = description_of(data.task)
    if description is None:
        return importlib.import_module(TASKS[data.task]).build(data)
    from hf_dpzero.tasks.benchmarks import build_described

    return build_described(data, description)


def description_of(name: str) -> TaskDescription | None:
    """What is known of a task without its rows; None if only its data describes it.

    Raises:
      ValueError: an unknown task; names the known ones.
      FileNotFoundError: no such file.
    """
    if name in TASKS:
        from hf_dpzero.tasks.benchmarks import BENCHMARKS

        return BENCHMARKS.get(name)
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name.endswith((".yaml", ".yml")):
        from hf_dpzero.tasks.description import read_task

        return read_task(name)
    raise ValueError(
        f"task={name!r} is not one of {', '.join([*TASKS, *_REGISTERED])}; a task of your own is a "
        ".yaml file (see docs/tasks.md)."
    )


def same_rows(one: DataArguments, other: DataArguments) -> bool:
    """Whether two recipes draw their training rows from one file (or a copy of it), or data set.

    Subsets, columns and prompts do not matter.
    """
    if one.train_file and other.train_file:
        files = Path(one.train_file), Path(other.train_file)
        there = all(file.is_file() for file in files)
        return filecmp.cmp(*files, shallow=False) if there else files[0] == files[1]
    return _source(one) == _source(other)


def _source(data: DataArguments) -> tuple[str | None, ...]:
    """Of training rows: a file, or a data set and its configuration, or a task that makes its rows."""
    if data.train_file or data.dataset_name:
        return (data.train_file or data.dataset_name, data.dataset_config_name)
    source = getattr(description_of(data.task), "source", None)
    if source is None:
        return (data.task,)
    return (source.name, data.dataset_config_name or source.config)
