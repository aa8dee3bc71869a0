"""Microbatches of a few fixed shapes, so that an example's loss is a function of that example alone.

Kernels round a row differently in batches of another shape. A finite difference divides that rounding by
2 lambda, and over a batch the sum may then move by more than one clipping norm when one example is
removed. In a fixed shape kernels treat every row alike, whatever it stands beside. So each forward pass
of a private zeroth-order run has one of a few shapes: a width that follows from a row's own length, and
a number of rows that is fixed for that width (`pass_sizes`). Rows are collated one by one and widened
with masked columns; a microbatch that is not full is filled up with a constant blank row (`fillers`),
whose losses are dropped. `independence_check.check_fixed_shapes` tries this bit for bit before training,
in the run's precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.objectives.losses import (
    IGNORE_INDEX,
    TOKEN_KEYS,
    Filled,
    base_model,
    last_predictors,
    power_of_two,
    right_padded,
)
from hf_dpzero.training.dealing import deal
from hf_dpzero.training.fillers import blank_like, repeat_last, unmasked
from hf_dpzero.training.pass_sizes import NARROWEST, PassSizes
from hf_dpzero.training.random_state import drawing_from

Row = Mapping[str, Tensor]

_FILL = {
    "labels": IGNORE_INDEX,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "input_values": 0,
    "input_features": 0,
}
_DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask")
_POSITIONS = ("start_positions", "end_positions")
_WITH_FEATURES = ("input_features", "bbox")  # [B, T, ...] where the mask is [B, T]


def context_length(model: nn.Module) -> int | None:
    """Tokens that a model takes, less those of a prompt or prefix adapter; None where nothing says."""
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
    """Tokens that an encoder-decoder's decoder takes; None where nothing says."""
    config: Any = getattr(base_model(model), "config", None)
    config = getattr(config, "decoder", config)
    names = ("max_target_positions", "max_position_embeddings")
    found = (getattr(config, name, None) for name in names)
    return next((most for most in found if isinstance(most, int)), None)


def bucket(width: int, most: int | None, cut: int | None = None, narrowest: int = NARROWEST) -> int:
    """The width of the fixed shape for a row: a power of two, at least `narrowest`, at most `most`.

    It follows from that row's width and from settings; never from the widths of other rows.

    Args:
      width: of the row, as the collator makes it alone.
      most: tokens that the model takes; None for any number.
      cut: length at which rows of text are cut, the last bucket; None for any number.
      narrowest: width of the first bucket.

    Returns:
      At least `width`.

    >>> bucket(5, None), bucket(33, None), bucket(33, 48), bucket(50, 48)
    (8, 64, 48, 50)
    >>> bucket(33, 512, cut=40), bucket(41, 512, cut=40)
    (40, 64)
    """
    wide = max(narrowest, 1 << (width - 1).bit_length())
    if cut is not None and width <= cut:
        wide = min(wide, cut)
    return max(width, wide if most is None else min(wide, most))


def widened(
    batch: Row, side: str, columns: int, pad: int | None = None
) -> dict[str, Tensor] | None:
    """The batch with masked columns at a side; None without an attention mask over what is in it.

    Columns repeat a row's token where there is no pad token; sounds are padded with zeros, and labels of
    tokens (integers) with -100.

    Args:
      batch: from a collator.
      side: "right" or "left"; always the right where labels are positions, which count from the left.
      columns: how many to add.
      pad: the pad token, which some classifiers look for.

    Returns:
      A new batch; None where nothing can be widened.

    >>> ids, mask = torch.tensor([[5, 6]]), torch.tensor([[1, 1]])
    >>> widened({"input_ids": ids, "attention_mask": mask}, "right", 1)["input_ids"]
    tensor([[5, 6, 6]])
    """
    shape = masked_shape(batch)
    if shape is None:
        return None
    if any(name in batch for name in _POSITIONS):
        side = "right"
    along, wide = len(shape) - 1, dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and _is_along(name, value, shape):
            wide[name] = _more(name, value, side, columns, pad, along)
    return wide


