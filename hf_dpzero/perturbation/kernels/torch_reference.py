"""The functions of `dispatch` in plain torch: any device, no compiler. The definition of the numbers.

Slower than the compiled versions and equal to them bit for bit: each product and each sum is a
separate float32 operation, in the order written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation.directions import LANES, NORMAL_UNIT, coordinates, dither

_CHUNK = 1 << 18  # elements at a time: a dozen temporaries of that size are made
Floats = NDArray[np.float32]
Unsigned = NDArray[np.uint32]
Pieces = NDArray[np.int64] | Tensor | None
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Members:
    """Several tensors in one flat tensor, each from a multiple of 32 elements on.

    Attributes:
      rows: int32 [ceil(n / 32)], the member that each row of 32 elements belongs to.
      starts: int64 [M], the first element of each member.
    """

    rows: NDArray[np.int32]
    starts: NDArray[np.int64]
    _placed: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns (rows, starts) as tensors on a device, kept for the next call."""
        if device not in self._placed:
            both = torch.from_numpy(self.rows), torch.from_numpy(self.starts)
            self._placed[device] = both[0].to(device), both[1].to(device)
        return self._placed[device]

    @classmethod
    def at(cls, starts: list[int], size: int) -> Members:
        """Makes the members that start at these elements, ascending from 0, of a flat tensor [size]."""
        end = -(-size // LANES) * LANES
        lengths = np.diff([*starts, end]) // LANES
        rows = np.repeat(np.arange(len(starts), dtype=np.int32), lengths)
        return cls(rows, np.array(starts, np.int64))

    def spread(self, values: NDArray[Number], start: int, stop: int) -> NDArray[Number]:
        """Returns each element's own member's value, of values [M], for elements start .. stop."""
        rows = self.rows[start // LANES : -(-stop // LANES)]
        return np.repeat(values[rows], LANES)[: stop - start]


@dataclass(frozen=True, eq=False)
class Parts:
    """Flat tensors of one dtype on one device, each of which is changed where it lies.

    Attributes:
      outs, sources: what is written and what is read, as of one call each; contiguous.
      offsets: index of each one's element 0 in the directions' index space.
      columns: which of a sweep's M tensors each is, or is a part of.
      placed: what a device was sent of it; whoever moves a tensor makes new `Parts`.
    """

    outs: Sequence[Tensor]
    sources: Sequence[Tensor]
    offsets: Sequence[int]
    columns: Sequence[int]
    placed: dict[torch.device, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class Sweep:
    """What is added to each of M tensors along T directions: a function and its arguments.

    `add_signs`, in float32: out = source + sum_t amounts[t, m] u_t, u = +-1.
      numbers: amounts float32 [T, M].
    `add_normals`, in float32: spacing_m sum_t (rint(new z) - rint(old z) + round(update z)) is added.
      numbers: new, old, update float32 [T, M], in units of the grid spacing; the first two are rounded
        to nearest (ties to even), the last stochastically; spacing float32 [M], powers of two; dithers
        uint32 [T, M], where the members' dithers start.
    `add_rounded`, of bfloat16 or float16: sum_t coefficients[t] u_t is added in float32 and rounded
      stochastically. numbers: dithers uint32 [M]; shared: gaussian (normals; False for signs) and
        coefficients float32 [T].

    Attributes:
      name: of the function.
      keys: uint32 [T, 4], the directions' streams (see `directions.stream_key`).
      numbers: the function's arguments that differ between tensors, each [..., M], in order.
      shared: those before them that do not.
      decay: the weight decay in it, if any; before all terms where sums are rounded.
      placed: what a device was sent of it.
    """

    name: str
    keys: Unsigned
    numbers: Sequence[NDArray[Any]]
    shared: tuple[Any, ...] = ()
    decay: Decay | None = None
    placed: dict[torch.device, Any] = field(default_factory=dict, repr=False)

    def of(self, m: int) -> Sweep:
        """Returns what is added to the m-th tensor."""
        # contiguous, for numba compiles anew for other layouts
        own = [np.ascontiguousarray(part[..., m : m + 1]) for part in self.numbers]
        decay = None if self.decay is None else self.decay.of(m)
        return Sweep(self.name, self.keys, own, self.shared, decay)

    def shifted(self, shift: np.uint32) -> Sweep:
        """Returns the same with dithers that start elsewhere."""
        if not shift:
            return self
        *rest, last = self.numbers
        numbers = [*rest, last if self.name == "add_signs" else last + shift]
        decay = self.decay and self.decay._replace(dithers=self.decay.dithers + shift)
        return Sweep(self.name, self.keys, numbers, self.shared, decay)


class Decay(NamedTuple):
    """Weight decay, as a part of a sweep: theta <- (1 - decay) theta, rounded stochastically.

    Attributes:
      after: how many of the sweep's terms come before it, to take off what stands on theta.
      rates: float32 [M]: of grids, -decay in units of the spacing; else the decay.
      spacing: float32 [M], the grids'; not read else.
      dithers: uint32 [M], where the members' dithers start.
    """

    after: int
    rates: Floats
    spacing: Floats
    dithers: Unsigned

    def of(self, m: int) -> Decay:
        """Returns that of the m-th tensor."""
        one = slice(m, m + 1)
        return Decay(self.after, self.rates[one], self.spacing[one], self.dithers[one])


class Part:
    """Elements start .. stop of a flat tensor, with their members' parameters spread over them.

    The first of them is element `first` of its tensor (its segment, under members).
    """

    def __init__(
        self, start: int, stop: int, first: int, members: Members | None, device: torch.device
    ) -> None:
        self.start, self.stop, self.first = start, stop, first
        self.members, self.device = members, device

    def of(self, values: NDArray[Number]) -> Tensor:
        """Returns a parameter [M] for each element; [1] if there is one member."""
        if self.members is not None:
            values = self.members.spread(values, self.start, self.stop)
        return torch.from_numpy(values).to(self.device)

    def dither(self, starts: Unsigned) -> Tensor:
        """Returns the 32-bit dither of each element, int64, from those where members' begin."""
        index = torch.arange(self.first, self.first + self.stop - self.start, device=self.device)
        if self.members is not None:
            index = index - self.of(self.members.starts)
        return dither(self.of(starts.astype(np.int64)), index)

    def raw(self, offset: int, key: Unsigned, gaussian: bool) -> Tensor:
        """Returns the elements' coordinates of a stream, float32."""
        u = coordinates(key, gaussian, offset + self.first, self.stop - self.start)
        values = torch.from_numpy(u).to(self.device).float()
        return values * NORMAL_UNIT if gaussian else values


def _parts(out: Tensor, members: Members | None, pieces: Pieces) -> Iterator[Part]:
    firsts = [0] if pieces is None else [int(piece) for piece in pieces]
    width = out.numel() // len(firsts)
    for piece, first in enumerate(firsts):
        for start in range(0, width, _CHUNK):
            place = piece * width + start, piece * width + min(start + _CHUNK, width)
            yield Part(*place, first + start, members, out.device)


def add_signs(
    added: Sweep, out: Tensor, source: Tensor, offset: int, members: Members | None, pieces: Pieces
) -> None:
    """Defines `add_signs` (see `Sweep`)."""
    [amounts] = added.numbers
    for part in _parts(out, members, pieces):
        total = source[part.start : part.stop].clone()
        for t, key in enumerate(added.keys):
            _decay_(total, part, t, added.decay)
            total += part.raw(offset, key, gaussian=False) * part.of(amounts[t])
        out[part.start : part.stop] = total


def add_normals(
    added: Sweep, out: Tensor, source: Tensor, offset: int, members: Members | None, pieces: Pieces
) -> None:
    """Defines `add_normals` (see `Sweep`)."""
    new, old, update, spacing, dithers = added.numbers
    for part in _parts(out, members, pieces):
        total = source[part.start : part.stop].clone()
        for t, key in enumerate(added.keys):
            _decay_(total, part, t, added.decay)
            z = part.raw(offset, key, gaussian=True)
            n = (z * part.of(new[t])).round() - (z * part.of(old[t])).round()
            n += stochastically_rounded(z * part.of(update[t]), part.dither(dithers[t]))
            total += n * part.of(spacing)
        out[part.start : part.stop] = total


def add_rounded(
    added: Sweep, out: Tensor, source: Tensor, offset: int, members: Members | None, pieces: Pieces
) -> None:
    """Defines `add_rounded` (see `Sweep`)."""
    (gaussian, coefficients), [dithers], decay = added.shared, added.numbers, added.decay
    for part in _parts(out, members, pieces):
        total = source[part.start : part.stop].float()
        if decay is not None:
            left = total - total * part.of(decay.rates)
            total = half_precision(left, part.dither(decay.dithers), out.dtype).float()
        for key, coefficient in zip(added.keys, coefficients, strict=True):
            total = total + part.raw(offset, key, gaussian) * float(coefficient)
        out[part.start : part.stop] = half_precision(total, part.dither(dithers), out.dtype)


def _decay_(values: Tensor, part: Part, t: int, decay: Decay | None) -> None:
    """Makes the decay of float32 values on their grids, if it comes before term t."""
    if decay is not None and t == decay.after:
        steps = stochastically_rounded(values * part.of(decay.rates), part.dither(decay.dithers))
        values += steps * part.of(decay.spacing)


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
    """Rounds float32 to bfloat16 or float16, to either neighbour with probability by distance.

    Unbiased to 2^-16 (bfloat16) or 2^-13 (float16) of the spacing. float16 saturates at +-65504.

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
    # A random integer below the cut is added to the float32 bits, which are then truncated.
    raw = values.contiguous().view(torch.int32) + added.to(torch.int32)
    return raw.bitwise_and_(-(1 << bits)).view(torch.float32)
