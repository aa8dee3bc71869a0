"""Options from the fields of a dataclass, and processes that a benchmark starts of itself."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any


def add_fields(
    parser: argparse.ArgumentParser,
    kind: Any,
    choices: Mapping[str, Sequence[str]] | None = None,
    skip: Sequence[str] = (),
) -> None:
    """An option for each field, of its type; of a bool --name and --no-name."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        if field.name in skip:
            continue
        of_field: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if hints[field.name] is not bool:
            types = [t for t in typing.get_args(hints[field.name]) if t is not type(None)]
            of_field = {"type": types[0] if types else hints[field.name]}
            of_field["choices"] = (choices or {}).get(field.name)
        parser.add_argument(f"--{field.name}", default=field.default, **of_field)


def in_processes(
    count: int,
    module: str,
    words: Sequence[str],
    timeout: float,
    *,
    ranks: bool = True,
    **given: Any,
) -> list[int]:
    """Runs `python -m module words` in so many processes; returns their statuses, and leaves none.

    Args:
      count, module, words, timeout: what is run, and for how many seconds at most.
      ranks: tell them where they meet and who they are; without, what they run starts no group.
      given: of `subprocess.Popen`; `env` adds to this process' environment.
    """
    with socket.socket() as free:  # a port that nobody has; closed again before it is used
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    common, children = {**os.environ, **given.pop("env", {})}, []
    for rank in map(str, range(count)):
        own = {**place, "WORLD_SIZE": str(count), "RANK": rank, "LOCAL_RANK": rank}
        env = common | (own if ranks else {})
        children.append(subprocess.Popen([sys.executable, "-m", module, *words], env=env, **given))
    try:
        return [child.wait(timeout=timeout) for child in children]
    finally:  # where one failed, the others wait for it in a collective operation
        for child in children:
            child.kill()
