"""What offload costs: seconds of a step, bytes on the device and bytes moved.

    python -m scripts.benchmarks.offload --shape opt-125m --batch 2 --length 16 --repeats 5
    python -m scripts.benchmarks.offload --shape opt-1.3b --dtype bfloat16 --device cuda

One zeroth-order step of full fine-tuning (K directions, one microbatch) on random weights and random
tokens: on the device, offloaded to CPU memory and offloaded to a file, in turns. All must give the same
numbers. Prints one JSON object for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import accelerate
import torch
from torch import Tensor, nn

from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.offload import prefetched_of, prefetcher_of
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.parallel.offload import own_trained_files, settle_offloaded
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from scripts.benchmarks.clock import interleaved
from scripts.benchmarks.fixed_shapes import row_of
from scripts.benchmarks.shapes import build_config, empty_model, fill_

PLACES = ("device", "cpu", "disk")
_SMOOTHING, _RATE = 1e-3, 1e-6


class OffloadedStep:
    """A step of a model whose weights live in one of `PLACES`.

    Attributes:
      released: the finite differences of every step so far.
    """

    def __init__(self, where: str, settings: argparse.Namespace, folder: str) -> None:
        self.where, self.device, self.directions = where, settings.device, settings.directions
        self.model = _placed(where, settings, folder)
        self.weights = sum(p.nbytes for p in self.model.parameters())
        self.space = ParameterSpace.from_model(self.model, smoothing=_SMOOTHING)
        self.space.snap_()
        self.differences = FiniteDifferences(
            self.model, self.space, select_objective(self.model), _SMOOTHING, strategy="layerwise"
        )
        self.batch = _batch(settings)
        self.released: list[Tensor] = []
        self.moved: list[int] = []

    def __call__(self, number: int) -> None:
        """Takes step `number`."""
        schedule = prefetcher_of(self.model)
        before = 0 if schedule is None else schedule.bytes_in
        step = len(self.released)
        directions = [Direction(7, step, query) for query in range(self.directions)]
        self.released.append(self.differences([self.batch], directions))
        self.space.step_(directions, [_RATE] * self.directions)
        self.moved.append(0 if schedule is None else schedule.bytes_in - before)

    def peak(self) -> int:
        """Bytes of weights, perturbed copies included, on the execution device at most."""
        schedule, visits = prefetcher_of(self.model), self.differences.visits
        if schedule is not None:
            return schedule.peak
        levels = visits.scratch._levels.values() if visits else ()
        return self.weights + sum(level.buffer.nbytes for of in levels for level in of)


def _placed(where: str, settings: argparse.Namespace, folder: str) -> nn.Module:
    model = empty_model(settings.shape, settings.dtype, "cpu")
    fill_(model)
    if where == "device":
        return model.to(settings.device)
    if where == "cpu":
        accelerate.cpu_offload(model, torch.device(settings.device))
    else:
        accelerate.disk_offload(model, folder, torch.device(settings.device))
    settle_offloaded(model)
    own_trained_files(model)
    return model


def _batch(settings: argparse.Namespace) -> dict[str, Tensor]:
    vocabulary = build_config(settings.shape).vocab_size
    generator = torch.Generator().manual_seed(0)
    rows = [row_of(settings.length, vocabulary, generator) for _ in range(settings.batch)]
    return {key: torch.cat([row[key] for row in rows]).to(settings.device) for key in rows[0]}


def measured(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each place: seconds, bytes on the device, bytes in and bytes written a step.

    Args:
      settings: shape, dtype, device, batch, length, directions, repeats.

    Raises:
      AssertionError: the places do not give the same numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        steps = [OffloadedStep(where, settings, folder) for where in PLACES]
        seconds = interleaved(steps, settings.repeats, settings.device)
        for step in steps[1:]:
            assert torch.equal(torch.cat(step.released), torch.cat(steps[0].released)), step.where
        return [
            {
                "shape": settings.shape,
                "dtype": settings.dtype,
                "where": step.where,
                "seconds": statistics.median(times),
                "weights_bytes": step.weights,
                "largest_module_bytes": max(
                    (
                        sum(t.nbytes for t in a.tensors())
                        for a in filter(None, map(prefetched_of, step.model.modules()))
                    ),
                    default=0,
                ),
                "peak_bytes": step.peak(),
                "bytes_in": step.moved[-1],
                "bytes_written": step.weights,
            }
            for step, times in zip(steps, seconds, strict=True)
        ]


def main(words: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="opt-125m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    for name, default in (("batch", 2), ("length", 16), ("directions", 1), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for line in measured(parser.parse_args(words)):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
