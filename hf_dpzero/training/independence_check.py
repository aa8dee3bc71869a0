"""Checks before training that each example's loss is a function of that example alone.

A few long and a few short examples are evaluated one by one, together, together with more masked
padding, and one by one again in reverse order. Losses that differ by more than rounding depend on the
other examples, on the width of the batch, or on what the model has seen before; clipping a loss would
then not bound one example's influence. The losses are discarded.

What happens only at other lengths is not seen here; `check_widths` refuses the known cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from hf_dpzero.objectives.losses import base_model
from hf_dpzero.training.fillers import unmasked
from hf_dpzero.training.fixed_shapes import FixedShapes, masked_shape, widened

Batch = Mapping[str, Tensor]


class CoupledLosses(ValueError):
    """An example's loss depends on other examples by more than rounding."""


class Losses(Protocol):
    """A batch's per-example losses, float32 [B] on the CPU."""

    def __call__(self, batch: Batch, seed: int = 0) -> Tensor: ...


SAMPLE, TRIED, SHAPES, CROWDS, TURNS = 64, 4, 4, 3, 4


def check_independence(
    collate: Callable[[list[int]], Batch],
    count: int,
    losses: Losses,
    widths: bool = True,
    pad: int | None = None,
    one_by_one: bool = False,
    coarse: bool = False,
    mixed: bool = True,
) -> None:
    """Refuses a loss that depends on the other examples of its batch, or on those before it.

    Args:
      collate: row numbers -> batch.
      count: number of rows.
      losses: batch -> per-example losses, float32 [B] on the CPU; in eval mode, without gradients, the
        global generators seeded alike for equal `seed`.
      widths: whether a batch may be wider than a row of it. Not where rows run one by one.
      pad: the pad token, or None.
      one_by_one: whether the run evaluates every example by itself. Then sounds and pictures of several
        shapes are not tried together: many of their models do not ignore padding, and none is made.
      coarse: whether something computes in low precision, whose rounding depends on the batch by
        more than a tenth of a percent: then a twentieth is allowed.
      mixed: whether rows of several lengths may be in one batch. Not where the model changes with the
        width (`longrope`) and the run's fixed shapes keep widths apart.

    Raises:
      ValueError: some example's losses differ by more than is allowed.
    """
    rows = long_and_short(collate, count)
    single = [collate([row]) for row in rows]
    alone = torch.cat([losses(batch) for batch in single])
    later = torch.cat([losses(batch) for batch in reversed(single)]).flip(0)
    if not torch.equal(
        later.nan_to_num(), alone.nan_to_num()
    ):  # the same passes: not even rounding
        _refuse("before and after other examples were seen")
    if not _equal(single[0], collate([rows[0]])) or not torch.equal(
        losses(single[0], seed=1).nan_to_num(), losses(single[0]).nan_to_num()
    ):
        return  # the collator or the model draws random numbers: `check_fixed_shapes` tries these
    if one_by_one and "input_ids" not in single[0] and not _of_one_shape(single):
        return
    if not mixed:
        return
    together = losses(collate(rows))
    _compare(together, alone, "in a batch of several and in a batch of one", coarse)
    wider = _widened_losses(collate(rows), losses, pad) if widths else []
    if wider and not any(_agree(of_side, together, coarse) for of_side in wider):
        _compare(wider[0], together, "in a batch and in the same with more masked padding", coarse)


