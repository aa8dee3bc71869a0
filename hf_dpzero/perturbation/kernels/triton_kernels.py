"""Launches the Triton kernel of `triton_device` for the functions of `dispatch`.

Loading this module imports Triton; `dispatch` does so where a kernel is first needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation import directions
from hf_dpzero.perturbation.directions import Places
from hf_dpzero.perturbation.kernels.torch_reference import (
    Members,
    Parts,
    Pieces,
    Sweep,
    Unsigned,
)
from hf_dpzero.perturbation.kernels.triton_device import ALIGNMENT, PART_FIELDS, squares, walk

SIGNS_WARPS, NORMALS_WARPS = 4, 8
"""Warps of a program, which owns 4096 coordinates. Every warp of signs computes the same 32 Philox
calls, so fewer warps do less; normals have a call for every 4 coordinates, and with 4 warps more
live values than a thread of compute capability 9.0 has registers (the compiler spills)."""

_PROGRAMS = 2048  # that share the tiles of a norm
Fields = Sequence[NDArray[np.generic]]
_NO_WORDS = [0] * (4 + 5)  # a term's key and numbers, where they are in a table
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `ROUND` of the kernel


class _Variant(NamedTuple):
    """Which of the kernel's variants: see `walk`."""

    gaussian: bool
    grid: bool = False
    update: bool = False
    rounded: bool = False
    decay: int = 0


def add_each(added: Sweep, parts: Parts) -> None:
    """Computes `dispatch.sweep_each` in one launch, or two where some sizes are no multiples of 32.

    What varies with the sweep and what varies with the parts is sent to the device once for each.
    """
    device, dtype = parts.outs[0].device, parts.outs[0].dtype
    shape = len(added.keys), added.numbers[-1].shape[-1]
    if device not in added.placed:
        variant, fields = _variant_of(added)
        added.placed[device] = variant, _sent(_table(added.keys, fields, shape), device)
    if device not in parts.placed:
        parts.placed[device] = _groups(parts, device)
    variant, table = added.placed[device]
    for group in parts.placed[device]:
        _walk(
            variant, dtype, group.programs, None, None, table, None, None, None, group.parts,
            group.owners, shape, 0, 0, 0, _NO_WORDS, _after(added), group.even, group.aligned,
        )  # fmt: skip


