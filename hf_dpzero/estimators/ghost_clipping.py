"""Ghost clipping: norms of per-example gradients without the gradients, then one weighted sum.

(Li et al. 2022, arXiv:2110.05679.) The gradient of a weight that meets an example's tokens is a sum of
outer products, sum_t left_t right_t^T, and its norm needs none of them:

||sum_t left_t right_t^T||_F^2 = sum_{s,t} (left_s . left_t) (right_s . right_t)

A weight with fewer numbers than the two `[T, T]` tables takes its gradient instead, which is
smaller (mixed ghost clipping, Bu et al. 2022, arXiv:2205.10683); so do biases and norm layers. The
norm is that of all uses of a weight together: of a layer that runs twice, of a tied embedding (Opacus
has no ghost clipping of tied weights).

The sum is made of what was measured: the backward pass is not repeated with weighted losses, as Opacus
does, but its left_t and right_t are kept and multiplied once more, sum_i w_i sum_t left_it right_it^T
(book-keeping, Bu et al. 2023, arXiv:2210.00038). A second pass rounds differently: where huge terms
cancel on the way back it gives a gradient that nobody measured, and one example then moves the sum by
up to 14 clipping norms (`test_huge_tokens_that_cancel_move_the_sum_by_no_more_than_the_clip`).

*Rounding.* The norm rounds in proportion to S = sum_t |left_t| |right_t|, not to itself. With float32's
2^-24, a squared norm is off by no more than about 2^-23 S^2; while S <= 16 ||g|| that is 2^-16 of the
norm at the very worst. Where S is larger, the example's gradient is multiplied out by itself, and what
is added is w times that very array. Factors are divided by powers of two first, which is exact, so that
their squares do not leave float32's range. The weighted sum is taken in float64. Gradients that were
taken for their norms are added as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CANCELLED = 16.0
"""Largest S / ||g|| that products without the gradient are trusted with."""
VANISHING = 2.0**-34
"""Counts as rounding, for scaled factors below 2: products whose squares leave float32's range."""
SMALLEST = 2.0**-80
"""Smallest w ||g|| for which weighted factors below float32's range do not matter."""


