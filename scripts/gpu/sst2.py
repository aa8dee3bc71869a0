"""SST-2 with all parameters of a MiniLM: DPZero with K directions, from a packed file.

It takes the package's own steps (`ZerothOrderStep`) on Poisson batches in passes of fixed sizes: the
first has 1.25 B rows, of 32 columns, the last of which is always padding, so that attention always has a
mask; what is not full is filled up with blanks. Noise is that of a seeded generator, because the data
are public and OpenDP may be missing: an outcome's epsilon is that of the same run with secret noise.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dpzero.batches.columns import Block
from hf_dpzero.batches.placement import Placement, pass_cost, sizes_up_to
from hf_dpzero.batches.shapes import PassShapes
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.noise import InsecureSeededNoise
from hf_dpzero.privacy.sampling import PoissonSampler, place_order
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep
from scripts.gpu.pack import EPSILONS, TRAIN_TOKENS
from scripts.gpu.results import Item

SMOOTHING = 1e-3
CLIP_PER_DIRECTION = 16.0
"""C of DPZero over the square root of K. Differences at the start: 13 in the median, 22 at 90 %."""
SLOTS_FOR_BATCH = 1.25
"""Rows of a pass at most, over the expected batch: one of 512 is larger once in 10^7."""


@dataclass(frozen=True)
class Arm:
    """K, the learning rate, the seconds that it may train; which differences, and of what.

    LoRA: adapters of rank 8 of queries and values, and the head, in place of all parameters.
    """

    num_directions: int
    learning_rate: float
    seconds: float
    differences: str = "central"
    lora: bool = False


# DPZero's rate: of 1e-6 to 1e-3, the step along 16 directions (128 rows) after which the loss of 256
# other rows was least. It does not depend on K, whose terms are added.
ARMS = {
    "dpzero-1": Arm(1, 3e-4, 15.0),
    "dpzero-16": Arm(16, 3e-4, 25.0),
    "dpzero-64": Arm(64, 3e-4, 40.0),
}


class Packed:
    """What `pack` wrote, on a device.

    Args:
      file: of `pack`.
      device: for rows and weights.
    """

    def __init__(self, file: Path, device: str) -> None:
        from safetensors import safe_open

        with safe_open(file, "pt") as opened:
            self.facts: dict[str, Any] = json.loads(opened.metadata()["facts"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        self.device = device
        self.weights = {
            n.removeprefix("model."): t.float().to(device)
            for n, t in tensors.items()
            if n.startswith("model.")
        }
        self.train, self.validation = (
            padded(*(tensors[f"data.{split}.{n}"] for n in ("ids", "lengths", "labels")), device)
            for split in ("train", "validation")
        )

    def model(self) -> SentenceClassifier:
        """A fresh classifier with the packed weights, float32, in eval mode."""
        from transformers import AutoConfig, AutoModel

        settings = dict(self.facts["model"]["encoder"])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        encoder = AutoModel.from_config(config)
        model = SentenceClassifier.from_encoder(
            encoder, num_labels=2, logit_scale=self.facts["model"]["logit_scale"]
        )
        model.to(self.device).load_state_dict(self.weights)
        return model.eval().float()

    def noise(self, epsilon: float) -> dict[int, float]:
        """Steps -> noise multiplier."""
        return {int(t): s for t, s in self.facts["noise"][str(epsilon)].items()}


def padded(ids: Tensor, lengths: Tensor, labels: Tensor, device: str) -> dict[str, Tensor]:
    """Rows as wide as the longest one and a column more, at least as in training; masked where empty."""
    sizes = lengths.long()
    width = max(int(sizes.max()), TRAIN_TOKENS) + 1
    mask = torch.arange(width).unsqueeze(0) < sizes.unsqueeze(1)
    rows = torch.zeros(len(sizes), width, dtype=torch.int64)
    rows[mask] = torch.from_numpy(ids.numpy().astype(np.int64))
    made = {"input_ids": rows, "attention_mask": mask.long(), "labels": labels.long()}
    return {name: value.to(device) for name, value in made.items()}


@torch.no_grad()
def accuracy(model: SentenceClassifier, rows: Mapping[str, Tensor], size: int = 256) -> float:
    """Share of rows whose label has the largest logit."""
    right = 0
    longest = model.config.encoder.max_position_embeddings
    for at in range(0, len(rows["labels"]), size):
        part = {n: v[at : at + size] for n, v in rows.items()}
        logits = model(part["input_ids"][:, :longest], part["attention_mask"][:, :longest]).logits
        right += int((logits.argmax(1) == part["labels"]).sum())
    return right / len(rows["labels"])


# ---------------------------------------------------------------- the two methods


class DPZeroRun:
    """Steps of DPZero on the packed rows.

    Args:
      packed: data and weights.
      arm: K.
      noise_multiplier: sigma.
      seed: of directions, batches and noise.
    """

    def __init__(self, packed: Packed, arm: Arm, noise_multiplier: float, seed: int) -> None:
        self.model, count = packed.model(), arm.num_directions
        batch = packed.facts["batch_size"]
        if arm.lora:
            _with_adapters(self.model, seed)
        else:
            self.model.requires_grad_(True)
        self.space = ParameterSpace.from_model(
            self.model, distribution="rademacher", smoothing=SMOOTHING
        )
        self.space.snap_()
        header = {
            "direction_key": f"{seed:032x}", "num_directions": count, "num_values": count,
            "update_rule": {"name": "sgd"}, "weight_decay": 0.0, "replayable": True,
        }  # fmt: skip
        mechanism = ScalarMechanism(
            clip=CLIP_PER_DIRECTION * count**0.5,
            noise_multiplier=noise_multiplier,
            expected_batch_size=batch,
            num_directions=count,
        )
        differences = FiniteDifferences(
            self.model, self.space, select_objective(self.model), SMOOTHING, kind=arm.differences
        )
        self.step = ZerothOrderStep(
            mechanism=mechanism, space=self.space, differences=differences,
            noise=InsecureSeededNoise(seed), trajectory=Trajectory(header), defer=True,
        )  # fmt: skip
        self.batches = DrawnRows(packed, seed)

    def __call__(self, number: int, learning_rate: float) -> None:
        """Takes a step."""
        self.step(number, self.batches.fixed(number), learning_rate)

    def finish(self) -> SentenceClassifier:
        """The model, with the last update made."""
        self.space.settle_()
        return self.model


def _with_adapters(model: SentenceClassifier, seed: int) -> None:
    """Puts LoRA adapters on the encoder; they and the head train."""
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"])
        inject_adapter_in_model(settings, model)
    model.classifier.requires_grad_(True)


class DrawnRows:
    """Poisson batches of the packed training rows.

    Args:
      packed: rows and the expected batch size.
      seed: of the draws.
    """

    def __init__(self, packed: Packed, seed: int) -> None:
        self.rows, size = packed.train, float(packed.facts["batch_size"])
        self.sampler = PoissonSampler(
            num_examples=len(self.rows["labels"]), expected_batch_size=size
        )
        self.key = seed.to_bytes(32, "little")
        sizes = sizes_up_to(max(2, round(SLOTS_FOR_BATCH * size)))
        parameters = sum(weight.numel() for weight in packed.weights.values())
        cost = pass_cost(torch.device(packed.device).type, parameters, low_precision=False)
        width = self.rows["input_ids"].shape[1]  # of all rows, which stay as they are
        placement = Placement(size, sizes, {width: 1.0}, cost)
        self.shapes = PassShapes(
            self._refuse, placement, collate_blocks=self._block, max_length=width
        )

    def of(self, indices: list[int]) -> dict[str, Tensor]:
        """The rows of `indices`."""
        chosen = torch.tensor(indices, dtype=torch.int64, device=self.rows["labels"].device)
        return {name: value[chosen] for name, value in self.rows.items()}

    def drawn(self, step: int) -> list[int]:
        """Indices of a step's batch, perhaps none."""
        return self.sampler.batch(step, self.key).tolist()

    def fixed(self, step: int) -> list[Any]:
        """A step's microbatches in fixed shapes."""
        chosen = np.array(self.drawn(step), dtype=np.int64)
        order = place_order(len(chosen), step, self.key)
        return self.shapes.microbatches(chosen[order].tolist())

    def _block(self, indices: list[int]) -> list[Block]:
        return [(range(len(indices)), self.of(indices))]

    def _refuse(self, indices: list[int]) -> list[Mapping[str, Tensor]]:
        raise NotImplementedError("rows are one block")


