"""One JSON file, written anew as each item ends: a cut loses the running item and nothing else."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, SKIPPED, RUNNING = "ok", "failed", "skipped", "running"
"""Status of an item; one that is still `RUNNING` in a file was cut."""


@dataclass(frozen=True)
class Item:
    """A measurement of a stage.

    Attributes:
      name: unique in its stage.
      expects_s: seconds that it is expected to take; with less left it is skipped.
      call: seconds that are left -> what was measured; an exception is a failure.
    """

    name: str
    expects_s: float
    call: Callable[[float], Mapping[str, Any]]


@dataclass
class Results:
    """The file, and what is in it: `{"machine": ..., "stages": {stage: {item: outcome}}}`.

    An outcome has `status`, and `seconds` with `result`, or `error`, or `why` of what was skipped.
    One process at a time writes.

    Args:
      path: of the file; read if it exists.
    """

    path: Path
    content: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.read()

    def read(self) -> None:
        """Takes what the file says, which another process may have written."""
        if self.path.exists():
            self.content = json.loads(self.path.read_text(encoding="utf-8"))
        self.content.setdefault("stages", {})

    def outcomes(self, stage: str) -> dict[str, Any]:
        """Item -> outcome, in the order in which they came."""
        return self.content["stages"].setdefault(stage, {})

    def note(self, stage: str, item: str, status: str, **more: Any) -> None:
        """Keeps an item's outcome and writes the file."""
        self.outcomes(stage)[item] = {"status": status, **more}
        self.write()

    def write(self) -> None:
        """Replaces the file in one move."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
        os.replace(part, self.path)

    def failed(self, stages: Iterable[str]) -> list[str]:
        """`stage/item` of what failed or was cut."""
        wrong = (FAILED, RUNNING)
        outcomes = ((s, self.outcomes(s)) for s in stages)
        return [f"{s}/{i}" for s, o in outcomes for i, v in o.items() if v["status"] in wrong]


def run_items(
    results: Results, stage: str, items: Iterable[Item], deadline: float, say: Callable[[str], None]
) -> None:
    """Runs what is not finished and still fits; a failure does not keep the next item from running.

    Args:
      results: where outcomes go.
      stage: name.
      items: in order.
      deadline: `time.time()` at which all must be over.
      say: gets a line for each item.
    """
    for item in items:
        if results.outcomes(stage).get(item.name, {}).get("status") == OK:
            say(f"{stage}/{item.name}: finished before")
            continue
        left = deadline - time.time()
        if left < item.expects_s:
            why = f"takes about {item.expects_s:.0f} s and {max(left, 0):.0f} s are left"
            results.note(stage, item.name, SKIPPED, why=why)
            say(f"{stage}/{item.name}: skipped, {why}")
            continue
        _run(results, stage, item, left, say)


def _run(results: Results, stage: str, item: Item, left: float, say: Callable[[str], None]) -> None:
    results.note(stage, item.name, RUNNING)
    began = time.monotonic()
    try:
        measured = dict(item.call(left))
        taken = round(time.monotonic() - began, 2)
        results.note(stage, item.name, OK, seconds=taken, result=measured)
        say(f"{stage}/{item.name}: ok, {taken} s")
    except Exception as error:
        _give_memory_back(error)
        text = "".join(traceback.format_exception(error))[-3000:]
        results.note(stage, item.name, FAILED, error=text)
        say(f"{stage}/{item.name}: FAILED, {type(error).__name__}: {str(error)[:500]}")


def _give_memory_back(error: BaseException) -> None:
    """The frames of an error hold tensors; the next item may need their memory."""
    import gc
    import sys

    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()
