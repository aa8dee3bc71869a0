# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""What the compiled CPU kernels (numba) are made of: loops over one tile, and threads that share tiles.

A tile is 4096 coordinates, 16 KiB of float32 that stay in the first-level cache, which 32 Philox calls
give as signs. Threads take contiguous parts cut at the ends of tiles, so their number does not matter to
the result.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numba as nb
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation.directions import (
    DITHER_STEP,
    DITHERS,
    LANES,
    MULTIPLIERS,
    NORMAL_UNIT,
    SIGNS_TILE,
    WEYL,
    normal_tables,
)
from hf_dpzero.perturbation.kernels.torch_reference import Members, Pieces

_jit = nb.njit(nogil=True, cache=True)
_inline = nb.njit(nogil=True, cache=True, inline="always")

_u32, _u64, _f32 = np.uint32, np.uint64, np.float32
_M0, _M1 = _u64(MULTIPLIERS[0]), _u64(MULTIPLIERS[1])
_W0, _W1 = _u32(WEYL[0]), _u32(WEYL[1])
_HALF, UNIT = _u64(32), _f32(NORMAL_UNIT)
_STEP = _u32(DITHER_STEP)
TILE = SIGNS_TILE
_ODD = np.int64(DITHERS - 1)
_SMALLEST_SHARE = 1 << 16  # coordinates below which a second thread is not worth waking
_FIRST, _NO_ROWS = np.zeros(1, np.int64), np.empty(0, np.int32)
Work = Callable[[int, int], None]


@_inline
def _round(c0, c1, c2, c3, k0, k1):
    first, second = _M0 * _u64(c0), _M1 * _u64(c2)
    high0, high1 = _u32(first >> _HALF), _u32(second >> _HALF)
    return high1 ^ c1 ^ k0, _u32(second), high0 ^ c3 ^ k1, _u32(first)


@_jit
def fill_words(words, calls, call, key):
    """words[:, : calls], uint32: of call, call + 1, ..."""
    # written out, for numba vectorises neither a loop over rounds nor an array of keys
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
def copy(out, source):
    """out[:] = source, which numba compiles to something five times as slow."""
    for e in range(out.size):
        out[e] = source[e]


@_jit
def add_signs_to_tile(out, source, words, amounts):
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
                z[start + lane] = _f32(np.int32(value)) * UNIT


@_jit
def normals(z, words, first, count, key, table):
    """Coordinates first .. first + count (first a multiple of 32), as a part of the buffer z."""
    block = first // 128
    groups = (first + count + 127) // 128 - block
    fill_words(words, groups * 32, _u64(block * 32), key)
    _fill_normals(z, words, groups, table)
    return z[first - block * 128 :][:count]


@_jit
def add_scaled(out, source, z, coefficient):
    for e in range(out.size):
        out[e] = source[e] + z[e] * coefficient


@_jit
def end_of_member(rows, e, end):
    """Past the last element, up to `end`, of the member that element e belongs to."""
    if rows.size == 0:
        return end
    row, member = e // 32 + 1, rows[e // 32]
    while row * 32 < end and rows[row] == member:
        row += 1
    return min(row * 32, end)


# ---------------------------------------------------------------- bfloat16 and float16
#
# Bits are worked on as integers, for numba has neither type. All sizes are those of the arrays given.


@_jit
def load_bfloat16(bits, source):
    """float32 bits, as uint32, of bfloat16 bits."""
    for e in range(source.size):
        bits[e] = _u32(source[e]) << _u32(16)


@_jit
def load_float16(values, scratch, scratch_bits, source):
    """float32 values of float16 bits; the scratch is a float32 array and the same as uint32."""
    for e in range(source.size):
        scratch_bits[e] = ((_u32(source[e]) & _u32(0x7FFF)) << _u32(13)) + _u32(112 << 23)
    for e in range(source.size):
        magnitude = _u32(source[e]) & _u32(0x7FFF)
        tiny = _f32(np.int32(magnitude)) * _f32(2.0**-24)
        value = scratch[e] if magnitude >= _u32(0x400) else tiny
        values[e] = -value if _u32(source[e]) >> _u32(15) else value


@_jit
def store_bfloat16(out, bits, dither):
    """bfloat16 bits of float32 bits, rounded up with the share that is cut off as probability."""
    for e in range(out.size):
        d = _u32(dither + _u32(e) * _STEP) >> _u32(16)
        out[e] = np.uint16((bits[e] + d) >> _u32(16))