def check_fixed_shapes(
    shapes: FixedShapes,
    count: int,
    losses: Losses,
    coarse: bool = False,
    alone: Callable[[Batch], Tensor] | None = None,
    traced: Losses | None = None,
) -> bool:
    """Tries whether an example's loss depends on its slot in a microbatch, or on its neighbours.

    For one row of each of the most common shapes among up to 64 rows: its losses beside copies of
    itself, beside blanks, beside other rows (shorter ones widened) in the first, the middle and the last
    slot, and beside copies of each of a few others, which fill up whatever has a fixed capacity. Then
    all rows of that shape are turned through the slots: two slots may round most rows alike. So are rows
    in a shape of every other number of slots that the run may have. Rows are collated once, and
    generators seeded alike, so that random collators and models are tried too.

    Args:
      shapes: of the run's own microbatches, with more than one slot.
      count: number of rows.
      losses: as in `check_independence`.
      coarse: as in `check_independence`.
      alone: a batch of one -> its loss [1], where compiled code is for fixed shapes only; None for
        `losses`.
      traced: as `losses`, but digests of all bits (`estimators.row_traces`), compared where rows are
        turned; None for `losses`.

    Returns:
      True if no bit differs.

    Raises:
      ValueError: losses differ by more than a tenth of a percent (a twentieth if coarse): it is not
        rounding; or the rows cannot be put into fixed shapes.
    """
    plain = shapes.collate_each(_spread(count))
    found: dict[Any, list[Batch]] = {}
    for row in plain:
        in_bucket = shapes.in_bucket(row)
        found.setdefault(shapes.group_of(in_bucket), []).append(in_bucket)
    same, slots = True, {1}
    for group, (row, *_) in sorted(found.items(), key=lambda item: -len(item[1]))[:SHAPES]:
        others = [shapes.in_bucket(other, _width(row)) for other in plain]
        others = [o for o in others if shapes.group_of(o) == group and not _equal(o, row)]
        same &= _alike_in_all_slots(shapes, row, others[: shapes.slots_of(row)], losses, coarse)
        same = same and _alike_when_turned(shapes, [row, *others], traced or losses)
        slots.add(shapes.slots_of(row))
    for rows in _of_other_slots(shapes, plain, slots) if same else ():
        same = same and _alike_when_turned(shapes, rows, traced or losses)
    in_first = shapes.in_bucket(plain[0])
    fixed = _beside_itself(shapes, in_first, losses)
    if torch.equal(_beside_itself(shapes, in_first, losses, 1).nan_to_num(), fixed.nan_to_num()):
        where = "in a microbatch of fixed shape and in a batch of one"
        _compare(fixed[:1], (alone or losses)(plain[0]), where, coarse)
    return same


def _of_other_slots(
    shapes: FixedShapes, plain: Sequence[Batch], tried: set[int]
) -> Iterator[Sequence[Batch]]:
    """Rows of one group, widened, for every number of slots that was not tried, as many as fill it."""
    sizes = {} if shapes.sizes is None else shapes.sizes.rows
    for width, slots in sizes.items():
        if slots in tried:
            continue
        rows = [shapes.in_bucket(row, width) for row in plain if _width(row) <= width]
        rows = [row for row in rows if shapes.group_of(row) == shapes.group_of(rows[0])]
        if rows and shapes.slots_of(rows[0]) == slots:
            tried.add(slots)
            yield rows[:slots]


def mostly_unmasked(shapes: FixedShapes, count: int) -> bool:
    """Whether at least half of up to 64 rows are as wide as their bucket, such as blocks of a text.

    Args:
      shapes: of the run, over public rows: what they decide, private rows may not.
      count: number of rows.
    """
    rows = map(shapes.in_bucket, shapes.collate_each(_spread(count)))
    found = [bool(unmasked(row)) for row in rows]
    return sum(found) * 2 >= len(found)


def takes_blanks(shapes: FixedShapes, losses: Losses) -> bool:
    """Whether model and loss run on blank rows, alone and beside a row; some look for a certain token.

    Args:
      shapes: of the run, over public rows: what they decide, private rows may not.
      losses: as in `check_independence`.

    Returns:
      False if something is raised.
    """
    row = shapes.in_bucket(shapes.collate_each([0])[0])
    blank, slots = shapes.blank(row), shapes.slots_of(row)
    try:
        losses(shapes.filled([blank] * slots))
        losses(shapes.filled([row, *[blank] * (slots - 1)]))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LookupError, TypeError, ValueError, AssertionError):
        return False
    return True


