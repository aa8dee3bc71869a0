"""Runs in a child process that dies by SIGKILL: before its n-th file operation, or where a test wants.

The child is forked from this process, which has imported everything; nothing of it is cleaned up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.rename", "os.link", "os.remove", "os.truncate", "os.mkdir", "os.rmdir")


def die() -> None:
    """Ends this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], Any]) -> tuple[int, Any]:
    """Calls `work` in a forked process.

    Returns:
      (signal that ended it, or 0; what `work` returned, JSON-safe, or {"error": ...}).
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        torch.set_num_threads(1)
        try:
            answer = {"result": work()}
        except BaseException as error:
            answer = {
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(),
            }
        os.write(send, json.dumps(answer).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), None
    return 0, json.loads(told)


def kill_before_change(folder: Path, number: int, told: Path | None = None) -> None:
    """From now on, the process dies before it changes a file under `folder` for the n-th time.

    What Python opens for writing, renames, links, truncates or removes counts, from 0.

    Args:
      folder: of the run.
      number: n; a number that is never reached kills nothing.
      told: file that the operations are written to.
    """
    place, seen = os.path.abspath(folder), [0]

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(given[2], int) or not given[2] & _WRITING:
                return
        elif event not in _CHANGES:
            return
        path = given[0]
        if not isinstance(path, (str, os.PathLike)):
            return
        if not os.path.abspath(os.fspath(path)).startswith(place):
            return
        if told is not None and not seen[0] < 0:
            count = seen[0]
            seen[0] = -1  # writing this line is no change
            with open(told, "a") as file:
                file.write(f"{count} {event} {os.path.relpath(path, place)}\n")
            seen[0] = count
        if seen[0] == number:
            die()
        if seen[0] >= 0:
            seen[0] += 1

    sys.addaudithook(watch)
