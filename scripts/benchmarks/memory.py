"""Peak memory of a phase: on a CPU in a process of its own, so that none inherits another's caches.

On a GPU only allocated bytes count, not what the allocator keeps: phases take turns in one process.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_dpzero.training import step_meter
from scripts.benchmarks.clock import said
from scripts.benchmarks.settings import StepBench
from scripts.benchmarks.shapes import empty_model
from scripts.benchmarks.timed_steps import FirstOrderStep, Forwards, ReferenceStep, Step, build

ROOT = Path(__file__).resolve().parents[2]
_CPU_METHOD = (
    "peak resident bytes (VmHWM, reset after the model was built) of a fresh process for each phase, "
    "less what was resident before the model was built, libraries loaded"
)
_CUDA_METHOD = "torch.cuda.max_memory_allocated of each phase, weights included"


def measure_memory(bench: StepBench) -> dict[str, Any]:
    """Peak memory of inference, of the method and of the published loop, and their ratios.

    A ratio is None where inference takes no measurable memory.
    """
    cuda = torch.device(bench.device).type == "cuda"
    said("measuring peak memory, " + ("in turns" if cuda else "each phase in a fresh process"))
    wanted = ["inference", bench.own_phase, *(["reference"] if bench.with_reference else [])]
    measure = peak_bytes if cuda else in_fresh_process
    peaks = {phase: measure(bench, phase) for phase in phases_of(dict.fromkeys(wanted))}
    base = peaks["inference"]  # a tiny shape may fit into what was resident: no ratio then
    over = {phase: peak / base if base > 0 else None for phase, peak in peaks.items()}
    result = {
        "peak_memory_over_inference": over[bench.own_phase],
        "peak_bytes": peaks,
        "memory_method": _CUDA_METHOD if cuda else _CPU_METHOD,
    }
    if bench.with_reference:
        result["reference_peak_memory_over_inference"] = over["reference"]
    return result


def phases_of(phases: Iterable[str]) -> Iterable[str]:
    """The phases, with a progress bar on a terminal."""
    return tqdm(list(phases), desc="peak memory", leave=False, disable=None)


def in_fresh_process(bench: StepBench, phase: str) -> int:
    """`peak_bytes` in a new process of this checkout; OSError, with what it said, if that fails."""
    module = [sys.executable, "-m", "scripts.benchmarks", "step"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.run(
        [*module, "--phase", phase, *words_of(bench)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if child.returncode:
        raise OSError(f"measuring the memory of {phase} failed: {child.stderr.strip()[-500:]}")
    return int(json.loads(child.stdout.splitlines()[-1])["peak_bytes"])


def words_of(bench: StepBench) -> list[str]:
    """The command line that gives these settings again, without `memory`."""
    words: list[str] = []
    for name, value in dataclasses.asdict(bench).items():
        if name == "memory" or value is None or value is False:
            continue
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


STEPS: dict[str, Callable[..., Callable[[int], None]]] = {
    "inference": Forwards,
    "step": Step,
    "reference": ReferenceStep,
    "dp-adamw": FirstOrderStep,
}


def peak_bytes(bench: StepBench, phase: str) -> int:
    """Runs two rounds of one phase in this process and measures their peak memory.

    Code is no part of it: a tiny shape of the same family goes through the same phase first, so that
    libraries are loaded and kernels compiled.

    """
    shape = "tiny-opt" if bench.shape.startswith(("opt", "tiny-opt")) else "tiny"
    tiny = dataclasses.replace(bench, shape=shape, batch_size=2, seq_length=8, trainable=None)
    _two_rounds(tiny, phase)  # loads libraries and compiles kernels, which would count as memory
    empty_model(bench.shape, bench.dtype, "meta")
    gc.collect()
    if torch.device(bench.device).type == "cuda":
        before = torch.cuda.memory_allocated(bench.device)
    else:
        step_meter.forget_peak(bench.device)
        before = step_meter.peak_bytes(bench.device)
    _two_rounds(bench, phase)
    gc.collect()  # or what hooks tie together would stand beside the next model
    return step_meter.peak_bytes(bench.device) - before


def _two_rounds(bench: StepBench, phase: str) -> None:
    """The model is built before the peak is forgotten."""
    model, batch = build(bench)
    step_meter.forget_peak(bench.device)
    step = STEPS[phase](bench, model, batch)
    for number in range(2):
        step(number)