def masked_shape(batch: Row) -> torch.Size | None:
    """The shape of the attention mask over a batch's tokens or sounds; None where there is none."""
    mask = batch.get("attention_mask")
    inputs = (batch.get(name) for name in ("input_ids", "input_values", "input_features"))
    first = next((value for value in inputs if value is not None), None)
    if mask is None or first is None or mask.shape[-1] == 0:
        return None
    over = first.shape[: mask.dim()] if first is batch.get("input_features") else first.shape
    return mask.shape if over == mask.shape else None


def _is_along(name: str, value: Tensor, shape: torch.Size) -> bool:
    """Whether a tensor has an entry for each column of the mask; numbers to be predicted have not."""
    if name == "labels" and value.is_floating_point():
        return False
    return value.shape == shape or (name in _WITH_FEATURES and value.shape[: len(shape)] == shape)


def _more(
    name: str, value: Tensor, side: str, columns: int, pad: int | None = None, along: int = 1
) -> Tensor:
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


def kind_of(row: Row) -> tuple[Any, ...]:
    """Names, dtypes and numbers of dimensions of a batch of one, and whether a mask covers it.

    How all rows are run follows from those of row 0, so all must have the same, also in what is no
    tensor and in tensors that are not of one row.
    """
    kinds = ((k, *_kind_of_value(v)) for k, v in row.items())
    return (masked_shape(row) is not None, *sorted(kinds, key=lambda entry: entry[0]))


