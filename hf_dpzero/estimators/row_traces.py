"""One number an example for all bits of a forward pass: of its losses, and of what every layer returned.

Matrix products may round a row by its place in a batch. Mostly nothing of it reaches the loss at first:
logits near zero are added to a larger number. Later, with larger logits, it does. So trials of whether
an example is evaluated alike beside other examples compare these numbers, not losses alone: products
of two outputs over 32, 64 or 128 units, of four rows, moved a fifth of all outputs' last bits, but one
loss in some hundreds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.objectives.losses import PerExampleLoss, batch_size, is_compiled, trial

_COPIES = (nn.Embedding, nn.Dropout, nn.Identity)  # round nothing
_ODD = -1640531527  # odd, as int32: multiples of it are spread over all bits
_BITS = 24  # that a float32 holds
_KEPT = 1 << 16  # weights at most, to be kept for the next digest


@dataclass(frozen=True)
class Traced:
    """An objective whose "losses" are 24-bit digests, equal only if all bits are equal.

    What modules without children return is looked at, if its first dimension is the batch's. Digests
    of different bits are equal with probability 2^-24. NaN equals NaN, and 0 equals -0.

    Attributes:
      objective: its `trial` is evaluated. Of compiled models the digest is of the losses alone.
    """

    objective: PerExampleLoss

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Digests, float32 `[B]`; works under `torch.func.vmap`."""
        rows = batch_size(inputs)
        with _returned_values(model, rows) as digests:
            losses = trial(self.objective)(model, inputs)
        total = _digest(losses, rows)
        for digest in digests:
            total = total * _ODD + digest.to(total.device)
        folded = total ^ (total >> _BITS) ^ (total >> 2 * _BITS)
        return (folded & (2**_BITS - 1)).float()


@contextlib.contextmanager
def _returned_values(model: nn.Module, rows: int) -> Iterator[list[Tensor]]:
    """Digests [rows] of what the model's innermost modules return inside, in order."""
    digests: list[Tensor] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and _is_of_rows(output, rows):
            digests.append(_digest(output, rows))

    watched = [] if is_compiled(model) else list(filter(_computes, model.modules()))
    handles = [module.register_forward_hook(look) for module in watched]
    try:
        yield digests
    finally:
        for handle in handles:
            handle.remove()


def _computes(module: nn.Module) -> bool:
    return not isinstance(module, _COPIES) and next(module.children(), None) is None


def _is_of_rows(output: Tensor, rows: int) -> bool:
    """Whether the first dimension is the batch; not where the second may be it as well."""
    if not output.is_floating_point() or output.dim() == 0 or output.shape[0] != rows:
        return False
    return output.dim() < 3 or output.shape[1] != rows


def _digest(values: Tensor, rows: int) -> Tensor:
    """int64 [rows]: the bits of a row as integers, times odd numbers, added modulo 2^32."""
    plain = values.detach().reshape(rows, -1).nan_to_num().add_(0.0)  # a copy; -0 becomes 0
    words = torch.int16 if plain.element_size() == 2 else torch.int32
    bits = plain.contiguous().view(words).to(torch.int32)
    few = bits.shape[1] <= _KEPT
    weights = (_weights if few else _weights.__wrapped__)(bits.shape[1], bits.device)
    return bits.mul_(weights).sum(dim=1, dtype=torch.int64)


@functools.lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count, 2, dtype=torch.int32, device=device) * _ODD
