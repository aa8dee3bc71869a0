"""Which coordinates of a tensor move: those of smallest magnitude, found without a copy of it."""

from __future__ import annotations

import base64
import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 18  # elements looked at, at a time
_LOW_BITS = 15  # a magnitude's 31 bits are found in two parts
_NOTHING = 0x7FFFFFFF  # the bits of a magnitude


def count_of(size: int, density: float) -> int:
    """ceil(density * size), the density taken as the decimal number that it is written as.

    >>> count_of(100, 0.07), count_of(0, 0.5), count_of(3, 1e-9)
    (7, 0, 1)
    """
    return math.ceil(Fraction(repr(float(density))) * size)


@torch.no_grad()
def smallest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` elements of smallest magnitude, ascending; of equals the first ones.

    Magnitudes are compared by their bits, so that every device chooses the same; -0 is +0. Beside
    the result, a few MB of memory.

    Args:
      values: float32, finite, one row.
      count: 0 .. values.numel().

    Returns:
      int32 [count] (int64 for 2^31 elements and more), on the device of `values`.

    >>> smallest(torch.tensor([3.0, -1.0, 0.5, 1.0]), 2).tolist()
    [1, 2]
    """
    threshold, ties = _threshold(values, count)
    found = torch.empty(count, dtype=index_dtype(values.numel()), device=values.device)
    filled = 0
    for start, bits in _magnitudes(values):
        equal = bits == threshold
        equal &= equal.cumsum(0) <= ties
        ties -= int(equal.sum())
        index = (equal | (bits < threshold)).nonzero().view(-1) + start
        found[filled : filled + index.numel()] = index
        filled += index.numel()
    return found


def index_dtype(size: int) -> torch.dtype:
    """What holds an index below `size`."""
    return torch.int32 if size <= 1 << 31 else torch.int64


def _magnitudes(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first index, bits of |values|, int32) of every chunk; ordered as the magnitudes are."""
    for start in range(0, values.numel(), CHUNK):
        yield start, values[start : start + CHUNK].view(torch.int32) & _NOTHING


def _threshold(values: Tensor, count: int) -> tuple[int, int]:
    """(bits of the count-th smallest magnitude, how many elements that equal it are needed)."""
    if count == 0:
        return 0, 0
    high, before = _bin_of(_counts(values, lambda bits: bits >> _LOW_BITS), count)

    def low_bits(bits: Tensor) -> Tensor:
        return bits[bits >> _LOW_BITS == high] & ((1 << _LOW_BITS) - 1)

    low, below = _bin_of(_counts(values, low_bits), count - before)
    return high << _LOW_BITS | low, count - before - below


def _counts(values: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """How often part(bits) takes each of 2^16 values, int64 [2^16] on the CPU."""
    total = torch.zeros(1 << 16, dtype=torch.int64, device=values.device)
    for _, bits in _magnitudes(values):
        total += torch.bincount(part(bits), minlength=1 << 16)
    return total.cpu()


def _bin_of(counts: Tensor, place: int) -> tuple[int, int]:
    """(the bin that holds the place-th smallest, counted from 1, how many lie in bins before it)."""
    upto = counts.cumsum(0)
    found = int(torch.searchsorted(upto, place))
    return found, int(upto[found] - counts[found])


# ---------------------------------------------------------------- as text


def digest(masks: Iterable[tuple[str, int, Tensor]]) -> str:
    """SHA-256 (hex) over name, size and chosen indices of every tensor."""
    sha = hashlib.sha256()
    for name, size, indices in masks:
        sha.update(f"{name}|{size}|{indices.numel()}|".encode())
        for part in indices.split(CHUNK):
            sha.update(part.cpu().numpy().astype("<i8").tobytes())
    return sha.hexdigest()


def to_text(indices: Tensor, size: int) -> str:
    """The mask of `size` elements, a bit for each, compressed, base64: at most size / 6 characters."""
    chosen = np.zeros(size, np.bool_)
    chosen[indices.cpu().numpy()] = True
    return base64.b64encode(zlib.compress(np.packbits(chosen).tobytes(), level=1)).decode()


def from_text(text: str, size: int) -> Tensor:
    """Undoes `to_text`: the indices on the CPU, ascending, of `index_dtype`.

    Raises:
      ValueError: not a mask of `size` elements.
    """
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"is not a mask ({error})") from None
    if len(packed) != -(-size // 8):
        raise ValueError(f"is a mask of {len(packed)} bytes, not one of {size} elements")
    chosen = np.unpackbits(np.frombuffer(packed, np.uint8), count=size)
    return torch.from_numpy(np.flatnonzero(chosen)).to(index_dtype(size))
