# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""A row of 32 bfloat16 values plus or minus one amount, in the CPU's vector instructions (LLVM).

numba's own loops over 16-bit numbers take three times as long: it narrows eight at a time, and cannot
write past the caches. What is here is ordinary LLVM vector code, so it compiles for any CPU; values lie
in pairs, the first in the lower half of a 32-bit number, as on every little-endian machine.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from hf_dpzero.perturbation.directions import DITHER_STEP, LANES

_jit = nb.njit(nogil=True, cache=True)
_u32, _f32 = np.uint32, np.float32
_STEP = _u32(DITHER_STEP)
LINE = 64
"""Bytes of a cache line, and of a row of 16-bit numbers."""
_AHEAD = 4096  # bytes: a page, where the CPU's own prefetching ends
_PAIRS = LANES // 2
_INTEGERS = ir.VectorType(ir.IntType(32), _PAIRS)
_FLOATS = ir.VectorType(ir.FloatType(), _PAIRS)


def _each(number: int) -> Any:
    return ir.Constant(_INTEGERS, [number % 2**32] * _PAIRS)


def _spread(builder: Any, value: Any) -> Any:
    """A number as all 16 of a vector."""
    one = builder.insert_element(ir.Constant(_INTEGERS, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, _each(0))


def _sixteen(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:
    """A pointer to 16 32-bit numbers, from the array's element `start` on."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), _INTEGERS.as_pointer())


def _prefetch(builder: Any, pointer: Any) -> None:
    """Asks for a line to be brought to the first-level cache; any address will do."""
    number, place = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [place, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [place], kind)
    read, nearest, data = number(0), number(3), number(1)
    builder.call(function, [builder.bitcast(pointer, place), read, nearest, data])


def _rounded(builder: Any, values: Any, words: Any, down: Any, dithers: Any) -> Any:
    """The bits of values +- amount, as float32, plus the dithers that their cut is rounded by."""
    signed = builder.xor(builder.and_(words, _each(0x80000000)), down)
    floats = (builder.bitcast(bits, _FLOATS) for bits in (values, signed))
    total = builder.bitcast(builder.fadd(*floats), _INTEGERS)
    return builder.add(total, builder.lshr(dithers, _each(16)))


def _row(streamed: bool) -> Any:
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
