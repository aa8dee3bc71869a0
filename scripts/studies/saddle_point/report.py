"""Tables and plots of the saddle point study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.studies.harness import Row, interval, panels, save, table
from scripts.studies.saddle_point.study import Study

GAP_PLOT, QUERY_PLOT = "gaps.png", "queries.png"
PARTS = {
    "n": "Bilinear games, Algorithm 1: duality gap against n",
    "dimension": "Bilinear games, Algorithm 1: duality gap against dimension",
    "smooth": "Smooth games with 20 x 20 vertices, Algorithms 1 and 3: duality gap",
    "regression": "Least squares with 200 vertices, Algorithm 4: excess risk",
    "queries": "100 random queries on 128 cells, Algorithm 5: largest error",
    "table": "Two-way marginals of a table of sentences, Algorithm 5: largest error",
}


def slope(rows: Sequence[Row]) -> float:
    """The exponent a of value ~ size^a, by least squares on the logarithms of the means."""
    if len(rows) < 2:
        return math.nan
    sizes = [math.log(row["size"]) for row in rows]
    values = [math.log(float(np.mean(row["values"]))) for row in rows]
    return float(np.polyfit(sizes, values, 1)[0])


HEAD = ("n", "dimensions", "method", "value", "uniform", "steps x vertices", "step size", "true ε")


def part_table(rows: Sequence[Row]) -> str:
    """One part: mean and 95 % interval of each row, its steps, and the epsilon that it really has."""
    lines = []
    for row in rows:
        if "refused" in row:
            refused = f"refused: {row['refused']}"
            lines.append([row["size"], "", row["method"], refused, *[""] * 4])
            continue
        lines.append(
            [
                row["num_examples"],
                " x ".join(map(str, row["dimensions"])),
                row["method"],
                interval(row["values"]),
                f"{np.mean(row['uniform']):.3g}",
                " x ".join(str(row[k]) for k in ("steps", "vertices") if row.get(k)),
                f"{row['step_size']:.3g}" if "step_size" in row else "",
                f"{row['true_epsilon']:.3g}",
            ]
        )
    return table(HEAD, lines)


def slopes(rows: Sequence[Row]) -> str:
    """The exponents of the parts that run over n."""
    lines = []
    for part in ("n", "smooth", "regression", "queries"):
        mine = [row for row in rows if row["part"] == part and "values" in row]
        for method in dict.fromkeys(row["method"] for row in mine):
            found = slope([row for row in mine if row["method"] == method])
            if not math.isnan(found):
                lines.append([part, method, f"{found:.2f}"])
    return table(("part", "method", "exponent of n"), lines)


def tables(study: Study, rows: Sequence[Row]) -> str:
    """All parts as Markdown."""
    order = {point: i for i, point in enumerate(study.points())}
    rows = sorted(rows, key=lambda row: order[row["part"], row["size"], row["method"]])
    head = f"Target ε = {study.epsilon:g}, δ = {study.delta:g}, {len(study.seeds)} seeds.\n\n"
    sections = [
        f"## {title}\n\n{part_table([row for row in rows if row['part'] == part])}\n"
        for part, title in PARTS.items()
        if any(row["part"] == part for row in rows)
    ]
    return head + "".join(sections) + f"## Exponents\n\n{slopes(rows)}"


def plot(rows: Sequence[Row], parts: Sequence[str], path: Path) -> Path:
    """Values against size on logarithmic axes, a panel for each part."""
    figure, (line,) = panels(1, len(parts), (4.6 * len(parts), 4.0))
    for axes, part in zip(line, parts, strict=True):
        mine = [row for row in rows if row["part"] == part and "values" in row]
        axes.set_xlabel("d" if part == "dimension" else "n")
        title, _, label = PARTS[part].partition(": ")
        axes.set_title(title, fontsize=9)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if mine:
            _draw(axes, mine)
            axes.set(xscale="log", yscale="log")
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)
    return path


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = sorted((r for r in rows if r["method"] == method), key=lambda r: r["size"])
        found = [interval(row["values"]) for row in mine]
        sizes = [row["size"] for row in mine]
        widths = [min(i.half_width, 0.9 * i.mean) for i in found]
        means = [i.mean for i in found]
        axes.errorbar(sizes, means, yerr=widths, marker="o", markersize=3, capsize=2, label=method)
    sizes = sorted({row["size"] for row in rows})
    uniform = [np.mean([r["uniform"] for r in rows if r["size"] == size]) for size in sizes]
    axes.plot(sizes, uniform, color="grey", linestyle=":", label="uniform")


def write(study: Study, rows: Sequence[Row], output_dir: Path) -> str:
    """Writes table.md, table.json, gaps.png and queries.png."""
    plot(rows, ("n", "dimension"), output_dir / GAP_PLOT)
    plot(rows, ("smooth", "regression", "queries"), output_dir / QUERY_PLOT)
    return save(output_dir, tables(study, rows), rows)
