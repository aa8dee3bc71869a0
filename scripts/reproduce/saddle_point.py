#!/usr/bin/env python3
"""DP stochastic saddle points: gaps against n and dimension, DP-SCO, synthetic data for linear queries.

    python scripts/reproduce/saddle_point.py --output_dir out/saddle --texts ../shared/data/sst2
    python scripts/reproduce/saddle_point.py --quick --output_dir out/saddle-quick

An interrupted run (Ctrl-C) writes the tables so far, and continues where it stopped when started again.
Writes rows.jsonl, table.md, table.json, gaps.png and queries.png.
"""

from __future__ import annotations

import dataclasses
import sys

from hf_dpzero.papers.saddle_point_report import write
from hf_dpzero.papers.saddle_point_study import QUICK, ROWS_FILE, Study, run
from hf_dpzero.papers.study_command import first_seeds, run_and_write, study_parser


def main() -> int:
    parser = study_parser(
        __doc__, "up to 30,000 examples, two seeds", "repetitions (default 3; quick 2)"
    )
    parser.add_argument("--texts", default="", help="folder with a train.jsonl of labelled texts")
    arguments = parser.parse_args()
    study = dataclasses.replace(QUICK if arguments.quick else Study(), texts=arguments.texts)
    if arguments.seeds is not None:
        study = dataclasses.replace(study, seeds=first_seeds(arguments.seeds))
    return run_and_write(study, arguments.output_dir / ROWS_FILE, run, write)


if __name__ == "__main__":
    sys.exit(main())
