"""Figures 1 and 2 of the DPZero paper: DPZero, DPGD-0th and DP-GD on quadratics of d = 20 ... 2000.

    python -m scripts.studies.quadratic --output_dir out/quadratic           # the paper's grid
    python -m scripts.studies.quadratic --quick --output_dir out/quadratic-quick

An interrupted run continues where it stopped. Writes rows.jsonl, table.md, figure1.png and figure2.png.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from scripts.studies.quadratic.study import QUICK, TABLE_FILE, Study, plot, run, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a coarse grid, about 15 seconds")
    parser.add_argument("--seeds", type=int, default=1, help="draws that are averaged (default 1)")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    study = QUICK if arguments.quick else Study()
    study = dataclasses.replace(study, seeds=tuple(range(1, arguments.seeds + 1)))
    rows = run(study, arguments.output_dir)
    text = table(rows)
    (arguments.output_dir / TABLE_FILE).write_text(text, encoding="utf-8")
    plot(rows, arguments.output_dir)
    print(f"best train gradient norm over the grid\n\n{text}")


if __name__ == "__main__":
    main()
