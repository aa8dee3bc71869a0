#!/usr/bin/env python3
"""DP stochastic saddle points: gaps against n and dimension, DP-SCO, synthetic data for linear queries.

    python scripts/reproduce/saddle_point.py --output_dir out/saddle --texts ../shared/data/sst2
    python scripts/reproduce/saddle_point.py --quick --output_dir out/saddle-quick

An interrupted run (Ctrl-C) writes the tables so far, and continues where it stopped when started again.
Writes rows.jsonl, table.md, table.json, gaps.png and queries.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from hf_dpzero.papers.saddle_point_report import write
from hf_dpzero.papers.saddle_point_study import QUICK, ROWS_FILE, Study, run
from hf_dpzero.papers.study_rows import read_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 100,000 examples, two seeds")
    parser.add_argument("--seeds", type=int, help="repetitions (default 3; quick 2)")
    parser.add_argument("--texts", default="", help="folder with a train.jsonl of labelled texts")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    study = dataclasses.replace(QUICK if arguments.quick else Study(), texts=arguments.texts)
    if arguments.seeds is not None:
        if arguments.seeds < 2:
            parser.error(f"--seeds {arguments.seeds}: an interval needs at least 2.")
        study = dataclasses.replace(study, seeds=tuple(range(1, arguments.seeds + 1)))
    try:
        rows = run(study, arguments.output_dir)
        print(write(study, rows, arguments.output_dir))
    except KeyboardInterrupt:
        rows = read_rows(arguments.output_dir / ROWS_FILE, study)
        write(study, rows, arguments.output_dir)
        print(f"interrupted: {len(rows)} rows kept; the same command continues.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
