"""What may stand for classes: two equally long, non-empty arrays of integers."""

from __future__ import annotations

from typing import Any

import numpy as np


def class_labels(predictions: Any, references: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both as `[N]` integer arrays; booleans count as 0 and 1.

    Raises:
      ValueError: another dtype (`evaluate` would cut 0.9 to 0), other shapes, or N = 0.

    >>> class_labels([True, False], [1, 1])
    (array([1, 0]), array([1, 1]))
    """
    said, true = np.asarray(predictions), np.asarray(references)
    for name, classes in (("predictions", said), ("references", true)):
        if classes.size and classes.dtype.kind not in "iub":
            raise ValueError(
                f"{name} of dtype {classes.dtype} are no classes; give integers, for logits their "
                "argmax over the classes."
            )
    if said.ndim != 1 or said.shape != true.shape or not len(said):
        raise ValueError(
            f"predictions have shape {said.shape}, references {true.shape}; give one class a row, "
            "for at least one row."
        )
    return said.astype(np.int64), true.astype(np.int64)
