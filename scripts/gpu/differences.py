"""Forward against central differences on SST-2, with a packed file: LoRA and all parameters of MiniLM.

Each pair of runs has its seed, its directions, its batches and its number of steps in common, and no
more time than the other needs: what is compared is what a step learns, not what a second does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier
from scripts.gpu.results import Item
from scripts.gpu.sst2 import Arm, DPZeroRun, Packed, accuracy

EPSILON, STEPS, K = 2.0, 80, 16
RATES = {"LoRA": (1e-3, 4e-3), "all parameters": (3e-4,)}
"""Tried by central differences with seed 1; that of the least loss of the validation rows is used."""
SEEDS = {"LoRA": (2, 3, 4), "all parameters": (2, 3)}


def items(file: Path, device: str, dry_run: bool) -> Iterator[Item]:
    """Central and forward differences for each seed, LoRA first."""
    packed = functools.lru_cache(maxsize=1)(lambda: Packed(file, device))
    steps = 2 if dry_run else STEPS

    losses: dict[tuple[str, float], float] = {}

    def call(trained: str, kind: str, seed: int, rate: float | None) -> dict[str, Any]:
        rate = rate or min((r for t, r in losses if t == trained), key=lambda r: losses[trained, r])
        arm = Arm(K, rate, 0.0, differences=kind, lora=trained == "LoRA")
        found = trained_by(packed(), arm, steps, seed)
        losses[trained, rate] = min(losses.get((trained, rate), float("inf")), found["loss"])
        return found

    for trained, rates in RATES.items():
        for rate in rates:
            work = functools.partial(call, trained, "central", 1, rate)
            yield Item(f"{trained}, central, rate {rate:g}", 25, lambda left, work=work: work())
        for seed in SEEDS[trained]:
            for kind in ("central", "forward"):
                work = functools.partial(call, trained, kind, seed, None)
                yield Item(f"{trained}, {kind}, seed {seed}", 20, lambda left, work=work: work())


def trained_by(packed: Packed, arm: Arm, steps: int, seed: int) -> dict[str, Any]:
    """Trains at a rate that falls linearly; loss and accuracy on the validation rows."""
    noise = packed.noise(EPSILON)
    run = DPZeroRun(packed, arm, noise.get(steps, max(noise.values())), seed)
    began = time.perf_counter()
    for number in range(steps):
        run(number, arm.learning_rate * (1.0 - number / steps))
    model = run.finish()
    return {
        "accuracy": 100 * accuracy(model, packed.validation),
        "loss": mean_loss(model, packed.validation),
        "learning_rate": arm.learning_rate,
        "train_seconds": time.perf_counter() - began,
    }


@torch.no_grad()
def mean_loss(model: SentenceClassifier, rows: Mapping[str, Tensor], size: int = 256) -> float:
    """Of the validation rows."""
    objective, total = select_objective(model), 0.0
    longest = model.config.encoder.max_position_embeddings
    for at in range(0, len(rows["labels"]), size):
        part = {n: v[at : at + size] for n, v in rows.items()}
        part |= {n: part[n][:, :longest] for n in ("input_ids", "attention_mask")}
        total += float(objective(model, part).sum())
    return total / len(rows["labels"])
