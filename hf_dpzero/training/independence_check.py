"""Checks before training that each example's loss is a function of that example alone.

A few long and a few short examples are evaluated one by one, together, together with more masked
padding, and one by one again in reverse order. Losses that differ by more than rounding depend on the
other examples, on the width of the batch, or on what the model has seen before; clipping a loss would
then not bound one example's influence. The losses are discarded.

What happens only at other lengths is not seen here; `check_widths` refuses the known cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.objectives.losses import IGNORE_INDEX, base_model

Batch = Mapping[str, Tensor]
Losses = Callable[[Batch], Tensor]

SAMPLE, TRIED = 64, 4
_FILL = {"labels": IGNORE_INDEX, "attention_mask": 0}  # other columns repeat a token


def check_independence(
    collate: Callable[[list[int]], Batch], count: int, losses: Losses, widths: bool = True
) -> None:
    """Refuses a loss that depends on the other examples of its batch, or on those before it.

    Args:
      collate: row numbers -> batch.
      count: number of rows.
      losses: batch -> per-example losses, float32 [B] on the CPU; in eval mode, without gradients.
      widths: whether a batch may be wider than a row of it. Not where rows run one by one, as those in
        low precision must, whose rounding depends on the width by more than is allowed here.

    Raises:
      ValueError: some example's losses differ by more than a tenth of a percent.
    """
    rows = long_and_short(collate, count)
    alone = torch.cat([losses(collate([row])) for row in rows])
    together, again = losses(collate(rows)), losses(collate(rows))
    if not torch.equal(together.nan_to_num(), again.nan_to_num()):
        return  # the collator or the model draws random numbers: nothing can be compared
    _compare(together, alone, "in a batch of several and in a batch of one")
    wider = _widened_losses(collate(rows), losses) if widths else []
    if wider and not any(_agree(of_side, together) for of_side in wider):
        _compare(wider[0], together, "in a batch and in the same with more masked padding")
    later = torch.cat([losses(collate([row])) for row in reversed(rows)]).flip(0)
    _compare(later, alone, "before and after other examples were seen")


def long_and_short(collate: Callable[[list[int]], Batch], count: int) -> list[int]:
    """The longest and the shortest of up to 64 rows spread over the data, the longest first.

    Args:
      collate: row numbers -> batch.
      count: number of rows.

    Returns:
      Up to 4 row numbers.
    """
    step = max(1, count // SAMPLE)
    lengths = {row: _tokens(collate([row])) for row in range(0, count, step)}
    ordered = sorted(lengths, key=lambda row: -lengths[row])
    half = TRIED // 2
    return ordered if len(ordered) <= TRIED else [*ordered[:half], *ordered[-half:]]


def _tokens(batch: Batch) -> int:
    """Attended tokens, or elements of the largest tensor where there is no mask."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor):
        return int(mask.ne(0).sum())
    return max((v.numel() for v in batch.values() if isinstance(v, Tensor)), default=0)


def _widened_losses(batch: Batch, losses: Losses) -> list[Tensor]:
    """Losses with eight more masked columns, on the right and on the left.

    A custom loss may rely on padding being on one side, so one that agrees is enough. Empty where the
    batch or the model has no room.
    """
    of_sides = []
    for side in ("right", "left"):
        wider = widened(batch, side)
        with contextlib.suppress(IndexError, RuntimeError, ValueError):
            if wider is not None:
                of_sides.append(losses(wider))
    return of_sides


def widened(batch: Batch, side: str, columns: int = 8) -> dict[str, Tensor] | None:
    """The batch with masked columns at a side; None without an attention mask over tokens.

    Columns repeat a row's token, so that no pad token is needed; labels there are -100.

    Args:
      batch: from a collator.
      side: "right" or "left".
      columns: how many to add.

    Returns:
      A new batch; None where nothing can be widened.

    >>> ids, mask = torch.tensor([[5, 6]]), torch.tensor([[1, 1]])
    >>> widened({"input_ids": ids, "attention_mask": mask}, "right", 1)["input_ids"]
    tensor([[5, 6, 6]])
    """
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if mask is None or ids is None or mask.shape != ids.shape or ids.shape[-1] == 0:
        return None
    wider = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape == ids.shape:
            edge = value[..., -1:] if side == "right" else value[..., :1]
            more = edge.expand(*value.shape[:-1], columns)
            if name in _FILL:
                more = torch.full_like(more, _FILL[name])
            wider[name] = torch.cat([value, more] if side == "right" else [more, value], dim=-1)
    return wider


def _agree(losses: Tensor, expected: Tensor) -> bool:
    """Within a tenth of a percent; NaN agrees with anything, because it counts as zero."""
    return not bool(((losses - expected).abs() > 1e-3 * expected.abs() + 1e-4).any())


def _compare(losses: Tensor, expected: Tensor, where: str) -> None:
    if not _agree(losses, expected):
        raise ValueError(
            f"an example's loss depends on the other examples of its batch: it differs {where}, so "
            "clipping it would not bound one example's influence. Compute each loss from its own row "
            "only (no batch mean, no in-batch negatives, no batch statistics), with a model that "
            "ignores padding and keeps no state."
        )


def check_widths(model: nn.Module, microbatch_size: int) -> None:
    """Refuses attention that changes with the width of a batch, or with what was seen before.

    Args:
      model: judged by its configuration.
      microbatch_size: examples in a forward pass.

    Raises:
      ValueError: block-sparse attention (BigBird, which leaves it for good at the first short batch),
        rotary positions of type `dynamic` (which remember the longest text), or of type `longrope`
        (which change for a whole batch when it is long) with more than one example in a pass.
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
    if "longrope" in kinds and microbatch_size > 1:
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
