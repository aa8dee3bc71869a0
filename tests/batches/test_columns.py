"""Rows of typed columns: the tensors that the collator makes of each row, or the collator is asked."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tiny_language_models import word_tokenizer
from tiny_texts import passes_of
from torch import Tensor
from transformers import DataCollatorWithPadding, DefaultDataCollator, default_data_collator

from hf_dpzero.batches.logical_batch import Rows
from hf_dpzero.batches.shapes import PassShapes, kind_of
from hf_dpzero.tasks.classification import Collator

LENGTHS = [3, 9, 8, 16, 7, 1, 24, 15, 9, 8, 23]
DRAWN = [8, 0, 10, 3, 3, 1, 6, 5]


def texts(**columns: Any) -> datasets.Dataset:
    """Texts of lengths from 1 to 24, whose masks hide a token here and there."""
    masks = [[int((i + j) % 5 > 0 or i == 2) for j in range(n)] for i, n in enumerate(LENGTHS)]
    ids = [[2 + (7 * i + j) % 9 for j in range(n)] for i, n in enumerate(LENGTHS)]
    types = [[j % 2 for j in range(n)] for n in LENGTHS]
    made = {"label": [i % 2 for i in range(len(LENGTHS))], "input_ids": ids}
    made |= {"attention_mask": masks, "token_type_ids": types, **columns}
    small = datasets.Features(
        {
            **datasets.Dataset.from_dict(made).features,
            "attention_mask": datasets.Sequence(datasets.Value("int8")),
        }
    )
    return datasets.Dataset.from_dict(made, features=small)


def features(kind: str = "float32", **columns: Any) -> datasets.Dataset:
    vectors = np.random.default_rng(1).normal(size=(11, 5)).tolist()
    made = {
        "features": vectors,
        "labels": [0.5 * i for i in range(11)],
        "flag": [True, False] * 5 + [True],
    }
    kinds = {**datasets.Dataset.from_dict(made).features, "labels": datasets.Value(kind)}
    fixed = datasets.Sequence(datasets.Value(kind), length=5 if kind == "float32" else -1)
    rows = datasets.Dataset.from_dict(
        made, features=datasets.Features({**kinds, "features": fixed})
    )
    return rows.add_column("n", list(range(11)))


def with_padding(side: str = "right", **settings: Any) -> DataCollatorWithPadding:
    return DataCollatorWithPadding(word_tokenizer(side), **settings)


def spread(blocks: Any, count: int) -> list[dict[str, Tensor]]:
    """Blocks of rows as batches of one, by place."""
    rows: list[Any] = [None] * count
    for places, batch in blocks:
        for place, *values in zip(places, *batch.values(), strict=True):
            assert rows[place] is None
            rows[place] = {n: v[None] for n, v in zip(batch, values, strict=True)}
    return rows


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.items(), other.items(), strict=True)
    return all(
        n == m and v.dtype == w.dtype and v.shape == w.shape and torch.equal(v, w)
        for (n, v), (m, w) in pairs
    )


TAKEN: dict[str, tuple[Any, Any]] = {
    "texts": (texts(), with_padding()),
    "padded to a multiple": (texts(), with_padding(pad_to_multiple_of=4)),
    "on the left": (texts(), with_padding("left", pad_to_multiple_of=4)),
    "of a task": (texts(), Collator(word_tokenizer("left"))),
    "tensors": (texts().with_format("torch"), with_padding()),
    "selected": (
        datasets.concatenate_datasets([texts(), texts()]).select(range(19, 3, -1)),
        with_padding(),
    ),
    "features": (features(), default_data_collator),
    "doubles": (features("float64"), DefaultDataCollator()),
    "features of a task": (features("float16"), Collator(None)),  # type: ignore[arg-type]
    "features in several parts": (
        datasets.concatenate_datasets(
            [features().select(range(4)), features().select(range(2, 9))]
        ),
        default_data_collator,
    ),
    "features of a selection of parts": (
        datasets.concatenate_datasets([features(), features()]).select([*range(20, 3, -2), 1, 8]),
        default_data_collator,
    ),
    "features as tensors": (features().with_format("torch"), default_data_collator),
    "some columns": (
        features().with_format(None, columns=["features", "n"]),
        default_data_collator,
    ),
}


@pytest.mark.parametrize("case", TAKEN)
def test_columns_make_the_tensors_that_the_collator_makes_of_each_row(case):
    rows = Rows(*TAKEN[case])
    blocks = rows.collate_blocks(DRAWN)
    assert blocks is not None and len(blocks) < len(DRAWN)
    expected = rows.collate_each(DRAWN)
    assert all(map(same, spread(blocks, len(DRAWN)), expected))
    assert same(rows.collate_rows([0, 0]), rows.collate([rows.dataset[0]] * 2))


@pytest.mark.parametrize("case", TAKEN)
@pytest.mark.parametrize("side", ["right", "left"])
def test_passes_are_those_of_rows_collated_one_by_one(case, side):
    rows = Rows(*TAKEN[case])
    settings = {
        "placement": passes_of(3), "context_length": 24, "padding_side": side, "pad_token_id": 1,
        "row_signature": kind_of(rows.collate_each([0])[0]),
    }  # fmt: skip
    slow = PassShapes(rows.collate_each, **settings)
    fast = PassShapes(None, collate_blocks=rows.collate_blocks, **settings)  # type: ignore[arg-type]
    for share in range(2):
        (made, places), (expected, told) = (s.dealt(DRAWN, share, 2) for s in (fast, slow))
        assert places == told and len(made) == len(expected)
        for one, other in zip(made, expected, strict=True):
            assert same(one, other) and (one.examples, one.places) == (other.examples, other.places)


class OwnPadding(type(word_tokenizer())):  # type: ignore[misc]
    def _pad(self, *given: Any, **settings: Any) -> Any:
        return super()._pad(*given, **settings)


def own_padding() -> Any:
    tokenizer = word_tokenizer()
    tokenizer.__class__ = OwnPadding
    return DataCollatorWithPadding(tokenizer)


def own(rows: list[Any]) -> dict[str, Tensor]:
    return default_data_collator(rows)


class Clamped(Collator):
    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        return super().__call__([{**row, "label": min(row["label"], 0)} for row in rows])


def test_all_else_is_left_to_the_collator():
    whole = [[1] * n for n in LENGTHS]
    asked: dict[str, tuple[Any, Any]] = {
        "a list": (features().to_list(), default_data_collator),
        "a collator of one's own": (features(), own),
        "a collator that inherits": (texts(), Clamped(word_tokenizer("right"))),
        "a tokenizer of one's own": (texts(), own_padding()),
        "a transform": (features().with_transform(lambda rows: rows), default_data_collator),
        "numpy": (features().with_format("numpy"), default_data_collator),
        "padding of all": (texts(), with_padding(padding="max_length", max_length=24)),
        "text": (features().add_column("t", ["a"] * 11), default_data_collator),
        "integers of 64 bits without sign": (
            features().cast_column("n", datasets.Value("uint64")), default_data_collator
        ),
        "two labels": (texts(label_ids=[1] * 11), with_padding()),
        "labels of tokens": (texts(labels=whole).remove_columns("label"), with_padding()),
        "positions": (texts(position_ids=whole), with_padding()),
        "a mask that the tokenizer makes": (texts().remove_columns("attention_mask"), with_padding()),
        "matrices": (features().add_column("m", [[[1, 2]]] * 11), default_data_collator),
    }  # fmt: skip
    for name, (data, collate) in asked.items():
        assert Rows(data, collate).collate_blocks([0, 1]) is None, name
    lengths_differ = features().remove_columns("features").add_column("v", whole)
    missing = features().remove_columns("n").add_column("n", [0, None, *range(9)])
    empty = (
        texts()
        .remove_columns("input_ids")
        .add_column("input_ids", [[5] * n * (n > 1) for n in LENGTHS])
    )
    for data, collate, row in (
        (lengths_differ, default_data_collator, 1),
        (missing, default_data_collator, 1),
        (empty, with_padding(), 5),
    ):
        rows = Rows(data, collate)
        assert rows.collate_blocks([0]) is not None and rows.collate_blocks([0, row]) is None


def test_rows_that_are_read_where_they_lie_are_copies():
    """A model that writes into its inputs does not write into the data set."""
    rows = Rows(features(), default_data_collator)
    blocks = rows.collate_blocks([3])
    assert (
        blocks is not None
        and rows._columns is not None
        and {"features", "n"} <= {*rows._columns.stored}
    )
    blocks[0][1]["features"].zero_()
    again = rows.collate_blocks([3])
    assert again is not None and again[0][1]["features"].abs().min() > 0
