"""Peak memory of a phase, measured in a process of its own so that none inherits another's caches."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from hf_dpzero.experiments.memory.shapes import build_batch, build_config, build_model, empty_model
from hf_dpzero.training import callbacks
from scripts.benchmarks.settings import StepBench
from scripts.benchmarks.timed_steps import FirstOrderStep, Forwards, ReferenceStep, Step

_CPU_METHOD = (
    "peak resident bytes (VmHWM, reset after the model was built) of a fresh process for each phase, "
    "less what was resident before the model was built, libraries loaded"
)
_CUDA_METHOD = "torch.cuda.max_memory_allocated of each phase, weights included"


def measure_memory(bench: StepBench) -> dict[str, Any]:
    """Peak memory of inference, of the method and of the published loop, and their ratios.

    A ratio is None where inference takes no measurable memory.
    """
    wanted = ["inference", bench.own_phase, *(["reference"] if bench.with_reference else [])]
    peaks = {phase: in_fresh_process(bench, phase) for phase in dict.fromkeys(wanted)}
    base = peaks["inference"]  # a tiny shape may fit into what was resident: no ratio then
    over = {phase: peak / base if base > 0 else None for phase, peak in peaks.items()}
    cuda = torch.device(bench.device).type == "cuda"
    found = {
        "peak_memory_over_inference": over[bench.own_phase],
        "peak_bytes": peaks,
        "memory_method": _CUDA_METHOD if cuda else _CPU_METHOD,
    }
    if bench.with_reference:
        found["reference_peak_memory_over_inference"] = over["reference"]
    return found


def in_fresh_process(bench: StepBench, phase: str) -> int:
    """`peak_bytes` in a new process.

    Raises:
      OSError: it failed (out of memory, say); carries the end of what it said.
    """
    command = [
        sys.executable,
        "-m",
        "scripts.benchmarks",
        "step",
        "--phase",
        phase,
        *words_of(bench),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"measuring the memory of {phase} failed: {done.stderr.strip()[-500:]}")
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def words_of(bench: StepBench) -> list[str]:
    """The command line that gives these settings again, without `memory`."""
    words: list[str] = []
    for name, value in dataclasses.asdict(bench).items():
        if name == "memory" or value is None or value is False:
            continue
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


_WORKS: dict[str, Callable[..., Callable[[int], None]]] = {
    "inference": Forwards,
    "step": Step,
    "reference": ReferenceStep,
    "dp-adamw": FirstOrderStep,
}


def peak_bytes(bench: StepBench, phase: str) -> int:
    """Runs two rounds of one phase in this process and returns their peak memory in bytes.

    Code is no part of it: a tiny shape goes through the same phase first, so that libraries are
    loaded and kernels compiled.
    """
    _two_rounds(_tiny(bench), phase)
    empty_model(bench.shape, bench.dtype, "meta")
    gc.collect()
    before = _resident(bench.device)
    _two_rounds(bench, phase)
    return callbacks.peak_bytes(bench.device) - before


def _two_rounds(bench: StepBench, phase: str) -> None:
    """The model is built before the peak is forgotten."""
    model, batch = build_model(bench), build_batch(bench, build_config(bench.shape).vocab_size)
    callbacks.forget_peak(bench.device)
    work = _WORKS[phase](bench, model, batch)
    for step in range(2):
        work(step)


def _tiny(bench: StepBench) -> StepBench:
    """The same settings for a tiny shape of the same family."""
    shape = "tiny-opt" if bench.shape.startswith(("opt", "tiny-opt")) else "tiny"
    return dataclasses.replace(bench, shape=shape, batch_size=2, seq_length=8, trainable=None)


def _resident(device: str) -> int:
    """Bytes resident now, as the baseline; none on a GPU, where only torch's own are counted."""
    if torch.device(device).type == "cuda":
        return 0
    callbacks.forget_peak(device)
    return callbacks.peak_bytes(device)
