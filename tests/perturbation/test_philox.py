"""The bit source: Philox4x32-10 against plain integers, and the names of streams."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hf_dpzero.perturbation.directions import philox_words, stream_key

MASK = 0xFFFFFFFF


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """One Philox4x32-10 call, from the paper (Salmon et al. 2011, section 3.3), in plain integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & MASK,
            (first >> 32) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def reference_words(key: np.ndarray, call: int) -> list[int]:
    """The call's four words: its number is the counter's low half, the nonce the high half."""
    k0, k1, n0, n1 = key.tolist()
    return philox4x32([call & MASK, call >> 32, n0, n1], [k0, k1])


# kat_vectors of Random123 for philox4x32-10: all zero, all one, digits of pi.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def hexadecimal(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_published_known_answers(counter, key, words):
    """Of the plain-integer reference, and of the package's function."""
    c, k = hexadecimal(counter), hexadecimal(key)
    assert philox4x32(c, k) == hexadecimal(words)
    call = np.array([c[1] << 32 | c[0]], np.uint64)
    found = philox_words(call, np.array([*k, *c[2:]], np.uint32))
    assert found.dtype == np.uint32
    assert found[:, 0].tolist() == hexadecimal(words)


def test_words_are_philox_at_random_counters_and_keys():
    """A thousand calls over the whole 64-bit range, and the ends of it."""
    choose = np.random.default_rng(0)
    ends = np.array([0, 1, MASK, MASK + 1, (1 << 64) - 1], np.uint64)
    for _ in range(10):
        key = choose.integers(0, 1 << 32, 4, dtype=np.uint32)
        calls = np.concatenate([ends, choose.integers(0, 1 << 64, 100, dtype=np.uint64)])
        found = philox_words(calls, key)
        assert found.shape == (4, calls.size)
        assert found.T.tolist() == [reference_words(key, call) for call in calls.tolist()]


def test_stream_keys_are_the_ones_that_released_trajectories_are_made_of():
    """Pinned: another value would make every released trajectory replay to other weights."""
    key = 0x00112233445566778899AABBCCDDEEFF
    assert stream_key(key, 3, 1, 0).tolist() == hexadecimal("71e873e0 40bfda52 de55e552 e1b5d45a")


def test_stream_keys_differ_in_every_bit_of_every_argument():
    """Any single bit of (key, step, query, domain), the highest included, gives another stream."""
    base, keys = (0, 0, 0, 0), set()
    keys.add(stream_key(*base).tobytes())
    for place, bit in itertools.product(range(4), range(128)):
        changed = list(base)
        changed[place] = 1 << bit
        keys.add(stream_key(*changed).tobytes())
    assert len(keys) == 1 + 4 * 128
