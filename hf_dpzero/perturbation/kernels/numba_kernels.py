# mypy: disable-error-code="no-untyped-def,call-arg"
"""Compiled CPU kernels (numba): generate a direction and add it, in one sweep over memory.

The same numbers as `torch_reference`, to the last bit: integer arithmetic, and float32 products and
sums that are each rounded on their own (numba does not contract them). A coordinate is read once and
written once; nothing of parameter size is allocated.
"""

from __future__ import annotations

import functools

import numba as nb
import numpy as np
import torch
from torch import Tensor

from hf_dpzero.perturbation.directions import DITHER_STEP, LANES
from hf_dpzero.perturbation.kernels.numba_tiles import (
    LINE,
    TILE,
    UNIT,
    add_scaled,
    add_signs_to_tile,
    arrays,
    copy,
    end_of_member,
    fence,
    fill_words,
    in_parallel,
    load_bfloat16,
    load_float16,
    normal_cells,
    normals,
    part_lanes,
    round_signs_bfloat16,
    store_bfloat16,
    store_float16,
    together,
)
from hf_dpzero.perturbation.kernels.torch_reference import Floats, Members, Pieces, Terms, Unsigned

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
_STEP, _ROWS = _u32(DITHER_STEP), TILE // LANES
_LARGE = 1 << 17  # coordinates that caches would hardly hold until they are read


# ---------------------------------------------------------------- float32


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


def sum_of_squared_normals(key: Unsigned, start: int, count: int) -> int:
    """Computes `directions.sum_of_squared_normals`."""
    sums: list[int] = []  # integers: their order does not matter

    def work(begin: int, end: int) -> None:
        low, high = _squares_range(start, key, normal_cells(), begin, end)
        sums.append(int(low) + (int(high) << 32))

    in_parallel(work, count, start % TILE)
    return sum(sums)


def add_signs(
    out: Tensor, source: Tensor, offset: int, keys: Unsigned, amounts: Floats,
    members: Members | None, pieces: Pieces,
) -> None:  # fmt: skip
    """Computes `dispatch.add_signs`."""
    flat, given, _, rows = arrays(out, source, members, pieces)
    if pieces is not None:
        return _signs_pieces(flat, given, offset, pieces, keys, amounts, rows)
    work = functools.partial(_signs_range, flat, given, offset, keys, amounts, rows)
    in_parallel(work, flat.size, offset % TILE)


def add_normals(
    out: Tensor, source: Tensor, offset: int, keys: Unsigned, new: Floats, old: Floats,
    update: Floats, spacing: Floats, dithers: Unsigned, members: Members | None, pieces: Pieces,
) -> None:  # fmt: skip
    """Computes `dispatch.add_normals`."""
    flat, given, starts, rows = arrays(out, source, members, pieces)
    rest = (keys, new, old, update, spacing, dithers)
    if pieces is not None:
        return _normals_pieces(flat, given, offset, pieces, *rest, rows, normal_cells())
    work = functools.partial(
        _normals_range, flat, given, offset, *rest, starts, rows, normal_cells()
    )
    in_parallel(work, flat.size, offset % TILE)


# ---------------------------------------------------------------- bfloat16 and float16


