"""A client on a SuperNode: its configuration, and the process that keeps its model and rows.

What concerns a client's privacy (recipe, overrides, rows, folder) comes from the client's own
`--node-config`, never from the server's run configuration.

Flower starts a process for each message. That process loads nothing (this module and what it imports
load neither torch nor transformers): it hands the payload over a local socket to the client's resident
process, which it starts where there is none, and carries the answer back. A resident process ends with
the SuperNode that it serves. Killed at any moment, the next message starts another, which continues from
the client's ledger.

    python -m hf_dpzero.federated.node FOLDER PID < values.json     # as `hand_over` starts it

What it prints goes to FOLDER/client.log, which may quote rows: only its owner reads it, and it stays on
the client.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpzero.ledger.log_file import write_for_owner

if TYPE_CHECKING:
    from hf_dpzero.federated.setup import Settings, Side

ADDRESS_NAME, LOG_NAME = "resident.json", "client.log"
START_SECONDS, WATCH_SECONDS = 120.0, 2.0

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A client's name: a plain word, because it becomes a folder, and a line of reports and logs."""

_KINDS = {"join": b"J", "round": b"R"}
_ANSWERED, _FAILED = b"+", b"-"
_GONE = (OSError, EOFError, AuthenticationError)  # a process that ended, or is not the one meant


class ResidentError(RuntimeError):
    """A resident process that could not be started, or that failed; its log says why."""


# ------------------------------------------------------------------ configuration


@dataclass(frozen=True)
class Node:
    """A client of a SuperNode.

    Attributes:
      name: what it is called.
      folder: where its ledger is; its own.
      shard, of: its number among clients that share the recipe's rows; (0, 1) where all are its own.
    """

    name: str
    folder: Path
    shard: int = 0
    of: int = 1


def node_of(values: Mapping[str, Any]) -> Node:
    """Reads a client's name, folder and shard.

    Args:
      values: `name`, and if wanted `output-dir`, `shard` ("3/20": every 20th row, from the third on, for
        trials on one machine), and those of `settings_of`.

    Raises:
      ValueError: no name, or an entry that cannot be read.
    """
    name, shard = str(values.get("name", "")), str(values.get("shard", "1/1"))
    if not NAME.fullmatch(name):
        raise ValueError(
            f"name={name!r} in --node-config: give each client a name of its own, of letters, digits, "
            "'.', '_' and '-'."
        )
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of:
        raise ValueError(
            f"shard={shard!r} in --node-config: give it as '3/20', from 1/20 to 20/20."
        )
    folder = Path(str(values.get("output-dir") or f"out/{name}")).absolute()
    return Node(name, folder, number - 1, of)


def settings_of(values: Mapping[str, Any], clients: int = 1) -> Settings:
    """Reads a side's settings from a configuration of Flower.

    Args:
      values: `recipe`, and if wanted `overrides` (words), `rounds`, `participation`,
        `sampling-probability`.
      clients: that share the recipe's rows; 1 where all rows are the side's own.

    Raises:
      ValueError: no recipe, or an entry that is no number.
    """
    if not values.get("recipe"):
        raise ValueError(
            "recipe is missing: give it in --node-config for a client, in --run-config for the server."
        )
    numbers: dict[str, Any] = {}
    for name, kind in (("rounds", int), ("sampling-probability", float)):
        given = values.get(name)
        if given is not None and given != "":  # Flower's configurations have no null
            try:
                numbers[name.replace("-", "_")] = kind(given)
            except (TypeError, ValueError):
                raise ValueError(f"{name}={given!r}: give a number.") from None
    from hf_dpzero.federated.setup import Settings

    return Settings(
        recipe=str(values["recipe"]),
        overrides=tuple(shlex.split(str(values.get("overrides", "")))),
        clients=clients,
        participation=values.get("participation") or "sampled",
        own_rows=clients == 1,
        **numbers,
    )


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
        with contextlib.suppress(*_GONE), _connected(folder, values) as connection:
            connection.send_bytes(_KINDS[kind] + payload)
            answer = connection.recv_bytes()
            if answer[:1] == _ANSWERED:
                return answer[1:]
            break
    raise ResidentError(f"no answer; {folder / LOG_NAME} says why.")


def _connected(folder: Path, values: Mapping[str, Any]) -> Connection:
    text, process = json.dumps(dict(values), sort_keys=True), None
    deadline = time.monotonic() + START_SECONDS
    while process is None or (process.poll() is None and time.monotonic() < deadline):
        with contextlib.suppress(*_GONE, ValueError, KeyError):
            return _call(folder, text)
        process = process or _start(folder, text)
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

    def for_owner(path: str, flags: int) -> int:
        descriptor = os.open(path, flags, 0o600)
        if hasattr(os, "fchmod"):  # an older log may be readable by others
            os.fchmod(descriptor, 0o600)
        return descriptor

    with open(folder / LOG_NAME, "ab", opener=for_owner) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hf_dpzero.federated.node", str(folder), str(os.getppid())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Flower ends the process of a message with its group
        )
    assert process.stdin is not None
    # not as an argument, which other users of the machine could read
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(text.encode())
        process.stdin.close()
    return process


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
        threading.Thread(target=_watch, args=(folder, key.hex(), watched), daemon=True).start()
        answers = _Answers(folder, json.loads(text))
        while True:
            with contextlib.suppress(*_GONE), listener.accept() as connection:
                connection.send_bytes(answers(connection.recv_bytes()))


class _Answers:
    """Answers of a client; model and rows are loaded with the first message."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.folder, self.values = folder, values
        self.side: Side | None = None

    def __call__(self, request: bytes) -> bytes:
        try:
            return _ANSWERED + self._answer(request[:1], request[1:])
        except (ValueError, OSError, ImportError) as error:  # what the user can mend
            logging.debug("where it came from", exc_info=True)
            logging.error("no answer: %s", error)
        except Exception:
            logging.exception("no answer")
        return _FAILED  # and no word of the error leaves the client

    def _answer(self, kind: bytes, payload: bytes) -> bytes:
        node = node_of(self.values)
        if self.side is None:
            settings = settings_of(self.values, node.of)
            from hf_dpzero.federated.setup import Side

            self.side = Side.build(settings, node.folder)
        where = (node.name, node.shard, self.folder)
        if kind == _KINDS["join"]:
            return self.side.invited(*where, payload)
        return self.side.client(*where).answer(self.side.replica, payload)


def _watch(folder: Path, key: str, watched: int) -> None:
    path = folder / ADDRESS_NAME
    while _alive(watched):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8"))["key"] != key:
                break  # another process took the place of this one
        time.sleep(WATCH_SECONDS)
    os._exit(0)  # what was released is on disk before it is sent


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, and another user's
        return True
    return True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    serve(Path(sys.argv[1]), sys.stdin.read(), int(sys.argv[2]))
