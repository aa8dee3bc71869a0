"""Philox4x32-10, the counter-based bit source of every public direction, in numpy.

Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3". A call turns a 128-bit counter and
a 64-bit key into four 32-bit words by integer arithmetic alone, so the words are the same on every
machine and any of them can be had without the others. The compiled twins of this function, in
`kernels/`, compute the same words where they are used.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def stream_key(*numbers: int) -> Words:
    """The 128 bits that name a stream, uint32 [4]: a 64-bit Philox key and a 64-bit nonce.

    The first half of a SHA-256 over the numbers, so that any two streams are unrelated.

    Args:
      numbers: non-negative integers below 2^128.
    """
    text = b"".join(number.to_bytes(16, "little") for number in numbers)
    digest = hashlib.sha256(b"hf_dpzero stream 2" + text).digest()[:16]
    return np.frombuffer(digest, "<u4").astype(np.uint32)


def philox_words(calls: NDArray[np.uint64], key: Words) -> Words:
    """Four words of each call.

    Args:
      calls: uint64 [n], the low half of the counter; the nonce is the high half.
      key: uint32 [4] as `stream_key` gives it, or [4, n], one for each call.

    Returns:
      uint32 [4, n].
    """
    wide = key.astype(np.uint64)
    c = [calls & _LOW, calls >> _HALF, np.full_like(calls, wide[2]), np.full_like(calls, wide[3])]
    for turn in range(ROUNDS):
        low = (wide[0] + np.uint64(turn * WEYL[0])) & _LOW
        high = (wide[1] + np.uint64(turn * WEYL[1])) & _LOW
        first, second = np.uint64(MULTIPLIERS[0]) * c[0], np.uint64(MULTIPLIERS[1]) * c[2]
        c = [
            (second >> _HALF) ^ c[1] ^ low,
            second & _LOW,
            (first >> _HALF) ^ c[3] ^ high,
            first & _LOW,
        ]
    return np.stack(c).astype(np.uint32)
