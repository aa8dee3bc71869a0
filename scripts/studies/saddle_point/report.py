"""Tables and plots of the saddle point study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.markdown import table
from scripts.studies.harness import Row, error_bars, interval, panels, save, sections
from scripts.studies.saddle_point.study import Study

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
    own = {title: [r for r in rows if r["part"] == part] for part, title in PARTS.items()}
    parts = {title: part_table(found) for title, found in own.items() if found}
    return head + sections({**parts, "Exponents": slopes(rows)})


def plot(rows: Sequence[Row], parts: Sequence[str], path: Path) -> None:
    """Values against size on logarithmic axes, a panel for each part."""
    figure, (line,) = panels(1, len(parts), (4.6 * len(parts), 4.0))
    for axes, part in zip(line, parts, strict=True):
        mine = [row for row in rows if row["part"] == part and "values" in row]
        axes.set_xlabel("d" if part == "dimension" else "n")
        title, _, label = PARTS[part].partition(": ")
        axes.set_title(title, fontsize=9)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if not mine:
            continue
        for method in dict.fromkeys(row["method"] for row in mine):
            own = sorted((r for r in mine if r["method"] == method), key=lambda r: r["size"])
            found = [interval(row["values"]) for row in own]
            error_bars(axes, [row["size"] for row in own], found, method)
        sizes = sorted({row["size"] for row in mine})
        uniform = [np.mean([r["uniform"] for r in mine if r["size"] == size]) for size in sizes]
        axes.plot(sizes, uniform, color="grey", linestyle=":", label="uniform")
        axes.set(xscale="log", yscale="log")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)


def write(study: Study, rows: Sequence[Row], output_dir: Path) -> str:
    """Writes table.md, gaps.png and queries.png."""
    plot(rows, ("n", "dimension"), output_dir / "gaps.png")
    plot(rows, ("smooth", "regression", "queries"), output_dir / "queries.png")
    return save(output_dir, tables(study, rows))
