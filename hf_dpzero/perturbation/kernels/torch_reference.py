"""The functions of `dispatch` in plain torch: any device, no compiler. The definition of the numbers.

Slower than the compiled versions and equal to them bit for bit: each product and each sum is a
separate float32 operation, in the order written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation.directions import LANES, NORMAL_UNIT, coordinates, dither

_CHUNK = 1 << 18
Floats = NDArray[np.float32]


class _Part:
    """Elements start .. stop of a flat tensor, with their members' parameters spread over them.

    The first of them is element `first` of its tensor (its segment, under members).
    """

    def __init__(
        self, start: int, stop: int, first: int, members: Any, device: torch.device
    ) -> None:
        self.start, self.stop, self.first, self.device = start, stop, first, device
        self.rows, self.starts = np.zeros(1, np.int64), np.zeros(1, np.int64)
        if members is not None:
            rows = members.rows[start // LANES : -(-stop // LANES)]
            self.rows, self.starts = np.repeat(rows, LANES)[: stop - start], members.starts

    def of(self, values: NDArray[Any]) -> Tensor:
        """A parameter [M] for each element; [1] if there is one member."""
        return torch.from_numpy(values[self.rows]).to(self.device)

    def dither(self, starts: NDArray[np.uint32]) -> Tensor:
        """The 32-bit dither of each element, int64."""
        last = self.first + self.stop - self.start
        index = torch.arange(self.first, last, device=self.device) - self.of(self.starts)
        return dither(self.of(starts.astype(np.int64)), index)

    def raw(self, offset: int, key: NDArray[np.uint32], gaussian: bool) -> Tensor:
        """The elements' coordinates of a stream, float32."""
        u = coordinates(key, gaussian, offset + self.first, self.stop - self.start)
        values = torch.from_numpy(u).to(self.device).float()
        return values * NORMAL_UNIT if gaussian else values


def _parts(out: Tensor, members: Any, pieces: Any) -> Iterator[_Part]:
    firsts = [0] if pieces is None else pieces.tolist()
    width = out.numel() // len(firsts)
    for piece, first in enumerate(firsts):
        for start in range(0, width, _CHUNK):
            place = piece * width + start, piece * width + min(start + _CHUNK, width)
            yield _Part(*place, first + start, members, out.device)


def add_signs(
    out: Tensor, source: Tensor, offset: int, keys: Any, amounts: Floats, members: Any, pieces: Any
) -> None:
    """`dispatch.add_signs`.

    Args:
      out, source, offset, keys, amounts, members, pieces: as there.
    """
    for part in _parts(out, members, pieces):
        total = source[part.start : part.stop].clone()
        for t in range(len(keys)):
            total += part.raw(offset, keys[t], gaussian=False) * part.of(amounts[t])
        out[part.start : part.stop] = total


def add_normals(
    out: Tensor, source: Tensor, offset: int, keys: Any, new: Floats, old: Floats, update: Floats,
    spacing: Floats, dithers: NDArray[np.uint32], members: Any, pieces: Any,
) -> None:  # fmt: skip
    """`dispatch.add_normals`.

    Args:
      out, source, offset, keys, new, old, update, spacing, dithers, members, pieces: as there.
    """
    for part in _parts(out, members, pieces):
        total = source[part.start : part.stop].clone()
        for t in range(len(keys)):
            z = part.raw(offset, keys[t], gaussian=True)
            n = (z * part.of(new[t])).round() - (z * part.of(old[t])).round()
            n += stochastically_rounded(z * part.of(update[t]), part.dither(dithers[t]))
            total += n * part.of(spacing)
        out[part.start : part.stop] = total


def add_rounded(
    out: Tensor, source: Tensor, offset: int, keys: Any, gaussian: bool, coefficients: Floats,
    dithers: NDArray[np.uint32], members: Any, pieces: Any,
) -> None:  # fmt: skip
    """`dispatch.add_rounded`.

    Args:
      out, source, offset, keys, gaussian, coefficients, dithers, members, pieces: as there.
    """
    for part in _parts(out, members, pieces):
        total = source[part.start : part.stop].float()
        for t in range(len(keys)):
            total = total + part.raw(offset, keys[t], gaussian) * float(coefficients[t])
        out[part.start : part.stop] = half_precision(total, part.dither(dithers), out.dtype)


def stochastically_rounded(values: Tensor, dithers: Tensor) -> Tensor:
    """Rounds each value to one of its two neighbouring integers, unbiased to 2^-24.

    Args:
      values: float32, below 2^24 in magnitude.
      dithers: int64 in [0, 2^32), uniform: a value goes up where its fraction exceeds 1 - dither.

    Returns:
      float32 of the same shape.
    """
    below = values.floor()
    uniforms = (dithers >> 8).float() * 2.0**-24
    return below + ((values - below) + uniforms).floor_()


def half_precision(values: Tensor, dithers: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 -> bfloat16 or float16, to either neighbour with probability by distance.

    A random integer below the cut is added to the bits, which are then truncated: unbiased to
    2^-16 (bfloat16) or 2^-13 (float16) of the spacing. float16 saturates at +-65504.

    Args:
      values: float32.
      dithers: int64 in [0, 2^32), uniform.
      dtype: bfloat16 or float16.

    Returns:
      Of that dtype and the same shape.
    """
    if dtype == torch.bfloat16:
        return _cut(values, dithers >> 16, 16).to(dtype)
    magnitude = values.abs().clamp(max=65504.0)
    small = magnitude < 2.0**-14  # where float16 is evenly spaced: round one binade higher
    rounded = _cut(torch.where(small, magnitude + 2.0**-14, magnitude), dithers >> 19, 13)
    rounded = torch.where(small, rounded - 2.0**-14, rounded.clamp(max=65504.0))
    return torch.copysign(rounded, values).to(dtype)


def _cut(values: Tensor, added: Tensor, bits: int) -> Tensor:
    """Adds integers to the float32 bits and clears the lowest `bits` of them."""
    raw = values.contiguous().view(torch.int32) + added.to(torch.int32)
    return raw.bitwise_and_(-(1 << bits)).view(torch.float32)
