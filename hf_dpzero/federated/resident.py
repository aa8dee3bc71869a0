"""Keeps a client's model and rows in one process, where Flower starts a process for each message.

The process of a message loads nothing: it hands the payload over a local socket to the client's resident
process, which it starts where there is none, and carries the answer back. A resident process ends with
the SuperNode that it serves. Killed at any moment, the next message starts another, which goes on from
the client's ledger.

    python -m hf_dpzero.federated.resident FOLDER PID < values.json     # as `hand_over` starts it

What it prints goes to FOLDER/client.log, which may quote rows: only its owner reads it, and it stays on
the client.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from hf_dpzero.ledger.log_file import write_for_owner

ADDRESS_NAME, LOG_NAME = "resident.json", "client.log"
START_SECONDS, WATCH_SECONDS = 120.0, 2.0
KINDS = {"join": b"J", "round": b"R"}
ANSWERED, FAILED = b"+", b"-"
GONE = (OSError, EOFError, AuthenticationError)
"""What it is to talk to a process that is not there any more, or is not the one that is meant."""


class ResidentError(RuntimeError):
    """A resident process that could not be started, or that failed; its log says why."""


# ------------------------------------------------------------------ the process of a message


def hand_over(folder: Path, values: Mapping[str, Any], kind: str, payload: bytes) -> bytes:
    """Has the client's resident process answer a message.

    Args:
      folder: the client's own.
      values: its `--node-config`; with other values than before, another process is started.
      kind: "join" or "round".
      payload: of the message.

    Returns:
      The payload of the answer.

    Raises:
      ResidentError: it failed, or does not start; `client.log` in the folder says why.
    """
    for _ in range(2):  # once more if it is killed meanwhile
        with contextlib.suppress(*GONE), _connected(folder, values) as connection:
            connection.send_bytes(KINDS[kind] + payload)
            answer = connection.recv_bytes()
            if answer[:1] == ANSWERED:
                return answer[1:]
            break
    raise ResidentError(f"no answer; {folder / LOG_NAME} says why.")


def _connected(folder: Path, values: Mapping[str, Any]) -> Connection:
    text = json.dumps(dict(values), sort_keys=True)
    with contextlib.suppress(*GONE, ValueError, KeyError):
        return _call(folder, text)
    process = _start(folder, text)
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(*GONE, ValueError, KeyError):
            return _call(folder, text)
        time.sleep(0.05)
    process.kill()
    raise ResidentError(f"the client's process does not start; {folder / LOG_NAME} says why.")


def _call(folder: Path, text: str) -> Connection:
    entry = json.loads((folder / ADDRESS_NAME).read_text(encoding="utf-8"))
    if entry["values"] != text:
        raise ValueError("other values than those of the process that is there")
    return Client(entry["address"], authkey=bytes.fromhex(entry["key"]))


def _start(folder: Path, text: str) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADDRESS_NAME).unlink(missing_ok=True)
    with open(folder / LOG_NAME, "ab", opener=_for_owner) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hf_dpzero.federated.resident", str(folder), str(os.getppid())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(text.encode())
        process.stdin.close()
    return process


def _for_owner(path: str, flags: int) -> int:
    """Opens a file that nobody else reads, also where it was readable before."""
    descriptor = os.open(path, flags, 0o600)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, 0o600)
    return descriptor


# ------------------------------------------------------------------ the resident process


def serve(folder: Path, text: str, watched: int) -> None:
    """Answers one message after the other, until the watched process ends or another takes its place.

    Args:
      folder: the client's.
      text: its `--node-config` as JSON.
      watched: id of the process that it serves.
    """
    key = secrets.token_bytes(32)
    with Listener(authkey=key) as listener:
        own = {"key": key.hex(), "pid": os.getpid()}
        entry = {"address": listener.address, "values": text, **own}
        write_for_owner(folder / ADDRESS_NAME, json.dumps(entry))
        threading.Thread(target=_watch, args=(folder, entry, watched), daemon=True).start()
        answers = _Answers(folder, json.loads(text))
        while True:
            with contextlib.suppress(*GONE), listener.accept() as connection:
                connection.send_bytes(answers(connection.recv_bytes()))


class _Answers:
    """Answers of a client; model and rows are loaded with the first message."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.folder, self.values = folder, values
        self.side: Any = None

    def __call__(self, request: bytes) -> bytes:
        try:
            return ANSWERED + self._answer(request[:1], request[1:])
        except (ValueError, OSError, ImportError) as error:  # what the user can mend
            logging.debug("where it came from", exc_info=True)
            logging.error("no answer: %s", error)
            return FAILED
        except Exception:  # nothing of it leaves the client
            logging.exception("no answer")
            return FAILED

    def _answer(self, kind: bytes, payload: bytes) -> bytes:
        from hf_dpzero.federated.node import node_of

        node = node_of(self.values)
        if self.side is None:
            self.side = node.build()
        where = (node.name, node.shard, self.folder)
        if kind == KINDS["join"]:
            return bytes(self.side.invited(*where, payload))
        return bytes(self.side.client(*where).answer(self.side.replica, payload))


def _watch(folder: Path, entry: Mapping[str, Any], watched: int) -> None:
    path = folder / ADDRESS_NAME
    while _alive(watched):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8"))["key"] != entry["key"]:
                break  # another process took the place of this one
        time.sleep(WATCH_SECONDS)
    os._exit(0)  # what was released is on disk before it is sent


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    serve(Path(sys.argv[1]), sys.stdin.read(), int(sys.argv[2]))
