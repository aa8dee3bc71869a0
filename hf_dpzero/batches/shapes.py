"""Microbatches of fixed shapes: an example's loss follows from that example and its place alone.

Kernels round a row differently in batches of another shape. A finite difference divides that rounding by
2 lambda, and over a batch the sum may then move by more than one clipping norm when one example is
removed. So each pass of a private run has a width that follows from a row's own length, and a number of
rows that follows from its place (`placement`, with the proof why that is enough). Rows are collated one
by one and widened with masked columns. A pass that is not full is filled up with one constant blank row
for each shape, whose losses are dropped. `smoke_test` tries this on invented rows before a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.batches.columns import Block
from hf_dpzero.batches.placement import Placement, bucket
from hf_dpzero.estimators.random_state import drawing_from
from hf_dpzero.objectives.losses import (
    IGNORE_INDEX,
    TOKEN_KEYS,
    PaddedMicrobatch,
    base_model,
    batch_size,
    last_predictors,
    power_of_two,
    right_padded,
)

Row = Mapping[str, Tensor]
Placed = tuple[Row, int]
"""A batch, and which of its rows."""
Signature = tuple[Any, ...]
"""What a row has and not what it holds: names, dtypes, numbers of dimensions, whether it is masked."""

_FILL = {
    "labels": IGNORE_INDEX,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "attention_mask_pair": 0,
    "input_values": 0,
    "input_features": 0,
}
_DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask")
_POSITIONS = ("start_positions", "end_positions")
_WITH_FEATURES = ("input_features", "bbox")  # [B, T, ...] where the mask is [B, T]
_MASKS = ("attention_mask", "decoder_attention_mask")
_PLACES = "position_ids"


def context_length(model: nn.Module) -> int | None:
    """Returns the tokens a model takes, less those of a prompt adapter; None where nothing says."""
    config: Any = getattr(base_model(model), "config", None)
    positions = getattr(config, "encoder", config)
    most = getattr(positions, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    if positions.model_type in ("roberta", "xlm-roberta", "camembert"):
        most -= positions.pad_token_id + 1  # the first ones are spent on padding
    adapter = getattr(model, "active_peft_config", None)
    return most - (getattr(adapter, "num_virtual_tokens", None) or 0)


def decoder_length(model: nn.Module) -> int | None:
    """Returns the tokens that an encoder-decoder's decoder takes; None where nothing says."""
    config: Any = getattr(base_model(model), "config", None)
    config = getattr(config, "decoder", config)
    names = ("max_target_positions", "max_position_embeddings")
    found = (getattr(config, name, None) for name in names)
    return next((most for most in found if isinstance(most, int)), None)


def widened(batch: Row, side: str, columns: int, pad: int | None = None) -> dict[str, Tensor]:
    """Adds masked columns at a side; none without an attention mask over what is in the batch.

    Columns repeat a row's token where there is no pad token; sounds are padded with zeros, and labels of
    tokens (integers) with -100.

    Args:
      batch: from a collator.
      side: "right" or "left"; always the right where labels are positions, which count from the left.
      columns: how many to add.
      pad: the pad token, which some classifiers look for.

    Returns:
      A new batch.

    >>> ids, mask = torch.tensor([[5, 6]]), torch.tensor([[1, 1]])
    >>> widened({"input_ids": ids, "attention_mask": mask}, "right", 1)["input_ids"]
    tensor([[5, 6, 6]])
    """
    shape, wide = masked_shape(batch), dict(batch)
    if shape is None:
        return wide
    if any(name in batch for name in _POSITIONS):
        side = "right"
    along = len(shape) - 1
    for name, value in batch.items():
        if isinstance(value, Tensor) and is_along(name, value, shape):
            wide[name] = _more(name, value, side, columns, pad, along)
    return wide


def masked_shape(batch: Row) -> torch.Size | None:
    """Returns the shape of the attention mask over tokens or sounds; None where there is none."""
    mask = batch.get("attention_mask")
    inputs = (batch.get(name) for name in ("input_ids", "input_values", "input_features"))
    first = next((value for value in inputs if value is not None), None)
    if mask is None or first is None or mask.shape[-1] == 0:
        return None
    over = first.shape[: mask.dim()] if first is batch.get("input_features") else first.shape
    return mask.shape if over == mask.shape else None


def is_along(name: str, value: Tensor, shape: torch.Size) -> bool:
    """Whether a tensor has an entry for each column of the mask; numbers to be predicted have not."""
    if name == "labels" and value.is_floating_point():
        return False
    return value.shape == shape or (name in _WITH_FEATURES and value.shape[: len(shape)] == shape)


