"""Exact float32 arithmetic: every tensor lives on a grid of multiples of a power of two.

Float addition cannot be undone: theta + a - 2a + a drifts. On a grid it can. Values that are
multiples of q = 2^(e-24) and no larger than 2^e are float32 numbers, and so are their sums within
that range: adding and subtracting grid multiples is integer arithmetic in disguise. A tensor is
snapped to its grid once; perturbation, restore and update are then exact in any order and fusion.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MANTISSA_BITS = 24
_SMALLEST_RANGE = 0.125  # a tensor of zeros (a LoRA B, a new bias) still gets room to grow
STOCHASTIC_BELOW = 16.0  # updates under this many grid steps are rounded stochastically


def exponent_for(largest: float) -> int:
    """The range exponent e for values up to `largest`, with a factor 2 of headroom.

    >>> exponent_for(0.9), exponent_for(0.0)
    (1, -2)
    """
    if not math.isfinite(largest):
        raise ValueError(f"a parameter holds {largest}: load a model with finite weights.")
    return math.ceil(math.log2(2.0 * max(largest, _SMALLEST_RANGE)))


def quantum(exponent: int) -> float:
    """The grid spacing q = 2^(e - 24)."""
    return math.ldexp(1.0, exponent - _MANTISSA_BITS)


def capacity(exponent: int) -> float:
    """The largest magnitude at which every grid multiple is a float32: 2^e."""
    return math.ldexp(1.0, exponent)


def snap_(values: Tensor, spacing: float) -> Tensor:
    """Rounds float32 `values` to the nearest multiple of `spacing` (a power of two), in place."""
    return values.mul_(1.0 / spacing).round_().mul_(spacing)


def snap_scalar(value: float, spacing: float) -> float:
    """`value` rounded to the nearest multiple of `spacing` (ties to even).

    >>> snap_scalar(0.3, 0.25)
    0.25
    """
    return round(value / spacing) * spacing


def snap_scalar_stochastically(value: float, spacing: float, uniform: float) -> float:
    """`value` rounded to a neighbouring grid multiple, up with probability equal to the fraction.

    Exactly unbiased for a uniform in [0, 1), to float64.

    >>> snap_scalar_stochastically(0.3, 0.25, 0.9), snap_scalar_stochastically(0.3, 0.25, 0.7)
    (0.5, 0.25)
    """
    return math.floor(value / spacing + uniform) * spacing


def snap_stochastically_(values: Tensor, spacing: float, uniforms: Tensor) -> Tensor:
    """Rounds to a neighbouring grid multiple, up with probability equal to the fraction.

    Unbiased to 2^-17 of a grid step, so that updates far below the spacing are not lost on
    average. `uniforms` are public, so a replay rounds the same way.
    """
    below = values.mul_(1.0 / spacing).floor()
    up = values.sub_(below).add_(uniforms).floor_()  # the fraction first: both sums keep every bit
    return up.add_(below).mul_(spacing)


def needs_stochastic_rounding(size: float, spacing: float) -> bool:
    """Whether nearest rounding of an update of typical size `size` would distort it visibly."""
    return 0.0 < abs(size) < STOCHASTIC_BELOW * spacing


def largest_magnitude(values: Tensor) -> float:
    """max |values|, 0.0 for an empty tensor; NaN and infinity come through."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return max(abs(float(low)), abs(float(high))) if float(low) == float(low) else math.nan
