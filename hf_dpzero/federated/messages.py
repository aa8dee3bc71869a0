"""The messages of a run: their bytes, what is refused about them, and the log that keeps them.

A round's two messages have the same head, little-endian: magic, kind u8, unused u8, count u16, round
u64, and 16 bytes of the contract's digest; then the body; then a CRC-32 of all that. For K values:

    ask     server to client: the releases before `round` that the client lacks, each 8 + 4 K bytes
    values  client to server: K float32, its noised clipped mean

Joining is JSON, once. A checksum finds accidents, not forgers: who sent a message is known by the
transport. A `MessageLog` is a client's own ledger, and the server's list of all that it took.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import Release, Trajectory

MAGIC = b"dpz1"
ASK, VALUES, BEHIND, NOTHING = 1, 2, 3, 4
DIGEST_BYTES = 16
MAX_RELEASES = 2**16 - 1
"""Of one ask, and so of rounds in a run: a client that comes late is sent all of them at once."""

RELEASED_NAME = "released.ledger"
"""A client's own ledger, in its folder: what it released, written before it is sent."""

_HEAD = struct.Struct(f"<4sBBHQ{DIGEST_BYTES}s")
DIGEST_AT = slice(_HEAD.size - DIGEST_BYTES, _HEAD.size)


class MessageError(ValueError):
    """A message that is refused; says why."""


class Message(NamedTuple):
    """A message of a round, taken apart; its K numbers are not judged (see `check_values`).

    Of `BEHIND`, `round` is the first one whose release the client lacks; with `NOTHING` it releases
    nothing in this round. Releases of an ask are those before `round`, oldest first.
    """

    kind: int
    round: int
    contract: bytes
    releases: tuple[Release, ...] = ()
    values: tuple[float, ...] = ()


def pack(message: Message) -> bytes:
    """Returns the bytes of a message; `unpack` reads them.

    >>> len(pack(Message(VALUES, 0, bytes(16), values=(1.0,) * 32)))
    164
    """
    body = struct.pack(f"<{len(message.values)}f", *message.values)
    for release in message.releases:
        body += struct.pack(f"<d{len(release.values)}f", release.learning_rate, *release.values)
    count = len(message.releases) or len(message.values)
    head = _HEAD.pack(MAGIC, message.kind, 0, count, message.round, message.contract)
    return _sealed(head + body)


def unpack(raw: bytes | None, num_values: int) -> Message:
    """Takes what came, perhaps nothing, apart."""
    if not isinstance(raw, bytes) or len(raw) < _HEAD.size + 4 or raw[:4] != MAGIC:
        size = f"{len(raw)} bytes" if isinstance(raw, bytes) else type(raw).__name__
        raise MessageError(f"malformed: {size} that are no message of hf-dpzero (no {MAGIC!r}).")
    if _sealed(raw[:-4]) != raw:
        raise MessageError("malformed: its bytes do not match their checksum.")
    _, kind, _, count, number, contract = _HEAD.unpack_from(raw)
    body = raw[_HEAD.size : -4]
    # a learning rate is float64, as the schedule computes it; values are float32, as they were noised
    item = {ASK: 8 + 4 * num_values, VALUES: 4}.get(kind, 0)
    # a count of values is not a count of messages: fewer than K would be another run's
    fits = len(body) == count * item and (kind != VALUES or count == num_values)
    if not ASK <= kind <= NOTHING or not fits:
        raise MessageError(
            f"malformed: kind {kind} with {count} entries in {len(body)} bytes does not fit "
            f"num_directions={num_values}."
        )
    message = Message(kind, number, contract)
    if kind == VALUES:
        return message._replace(values=struct.unpack(f"<{count}f", body))
    if kind != ASK:
        return message
    if count > number:
        raise MessageError(f"malformed: {count} releases before round {number}.")
    rows = enumerate(struct.iter_unpack(f"<d{num_values}f", body), start=number - count)
    return message._replace(releases=tuple(Release(step, row[1:], row[0]) for step, row in rows))


def _sealed(content: bytes) -> bytes:
    return content + zlib.crc32(content).to_bytes(4, "little")


def check_contract(theirs: bytes, ours: bytes) -> None:
    """Refuses a digest that is another run's, by a `MessageError`."""
    if theirs != ours:
        raise MessageError(
            f"another contract: {theirs.hex()}, and {ours.hex()} here, of another run or settings."
        )


def check_values(values: Sequence[float], bound: float) -> None:
    """Refuses numbers that no honest client sends: not finite, or above `LocalPlan.largest_value`."""
    if wrong := sum(not math.isfinite(value) for value in values):
        raise MessageError(f"not finite: {wrong} of the values.")
    if (largest := max(map(abs, values))) > bound:
        raise MessageError(
            f"out of range: a value of {largest:.4g}, and the plan allows {bound:.4g}."
        )


def pack_json(values: Mapping[str, Any]) -> bytes:
    """Returns a message of joining."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def unpack_json(raw: bytes | None) -> dict[str, Any]:
    """Reads a message of joining, a JSON object."""
    try:
        values = json.loads(raw or b"")
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"malformed: no JSON ({error}).") from None
    if not isinstance(values, dict):
        raise MessageError(f"malformed: JSON of a {type(values).__name__}, not of an object.")
    return values


Messages = dict[tuple[int, int], tuple[float, ...]]
"""Values by (round, client)."""


class MessageLog:
    """An append-only list of (round, client, values), held by one process while it is open.

    Guarantee: that of `Trajectory`, whose file it is, and one message for each round and client. The
    step of a record counts messages; round and client stand before its K values, exact in float32 below
    2^24. Rounds may be missing: a client that was away released nothing.

    Raises:
      LedgerError: damaged, of another header, or held by another process.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], num_values: int) -> None:
        opened = Trajectory.open if path.exists() else Trajectory.create
        self._file = opened(path, {**header, "num_values": 2 + num_values})
        self.messages = _messages(self._file)

    def append(self, number: int, client: int, values: Sequence[float]) -> None:
        """Adds a client's only message for a round; on return it is on disk."""
        if (number, client) in self.messages:
            raise LedgerError(
                f"{self._file.path} has a message of client {client} for round {number}."
            )
        record = (float(number), float(client), *values)
        self._file.append(Release(self._file.next_step, record, 0.0))
        self.messages[number, client] = tuple(values)

    def close(self) -> None:
        """Lets other processes open the file."""
        self._file.close()


def read_log(path: Path) -> tuple[dict[str, Any], Messages]:
    """Reads a log's header and whole messages, also while another process writes."""
    file, _ = Trajectory._parse(path.read_bytes(), path)
    return file.header, _messages(file)


def _messages(file: Trajectory) -> Messages:
    rows = (release.values for release in file.releases)
    return {(int(number), int(client)): tuple(values) for number, client, *values in rows}
