#!/usr/bin/env python3
"""Tables of the averaged-clipping paper: AClipped-dpSGD, DP-SGD and DP-GD on heavy-tailed regressions.

    python scripts/reproduce/aclip_tables.py --output_dir out/aclip                # 100,000 examples
    python scripts/reproduce/aclip_tables.py --quick --output_dir out/aclip-quick

An interrupted run (Ctrl-C) writes the tables so far, and continues where it stopped when started again.
Writes rows.jsonl, table.md, table.json and excess.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from hf_dpzero.papers.averaged_clipping_report import write
from hf_dpzero.papers.averaged_clipping_study import QUICK, ROWS_FILE, Study, run
from hf_dpzero.papers.study_rows import read_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20,000 examples, 300 steps")
    parser.add_argument("--seeds", type=int, help="draws of the data (default 10; quick 3)")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    study = QUICK if arguments.quick else Study()
    if arguments.seeds is not None:
        if arguments.seeds < 2:
            parser.error(f"--seeds {arguments.seeds}: an interval needs at least 2.")
        study = dataclasses.replace(study, seeds=tuple(range(1, arguments.seeds + 1)))
    try:
        rows = run(study, arguments.output_dir)
        print(write(study, rows, arguments.output_dir))
    except KeyboardInterrupt:
        rows = read_rows(arguments.output_dir / ROWS_FILE, study)
        write(study, rows, arguments.output_dir, sweeps=False)
        print(f"interrupted: {len(rows)} rows kept; the same command continues.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
