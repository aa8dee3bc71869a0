"""What was measured, as Markdown tables for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.gpu.results import OK

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
    if "kernels" in stages:
        heads = ["tests", "passed", "skipped", "seconds"]
        yield (
            "Tests on the device",
            heads,
            [[i, *_test_cells(o)] for i, o in stages["kernels"].items()],
        )
    if "passes" in stages:
        heads = [
            "model",
            "passes, and how many give other bits by place and by neighbours",
        ]
        yield "Forward passes", heads, [[i, *_figures(o)] for i, o in stages["passes"].items()]
    if "steps" in stages:
        heads = ["shape", "batch", "passes", "step / its forwards (quartiles)", "forwards, s",
                 "GiB: inference", "step"]  # fmt: skip
        yield "Steps", heads, [[i, *_step_cells(o)] for i, o in stages["steps"].items()]
    titles = {
        "profile": "One step, profiled",
        "rest": "Single figures",
        "differences": "Differences",
    }
    for stage, title in titles.items():
        if stage in stages:
            rows = [[i, *_figures(o)] for i, o in stages[stage].items()]
            yield title, ["", "figures; lists are in results.json"], rows
    if "sst2" in stages:
        heads = ["run", "epsilon", "steps", "learning rate", "seconds", "accuracy"]
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


def _figures(outcome: Mapping[str, Any]) -> list[str]:
    """Every number of a result, however deep."""
    if (cells := _unfinished(outcome, 1)) is not None:
        return cells
    return [", ".join(_numbers(outcome["result"]))]


def _numbers(of: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in of.items():
        if isinstance(value, Mapping) and name != "settings":
            yield from _numbers(value, f"{prefix}{name} ")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{name}: {value:.4g}"
        elif name in ("over_the_first", "ratio_quartiles"):
            yield f"{prefix}{name}: " + " ".join(f"{v:.3f}" for v in value)


def _step_cells(outcome: Mapping[str, Any]) -> list[str]:
    if (cells := _unfinished(outcome, 6)) is not None:
        return cells
    r = outcome["result"]
    s, peaks = r["settings"], r.get("peak_bytes", {})
    low, middle, high = r["ratio_quartiles"]
    central = r.get("ratio_to_central")
    one_sided = "" if central is None else f"; forward differences {central:.2f} of it"
    return [
        f"{s['batch_size']} x {s['seq_length']}",
        f"{r['strategy']}, {r['rows_per_pass']:.1f} rows a pass",
        f"{middle:.2f} ({low:.2f} to {high:.2f})" + one_sided,
        f"{r['seconds']['two_forwards']:.3f}",
        *(f"{peaks[p] / GIB:.2f}" if p in peaks else "" for p in ("inference", "step")),
    ]


def _run_cells(outcome: Mapping[str, Any]) -> list[str]:
    if (cells := _unfinished(outcome, 5)) is not None:
        return cells
    r, accuracy = outcome["result"], f"{100 * outcome['result']['accuracy']:.1f} %"
    if "steps" not in r:
        return ["", "", "", "", accuracy]
    how = [f"{r['epsilon']:g}", str(r["steps"]), f"{r['learning_rate']:g}"]
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
