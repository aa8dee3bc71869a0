# mypy: disable-error-code="no-untyped-def,call-arg"
"""bfloat16 and float16 on the CPU (numba): directions added and rounded, one or two sums a sweep."""

from __future__ import annotations

import functools
from typing import Any

import numba as nb
import numpy as np
import torch
from torch import Tensor

from hf_dpzero.perturbation import directions
from hf_dpzero.perturbation.directions import LANES
from hf_dpzero.perturbation.kernels.numba_half_precision import (
    load_bfloat16,
    load_float16,
    store_bfloat16,
    store_float16,
)
from hf_dpzero.perturbation.kernels.numba_rows import LINE, fence, part_lanes, round_signs_bfloat16
from hf_dpzero.perturbation.kernels.numba_tiles import (
    TILE,
    add_scaled,
    add_signs_to_tile,
    arrays,
    end_of_member,
    fill_words,
    in_parallel,
    normal_cells,
    normals,
)

_jit = nb.njit(nogil=True, cache=True)
_u32, _u64, _f32 = np.uint32, np.uint64, np.float32
_STEP = _u32(directions.DITHER_STEP)
_LARGE = 1 << 17  # coordinates that caches would hardly hold until they are read


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
    out: Tensor, source: Tensor, offset: int, keys: Any, gaussian: bool, coefficients: Any,
    dithers: Any, members: Any, pieces: Any,
) -> None:  # fmt: skip
    """`dispatch.add_rounded`.

    Args:
      out, source, offset, keys, gaussian, coefficients, dithers, members, pieces: as there.
    """
    bits = out.view(torch.uint16), source.view(torch.uint16)
    flat, given, starts, rows = arrays(*bits, members, pieces)
    rest = (keys, gaussian, coefficients, dithers)
    end = (rows, out.dtype == torch.float16, normal_cells())
    if pieces is not None:
        return _rounded_pieces(flat, given, offset, pieces, *rest, *end)
    work = functools.partial(_rounded_range, flat, given, offset, *rest, starts, *end, False)
    in_parallel(work, flat.size, offset % TILE)


def perturb_rounded(
    out: Tensor, settled: Tensor, offset: int, new: Any, update: Any, members: Any
) -> None:
    """`dispatch.perturb_rounded`.

    Args:
      out, settled, offset, new, update, members: as there.
    """
    bits = out.view(torch.uint16), settled.view(torch.uint16)
    flat, given, starts, rows = arrays(*bits, members, None)
    streamed = flat.size >= _LARGE and flat.ctypes.data % LINE == 0
    end = (starts, rows, out.dtype == torch.float16, normal_cells(), streamed)
    if update is None:
        work = functools.partial(_rounded_range, flat, given, offset, *new, *end)
    else:
        work = functools.partial(_updated_range, flat, given, offset, *update, *new, *end)
    in_parallel(work, flat.size, offset % TILE, later=True)
