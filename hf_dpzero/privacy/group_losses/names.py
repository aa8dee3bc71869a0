"""Names of groups: which one a row's value stands for, and what a group is called in logs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


def places(values: Sequence[Any], names: Sequence[str]) -> np.ndarray:
    """Which of the names each value stands for, int64 [n] in 0..m-1; -1 for none of them.

    Texts are compared as they are, other values as texts: 3 is "3", and 3.0 is "3.0" or else "3", since
    a column of integers with gaps is often read as floats. True is "True", or else "true"; None is
    "None".

    Args:
      values: of rows; numbers and truth values may be those of NumPy or torch.
      names: of groups, each one once.

    >>> places(["1", 0, 1.0, True, None], ("0", "1", "true")).tolist()
    [1, 0, 1, 2, -1]
    """
    known = {name: i for i, name in enumerate(names)}

    def place(value: Any) -> int:
        return next((known[word] for word in _spellings(value) if word in known), -1)

    return np.fromiter(map(place, values), dtype=np.int64, count=len(values))


def _spellings(value: Any) -> tuple[str, ...]:
    """The names that a value may stand for, the likeliest first."""
    if isinstance(value, str):
        return (value,)
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(plain, bool):
        return str(plain), str(plain).lower()
    if isinstance(plain, float) and plain.is_integer():
        return str(plain), str(int(plain))
    return (str(plain),)


def metric_keys(names: Sequence[str]) -> list[str]:
    """The groups' names in names of metrics: letters, digits and underscores, all of them different.

    Names that would be the same get their place in `names`, from 1.

    >>> metric_keys(["United Kingdom", "<18", ">18"])
    ['United_Kingdom', '_18_2', '_18_3']
    """
    keys = [re.sub(r"\W+", "_", name) for name in names]
    often = Counter(keys)
    numbered = [f"{key}_{i}" if often[key] > 1 else key for i, key in enumerate(keys, 1)]
    return (
        numbered
        if len({*numbered}) == len(names)
        else [f"{key}_{i}" for i, key in enumerate(keys, 1)]
    )
