"""What was measured: tables on a terminal, and Markdown rows for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.gpu_runs.results import OK

GIB = 2**30
Rows = list[list[str]]


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine in a line."""
    named = [f"{name} {machine[name]}" for name in ("driver", "cuda", "torch", "triton", "transformers")
             if machine.get(name)]  # fmt: skip
    return ", ".join([str(machine.get("name", "unknown machine")), *named])


def tables(content: Mapping[str, Any]) -> Iterator[tuple[str, list[str], Rows]]:
    """(title, headings, rows) of each kind of stage that has an outcome."""
    stages: Mapping[str, Mapping[str, Any]] = content["stages"]
    tests = [(s, i, o) for s in ("kernels", "sharding") for i, o in stages.get(s, {}).items()]
    if tests:
        heads = ["stage", "tests", "passed", "skipped", "seconds"]
        yield "Tests on the device", heads, [[s, i, *_test_cells(o)] for s, i, o in tests]
    if "passes" in stages:
        heads = [
            "model",
            "seconds by rows x tokens, or passes: all, other bits by place, by neighbours",
        ]
        yield "Forward passes", heads, [[i, *_pass_cells(o)] for i, o in stages["passes"].items()]
    kinds = {"steps": "private", "steps-64-rows": "private", "steps-one-batch": "one batch",
             "steps-whole-model": "private"}  # fmt: skip
    steps = [(n, i, o) for s, n in kinds.items() for i, o in stages.get(s, {}).items()]
    if steps:
        heads = ["shape", "batch", "settings", "step / two forwards (quartiles)", "reference loop",
                 "two forwards, s", "peak GiB: inference", "step", "reference"]  # fmt: skip
        yield "Steps", heads, [[i, *_step_cells(n, o)] for n, i, o in steps]
    if "sst2" in stages:
        heads = ["run", "epsilon", "steps", "learning rate", "clipped", "seconds", "accuracy"]
        yield "SST-2", heads, [[i, *_run_cells(o)] for i, o in stages["sst2"].items()]


def _unfinished(outcome: Mapping[str, Any], cells: int) -> list[str] | None:
    """Cells of what has no result: its status, and why."""
    if outcome["status"] == OK:
        return None
    last = (outcome.get("error") or "").strip().splitlines()
    why = outcome.get("why") or (last[-1][:120] if last else "")
    return [f"{outcome['status']}: {why}" if why else outcome["status"], *[""] * (cells - 1)]


def _test_cells(outcome: Mapping[str, Any]) -> list[str]:
    if (cells := _unfinished(outcome, 3)) is not None:
        return cells
    result = outcome["result"]
    if "lacks" in result:
        return [f"not run: {result['lacks']} is missing", "", ""]
    if "collected" in result:
        return [f"{result['collected']} found, not run", "", ""]
    return [str(result["passed"]), str(result["skipped"]), f"{result['seconds']:.0f}"]


def _pass_cells(outcome: Mapping[str, Any]) -> list[str]:
    if (cells := _unfinished(outcome, 1)) is not None:
        return cells
    result = outcome["result"]
    if "seconds" in result:
        return [", ".join(f"{place}: {taken:.4f}" for place, taken in result["seconds"].items())]
    return [", ".join(str(count) for count in result.values())]


def _step_cells(kind: str, outcome: Mapping[str, Any]) -> list[str]:
    if (cells := _unfinished(outcome, 8)) is not None:
        return ["", kind, *cells[:6]]
    r = outcome["result"]
    s, peaks = r["settings"], r.get("peak_bytes", {})
    low, middle, high = r["ratio_quartiles"]
    memory = [
        f"{peaks[p] / GIB:.2f}" if p in peaks else "" for p in ("inference", "step", "reference")
    ]
    reference = r.get("reference_ratio_to_two_forwards")
    return [
        f"{s['batch_size']} x {s['seq_length']}",
        f"{kind}, {r['strategy']}, {r['rows_per_pass']:.1f} rows a pass",
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        "" if reference is None else f"{reference:.2f}",
        f"{r['seconds']['two_forwards']:.3f}",
        *memory,
    ]


def _run_cells(outcome: Mapping[str, Any]) -> list[str]:
    if (cells := _unfinished(outcome, 6)) is not None:
        return cells
    r, accuracy = outcome["result"], f"{100 * outcome['result']['accuracy']:.1f} %"
    if "steps" not in r:
        return ["", "", "", "", "", accuracy]
    clipped = "" if r["clipped_share"] is None else f"{100 * r['clipped_share']:.0f} %"
    how = [f"{r['epsilon']:g}", str(r["steps"]), f"{r['learning_rate']:g}", clipped]
    return [*how, f"{r['train_seconds']:.0f}", accuracy]


def markdown(content: Mapping[str, Any]) -> str:
    """The tables as Markdown, each under the machine it was measured on."""
    parts = [machine_line(content.get("machine", {}))]
    for title, heads, rows in tables(content):
        parts += ["", f"**{title}**", "", *_markdown_rows(heads, rows)]
    return "\n".join(parts)


def _markdown_rows(heads: Sequence[str], rows: Rows) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines]


def show(content: Mapping[str, Any]) -> None:
    """Prints the tables on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(machine_line(content.get("machine", {})))
    for title, heads, rows in tables(content):
        table = Table(title=title)
        for head in heads:
            table.add_column(head)
        for row in rows:
            table.add_row(*row)
        console.print(table)