@dataclass(frozen=True)
class Products:
    """Uses of a weight `[n, m]`: its gradient is factor sum_t left_t right_t^T for each example.

    Attributes:
      left: float32 `[B, T, n]`, or ids `[B, T]` that stand for one-hot rows.
      right: float32 `[B, T, m]`.
      factor: float64 `[B]`; None for 1.
    """

    left: Tensor
    right: Tensor
    factor: Tensor | None = None

    @property
    def looked_up(self) -> bool:
        """Whether `left` holds ids."""
        return not self.left.is_floating_point()

    def scaled(self) -> Products:
        """The same product of factors below 2: exact, for they are divided by powers of two."""
        right, factor = _over_power_of_two(self.right)
        if self.looked_up:
            return Products(self.left, right, factor)
        left, other = _over_power_of_two(self.left)
        return Products(left, right, factor * other)

    def _factored(self, rows: Tensor) -> Tensor:
        """`[B, ...]` times the factor, in float32."""
        if self.factor is None:
            return rows
        return rows * self.factor.float().view(-1, *[1] * (rows.dim() - 1))

    def dense(self, weight: Tensor) -> Tensor:
        """The gradients themselves, `[B, n, m]`."""
        if not self.looked_up:
            return self._factored(self.left.mT @ self.right)
        gradient = self.right.new_zeros(len(self.right), *weight.shape)
        index = self.left.unsqueeze(-1).expand_as(self.right)
        return self._factored(gradient.scatter_add_(1, index, self.right))

    def of(self, i: int) -> Products:
        """Of example i alone."""
        factor = None if self.factor is None else self.factor[i : i + 1]
        return Products(self.left[i : i + 1], self.right[i : i + 1], factor)

    def scale(self) -> Tensor:
        """sum_t |left_t| |right_t| [B] float64, of scaled ones: the rounding goes by it."""
        assert self.factor is not None
        lengths = self.right.norm(dim=2, dtype=torch.float64)
        if not self.looked_up:
            lengths = lengths * self.left.norm(dim=2, dtype=torch.float64)
        return self.factor * (lengths.sum(dim=1) + VANISHING)

    def squared_norm(self) -> Tensor:
        """||sum_t left_t right_t^T||_F^2 [B] float64 of scaled ones, without that sum."""
        assert self.factor is not None
        rights = self.right @ self.right.mT
        if self.looked_up:
            lefts = (self.left.unsqueeze(2) == self.left.unsqueeze(1)).double()
        else:
            lefts = (self.left @ self.left.mT).double()
        return (lefts * rights).sum(dim=(1, 2)).clamp(min=0) * self.factor.square()

    def add_weighted_(self, total: Tensor, kept: Any, weights: Tensor) -> None:
        """total += sum_i w_i g_i.

        Args:
          total: float64 `[n, m]`.
          kept: bool [B] or a slice, the examples that are added.
          weights: float64 [B].
        """
        w = (weights if self.factor is None else weights * self.factor)[kept][:, None, None]
        left, right = self.left[kept], self.right[kept].double()
        if self.looked_up:
            total.index_add_(0, left.flatten(), (right * w).flatten(0, 1))
        else:
            total.addmm_((left * w).flatten(0, 1).mT, right.flatten(0, 1))

    def total(self, weight: Tensor) -> Tensor:
        """Their sum over the examples, projected: `[n]`."""
        lengths = self._factored(self.right @ signs(self.right))
        if not self.looked_up:
            return torch.einsum("btn,bt->n", self.left, lengths)
        return lengths.new_zeros(len(weight)).index_add_(0, self.left.flatten(), lengths.flatten())


def joined(uses: Sequence[Products]) -> list[Products]:
    """Scaled; uses of one kind are one use of more tokens. Those looked up come first."""
    kinds = [[u for u in uses if u.looked_up], [u for u in uses if not u.looked_up]]
    return [
        Products(
            torch.cat([u.left for u in kind], 1),
            torch.cat([u._factored(u.right) for u in kind], 1),
        ).scaled()
        for kind in kinds
        if kind
    ]


def _over_power_of_two(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, T, n]` over a power of two for each example, so that it is below 2; these [B] float64."""
    largest = rows.abs().amax(dim=(1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # its exponent alone
    return rows / power[:, None, None], power.double()


def is_small(weight: Tensor, uses: Sequence[Products]) -> bool:
    """Whether a weight's gradient takes less memory than its tables."""
    return weight.numel() < 2 * sum(u.right.shape[1] for u in uses) ** 2


def squared_norms(joined: Sequence[Products]) -> tuple[Tensor, Tensor]:
    """||sum over the uses||_F^2 [B] float64 without the gradients, and the scale of its rounding."""
    squares = functools.reduce(torch.add, [u.squared_norm() for u in joined])
    if len(joined) == 2:  # a tied weight: twice the inner product of its two gradients
        looked_up, multiplied = joined
        assert looked_up.factor is not None and multiplied.factor is not None
        rights = multiplied.right @ looked_up.right.mT
        tokens = looked_up.left.unsqueeze(1).expand_as(rights)
        inner = (multiplied.left.gather(2, tokens).double() * rights).sum(dim=(1, 2))
        squares = (squares + 2 * looked_up.factor * multiplied.factor * inner).clamp(min=0)
    return squares, functools.reduce(torch.add, [u.scale() for u in joined])


def signs(like: Tensor) -> Tensor:
    """Fixed +-1, as many as the last dimension of `like`; they only serve a check."""
    drawn = torch.randint(0, 2, like.shape[-1:], generator=torch.Generator().manual_seed(0))
    return drawn.to(like) * 2 - 1
