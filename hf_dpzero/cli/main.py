"""`hf-dpzero`: train, evaluate, plan, audit, replay, verify, push, sweep, compare and more: `--help`.

This module only parses words and dispatches; each command's work is in a module of `hf_dpzero.cli`,
imported when it runs, so that `--help` is instant.

Exit status: 0 done, 1 `verify` or `audit` found a claim that does not hold, 2 a mistake in what was
asked (one line on stderr, `--traceback` for more), 130 interrupted, 143 a `train` that SIGTERM ended
with a whole checkpoint. Anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import types
import typing
import warnings
from collections.abc import Sequence

import hf_dpzero
from hf_dpzero.cli.options import COMMANDS, OVERRIDES, Budget, Clean, Push, Verify

MODULES = {
    "train": "train", "evaluate": "train", "plan": "plan", "replay": "release", "push": "release",
    "clean": "release", "verify": "release", "budget": "release", "compare": "many_runs",
    "sweep": "many_runs", "federate": "many_runs", "audit": "audit", "recipes": "start", "init": "start",
    "certificates": "start",
}  # fmt: skip
"""Command -> the module that holds its `run_COMMAND`."""

MISTAKES = (ValueError, OSError, ImportError)
"""What a user can cause and mend: bad settings, files and network, an extra not installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status; `argv` defaults to the process's own."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Hugging Face's loaders pin memory by default; without a GPU torch warns of it in each run.
    warnings.filterwarnings("ignore", message=".*'pin_memory' argument is set as true")
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `hf-dpzero plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MISTAKES as error:
        if "--traceback" in words:
            raise
        from hf_dpzero.ledger.log_file import LedgerError

        # A mistake is one line; a list of settings has one a line.
        listed = isinstance(error, LedgerError) or " settings are refused:" in str(error)
        lines = str(error).splitlines() if listed else [str(error)]
        text = "\n  ".join(" ".join(line.split()) for line in lines)
        print(f"error: {text or type(error).__name__}", file=sys.stderr)
        return 2


def _dispatch(words: list[str]) -> int:
    parser = _build_parser()
    # What the parser does not know are settings of the recipe, which has its own parser.
    parsed, overrides = parser.parse_known_args(words)
    values = vars(parsed)
    command = values.pop("command")
    arguments = COMMANDS[command](**values, overrides=overrides)
    bare = ("push", "clean", "verify", "budget", "recipes", "init", "certificates")
    if overrides and command in bare:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    module = importlib.import_module(f"hf_dpzero.cli.{MODULES[command]}")
    return int(getattr(module, f"run_{command}")(arguments) or 0)


def _build_parser() -> argparse.ArgumentParser:
    """Makes a subcommand of each class of options, and an option of each of its fields."""
    parser = argparse.ArgumentParser(
        prog="hf-dpzero",
        description="Differentially private zeroth-order fine-tuning with Hugging Face.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hf-dpzero {hf_dpzero.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, options in COMMANDS.items():
        summary = " ".join((options.__doc__ or "").split())
        command = commands.add_parser(
            name,
            help=f"{summary[0].lower()}{summary[1:].rstrip('.')}",
            description=summary,
            epilog=None if options in (Push, Clean, Verify, Budget) else OVERRIDES,
            allow_abbrev=False,
        )
        hints = typing.get_type_hints(options)
        for field in dataclasses.fields(options):
            if field.name == "overrides":
                continue
            settings, kind = dict(field.metadata), hints[field.name]
            if isinstance(kind, types.UnionType):  # of None and a type
                kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
            if kind is bool:
                settings["action"] = (
                    argparse.BooleanOptionalAction if field.default else "store_true"
                )
            elif kind in (int, float):
                settings["type"] = _whole if kind is int else float
            if settings.pop("positional", False):
                command.add_argument(field.name, **{"metavar": field.name.upper(), **settings})
            else:
                command.add_argument(f"--{field.name}", default=field.default, **settings)
    return parser


def _whole(word: str) -> int:
    """Reads an integer, also written as 1e4."""
    number = float(word)
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number")
    return int(number)


if __name__ == "__main__":
    sys.exit(main())
