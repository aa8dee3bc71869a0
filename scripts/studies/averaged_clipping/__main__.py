"""Tables of the averaged-clipping paper: AClipped-dpSGD, DP-SGD and DP-GD on heavy-tailed regressions.

    python -m scripts.studies.averaged_clipping --output_dir out/aclip                # 100,000 examples
    python -m scripts.studies.averaged_clipping --quick --output_dir out/aclip-quick

An interrupted run (Ctrl-C) writes the tables so far, and continues where it stopped when started again.
Writes rows.jsonl, table.md, table.json and excess.png.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

from scripts.studies.averaged_clipping.report import write
from scripts.studies.averaged_clipping.study import QUICK, ROWS_FILE, Study, run
from scripts.studies.command import first_seeds, run_and_write, study_parser


def main() -> int:
    parser = study_parser(
        __doc__, "20,000 examples, 300 steps", "draws of the data (default 10; quick 3)"
    )
    arguments = parser.parse_args()
    study = QUICK if arguments.quick else Study()
    if arguments.seeds is not None:
        study = dataclasses.replace(study, seeds=first_seeds(arguments.seeds))
    so_far = functools.partial(write, sweeps=False)
    return run_and_write(study, arguments.output_dir / ROWS_FILE, run, write, so_far)


if __name__ == "__main__":
    sys.exit(main())
