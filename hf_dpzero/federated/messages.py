"""The bytes that a server and a client exchange, and what is refused about them.

A round's two messages have the same head, little-endian: magic, kind u8, unused u8, count u16, round
u64, and 16 bytes of the contract's digest; then the body; then a CRC-32 of all that. For K values:

    ask     server to client: the releases before `round` that the client lacks, each 8 + 4 K bytes
    values  client to server: K float32, its noised clipped mean

so that a client that is up to date costs 36 + 8 + 4 K bytes down and 36 + 4 K bytes up. Joining is JSON,
once. A checksum finds accidents, not forgers: who sent a message is known by the transport.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_dpzero.ledger.trajectory import Release

MAGIC = b"dpz1"
ASK, VALUES, BEHIND, NOTHING = 1, 2, 3, 4
DIGEST_BYTES = 16
_HEAD, _RATE = struct.Struct(f"<4sBBHQ{DIGEST_BYTES}s"), struct.Struct("<d")
_KINDS = {ASK: "ask", VALUES: "values", BEHIND: "behind", NOTHING: "nothing"}
MOST_RELEASES = 2**16 - 1
"""Of one ask, and so of rounds in a run: who comes late is sent all of them at once."""


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
    """The bytes of a message; `unpack` reads them.

    >>> len(pack(Message(VALUES, 0, bytes(16), values=(1.0,) * 32)))
    164
    """
    body = struct.pack(f"<{len(message.values)}f", *message.values)
    for release in message.releases:
        body += _RATE.pack(release.learning_rate)
        body += struct.pack(f"<{len(release.values)}f", *release.values)
    count = len(message.releases) or len(message.values)
    whole = _HEAD.pack(MAGIC, message.kind, 0, count, message.round, message.contract) + body
    return whole + zlib.crc32(whole).to_bytes(4, "little")


def unpack(raw: Any, num_values: int) -> Message:
    """Takes a message apart.

    Args:
      raw: what came; anything.
      num_values: K.

    Returns:
      The message; its numbers are not judged (see `check_values`).

    Raises:
      MessageError: not the bytes of a message with K values.
    """
    if not isinstance(raw, bytes) or len(raw) < _HEAD.size + 4 or raw[:4] != MAGIC:
        size = f"{len(raw)} bytes" if isinstance(raw, bytes) else type(raw).__name__
        raise MessageError(f"malformed: {size} that are no message of hf-dpzero (no {MAGIC!r}).")
    whole, crc = raw[:-4], raw[-4:]
    if zlib.crc32(whole).to_bytes(4, "little") != crc:
        raise MessageError("malformed: its bytes do not match their checksum.")
    _, kind, _, count, number, contract = _HEAD.unpack_from(whole)
    body = whole[_HEAD.size :]
    item = {ASK: 8 + 4 * num_values, VALUES: 4}.get(kind, 0)
    expected = count * item if kind != VALUES or count == num_values else -1
    if kind not in _KINDS or len(body) != expected:
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
    layout = struct.Struct(f"<d{num_values}f")
    rows = [layout.unpack_from(body, i * item) for i in range(count)]
    first = number - count
    return message._replace(
        releases=tuple(Release(first + i, row[1:], row[0]) for i, row in enumerate(rows))
    )


def check_contract(message: Message, digest: bytes) -> None:
    """Refuses a message of another run.

    Raises:
      MessageError: its contract is another one.
    """
    if message.contract != digest:
        raise MessageError(
            f"another contract: digest {message.contract.hex()}, and {digest.hex()} here. It is of "
            "another run, base model or plan; both sides need the same recipe and settings."
        )


def check_values(values: Sequence[float], most: float) -> None:
    """Refuses numbers that no honest client sends.

    Args:
      values: K floats.
      most: bound on each absolute value (`local_plan.LocalPlan.largest_value`).

    Raises:
      MessageError: not finite, or beyond the bound.
    """
    if not all(map(math.isfinite, values)):
        raise MessageError(
            f"not finite: {sum(not math.isfinite(v) for v in values)} of the values."
        )
    largest = max(map(abs, values))
    if largest > most:
        raise MessageError(
            f"out of range: a value of {largest:.4g}, where clip and noise of the client's plan allow "
            f"{most:.4g}."
        )


def pack_json(values: Mapping[str, Any]) -> bytes:
    """A message of joining."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def unpack_json(raw: Any) -> dict[str, Any]:
    """Reads a message of joining.

    Raises:
      MessageError: not a JSON object.
    """
    try:
        values = json.loads(raw)
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"malformed: no JSON ({error}).") from None
    if not isinstance(values, dict):
        raise MessageError(f"malformed: JSON of a {type(values).__name__}, not of an object.")
    return values
