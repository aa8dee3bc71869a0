"""Step over its forward passes, and peak memory, of the published shapes on this device."""

from __future__ import annotations

import dataclasses
import functools
import operator
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from scripts.gpu.results import Item

SECONDS = {"roberta-large": 10.0, "opt-1.3b": 8.0, "opt-6.7b": 20.0, "opt-13b": 40.0}
"""Shapes, and seconds that one is expected to take on an H100."""
TINY = {"tiny": 1.0, "tiny-opt": 1.0}
COMMON = {"dtype": "bfloat16", "batch_size": 8, "seq_length": 256, "skip_reference": True}


def items(device: str, dry_run: bool) -> Iterator[Item]:
    """K = 1 and 16 for each shape, small ones first; tiny ones in a dry run."""
    for shape, seconds in (TINY if dry_run else SECONDS).items():
        settings = {"shape": shape, "device": device, **COMMON, "repeats": 7}
        if dry_run:
            settings |= {"batch_size": 4, "seq_length": 8, "repeats": 1}
        yield Item(f"{shape}, K=1", seconds, functools.partial(measure, settings))
        settings = {**settings, "num_directions": 16, "repeats": 1 if dry_run else 2}
        yield Item(f"{shape}, K=16", 1.5 * seconds, functools.partial(many, settings))


def measure(settings: Mapping[str, Any], left: float = 0.0) -> dict[str, Any]:
    """What `python -m scripts.benchmarks step` measures, time and memory, in this process.

    Memory of the CPU would need fresh processes; only a GPU's is measured.
    """
    import torch

    from scripts.benchmarks.memory import measure_memory
    from scripts.benchmarks.settings import StepBench
    from scripts.benchmarks.timing import measure_time

    bench = StepBench(**settings)
    wanted = bench.memory and torch.device(bench.device).type == "cuda"
    memory = measure_memory(bench) if wanted else {}
    return {**measure_time(bench), **memory, "settings": dataclasses.asdict(bench)}


def many(settings: Mapping[str, Any], left: float = 0.0) -> dict[str, Any]:
    """2 K forwards, a step of K central differences and one of K forward differences, in turns."""
    from scripts.benchmarks.clock import interleaved, quartiles

    step, forwards, _ = made(settings)

    def of(forward: bool, number: int) -> None:
        step.differences.forward = forward
        step(number)

    calls = [forwards, functools.partial(of, False), functools.partial(of, True)]
    bare, central, one_sided = interleaved(calls, settings["repeats"], settings["device"])
    seconds = {"two_forwards": statistics.median(bare), "step": statistics.median(central)}
    return {
        "settings": dict(settings),
        "strategy": step.differences.strategy,
        "rows_per_pass": step.batches.rows_per_pass(),
        "ratio_quartiles": quartiles([c / f for c, f in zip(central, bare, strict=True)]),
        "ratio_to_central": statistics.median(map(operator.truediv, one_sided, central)),
        "seconds": {**seconds, "forward_step": statistics.median(one_sided)},
    }


def made(settings: Mapping[str, Any]) -> tuple[Any, Any, int]:
    """A step of `StepBench` settings, its bare forward passes, and how many passes round 0 has."""
    from scripts.benchmarks.settings import StepBench
    from scripts.benchmarks.timed_steps import Forwards, Step, build

    bench = StepBench(**settings)
    model, batches = build(bench)
    step, forwards = Step(bench, model, batches), Forwards(bench, model, batches)
    return step, forwards, 2 * len(batches(0))
