"""DP stochastic saddle points: gaps against n and dimension, DP-SCO, synthetic data for linear queries.

    python -m scripts.studies.saddle_point --output_dir out/saddle --texts ../shared/data/sst2
    python -m scripts.studies.saddle_point --quick --output_dir out/saddle-quick

An interrupted run (Ctrl-C) writes the tables so far, and continues where it stopped when started again.
Writes rows.jsonl, table.md, table.json, gaps.png and queries.png.
"""

from __future__ import annotations

import dataclasses
import sys

from scripts.studies.command import first_seeds, run_and_write, study_parser
from scripts.studies.saddle_point.report import write
from scripts.studies.saddle_point.study import QUICK, ROWS_FILE, Study, run


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