@_jit
def store_float16(out, values, bits, scratch, scratch_bits, dither):
    """Magnitudes below 2^-14, where float16 is evenly spaced, are rounded one binade higher."""
    least, most = _f32(2.0**-14), _f32(65504.0)
    for e in range(out.size):
        magnitude = min(abs(values[e]), most)
        scratch[e] = magnitude + least if magnitude < least else magnitude
    for e in range(out.size):
        d = _u32(dither + _u32(e) * _STEP) >> _u32(19)
        cut = ((scratch_bits[e] + d) >> _u32(13)) - _u32(112 << 10)
        value = cut - _u32(0x400) if abs(values[e]) < least else min(cut, _u32(0x7BFF))
        out[e] = np.uint16(((bits[e] >> _u32(16)) & _u32(0x8000)) | value)


# ---------------------------------------------------------------- bfloat16 rows as vectors
#
# A row of 32 bfloat16 values plus or minus one amount. numba's own loops over 16-bit numbers take three
# times as long: it narrows eight at a time, and cannot write past the caches. This is ordinary LLVM
# vector code, so it compiles for any CPU; values lie in pairs, the first in the lower half of a 32-bit
# number, as on every little-endian machine.

LINE = 64
"""Bytes of a cache line, and of a row of 16-bit numbers."""
_AHEAD = 4096  # bytes: a page, where the CPU's own prefetching ends
_PAIRS = LANES // 2
_INTEGERS = ir.VectorType(ir.IntType(32), _PAIRS)
_FLOATS = ir.VectorType(ir.FloatType(), _PAIRS)


def _each(number: int) -> ir.Constant:
    return ir.Constant(_INTEGERS, [number % 2**32] * _PAIRS)