# ---------------------------------------------------------------- one run


def steps_that_fit(seconds_per_step: float, seconds: float, choices: Mapping[int, float]) -> int:
    """The largest number of steps whose noise is known and whose time fits; at least the smallest.

    >>> steps_that_fit(0.5, 30.0, {10: 0.8, 40: 0.9, 80: 1.0})
    40
    """
    return max((t for t in choices if t * seconds_per_step <= seconds), default=min(choices))


def train(packed: Packed, arm: Arm, epsilon: float, seed: int, left: float) -> dict[str, Any]:
    """Trains an arm as long as its time allows, at a rate that falls linearly, and evaluates.

    Three steps, which are thrown away, say how long one takes; the number of steps decides the noise.
    """
    choices = packed.noise(epsilon)
    trial = DPZeroRun(packed, arm, min(choices.values()), seed)
    per_step = seconds_per_step(trial, packed.device)
    del trial
    steps = steps_that_fit(per_step, min(arm.seconds, 0.8 * left), choices)
    run = DPZeroRun(packed, arm, choices[steps], seed)
    began = time.perf_counter()
    for number in range(steps):
        run(number, arm.learning_rate * (1.0 - number / steps))
    model = run.finish()
    reached = accuracy(model, packed.validation)
    return {
        "num_directions": arm.num_directions, "epsilon": epsilon,
        "delta": packed.facts["delta"], "steps": steps, "noise_multiplier": choices[steps],
        "learning_rate": arm.learning_rate, "seconds_per_step": per_step,
        "train_seconds": time.perf_counter() - began, "accuracy": reached, "seed": seed,
        "dimension": sum(p.numel() for p in model.parameters()),
        "batch_size": packed.facts["batch_size"], "rows": len(packed.train["labels"]),
        "noise": "seeded; epsilon is that of the same run with secret noise",
    }  # fmt: skip


def seconds_per_step(run: Any, device: str) -> float:
    """Of the faster of two steps after an untimed one."""
    from scripts.benchmarks.clock import synchronize

    seconds = []
    for number in range(3):
        synchronize(device)
        began = time.perf_counter()
        run(number, 0.0)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def items(file: Path, device: str, dry_run: bool, seed: int = 1) -> Iterator[Item]:
    """The start's accuracy, then one run for each epsilon and arm."""

    @functools.lru_cache(maxsize=1)
    def packed() -> Packed:
        if not file.exists():
            raise OSError(f"{file} is missing; make it with `python -m scripts.gpu pack`.")
        return Packed(file, device)

    def start(left: float) -> dict[str, Any]:
        return {"accuracy": accuracy(packed().model(), packed().validation)}

    yield Item("start", 1 if dry_run else 15, start)
    for epsilon in EPSILONS:
        for name, arm in ARMS.items():

            def call(left: float, arm: Arm = arm, epsilon: float = epsilon) -> dict[str, Any]:
                limit = min(left, 0.01) if dry_run else left
                return train(packed(), arm, epsilon, seed, limit)

            yield Item(f"{name}-eps{epsilon:g}", 1 if dry_run else arm.seconds + 6, call)
