"""The messages of a run: their bytes, what is refused about them, and the log that keeps them.

A round's two messages have the same head, little-endian: magic, kind u8, unused u8, count u16, round
u64, and 16 bytes of the contract's digest; then the body; then a CRC-32 of all that. For K values:

    ask     server to client: the releases before `round` that the client lacks, each 8 + 4 K bytes
    values  client to server: K float32, its noised clipped mean

so that a client that is up to date costs 36 + 8 + 4 K bytes down and 36 + 4 K bytes up. Joining is JSON,
once. A checksum finds accidents, not forgers: who sent a message is known by the transport.

A `MessageLog` is a client's own ledger, and the server's list of all that it took: as a `Trajectory`
(`ledger/log_file.py`) a JSON header with its checksum, then records of fixed size (round u64, client
u32, K float32, CRC-32). Rounds may be missing: a client that was away released nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_dpzero.ledger.log_file import (
    LedgerError,
    append_whole,
    create_whole,
    header_lines,
    locked,
    never_written,
    split_header,
)
from hf_dpzero.ledger.trajectory import Release

MAGIC = b"dpz1"
ASK, VALUES, BEHIND, NOTHING = 1, 2, 3, 4
DIGEST_BYTES = 16
MAX_RELEASES = 2**16 - 1
"""Of one ask, and so of rounds in a run: a client that comes late is sent all of them at once."""

RELEASED_NAME = "released.ledger"
"""A client's own ledger, in its folder: what it released, written before it is sent."""

FORMAT, VERSION = "hf_dpzero.federated_messages", 1
_HEAD = struct.Struct(f"<4sBBHQ{DIGEST_BYTES}s")
_KINDS = {ASK: "ask", VALUES: "values", BEHIND: "behind", NOTHING: "nothing"}


class MessageError(ValueError):
    """A message that is refused; says why."""


class Message(NamedTuple):
    """A message of a round, taken apart.

    Attributes:
      kind: `ASK`, `VALUES`, `BEHIND` (round is the first one whose release the client lacks) or
        `NOTHING` (the client releases nothing in this round).
      round: the round it is about.
      contract: first 16 bytes of the contract's SHA-256.
      releases: of an ask, those before `round`, oldest first.
      values: of `VALUES`, K floats, not checked.
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
    """Takes a message apart.

    Args:
      raw: what came, perhaps nothing.
      num_values: K.

    Returns:
      The message; its numbers are not judged (see `check_values`).

    Raises:
      MessageError: not the bytes of a message with K values.
    """
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
    if kind not in _KINDS or not fits:
        raise MessageError(
            f"malformed: kind {_KINDS.get(kind, kind)} with {count} entries in {len(body)} bytes does "
            f"not fit num_directions={num_values}."
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
    """Refuses a digest that is another run's.

    Raises:
      MessageError: the two differ.
    """
    if theirs != ours:
        raise MessageError(
            f"another contract: digest {theirs.hex()}, and {ours.hex()} here. It is of "
            "another run, base model or plan; both sides need the same recipe and settings."
        )


def check_values(values: Sequence[float], bound: float) -> None:
    """Refuses numbers that no honest client sends.

    Raises:
      MessageError: not finite, or larger than `bound` (`plan.LocalPlan.largest_value`).
    """
    if wrong := sum(not math.isfinite(value) for value in values):
        raise MessageError(f"not finite: {wrong} of the values.")
    if (largest := max(map(abs, values))) > bound:
        raise MessageError(
            f"out of range: a value of {largest:.4g}, where clip and noise of the client's plan allow "
            f"{bound:.4g}."
        )


def pack_json(values: Mapping[str, Any]) -> bytes:
    """Returns a message of joining."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def unpack_json(raw: bytes | None) -> dict[str, Any]:
    """Reads a message of joining.

    Raises:
      MessageError: not a JSON object.
    """
    try:
        values = json.loads(raw or b"")
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"malformed: no JSON ({error}).") from None
    if not isinstance(values, dict):
        raise MessageError(f"malformed: JSON of a {type(values).__name__}, not of an object.")
    return values


# ------------------------------------------------------------------ on disk

Messages = dict[tuple[int, int], tuple[float, ...]]
"""Values by (round, client)."""


class MessageLog:
    """An append-only list of (round, client, values), held by one process while it is open.

    Guarantee: what `append` accepted is on disk, whole, before it returns, once for each round and
    client; a changed byte is noticed; values come back bit for bit (they are float32 numbers).

    Args:
      path: of the file.
      header: what the messages belong to; JSON-safe. One that exists must have the same.

    Attributes:
      messages: all of them, by (round, client).

    Raises:
      LedgerError: damaged, of other settings, or held by another process.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.header = {"format": FORMAT, "version": VERSION, **header}
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # where another process was first, the lock decides between the two
            with contextlib.suppress(FileExistsError):
                create_whole(path, header_lines(self.header))
        self._lock = locked(path)
        try:
            self.messages = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> Messages:
        raw = self.path.read_bytes()
        own, messages, size = _parse(raw, self.path)
        names = own.keys() | self.header.keys()
        if changed := sorted(name for name in names if own.get(name) != self.header.get(name)):
            raise LedgerError(
                f"{self.path} belongs to other settings ({', '.join(changed)} differ): what it spent "
                "stays spent. Put the settings back to go on, or take another output_dir."
            )
        if size != len(raw):  # cut short by a crash, before anything was sent
            os.truncate(self.path, size)
        return messages

    def append(self, number: int, client: int, values: Sequence[float]) -> None:
        """Adds a message; on return it is on disk.

        Raises:
          LedgerError: that client has a message for that round.
        """
        if (number, client) in self.messages:
            raise LedgerError(f"{self.path} has a message of client {client} for round {number}.")
        layout = _layout(self.header)
        record = layout.pack(number, client, *values)
        append_whole(self.path, _sealed(record))
        # unpacked again: a reader of the file must not see other numbers than this process
        self.messages[number, client] = layout.unpack(record)[2:]

    def close(self) -> None:
        """Lets other processes open the file."""
        self._lock.close()


def read_log(path: Path) -> tuple[dict[str, Any], Messages]:
    """Reads a log's header and whole messages, also while another process writes.

    Raises:
      LedgerError: it is damaged.
    """
    return _parse(path.read_bytes(), path)[:2]


def _layout(header: Mapping[str, Any]) -> struct.Struct:
    return struct.Struct(f"<QI{int(header['num_values'])}f")


def _parse(raw: bytes, path: Path) -> tuple[dict[str, Any], Messages, int]:
    """Returns the header, the messages, and how many bytes hold them."""
    header, body = split_header(raw, path)
    layout = _layout(header)
    size = layout.size + 4
    records = [body[i : i + size] for i in range(0, len(body) // size * size, size)]
    damaged = [i for i, record in enumerate(records) if _sealed(record[:-4]) != record]
    # after a loss of power the last record may be zeros: it was never synced, so nothing was sent
    at_end = damaged == [len(records) - 1] and len(body) == len(records) * size
    if at_end and never_written(raw, len(raw) - size):
        del records[-1]
    elif damaged:
        raise LedgerError(
            f"{path}: record {damaged[0]} is corrupt (checksum), so what was spent is "
            "unknown; restore the file from a copy."
        )
    messages: Messages = {}
    for record in records:
        number, client, *values = layout.unpack(record[:-4])
        messages[number, client] = tuple(values)
    return header, messages, len(raw) - len(body) + len(records) * size
