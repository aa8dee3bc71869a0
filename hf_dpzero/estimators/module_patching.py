"""A module's `forward` replaced for a while, and put back exactly as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@contextlib.contextmanager
def replaced_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Iterator[None]:
    """`module.forward` is `wrap(module.forward)` inside the block, whatever happens there.

    The replacement is an instance attribute: one that someone else had put there comes back after
    the block, and where there was none there is none.

    Args:
      module: any.
      wrap: the module's forward -> what stands for it.

    Yields:
      Nothing.
    """
    original = module.__dict__.get("forward")
    module.forward = wrap(module.forward)
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original
