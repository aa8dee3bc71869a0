# mypy: disable-error-code="no-untyped-def"
"""bfloat16 and float16 on the CPU (numba): to float32, and back with stochastic rounding.

Bits are worked on as integers, for numba has neither type. All sizes are those of the arrays given.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from hf_dpzero.perturbation import directions

_jit = nb.njit(nogil=True, cache=True)
_u32, _f32 = np.uint32, np.float32
_STEP = _u32(directions.DITHER_STEP)


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