def _more(
    name: str, value: Tensor, side: str, columns: int, pad: int | None = None, along: int = 1
) -> Tensor:
    # The row's own edge: a token that the vocabulary has, whatever the model; it is masked.
    edge = value.narrow(along, value.shape[along] - 1 if side == "right" else 0, 1)
    more = edge.expand(*value.shape[:along], columns, *value.shape[along + 1 :])
    fill = pad if name == "input_ids" else _FILL.get(name)
    if fill is not None:
        more = torch.full_like(more, fill)
    return torch.cat([value, more] if side == "right" else [more, value], dim=along)


def is_unmasked_sound(row: Row) -> bool:
    """Whether a row is a waveform `[1, samples]` that nothing masks: it cannot be widened."""
    values = row.get("input_values")
    return isinstance(values, Tensor) and values.dim() == 2 and masked_shape(row) is None


def kind_of(row: Row) -> Signature:
    """Returns names, dtypes and numbers of dimensions of a batch of one, and whether a mask covers it.

    How all rows are run follows from those of row 0, so all must have the same, also in what is no
    tensor and in tensors that are not of one row.
    """
    kinds: list[Signature] = []
    for name, value in sorted(row.items()):
        if isinstance(value, Tensor):
            of_one = value.dim() > 0 and value.shape[0] == 1
            kinds.append((name, value.dtype, value.dim(), of_one))
        else:
            kinds.append((name, type(value).__name__))
    return (masked_shape(row) is not None, *kinds)


def sizes_of(row: Row) -> dict[str, torch.Size]:
    """Returns the sizes of a row's tensors."""
    return {name: value.shape for name, value in row.items() if isinstance(value, Tensor)}


def unmasked(row: Row) -> frozenset[str]:
    """Returns the masks of a batch of one that mask nothing, and position_ids that start but once.

    transformers leaves out a mask that is all ones, and so takes another kernel. Without a mask it reads
    position_ids that start again as a mask of packed texts, and computes none where no row has such.

    >>> unmasked({"attention_mask": torch.tensor([[1, 1]])})
    frozenset({'attention_mask'})
    """
    return unmasked_each(row)[0]


def unmasked_each(batch: Row) -> list[frozenset[str]]:
    """Returns `unmasked` of each row of a batch."""
    found = {name: batch[name].ne(0) for name in _MASKS if batch.get(name) is not None}
    if (positions := batch.get(_PLACES)) is not None:
        found[_PLACES] = positions.diff(dim=-1).eq(1)
    whole = {name: true[:, None].flatten(1).all(1).tolist() for name, true in found.items()}
    rows = range(batch_size(batch))
    if not whole:
        return [frozenset()] * len(rows)
    return [frozenset(name for name, of_rows in whole.items() if of_rows[i]) for i in rows]


def blank_like(row: Row, side: str = "right") -> dict[str, Tensor]:
    """Makes the blank row of a shape: zeros, labels of tokens -100, one column attended.

    It attends to all columns where the row does: then all rows of its shape do.

    Args:
      row: a batch of one; its names, shapes, dtypes and `unmasked` are read, no other value.
      side: of the padding.

    Returns:
      A batch of one, the same for every row of that shape.

    >>> blank_like({"labels": torch.tensor([1]), "attention_mask": torch.tensor([[1, 0]])})
    {'labels': tensor([0]), 'attention_mask': tensor([[1, 0]])}
    """
    blank, whole = {name: torch.zeros_like(value) for name, value in row.items()}, unmasked(row)
    labels = blank.get("labels")
    if labels is not None and labels.dim() > 1 and not labels.is_floating_point():
        labels.fill_(IGNORE_INDEX)
    if _PLACES in whole:
        blank[_PLACES] += torch.arange(blank[_PLACES].shape[-1])
    for name in _MASKS:
        if name in whole:
            blank[name].fill_(1)
        elif (mask := blank.get(name)) is not None and mask.numel():
            mask[..., -1 if side == "left" and name == "attention_mask" else 0] = 1
    return blank


