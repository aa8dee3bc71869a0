"""What was released, message by message: a client's own ledger, and the server's list of all it took.

The file is a `Trajectory`'s relative (`ledger/log_file.py`): a JSON header with its checksum, then
records of fixed size (round u64, client u32, K float32, CRC-32), each on disk before anything follows
from it. Rounds may be missing: a client that was away released nothing.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpzero.ledger.log_file import (
    LedgerError,
    append_whole,
    create_whole,
    header_lines,
    locked,
    never_written,
    split_header,
)

FORMAT, VERSION = "hf_dpzero.federated_messages", 1


def read_count(path: str | os.PathLike[str]) -> int:
    """How many whole messages a log holds; reads only, also while another process writes.

    Raises:
      LedgerError: its header is damaged.
    """
    header, body = split_header(Path(path).read_bytes(), path)
    return len(body) // (_layout(header).size + 4)


def _layout(header: Mapping[str, Any]) -> struct.Struct:
    return struct.Struct(f"<QI{int(header['num_values'])}f")


def _messages(
    body: bytes, layout: struct.Struct, path: str | os.PathLike[str]
) -> dict[tuple[int, int], tuple[float, ...]]:
    size, messages = layout.size + 4, {}
    for start in range(0, len(body) // size * size, size):
        if not _is_whole(body[start : start + size]):
            raise LedgerError(
                f"{path}: record {start // size} is corrupt (checksum), so what was spent is "
                "unknown; restore the file from a copy."
            )
        number, client, *values = layout.unpack_from(body, start)
        messages[number, client] = tuple(values)
    return messages


def _is_whole(record: bytes) -> bool:
    return zlib.crc32(record[:-4]).to_bytes(4, "little") == record[-4:]


class MessageLog:
    """An append-only list of (round, client, values), held by one process while it is open.

    Guarantee: what `append` accepted is on disk, whole, before it returns, once for each round and
    client; a changed byte is noticed; values come back bit for bit (they are float32 numbers).

    Args:
      path: of the file.
      header: what the messages belong to; JSON-safe. One that exists must have the same.

    Raises:
      LedgerError: damaged, of other settings, or held by another process.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.header = {"format": FORMAT, "version": VERSION, **header}
        self._record = _layout(header)
        self.messages: dict[tuple[int, int], tuple[float, ...]] = {}
        if not self.path.exists():
            self._create()
        self._lock = locked(self.path)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another process was first; it holds the lock
            create_whole(self.path, header_lines(self.header))

    def _read(self) -> None:
        raw = self.path.read_bytes()
        own, body = split_header(raw, self.path)
        changed = sorted(
            name
            for name in own.keys() | self.header.keys()
            if own.get(name) != self.header.get(name)
        )
        if changed:
            raise LedgerError(
                f"{self.path} belongs to other settings ({', '.join(changed)} differ): what it spent "
                "stays spent. Put the settings back to go on, or take another output_dir."
            )
        size = self._record.size + 4
        whole = len(body) // size * size
        if whole == len(body) > 0 and not _is_whole(body[-size:]):
            whole -= size * never_written(
                raw, len(raw) - size
            )  # another one is corrupt: `_messages`
        if whole != len(body):  # cut short by a crash, before anything was sent
            os.truncate(self.path, len(raw) - len(body) + whole)
        self.messages = _messages(body[:whole], self._record, self.path)

    def append(self, number: int, client: int, values: Sequence[float]) -> None:
        """Adds a message; on return it is on disk.

        Raises:
          LedgerError: that client has a message for that round.
        """
        if (number, client) in self.messages:
            raise LedgerError(f"{self.path} has a message of client {client} for round {number}.")
        record = self._record.pack(number, client, *values)
        append_whole(self.path, record + zlib.crc32(record).to_bytes(4, "little"))
        self.messages[number, client] = self._record.unpack(record)[2:]

    def get(self, number: int, client: int) -> tuple[float, ...] | None:
        """The values of a message, or None."""
        return self.messages.get((number, client))

    def count(self, client: int) -> int:
        """In how many rounds a client released."""
        return sum(who == client for _, who in self.messages)

    def last_round(self) -> int:
        """The last round with a message; -1 without any."""
        return max((number for number, _ in self.messages), default=-1)

    def close(self) -> None:
        """Lets other processes go on with the file."""
        self._lock.close()

    def __enter__(self) -> MessageLog:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
