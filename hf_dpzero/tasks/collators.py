"""Encoded prompts -> padded batches; row by row with tensor operations, never token by token.

Every batch has one row for each example. Positions are counted from a row's first attended token, so
they hold whichever side is padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.objectives.losses import IGNORE_INDEX
from hf_dpzero.tasks.task import PAD_TO_MULTIPLE_OF

Rows = Sequence[Mapping[str, Any]]


def _padded(rows: Sequence[Tensor], value: int, side: str, most: int | None = None) -> Tensor:
    """1-D tensors as one `[N, T]`, T the longest rounded up to a multiple of 8, or to `most`.

    >>> _padded([torch.tensor([1, 2]), torch.tensor([3])], 0, "left")[:, -2:]
    tensor([[1, 2],
            [0, 3]])
    """
    longest = max(row.numel() for row in rows)
    length = -(-longest // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF
    length = max(longest, min(length, most or length))
    padded_rows = torch.full((len(rows), length), value, dtype=torch.int64)
    for target, row in zip(padded_rows, rows, strict=True):
        part = slice(None, row.numel()) if side == "right" else slice(length - row.numel(), None)
        target[part] = row
    return padded_rows


def _ids(rows: Rows) -> list[Tensor]:
    return [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]


def _column(rows: Rows, name: str) -> Tensor:
    return torch.as_tensor([int(row[name]) for row in rows], dtype=torch.int64)


@dataclass(frozen=True)
class _Collator:
    """
    Attributes:
      pad_token_id: what fills up a row.
      side: "right" or "left".
      most: tokens that no row exceeds; padding to a multiple of 8 stops there.
    """

    pad_token_id: int
    side: str = "right"
    most: int | None = None

    def _tokens(self, ids: Sequence[Tensor]) -> dict[str, Tensor]:
        """input_ids and attention_mask, `[N, T]` int64."""
        masks = [torch.ones_like(row) for row in ids]
        return {
            "input_ids": _padded(ids, self.pad_token_id, self.side, self.most),
            "attention_mask": _padded(masks, 0, self.side, self.most),
        }


class LabelWordCollator(_Collator):
    """input_ids, attention_mask `[B, T]`, positions, labels `[B]`; see `LabelWords`."""

    columns = ("input_ids", "positions", "labels")

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        one_each = {name: _column(rows, name) for name in ("positions", "labels")}
        return {**self._tokens(_ids(rows)), **one_each}


@dataclass(frozen=True)
class CandidateCollator(_Collator):
    """input_ids, attention_mask `[B, L, T]`, answer_lengths `[B, L]`, labels `[B]`.

    Attributes:
      answers: the tokens of each of the L candidates, put behind the prompt; see `Candidates`.
    """

    answers: tuple[tuple[int, ...], ...] = ()
    columns = ("input_ids", "labels")

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        endings = [torch.tensor(answer, dtype=torch.int64) for answer in self.answers]
        flat = self._tokens([torch.cat([ids, end]) for ids in _ids(rows) for end in endings])
        shape = (len(rows), len(endings), -1)
        lengths = torch.tensor([len(answer) for answer in self.answers])
        return {
            **{name: value.reshape(shape) for name, value in flat.items()},
            "answer_lengths": lengths.expand(len(rows), -1).contiguous(),
            "labels": _column(rows, "labels"),
        }


class AnswerCollator(_Collator):
    """input_ids, attention_mask, labels `[B, T]`, references `[B]`; see `Answers`."""

    columns = ("input_ids", "prompt_length", "references")

    def __call__(self, rows: Rows) -> dict[str, Tensor]:
        ids = _ids(rows)
        labels = [tokens.clone() for tokens in ids]
        for row, tokens in zip(rows, labels, strict=True):
            tokens[: int(row["prompt_length"])] = IGNORE_INDEX
        return {
            **self._tokens(ids),
            "labels": _padded(labels, IGNORE_INDEX, self.side, self.most),
            "references": _column(rows, "references"),
        }
