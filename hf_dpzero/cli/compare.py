"""`hf-dpzero compare RECIPE --methods ... --epsilons 2,6 --seeds 42,13,21`: methods side by side."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from hf_dpzero.experiments.aggregate import Record
    from hf_dpzero.experiments.grid import Run

_T = TypeVar("_T")


def run(arguments: argparse.Namespace) -> None:
    """Runs the grid, or merges comparisons; writes comparison.{json,md,png} and prints the table.

    Raises:
      ValueError, OSError: nothing to run, arms that cannot be compared, a folder in use.
    """
    if arguments.merge:
        print(_merged(arguments))
        return
    from hf_dpzero.experiments.compare import compare, settings_of

    runs = grid_of(arguments)
    folder = Path(arguments.output_dir or f"out/compare-{Path(arguments.recipes[0]).stem}")
    recipe, words = arguments.recipes[0], arguments.overrides
    record = compare(
        folder,
        runs,
        settings_of(runs, recipe=recipe, overrides=words, jobs=arguments.jobs),
        jobs=arguments.jobs,
        retry_failed=arguments.retry_failed,
        keep_weights=not arguments.discard_weights,
    )
    _show(record, folder)


def _merged(arguments: argparse.Namespace) -> str:
    from hf_dpzero.experiments.tables import merge

    given = [f"--{name}" for name in ("methods", "epsilons", "seeds") if getattr(arguments, name)]
    if given or arguments.overrides:
        raise ValueError(
            f"{(given or arguments.overrides)[0]}: --merge runs nothing; leave it out."
        )
    if not arguments.output_dir:
        raise ValueError("--output_dir is missing; --merge needs a folder for the merged table.")
    return merge(arguments.recipes, arguments.output_dir)


def grid_of(arguments: argparse.Namespace) -> list[Run]:
    """The runs that the command line asks for."""
    from hf_dpzero.experiments.grid import build_grid

    if len(arguments.recipes) != 1:
        raise ValueError(
            f"{' '.join(arguments.recipes)}: give one recipe; others are named in --methods."
        )
    return build_grid(
        arguments.recipes[0],
        methods=listed("methods", arguments.methods, str),
        epsilons=listed("epsilons", arguments.epsilons, float),
        seeds=listed("seeds", arguments.seeds, int),
        overrides=arguments.overrides,
    )


def listed(name: str, text: str | None, kind: Callable[[str], _T]) -> list[_T]:
    """The words between commas.

    >>> listed("epsilons", "2, 6", float)
    [2.0, 6.0]

    Raises:
      ValueError: a word that is no number where one is needed.
    """
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    try:
        return [kind(word) for word in words]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ValueError(
            f"--{name} {text}: give {whole}numbers with commas between them."
        ) from None


def _show(record: Record, folder: Path) -> None:
    from hf_dpzero.experiments.tables import TABLE_FILE, table

    print(table(record))
    failed = sum(not row.done for row in record.rows)
    if failed:
        print(f"{failed} of {len(record.rows)} runs do not count; {folder / TABLE_FILE} says why.")
    print(f"written: {folder}/comparison.json, .md and .png")
