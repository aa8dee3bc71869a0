"""A plan for people: the tables that `hf-dpzero plan --recipe` prints beside the privacy plan's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dpzero.experiments.memory.live_bytes import GIB
from hf_dpzero.experiments.memory.peaks import CARDS

_PHASES = {
    "weights": "weights",
    "inference": "inference, one microbatch",
    "evaluation": "evaluation",
    "training": "a training step",
    "peak": "the run",
}
"""Keys of a precision's bytes -> what they are called."""


def print_sections(sections: Mapping[str, Any]) -> None:
    """Prints the model and its memory."""
    from rich.console import Console

    console = Console()
    for table in (_model(sections["model"]), _memory(sections["memory"])):
        console.print(table)
    for note in sections["memory"]["notes"]:
        console.print(f"  {note}", markup=False, highlight=False)


def _pairs(title: str, rows: Mapping[str, str]) -> Any:
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _model(found: Mapping[str, Any]) -> Any:
    share = found["trained_parameters"] / found["parameters"]
    rows = {
        "model": f"{found['name']} ({found['head']}, {found['num_layers']} layers)",
        "shape from": str(found["config"]),
        "parameters": f"{found['parameters']:,} ({gib(found['parameter_bytes'])} GiB in "
        f"{found['torch_dtype']})",
        "trained": f"{found['trained_parameters']:,} ({100 * share:.3g} %; {found['trained_by']})",
    }
    return _pairs("model", rows)


def _memory(found: Mapping[str, Any]) -> Any:
    from rich.table import Table

    sizes = f"{found['microbatch_size']} x {found['sequence_length']} tokens"
    table = Table(title=f"expected peak memory in GiB ({found['method']}, {sizes})")
    columns = found["by_precision"]
    table.add_column("weights in", style="bold")
    for precision in columns:
        own = " (the recipe's)" if precision == found["own_precision"] else ""
        table.add_column(precision + own, justify="right")
    for phase, title in _PHASES.items():
        table.add_row(title, *(gib(column[phase]) for column in columns.values()))
    table.add_row("the step is", *(column["how"] for column in columns.values()))
    table.add_row("smallest card", *(_smallest_card(c["fits"]) for c in columns.values()))
    for name, size in found["devices"].items():
        here = f"{name}, {gib(size)} here"
        table.add_row(here, *("fits" if c["fits"][name] else "no" for c in columns.values()))
    return table


def _smallest_card(fits: Mapping[str, bool]) -> str:
    cards = [size for size in CARDS if fits[f"{size} GiB"]]
    return f"{cards[0]} GiB" if cards else f"above {CARDS[-1]} GiB"


def gib(size: int | None) -> str:
    """Bytes in GiB; "-" for None.

    >>> gib(3 << 29)
    '1.50'
    """
    return "-" if size is None else f"{size / GIB:.2f}"
