"""Correlated noise in numbers: the time of a step's noise, and what accumulates of it.

    python -m scripts.benchmarks.correlated_noise time
    python -m scripts.benchmarks.correlated_noise prefix
    python -m scripts.benchmarks.correlated_noise directions

`time`: noise of a step on d coordinates, correlated over independent, in turns within one process.
`prefix`: a run of `DPZeroTrainer` (dp-sgd on a small classifier, noise 10^4 times the clip, so that
gradients vanish beside it) for each correlation, at the same epsilon: the mean over steps r of the
squared sum of what steps 0..r released, for one coordinate, and its ratio to that of independent noise.
`directions`: the same of noise along directions, of dpzero: fresh in each step, fixed, held for some.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_dpzero import DPZeroConfig, DPZeroTrainer
from hf_dpzero.privacy.correlated.factorization import (
    Factorization,
    Restarted,
    banded,
    toeplitz,
)
from hf_dpzero.privacy.correlated.stream import CorrelatedNoise, KeyedNoise, new_noise_key
from hf_dpzero.privacy.noise import NoiseSource, SecureNoise
from hf_dpzero.training.first_order_step import CHUNK


def step_times(dimension: int, bands: int, repeats: int) -> dict[str, float]:
    """Median seconds of a step's noise, and the median of the ratio of neighbouring measurements."""
    keyed = KeyedNoise(((0, new_noise_key()),))
    correlated = CorrelatedNoise(keyed, banded(bands + repeats, bands), 1.0, dimension)
    sources: dict[str, NoiseSource] = {"independent": SecureNoise(), "correlated": correlated}
    for step in range(bands):
        _draw(correlated, dimension, step)
    times: dict[str, list[float]] = {name: [] for name in sources}
    for step in range(bands, bands + repeats):
        for name, source in sources.items():
            start = time.perf_counter()
            _draw(source, dimension, step)
            times[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(times["independent"], times["correlated"], strict=True)]
    return {
        **{name: statistics.median(values) for name, values in times.items()},
        "ratio": statistics.median(ratios),
        "cache_bytes": float(8 * dimension * correlated.held),
    }


def _draw(source: NoiseSource, dimension: int, step: int) -> None:
    for part, start in enumerate(range(0, dimension, CHUNK)):
        size = min(CHUNK, dimension - start)
        source.normals(size, step, part)
        source.dither(size, step, part)


class _Sums(TrainerCallback):
    """Adds up the squared norms of the running sums of what steps release."""

    def __init__(self) -> None:
        self.running, self.squares, self.steps = 0.0, 0.0, 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        parameters = [p for p in given["model"].parameters() if p.grad is not None]
        released = torch.cat([p.grad.detach().double().flatten() for p in parameters])
        self.running = self.running + released
        self.squares += float(self.running.square().mean())
        self.steps += 1


class _Classifier(nn.Module):
    """One linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.layer(inputs)}


def _losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["inputs"])["logits"]
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def accumulated(correlation: str, steps: int, width: int) -> float:
    """Mean over r of (sum of what steps 0..r released)^2 for one coordinate, over (sigma C / B)^2."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"inputs": torch.randn(width, generator=generator), "labels": torch.tensor(i % 2)}
        for i in range(2 * steps)
    ]
    sums = _Sums()
    with tempfile.TemporaryDirectory() as folder:
        args = DPZeroConfig(
            output_dir=folder, method="dp-sgd", sampling="fixed_batches",
            correlated_noise={"kind": correlation},
            expected_batch_size=2, max_steps=steps, noise_multiplier=1e4, clip=1.0, target_delta=1e-5,
            learning_rate=0.0, lr_scheduler_type="constant", report_to="none", save_strategy="no",
            disable_tqdm=True, use_cpu=True, logging_strategy="no", on_no_signal="ignore",
            remove_unused_columns=False,
        )  # fmt: skip
        trainer = DPZeroTrainer(
            model=_Classifier(width), args=args, train_dataset=rows, callbacks=[sums],
            compute_per_example_loss=_losses,
        )  # fmt: skip
        trainer.train()
    return sums.squares / sums.steps / (1e4 / 2) ** 2


def direction_energy(
    factorization: Factorization, held: int, dimension: int, seed: int = 0
) -> float:
    """Mean over r of |sum of n_t u_t|^2 for noise at one epsilon and unit directions held so long."""
    generator = np.random.Generator(np.random.Philox(seed))
    keys = ((0, generator.bytes(32)),)
    noise = CorrelatedNoise(KeyedNoise(keys), factorization, factorization.sensitivity, 1)
    running, energy = np.zeros(dimension), 0.0
    for step in range(factorization.rounds):
        if step % held == 0:
            direction = generator.choice([-1.0, 1.0], dimension) / math.sqrt(dimension)
        running += noise.base_deviation * noise.normals(1, step, 0)[0] * direction
        energy += float(running @ running)
    return energy / factorization.rounds


def direction_energies(steps: int, dimension: int, held: int, seeds: int) -> dict[str, float]:
    """Means over seeds, correlated and independent noise along fresh, fixed and held directions."""
    whole, blocks = toeplitz(steps), Restarted(toeplitz(held), steps)
    identity = banded(steps, 1)
    cases = {
        "fresh": (whole, 1), "fixed": (whole, steps), f"held for {held}": (blocks, held),
        "fresh, independent": (identity, 1), "fixed, independent": (identity, steps),
    }  # fmt: skip
    return {
        name: statistics.fmean(direction_energy(f, hold, dimension, seed) for seed in range(seeds))
        for name, (f, hold) in cases.items()
    }


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("time", "prefix", "directions"))
    parser.add_argument("--dimension", type=int, help="d; default 1000000, or 200 for directions")
    parser.add_argument("--bands", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--steps", type=int, help="R; default 256, or 512 for directions")
    parser.add_argument("--held", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    if given.what == "time":
        found = step_times(given.dimension or 10**6, given.bands, given.repeats)
    elif given.what == "directions":
        found = direction_energies(
            given.steps or 512, given.dimension or 200, given.held, given.seeds
        )
    else:
        kinds = ("none", "toeplitz", "banded", "optimized", "tree")
        sums = {kind: accumulated(kind, given.steps or 256, 500) for kind in kinds}
        found = {**sums, **{f"{kind} / none": sums[kind] / sums["none"] for kind in kinds[1:]}}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
