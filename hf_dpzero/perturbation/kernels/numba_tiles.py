# mypy: disable-error-code="no-untyped-def"
"""What the compiled CPU kernels share: a tile's coordinates, members, threads.

A tile is 4096 coordinates that 32 Philox calls give as signs. Threads take contiguous parts, cut at the
ends of tiles, so their number does not matter to the result.
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
from torch import Tensor

from hf_dpzero.perturbation import directions
from hf_dpzero.perturbation.directions import NORMAL_UNIT, SIGNS_TILE, normal_tables
from hf_dpzero.perturbation.philox import MULTIPLIERS, WEYL

_jit = nb.njit(nogil=True, cache=True)
_inline = nb.njit(nogil=True, cache=True, inline="always")

_u32, _u64, _f32 = np.uint32, np.uint64, np.float32
_M0, _M1 = _u64(MULTIPLIERS[0]), _u64(MULTIPLIERS[1])
_W0, _W1 = _u32(WEYL[0]), _u32(WEYL[1])
_HALF, UNIT = _u64(32), _f32(NORMAL_UNIT)
TILE = SIGNS_TILE  # coordinates worked on at a time: 16 KiB of float32, in the first-level cache
_ODD = np.int64(directions._DITHERS - 1)
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


@functools.cache
def normal_cells() -> Any:
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

    Yields:
      Nothing.
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

    shares = max(len(cuts) - 1 for _, cuts in jobs)
    pool = _pool(shares, os.getpid())
    done = [pool.submit(share, k) for k in range(1, shares)]
    try:
        share(0)
    finally:
        concurrent.futures.wait(done)
    for future in done:
        future.result()


def arrays(out: Tensor, source: Tensor, members: Any, pieces: Any) -> tuple[Any, ...]:
    """(out, source), [P, n / P] for P pieces, and (starts, rows) as the compiled functions take them."""
    both = out.numpy(), source.numpy()
    if pieces is not None:
        both = both[0].reshape(len(pieces), -1), both[1].reshape(len(pieces), -1)
    return (*both, _FIRST, _NO_ROWS) if members is None else (*both, members.starts, members.rows)
