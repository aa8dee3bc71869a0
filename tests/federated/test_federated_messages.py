"""The bytes of a round: their number, what comes back, and everything that is refused."""

from __future__ import annotations

import math
import struct
import zlib

import pytest

from hf_dpzero.federated.messages import (
    ASK,
    BEHIND,
    NOTHING,
    VALUES,
    Message,
    MessageError,
    check_contract,
    check_values,
    pack,
    unpack,
    unpack_json,
)
from hf_dpzero.ledger.trajectory import Release

DIGEST = bytes(range(16))


@pytest.mark.parametrize("k", [1, 8, 32, 1000])
def test_a_round_costs_less_than_100_and_16_bytes_a_direction(k):
    values = tuple(float(i) for i in range(k))
    up = pack(Message(VALUES, 10**9, DIGEST, values=values))
    down = pack(Message(ASK, 10**9, DIGEST, releases=(Release(10**9 - 1, values, 0.1),)))
    assert len(up) == 36 + 4 * k and len(down) == 36 + 8 + 4 * k
    assert len(up) + len(down) <= 100 + 16 * k


@pytest.mark.parametrize(
    "message",
    [
        Message(VALUES, 7, DIGEST, values=(1.5, -2.0, 1e-30 * 0)),
        Message(
            ASK, 2, DIGEST, (Release(0, (1.0, 2.0, 3.0), 0.1), Release(1, (0.5, 0.0, -1.0), 1e-9))
        ),
        Message(ASK, 5, DIGEST),
        Message(BEHIND, 3, DIGEST),
        Message(NOTHING, 3, DIGEST),
    ],
)
def test_messages_come_back(message):
    assert unpack(pack(message), 3) == message


def resealed(raw: bytes) -> bytes:
    return raw + zlib.crc32(raw).to_bytes(4, "little")


GOOD = pack(Message(VALUES, 7, DIGEST, values=(1.0, 2.0, 3.0)))


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (None, "NoneType"),
        ("text", "str"),
        (b"", "0 bytes"),
        (b"GET / HTTP/1.1\r\n" + bytes(40), "no message of hf-dpzero"),
        (GOOD[:-1], "checksum"),
        (GOOD[:20] + b"\x01" + GOOD[21:], "checksum"),
        (resealed(GOOD[:-8]), "does not fit"),
        (resealed(GOOD[:4] + b"\x09" + GOOD[5:-4]), "does not fit"),
        (pack(Message(VALUES, 7, DIGEST, values=(1.0, 2.0))), "num_directions=3"),
        (
            resealed(struct.pack("<4sBBHQ16s", b"dpz1", ASK, 0, 2, 1, DIGEST) + bytes(40)),
            "2 releases",
        ),
    ],
)
def test_malformed_messages_are_refused(raw, why):
    with pytest.raises(MessageError, match="malformed") as error:
        unpack(raw, 3)
    assert why in str(error.value)


def test_values_that_no_honest_client_sends_are_refused():
    check_values((1.0, -2.0), 2.0)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(MessageError, match="not finite: 1"):
            check_values((0.0, bad), 2.0)
    with pytest.raises(MessageError, match=r"out of range: a value of 2\.5, .* allow 2"):
        check_values((1.0, -2.5), 2.0)


def test_another_contract_is_refused():
    check_contract(unpack(GOOD, 3), DIGEST)
    with pytest.raises(MessageError, match="another contract"):
        check_contract(unpack(GOOD, 3), bytes(16))


@pytest.mark.parametrize("raw", [None, b"{", b"[1]", b"\xff", 7])
def test_json_that_is_none(raw):
    with pytest.raises(MessageError, match="malformed"):
        unpack_json(raw)
