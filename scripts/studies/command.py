"""The command line that the scripts of the papers' studies share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.studies.rows import read_rows

Rows = list[dict[str, Any]]


def study_parser(text: str, quick: str, seeds: str) -> argparse.ArgumentParser:
    """Options `--quick`, `--seeds` and `--output_dir`.

    Args:
      text: of the script; its first line describes the command.
      quick: help of the option.
      seeds: likewise.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--seeds", type=_repetitions, help=seeds)
    parser.add_argument("--output_dir", type=Path, required=True)
    return parser


def run_and_write(
    study: Any,
    path: Path,
    run: Callable[[Any, Path], Rows],
    write: Callable[[Any, Rows, Path], str],
    write_so_far: Callable[[Any, Rows, Path], str] | None = None,
) -> int:
    """Runs a study and prints its tables; Ctrl-C writes those of the rows so far.

    Args:
      study: what to run.
      path: its results file, of `study_rows.read_rows`.
      run: (study, folder of that file) -> rows.
      write: (study, rows, folder) -> the text to print.
      write_so_far: for an interrupted study; default `write`.

    Returns:
      The exit status: 0, or 130 after Ctrl-C.
    """
    try:
        print(write(study, run(study, path.parent), path.parent))
    except KeyboardInterrupt:
        rows = read_rows(path, study)
        (write_so_far or write)(study, rows, path.parent)
        print(f"interrupted: {len(rows)} rows kept; the same command continues.", file=sys.stderr)
        return 130
    return 0


def first_seeds(count: int) -> tuple[int, ...]:
    """1 .. count, as the studies number their repetitions.

    >>> first_seeds(3)
    (1, 2, 3)
    """
    return tuple(range(1, count + 1))


def _repetitions(text: str) -> int:
    count = int(text)
    if count < 2:
        raise argparse.ArgumentTypeError(f"{count}: an interval needs at least 2.")
    return count
