"""Where one step of a large model spends its time: kernels, launches, Python, waits."""

from __future__ import annotations

import contextlib
import cProfile
import functools
import io
import pstats
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.gpu.results import Item
from scripts.gpu.steps import COMMON, made

SHAPE = "opt-13b"
ROOT = Path(__file__).resolve().parents[2]
MOST = 25
"""Lines of each list."""
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def items(device: str, dry_run: bool) -> Iterator[Item]:
    """Of one model: seconds, torch's profiler, cProfile and the places that wait."""
    shape = "tiny-opt" if dry_run else SHAPE
    calls = {"seconds": (_seconds, 25), "device": (_device, 15), "python": (_python, 10)}
    for name, (call, seconds) in {**calls, "waits": (_waits, 5)}.items():
        yield Item(f"{shape}, {name}", seconds, functools.partial(call, shape, device))


@functools.cache
def _made(shape: str, device: str) -> tuple[Any, Any, int]:
    """A step that was taken twice, its bare forward passes, and how many passes it has."""
    small = {"batch_size": 2, "seq_length": 8} if shape.startswith("tiny") else {}
    step, forwards, passes = made({"shape": shape, "device": device, **COMMON, **small})
    for _ in range(2):
        step(0), forwards(0)
    return step, forwards, passes


def _seconds(shape: str, device: str, left: float = 0.0) -> Mapping[str, Any]:
    """Medians of step and forwards in turns, and seconds until Python was through with each."""
    import statistics
    import time

    from scripts.benchmarks.clock import interleaved, synchronize

    step, forwards, passes = _made(shape, device)
    own, bare = interleaved([lambda _: step(0), lambda _: forwards(0)], 5, device)
    hosts = {}
    for name, call in (("step", step), ("forwards", forwards)):
        synchronize(device)
        began = time.perf_counter()
        call(0)
        hosts[f"host_{name}"] = time.perf_counter() - began
    ratio = statistics.median(a / b for a, b in zip(own, bare, strict=True))
    medians = {"step": statistics.median(own), "forwards": statistics.median(bare)}
    return {
        **medians,
        **hosts,
        "ratio": ratio,
        "passes": passes,
        "strategy": step.differences.strategy,
    }


def _device(shape: str, device: str, left: float = 0.0) -> Mapping[str, Any]:
    """Launches a pass, device time by kernel and host time by operation, of a step and of forwards."""
    step, forwards, passes = _made(shape, device)
    return {
        "step": _profiled(step, device, passes),
        "forwards": _profiled(forwards, device, passes),
    }


def _profiled(call: Callable[[int], None], device: str, passes: int) -> Mapping[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    from scripts.benchmarks.clock import synchronize

    cuda = [ProfilerActivity.CUDA] if device.startswith("cuda") else []
    with profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler:
        call(0)
        synchronize(device)
    events = profiler.key_averages()
    on_device = [e for e in events if str(e.device_type).endswith("CUDA")]
    return {
        "launches_a_pass": sum(e.count for e in events if e.key in _LAUNCHES) / passes,
        "device_ms": sum(e.self_device_time_total for e in on_device) / 1e3,
        "kernels": _lines(on_device, "self_device_time_total"),
        "host": _lines([e for e in events if e not in on_device], "self_cpu_time_total"),
    }


def _lines(events: list[Any], of: str) -> list[str]:
    """Milliseconds, calls and name of those that take longest."""
    longest = sorted(events, key=lambda e: -getattr(e, of))[:MOST]
    return [f"{getattr(e, of) / 1e3:9.3f} ms {e.count:6d} x {e.key[:110]}" for e in longest]


def _python(shape: str, device: str, left: float = 0.0) -> Mapping[str, Any]:
    """Top functions of one step by their own time, and the package's with what they call."""
    step, _, _ = _made(shape, device)
    profiler = cProfile.Profile()
    profiler.runcall(step, 0)
    return {
        "own": _top(profiler, "tottime"),
        "with_calls": _top(profiler, "cumulative", "hf_dpzero|scripts"),
    }


def _top(profiler: cProfile.Profile, order: str, *only: str) -> list[str]:
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats(order).print_stats(*only, MOST)
    lines = (line.replace(f"{ROOT}/", "").strip() for line in text.getvalue().splitlines())
    return [line for line in lines if (line[:1].isdigit() and ":" in line) or "{" in line]


def _waits(shape: str, device: str, left: float = 0.0) -> Mapping[str, Any]:
    """Places where one step waits for the device, the passes it has, and how often."""
    step, _, passes = _made(shape, device)
    return {"passes": passes, "places": waiting(lambda: step(0), device)}


def waiting(call: Callable[[], object], device: str) -> dict[str, int]:
    """Place -> how often `call` made torch warn there of a synchronising operation."""
    import torch

    places: Counter[str] = Counter()

    def count(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            places[_place(traceback.extract_stack()[:-1])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        with contextlib.ExitStack() as stack:
            if device.startswith("cuda"):
                torch.cuda.set_sync_debug_mode("warn")
                stack.callback(torch.cuda.set_sync_debug_mode, "default")
            call()
    return dict(places.most_common())


def _place(stack: traceback.StackSummary) -> str:
    """The innermost frame, and before it that of the package where it is another one."""
    frames = [f for f in stack if not f.filename.endswith(("warnings.py", "/torch/_ops.py"))]
    own = [f for f in frames if "hf_dpzero/" in f.filename]
    named = [
        f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}"
        for f in own[-1:] + frames[-1:]
    ]
    return " > ".join(dict.fromkeys(named))