def _kind_of_value(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        return (type(value).__name__,)
    return value.dtype, value.dim(), value.dim() > 0 and value.shape[0] == 1


@dataclass(frozen=True)
class FixedShapes:
    """Collates rows into microbatches of fixed shapes.

    Guarantee: a row's tensors, and the number of rows in its microbatch, are a function of that row
    alone.

    Attributes:
      collate_each: row numbers -> batches of one.
      slots: rows of a microbatch, b; 1 for every example by itself. With `sizes` the most of any width.
      sizes: rows by width, and the narrowest width; None for `slots` at every width.
      most: tokens that the model takes; None for any number.
      side: of the padding, "right" or "left".
      pad: the pad token, or None.
      collate_stacked: row numbers -> batch, where rows are stacked and nothing else (much faster for
        thousands of stored features); None elsewhere.
      decoder_most: tokens that a decoder takes; None for any number.
      kind: `kind_of` every row; None for any.
      cut: length at which rows of text are cut (`max_length`, a recipe's `max_seq_length`); None for any
        number.
      blanks: fill up with blank rows; else, where a model does not take these, with the last row.
      unmasked_apart: rows without padding stand among themselves. Else a blank is put among as many as
        would fill a microbatch. Public rows decide: it pays where most rows are as wide as their bucket.
    """

    collate_each: Callable[[list[int]], list[Mapping[str, Tensor]]]
    slots: int
    sizes: PassSizes | None = None
    most: int | None = None
    side: str = "right"
    pad: int | None = None
    collate_stacked: Callable[[list[int]], Mapping[str, Tensor]] | None = None
    decoder_most: int | None = None
    kind: tuple[Any, ...] | None = None
    cut: int | None = None
    blanks: bool = True
    unmasked_apart: bool = False

    @property
    def keeps_order(self) -> bool:
        """Whether `microbatches` gives the examples in the order of their indices."""
        return self.slots == 1 or self.collate_stacked is not None

    def slots_of(self, row: Row) -> int:
        """Rows of a microbatch with such a row, which is in its bucket."""
        shape = masked_shape(row)
        if self.sizes is None or shape is None:
            return self.slots
        return min(self.slots, self.sizes.of(shape[-1]))

    def microbatches(self, indices: Sequence[int]) -> list[Filled]:
        """The examples of `indices` in microbatches; examples of one shape stand together.

        Raises:
          ValueError: the collator gives a row no tensors of its own, or not one row, or tensors of
            another kind.
        """
        return self.dealt(indices)[0]

    def dealt(
        self, indices: Sequence[int], share: int = 0, shares: int = 1, entropy: int | None = None
    ) -> tuple[list[Filled], list[list[int]]]:
        """The microbatches of one of several shares; those of all shares are what one would have.

        So the shapes, and the bits of an example's loss, do not follow from the number of processes, and
        dealing leaves no more places unfilled. Where widths vary every share must collate all rows.

        Args:
          indices: of the whole batch.
          share: which, from 0.
          shares: how many.
          entropy: what global generators run on where all rows are collated, or None for fresh one: what
            a collator draws may decide widths, on which the shares must agree.

        Returns:
          (the microbatches, whose `places` are in `indices`; the places of every share).

        Raises:
          ValueError: as `microbatches`.
        """
        stacked, count = self.collate_stacked is not None, len(indices)
        if stacked or self.slots == 1:  # each place's microbatch follows from its number
            starts = range(0, count, self.slots)
            portions: list[Sequence[int]] = [
                range(start, min(start + self.slots, count)) for start in starts
            ]
            plans = [list(portions[each::shares]) for each in range(shares)]
        else:
            with drawing_from(entropy):
                collated = self.collate_each(list(indices)) if count else []
            rows = [self.in_bucket(row) for row in collated]
            portions = self.portioned(rows)
            firsts = [rows[portion[0]] for portion in portions]
            costs = [self.slots_of(r) * sum(t.numel() for t in r.values()) for r in firsts]
            plans = [[portions[i] for i in places] for places in deal(costs, shares)]
        told = [[place for portion in plan for place in portion] for plan in plans]
        if not plans[share]:
            return [], told
        if stacked:
            return list(self._stacked(indices, plans[share])), told
        if self.slots == 1:  # nothing is beside a row: it stays as it is
            alone = self.collate_each([indices[place] for place in told[share]])
            pairs = zip(alone, told[share], strict=True)
            return [Filled(self._of_kind(row), 1, [place]) for row, place in pairs], told
        return [self.filled([rows[i] for i in chosen], chosen) for chosen in plans[share]], told

    def _stacked(
        self, indices: Sequence[int], portions: Sequence[Sequence[int]]
    ) -> Iterator[Filled]:
        assert self.collate_stacked is not None
        batch = self.collate_stacked([indices[i] for portion in portions for i in portion])
        start = 0
        for portion in portions:
            stop = start + len(portion)
            chosen = torch.arange(start, start + self.slots).clamp_(max=stop - 1)
            rows = {name: value[chosen] for name, value in batch.items()}
            if self.blanks and len(portion) < self.slots:
                blank = blank_like({name: value[:1] for name, value in batch.items()})
                for name, value in rows.items():
                    value[len(portion) :] = blank[name]
            yield Filled(rows, len(portion), portion)
            start = stop

    def in_bucket(self, batch: Row, width: int = 0) -> dict[str, Tensor]:
        """A collated row in the fixed width that its own length gives.

        Args:
          batch: one row.
          width: a length to take in place of its own where that is larger.

        Returns:
          A new batch of one.
        """
        wide, ids = dict(self._of_kind(batch)), batch.get("input_ids")
        if (shape := masked_shape(batch)) is not None:
            most = None if ids is None else self.most
            cut = None if ids is None else self.cut
            narrowest = NARROWEST if self.sizes is None else self.sizes.narrowest
            columns = bucket(max(shape[-1], width), most, cut, narrowest) - shape[-1]
            wide = widened(batch, self.side, columns, self.pad) or wide
        for name in _DECODER:
            value = batch.get(name)
            if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
                continue
            if ids is None or value.shape != ids.shape:  # of a decoder
                columns = bucket(value.shape[1], self.decoder_most) - value.shape[1]
                wide[name] = _more(name, value, "right", columns)
        return wide

    def _of_kind(self, row: Row) -> Row:
        if self.kind is not None and kind_of(row) != self.kind:
            raise ValueError(
                "the collator gives rows other tensors than row 0 (a mask for some, say), and how all "
                "rows are run follows from these: give every row the same names and dtypes."
            )
        return row

    def packed(self, rows: Sequence[Row]) -> list[Filled]:
        """Batches of one -> microbatches; rows of one shape keep their order."""
        return [self.filled([rows[i] for i in chosen], chosen) for chosen in self.portioned(rows)]

    def portioned(self, rows: Sequence[Row]) -> list[Sequence[int]]:
        """Places of the rows of each microbatch."""
        groups: dict[Any, list[int]] = {}
        for place, row in enumerate(rows):
            groups.setdefault(self.group_of(row), []).append(place)
        return [chosen for group in groups.values() for chosen in self.portions(group, rows)]

    def group_of(self, row: Row) -> tuple[Any, ...]:
        """Rows with the same may share a microbatch: their shape, and whether they are unmasked."""
        apart = self.unmasked_apart or not self.blanks
        return (*shape_of(row), unmasked(row) if apart else None)

    def may_fill(self, rows: Sequence[Row]) -> bool:
        """Whether rows of one group may fill a microbatch, without a blank among them."""
        if len(rows) == 1 or self.unmasked_apart or not self.blanks:
            return True  # one alone meets no other, whatever its mask
        return not frozenset.intersection(*map(unmasked, rows))

    def portions(self, group: Sequence[int], rows: Sequence[Row]) -> Iterator[Sequence[int]]:
        """Places of one group's rows, a microbatch's at a time."""
        start, slots = 0, self.slots_of(rows[group[0]])
        while start < len(group):
            chosen = group[start : start + slots]
            if len(chosen) == slots and not self.may_fill([rows[i] for i in chosen]):
                chosen = chosen[:-1]
            yield chosen
            start += len(chosen)

    def blank(self, row: Row) -> dict[str, Tensor]:
        """What fills up a microbatch of such rows, where `blanks`."""
        return blank_like(row, self.side, unmasked(row) if self.unmasked_apart else ())

    def filled(self, rows: Sequence[Row], places: Sequence[int] | None = None) -> Filled:
        """Rows of one group, at most as many as a microbatch has, as one."""
        slots = self.slots_of(rows[0])
        blanks = [self.blank(rows[0])] if self.blanks and len(rows) < slots else []
        return Filled(repeat_last([*rows, *blanks], slots), len(rows), places)


def forward_passes(shapes: FixedShapes | None) -> str:
    """How a run evaluates examples, for its report: "fixed shapes", "one example", or "" for neither."""
    if shapes is None:
        return ""
    return "fixed shapes" if shapes.slots > 1 else "one example"


def shape_of(row: Row) -> tuple[Any, ...]:
    """All that the shapes of a forward pass follow from: rows with the same may share a microbatch.

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
    shape = [(name, value.dtype, tuple(value.shape)) for name, value in row.items()]
    return (*shape, *_of_labels(row))


def _of_labels(row: Row) -> Iterator[int]:
    """What the shape of a language model's logits follows from, where they are not all computed."""
    labels, ids = row.get("labels"), row.get("input_ids")
    if labels is not None and ids is not None and labels.shape == ids.shape and labels.dim() == 2:
        aligned = right_padded(row, (*TOKEN_KEYS, "labels"))["labels"]
        yield last_predictors(aligned)
        yield power_of_two(int(aligned[:, 1:].ne(IGNORE_INDEX).sum()), labels.shape[1])
    answers = row.get("answer_lengths")  # of `objectives.prompted.Candidates`
    if answers is not None and ids is not None:
        yield power_of_two(int(answers.max()), ids.shape[-1])
