"""Rows longer than a model has positions: refused before training, not when one of them is drawn."""

from __future__ import annotations

from typing import Any

import datasets
from torch import nn

from hf_dpzero.batches.shapes import context_length
from hf_dpzero.objectives.losses import base_model


def positions(model: nn.Module) -> int | None:
    """Tokens that a model with learned positions takes; None for others, which take any number."""
    learned = (
        isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
        for name, module in base_model(model).named_modules()
    )
    return context_length(model) if any(learned) else None


def check_lengths(trainer: Any) -> None:
    """Refuses training rows that the model has no positions for, where they can be told quickly.

    Looked at: the stored `input_ids` of a `datasets.Dataset`; the longest is collated, for a collator
    may cut it. Other data sets are not read through: there such a row stops the run when it is drawn.

    Raises:
      ValueError: says how rows are cut.
    """
    most, longest = positions(trainer.model), _longest(trainer.train_dataset)
    if most is None or longest is None:
        return
    ids = trainer.training_rows().collate_each([longest])[0].get("input_ids")
    if ids is not None and ids.shape[-1] > most:
        raise ValueError(
            f"train_dataset has a row of more tokens than the model's {most} positions, which would "
            "stop the run when it is drawn: cut rows (truncation=True and max_length of the tokenizer; "
            "max_length for rows of text), or leave long ones out."
        )


def _longest(dataset: Any) -> int | None:
    """The row with most stored tokens; None where they are not stored as flat lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(dataset, datasets.Dataset) or "input_ids" not in dataset.column_names:
        return None
    if dataset.format["type"] == "custom" or not len(dataset):  # a transform makes the rows
        return None
    column = dataset.select_columns(["input_ids"]).with_format("arrow")[:]["input_ids"]
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return None
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return int(lengths.argmax())