def sum_of_squared_normals(key: Unsigned, places: Places, device: torch.device) -> int:
    """Computes `directions.sum_of_squared_normals`; waits for the device once."""
    runs: list[list[int]] = []
    gaps: list[tuple[int, int]] = []  # of less than a row, between tensors: subtracted
    for start, count in places:
        gap = start - runs[-1][1] if runs else -1
        if 0 <= gap < directions.LANES:
            gaps.append((start - gap, gap))
            runs[-1][1] = start + count
        else:
            runs.append([start, start + count])
    halves = torch.zeros(2, dtype=torch.int64, device=device)
    for start, stop in runs:
        tile, begin = divmod(start, directions.SIGNS_TILE)
        end = begin + stop - start
        tiles = -(-end // directions.SIGNS_TILE)
        programs = min(tiles, max(_PROGRAMS, tiles >> 12))
        sums = torch.empty(programs, 1024, dtype=torch.int64, device=device)
        words = key.view(np.int32).tolist()
        with _on(device):
            squares[(programs,)](
                sums, _tables(device), tile, tiles, begin, end, *words, num_warps=NORMALS_WARPS
            )
        halves += torch.stack([(sums & 0xFFFFFFFF).sum(), (sums >> 32).sum()])
    low, high = halves.tolist()
    return int(low) + (int(high) << 32) - directions.sum_of_squared_normals(key, gaps)


class Group(NamedTuple):
    """Parts that one launch works on, on the device: see `walk`."""

    programs: tuple[int]
    parts: Tensor
    owners: Tensor
    even: bool
    aligned: bool


def _groups(parts: Parts, device: torch.device) -> list[Group]:
    counts = np.array([out.numel() for out in parts.outs], np.int64)
    offsets = np.array(parts.offsets, np.int64)
    assert not (offsets % directions.LANES).any(), "parts start at multiples of 32"
    assert all(t.is_contiguous() for t in (*parts.outs, *parts.sources)), "parts are contiguous"
    entries = np.zeros((len(counts), PART_FIELDS.value), np.int64)
    entries[:, 0] = [out.data_ptr() for out in parts.outs]
    entries[:, 1] = [source.data_ptr() for source in parts.sources]
    entries[:, 2], entries[:, 3], entries[:, 5] = offsets, counts, parts.columns
    tile = directions.SIGNS_TILE
    programs = -(-(offsets % tile + counts) // tile)
    groups = []
    for even in (True, False):
        chosen = np.flatnonzero((counts % directions.LANES == 0) == even)
        chosen = chosen[counts[chosen] > 0]
        if chosen.size:
            own, each = entries[chosen], programs[chosen]
            own[:, 4] = np.cumsum(each) - each
            owners = np.repeat(np.arange(len(chosen), dtype=np.int32), each)
            entry, owner = (_sent(torch.from_numpy(array), device) for array in (own, owners))
            aligned = not (own[:, :2] % ALIGNMENT.value).any()
            groups.append(Group((len(owners),), entry, owner, even, aligned))
    return groups


def _variant_of(added: Sweep) -> tuple[_Variant, Fields]:
    """The kernel's variant and its fields, each of which broadcasts to [T, M]."""
    variant, fields = _Variant(gaussian=False), [*added.numbers]
    if added.name == "add_normals":
        variant = _Variant(gaussian=True, grid=True, update=bool(np.any(added.numbers[2])))
    elif added.name == "add_rounded":
        gaussian, coefficients = added.shared
        variant, fields = _Variant(gaussian, rounded=True), [coefficients[:, None], *fields]
    if added.decay is None:
        return variant, fields
    return variant._replace(decay=len(fields)), [*fields, *added.decay[1:]]


def _after(added: Sweep) -> int:
    return 0 if added.decay is None else added.decay.after


def add(
    added: Sweep, out: Tensor, source: Tensor, offset: int, members: Members | None, pieces: Pieces
) -> None:
    """Computes the function of `torch_reference` that the sweep names."""
    assert (out.dtype == torch.float32) == (added.name != "add_rounded")
    device, count, lanes, owned = out.device, out.numel(), directions.LANES, directions.SIGNS_TILE
    assert out.is_contiguous() and source.is_contiguous(), "flat tensors are contiguous"
    assert (source.shape, source.dtype, source.device) == (out.shape, out.dtype, device)
    assert offset >= 0 and offset % lanes == 0, "tensors start at multiples of 32"
    assert members is None or len(members.rows) == -(-count // lanes), "a member for each row"
    assert members is None or pieces is None, "pieces are of one tensor"
    assert pieces is None or (len(pieces) and count % len(pieces) == 0), "equal pieces"
    if not count:
        return
    variant, fields = _variant_of(added)
    shape = (len(added.keys), 1 if members is None else len(members.starts))
    table = _table(added.keys, fields, shape)
    single = shape == (1, 1) and members is None and not variant.decay
    # What varies travels as arguments where there is one term and one tensor, else as a pinned table.
    words = table.tolist() if single else []
    words += _NO_WORDS[len(words) :]
    sent = None if single else _sent(table, device)
    rows, starts = (None, None) if members is None else members.on(device)
    firsts = torch.from_numpy(pieces) if isinstance(pieces, np.ndarray) else pieces
    firsts = None if firsts is None else _sent(firsts, device)
    first_tile, lead = int(offset) // owned, int(offset) % owned // lanes
    # A program for every tile that the tensor, or each of its pieces, touches.
    grid: tuple[int, ...] = (-(-(lead * lanes + count) // owned),)
    if pieces is not None:
        count //= len(pieces)
        grid = len(pieces), -(-(owned - lanes + count) // owned)
    _walk(
        variant, out.dtype, grid, _raw(out), _raw(source), sent, rows, starts, firsts, None, None,
        shape, count, first_tile, lead, words, _after(added), count % lanes == 0, False,
    )  # fmt: skip


add_signs = add_normals = add_rounded = add


def _table(keys: Unsigned, fields: Fields, shape: tuple[int, int]) -> Tensor:
    """The kernel's table: int32 bits of the keys and then of each field."""
    assert len(keys), "at least one term"
    parts = [keys.reshape(-1), *(np.broadcast_to(f, shape).reshape(-1) for f in fields)]
    assert all(part.itemsize == 4 for part in parts), "float32 and uint32 numbers"
    return torch.from_numpy(np.concatenate([part.view(np.int32) for part in parts]))


def _walk(
    variant: _Variant, dtype: torch.dtype, grid: tuple[int, ...],
    out: Tensor | None, source: Tensor | None, table: Tensor | None,
    rows: Tensor | None, starts: Tensor | None, pieces: Tensor | None,
    parts: Tensor | None, owners: Tensor | None, shape: tuple[int, int],
    count: int, first_tile: int, lead: int, words: list[int], after: int, even: bool, aligned: bool,
) -> None:  # fmt: skip
    """The launch itself, on the device of what is written."""
    device = next(t for t in (out, parts) if t is not None).device
    with _on(device):
        walk[grid](
            out, source, table, rows, starts, pieces, parts, owners,
            _tables(device) if variant.gaussian else None,
            *shape, count, first_tile, lead, *words, after,
            GAUSSIAN=variant.gaussian, GRID=variant.grid, UPDATE=variant.update, DECAY=variant.decay,
            ROUND=_CODES[dtype] if variant.rounded else 0, EVEN=even, ALIGNED=aligned,
            num_warps=NORMALS_WARPS if variant.gaussian else SIGNS_WARPS, num_stages=1,
            enable_fp_fusion=False,
        )  # fmt: skip


def _on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes a device the current one, where it is not: that takes microseconds of a launch."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without waiting for it: from pinned memory, in order with its stream."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _raw(tensor: Tensor) -> Tensor:
    """bfloat16 as its bits: the kernel shifts them, on every backend alike."""
    return tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()


@functools.cache
def _tables(device: torch.device) -> Tensor:
    """The normals' tables, int64 [766] on `device`: center << 32 | half, so one load has both."""
    center, half = (table.astype(np.int64) for table in directions.normal_tables())
    return _sent(torch.from_numpy(center << 32 | (half & 0xFFFFFFFF)), device)
