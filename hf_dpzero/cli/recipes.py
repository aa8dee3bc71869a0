"""`hf-dpzero recipes`: the recipes that come with the package."""

from __future__ import annotations

import json

from hf_dpzero.cli.options import Recipes

_COLUMNS = ("recipe", "task", "model", "method", "privacy", "paper")


def run(arguments: Recipes) -> None:
    """Prints a table, or with --json all that is known of each recipe."""
    from hf_dpzero.recipes.catalogue import catalogue

    rows = catalogue(arguments.task)
    if arguments.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    lines = [_COLUMNS, *([str(row[name] or "-") for name in _COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    print(
        "\nprivacy: (epsilon, delta). paper: what Zhang et al. 2024 report (arXiv:2310.09639). Run one "
        "by its name:\n  hf-dpzero train quickstart"
    )
