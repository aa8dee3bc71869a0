"""Tasks by name, registered by one line in `TASKS`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hf_dpzero.recipe_arguments import DataArguments

if TYPE_CHECKING:
    from hf_dpzero.tasks.base import Task

TASKS = {
    "mnli": "hf_dpzero.tasks.benchmarks",
    "quickstart": "hf_dpzero.tasks.quickstart",
    "rte": "hf_dpzero.tasks.benchmarks",
    "snli": "hf_dpzero.tasks.benchmarks",
    "sst2": "hf_dpzero.tasks.benchmarks",
    "sst5": "hf_dpzero.tasks.benchmarks",
    "text_classification": "hf_dpzero.tasks.text_classification",
    "trec": "hf_dpzero.tasks.benchmarks",
}
"""Task name -> module with `build(DataArguments) -> Task`, imported on first use."""


def build_task(data: DataArguments) -> Task:
    """Loads the task that a recipe names.

    Raises:
      ValueError: an unknown task, or rows that the task refuses.
      OSError: data that can be found neither locally nor on the Hub.
    """
    if data.task not in TASKS:
        raise ValueError(f"task={data.task!r} is not one of {', '.join(TASKS)}.")
    return importlib.import_module(TASKS[data.task]).build(data)
