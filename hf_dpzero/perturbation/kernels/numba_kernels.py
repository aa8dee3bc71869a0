# mypy: disable-error-code="no-untyped-def"
"""Compiled CPU kernels (numba): generate a direction and add it, in one sweep over memory.

The same numbers as `torch_reference`, to the last bit: integer arithmetic, and float32 products and
sums that are each rounded on their own (numba does not contract them). A coordinate is read once and
written once; nothing of parameter size is allocated. Threads take contiguous parts, so their number
does not matter to the result.
"""

from __future__ import annotations

import functools
from typing import Any

import numba as nb
import numpy as np
from torch import Tensor

from hf_dpzero.perturbation import directions
from hf_dpzero.perturbation.directions import LANES
from hf_dpzero.perturbation.kernels.numba_rounded import add_rounded, perturb_rounded
from hf_dpzero.perturbation.kernels.numba_tiles import (
    TILE,
    UNIT,
    add_signs_to_tile,
    arrays,
    copy,
    end_of_member,
    fill_words,
    in_parallel,
    normal_cells,
    normals,
    together,
)

__all__ = [
    "add_normals",
    "add_rounded",
    "add_signs",
    "perturb_rounded",
    "sum_of_squared_normals",
    "together",
]

_jit = nb.njit(nogil=True, cache=True)
_u32, _u64, _f32 = np.uint32, np.uint64, np.float32
_STEP, _ROWS = _u32(directions.DITHER_STEP), TILE // LANES


@_jit
def _move_normals(out, source, z, new, old, spacing):
    for e in range(out.size):
        n = _f32(np.rint(z[e] * new)) - _f32(np.rint(z[e] * old))
        out[e] = source[e] + (n + _f32(0)) * spacing  # the update that is 0: -0 becomes +0


@_jit
def _update_normals(out, source, z, new, old, update, spacing, dither):
    unit = _f32(2.0**-24)
    for e in range(out.size):
        y = z[e] * update
        below = _f32(np.floor(y))
        uniform = _f32(np.int32(_u32(dither + _u32(e) * _STEP) >> _u32(8))) * unit
        n = _f32(np.rint(z[e] * new)) - _f32(np.rint(z[e] * old))
        out[e] = source[e] + (n + (below + _f32(np.floor((y - below) + uniform)))) * spacing


@_jit
def _row_amounts(amounts, row_amounts, rows, first):
    """The amount of each of a tile's 128 rows, the flat tensor's rows first, first + 1, ..."""
    if rows.size == 0:
        row_amounts[:] = amounts[0]
        return
    begin, end = max(0, -first), min(_ROWS, rows.size - first)
    here, inside = rows[first + begin : first + end], row_amounts[begin:end]
    for r in range(here.size):
        inside[r] = amounts[_u32(here[r])]


