"""Single figures: fixed cost, weight decay, float32, offload over PCIe, digests of weights."""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scripts.gpu.results import Item
from scripts.gpu.steps import COMMON, made, measure

REPEATS = 7


def items(device: str, dry_run: bool) -> Iterator[Item]:
    """One a figure; tiny shapes in a dry run."""
    encoder, decoder = ("tiny", "tiny-opt") if dry_run else ("roberta-large", "opt-1.3b")
    sizes = {"batch_size": 2, "seq_length": 8} if dry_run else {"batch_size": 8, "seq_length": 256}
    common = {**COMMON, "device": device, **sizes, "repeats": 1 if dry_run else REPEATS}
    fixed = {**common, "shape": "tiny", "batch_size": 8, "seq_length": 8, "one_batch": True}
    of_encoder, of_decoder = ({**common, "shape": shape} for shape in (encoder, decoder))
    yield Item("fixed cost", 5, functools.partial(fixed_cost, fixed))
    yield Item("weight decay", 10, functools.partial(weight_decay, of_encoder))
    narrow = {**of_encoder, "dtype": "float32", "memory": False}
    yield Item("float32", 15, functools.partial(measure, narrow))
    yield Item("offload", 30, functools.partial(offload, of_decoder))
    yield Item("digests", 10, functools.partial(digests, of_decoder))


def _ratio(calls: Sequence[Callable[[int], None]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Median seconds of calls that take turns, and of each one after the first over the first."""
    from scripts.benchmarks.clock import interleaved

    rounds = interleaved(calls, settings["repeats"], settings["device"])
    first, *others = rounds
    ratios = [statistics.median(a / b for a, b in zip(o, first, strict=True)) for o in others]
    return {"seconds": [statistics.median(r) for r in rounds], "over_the_first": ratios}


def fixed_cost(settings: Mapping[str, Any], left: float = 0.0) -> Mapping[str, Any]:
    """Two forward passes of a model that costs nothing, and a step of it."""
    step, forwards, _ = made(settings)
    found = _ratio([forwards, step], settings)
    return {**found, "fixed_ms": 1e3 * (found["seconds"][1] - found["seconds"][0])}


def weight_decay(settings: Mapping[str, Any], left: float = 0.0) -> Mapping[str, Any]:
    """Forwards, steps without weight decay, and steps with it."""
    from scripts.benchmarks.timed_steps import StepAfterItsOwn

    step, forwards, _ = made(settings)
    plain, decaying = StepAfterItsOwn(step, 1), StepAfterItsOwn(step, 1)
    decaying.own.trajectory.header["weight_decay"] = 0.01
    return _ratio([forwards, plain, decaying], settings)


def offload(settings: Mapping[str, Any], left: float = 0.0) -> Mapping[str, Any]:
    """Two forwards of a model whose weights all live in CPU memory, and a step of it."""
    import torch

    from hf_dpzero.estimators.offload import prefetcher_of
    from scripts.benchmarks.offload import OffloadedStep

    sizes = {"batch": settings["batch_size"], "length": settings["seq_length"], "directions": 1}
    wanted = argparse.Namespace(**settings, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        step = OffloadedStep("cpu", wanted, folder)

    @torch.no_grad()
    def forwards(number: int) -> None:
        with prefetcher_of(step.model).ahead():
            for _ in range(2):
                step.model(**step.batch)

    found = _ratio([forwards, step], settings)
    gigabytes = step.moved[-1] / 1e9
    return {**found, "weights_gb": step.weights / 1e9, "in_gb": gigabytes, "gb_a_second":
            gigabytes / found["seconds"][1], "peak_gb": step.peak() / 1e9}  # fmt: skip


def digests(settings: Mapping[str, Any], left: float = 0.0) -> Mapping[str, Any]:
    """Seconds of what names a base and of what a checkpoint is compared with."""
    from hf_dpzero.ledger.digests import checksums, digest_model, state_digest
    from scripts.benchmarks.shapes import empty_model, fill_

    model = empty_model(settings["shape"], settings["dtype"], settings["device"])
    fill_(model)
    found = {"gb": sum(p.nbytes for p in model.parameters()) / 1e9}
    calls: dict[str, Callable[[], object]] = {
        "digest_model": lambda: digest_model(model),
        "state_digest": lambda: state_digest(model),
        "checksums": lambda: checksums(model.named_parameters()),
    }
    for name, call in calls.items():
        began = time.perf_counter()
        call()
        found[f"{name}_s"] = time.perf_counter() - began
    return found
