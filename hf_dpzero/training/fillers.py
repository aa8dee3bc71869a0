"""What stands in the slots of a microbatch that no example takes: one constant blank row for each shape.

A blank holds nothing of any example. Attention takes another kernel where no row of a batch is masked
(transformers leaves out a mask that is all ones), so a row without padding would be rounded by whether
its neighbours have some. Therefore a microbatch is never all unmasked by chance: either such rows stand
apart, among themselves and unmasked blanks, or a blank with masked columns stands among them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from hf_dpzero.objectives.losses import IGNORE_INDEX

Row = Mapping[str, Tensor]

MASKS = ("attention_mask", "decoder_attention_mask")
POSITIONS = "position_ids"


def unmasked(row: Row) -> frozenset[str]:
    """The masks of a batch of one that mask nothing, and position_ids that start but once.

    Without an attention mask, transformers reads position_ids that start again as a mask of packed
    texts, and computes none where no row of the batch has such.

    >>> unmasked({"attention_mask": torch.tensor([[1, 1]])})
    frozenset({'attention_mask'})
    """
    given = ((name, row.get(name)) for name in MASKS)
    whole = {name for name, mask in given if mask is not None and bool(mask.ne(0).all())}
    positions = row.get(POSITIONS)
    if positions is not None and bool(positions.diff(dim=-1).eq(1).all()):
        whole.add(POSITIONS)
    return frozenset(whole)


def blank_like(
    row: Row, side: str = "right", without_padding: Collection[str] = ()
) -> dict[str, Tensor]:
    """The blank row of a shape: zeros, labels of tokens -100, one column attended.

    Args:
      row: a batch of one; its names, shapes and dtypes are read, no value.
      side: of the padding.
      without_padding: masks of it that attend to all columns, positions that start once.

    Returns:
      A batch of one, the same for every row of that shape.

    >>> blank_like({"labels": torch.tensor([1]), "attention_mask": torch.tensor([[1, 1]])})
    {'labels': tensor([0]), 'attention_mask': tensor([[1, 0]])}
    """
    blank = {name: torch.zeros_like(value) for name, value in row.items()}
    labels = blank.get("labels")
    if labels is not None and labels.dim() > 1 and not labels.is_floating_point():
        labels.fill_(IGNORE_INDEX)
    if POSITIONS in without_padding:
        blank[POSITIONS] += torch.arange(blank[POSITIONS].shape[-1])
    for name in MASKS:
        if name in without_padding:
            blank[name].fill_(1)
        elif (mask := blank.get(name)) is not None and mask.numel():
            mask[..., -1 if side == "left" and name == "attention_mask" else 0] = 1
    return blank


def repeat_last(rows: Sequence[Row], count: int) -> dict[str, Tensor]:
    """Rows of one shape as a batch of `count`; what is missing repeats the last one."""
    repeated = [*rows, *[rows[-1]] * (count - len(rows))]
    return {name: torch.cat([row[name] for row in repeated]) for name in rows[0]}
