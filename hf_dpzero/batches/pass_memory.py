"""How many rows fit into a forward pass, by arithmetic on bytes before step 0.

An operating system kills a process that takes too much memory; it does not raise. So nothing is found
out by trying, and no private row chooses anything: bytes of one measured pass of invented rows are held
against what is free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from hf_dpzero.estimators.per_example_gradients import DENSE_BYTES

CAPS = (64, 32, 16)
"""Rows of a pass that are tried where `microbatch_size` is not set; else one."""

_SHARE = 0.5  # of free memory: what is free changes, and allocators round up
_ALIVE = (
    4.0  # largest results of modules that are alive at a time: inputs, outputs, what is in between
)


@dataclass
class PassBytes:
    """What the modules of a model returned in one pass.

    Attributes:
      largest: bytes of the largest result.
      total: of all results, which a backward pass keeps.
    """

    largest: int = 0
    total: int = 0


@contextlib.contextmanager
def measured(model: nn.Module) -> Iterator[PassBytes]:
    """Adds up, inside, what the model's innermost modules return."""
    found = PassBytes()

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found.largest = max(found.largest, output.nbytes)
            found.total += output.nbytes

    innermost = [m for m in model.modules() if next(m.children(), None) is None]
    handles = [module.register_forward_hook(look) for module in innermost]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nothing has taken."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def tokens_that_fit(found: PassBytes, tokens: int, free: int, trained: int, backward: bool) -> int:
    """Tokens of one pass that fit into memory, or rows where a row counts as one token.

    Args:
      found: of a measured pass.
      tokens: that it had.
      free: bytes.
      trained: parameters; each may be copied once.
      backward: whether results are kept for a backward pass, and gradients come on top.

    Returns:
      At least 0.

    >>> tokens_that_fit(PassBytes(largest=1000, total=9000), 10, 2_000_000, trained=1000, backward=False)
    2480
    """
    each = (2.0 * found.total if backward else _ALIVE * found.largest) / tokens
    left = _SHARE * free - (8 if backward else 2) * trained * 4
    return int(max(left, 0.0) / max(each, 1.0))


def rows_that_fit(free: int, trained: int, dense: bool) -> int:
    """The cap of a pass: the most of `CAPS` whose per-example gradients fit, else 1.

    Args:
      free: bytes.
      trained: parameters.
      dense: whether each example has a gradient of its own in memory.
    """
    fitting = (
        n for n in CAPS if not dense or 2 * n * 4 * trained <= max(_SHARE * free, DENSE_BYTES)
    )
    return next(fitting, 1)
