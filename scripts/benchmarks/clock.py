"""Seconds: of steps that take turns, the device's queue included, and of a step's parts."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

_BEGAN = time.monotonic()

TimedStep = Callable[[int], None]
"""Takes the number of the round."""


def said(what: str) -> None:
    """Says on standard error what is being done, and when."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {what}", file=sys.stderr, flush=True)


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(steps: Sequence[TimedStep], repeats: int, device: str) -> list[list[float]]:
    """Seconds of each step in each timed round; they take turns, after an untimed one.

    A step's method `prepare`, if it has one, runs before it off the clock. A terminal shows a bar, and
    what is no terminal a line for each round.
    """
    rounds = []
    for number in tqdm(range(1 + repeats), desc="rounds", leave=False, disable=None):
        if not sys.stderr.isatty():
            said(f"round {number + 1} of {1 + repeats}")
        row = []
        for step in steps:
            getattr(step, "prepare", lambda: None)()
            synchronize(device)  # what was queued before is not this step's
            start = time.perf_counter()
            step(number)
            synchronize(device)
            row.append(time.perf_counter() - start)
        rounds.append(row)
    return [list(column) for column in zip(*rounds[1:], strict=True)]


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile, inclusive; of one value three times itself.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    [2.0, 3.0, 4.0]
    """
    if len(values) == 1:
        return list(values) * 3
    return statistics.quantiles(values, n=4, method="inclusive")


class Stopwatch:
    """Exclusive seconds by label: what runs inside another label's call counts once, inside.

    Args:
      device: synchronised at every change of label, which costs a little: measure totals without.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._labels: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def running(self, label: str) -> Iterator[None]:
        """Time inside goes to `label`, but for what runs under another one."""
        self._turn()
        self._labels.append(label)
        try:
            yield
        finally:
            self._turn()
            self._labels.pop()

    def wrap(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with its time under `label`."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.running(label):
                return call(*args, **kwargs)

        return measured

    def _turn(self) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        if self._labels:
            label = self._labels[-1]
            self.seconds[label] = self.seconds.get(label, 0.0) + now - self._since
        self._since = now