@dataclass(frozen=True)
class PassShapes:
    """Collates rows into the passes that their places belong to.

    Guarantee: a row's tensors follow from that row alone; its pass, the number of rows in it and the
    process that computes it follow from its shape and its place.

    Attributes:
      collate_each: row numbers -> batches of one.
      placement: width and place -> pass; one row a pass where `placement.largest` is 1.
      context_length: tokens that the model takes; None for any number.
      padding_side: "right" or "left".
      pad_token_id: None where there is none.
      collate_blocks: row numbers -> the same rows in blocks of one shape, where these are made faster.
      decoder_length: tokens that a decoder takes; None for any number.
      row_signature: `kind_of` every row; None for any.
      row_sizes: of row 0's tensors, which every row then has too; None for any.
      max_length: at which rows of text are cut (a recipe's `max_seq_length`); None for any number.
    """

    collate_each: Callable[[list[int]], list[Mapping[str, Tensor]]]
    placement: Placement
    context_length: int | None = None
    padding_side: str = "right"
    pad_token_id: int | None = None
    collate_blocks: Callable[[list[int]], list[Block] | None] | None = None
    decoder_length: int | None = None
    row_signature: Signature | None = None
    row_sizes: Mapping[str, torch.Size] | None = None
    max_length: int | None = None

    @property
    def one_by_one(self) -> bool:
        """Whether every example is evaluated by itself."""
        return self.placement.largest == 1

    def microbatches(self, indices: Sequence[int]) -> list[PaddedMicrobatch]:
        """Puts examples into passes, each taking the next place of its shape in the order given.

        Raises:
          ValueError: the collator gives a row no tensors of its own, or not one row, or tensors of
            another kind.
        """
        return self.dealt(indices)[0]

    def dealt(
        self, indices: Sequence[int], share: int = 0, shares: int = 1, entropy: int | None = None
    ) -> tuple[list[PaddedMicrobatch], list[list[int]]]:
        """Makes the passes of one of several shares; those of all shares are what one would have.

        Where widths vary every share must collate all rows.

        Args:
          indices: of the whole batch, in the secret order of the step (`sampling.place_order`).
          share: which, from 0.
          shares: how many.
          entropy: what global generators run on where all rows are collated, or None for fresh one: what
            a collator draws may decide widths, on which the shares must agree.

        Returns:
          (the passes, whose `places` are in `indices`; the places of every share).

        Raises:
          ValueError: as `microbatches`.
        """
        rows: dict[int, Placed] = {}
        groups: dict[Signature, list[int]] = {}  # places of each shape, in the order given
        if self.one_by_one:
            groups[0, ()] = list(range(len(indices)))
        elif len(indices):
            with drawing_from(
                entropy
            ):  # every process collates all rows, and needs the same widths
                rows, groups = self._in_buckets(list(indices))
        plans: list[list[tuple[int, Sequence[int]]]] = [[] for _ in range(shares)]
        for (width, _), group in groups.items():
            for number, part in enumerate(self.placement.filled(width, len(group))):
                owner = self.placement.process_of(width, number, shares)
                chosen = [group[place] for place in part]
                plans[owner].append((self.placement.rows_of(width, number), chosen))
        places = [[place for _, chosen in plan for place in chosen] for plan in plans]
        if not plans[share]:
            return [], places
        if self.one_by_one:  # nothing is beside a row: it stays as it is
            singles = self.collate_each([indices[place] for place in places[share]])
            pairs = zip(singles, places[share], strict=True)
            return [
                PaddedMicrobatch(self._of_kind(row), 1, [place]) for row, place in pairs
            ], places
        made = [self.filled(joined([rows[i] for i in c]), slots, c) for slots, c in plans[share]]
        return made, places

    def _in_buckets(
        self, indices: list[int]
    ) -> tuple[dict[int, Placed], dict[Signature, list[int]]]:
        """The rows, widened, by place; the places of each width and shape, both in order."""
        rows, groups, blocks = dict[int, Placed](), dict[Signature, list[int]](), None
        if self.collate_blocks is not None:
            blocks = self.collate_blocks(indices)
        for places, block in blocks or (
            ([i], row) for i, row in enumerate(self.collate_each(indices))
        ):
            several, wide = len(places) > 1, self.in_bucket(block)
            self._of_kind(one_of(block) if several else block)
            shape, width = shape_of(one_of(wide) if several else wide), width_of(wide)
            rows.update((place, (wide, number)) for number, place in enumerate(places))
            wholes = unmasked_each(wide)
            for whole in set(wholes):
                alike = [p for p, w in zip(places, wholes, strict=True) if w == whole]
                groups.setdefault((width, (*shape, whole)), []).extend(alike)
        ordered = sorted((sorted(places), key) for key, places in groups.items())
        return rows, {key: places for places, key in ordered}

    def in_bucket(self, batch: Row) -> dict[str, Tensor]:
        """Widens collated rows of one length to what that gives; a new batch."""
        wide, ids = dict(batch), batch.get("input_ids")
        if (shape := masked_shape(batch)) is not None:
            most, cut = (self.context_length, self.max_length) if ids is not None else (None, None)
            columns = bucket(shape[-1], most, cut, self.placement.step) - shape[-1]
            wide = widened(batch, self.padding_side, columns, self.pad_token_id)
        for name in _DECODER:
            value = batch.get(name)
            if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
                continue
            if ids is None or value.shape != ids.shape:  # of a decoder
                # a power of two, at least 8: targets are few, and of any length
                width = value.shape[1]
                doubled = max(8, 1 << max(width - 1, 0).bit_length())
                columns = max(width, min(doubled, self.decoder_length or doubled)) - width
                wide[name] = _more(name, value, "right", columns)
        return wide

    def _of_kind(self, row: Row) -> Row:
        if self.row_signature is not None and kind_of(row) != self.row_signature:
            raise ValueError(
                "the collator gives rows other tensors than row 0 (a mask for some, say), and how all "
                "rows are run follows from these: give every row the same names and dtypes."
            )
        beside = self.row_sizes is not None and not self.one_by_one
        if beside and self.row_sizes != sizes_of(row):
            raise ValueError(
                "rows without an attention_mask have other sizes than row 0, by which passes of several "
                "rows were tried: give an eval_dataset, whose sizes are public, or microbatch_size=1."
            )
        return row

    def filled(
        self, rows: Row, slots: int, places: Sequence[int] | None = None
    ) -> PaddedMicrobatch:
        """Makes rows of one shape, at most `slots`, one pass of so many; blanks take the rest."""
        count = batch_size(rows)
        if slots > count:
            blank = blank_like(one_of(rows), self.padding_side).items()
            rest = {name: value.expand(slots - count, *value.shape[1:]) for name, value in blank}
            rows = stacked([rows, rest])
        return PaddedMicrobatch(rows, count, places)