def _alike_in_all_slots(
    shapes: FixedShapes, row: Batch, others: Sequence[Batch], losses: Losses, coarse: bool
) -> bool:
    """Whether a row's loss has the same bits wherever it stands, and whatever stands beside it."""
    slots = shapes.slots_of(row)
    beside_itself = _beside_itself(shapes, row, losses).nan_to_num()
    tried: list[tuple[int, Sequence[Batch]]] = []
    ends = sorted({0, slots // 2, slots - 1})
    if others:
        mixed = [others[i % len(others)] for i in range(slots)]
        tried = [(slot, mixed) for slot in ends]
        tried += [(slots - 1, [other] * slots) for other in others[:CROWDS]]
    if shapes.blanks:
        tried += [(slot, [shapes.blank(row)] * slots) for slot in ends]
    same = bool((beside_itself == beside_itself[0]).all())
    if not same and torch.equal(_beside_itself(shapes, row, losses, 1).nan_to_num(), beside_itself):
        where = "in one slot of a microbatch and in another"
        _compare(beside_itself, beside_itself[:1], where, coarse)
    for slot, neighbours in tried:
        loss = _loss_in(slot, neighbours, shapes, row, losses).nan_to_num()
        expected = beside_itself[slot : slot + 1]
        _compare(loss, expected, "beside copies of itself and beside other examples", coarse)
        same &= torch.equal(loss, expected)
    return same


def _alike_when_turned(shapes: FixedShapes, rows: Sequence[Batch], losses: Losses) -> bool:
    """Whether microbatches of rows of one group keep all bits while their rows move on by some slots."""
    slots = shapes.slots_of(rows[0])
    shifts = sorted({*range(min(slots, TURNS)), slots // 2, slots - 1})
    for chosen in shapes.portions(range(len(rows)), rows):
        part = [rows[i] for i in chosen]
        filler = shapes.blank(part[0]) if shapes.blanks else part[-1]
        part += [filler] * (slots - len(part))
        first = losses(shapes.filled(part)).nan_to_num()
        for by in shifts[1:]:
            turned = losses(shapes.filled([*part[by:], *part[:by]])).roll(by).nan_to_num()
            if not torch.equal(turned, first):
                return False
    return True


def _loss_in(
    slot: int,
    neighbours: Sequence[Batch],
    shapes: FixedShapes,
    row: Batch,
    losses: Losses,
    seed: int = 0,
) -> Tensor:
    """A row's loss [1] in a slot of a microbatch, as the run would put it together."""
    batch = [*neighbours[:slot], row, *neighbours[slot + 1 :]]
    if not shapes.may_fill(batch):
        batch[slot - 1] = shapes.blank(row)  # of slot 0 the last one
    return losses(shapes.filled(batch), seed)[slot : slot + 1]


def _beside_itself(shapes: FixedShapes, row: Batch, losses: Losses, seed: int = 0) -> Tensor:
    """A row's losses [slots] in each slot, all others being copies of it."""
    copies = [row] * shapes.slots_of(row)
    if shapes.may_fill(copies):
        return losses(shapes.filled(copies), seed)
    return torch.cat(
        [_loss_in(slot, copies, shapes, row, losses, seed) for slot in range(len(copies))]
    )


def _width(row: Batch) -> int:
    shape = masked_shape(row)
    return 0 if shape is None else shape[-1]


def _equal(one: Batch, other: Batch) -> bool:
    tensors = ((name, value) for name, value in one.items() if isinstance(value, Tensor))
    return all(torch.equal(value, other[name]) for name, value in tensors)


def _of_one_shape(batches: Sequence[Batch]) -> bool:
    shapes = [[v.shape for v in batch.values() if isinstance(v, Tensor)] for batch in batches]
    return all(shape == shapes[0] for shape in shapes)


def long_and_short(collate: Callable[[list[int]], Batch], count: int) -> list[int]:
    """The longest and the shortest of up to 64 rows spread over the data, the longest first.

    Args:
      collate: row numbers -> batch.
      count: number of rows.

    Returns:
      Up to 4 row numbers.
    """
    lengths = {row: _tokens(collate([row])) for row in _spread(count)}
    ordered = sorted(lengths, key=lambda row: -lengths[row])
    half = TRIED // 2
    return ordered if len(ordered) <= TRIED else [*ordered[:half], *ordered[-half:]]


def _spread(count: int) -> list[int]:
    """All of so many row numbers, or `SAMPLE` of them, evenly spread."""
    chosen = min(count, SAMPLE)
    return [i * count // chosen for i in range(chosen)]


def _tokens(batch: Batch) -> int:
    """Attended tokens, or elements of the largest tensor where there is no mask."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor):
        return int(mask.ne(0).sum())
    return max((v.numel() for v in batch.values() if isinstance(v, Tensor)), default=0)


def _widened_losses(batch: Batch, losses: Losses, pad: int | None) -> list[Tensor]:
    """Losses with eight more masked columns, on the right and on the left.

    A custom loss may rely on padding being on one side, so one that agrees is enough. Empty where the
    batch or the model has no room.
    """
    of_sides = []
    for side in ("right", "left"):
        wider = widened(batch, side, 8, pad)
        with contextlib.suppress(IndexError, RuntimeError, ValueError):
            if wider is not None:
                of_sides.append(losses(wider))
    return of_sides


def _agree(losses: Tensor, expected: Tensor, coarse: bool = False) -> bool:
    """Within a tenth of a percent, or a twentieth; NaN, which counts as zero, agrees with anything."""
    share, least = (5e-2, 2e-2) if coarse else (1e-3, 1e-4)
    return not bool(((losses - expected).abs() > share * expected.abs() + least).any())


def _compare(losses: Tensor, expected: Tensor, where: str, coarse: bool = False) -> None:
    if not _agree(losses, expected, coarse):
        _refuse(where)


def _refuse(where: str) -> NoReturn:
    raise CoupledLosses(
        f"an example's loss depends on the other examples of its batch: it differs {where}, so "
        "clipping it would not bound one example's influence. Compute each loss from its own row "
        "only (no batch mean, no in-batch negatives, no batch statistics), with a model that "
        "ignores padding and keeps no state."
    )


def check_widths(model: nn.Module, microbatch_size: int, fixed: bool = False) -> None:
    """Refuses attention that changes with the width of a batch, or with what was seen before.

    Args:
      model: judged by its configuration.
      microbatch_size: examples in a forward pass.
      fixed: whether passes have fixed shapes, so that a batch is as wide as each row's own bucket.

    Raises:
      ValueError: block-sparse attention (BigBird, which leaves it for good at the first short batch),
        rotary positions of type `dynamic` (which remember the longest text), or of type `longrope`
        (which change for a whole batch when it is long) with more than one example in a pass of no
        fixed shape. The first two carry over from pass to pass, which no shape helps.
    """
    config: Any = getattr(base_model(model), "config", None)
    if getattr(config, "attention_type", None) == "block_sparse":
        raise ValueError(
            "attention_type='block_sparse' changes for all later texts once a short one was seen: load "
            "the model with attention_type='original_full'."
        )
    kinds = rope_types(config)
    if "dynamic" in kinds:
        raise ValueError(
            "rope_type='dynamic' remembers the longest text, so losses depend on earlier examples: load "
            "the model with a rope_type that does not (default, linear, yarn, llama3)."
        )
    if "longrope" in kinds and microbatch_size > 1 and not fixed:
        raise ValueError(
            f"rope_type='longrope' with microbatch_size={microbatch_size}: the positions of all rows "
            "change when one of them is long. Set microbatch_size=1."
        )


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary positions that a configuration names, also nested ones."""
    kinds: set[str] = set()
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None)
        nested: Sequence[Any] = list(settings.values()) if isinstance(settings, Mapping) else []
        for values in (settings, *nested):
            if isinstance(values, Mapping):
                kinds |= {str(values[key]) for key in ("rope_type", "type") if key in values}
    return kinds
