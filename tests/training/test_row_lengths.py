"""Rows longer than the model has positions."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from tiny_runs import build, same, tiny_model, weights
from tiny_texts import pad, texts
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    default_data_collator,
)

from hf_dpzero.checks.data import check_lengths, positions

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def rows(longest: int) -> Dataset:
    """200 rows, one of them long, where no sample of 64 looks."""
    data = texts(200)
    ids = [5 + i % 40 for i in range(longest)]
    data[1] = {"input_ids": ids, "attention_mask": [1] * longest, "labels": 0}
    return Dataset.from_list(data)


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_a_row_without_positions_is_refused_before_the_first_step(tmp_path, method: str):
    trainer = build(tmp_path, data=rows(17), max_steps=1, method=method)
    trainer.data_collator = pad
    with pytest.raises(ValueError, match="model's 16 positions.*truncation=True"):
        trainer.train()
    assert trainer.trajectory is None


def test_rows_that_a_collator_cuts_and_selected_rows_pass(tmp_path):
    def cut(batch: list) -> dict:
        return pad([{n: v if n == "labels" else v[:16] for n, v in row.items()} for row in batch])

    for data, collate in (
        (rows(17), cut),
        (rows(17).select(range(2, 200)), pad),
        (rows(16), pad),
        (list(rows(17)), pad),  # not read through
    ):
        trainer = build(tmp_path, data=data)
        trainer.data_collator = collate
        check_lengths(trainer.run)


def test_who_has_positions():
    gpt2 = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=24)
    roberta = RobertaConfig(
        **SIZES, intermediate_size=16, max_position_embeddings=20, pad_token_id=1
    )
    llama = LlamaConfig(**SIZES, intermediate_size=16, max_position_embeddings=20)
    with torch.random.fork_rng():
        assert positions(tiny_model()) == 16
        assert positions(GPT2ForSequenceClassification(gpt2)) == 24
        assert positions(RobertaForSequenceClassification(roberta)) == 18
        assert positions(LlamaForSequenceClassification(llama)) is None  # rotary


@pytest.mark.parametrize(
    ("method", "masks"), [("dpzero", False), ("dpzero", True), ("mezo", True), ("dp-sgd", True)]
)
def test_rows_of_several_lengths_need_no_collator_that_pads(tmp_path, caplog, method, masks):
    """As rows that are evaluated one by one; under a mask as the rows that a collator would pad."""
    data = Dataset.from_list(texts(60))
    data = data if masks else data.remove_columns("attention_mask")
    private = {"method": method, "max_steps": 2, "trainer_settings": {"eval_dataset": None}}
    alone = {} if masks and method != "mezo" else {"microbatch_size": 1}
    expected = build(tmp_path / "expected", data=data, **private, **{"microbatch_size": 8} | alone)
    expected.data_collator = pad if masks else default_data_collator
    expected.train()
    caplog.clear()
    given = {"microbatch_size": None if alone else 8, "per_device_train_batch_size": 1}
    trainer = build(tmp_path / "cannot_pad", data=data, **private, **given)
    trainer.train()
    assert same(weights(trainer.model), weights(expected.model))
    assert caplog.text.count("every example is evaluated by itself") == bool(alone)
