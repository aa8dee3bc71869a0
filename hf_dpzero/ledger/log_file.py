"""The bytes of a ledger: its header's lines, whole appends, durability, one writer at a time."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

_SECTOR = 512


class LedgerError(ValueError):
    """A ledger that is corrupt, truncated or of another run."""


class LedgerWriteError(LedgerError, OSError):
    """A ledger that could not be written: the disk is full, read-only or gone."""


def parsed(text: str | bytes) -> Any:
    """Reads JSON in which no object names a key twice: readers would see one value, programs the other.

    Raises:
      ValueError: it does, or the text is no JSON.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{max(names, key=names.count)!r} stands there twice")
        return values

    return json.loads(text, object_pairs_hook=once)


@contextlib.contextmanager
def _draft(path: Path, content: bytes, mode: int = 0o644) -> Iterator[Path]:
    """A durable file beside `path`, which the caller gives that name; nothing else is left of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            flush(file)
        draft.chmod(mode)
        yield draft
    finally:
        draft.unlink(missing_ok=True)
    # The new name too must outlast a loss of power, not only the bytes.
    flush_folder(path.parent)


def create_whole(path: Path, content: bytes) -> None:
    """Makes a new file, durable: with all of its content, or not at all.

    Raises:
      FileExistsError: there is one; it stays as it is.
      OSError: it cannot be written.
    """
    with _draft(path, content) as draft:
        try:
            # A link, not a rename: of two runs that start at once, one finds the file there.
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if path.exists():
                raise FileExistsError(str(path)) from None
            draft.rename(path)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Writes UTF-8 `text` to `path`, durable; readers see its old content or the new, never a part."""
    with _draft(path, text.encode(), mode) as draft:
        draft.replace(path)


def write_for_owner(path: Path, text: str) -> None:
    """Writes a file that holds a secret: whole or not at all, for its owner's eyes only.

    Args:
      path: the file; its folder is made, for the owner alone, where there is none.
      text: its new content.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, text, mode=0o600)


def append_whole(path: Path, record: bytes, wait: bool = True) -> Callable[[], object]:
    """Appends to a file and syncs it; if either fails (OSError), the file is left as it was.

    Without `wait` a thread syncs, and what is returned waits for that and raises its error.
    """
    # Without a buffer, which would be written again when the file is closed.
    file = open(path, "r+b", buffering=0)  # noqa: SIM115
    size = file.seek(0, os.SEEK_END)

    def sync() -> None:
        with _whole_or_not(file, size):
            flush(file)
        file.close()

    with _whole_or_not(file, size):
        while record:
            record = record[file.write(record) :]
        if not wait:
            # A new thread has begun when `submit` returns; an idle one would wait for the interpreter.
            pool = ThreadPoolExecutor(1)
            synced = pool.submit(sync)
            pool.shutdown(wait=False)
            return synced.result
    sync()
    return lambda: None


@contextlib.contextmanager
def _whole_or_not(file: IO[bytes], size: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        # Half a record would stand before the next one, or claim a release that was not made.
        os.ftruncate(file.fileno(), size)
        file.close()
        raise


def never_written(raw: bytes, start: int) -> bool:
    """Whether a last record reads as a loss of power leaves it: zeros from `start` or a sector on.

    A file system may have made the file longer before the sectors were written. Such a record was never
    synced, so nothing followed from it.

    >>> never_written(b"abc" + bytes(9), 3), never_written(b"abc" + bytes(8) + b"x", 3)
    (True, False)
    """
    sectors = range(-(-start // _SECTOR) * _SECTOR, len(raw), _SECTOR)
    return any(not any(raw[place:]) for place in (start, *sectors))


def flush(file: IO[Any]) -> None:
    """Makes what was written to an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Makes a new file's name durable; a no-op where folders cannot be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def locked(path: Path) -> IO[bytes]:
    """Opens the ledger and holds it for this run alone until the handle is closed.

    Raises:
      LedgerError: another run holds it.
    """
    handle = open(path, "rb")  # noqa: SIM115
    try:
        import fcntl
    except ImportError:  # no advisory locks on this platform
        return handle
    try:
        # Of the open file: it goes with the process, also when that is killed.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise LedgerError(
            f"{path} is being written by another run: two runs under one ledger would each spend "
            "what it counts once. Wait for it, or stop it."
        ) from None
    return handle


def header_lines(header: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys, and its CRC-32 in hex."""
    text = json.dumps(header, sort_keys=True).encode()
    return text + b"\n%08x\n" % zlib.crc32(text)


def split_header(raw: bytes, path: str | os.PathLike) -> tuple[dict[str, Any], bytes]:
    """Takes a ledger apart.

    Returns:
      (the header, the bytes of the records).

    Raises:
      LedgerError: the header does not match its checksum.
    """
    text, _, rest = raw.partition(b"\n")
    crc, body = rest[:9], rest[9:]
    if crc != b"%08x\n" % zlib.crc32(text):
        raise LedgerError(
            f"{path}: its header is cut short or does not match its checksum; not a ledger, or "
            "corrupt: restore the file from a copy."
        )
    return dict(parsed(text)), body