@_jit
def _signs_range(out, source, offset, keys, amounts, rows, begin, end):
    first, second = np.zeros(TILE, _f32), np.zeros(TILE, _f32)
    words, row_amounts = np.empty((4, LANES), _u32), np.zeros(_ROWS, _f32)
    e = begin
    while e < end:
        tile, shift = (offset + e) // TILE, (offset + e) % TILE
        count = min(TILE - shift, end - e)
        whole = count == TILE
        if not whole:
            copy(first[shift : shift + count], source[e : e + count])
        for t in range(keys.shape[0]):
            fill_words(words, LANES, _u64(tile * LANES), keys[t])
            _row_amounts(amounts[t], row_amounts, rows, (e - shift) // LANES)
            given = source[e : e + count] if whole and t == 0 else first
            add_signs_to_tile(second, given, words, row_amounts)
            first, second = second, first
        copy(out[e : e + count], first[shift : shift + count])
        e += count


@_jit
def _normals_range(
    out, source, offset, keys, new, old, update, spacing, dithers, starts, rows, table, begin, end
):
    first, second = np.empty(TILE, _f32), np.empty(TILE, _f32)
    z_buffer, words = np.empty(TILE + 128, _f32), np.empty((4, TILE // 4 + 32), _u32)
    e = begin
    while e < end:
        m = rows[e // 32] if rows.size else 0
        count = min(TILE, end_of_member(rows, e, min(end, e + TILE)) - e)
        copy(first[:count], source[e : e + count])
        for t in range(keys.shape[0]):
            z = normals(z_buffer, words, offset + e, count, keys[t], table)
            target, given = second[:count], first[:count]
            if update[t, m] == _f32(0):
                _move_normals(target, given, z, new[t, m], old[t, m], spacing[m])
            else:
                d = _u32(dithers[t, m] + _u32(e - starts[m]) * _STEP)
                _update_normals(target, given, z, new[t, m], old[t, m], update[t, m], spacing[m], d)
            first, second = second, first
        copy(out[e : e + count], first[:count])
        e += count


@_jit
def _squares_range(first, key, table, begin, end):
    """(low, high) with low + 2^32 high = the sum of squares, in units of 2^-42; exact."""
    z_buffer, words = np.empty(TILE + 128, _f32), np.empty((4, TILE // 4 + 32), _u32)
    low, high, e = np.int64(0), np.int64(0), begin
    while e < end:
        count = min(TILE, end - e)
        z = normals(z_buffer, words, first + e, count, key, table)
        total = np.int64(0)  # 4096 squares below 2^48
        for i in range(count):
            n = np.int64(z[i] / UNIT)
            total += n * n
        low += total & np.int64(0xFFFFFFFF)
        high += total >> np.int64(32)
        e += count
    return low, high


@_jit
def _signs_pieces(out, source, offset, firsts, keys, amounts, rows):
    end = out.shape[1]
    for p in range(firsts.size):
        _signs_range(out[p], source[p], offset + firsts[p], keys, amounts, rows, 0, end)


@_jit
def _normals_pieces(
    out, source, offset, firsts, keys, new, old, update, spacing, dithers, rows, table
):
    for p in range(firsts.size):
        _normals_range(
            out[p], source[p], offset + firsts[p], keys, new, old, update, spacing, dithers,
            -firsts[p : p + 1], rows, table, 0, out.shape[1],
        )  # fmt: skip


def sum_of_squared_normals(key: Any, start: int, count: int) -> int:
    """`directions.sum_of_squared_normals`.

    Args:
      key, start, count: as there.

    Returns:
      The sum in units of 2^-42, exact.
    """
    sums: list[int] = []  # integers: their order does not matter

    def work(begin: int, end: int) -> None:
        low, high = _squares_range(start, key, normal_cells(), begin, end)
        sums.append(int(low) + (int(high) << 32))

    in_parallel(work, count, start % TILE)
    return sum(sums)


def add_signs(
    out: Tensor, source: Tensor, offset: int, keys: Any, amounts: Any, members: Any, pieces: Any
) -> None:
    """`dispatch.add_signs`.

    Args:
      out, source, offset, keys, amounts, members, pieces: as there.
    """
    flat, given, _, rows = arrays(out, source, members, pieces)
    if pieces is not None:
        return _signs_pieces(flat, given, offset, pieces, keys, amounts, rows)
    work = functools.partial(_signs_range, flat, given, offset, keys, amounts, rows)
    in_parallel(work, flat.size, offset % TILE)


def add_normals(
    out: Tensor, source: Tensor, offset: int, keys: Any, new: Any, old: Any, update: Any,
    spacing: Any, dithers: Any, members: Any, pieces: Any,
) -> None:  # fmt: skip
    """`dispatch.add_normals`.

    Args:
      out, source, offset, keys, new, old, update, spacing, dithers, members, pieces: as there.
    """
    flat, given, starts, rows = arrays(out, source, members, pieces)
    rest = (keys, new, old, update, spacing, dithers)
    if pieces is not None:
        return _normals_pieces(flat, given, offset, pieces, *rest, rows, normal_cells())
    work = functools.partial(
        _normals_range, flat, given, offset, *rest, starts, rows, normal_cells()
    )
    in_parallel(work, flat.size, offset % TILE)
