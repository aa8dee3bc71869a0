# mypy: disable-error-code="no-untyped-def"
"""Compiled CPU kernels (numba): generate a direction and add it, in one sweep over memory.

The same numbers as `torch_reference`, to the last bit: integer arithmetic, and float32 products and
sums that are each rounded on their own (numba does not contract them). A coordinate is read once and
written once; nothing of parameter size is allocated. Threads take contiguous parts, so their number
does not matter to the result.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
import torch
from torch import Tensor

from hf_dpzero.perturbation import directions
from hf_dpzero.perturbation.directions import LANES, NORMAL_UNIT, SIGNS_TILE, normal_tables
from hf_dpzero.perturbation.kernels.numba_half_precision import (
    load_bfloat16,
    load_float16,
    round_signs_bfloat16,
    store_bfloat16,
    store_float16,
)
from hf_dpzero.perturbation.philox import MULTIPLIERS, WEYL

_jit = nb.njit(nogil=True, cache=True)
_inline = nb.njit(nogil=True, cache=True, inline="always")

_u32, _u64, _f32 = np.uint32, np.uint64, np.float32
_M0, _M1 = _u64(MULTIPLIERS[0]), _u64(MULTIPLIERS[1])
_W0, _W1 = _u32(WEYL[0]), _u32(WEYL[1])
_STEP, _HALF, _UNIT = _u32(directions.DITHER_STEP), _u64(32), _f32(NORMAL_UNIT)
_TILE = SIGNS_TILE  # coordinates worked on at a time: 16 KiB of float32, in the first-level cache
_ROWS = _TILE // LANES
_ODD = np.int64(directions._DITHERS - 1)
_SMALLEST_SHARE = 1 << 16  # coordinates below which a second thread is not worth waking


@_inline
def _round(c0, c1, c2, c3, k0, k1):
    first, second = _M0 * _u64(c0), _M1 * _u64(c2)
    high0, high1 = _u32(first >> _HALF), _u32(second >> _HALF)
    return high1 ^ c1 ^ k0, _u32(second), high0 ^ c3 ^ k1, _u32(first)


@_jit
def _fill_words(words, calls, call, key):
    """words[:, : calls], uint32: of call, call + 1, ... Written out, for it vectorises so."""
    a0, b0, n0, n1 = key[0], key[1], key[2], key[3]
    a1, b1 = _u32(a0 + _W0), _u32(b0 + _W1)
    a2, b2 = _u32(a1 + _W0), _u32(b1 + _W1)
    a3, b3 = _u32(a2 + _W0), _u32(b2 + _W1)
    a4, b4 = _u32(a3 + _W0), _u32(b3 + _W1)
    a5, b5 = _u32(a4 + _W0), _u32(b4 + _W1)
    a6, b6 = _u32(a5 + _W0), _u32(b5 + _W1)
    a7, b7 = _u32(a6 + _W0), _u32(b6 + _W1)
    a8, b8 = _u32(a7 + _W0), _u32(b7 + _W1)
    a9, b9 = _u32(a8 + _W0), _u32(b8 + _W1)
    for j in range(calls):
        x = call + _u64(j)
        c0, c1, c2, c3 = _u32(x), _u32(x >> _HALF), n0, n1
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a0, b0)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a1, b1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a2, b2)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a3, b3)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a4, b4)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a5, b5)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a6, b6)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a7, b7)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a8, b8)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a9, b9)
        words[0, j], words[1, j], words[2, j], words[3, j] = c0, c1, c2, c3


# Every loop reads one array and writes another: the compiler vectorises these, and few others.


@_jit
def _copy(out, source):
    """out[:] = source, which numba compiles to something five times as slow."""
    for e in range(out.size):
        out[e] = source[e]


@_jit
def _add_signs(out, source, words, amounts):
    """out = source +- amounts[row] on a tile, float32 [4096]; words uint32 [4, 32]."""
    for w in range(4):
        for bit in range(32):
            start, amount = (w * 32 + bit) * 32, amounts[w * 32 + bit]
            for lane in range(32):
                up = (words[w, lane] >> _u32(bit)) & _u32(1)
                out[start + lane] = source[start + lane] + (amount if up else -amount)


@_jit
def _fill_normals(z, words, groups, table):
    """z float32 [groups * 128], in order, from the first groups * 32 of words uint32 [4, n]."""
    byte, short = _u32(255), np.int64(0xFFFF)
    for group in range(groups):
        for w in range(4):
            start = group * 128 + w * 32
            for lane in range(32):
                x = words[w, group * 32 + lane]
                cell = table[(x & byte) + ((x >> _u32(8)) & byte) + ((x >> _u32(16)) & byte)]
                b = np.int64((x >> _u32(24)) & _u32(_ODD))
                value = (cell >> np.int64(16)) + (np.int64(2) * b - _ODD) * (cell & short)
                z[start + lane] = _f32(np.int32(value)) * _UNIT


@_jit
def _normals(z, words, first, count, key, table):
    """Coordinates first .. first + count (first a multiple of 32), as a part of the buffer z."""
    block = first // 128
    groups = (first + count + 127) // 128 - block
    _fill_words(words, groups * 32, _u64(block * 32), key)
    _fill_normals(z, words, groups, table)
    return z[first - block * 128 :][:count]


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
def _add_scaled(out, source, z, coefficient):
    for e in range(out.size):
        out[e] = source[e] + z[e] * coefficient


@_jit
def _end_of_member(rows, e, end):
    """Past the last element, up to `end`, of the member that element e belongs to."""
    if rows.size == 0:
        return end
    row, member = e // 32 + 1, rows[e // 32]
    while row * 32 < end and rows[row] == member:
        row += 1
    return min(row * 32, end)


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
    first, second = np.zeros(_TILE, _f32), np.zeros(_TILE, _f32)
    words, row_amounts = np.empty((4, LANES), _u32), np.zeros(_ROWS, _f32)
    e = begin
    while e < end:
        tile, shift = (offset + e) // _TILE, (offset + e) % _TILE
        count = min(_TILE - shift, end - e)
        whole = count == _TILE
        if not whole:
            _copy(first[shift : shift + count], source[e : e + count])
        for t in range(keys.shape[0]):
            _fill_words(words, LANES, _u64(tile * LANES), keys[t])
            _row_amounts(amounts[t], row_amounts, rows, (e - shift) // LANES)
            given = source[e : e + count] if whole and t == 0 else first
            _add_signs(second, given, words, row_amounts)
            first, second = second, first
        _copy(out[e : e + count], first[shift : shift + count])
        e += count


@_jit
def _normals_range(
    out, source, offset, keys, new, old, update, spacing, dithers, starts, rows, table, begin, end
):
    first, second = np.empty(_TILE, _f32), np.empty(_TILE, _f32)
    z_buffer, words = np.empty(_TILE + 128, _f32), np.empty((4, _TILE // 4 + 32), _u32)
    e = begin
    while e < end:
        m = rows[e // 32] if rows.size else 0
        count = min(_TILE, _end_of_member(rows, e, min(end, e + _TILE)) - e)
        _copy(first[:count], source[e : e + count])
        for t in range(keys.shape[0]):
            z = _normals(z_buffer, words, offset + e, count, keys[t], table)
            target, given = second[:count], first[:count]
            if update[t, m] == _f32(0):
                _move_normals(target, given, z, new[t, m], old[t, m], spacing[m])
            else:
                d = _u32(dithers[t, m] + _u32(e - starts[m]) * _STEP)
                _update_normals(target, given, z, new[t, m], old[t, m], update[t, m], spacing[m], d)
            first, second = second, first
        _copy(out[e : e + count], first[:count])
        e += count


@_jit
def _rounded_range(
    out, source, offset, keys, gaussian, coefficients, dithers, starts, rows, is_half, table,
    begin, end,
):  # fmt: skip
    values, scratch = np.zeros(_TILE, _f32), np.zeros(_TILE, _f32)
    bits, scratch_bits = values.view(_u32), scratch.view(_u32)
    z_buffer, words = np.empty(_TILE + 128, _f32), np.empty((4, _TILE // 4 + 32), _u32)
    sign_words, row_amounts = np.empty((4, LANES), _u32), np.empty(128, _f32)
    given, in_place = np.empty(_TILE, np.uint16), out.ctypes.data == source.ctypes.data
    plain = rows.size == 0 and keys.shape[0] == 1 and not gaussian and not is_half
    e = begin
    while e < end:
        tile, shift = (offset + e) // _TILE, (offset + e) % _TILE
        count = min(_TILE - shift, end - e)
        here = slice(shift, shift + count)
        if plain and count == _TILE:
            _fill_words(sign_words, LANES, _u64(tile * LANES), keys[0])
            d = _u32(dithers[0] + _u32(e - starts[0]) * _STEP)
            stop = e + count
            if in_place:
                _copy(given, source[e:stop])
                round_signs_bfloat16(out[e:stop], given, sign_words, coefficients[0], d)
            else:
                round_signs_bfloat16(out[e:stop], source[e:stop], sign_words, coefficients[0], d)
            e = stop
            continue
        if is_half:
            load_float16(values[here], scratch[here], scratch_bits[here], source[e : e + count])
        else:
            load_bfloat16(bits[here], source[e : e + count])
        for t in range(keys.shape[0]):
            if gaussian:
                z = _normals(z_buffer, words, offset + e, count, keys[t], table)
                _add_scaled(scratch[here], values[here], z, coefficients[t])
            else:
                row_amounts[:] = coefficients[t]
                _fill_words(sign_words, LANES, _u64(tile * LANES), keys[t])
                _add_signs(scratch, values, sign_words, row_amounts)
            values, scratch = scratch, values
            bits, scratch_bits = scratch_bits, bits
        stop = e + count
        while e < stop:
            m, upto = rows[e // 32] if rows.size else 0, _end_of_member(rows, e, stop)
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
def _squares_range(first, key, table, begin, end):
    """(low, high) with low + 2^32 high = the sum of squares, in units of 2^-42; exact."""
    z_buffer, words = np.empty(_TILE + 128, _f32), np.empty((4, _TILE // 4 + 32), _u32)
    low, high, e = np.int64(0), np.int64(0), begin
    while e < end:
        count = min(_TILE, end - e)
        z = _normals(z_buffer, words, first + e, count, key, table)
        total = np.int64(0)  # 4096 squares below 2^48
        for i in range(count):
            n = np.int64(z[i] / _UNIT)
            total += n * n
        low += total & np.int64(0xFFFFFFFF)
        high += total >> np.int64(32)
        e += count
    return low, high


@functools.cache
def _table() -> Any:
    """int64 [766]: 2^16 center + half of each cell, so that one look-up fetches both."""
    center, half = normal_tables()
    return (center.astype(np.int64) << 16) | half.astype(np.int64)


@functools.cache
def _pool(threads: int, process: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="hf_dpzero")


def _in_parallel(work: Callable[[int, int], None], size: int, lead: int) -> None:
    """work(begin, end) over 0 .. size by torch's number of threads, cut at the ends of tiles."""
    shares = max(1, min(torch.get_num_threads(), size // _SMALLEST_SHARE))
    if shares == 1:
        return work(0, size)
    tiles = -(-(lead + size) // _TILE)
    cuts = [max(0, tiles * share // shares * _TILE - lead) for share in range(shares)] + [size]
    pool = _pool(shares, os.getpid())
    done = [pool.submit(work, begin, end) for begin, end in itertools.pairwise(cuts[1:])]
    try:
        work(cuts[0], cuts[1])
    finally:
        concurrent.futures.wait(done)
    for future in done:
        future.result()


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


@_jit
def _rounded_pieces(
    out, source, offset, firsts, keys, gaussian, coefficients, dithers, rows, is_half, table
):
    for p in range(firsts.size):
        _rounded_range(
            out[p], source[p], offset + firsts[p], keys, gaussian, coefficients, dithers,
            -firsts[p : p + 1], rows, is_half, table, 0, out.shape[1],
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
        low, high = _squares_range(start, key, _table(), begin, end)
        sums.append(int(low) + (int(high) << 32))

    _in_parallel(work, count, start % _TILE)
    return sum(sums)


def _arrays(out: Tensor, source: Tensor, members: Any, pieces: Any) -> tuple[Any, ...]:
    """(out, source), [P, n / P] for P pieces, and (starts, rows) as the compiled functions take them."""
    shape = (-1,) if pieces is None else (len(pieces), -1)
    both = (tensor.numpy().reshape(shape) for tensor in (out, source))
    if members is None:
        return *both, np.zeros(1, np.int64), np.empty(0, np.int32)
    return *both, members.starts, members.rows


def add_signs(
    out: Tensor, source: Tensor, offset: int, keys: Any, amounts: Any, members: Any, pieces: Any
) -> None:
    """`dispatch.add_signs`.

    Args:
      out, source, offset, keys, amounts, members, pieces: as there.
    """
    flat, given, _, rows = _arrays(out, source, members, pieces)
    if pieces is not None:
        return _signs_pieces(flat, given, offset, pieces, keys, amounts, rows)
    work = functools.partial(_signs_range, flat, given, offset, keys, amounts, rows)
    _in_parallel(work, flat.size, offset % _TILE)


def add_normals(
    out: Tensor, source: Tensor, offset: int, keys: Any, new: Any, old: Any, update: Any,
    spacing: Any, dithers: Any, members: Any, pieces: Any,
) -> None:  # fmt: skip
    """`dispatch.add_normals`.

    Args:
      out, source, offset, keys, new, old, update, spacing, dithers, members, pieces: as there.
    """
    flat, given, starts, rows = _arrays(out, source, members, pieces)
    rest = (keys, new, old, update, spacing, dithers)
    if pieces is not None:
        return _normals_pieces(flat, given, offset, pieces, *rest, rows, _table())
    work = functools.partial(_normals_range, flat, given, offset, *rest, starts, rows, _table())
    _in_parallel(work, flat.size, offset % _TILE)


def add_rounded(
    out: Tensor, source: Tensor, offset: int, keys: Any, gaussian: bool, coefficients: Any,
    dithers: Any, members: Any, pieces: Any,
) -> None:  # fmt: skip
    """`dispatch.add_rounded`.

    Args:
      out, source, offset, keys, gaussian, coefficients, dithers, members, pieces: as there.
    """
    bits = out.view(torch.uint16), source.view(torch.uint16)
    flat, given, starts, rows = _arrays(*bits, members, pieces)
    rest = (keys, gaussian, coefficients, dithers)
    end = (rows, out.dtype == torch.float16, _table())
    if pieces is not None:
        return _rounded_pieces(flat, given, offset, pieces, *rest, *end)
    work = functools.partial(_rounded_range, flat, given, offset, *rest, starts, *end)
    _in_parallel(work, flat.size, offset % _TILE)
