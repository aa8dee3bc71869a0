"""Time of a synchronous step over 1 to 4,096 workers, from the model in `scaling_model.py`.

    python -m scripts.benchmarks.scaling_simulation --plot docs/images/scaling.png
    python -m scripts.benchmarks.scaling_simulation --memory --workers 1 8 64 512

Nothing is measured: seconds of a forward pass, bandwidths and latencies are given (`--help`), and each
layout's step follows from them. Numbers are means over `--trials` steps drawn from one seeded generator,
the same draws for every layout and number of workers.
"""

from __future__ import annotations

import argparse
import json
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.scaling_model import (
    LAYOUTS,
    NETWORKS,
    Draws,
    Job,
    Network,
    Step,
    Stragglers,
    memory_bytes,
)

WORKERS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)


def simulate(
    job: Job,
    network: Network,
    stragglers: Stragglers,
    workers: Sequence[int] = WORKERS,
    trials: int = 200,
    seed: int = 1,
    own_rows: bool = False,
) -> dict[str, list[dict[str, float]]]:
    """Layout -> a row for each number of workers.

    Args:
      job, network, stragglers: what is modelled.
      workers: numbers of workers, each a power of two.
      trials: steps that are drawn.
      seed: of the draws.
      own_rows: of `Draws`.

    Returns:
      `seconds` (mean), `late` (95th percentile), `rows_per_second` (B over the mean), `speedup` over one
      worker, `links` (share of the step), `blanks` (share of the rows that are run).
    """
    draws = Draws.of(job, stragglers, max(workers), trials, seed, own_rows)
    table: dict[str, list[dict[str, float]]] = {}
    for name, layout in LAYOUTS.items():
        alone = float(layout(network, draws, 1).seconds.mean())
        steps = ((w, layout(network, draws, w)) for w in workers)
        table[name] = [_row(job, draws, w, step, alone) for w, step in steps]
    return table


def _row(job: Job, draws: Draws, workers: int, step: Step, alone: float) -> dict[str, float]:
    mean = float(step.seconds.mean())
    return {
        "workers": workers,
        "seconds": mean,
        "late": float(np.quantile(step.seconds, 0.95)),
        "rows_per_second": job.batch / mean,
        "speedup": alone / mean,
        "links": float(step.links.mean()) / mean,
        "blanks": float(1 - draws.sampled.mean() / max(step.rows_run.mean(), 1.0)),
    }


# ---------------------------------------------------------------- for people


def markdown(network: str, table: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[str]:
    """Lines: seconds of a step and, in parentheses, the speedup."""
    workers = [int(row["workers"]) for row in next(iter(table.values()))]
    yield f"| {network} links | " + " | ".join(f"{w:,}" for w in workers) + " |"
    yield "|---" * (len(workers) + 1) + "|"
    for name, rows in table.items():
        cells = [f"{row['seconds']:.3g} ({row['speedup']:.3g})" for row in rows]
        yield f"| {name} | " + " | ".join(cells) + " |"


def memory_markdown(job: Job, workers: Sequence[int]) -> Iterator[str]:
    """Lines: GiB of a rank beside activations."""
    yield "| GiB of a rank | " + " | ".join(f"{w:,}" for w in workers) + " |"
    yield "|---" * (len(workers) + 1) + "|"
    for name in LAYOUTS:
        cells = [f"{memory_bytes(job, w)[name] / 2**30:.1f}" for w in workers]
        yield f"| {name} | " + " | ".join(cells) + " |"


def plot(path: Path, tables: Mapping[str, Any]) -> None:
    """Rows a second over workers, a panel for each network, with what perfect scaling would give."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.7 * len(tables), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (network, table) in zip(panels, tables.items(), strict=True):
        for name, rows in table.items():
            x = [row["workers"] for row in rows]
            axes.plot(x, [row["rows_per_second"] for row in rows], marker="o", ms=3, label=name)
        first = table["DPZero, data parallel"][0]["rows_per_second"]
        axes.plot(x, [first * w for w in x], color="gray", lw=0.8, ls=":")
        axes.set(xscale="log", yscale="log", xlabel="workers", title=f"{network} links")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="rows a second")
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=90)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables as Markdown, or as JSON; draws the plot if asked for."""
    options = vars(_parser().parse_args(argv))
    job, stragglers = _made(Job, options), _made(Stragglers, options)
    if options["memory"]:
        print("\n".join(memory_markdown(job, options["workers"])))
        return 0
    tables = {
        name: simulate(
            job,
            NETWORKS[name],
            stragglers,
            **{key: options[key] for key in ("workers", "trials", "seed", "own_rows")},
        )
        for name in options["networks"]
    }
    if options["json"]:
        print(json.dumps({"job": asdict(job), "stragglers": asdict(stragglers), "steps": tables}))
    else:
        print("\n\n".join("\n".join(markdown(name, table)) for name, table in tables.items()))
    if options["plot"]:
        plot(Path(options["plot"]), tables)
    return 0


def _made(kind: Any, options: Mapping[str, Any]) -> Any:
    return kind(**{field.name: options[field.name] for field in fields(kind)})


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks.scaling_simulation",
        description=(__doc__ or "").split("\n")[0],
    )
    for kind in (Job, Stragglers):
        hints = typing.get_type_hints(kind)
        for field in fields(kind):
            kind_of: dict[str, Any] = {"type": hints[field.name]}
            if hints[field.name] is bool:
                kind_of = {"action": argparse.BooleanOptionalAction}
            made.add_argument(f"--{field.name}", default=field.default, **kind_of)
    made.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    made.add_argument("--workers", nargs="+", type=int, default=list(WORKERS))
    made.add_argument("--trials", type=int, default=200, help="steps that are drawn")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--own_rows", action="store_true", help="workers sample rows of their own")
    made.add_argument("--memory", action="store_true", help="bytes of a rank in place of seconds")
    made.add_argument("--json", action="store_true")
    made.add_argument("--plot", metavar="FILE", help="image of rows a second over workers")
    return made


if __name__ == "__main__":
    sys.exit(main())
