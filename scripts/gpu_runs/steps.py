"""Step over two forward passes, and peak memory, of the published shapes on this device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from scripts.gpu_runs.results import Item

SECONDS = {
    "roberta-large": 10.0, "opt-1.3b": 8.0, "opt-2.7b": 12.0, "opt-6.7b": 20.0, "opt-13b": 45.0,
}  # fmt: skip
"""Shapes, and seconds that one is expected to take on an H100."""
TINY = {"tiny": 1.0, "tiny-opt": 1.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "steps": {},
    "steps-64-rows": {"batch_size": 64, "skip_reference": True, "repeats": 3},
    "steps-one-batch": {"one_batch": True, "skip_reference": True},
    "steps-whole-model": {"strategy": "whole_model", "skip_reference": True},
}
"""Stage -> settings of `StepBench` beside the common ones.

`steps` has private settings (Poisson batches in fixed shapes, filled up with blanks) and the published
loop beside it; `steps-64-rows` batches of 64; `steps-one-batch` one full microbatch;
`steps-whole-model` private settings with a copy of half-precision weights where `auto` would perturb
layer by layer in each pass.
"""
COMMON = {"dtype": "bfloat16", "batch_size": 8, "seq_length": 256, "repeats": 7}


def items(stage: str, device: str, dry_run: bool) -> Iterator[Item]:
    """One for each shape, small ones first; tiny ones in a dry run."""
    common = {**COMMON, "device": device, **VARIANTS[stage]}
    if dry_run:
        common |= {"batch_size": common["batch_size"] // 2, "seq_length": 8, "repeats": 1}
    for shape, seconds in (TINY if dry_run else SECONDS).items():
        yield Item(shape, seconds, functools.partial(measure, {"shape": shape, **common}))


def measure(settings: Mapping[str, Any], left: float = 0.0) -> dict[str, Any]:
    """What `python -m scripts.benchmarks step` measures, time and memory, in this process.

    Memory of the CPU would need fresh processes; only a GPU's is measured.
    """
    import torch

    from scripts.benchmarks.command import run_step
    from scripts.benchmarks.settings import StepBench

    cuda = torch.device(settings["device"]).type == "cuda"
    bench = StepBench(**settings, memory=cuda)
    return {**run_step(bench), "settings": dataclasses.asdict(bench)}
