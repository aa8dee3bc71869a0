"""Attacks through rounding: a row's loss beside other rows, and the low bits of a noised vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_language_models import seeded
from tiny_runs import build, tiny_model
from tiny_texts import passes_of
from torch import Tensor
from transformers import (
    OPTConfig,
    OPTForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from hf_dpzero.batches.shapes import PassShapes
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.objectives.heads import sequence_classification_objective
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.mechanisms import DPSGD, ScalarMechanism
from hf_dpzero.privacy.noise import SecureNoise

pytestmark = pytest.mark.slow

C = 0.05
SLOTS = 16


SIZES = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 80, "pad_token_id": 1}  # fmt: skip


def roberta() -> RobertaForSequenceClassification:
    return RobertaForSequenceClassification(RobertaConfig(**SIZES, intermediate_size=128)).eval()


def opt() -> OPTForSequenceClassification:
    config = OPTConfig(**SIZES, ffn_dim=128, word_embed_proj_dim=64)
    return OPTForSequenceClassification(config).eval()


def random_rows(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 60, (count,), generator=generator).tolist()
    return [
        {
            "input_ids": torch.randint(4, 200, (1, n), generator=generator),
            "attention_mask": torch.ones(1, n, dtype=torch.int64),
            "labels": torch.randint(0, 2, (1,), generator=generator),
        }
        for n in lengths
    ]


@pytest.mark.parametrize("smoothing", [1e-3, 1e-5])
@pytest.mark.parametrize("model", [roberta, opt], ids=["roberta", "opt"])
def test_removing_a_row_moves_the_sum_by_no_more_than_the_clip(model: Any, smoothing: float):
    """A search over 2,000 rows: each row's x, in batches with and without others, has the same bits.

    With neighbours collated together one float32 row differs in its last place, which 2 lambda C
    turns into several clipping norms over a batch.
    """
    network = seeded(model, 1)
    rows = random_rows(2000)
    space = ParameterSpace(network.named_parameters(), smoothing=smoothing)
    differences = FiniteDifferences(
        network, space, sequence_classification_objective, smoothing, strategy="whole_model"
    )
    shapes = PassShapes(
        lambda indices: [rows[i] for i in indices], passes_of(SLOTS), context_length=79
    )
    mechanism = ScalarMechanism(clip=C, noise_multiplier=1.0, expected_batch_size=64)
    generator, u = np.random.default_rng(3), [Direction(5, 0)]

    def clipped(indices: list[int]) -> dict[int, int]:
        made = shapes.microbatches(indices)
        order = [i for m in made for i in _which(m, rows, indices)]
        x = differences(made, u)
        return {i: mechanism.clip_sum(row[None])[0] for i, row in zip(order, x, strict=True)}

    seen: dict[int, int] = {}
    for batch in np.array_split(generator.permutation(2000), 12):
        seen |= clipped(batch.tolist())
    assert len(seen) == 2000
    moved = 0
    for batch in np.array_split(generator.permutation(2000), 12):
        again = clipped(batch.tolist()[1:])
        moved += sum(again[i] != seen[i] for i in again)
    assert moved == 0


def _which(microbatch: Any, rows: list[dict[str, Tensor]], indices: list[int]) -> list[int]:
    """The row numbers of a microbatch's examples, by their tokens."""
    names = {tuple(rows[i]["input_ids"][0].tolist()): i for i in indices}
    count = microbatch.examples
    tokens = zip(microbatch["input_ids"][:count], microbatch["attention_mask"][:count])
    return [names[tuple(ids[mask.bool()].tolist())] for ids, mask in tokens]


@pytest.mark.false_alarm(1e-23)
def test_200_runs_are_not_told_apart_by_the_low_bits_of_a_noised_vector():
    """y = fl(m + z) in float32 keeps the binary grid of m where |y| is small: 30 of 30 runs were told.

    The attack: the canary's sum has coordinates of one size m, the other world's are zero. Count the y
    with |y| < m / 16 that lie on the grid of m, 2^-30: all of them with the canary, few without.
    Of floats near y = 2^-11, 2^-12, ... one in 16, 32, ... lies on it, one in 30 over all. About 200
    of 400,000 draws are small: Poisson(199) is below 51 with probability 1e-35, and half of 51 numbers
    or more lie on the grid with probability 1e-24.
    """
    d, m = 10_000, 0.01
    mechanism = DPSGD(clip=1.0, noise_multiplier=1.0, expected_batch_size=1, dimension=d)
    spacing = float(np.spacing(np.float32(m)))

    def on_grid(y: np.ndarray) -> float:
        small = y.astype(np.float64)[np.abs(y) < m / 16]
        return float((small / spacing == np.rint(small / spacing)).mean()) if len(small) else 1.0

    for total in [m] * 100 + [0.0] * 100:
        released = mechanism.release_part(np.full(d, total), SecureNoise(), 0, 0)
        assert on_grid(released.astype(np.float32)) == 1.0

    def attacked(total: float) -> np.ndarray:
        """The same on floating-point noise, over 40 runs: the attack has power."""
        y = np.float32(total) + SecureNoise().normals(40 * d, 0, 0).astype(np.float32)
        assert (np.abs(y) < m / 16).sum() > 50
        return y

    assert on_grid(attacked(m)) == 1
    assert on_grid(attacked(0.0)) < 0.5


def test_the_adapter_of_a_run_with_a_canary_is_not_told_from_one_without(tmp_path: Any):
    """End to end: every released coordinate is a multiple of the public grid over B."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_model(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    )
    trainer = build(
        tmp_path, model, method="dp-sgd", max_steps=1, learning_rate=1.0, lr_scheduler_type="constant",
        testing={"insecure_noise_seed": None}, clip=1.0, noise_multiplier=1.0, expected_batch_size=16,
    )  # fmt: skip
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    trainer.train()
    grid = 2.0**-8 / 16
    zeros = [n for n, p in before.items() if not p.any()]
    assert zeros  # LoRA's B matrices start at zero: what they become is the release itself
    for name in zeros:
        released = dict(model.named_parameters())[name].detach().double() / grid
        assert torch.equal(released, released.round()), name
