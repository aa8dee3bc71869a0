"""Attacks on fixed shapes: labels that change a pass' shape, pad tokens, private rows that decide."""

from __future__ import annotations

from typing import Any

import torch
from tiny_language_models import seeded
from tiny_texts import passes_of
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForSequenceClassification

from hf_dpzero.batches.shapes import PassShapes
from hf_dpzero.objectives.heads import causal_lm_objective, sequence_classification_objective
from hf_dpzero.privacy.mechanisms import DPSGD
from hf_dpzero.privacy.mechanisms.gradient import row_norms


def row(length: int, first_label: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :first_label] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def shapes_of(rows: list[dict[str, Tensor]], size: int) -> PassShapes:
    def collate(chosen: Any) -> list[dict[str, Tensor]]:
        return [rows[i] for i in chosen]

    return PassShapes(collate, passes_of(size), context_length=64, pad_token_id=1)


@torch.no_grad()
def test_a_neighbour_labelled_from_its_first_token_changes_no_bit():
    """`logits_to_keep` is computed from a batch's labels; rows that differ in it never meet."""
    rows = [row(32, 31, seed) for seed in range(63)] + [row(32, 0, 99)]
    shapes = shapes_of(rows, 64)
    config = GPT2Config(vocab_size=100, n_positions=64, n_embd=48, n_layer=2, n_head=4)
    model = seeded(lambda: GPT2LMHeadModel(config), 0).eval()

    def losses(indices: Any) -> Tensor:
        made = shapes.microbatches(indices)
        found = [causal_lm_objective(model, dict(m))[: m.examples] for m in made]
        return torch.cat(found)

    assert len(shapes.microbatches(range(64))) == 2
    assert torch.equal(losses(range(64))[:63], losses(range(63)))


def test_rows_with_other_numbers_of_answers_do_not_meet():
    rows = [row(32, first, first) for first in (31, 30, 28, 24, 16)]
    assert len(shapes_of(rows, 8).microbatches(range(5))) == 5  # 1, 2, 4, 8 and 16 labelled tokens


def test_classifiers_that_look_for_the_last_pad_token_read_the_same_row():
    sizes = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = OPTConfig(
        **sizes, ffn_dim=16, max_position_embeddings=64, word_embed_proj_dim=16, pad_token_id=1
    )
    model = seeded(lambda: OPTForSequenceClassification(config), 0).eval()
    one = {**row(5, 0, 3), "labels": torch.tensor([1])}
    with torch.no_grad():
        (m,) = shapes_of([one], 2).microbatches([0])
        assert m["input_ids"].shape == (2, 8)
        found = sequence_classification_objective(model, dict(m))[:1]
        torch.testing.assert_close(found, sequence_classification_objective(model, one))


def test_norms_of_constant_and_strided_rows_are_accurate():
    """float32 norms of 65,536 equal numbers are off by 5e-5, of strided ones by 4e-4."""
    clip = 1.0
    mechanism = DPSGD(clip=clip, noise_multiplier=1.0, expected_batch_size=1)
    for rows in (torch.full((2, 1 << 16), 1 / 3), torch.full((1 << 16, 2), 1 / 3).T):
        norms, exact = row_norms(rows), rows.double().norm(dim=1)
        torch.testing.assert_close(norms, exact, rtol=1e-12, atol=0)
        moved = (mechanism.weights(norms).double()[:, None] * rows.double()).norm(dim=1)
        assert float(moved.max()) <= clip