@_jit
def _sum_tile(
    out, source, begin, stop, offset, keys, gaussian, coefficients, dithers, starts, rows, is_half,
    table, values, scratch, z_buffer, words, sign_words, row_amounts,
):  # fmt: skip
    """out = source + the terms, rounded, for elements begin .. stop, all in one of the signs' tiles."""
    bits, scratch_bits = values.view(_u32), scratch.view(_u32)
    tile, shift = (offset + begin) // TILE, (offset + begin) % TILE
    count = stop - begin
    here = slice(shift, shift + count)
    if is_half:
        load_float16(values[here], scratch[here], scratch_bits[here], source[begin:stop])
    else:
        load_bfloat16(bits[here], source[begin:stop])
    for t in range(keys.shape[0]):
        if gaussian:
            z = normals(z_buffer, words, offset + begin, count, keys[t], table)
            add_scaled(scratch[here], values[here], z, coefficients[t])
        else:
            row_amounts[:] = coefficients[t]
            fill_words(sign_words, LANES, _u64(tile * LANES), keys[t])
            add_signs_to_tile(scratch, values, sign_words, row_amounts)
        values, scratch = scratch, values
        bits, scratch_bits = scratch_bits, bits
    e = begin
    while e < stop:
        m, upto = rows[e // 32] if rows.size else 0, end_of_member(rows, e, stop)
        d = _u32(dithers[m] + _u32(e - starts[m]) * _STEP)
        here = slice(shift, shift + upto - e)
        if is_half:
            store_float16(
                out[e:upto], values[here], bits[here], scratch[here], scratch_bits[here], d
            )
        else:
            store_bfloat16(out[e:upto], bits[here], d)
        shift += upto - e
        e = upto


@_jit
def _is_plain(keys, gaussian, rows, is_half):
    return rows.size == 0 and keys.shape[0] == 1 and not gaussian and not is_half


@_jit
def _rounded_range(
    out, source, offset, keys, gaussian, coefficients, dithers, starts, rows, is_half, table, streamed,
    begin, end,
):  # fmt: skip
    values, scratch = np.zeros(TILE, _f32), np.zeros(TILE, _f32)
    z_buffer, words = np.empty(TILE + 128, _f32), np.empty((4, TILE // 4 + 32), _u32)
    sign_words, parted = np.empty((4, LANES), _u32), np.empty((4, LANES), _u32)
    row_amounts, plain = np.empty(128, _f32), _is_plain(keys, gaussian, rows, is_half)
    key, amount, dither = keys[0], coefficients[0], dithers[0]
    e = begin
    while e < end:
        stop = min(e + TILE - (offset + e) % TILE, end)
        if plain and stop - e == TILE:
            fill_words(sign_words, LANES, _u64((offset + e) // TILE * LANES), key)
            part_lanes(parted, sign_words)
            d = _u32(dither + _u32(e - starts[0]) * _STEP)
            round_signs_bfloat16(out, source, e, parted, amount, d, streamed)
        else:
            _sum_tile(
                out, source, e, stop, offset, keys, gaussian, coefficients, dithers, starts, rows,
                is_half, table, values, scratch, z_buffer, words, sign_words, row_amounts,
            )  # fmt: skip
        e = stop
    if streamed:
        fence()


@_jit
def _updated_range(
    out, settled, offset, keys, gaussian, coefficients, dithers, new_keys, new_gaussian,
    new_coefficients, new_dithers, starts, rows, is_half, table, streamed, begin, end,
):  # fmt: skip
    """The update's tile is still in the cache when the perturbation reads it."""
    values, scratch = np.zeros(TILE, _f32), np.zeros(TILE, _f32)
    z_buffer, words = np.empty(TILE + 128, _f32), np.empty((4, TILE // 4 + 32), _u32)
    sign_words, parted = np.empty((4, LANES), _u32), np.empty((4, LANES), _u32)
    row_amounts, plain = np.empty(128, _f32), _is_plain(keys, gaussian, rows, is_half)
    plain = plain and _is_plain(new_keys, new_gaussian, rows, is_half)
    key, amount, dither = keys[0], coefficients[0], dithers[0]
    new_key, new_amount, new_dither = new_keys[0], new_coefficients[0], new_dithers[0]
    e = begin
    while e < end:
        stop = min(e + TILE - (offset + e) % TILE, end)
        if plain and stop - e == TILE:
            call, moved = _u64((offset + e) // TILE * LANES), _u32(e - starts[0]) * _STEP
            fill_words(sign_words, LANES, call, key)
            part_lanes(parted, sign_words)
            round_signs_bfloat16(settled, settled, e, parted, amount, _u32(dither + moved), False)
            fill_words(sign_words, LANES, call, new_key)
            part_lanes(parted, sign_words)
            d = _u32(new_dither + moved)
            round_signs_bfloat16(out, settled, e, parted, new_amount, d, streamed)
        else:
            _sum_tile(
                settled, settled, e, stop, offset, keys, gaussian, coefficients, dithers, starts,
                rows, is_half, table, values, scratch, z_buffer, words, sign_words, row_amounts,
            )  # fmt: skip
            _sum_tile(
                out, settled, e, stop, offset, new_keys, new_gaussian, new_coefficients, new_dithers,
                starts, rows, is_half, table, values, scratch, z_buffer, words, sign_words,
                row_amounts,
            )  # fmt: skip
        e = stop
    if streamed:
        fence()


@_jit
def _rounded_pieces(
    out, source, offset, firsts, keys, gaussian, coefficients, dithers, rows, is_half, table
):
    for p in range(firsts.size):
        _rounded_range(
            out[p], source[p], offset + firsts[p], keys, gaussian, coefficients, dithers,
            -firsts[p : p + 1], rows, is_half, table, False, 0, out.shape[1],
        )  # fmt: skip


def add_rounded(
    out: Tensor, source: Tensor, offset: int, keys: Unsigned, gaussian: bool, coefficients: Floats,
    dithers: Unsigned, members: Members | None, pieces: Pieces,
) -> None:  # fmt: skip
    """Computes `dispatch.add_rounded`."""
    bits = out.view(torch.uint16), source.view(torch.uint16)
    flat, given, starts, rows = arrays(*bits, members, pieces)
    rest = (keys, gaussian, coefficients, dithers)
    end = (rows, out.dtype == torch.float16, normal_cells())
    if pieces is not None:
        return _rounded_pieces(flat, given, offset, pieces, *rest, *end)
    work = functools.partial(_rounded_range, flat, given, offset, *rest, starts, *end, False)
    in_parallel(work, flat.size, offset % TILE)


def perturb_rounded(
    out: Tensor, settled: Tensor, offset: int, new: Terms, update: Terms | None,
    members: Members | None,
) -> None:  # fmt: skip
    """Computes `dispatch.perturb_rounded`, in one sweep; inside `together`, at its end."""
    bits = out.view(torch.uint16), settled.view(torch.uint16)
    flat, given, starts, rows = arrays(*bits, members, None)
    # Streamed stores need whole cache lines, and pay where what is written is not read at once.
    streamed = flat.size >= _LARGE and flat.ctypes.data % LINE == 0
    end = (starts, rows, out.dtype == torch.float16, normal_cells(), streamed)
    if update is None:
        work = functools.partial(_rounded_range, flat, given, offset, *new, *end)
    else:
        work = functools.partial(_updated_range, flat, given, offset, *update, *new, *end)
    in_parallel(work, flat.size, offset % TILE, later=True)
