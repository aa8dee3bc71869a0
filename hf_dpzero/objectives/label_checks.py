"""Labels that a model's logits do not have, refused in words instead of an index error."""

from __future__ import annotations

from torch import Tensor

IGNORED = -100


def check_labels_in_range(labels: Tensor, classes: int) -> None:
    """Refuses labels outside 0 .. classes - 1 other than -100, which losses ignore.

    The error names no label, for it may be a private row's.

    Args:
      labels: integers of any shape.
      classes: number of logits that a label chooses from.

    Raises:
      ValueError: says which labels the model has, and which setting gives it others.

    >>> import torch
    >>> check_labels_in_range(torch.tensor([0, 1, -100]), classes=2)
    """
    if labels.is_meta:  # a plan's: shapes without values
        return
    outside = (labels >= classes) | ((labels < 0) & (labels != IGNORED))
    if bool(outside.any()):
        raise ValueError(
            f"a label is out of range: the model has {classes} logits, so labels are 0 to "
            f"{classes - 1}, or {IGNORED} for what is ignored. Number the labels from 0, or load the "
            "model with num_labels of the data (a language model: with embeddings resized to the "
            "tokenizer's vocabulary)."
        )
