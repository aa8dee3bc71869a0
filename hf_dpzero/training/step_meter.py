"""Time and memory of a step; imports little, so that benchmarks run without datasets."""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainingArguments

from hf_dpzero.parallel.collectives import sent_bytes


class StepMeter(TrainerCallback):
    """Times the steps and watches their peak memory; evaluation between steps counts for neither.

    A step is what lies between `on_step_begin` and `on_step_end`: the batch is fetched already, and
    an update that waits for the next pass (`defer_updates`) falls into the next step. The device's
    queue is emptied at both ends, so that time is not booked to a neighbour.

    Args:
      device: what trains, for example "cuda"; None takes the training arguments' own.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.peak = 0
        self.sent: list[int] = []
        self._sent_before = 0
        self._since: float | None = None

    def on_step_begin(self, args: TrainingArguments, *_: object, **__: object) -> None:
        """Forgets the peak so far and starts the clock."""
        self.device = self.device or args.device
        forget_peak(self.device)
        _synchronize(
            self.device
        )  # kernels run behind Python: what is queued belongs to what came before
        self._sent_before = sent_bytes()
        self._since = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Stops the clock and keeps the peak if it is the highest."""
        if self._since is None or self.device is None:
            return
        _synchronize(self.device)
        self.seconds.append(time.perf_counter() - self._since)
        self.peak = max(self.peak, peak_bytes(self.device))
        self.sent.append(sent_bytes() - self._sent_before)
        self._since = None

    def metrics(self) -> dict[str, float]:
        """`seconds_per_step` (median) and `peak_memory_bytes`; nothing if no step was seen.

        With several processes also `sent_bytes_per_step` of this one, the median. None is released with
        a run (`reporting.hub` ships evaluation metrics only): how long a step takes, and what it sends
        where directions are split, depend on the size of its batch, which is private.
        """
        if not self.seconds:
            return {}
        sent = {"sent_bytes_per_step": statistics.median(self.sent)} if any(self.sent) else {}
        return {
            "seconds_per_step": statistics.median(self.seconds),
            "peak_memory_bytes": self.peak,
            **sent,
        }


def forget_peak(device: torch.device | str) -> None:
    """Starts the peak of this process anew, where the platform can (Linux, CUDA)."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device | str) -> int:
    """Bytes at the peak since `forget_peak`: what torch allocated on a GPU, else resident memory.

    Resident memory includes the libraries. Without /proc it is the peak of the process's life.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in a unit of `ru_maxrss`."""


def _synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
