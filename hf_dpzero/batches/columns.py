"""Rows of typed columns as the tensors that known collators make of each of them, many rows at once.

Of a row alone transformers' default collator makes the numbers in its columns; those that pad texts
fill them up to a multiple of some width. Of rows in an Arrow table the same tensors are made from its
buffers, without Python objects for rows or numbers. Row 0 shows once a run that they are the same:
types, which decide the rest, are those of the columns. All else, a missing value say, is left to the
collator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Block = tuple[Sequence[int], Mapping[str, Tensor]]
"""Places in a list of rows, and their tensors, each as its row has it alone."""

_COLLATORS = ("default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding")
_PLAIN = {"transformers.tokenization_utils_base"}
_LABELS = ("label", "label_ids", "labels")
_TEXTS = {"input_ids", "attention_mask", "token_type_ids"}
_APART = {"position_ids", "start_positions", "end_positions", "answer_lengths"}
"""Columns from which a row's shape follows in ways of their own (`shapes`), like `decoder_...`."""

_TYPES = {
    "bool": np.bool_,
    **dict.fromkeys(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"], np.int64),
    **dict.fromkeys(("halffloat", "float", "double"), np.float32),
}
"""Arrow's name of a type -> what torch makes of Python's numbers of that type."""


class Stored:
    """A column of numbers, or of lists of one length, whose rows are copied once from where they lie.

    Args:
      parts: views of it, [rows, width] or [rows], one after the other.
      order: rows of a selection in those of the parts; None for all of them.
      dtype: as torch makes of them.
    """

    def __init__(self, parts: list[np.ndarray], order: Any, dtype: type) -> None:
        self.parts, self.order, self.dtype = parts, order, dtype
        self.ends = np.cumsum([len(part) for part in parts])

    def rows(self, indices: Sequence[int]) -> np.ndarray:
        """Returns the rows of the selection that have these numbers, one after the other, a copy."""
        numbers = np.asarray(indices, dtype=np.int64)
        numbers = numbers if self.order is None else self.order[numbers].astype(np.int64)
        made = np.empty((len(numbers), *self.parts[0].shape[1:]), self.dtype)
        part = np.searchsorted(self.ends, numbers, side="right")
        for i in np.unique(part):
            own = np.flatnonzero(part == i)
            made[own] = self.parts[i][numbers[own] - self.ends[i]]  # from the end: below 0
        return made


def _stored(dataset: Any, names: set[str]) -> dict[str, Stored]:
    """Columns without missing values whose numbers need no conversion to be seen."""
    selection: Any = getattr(dataset, "_indices", None)
    order = None if selection is None else selection.column(0).to_numpy()
    found = {}
    for name in names:
        chunks = [chunk for chunk in dataset.data.column(name).chunks if len(chunk)]
        width = getattr(chunks[0].type, "list_size", None)
        flat = [chunk if width is None else chunk.flatten() for chunk in chunks]
        dtype = _TYPES.get(str(flat[0].type))
        if dtype in (None, np.bool_) or any(
            c.null_count + f.null_count for c, f in zip(chunks, flat, strict=True)
        ):
            continue
        parts = [part.to_numpy() for part in flat]
        found[name] = Stored(
            parts if width is None else [p.reshape(-1, width) for p in parts], order, dtype
        )
    return found


@dataclass(frozen=True)
class Columns:
    """What a collator makes of typed columns.

    Attributes:
      table: row numbers -> Arrow table of these rows.
      sources: name of a tensor -> its column, in the collator's order.
      texts: whether rows have widths of their own, multiples of `multiple`.
      fills: name -> what texts are padded with.
      left: whether on that side.
      stored: column -> its rows, where they have one length and need no conversion to be seen.
    """

    table: Callable[[list[int]], Any]
    sources: Mapping[str, str]
    texts: bool
    multiple: int
    fills: Mapping[str, int]
    left: bool
    stored: Mapping[str, Stored]

    def blocks(self, indices: list[int]) -> list[Block] | None:
        """Returns the rows in blocks of one width each; None where the collator has to be asked."""
        values, lengths, stored = {}, {}, self.stored
        table: Any = None if stored.keys() >= {*self.sources.values()} else self.table(indices)
        for name, source in self.sources.items():
            if source in stored:
                values[name] = stored[source].rows(indices)
            elif (found := _numbers(table.column(source))) is None:
                return None
            else:
                values[name], of_rows = found
                if of_rows is not None:
                    lengths[name] = of_rows
        for of_rows in lengths.values():
            expected = lengths["input_ids"] if self.texts else of_rows[:1]
            if not (of_rows.all() and (of_rows == expected).all()):
                return None
        if self.texts:
            return list(self._texts(values, lengths))
        rows = {n: v.reshape(len(indices), -1) if n in lengths else v for n, v in values.items()}
        return [
            (range(len(indices)), {name: torch.from_numpy(value) for name, value in rows.items()})
        ]

    def _texts(
        self, values: Mapping[str, np.ndarray], lengths: Mapping[str, np.ndarray]
    ) -> Iterator[Block]:
        tokens = lengths["input_ids"]
        widths, starts = -(-tokens // self.multiple) * self.multiple, tokens.cumsum() - tokens
        for width in np.unique(widths):
            places = np.flatnonzero(widths == width)
            own, columns = tokens[places, None], np.arange(width)
            token = columns - (width - own) if self.left else columns
            padding = (token < 0) | (token >= own)
            source, batch = np.where(padding, 0, starts[places, None] + token), {}
            for name, value in values.items():
                rows = value[source if name in lengths else places]
                if name in lengths and padding.any():
                    rows[padding] = self.fills[name]
                batch[name] = torch.from_numpy(rows)
            yield places.tolist(), batch


def columns_of(dataset: Any, collate: Any) -> Columns | None:
    """Returns how rows are collated from their columns; None where data set or collator are others.

    Args:
      dataset: a `datasets.Dataset` that makes no rows on access.
      collate: of transformers, or one that says `collates_columns`.
    """
    form, padding = getattr(dataset, "format", None), _padding(collate)
    if type(dataset).__module__ != "datasets.arrow_dataset" or form is None or padding is None:
        return None
    if form["type"] not in (None, "torch") or form["format_kwargs"]:
        return None
    first, names = collate([dataset[0]]), set(form["columns"])
    labels = [name for name in _LABELS if name in names]
    sources = {name: labels[0] if name == "labels" and labels else name for name in first}
    lists = {name for name, v in first.items() if isinstance(v, Tensor) and v.dim() > 1}
    apart = any(name in _APART or name.startswith("decoder_") for name in first)
    if apart or len(labels) > 1 or "labels" in lists or set(sources.values()) != names:
        return None
    texts = "attention_mask" in first
    if texts and not {"input_ids", "attention_mask"} <= lists <= _TEXTS:
        return None
    table = dataset.with_format("arrow", columns=form["columns"]).__getitem__
    made = Columns(table, sources, texts, *padding, {} if texts else _stored(dataset, names))
    blocks = made.blocks([0])
    alone = blocks[0][1] if blocks else {}
    same = alone.keys() == first.keys() and all(
        isinstance(value, Tensor) and alone[name].dtype == value.dtype and alone[name].equal(value)
        for name, value in first.items()
    )
    return made if same else None


def _padding(collate: Any) -> tuple[int, dict[str, int], bool] | None:
    """Returns the multiple, fills and side by which a collator pads a row alone; None if not known."""
    kind = collate if inspect.isfunction(collate) else type(collate)
    known = kind.__module__ == "transformers.data.data_collator" and kind.__name__ in _COLLATORS
    # of the class itself: one that inherits may do something else
    if not (known or vars(kind).get("collates_columns", False)):
        return None
    tokenizer, multiple = (
        getattr(collate, "tokenizer", None),
        getattr(collate, "pad_to_multiple_of", None),
    )
    if tokenizer is None:
        return 1, {}, False
    methods = {getattr(type(tokenizer), name).__module__ for name in ("pad", "_pad")}
    if methods != _PLAIN or getattr(collate, "padding", True) not in (True, "longest"):
        return None
    fills = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
    if fills["input_ids"] is None:
        return None
    return multiple or 1, {"attention_mask": 0, **fills}, tokenizer.padding_side == "left"


def _numbers(column: Any) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Returns a column's numbers, and how many each row has where it has lists; None of other types."""
    array, lengths = column.combine_chunks(), None
    if array.null_count:
        return None
    if type(array).__name__ in ("ListArray", "LargeListArray"):
        array, lengths = array.flatten(), np.diff(array.offsets)
    elif type(array).__name__ == "FixedSizeListArray":
        array, lengths = array.flatten(), np.full(len(array), array.type.list_size)
    dtype = _TYPES.get(str(array.type))
    if dtype is None or array.null_count:
        return None
    return array.to_numpy(zero_copy_only=False).astype(dtype), lengths
