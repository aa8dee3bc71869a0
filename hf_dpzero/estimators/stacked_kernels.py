"""Under `torch.func.vmap`, one kernel for all copies where torch's own rules run one for each.

`F.linear` on an input that all copies share becomes one matrix product with the copies' weights side
by side; attention takes copies and rows as one batch. Both are the same sums, rounded in another
order; no example meets another in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

is_stacked = torch._C._functorch.is_batchedtensor
"""Whether a tensor, seen inside vmap, stands for one of the copies' own each."""


class StackedKernels(TorchFunctionMode):
    """Inside, `F.linear` and `F.scaled_dot_product_attention` run as the module says.

    Attributes:
      widest: elements, for each copy, of the largest tensor that differed between copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widest = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = _INSTEAD.get(func, func)
        result = run(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and is_stacked(result):
            self.widest = max(self.widest, result.numel())
        return result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_stacked(weight) and not is_stacked(input):
        return _SharedInput.apply(input, weight, bias)
    return F.linear(input, weight, bias)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    known = query.dim() == 4 and not dropout_p and settings.keys() <= {"scale", "enable_gqa"}
    maskable = attn_mask is None or attn_mask.dim() in (2, 4)
    if not (known and maskable and any(map(is_stacked, (query, key, value)))):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **settings
        )
    return _Attention.apply(query, key, value, attn_mask, is_causal, settings)


class _SharedInput(torch.autograd.Function):
    """input [..., h], weight [L, h], bias [L] or None -> [..., L]; the input is every copy's."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no backward pass."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        weights = weight.movedim(in_dims[1], 0)
        out = F.linear(input, weights.flatten(0, 1)).unflatten(-1, weights.shape[:2])
        if bias is not None:
            out = out + (bias if in_dims[2] is None else bias.movedim(in_dims[2], 0))
        return out, out.dim() - 2


class _Attention(torch.autograd.Function):
    """`F.scaled_dot_product_attention` of [B, heads, T, d] under a mask [T, S] or [1 or B, ...]."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        settings: Any,
    ) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, **settings
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no backward pass."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        is_causal: bool, settings: Any,
    ) -> tuple[Tensor, int]:  # fmt: skip
        copies, rows = info.batch_size, query.shape[0 if in_dims[0] != 0 else 1]
        folded = [
            _folded(tensor, at, copies, rows)
            for tensor, at in zip((query, key, value), in_dims[:3], strict=True)
        ]
        allowed = _folded_mask(mask, in_dims[3], copies, rows)
        out = F.scaled_dot_product_attention(
            folded[0], folded[1], folded[2], allowed, is_causal=is_causal, **settings
        )
        return out.unflatten(0, (copies, rows)), 0


def _folded(tensor: Tensor, at: int | None, copies: int, rows: int) -> Tensor:
    """[1 or B, ...] of each copy, whose dimension is `at` (None: all share it) -> [copies B, ...]."""
    first = tensor[None] if at is None else tensor.movedim(at, 0)
    return first.expand(copies, rows, *first.shape[2:]).flatten(0, 1)


def _folded_mask(mask: Tensor | None, at: int | None, copies: int, rows: int) -> Tensor | None:
    """None, [T, S] or [1 or B, ...] of each copy -> what fits [copies B, heads, T, S]."""
    if mask is None or (at is None and (mask.dim() == 2 or mask.shape[0] == 1)):
        return mask
    if mask.dim() == 3 and at is not None:  # each copy's own [T, S]
        mask, at = mask.movedim(at, 0)[:, None, None], 0
    return _folded(mask, at, copies, rows)


_INSTEAD: dict[Any, Any] = {F.linear: _linear, F.scaled_dot_product_attention: _attention}
