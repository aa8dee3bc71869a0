"""What one row could decide for all others: stored features, strategies, shapes, shares of processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import datasets
import pytest
import torch
from tiny_runs import build, tiny_data, tiny_model
from tiny_texts import pad, passes_of
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from hf_dpzero.batches.logical_batch import Rows
from hf_dpzero.batches.shapes import PassShapes
from hf_dpzero.checks.processes import check_same_rows
from hf_dpzero.parallel import collectives
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier, precompute_features


def test_a_long_row_moves_no_bit_of_other_rows_stored_features():
    """In one batch padded together, it changed most of 511 rows: up to 486 C at lambda 1e-5."""
    torch.manual_seed(0)
    shape = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "pad_token_id": 0}
    config = BertConfig(
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=80, **shape
    )
    model = SentenceClassifier.from_encoder(BertModel(config).eval(), num_labels=2)
    numbers = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, 200, (6,), generator=numbers).tolist() for _ in range(63)]
    long = torch.randint(3, 200, (70,), generator=numbers).tolist()

    def features(rows: list[list[int]]) -> Tensor:
        masks = [[1] * len(row) for row in rows]
        columns = {"input_ids": rows, "attention_mask": masks, "labels": [0] * len(rows)}
        data = datasets.Dataset.from_dict(columns)
        made = precompute_features(model, data, pad, trainable="^classifier", batch_size=64)
        return torch.stack([row["sentence_embedding"] for row in made])

    without, beside = features(drawn), features([long, *drawn])[1:]
    assert torch.equal(without, beside)


class Series(nn.Module):
    """A linear layer over the steps of a series: wide for long rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.b = nn.Linear(64, 2)

    def forward(self, series: Tensor) -> Tensor:
        return self.b(series).mean(1)


def series_loss(model: nn.Module, inputs: Any) -> Tensor:
    return nn.functional.cross_entropy(model(inputs["series"]), inputs["labels"], reduction="none")


def together(rows: list[Any]) -> dict[str, Tensor]:
    series = [torch.as_tensor(row["series"]) for row in rows]
    labels = torch.tensor([row["labels"] for row in rows])
    return {"series": nn.utils.rnn.pad_sequence(series, batch_first=True), "labels": labels}


def test_private_rows_do_not_choose_the_strategy(tmp_path):
    """Without public rows the first and the last private row chose `stacked` or not, for all others."""
    chosen, draw = [], torch.Generator().manual_seed(1)
    for number, first in enumerate((1, 4000)):
        lengths = [first] + [1] * 30
        rows = [
            {"series": torch.randn(n, 64, generator=draw), "labels": i % 2}
            for i, n in enumerate(lengths)
        ]
        given = {"eval_dataset": None, "compute_per_example_loss": series_loss}
        trainer = build(
            tmp_path / str(number), Series(), data=rows, num_directions=8, microbatch_size=1,
            max_steps=1, remove_unused_columns=False, trainer_settings=given,
        )  # fmt: skip
        trainer.data_collator = together
        trainer.train()
        chosen.append(trainer.step.differences.strategy)
    assert chosen == ["whole_model", "whole_model"]


def test_invented_rows_choose_the_strategy_where_all_rows_have_one_size(tmp_path):
    """Stored features without evaluation rows: passes one after the other took ten times as long."""
    draw = torch.Generator().manual_seed(1)
    rows = [{"series": torch.randn(3, 64, generator=draw), "labels": i % 2} for i in range(32)]
    given = {"eval_dataset": None, "compute_per_example_loss": series_loss}
    trainer = build(
        tmp_path, Series(), data=rows, num_directions=8, max_steps=1,
        remove_unused_columns=False, trainer_settings=given,
    )  # fmt: skip
    trainer.data_collator = together
    trainer.train()
    assert trainer.step.differences.strategy == "stacked"


def candidates(rows: list[Any]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def test_rows_with_longer_answers_stand_beside_others_of_their_kind():
    """The head's product has a shape that follows from the longest answer in the microbatch."""
    rows = [
        {"input_ids": [[5] * 8] * 2, "attention_mask": [[1] * 8] * 2, "answer_lengths": [n, 1]}
        for n in (1, 1, 5, 1, 6, 1)
    ]
    made = PassShapes(Rows(rows, candidates).collate_each, passes_of(3)).microbatches(range(6))
    lengths = [m["answer_lengths"][: m.examples] for m in made]
    longest = [sorted(set(of_rows.max(1).values.tolist())) for of_rows in lengths]
    assert longest == [[1], [1], [5, 6]]


class InnerAutocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


@pytest.mark.parametrize("rows", [1, 8])
def test_autocast_inside_a_model_counts_as_low_precision(tmp_path, rows):
    model = tiny_model()
    model.classifier = InnerAutocast(model.classifier)
    settings = {"method": "dp-sgd", "trainable": "inner", "max_steps": 1}
    trainer = build(tmp_path, model, microbatch_size=rows, **settings)
    refused = pytest.raises(ValueError, match="half precision")
    with nullcontext() if rows == 1 else refused:
        trainer.train()


def test_processes_with_other_rows_are_refused(monkeypatch):
    """Each of W processes takes its share of the drawn numbers: a row under two may count twice."""
    told: list[Any] = []

    def gathered(value: Any) -> list[Any]:
        told.append(value)
        return told

    monkeypatch.setattr(collectives, "active", lambda: True)
    monkeypatch.setattr(collectives, "gather_objects", gathered)
    rows = [dict(row) for row in tiny_data()]
    check_same_rows(rows)
    check_same_rows([dict(row) for row in rows])
    for others in (rows[1:], rows[::-1]):
        with pytest.raises(ValueError, match="differs from rank 0 .* the same rows in the same"):
            check_same_rows(others)
        told.pop()


def mask_where_it_is_given(rows: list[Any]) -> dict[str, Tensor]:
    names = [n for n in ("input_ids", "labels", "attention_mask") if all(n in row for row in rows)]
    return {name: torch.tensor([row[name] for row in rows]) for name in names}


def test_the_first_row_does_not_choose_how_many_run_together(tmp_path):
    """Without a mask it put 16 rows of others in a microbatch, not 8: their sum moved by 4 clips."""
    rows = list(tiny_data())
    odd = {name: cell for name, cell in rows[0].items() if name != "attention_mask"}
    for number, data in enumerate(([odd, *rows], [*rows, odd])):
        folder = tmp_path / str(number)
        everyone = {"expected_batch_size": len(data)}
        trainer = build(folder, data=data, trainer_settings={"eval_dataset": None}, **everyone)
        trainer.data_collator = mask_where_it_is_given
        with pytest.raises(ValueError, match="other tensors than row 0"):
            trainer.train()
