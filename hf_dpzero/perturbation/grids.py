"""Exact float32 arithmetic: every tensor lives on a grid of multiples of a power of two.

Float addition cannot be undone: theta + a - 2a + a drifts. On a grid it can. Values that are
multiples of q = 2^(e-24) and no larger than 2^e are float32 numbers, and so are their sums within
that range: adding and subtracting grid multiples is integer arithmetic in disguise. A tensor is
snapped to its grid once; perturbation, restore and update are then exact in any order and fusion.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MANTISSA_BITS = 24
_SMALLEST_RANGE = 0.125  # a tensor of zeros (a LoRA B, a new bias) still gets room to grow

Doubles = NDArray[np.float64]


def exponent_for(largest: float) -> int:
    """Returns the range exponent e for values up to `largest`, with a factor 2 of headroom.

    >>> exponent_for(0.9), exponent_for(0.0)
    (1, -2)
    """
    if not math.isfinite(largest):
        raise ValueError(f"a parameter holds {largest}: load a model with finite weights.")
    return math.ceil(math.log2(2.0 * max(largest, _SMALLEST_RANGE)))


def quantum(exponent: NDArray[np.int64]) -> Doubles:
    """Returns the grid spacing q = 2^(e - 24), float64, of each exponent."""
    return np.ldexp(1.0, exponent - _MANTISSA_BITS)


def snap_(values: Tensor, spacing: float) -> Tensor:
    """Rounds float32 values in place to the nearest multiples of a power of two; returns them."""
    # -0 becomes +0, which is what sums come back to
    return values.mul_(1.0 / spacing).round_().mul_(spacing).add_(0.0)


def snapped(value: float | Doubles, spacing: Doubles) -> Doubles:
    """Rounds float64 to the nearest multiple of the spacing (ties to even).

    >>> snapped(0.3, np.array([0.25, 0.5])).tolist()
    [0.25, 0.5]
    """
    return np.rint(value / spacing) * spacing


def snapped_stochastically(value: float | Doubles, spacing: Doubles, uniforms: Doubles) -> Doubles:
    """Rounds float64 to a neighbouring multiple, up with probability equal to the fraction.

    Args:
      value: a number or an array.
      spacing: powers of two; broadcasts against value.
      uniforms: in [0, 1), for which the rounding is unbiased to float64.

    >>> snapped_stochastically(0.3, np.array([0.25, 0.25]), np.array([0.9, 0.7])).tolist()
    [0.5, 0.25]
    """
    return np.floor(value / spacing + uniforms) * spacing


def largest_magnitude(values: Tensor) -> float:
    """Returns max |values|, 0.0 for an empty tensor; NaN and infinity come through."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    return max(abs(float(low)), abs(float(high))) if float(low) == float(low) else math.nan
