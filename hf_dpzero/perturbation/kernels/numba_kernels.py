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

from hf_dpzero.perturbation.directions import DITHER_STEP, LANES, Places
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
    over_all,
    part_lanes,
    round_signs_bfloat16,
    store_bfloat16,
    store_float16,
    together,
)
from hf_dpzero.perturbation.kernels.torch_reference import (
    Decay,
    Members,
    Pieces,
    Sweep,
    Unsigned,
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
_STEP, _ROWS = _u32(DITHER_STEP), TILE // LANES
_NO_DECAY = Decay(-1, np.empty(0, _f32), np.empty(0, _f32), np.empty(0, _u32))
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
def _decay_grid(out, source, first, e, rates, spacing, dithers, starts, rows):
    """out = source, decayed, for the elements of a tensor from e on; `first` in the larger tensor."""
    begin, stop = e, e + out.size
    while e < stop:
        m, upto = rows[e // 32] if rows.size else 0, end_of_member(rows, e, stop)
        here = slice(e - begin, upto - begin)
        d, values, zero = (
            _u32(dithers[m] + _u32(first + e - starts[m]) * _STEP),
            source[here],
            _f32(0),
        )
        _update_normals(out[here], values, values, zero, zero, rates[m], spacing[m], d)
        e = upto


@_jit
def _signs_range(
    out, source, offset, firsts, keys, amounts, after, rates, spacing, dithers, starts, rows, begin,
    end,
):  # fmt: skip
    first, second = np.zeros(TILE, _f32), np.zeros(TILE, _f32)
    words, row_amounts = np.empty((4, LANES), _u32), np.zeros(_ROWS, _f32)
    for p in range(firsts.size):
        target, given, place, e = out[p], source[p], offset + firsts[p], begin
        while e < end:
            tile, shift = (place + e) // TILE, (place + e) % TILE
            count = min(TILE - shift, end - e)
            whole = count == TILE
            if not whole:
                copy(first[shift : shift + count], given[e : e + count])
            for t in range(keys.shape[0]):
                fill_words(words, LANES, _u64(tile * LANES), keys[t])
                _row_amounts(amounts[t], row_amounts, rows, (e - shift) // LANES)
                added_to = given[e : e + count] if whole and t == 0 else first
                if t == after:
                    here = slice(shift, shift + count)
                    decayed, values = second[here], added_to[here]
                    _decay_grid(
                        decayed, values, firsts[p], e, rates, spacing, dithers, starts, rows
                    )
                    first, second = second, first
                    added_to = first
                add_signs_to_tile(second, added_to, words, row_amounts)
                first, second = second, first
            copy(target[e : e + count], first[shift : shift + count])
            e += count


@_jit
def _normals_range(
    out, source, offset, firsts, keys, new, old, update, spacing, dithers, after, rates, steps,
    decay_dithers, starts, rows, table, begin, end,
):  # fmt: skip
    first, second = np.empty(TILE, _f32), np.empty(TILE, _f32)
    z_buffer, words = np.empty(TILE + 128, _f32), np.empty((4, TILE // 4 + 32), _u32)
    for p in range(firsts.size):
        e = begin
        while e < end:
            m = rows[e // 32] if rows.size else 0
            count = min(TILE, end_of_member(rows, e, min(end, e + TILE)) - e)
            copy(first[:count], source[p, e : e + count])
            index = firsts[p] + e
            for t in range(keys.shape[0]):
                z = normals(z_buffer, words, offset + index, count, keys[t], table)
                to, given = second[:count], first[:count]
                if t == after:
                    _decay_grid(to, given, firsts[p], e, rates, steps, decay_dithers, starts, rows)
                    to, given = given, to
                    first, second = second, first
                if update[t, m] == _f32(0):
                    _move_normals(to, given, z, new[t, m], old[t, m], spacing[m])
                else:
                    d = _u32(dithers[t, m] + _u32(index - starts[m]) * _STEP)
                    _update_normals(to, given, z, new[t, m], old[t, m], update[t, m], spacing[m], d)
                first, second = second, first
            copy(out[p, e : e + count], first[:count])
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


def sum_of_squared_normals(key: Unsigned, places: Places) -> int:
    """Computes `directions.sum_of_squared_normals`."""
    sums: list[int] = []  # integers: their order does not matter

    def work(start: int, begin: int, end: int) -> None:
        low, high = _squares_range(start, key, normal_cells(), begin, end)
        sums.append(int(low) + (int(high) << 32))

    for start, count in places:
        in_parallel(functools.partial(work, start), count, start % TILE)
    return sum(sums)


def add_signs(
    added: Sweep, out: Tensor, source: Tensor, offset: int, members: Members | None, pieces: Pieces
) -> None:
    """Computes `torch_reference.add_signs`."""
    flat, given, firsts, starts, rows = arrays(out, source, members, pieces)
    arguments = (firsts, added.keys, *added.numbers, *(added.decay or _NO_DECAY), starts, rows)
    over_all(functools.partial(_signs_range, flat, given, offset, *arguments), flat, offset)


def add_normals(
    added: Sweep, out: Tensor, source: Tensor, offset: int, members: Members | None, pieces: Pieces
) -> None:
    """Computes `torch_reference.add_normals`."""
    flat, given, firsts, starts, rows = arrays(out, source, members, pieces)
    terms = (firsts, added.keys, *added.numbers, *(added.decay or _NO_DECAY))
    arguments = (*terms, starts, rows, normal_cells())
    over_all(functools.partial(_normals_range, flat, given, offset, *arguments), flat, offset)


# ---------------------------------------------------------------- bfloat16 and float16


@_jit
def _plain_tile(out, source, e, place, index, key, amount, dither, words, parted, streamed):
    """`_sum_tile` of one term of signs, for a whole tile of one bfloat16 tensor."""
    fill_words(words, LANES, _u64(place // TILE * LANES), key)
    part_lanes(parted, words)
    d = _u32(dither + _u32(index) * _STEP)
    round_signs_bfloat16(out, source, e, parted, amount, d, streamed)


@_jit
def _sum_tile(
    out, source, begin, stop, offset, first, keys, gaussian, coefficients, dithers, starts, rows,
    is_half, table, values, scratch, z_buffer, words, sign_words, row_amounts,
):  # fmt: skip
    """out = source + the terms, rounded, for elements begin .. stop, all in one of the signs' tiles."""
    place, count = offset + first + begin, stop - begin
    bits, scratch_bits = values.view(_u32), scratch.view(_u32)
    shift = place % TILE
    here = slice(shift, shift + count)
    if is_half:
        load_float16(values[here], scratch[here], scratch_bits[here], source[begin:stop])
    else:
        load_bfloat16(bits[here], source[begin:stop])
    for t in range(keys.shape[0]):
        if gaussian:
            z = normals(z_buffer, words, place, count, keys[t], table)
            add_scaled(scratch[here], values[here], z, coefficients[t])
        else:
            row_amounts[:] = coefficients[t]
            fill_words(sign_words, LANES, _u64(place // TILE * LANES), keys[t])
            add_signs_to_tile(scratch, values, sign_words, row_amounts)
        values, scratch = scratch, values
        bits, scratch_bits = scratch_bits, bits
    e = begin
    while e < stop:
        m, upto = rows[e // 32] if rows.size else 0, end_of_member(rows, e, stop)
        d = _u32(dithers[m] + _u32(first + e - starts[m]) * _STEP)
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
def _decay_tile(
    out, source, begin, stop, first, rates, dithers, starts, rows, is_half, values, scratch
):  # fmt: skip
    """out = (1 - rate) source, rounded, for elements begin .. stop, of one tile."""
    bits, scratch_bits, e = values.view(_u32), scratch.view(_u32), begin
    while e < stop:
        m, upto = rows[e // 32] if rows.size else 0, end_of_member(rows, e, stop)
        here, d = slice(0, upto - e), _u32(dithers[m] + _u32(first + e - starts[m]) * _STEP)
        if is_half:
            load_float16(values[here], scratch[here], scratch_bits[here], source[e:upto])
        else:
            load_bfloat16(bits[here], source[e:upto])
        add_scaled(scratch[here], values[here], values[here], -rates[m])
        if is_half:
            store_float16(
                out[e:upto], scratch[here], scratch_bits[here], values[here], bits[here], d
            )
        else:
            store_bfloat16(out[e:upto], scratch_bits[here], d)
        e = upto


@_jit
def _rounded_range(
    out, settled, offset, firsts, keys, gaussian, coefficients, dithers, update_keys,
    update_gaussian, update_coefficients, update_dithers, after, rates, decay_dithers, starts, rows,
    is_half, table, streamed, updated, begin, end,
):  # fmt: skip
    """settled += the update, if `updated`; out = settled + the terms: a tile at a time."""
    values, scratch = np.zeros(TILE, _f32), np.zeros(TILE, _f32)
    z_buffer, words = np.empty(TILE + 128, _f32), np.empty((4, TILE // 4 + 32), _u32)
    sign_words, parted = np.empty((4, LANES), _u32), np.empty((4, LANES), _u32)
    row_amounts, one_tensor = np.empty(128, _f32), rows.size == 0 and not is_half
    plain = one_tensor and keys.shape[0] == 1 and not gaussian
    plain_update = updated and one_tensor and update_keys.shape[0] == 1 and not update_gaussian
    key, amount, dither = keys[0], coefficients[0], dithers[0]
    other_key, other_amount = update_keys[0], update_coefficients[0]
    other_dither = update_dithers[0]
    for p in range(firsts.size):
        target, given, first, e = out[p], settled[p], firsts[p], begin
        while e < end:
            index, place = first + e, offset + first + e
            stop = min(e + TILE - place % TILE, end)
            whole = stop - e == TILE
            read = given
            if after == 0:  # all that follows finds its tile in the cache
                read = given if updated else target
                _decay_tile(
                    read, given, e, stop, first, rates, decay_dithers, starts, rows, is_half,
                    values, scratch,
                )  # fmt: skip
            if plain_update and whole:  # its tile is still in the cache when the rest reads it
                _plain_tile(
                    given, given, e, place, index, other_key, other_amount, other_dither, sign_words,
                    parted, False,
                )  # fmt: skip
            elif updated:
                _sum_tile(
                    given, given, e, stop, offset, first, update_keys, update_gaussian,
                    update_coefficients, update_dithers, starts, rows, is_half, table, values,
                    scratch, z_buffer, words, sign_words, row_amounts,
                )  # fmt: skip
            if plain and whole:
                _plain_tile(
                    target, read, e, place, index, key, amount, dither, sign_words, parted, streamed,
                )  # fmt: skip
            else:
                _sum_tile(
                    target, read, e, stop, offset, first, keys, gaussian, coefficients, dithers,
                    starts, rows, is_half, table, values, scratch, z_buffer, words, sign_words,
                    row_amounts,
                )  # fmt: skip
            e = stop
    if streamed:
        fence()


def add_rounded(
    added: Sweep, out: Tensor, source: Tensor, offset: int, members: Members | None, pieces: Pieces
) -> None:
    """Computes `torch_reference.add_rounded`."""
    _round(out, source, offset, added, None, members, pieces, streamed=False)


def perturb_rounded(
    out: Tensor, settled: Tensor, offset: int, new: Sweep, update: Sweep | None,
    members: Members | None,
) -> None:  # fmt: skip
    """Computes `dispatch.perturb_rounded`, in one sweep; inside `together`, at its end."""
    # Streamed stores need whole cache lines, and pay where what is written is not read at once.
    streamed = out.numel() >= _LARGE and out.data_ptr() % LINE == 0
    _round(out, settled, offset, new, update, members, None, streamed, later=True)


def _round(
    out: Tensor, source: Tensor, offset: int, new: Sweep, update: Sweep | None,
    members: Members | None, pieces: Pieces, streamed: bool, later: bool = False,
) -> None:  # fmt: skip
    bits = out.view(torch.uint16), source.view(torch.uint16)
    flat, given, firsts, starts, rows = arrays(*bits, members, pieces)
    end = (starts, rows, out.dtype == torch.float16, normal_cells(), streamed, update is not None)
    first = update or new
    decay = first.decay or _NO_DECAY
    terms = [part for s in (new, first) for part in (s.keys, *s.shared, *s.numbers)]
    arguments = (firsts, *terms, decay.after, decay.rates, decay.dithers, *end)
    work = functools.partial(_rounded_range, flat, given, offset, *arguments)
    over_all(work, flat, offset, later)
