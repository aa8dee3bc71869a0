"""What forward passes leave beside the parameters: buffers, extra state, settings; and padding."""

from __future__ import annotations

import itertools
from typing import Any

import datasets
import pytest
import torch
from tiny_runs import build, tiny_model
from tiny_texts import pad
from torch import Tensor, nn
from transformers import default_data_collator

from hf_dpzero.batches.logical_batch import Rows


class Initialised(nn.Module):
    """A buffer that takes its value from the first row that it sees, and is constant then."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(16))
        self.seen = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.seen:
            self.mean.copy_(x.detach()[0])
            self.seen = True
        return self.inner(x - self.mean)


class Counting(nn.Module):
    """Extra state that adds up what comes by."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.total = inner, torch.zeros(16)

    def get_extra_state(self) -> Tensor:
        return self.total

    def set_extra_state(self, state: Tensor) -> None:
        self.total = state

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.detach().sum(0)
        return self.inner(x)


class Noting(nn.Module):
    """A setting that keeps the largest activation."""

    def __init__(self, inner: nn.Module, config: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, config

    def forward(self, x: Tensor) -> Tensor:
        largest = max(getattr(self.config, "largest", 0.0), float(x.detach().max()))
        self.config.largest = largest
        return self.inner(x)


@pytest.mark.parametrize(
    ("around", "name"),
    [
        (lambda m: Initialised(m.classifier), "classifier.mean"),
        (lambda m: Counting(m.classifier), "classifier._extra_state"),
        (lambda m: Noting(m.classifier, m.config), "config.largest"),
    ],
)
def test_what_the_trial_before_training_leaves_in_the_model_is_refused(tmp_path, around, name):
    model = tiny_model()
    model.classifier = around(model)
    trainer = build(tmp_path, model, trainable="inner")
    with pytest.raises(ValueError, match=f"changed {name}"):
        trainer.train()
    assert not (tmp_path / "trajectory.ledger").exists()


def test_a_setting_that_changes_late_is_not_saved(tmp_path):
    model = tiny_model()
    passes = itertools.count()

    class Late(Noting):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if next(passes) >= 60 else self.inner(x)

    model.classifier = Late(model.classifier, model.config)
    trainer = build(tmp_path, model, trainable="inner", max_steps=40, save_strategy="no")
    with pytest.raises(ValueError, match=r"changed config\.largest"):
        trainer.train()


def padded_together(rows: dict[str, Any]) -> dict[str, Tensor]:
    """As a tokenizer with padding=True in `with_transform`."""
    return pad(
        [
            {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": label}
            for ids, label in zip(rows["ids"], rows["labels"], strict=True)
        ]
    )


def test_a_transform_of_the_batch_does_not_see_the_batch():
    ids = [[5] * 5] * 7 + [[6] * 60]
    raw = datasets.Dataset.from_dict({"ids": ids, "labels": [0] * 8})
    rows = Rows(raw.with_transform(padded_together), default_data_collator)
    widths = [batch["input_ids"].shape[1] for batch in rows.collate_each(list(range(8)))]
    assert widths == [5] * 7 + [60]
    with pytest.raises(RuntimeError, match="equal size"):
        rows.collate_rows([0, 7])
