#!/usr/bin/env python3
"""Experiments of the online federated paper: correlated against independent noise, correctly accounted.

    python scripts/reproduce/online_federated.py --output_dir out/onlinefl
    python scripts/reproduce/online_federated.py --quick --output_dir out/onlinefl-quick

An interrupted run (Ctrl-C) writes the tables so far, and continues where it stopped when started again.
Writes rows.jsonl, table.md, table.json, logistic.png and digits.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from hf_dpzero.papers.online_federated_report import write
from hf_dpzero.papers.online_federated_study import QUICK, ROWS_FILE, Study, run
from hf_dpzero.papers.study_rows import read_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="200 rounds, 300 images a learner")
    parser.add_argument("--seeds", type=int, help="draws of each experiment (default 10 and 5)")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    study = QUICK if arguments.quick else Study()
    if arguments.seeds is not None:
        if arguments.seeds < 2:
            parser.error(f"--seeds {arguments.seeds}: an interval needs at least 2.")
        study = dataclasses.replace(study, seeds=arguments.seeds, digit_seeds=arguments.seeds)
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
