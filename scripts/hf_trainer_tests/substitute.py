"""A plugin of pytest: the classes of transformers that the tests import are ours.

The environment says how: `HF_TRAINER_TESTS_ARM` is an arm of `ARMS`, and `HF_TRAINER_TESTS_RESULTS` the
file that gets a line of JSON for each test: its name, how it ended, and of a failure the last line.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hf_dpzero import DPZeroConfig, DPZeroSeq2SeqConfig, DPZeroSeq2SeqTrainer, DPZeroTrainer
from scripts.hf_trainer_tests import ARMS

EPSILON = 8.0
ARM = os.environ.get("HF_TRAINER_TESTS_ARM", ARMS[0])
PRIVATE = ARM == "private"


class _Rows:
    """Mixin of the trainers below: evaluation rows are no training rows, where these are private.

    Many tests evaluate on what they train on, which is refused: those training rows get a little more.
    """

    def __init__(self, *given: Any, **settings: Any) -> None:
        rows = settings.get("train_dataset")
        if PRIVATE and getattr(getattr(rows, "x", None), "dtype", None) == "float32":  # of numpy
            settings["train_dataset"] = rows = copy.copy(rows)
            rows.x = rows.x + 1e-4
        super().__init__(*given, **settings)


class Trainer(_Rows, DPZeroTrainer):
    """In place of Trainer."""


class Seq2SeqTrainer(_Rows, DPZeroSeq2SeqTrainer):
    """In place of Seq2SeqTrainer."""


class _Batch:
    """Mixin of the configurations below: where nothing is accumulated, B is the script's batch."""

    def __post_init__(self) -> None:
        if self.expected_batch_size is None and self.gradient_accumulation_steps == 1:
            self.expected_batch_size = float(self.per_device_train_batch_size)
        super().__post_init__()  # type: ignore[misc]


@dataclass
class Arguments(_Batch, DPZeroConfig):
    """In place of TrainingArguments."""

    method: str = "dpzero" if PRIVATE else "mezo"
    target_epsilon: float | None = EPSILON if PRIVATE else None
    rows_are: str | None = "examples" if PRIVATE else None  # some fill all that the model takes


@dataclass
class Seq2SeqArguments(_Batch, DPZeroSeq2SeqConfig):
    """In place of Seq2SeqTrainingArguments."""

    method: str = "dpzero" if PRIVATE else "mezo"
    target_epsilon: float | None = EPSILON if PRIVATE else None
    rows_are: str | None = "examples" if PRIVATE else None


INSTEAD = {
    "Trainer": Trainer,
    "TrainingArguments": Arguments,
    "Seq2SeqTrainer": Seq2SeqTrainer,
    "Seq2SeqTrainingArguments": Seq2SeqArguments,
}


def pytest_configure(config: pytest.Config) -> None:
    """Puts our classes where the tests import them from, and marks what this version lacks."""
    for file in sorted(Path(config.rootpath, "tests", "trainer").glob("*.py")):
        for module, name in _imported(file):
            if not hasattr(module, name):
                lacks = f"{module.__name__} has no {name} in this version"
                setattr(module, name, pytest.mark.skip(reason=lacks))
    if ARM != "plain":
        transformers = importlib.import_module(
            "transformers"
        )  # now; it replaces itself while it loads
        for name, ours in INSTEAD.items():
            setattr(transformers, name, ours)


def _imported(file: Path) -> list[tuple[Any, str]]:
    """What a file imports from modules of transformers that are there."""
    found = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        for part in ast.walk(node):
            named = part.module or "" if isinstance(part, ast.ImportFrom) else ""
            if named.split(".")[0] == "transformers":
                try:
                    module = importlib.import_module(named)
                except ImportError:
                    continue
                found += [(module, alias.name) for alias in part.names]
    return found


_ENDED: dict[str, dict[str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps how a test ended: as its worst phase or part did."""
    text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
    said = [line for line in text.splitlines() if line.startswith("E  ")] or text.splitlines()[-1:]
    now = {
        "test": report.nodeid,
        "ended": report.outcome,
        "said": said[0][1:].strip() if said else "",
    }
    before = _ENDED.setdefault(report.nodeid, now)
    if before["ended"] == "passed" or (report.failed and before["ended"] == "skipped"):
        _ENDED[report.nodeid] = now


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Writes a test's line, at once: a run that is killed loses none."""
    if nodeid in _ENDED:
        with open(os.environ["HF_TRAINER_TESTS_RESULTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(_ENDED[nodeid]) + "\n")
