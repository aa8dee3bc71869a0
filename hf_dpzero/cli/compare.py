"""`hf-dpzero compare RECIPE --methods ... --epsilons 2,6 --seeds 42,13,21`: methods side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hf_dpzero.cli.options import Compare
from hf_dpzero.experiments.aggregate import JSON_FILE
from hf_dpzero.experiments.compare import compare
from hf_dpzero.experiments.grid import build_grid
from hf_dpzero.experiments.plots import PLOT_FILE
from hf_dpzero.experiments.tables import TABLE_FILE, merge, table
from hf_dpzero.values import listed

_T = TypeVar("_T")


def run(arguments: Compare) -> None:
    """Runs the grid, or merges comparisons; writes comparison.{json,md,png} and prints the table."""
    if arguments.merge:
        given = [f"--{name}" for name in ("methods", "epsilons", "seeds") if vars(arguments)[name]]
        if given or arguments.overrides:
            raise ValueError(
                f"{(given or arguments.overrides)[0]}: --merge runs nothing; leave it out."
            )
        if not arguments.output_dir:
            raise ValueError(
                "--output_dir is missing; --merge needs a folder for the merged table."
            )
        print(merge(arguments.recipes, arguments.output_dir))
        return
    if len(arguments.recipes) != 1:
        raise ValueError(
            f"{' '.join(arguments.recipes)}: give one recipe; others are named in --methods."
        )
    recipe, words = arguments.recipes[0], arguments.overrides
    runs = build_grid(
        recipe,
        methods=_listed("methods", arguments.methods, str),
        epsilons=_listed("epsilons", arguments.epsilons, float),
        seeds=_listed("seeds", arguments.seeds, int),
        overrides=words,
    )
    folder = Path(arguments.output_dir or f"out/compare-{Path(recipe).stem}")
    record = compare(
        folder,
        runs,
        recipe=recipe,
        overrides=words,
        jobs=arguments.jobs,
        retry_failed=arguments.retry_failed,
        keep_weights=not arguments.discard_weights,
    )
    print(table(record))
    failed = sum(not row.done for row in record.rows)
    if failed:
        print(f"{failed} of {len(record.rows)} runs do not count; {folder / TABLE_FILE} says why.")
    names = (JSON_FILE, TABLE_FILE, PLOT_FILE)  # no plot without matplotlib or a finished run
    print("written:", *(str(folder / name) for name in names if (folder / name).is_file()))


def _listed(name: str, words: list[str] | None, kind: Callable[[str], _T]) -> list[_T]:
    """The items of an option, converted: `2,6`, `2 6` and `[2, 6]` are the same.

    >>> _listed("epsilons", ["2,", "6"], float), _listed("epsilons", ["[2, 6]"], float)
    ([2.0, 6.0], [2.0, 6.0])
    """
    text = ",".join(words or ()).replace("[", "").replace("]", "")
    items = [str(item) for item in listed(text) if item]
    try:
        return [kind(item) for item in items]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ValueError(
            f"--{name} {' '.join(words or ())}: give {whole}numbers with commas between them."
        ) from None
