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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.arguments import add_fields
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
from scripts.markdown import table
from scripts.studies.harness import panels

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


def markdown(title: str, workers: Sequence[int], cells: Mapping[str, Sequence[str]]) -> str:
    """A table: a line for each layout, a column for each number of workers."""
    return table([title, *(f"{w:,}" for w in workers)], ([n, *row] for n, row in cells.items()))


def plot(path: Path, tables: Mapping[str, Any]) -> None:
    """Rows a second over workers, a panel for each network, with what perfect scaling would give."""
    figure, (line,) = panels(1, len(tables), (3.7 * len(tables), 3.4), sharey=True)
    for axes, (network, found) in zip(line, tables.items(), strict=True):
        for name, rows in found.items():
            x = [row["workers"] for row in rows]
            axes.plot(x, [row["rows_per_second"] for row in rows], marker="o", ms=3, label=name)
        first = found["DPZero, data parallel"][0]["rows_per_second"]
        axes.plot(x, [first * w for w in x], color="gray", lw=0.8, ls=":")
        axes.set(xscale="log", yscale="log", xlabel="workers", title=f"{network} links")
        axes.grid(alpha=0.3)
    line[0].set(ylabel="rows a second")
    line[0].legend(fontsize=7)
    figure.savefig(path, dpi=90)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables as Markdown, or as JSON; draws the plot if asked for."""
    options = vars(_parser().parse_args(argv))
    job, stragglers = _made(Job, options), _made(Stragglers, options)
    workers = options["workers"]
    if options["memory"]:
        held = {w: memory_bytes(job, w) for w in workers}
        gib = {n: [f"{held[w][n] / 2**30:.1f}" for w in workers] for n in LAYOUTS}
        print(markdown("GiB of a rank", workers, gib), end="")
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
        shown = []
        for name, found in tables.items():
            cells = {
                layout: [f"{row['seconds']:.3g} ({row['speedup']:.3g})" for row in rows]
                for layout, rows in found.items()
            }
            shown.append(markdown(f"{name} links", workers, cells))
        print("\n".join(shown), end="")
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
        add_fields(made, kind)
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
