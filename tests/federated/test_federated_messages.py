"""The bytes of a round and of the log: their number, what comes back, and everything that is refused."""

from __future__ import annotations

import contextlib
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
    MessageLog,
    pack,
    read_log,
    unpack,
    unpack_json,
)
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import Release

DIGEST = bytes(range(16))
GOOD = pack(Message(VALUES, 7, DIGEST, values=(1.0, 2.0, 3.0)))


def test_messages_come_back_and_a_round_costs_less_than_100_and_16_bytes_a_direction():
    two = (Release(0, (1.0, 2.0, 3.0), 0.1), Release(1, (0.5, 0.0, -1.0), 1e-9))
    for message in (
        Message(VALUES, 7, DIGEST, values=(1.5, -2.0, 0.0)),
        Message(ASK, 2, DIGEST, two),
        Message(ASK, 5, DIGEST),
        Message(BEHIND, 3, DIGEST),
        Message(NOTHING, 3, DIGEST),
    ):
        assert unpack(pack(message), 3) == message
    for k in (1, 8, 1000):
        values = tuple(float(i) for i in range(k))
        up = pack(Message(VALUES, 10**9, DIGEST, values=values))
        down = pack(Message(ASK, 10**9, DIGEST, releases=(Release(10**9 - 1, values, 0.1),)))
        assert len(up) == 36 + 4 * k and len(down) == 36 + 8 + 4 * k <= 100 + 16 * k - len(up)


def test_every_changed_byte_is_noticed_and_what_is_no_json():
    for place in range(len(GOOD)):
        with pytest.raises(MessageError, match="malformed"):
            unpack(GOOD[:place] + bytes([GOOD[place] ^ 1]) + GOOD[place + 1 :], 3)
    for raw in (None, b"{", b"[1]", b"\xff", b"[" * 200_000):
        with pytest.raises(MessageError, match="malformed"):
            unpack_json(raw)


def resealed(raw: bytes) -> bytes:
    return raw + zlib.crc32(raw).to_bytes(4, "little")


TWO_OF_ONE = struct.pack("<4sBBHQ16s", b"dpz1", ASK, 0, 2, 1, DIGEST) + bytes(40)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (None, "NoneType"),
        ("text", "str"),
        (b"", "0 bytes"),
        (b"GET / HTTP/1.1\r\n" + bytes(40), "no message of hf-dpzero"),
        (GOOD[:-1], "checksum"),
        (resealed(GOOD[:-8]), "does not fit"),
        (resealed(GOOD[:4] + b"\x09" + GOOD[5:-4]), "does not fit"),
        (pack(Message(VALUES, 7, DIGEST, values=(1.0, 2.0))), "num_directions=3"),
        (resealed(TWO_OF_ONE), "2 releases before round 1"),
    ],
)
def test_malformed_messages_are_refused(raw, why):
    with pytest.raises(MessageError, match=f"malformed.*{why}"):
        unpack(raw, 3)


# ------------------------------------------------------------------ the log

RECORD = 8 + 8 + 4 * (2 + 2) + 4  # of a trajectory's file, with round and client before two values


def test_a_message_log_keeps_whole_records(tmp_path):
    path = tmp_path / "new" / "messages.ledger"
    header = {"contract_digest": "ab"}
    first, second = {(0, 1): (1.5, -2.0)}, {(4, 0): (0.5, 3.0)}

    def opened(**changes):
        return contextlib.closing(MessageLog(path, {**header, **changes}, 2))

    with opened() as log:
        log.append(0, 1, (1.5, -2.0))
        log.append(4, 0, (0.5, 3.0))
        with pytest.raises(LedgerError, match="has a message of client 1 for round 0"):
            log.append(0, 1, (1.5, -2.0))
        with pytest.raises(LedgerError, match="another run"):
            MessageLog(path, header, 2)
        assert log.messages == read_log(path)[1] == first | second
    with pytest.raises(LedgerError, match="contract_digest"), opened(contract_digest="cd"):
        pass
    raw = path.read_bytes()
    for lost in (
        raw[:-3],
        raw[:-RECORD] + bytes(RECORD),
    ):  # cut short; made longer and never written
        path.write_bytes(lost)
        assert read_log(path)[1] == first and path.read_bytes() == lost
        with opened() as log:
            assert log.messages == first
            log.append(4, 0, (0.5, 3.0))
        assert path.read_bytes() == raw
    path.write_bytes(raw[:-10] + b"\x07" + raw[-9:])
    with pytest.raises(LedgerError, match="record after step 0 is corrupt"), opened():
        pass
