"""`hf-dpzero bench memory`: what fits, for every shape and way of training, and how sure that is."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_dpzero.experiments.memory.live_bytes import (
    GIB,
    Footprint,
    dp_adamw_bytes,
    dpzero_bytes,
    footprint,
)
from hf_dpzero.experiments.memory.shapes import PUBLISHED
from scripts.benchmarks.memory import in_fresh_process
from scripts.benchmarks.settings import StepBench

COLUMNS = {
    "inference": "inference",
    "step": "dpzero",
    "reference": "mezo reference loop",
    "dp-adamw": "dp-adamw",
}
"""Memory phase -> its column."""


@dataclass(frozen=True, kw_only=True)
class CapacityTable:
    """What `hf-dpzero bench memory` tabulates; every field is an option of the command.

    Attributes:
      shapes: keys of `SHAPES`.
      dtype, batch_size, seq_length, attention, strategy: as for `bench step`.
      device: where `measure` measures.
      device_memory: GiB; what needs more is marked. None: nothing is.
      measure: also measure what fits on `device`, in fresh processes.
    """

    shapes: tuple[str, ...] = PUBLISHED
    dtype: str = "float32"
    batch_size: int = 16
    seq_length: int = 64
    attention: str = "sdpa"
    strategy: str = "auto"
    device: str = "cpu"
    device_memory: float | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        if self.device_memory is not None and not self.device_memory > 0:
            raise ValueError(f"device_memory={self.device_memory}: give a positive number of GiB.")
        for shape in self.shapes:
            self.bench(shape, "inference")

    def bench(self, shape: str, phase: str) -> StepBench:
        """The settings of `bench step` for one cell of the table."""
        names = ("dtype", "batch_size", "seq_length", "attention", "device")
        common: dict[str, Any] = {name: getattr(self, name) for name in names}
        if phase == "dp-adamw" and self.dtype != "float16":
            return StepBench(shape=shape, method="dp-adamw", **common)
        return StepBench(shape=shape, strategy=self.strategy, **common)


def capacity(asked: CapacityTable) -> list[dict[str, Any]]:
    """One row a shape: `estimate` and with `measure` also `measured` bytes by memory phase."""
    return [_row(asked, shape) for shape in asked.shapes]


def _row(asked: CapacityTable, shape: str) -> dict[str, Any]:
    estimate = estimates(asked, shape)
    row = {"shape": shape, "dtype": asked.dtype, "estimate": estimate}
    if asked.device_memory is not None:
        room = asked.device_memory * GIB
        row["fits"] = {phase: size <= room for phase, size in estimate.items()}
    if asked.measure:
        room = (asked.device_memory or float("inf")) * GIB
        row["measured"] = _measured(asked, shape, min(room, available_bytes(asked.device)))
    return row


def _measured(asked: CapacityTable, shape: str, room: float) -> dict[str, int]:
    """Peak bytes of the phases whose estimate leaves a tenth of `room`."""
    fitting = [p for p, size in estimates(asked, shape).items() if size < 0.9 * room]
    return {phase: in_fresh_process(asked.bench(shape, phase), phase) for phase in fitting}


def available_bytes(device: str) -> int:
    """Memory that a new process could have; on Linux with what caches would give back."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def estimates(asked: CapacityTable, shape: str) -> dict[str, int]:
    """Peak bytes by memory phase; no dp-adamw for float16 or without opacus."""
    sizes = (asked.dtype, asked.batch_size, asked.seq_length, asked.attention)
    first_order = asked.dtype != "float16" and importlib.util.find_spec("opacus") is not None
    found = footprint(shape, *sizes, per_example=first_order)
    estimate = {
        "inference": found.weights + found.forward,
        "step": dpzero_bytes(found, asked.dtype, asked.strategy),
        "reference": reference_bytes(found, asked.dtype),
    }
    return estimate | ({"dp-adamw": dp_adamw_bytes(found, asked.dtype)} if first_order else {})


def reference_bytes(found: Footprint, dtype: str) -> int:
    """The published loop: beside the weights z, coefficient * z and their sum, of one tensor."""
    temporary = 3 * found.largest * int(getattr(torch, dtype).itemsize)
    return found.weights + max(found.forward, temporary)


# ---------------------------------------------------------------- for people


def capacity_table(asked: CapacityTable, rows: Sequence[Mapping[str, Any]]) -> str:
    """Peak GiB; `!` marks what does not fit, estimate / measured stands in a line below."""
    what = f"{asked.dtype}, {asked.batch_size} x {asked.seq_length} tokens, all parameters trained"
    lines = [f"estimated peak memory in GiB, {what}"]
    if asked.device_memory is not None:
        lines[0] += f"; ! needs more than {asked.device_memory:g} GiB"
    lines.append(f"{'shape':<16}" + "".join(f"{title:>21}" for title in COLUMNS.values()))
    for row in rows:
        lines.append(f"{row['shape']:<16}" + "".join(_cell(row, phase) for phase in COLUMNS))
        if row.get("measured"):
            ratios = "".join(_ratio_cell(row, phase) for phase in COLUMNS)
            lines.append(f"{'  / measured':<16}{ratios}")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], phase: str) -> str:
    if phase not in row["estimate"]:
        return f"{'-':>21}"
    mark = "" if row.get("fits", {}).get(phase, True) else " !"
    return f"{row['estimate'][phase] / GIB:.2f}{mark}".rjust(21)


def _ratio_cell(row: Mapping[str, Any], phase: str) -> str:
    if phase not in row["measured"]:
        return f"{'-':>21}"
    return f"{row['estimate'][phase] / row['measured'][phase]:>21.2f}"