def _spread(builder, value):
    """A number as all 16 of a vector."""
    one = builder.insert_element(ir.Constant(_INTEGERS, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, _each(0))


def _sixteen(context, builder, kind, array, start):
    """A pointer to 16 32-bit numbers, from the array's element `start` on."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), _INTEGERS.as_pointer())


def _prefetch(builder, pointer):
    """Asks for a line to be brought to the first-level cache; any address will do."""
    number, place = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [place, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [place], kind)
    read, nearest, data = number(0), number(3), number(1)
    builder.call(function, [builder.bitcast(pointer, place), read, nearest, data])


def _rounded(builder, values, words, down, dithers):
    """The bits of values +- amount, as float32, plus the dithers that their cut is rounded by."""
    signed = builder.xor(builder.and_(words, _each(0x80000000)), down)
    floats = (builder.bitcast(bits, _FLOATS) for bits in (values, signed))
    total = builder.bitcast(builder.fadd(*floats), _INTEGERS)
    return builder.add(total, builder.lshr(dithers, _each(16)))


def _row(streamed):
    @intrinsic
    def round_row(typing, out, source, start, words, first, left, down, dither):
        """out[start : start + 32] = source[the same] +- amount.

        out, source: uint16; words: uint32, from `first` on those of the even lanes, then of the odd;
        left: by how many bits to shift these for the sign to come first; down: bits of -amount.
        """
        arguments = (out, source, start, words, first, left, down, dither)

        def build(context, builder, signature, values):
            kinds = signature.args
            at = values[2]
            target = _sixteen(context, builder, kinds[0], values[0], at)
            given = _sixteen(context, builder, kinds[1], values[1], at)
            drawn = _sixteen(context, builder, kinds[3], values[3], values[4])
            shift, down, dither = (_spread(builder, value) for value in values[5:])
            _prefetch(builder, builder.gep(given, [ir.IntType(32)(_AHEAD // LINE)]))
            pairs = builder.load(given, align=2)
            steps = [2 * lane * DITHER_STEP % 2**32 for lane in range(_PAIRS)]
            dithers = builder.add(dither, ir.Constant(_INTEGERS, steps))
            rounded = []
            for half in range(2):
                words = builder.load(builder.gep(drawn, [ir.IntType(32)(half)]), align=4)
                values = (
                    builder.and_(pairs, _each(0xFFFF0000))
                    if half
                    else builder.shl(pairs, _each(16))
                )
                here = builder.add(dithers, _each(half * DITHER_STEP))
                rounded.append(_rounded(builder, values, builder.shl(words, shift), down, here))
            low = builder.lshr(rounded[0], _each(16))
            both = builder.or_(low, builder.and_(rounded[1], _each(0xFFFF0000)))
            store = builder.store(both, target, align=LINE if streamed else 2)
            if streamed:
                one = builder.module.add_metadata([ir.IntType(32)(1)])
                store.set_metadata("nontemporal", one)
            return context.get_dummy_value()

        return types.void(*arguments), build

    return round_row


_kept_row, _streamed_row = _row(False), _row(True)


@intrinsic
def fence(typing):
    """Makes streamed values visible to other threads before what this thread writes next."""

    def build(context, builder, signature, values):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


@_jit
def part_lanes(parted, words):
    """parted uint32 [4, 32]: of each row of words, those of the even lanes, then of the odd."""
    for w in range(4):
        for pair in range(16):
            parted[w, pair] = words[w, 2 * pair]
            parted[w, 16 + pair] = words[w, 2 * pair + 1]


@_jit
def round_signs_bfloat16(out, source, e, parted, amount, dither, streamed):
    """What `load_bfloat16`, `add_signs_to_tile` and `store_bfloat16` make of a tile of one tensor.

    Args:
      out, source: uint16 [n], the same or disjoint. `out` begins a cache line if `streamed`.
      e: the tile's first element; all 4096 are there.
      parted: uint32 [4, 32], the tile's words, see `part_lanes`.
      amount: float32, what is added or subtracted.
      dither: uint32, that of the tile's first element.
      streamed: writes to memory past the caches.
    """
    down = _u32(_f32(amount).view(_u32) ^ _u32(0x80000000))
    for w in range(4):
        for bit in range(32):
            start, left = (w * 32 + bit) * 32, _u32(31 - bit)
            begin = _u32(dither + _u32(start) * _STEP)
            if streamed:
                _streamed_row(out, source, e + start, parted, w * 32, left, down, begin)
            else:
                _kept_row(out, source, e + start, parted, w * 32, left, down, begin)


# ---------------------------------------------------------------- threads


@functools.cache
def normal_cells() -> NDArray[np.int64]:
    """int64 [766]: 2^16 center + half of each cell, so that one look-up fetches both."""
    center, half = normal_tables()
    return (center.astype(np.int64) << 16) | half.astype(np.int64)


@functools.cache
def _pool(threads: int, process: int) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="hf_dpzero")


class _Collected(threading.local):
    """The work of a thread that is inside `together`: (work, where its shares end)."""

    jobs: list[tuple[Work, list[int]]] | None = None


_collected = _Collected()


def in_parallel(work: Work, size: int, lead: int, later: bool = False) -> None:
    """work(begin, end) over 0 .. size by torch's number of threads, cut at the ends of tiles.

    Args:
      work: of contiguous elements.
      size: how many there are.
      lead: where the first one lies in its tile.
      later: inside `together`, not before its end: nothing inside may read what the work writes.
    """
    shares = max(1, min(torch.get_num_threads(), size // _SMALLEST_SHARE))
    if shares == 1:
        return work(0, size)
    tiles = -(-(lead + size) // TILE)
    cuts = [max(0, tiles * share // shares * TILE - lead) for share in range(shares)] + [size]
    if _collected.jobs is None or not later:
        return _do_shares([(work, cuts)])
    _collected.jobs.append((work, cuts))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Work that may be done later is done at the end: threads start once for all of it.

    Each piece of it must write to other memory than the others read and write.
    """
    _collected.jobs = []
    try:
        yield
        jobs = _collected.jobs
    finally:
        _collected.jobs = None
    if jobs:
        _do_shares(jobs)


def _do_shares(jobs: list[tuple[Work, list[int]]]) -> None:
    """Every job's k-th share by the k-th thread."""

    def share(k: int) -> None:
        for work, cuts in jobs:
            if k + 1 < len(cuts):
                work(cuts[k], cuts[k + 1])

    # One thread takes the same place in every tensor, so that no job waits for another to end.
    shares = max(len(cuts) - 1 for _, cuts in jobs)
    pool = _pool(shares, os.getpid())  # a forked process has none of its parent's threads
    done = [pool.submit(share, k) for k in range(1, shares)]
    try:
        share(0)
    finally:
        concurrent.futures.wait(done)
    for future in done:
        future.result()


def over_all(work: Work, flat: NDArray[Any], offset: int, later: bool = False) -> None:
    """work(begin, end) over the elements of flat [1, n], or over all of each piece of flat [P, n].

    Args:
      work: as of `in_parallel`.
      flat: as `arrays` returns it.
      offset: index of element 0 in the directions' index space.
      later: as of `in_parallel`.
    """
    pieces, size = flat.shape
    if pieces == 1:
        return in_parallel(work, size, offset % TILE, later)
    work(0, size)


def arrays(
    out: Tensor, source: Tensor, members: Members | None, pieces: Pieces
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """(out, source), [P, n / P] for P pieces, where these begin, and (starts, rows) of members."""
    firsts = _FIRST if pieces is None else np.asarray(pieces)
    flat, given = (tensor.numpy().reshape(len(firsts), -1) for tensor in (out, source))
    starts, rows = (_FIRST, _NO_ROWS) if members is None else (members.starts, members.rows)
    return flat, given, firsts, starts, rows
