"""Attacks on fixed shapes: routed experts, restarting positions, rows that choose blanks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_language_models import seeded
from tiny_runs import build, tiny_data, tiny_model
from tiny_texts import differences, pad, passes_of, texts
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from hf_dpzero.batches.shapes import PassShapes
from hf_dpzero.checks.precision import couples_values
from hf_dpzero.objectives.heads import sequence_classification_objective
from hf_dpzero.training.preparation import prepare


def causal(rows: int, seed: int) -> list[dict[str, Any]]:
    return [{**row, "labels": row["input_ids"]} for row in texts(rows, seed)]


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    labels = [row["labels"] + [-100] * (width - len(row["labels"])) for row in rows]
    return {**pad([{**row, "labels": 0} for row in rows]), "labels": torch.tensor(labels)}


def mixtral() -> MixtralForCausalLM:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    routed = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.3}
    config = MixtralConfig(**sizes, **heads, **routed, pad_token_id=1)
    return seeded(lambda: MixtralForCausalLM(config), 0)


def test_routed_experts_see_as_many_tokens_as_all_rows_send_them(tmp_path):
    """An expert's product has another shape beside others: no bit in the trial, 7 of 522 in the run."""
    trainer = build(
        tmp_path, mixtral(), data=causal(60, 4), trainer_settings={"eval_dataset": causal(40, 9)},
        expected_batch_size=30, microbatch_size=4, max_steps=1, rows_are="examples",
    )  # fmt: skip
    trainer.data_collator = padded
    trainer.train()
    assert "experts" in couples_values(trainer.model) and trainer.run.shapes.one_by_one
    assert trainer.privacy_report().forward_passes == "one example"
    whole = differences(trainer, list(range(60)))
    generator = torch.Generator().manual_seed(0)
    for left_out in range(1, 37, 3):
        chosen = torch.randperm(60, generator=generator).tolist()[: 60 - left_out]
        assert differences(trainer, chosen).items() <= whole.items()


def test_global_attention_is_as_wide_as_the_row_with_most():
    LongformerSelfAttention = type("LongformerSelfAttention", (nn.Linear,), {})
    assert "global attention" in couples_values(nn.Sequential(LongformerSelfAttention(2, 2)))
    assert not couples_values(tiny_model())


def test_positions_that_start_again_change_no_mask_of_other_rows():
    """Without a mask, transformers makes one where position_ids of any row of the batch start again."""
    rows = []
    for i in range(23):
        positions = [*range(5), *range(3)] if i % 6 == 5 else [*range(8)]
        rows.append(
            {"input_ids": torch.full((1, 8), 5 + i), "position_ids": torch.tensor([positions])}
        )

    def masks(chosen: list[int]) -> dict[int, bool]:
        shapes = PassShapes(lambda of: [rows[i] for i in of], passes_of(4))
        made = shapes.microbatches(chosen)
        packed = [bool((m["position_ids"].diff() != 1).any()) for m in made]
        return {chosen[i]: p for m, p in zip(made, packed, strict=True) for i in m.places}

    whole = masks(list(range(23)))
    for removed in range(23):
        rest = masks([i for i in range(23) if i != removed])
        assert rest.items() <= whole.items()


class NoBlankBesideLow(nn.Module):
    """Takes no blank beside a row that begins with a low token."""

    single_pass = True

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        first = inputs["input_ids"][:, 0]
        if bool((first == 0).any()) and bool(((first > 0) & (first < 8)).any()):
            raise ValueError("no blank here")
        return sequence_classification_objective(model, inputs)


@pytest.mark.parametrize("with_public", [True, False])
def test_row_0_does_not_choose_what_fills_up_microbatches(tmp_path, with_public: bool):
    rows = [dict(row) for row in tiny_data(60) if row["input_ids"][0] >= 8]
    odd = {**rows[0], "input_ids": [5, *rows[0]["input_ids"][1:]]}
    public = tiny_data(60, 9).filter(lambda row: row["input_ids"][0] >= 8) if with_public else None
    outcomes = []
    for number, data in enumerate((rows, [odd, *rows])):
        objective = {"compute_per_example_loss": NoBlankBesideLow(), "eval_dataset": public}
        trainer = build(tmp_path / str(number), data=data, trainer_settings=objective)
        try:
            prepare(trainer.run)
        except ValueError:
            continue  # a private row may stop a run
        outcomes.append(repr(trainer.run.shapes.placement))
    assert outcomes and len(set(outcomes)) == 1
