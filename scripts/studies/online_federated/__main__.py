"""Experiments of the online federated paper: correlated against independent noise, correctly accounted.

    python -m scripts.studies.online_federated --output_dir out/onlinefl
    python -m scripts.studies.online_federated --quick --output_dir out/onlinefl-quick

An interrupted run (Ctrl-C) writes the tables so far, and continues where it stopped when started again.
Writes rows.jsonl, table.md, table.json, logistic.png and digits.png.
"""

from __future__ import annotations

import dataclasses
import sys

from scripts.studies.command import run_and_write, study_parser
from scripts.studies.online_federated.report import write
from scripts.studies.online_federated.study import QUICK, ROWS_FILE, Study, run


def main() -> int:
    parser = study_parser(
        __doc__,
        "200 rounds, 300 images a learner",
        "draws of each experiment (default 10 and 5)",
    )
    arguments = parser.parse_args()
    study = QUICK if arguments.quick else Study()
    if arguments.seeds is not None:
        study = dataclasses.replace(study, seeds=arguments.seeds, digit_seeds=arguments.seeds)
    return run_and_write(study, arguments.output_dir / ROWS_FILE, run, write)


if __name__ == "__main__":
    sys.exit(main())
