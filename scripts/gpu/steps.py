"""Step over its forward passes, and peak memory, of the published shapes on this device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from scripts.gpu.results import Item

SECONDS = {"roberta-large": 10.0, "opt-1.3b": 8.0, "opt-6.7b": 20.0, "opt-13b": 40.0}
"""Shapes, and seconds that one is expected to take on an H100."""
TINY = {"tiny": 1.0, "tiny-opt": 1.0}
COMMON = {"dtype": "bfloat16", "batch_size": 8, "seq_length": 256, "skip_reference": True}
_MANY = {"num_directions": 16, "repeats": 3, "memory": False}
DIRECTIONS: dict[str, dict[str, Any]] = {
    "K=1": {"repeats": 7},
    "K=16": _MANY,
    "K=16, forward": {**_MANY, "differences": "forward"},
}
"""Private settings, Poisson batches in fixed shapes: settings of `StepBench` beside `COMMON`."""


def items(device: str, dry_run: bool) -> Iterator[Item]:
    """One for each shape and K, small ones first; tiny ones in a dry run."""
    from scripts.benchmarks.settings import StepBench

    known = {field.name for field in dataclasses.fields(StepBench)}
    for shape, seconds in (TINY if dry_run else SECONDS).items():
        for name, own in DIRECTIONS.items():
            if own.keys() <= known:
                settings = {"shape": shape, "device": device, **COMMON, **own}
                if dry_run:
                    settings |= {"batch_size": 4, "seq_length": 8, "repeats": 1}
                yield Item(f"{shape}, {name}", seconds, functools.partial(measure, settings))


def measure(settings: Mapping[str, Any], left: float = 0.0) -> dict[str, Any]:
    """What `python -m scripts.benchmarks step` measures, time and memory, in this process.

    Memory of the CPU would need fresh processes; only a GPU's is measured.
    """
    import torch

    from scripts.benchmarks.command import run_step
    from scripts.benchmarks.settings import StepBench

    cuda = torch.device(settings["device"]).type == "cuda"
    bench = StepBench(**{**settings, "memory": cuda and settings.get("memory", True)})
    return {**run_step(bench), "settings": dataclasses.asdict(bench)}


def made(settings: Mapping[str, Any]) -> tuple[Any, Any, int]:
    """A step of `StepBench` settings, its bare forward passes, and how many passes round 0 has."""
    from scripts.benchmarks.settings import StepBench
    from scripts.benchmarks.timed_steps import Forwards, Step, build

    bench = StepBench(**settings)
    model, batches = build(bench)
    step, forwards = Step(bench, model, batches), Forwards(bench, model, batches)
    return step, forwards, 2 * len(batches(0))
