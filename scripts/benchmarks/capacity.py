"""`memory`: what fits, for every shape and way of training, estimated and, if asked for, measured."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hf_dpzero.batches.placement import measured
from hf_dpzero.experiments.memory import (
    GIB,
    NothingPadded,
    first_order_bytes,
    forward_bytes,
    weight_bytes,
    zeroth_order_bytes,
)
from hf_dpzero.settings.nested import Performance
from scripts.benchmarks.memory import in_fresh_process, phases_of
from scripts.benchmarks.settings import StepBench
from scripts.benchmarks.shapes import PUBLISHED, empty_model, model_inputs

COLUMNS = {
    "inference": "inference",
    "step": "dpzero",
    "reference": "mezo reference loop",
    "dp-adamw": "dp-adamw",
}
"""Memory phase -> its column."""


@dataclass(frozen=True, kw_only=True)
class CapacityTable:
    """What `python -m scripts.benchmarks memory` tabulates; every field is an option of the command.

    Attributes:
      shapes: keys of `SHAPES`.
      dtype, batch_size, seq_length, strategy: as for `step`.
      device: where `measure` measures.
      device_memory: GiB; what needs more is marked. None: nothing is.
      measure: also measure what fits on `device`, in fresh processes.
    """

    shapes: tuple[str, ...] = PUBLISHED
    dtype: str = "float32"
    batch_size: int = 16
    seq_length: int = 64
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
        """The settings of `step` for one cell of the table."""
        names = ("dtype", "batch_size", "seq_length", "device")
        common: dict[str, Any] = {name: getattr(self, name) for name in names}
        if phase == "dp-adamw" and self.dtype != "float16":
            return StepBench(shape=shape, method="dp-adamw", **common)
        return StepBench(shape=shape, strategy=self.strategy, **common)


def capacity(asked: CapacityTable) -> list[dict[str, Any]]:
    """One row a shape: `estimate` and with `measure` also `measured` bytes by memory phase.

    Measured are the phases whose estimate leaves a tenth of the memory.
    """
    rows = []
    for shape in asked.shapes:
        estimate = estimates(asked, shape)
        row = {"shape": shape, "dtype": asked.dtype, "estimate": estimate}
        room = (asked.device_memory or float("inf")) * GIB
        if asked.device_memory is not None:
            row["fits"] = {phase: size <= room for phase, size in estimate.items()}
        if asked.measure:
            room = 0.9 * min(room, _available_bytes(asked.device))
            phases = phases_of(phase for phase, size in estimate.items() if size < room)
            row["measured"] = {p: in_fresh_process(asked.bench(shape, p), p) for p in phases}
        rows.append(row)
    return rows


def _available_bytes(device: str) -> int:
    """Memory that a new process could have; on Linux with what caches would give back."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if match:
            return int(match[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def estimates(asked: CapacityTable, shape: str) -> dict[str, int]:
    """Peak bytes by memory phase: a table, and one pass on the meta device (`experiments.memory`).

    The published loop keeps beside the weights z, coefficient * z and their sum, of one tensor.

    No dp-adamw for float16 or where opacus is missing.
    """
    model = empty_model(shape, asked.dtype, "meta")
    ids = torch.zeros(asked.batch_size, asked.seq_length, dtype=torch.int64, device="meta")
    # No attention mask: without padding the models leave it out of the attention as well.
    batch = {"input_ids": ids, "labels": ids[:, 0]}
    with torch.no_grad(), measured(model) as found, NothingPadded():
        model(**model_inputs(model, batch))
    # as `StepBench`: one direction, AdamW on dense per-example gradients
    args = SimpleNamespace(
        chosen=(), num_directions=1, differences="central", method="dp-adamw",
        performance=Performance(perturbation_strategy=asked.strategy, per_example_gradients="dense"),
        not_private=False, clipping="fixed", bf16=False,
    )  # fmt: skip
    weights, forward = weight_bytes(model), forward_bytes(found)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    estimate = {
        "inference": weights + forward,
        "step": zeroth_order_bytes(model, args, ids.numel(), found)[1],
        "reference": weights + max(forward, 3 * largest),
    }
    if asked.dtype != "float16" and importlib.util.find_spec("opacus") is not None:
        estimate["dp-adamw"] = first_order_bytes(model, args, asked.batch_size, found)[1] or 0
    return estimate


# ---------------------------------------------------------------- for people


def capacity_table(asked: CapacityTable, rows: Sequence[Mapping[str, Any]]) -> str:
    """GiB for people; `!` marks what does not fit, a second line has estimate / measured."""
    what = f"{asked.dtype}, {asked.batch_size} x {asked.seq_length} tokens, all parameters trained"
    lines = [f"estimated peak memory in GiB, {what}"]
    if asked.device_memory is not None:
        lines[0] += f"; ! needs more than {asked.device_memory:g} GiB"
    lines.append(f"{'shape':<16}" + "".join(f"{title:>21}" for title in COLUMNS.values()))
    for row in rows:
        lines.append(f"{row['shape']:<16}" + "".join(_cell(row, phase) for phase in COLUMNS))
        if measured := row.get("measured"):
            ratios = {p: f"{row['estimate'][p] / size:.2f}" for p, size in measured.items()}
            cells = "".join(f"{ratios.get(phase, '-'):>21}" for phase in COLUMNS)
            lines.append(f"{'  / measured':<16}{cells}")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], phase: str) -> str:
    if phase not in row["estimate"]:
        return f"{'-':>21}"
    mark = "" if row.get("fits", {}).get(phase, True) else " !"
    return f"{row['estimate'][phase] / GIB:.2f}{mark}".rjust(21)