def stacked(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Joins batches of one of one shape."""
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def joined(rows: Sequence[Placed]) -> Row:
    """Joins rows of batches of one shape: one copy a tensor, not one a row."""
    blocks = {id(block): block for block, _ in rows}
    if len(blocks) == len(rows):
        return stacked([block if batch_size(block) == 1 else one_of(block, i) for block, i in rows])
    starts, begin = dict[int, int](), 0
    for key, block in blocks.items():
        starts[key], begin = begin, begin + batch_size(block)
    index = torch.tensor([starts[id(block)] + i for block, i in rows])
    whole = stacked(list(blocks.values())) if len(blocks) > 1 else next(iter(blocks.values()))
    if index.equal(torch.arange(batch_size(whole))):
        return whole
    return {name: value[index] for name, value in whole.items()}


def one_of(batch: Row, number: int = 0) -> Row:
    """Returns one row of a batch as a batch of one: views."""
    return {name: value[number : number + 1] for name, value in batch.items()}


def width_of(row: Row) -> int:
    """Returns the columns of a row's mask; 0 where there is none."""
    shape = masked_shape(row)
    return 0 if shape is None else shape[-1]


def forward_passes(shapes: PassShapes | None) -> str:
    """Says how a run evaluates examples: "fixed shapes", "one example", or "" for neither."""
    if shapes is None:
        return ""
    return "one example" if shapes.one_by_one else "fixed shapes"


def shape_of(row: Row) -> tuple[Any, ...]:
    """Returns all that the shapes of a forward pass follow from: rows with the same may share one.

    Names, dtypes and shapes of a batch of one, and where its labels are.

    Raises:
      ValueError: something in it is no tensor of one row.
    """
    for name, value in row.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != 1:
            kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"the collator makes {name!r} of one row a {kind}, not a tensor [1, ...]: rows cannot "
                "be put into batches of a fixed shape. Set microbatch_size=1."
            )
    # What the shape of a language model's logits follows from, where they are not all computed.
    labels, ids, counts = row.get("labels"), row.get("input_ids"), list[int]()
    if labels is not None and ids is not None and labels.shape == ids.shape and labels.dim() == 2:
        aligned = right_padded(row, (*TOKEN_KEYS, "labels"))["labels"]
        predicted = int(aligned[:, 1:].ne(IGNORE_INDEX).sum())
        counts = [last_predictors(aligned), power_of_two(predicted, labels.shape[1])]
    answers = row.get("answer_lengths")  # of `objectives.prompted.Candidates`
    if answers is not None and ids is not None:
        counts.append(power_of_two(int(answers.max()), ids.shape[-1]))
    return (*((name, value.dtype, tuple(value.shape)) for name, value in row.items()), *counts)
