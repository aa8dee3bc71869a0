"""Adds multiples of directions to a flat tensor, by the fastest kernels for its device.

Three functions are all that the engine does to parameters: `add_signs`, `add_normals` and
`add_rounded`, of which `perturb_rounded` may do two in one sweep. Each reads an element once, adds its
coordinates of T directions and writes it once, in place or to another tensor. On a CPU they run in
`numba_kernels`, on CUDA in Triton (`triton_launch`), elsewhere in `torch_reference`; the numbers are
the same to the last bit.

Common arguments:
  out, source: flat tensors of one shape, dtype and device; may be the same tensor, else disjoint.
  offset: index of element 0 in the directions' index space, a multiple of 32; any number for one tensor
    (M = 1) without pieces, such as a part of a tensor whose rows lie on several processes.
  keys: uint32 [T, 4], the directions' streams (see `philox.stream_key`).
  members: None if the flat tensor is one tensor (M = 1), or where its M small ones lie.
  pieces: None, or int64 [P]: `out` and `source` hold P equal parts of one tensor (rows of an
    embedding), of which these are the first elements, multiples of 32; `offset` is the tensor's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation.directions import DITHER_STEP, LANES, NORMAL_UNIT
from hf_dpzero.perturbation.kernels import torch_reference

Floats = NDArray[np.float32]
Unsigned = NDArray[np.uint32]
Pieces = NDArray[np.int64] | None

_NORM_CHUNK = 1 << 20
_SAFE_SUM = 1 << 16  # squares below 2^47 that an int64 sum holds


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
        """(rows, starts) as tensors on a device, kept for the next call."""
        if device not in self._placed:
            both = torch.from_numpy(self.rows), torch.from_numpy(self.starts)
            self._placed[device] = both[0].to(device), both[1].to(device)
        return self._placed[device]

    @classmethod
    def at(cls, starts: list[int], size: int) -> Members:
        """The members of a flat tensor.

        Args:
          starts: first element of each, ascending multiples of 32, the first 0.
          size: elements of the flat tensor.

        Returns:
          Their rows and starts.
        """
        end = -(-size // LANES) * LANES
        lengths = np.diff([*starts, end]) // LANES
        rows = np.repeat(np.arange(len(starts), dtype=np.int32), lengths)
        return cls(rows, np.array(starts, np.int64))


def add_signs(
    out: Tensor, source: Tensor, offset: int, keys: Unsigned, amounts: Floats,
    members: Members | None = None, pieces: Pieces = None,
) -> None:  # fmt: skip
    """out = source + sum_t amounts[t, m] u_t, u = +-1, in float32.

    Args:
      out, source, offset, keys, members, pieces: see above.
      amounts: float32 [T, M].
    """
    backend, where = _backend(out.device, members)

    def add(out: Tensor, source: Tensor, offset: int, shift: int) -> None:
        backend.add_signs(out, source, offset, keys, amounts, where, pieces)

    _in_rows(add, out, source, offset)


def add_normals(
    out: Tensor, source: Tensor, offset: int, keys: Unsigned, new: Floats, old: Floats,
    update: Floats, spacing: Floats, dithers: Unsigned,
    members: Members | None = None, pieces: Pieces = None,
) -> None:  # fmt: skip
    """out = source + spacing_m sum_t (rint(new z) - rint(old z) + round(update z)), in float32.

    Args:
      out, source, offset, keys, members, pieces: see above.
      new, old, update: float32 [T, M], coefficients in units of the grid spacing; the first two are
        rounded to nearest (ties to even), the last stochastically.
      spacing: float32 [M], powers of two.
      dithers: uint32 [T, M], where the members' dithers start.
    """
    backend, where = _backend(out.device, members)
    rest = (keys, new, old, update, spacing)

    def add(out: Tensor, source: Tensor, offset: int, shift: int) -> None:
        moved = dithers + np.uint32(shift * DITHER_STEP % 2**32)
        backend.add_normals(out, source, offset, *rest, moved, where, pieces)

    _in_rows(add, out, source, offset)


def add_rounded(
    out: Tensor, source: Tensor, offset: int, keys: Unsigned, gaussian: bool, coefficients: Floats,
    dithers: Unsigned, members: Members | None = None, pieces: Pieces = None,
) -> None:  # fmt: skip
    """out = source + sum_t coefficients[t] u_t, added in float32, rounded stochastically.

    Args:
      out, source: bfloat16 or float16; else as above.
      offset, keys, members, pieces: see above.
      gaussian: normals; False for signs.
      coefficients: float32 [T].
      dithers: uint32 [M], where the members' dithers start.
    """
    backend, where = _backend(out.device, members)
    rest = (keys, gaussian, coefficients)

    def add(out: Tensor, source: Tensor, offset: int, shift: int) -> None:
        moved = dithers + np.uint32(shift * DITHER_STEP % 2**32)
        backend.add_rounded(out, source, offset, *rest, moved, where, pieces)

    _in_rows(add, out, source, offset)


class Terms(NamedTuple):
    """What `add_rounded` adds, as its arguments: sum_t coefficients[t] u_t, rounded with dithers."""

    keys: Unsigned
    gaussian: bool
    coefficients: Floats
    dithers: Unsigned


def perturb_rounded(
    out: Tensor, settled: Tensor, offset: int, new: Terms, update: Terms | None = None,
    members: Members | None = None,
) -> int:  # fmt: skip
    """settled += the update, if any; then out = settled + the new terms, each as by `add_rounded`.

    One sweep over memory where it is compiled for the CPU, which writes a large `out` past the caches:
    what reads it should come after more than they hold. Elsewhere one sweep for each.

    Args:
      out, settled: bfloat16 or float16, disjoint; else as above.
      offset, members: see above.
      new, update: what is added, both of one kind.

    Returns:
      Bytes of `out` and `settled` that are read and written.
    """
    backend, where = _backend(out.device, members)
    at_once = getattr(backend, "perturb_rounded", None)
    if at_once is not None and offset % LANES == 0:
        at_once(out, settled, offset, new, update, where)
        return (2 if update is None else 3) * out.nbytes
    if update is not None:
        add_rounded(settled, settled, offset, *update, members)
    add_rounded(out, settled, offset, *new, members)
    return (2 if update is None else 4) * out.nbytes


def together() -> contextlib.AbstractContextManager[None]:
    """On a CPU, `perturb_rounded` inside may be done at its end, by threads that start once for all.

    Each call must write to other memory than the others read and write, and its result must not be read
    before the end.
    """
    compiled = _cpu_kernels()
    return contextlib.nullcontext() if compiled is None else compiled.together()


def _in_rows(
    add: Callable[[Tensor, Tensor, int, int], None], out: Tensor, source: Tensor, offset: int
) -> None:
    """add(out, source, offset, 0); in two calls where the first element does not begin a row of 32.

    Kernels take whole rows. The few elements before the first whole one are worked on in a row of
    their own.

    Args:
      add: (out, source, offset, by how many elements its element 0 lies behind `out`'s).
      out, source, offset: as above.
    """
    lead = offset % LANES
    if lead == 0:
        return add(out, source, offset, 0)
    head = min(LANES - lead, out.numel())
    row = source.new_zeros(LANES)
    row[lead : lead + head] = source[:head]
    rest = source[head:], offset + head
    add(row, row, offset - lead, -lead)
    out[:head] = row[lead : lead + head]
    add(out[head:], *rest, head)


def coordinates(
    key: Unsigned, gaussian: bool, start: int, count: int, device: torch.device
) -> Tensor:
    """Raw coordinates of a stream, exact.

    Args:
      key: uint32 [4].
      gaussian: normals; False for signs.
      start: first index, any.
      count: how many.
      device: where they are made and left.

    Returns:
      float32 [count].
    """
    lead = start % LANES
    out = torch.zeros(lead + count, device=device)
    keys, one, zero = key[None], np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32)
    if gaussian:
        unit = np.float32(NORMAL_UNIT)
        rest = (one / unit, zero, zero, unit * one[0], np.zeros((1, 1), np.uint32))
        add_normals(out, out, start - lead, keys, *rest)
    else:
        add_signs(out, out, start - lead, keys, one)
    return out[lead:]


def sum_of_squared_normals(key: Unsigned, start: int, count: int, device: torch.device) -> int:
    """`directions.sum_of_squared_normals`, computed on a device.

    Args:
      key, start, count: as there.
      device: where the coordinates are made.

    Returns:
      The sum in units of 2^-42, exact.
    """
    compiled = _cpu_kernels() if device.type == "cpu" else None
    if compiled is not None:
        return compiled.sum_of_squared_normals(key, start, count)
    total = 0
    for first in range(start, start + count, _NORM_CHUNK):
        z = coordinates(key, True, first, min(_NORM_CHUNK, start + count - first), device)
        squares = (z / NORMAL_UNIT).long().square_()
        total += sum(int(part.sum()) for part in squares.split(_SAFE_SUM))
    return total


def _backend(device: torch.device, members: Members | None) -> tuple[Any, Any]:
    """The fastest module for a device, and the members as it takes them."""
    if device.type == "cpu":
        return _cpu_kernels() or torch_reference, members
    triton_launch = _cuda_kernels(device) if device.type == "cuda" else None
    if triton_launch is None:
        return torch_reference, members
    return triton_launch, None if members is None else members.on(device)


@functools.cache
def _cpu_kernels() -> Any:
    try:
        from hf_dpzero.perturbation.kernels import numba_kernels
    except ImportError:
        return None
    return numba_kernels


@functools.cache
def _cuda_kernels(device: torch.device) -> Any:
    from hf_dpzero.perturbation.kernels import triton_launch

    return triton_launch if triton_launch.available(device) else None
