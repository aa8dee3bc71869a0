"""Figure 1 of "Dynamic privacy budget allocation" (Hong, Wang and Zhou 2022): uniform against exp noise.

    python -m scripts.studies.budget --output_dir out/budget              # 9 minutes of one core
    python -m scripts.studies.budget --quick --output_dir out/budget-quick

Needs scikit-learn (its small digits, nothing is downloaded) and matplotlib. An interrupted run continues
where it stopped. Writes points.jsonl, rows.json, table.md and figure1.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from scripts.studies.budget.report import write
from scripts.studies.budget.study import FULL, QUICK, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few small runs, about 10 seconds")
    parser.add_argument("--seeds", type=int, help="runs of each arm, at least 2")
    parser.add_argument("--hidden", type=int, help="units of the network (default 64; paper: 1000)")
    parser.add_argument("--steps", type=int, nargs="+", help="T (default 50 100 150, as the paper)")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.seeds is not None and arguments.seeds < 2:
        parser.error(f"--seeds {arguments.seeds}: a standard error needs at least 2 runs")
    if arguments.steps and min(arguments.steps) < 2:
        parser.error(
            f"--steps {min(arguments.steps)}: a schedule that falls needs at least 2 steps"
        )
    steps = tuple(arguments.steps) if arguments.steps else None
    given = {"seeds": arguments.seeds, "hidden": arguments.hidden, "steps": steps}
    changed = {name: value for name, value in given.items() if value is not None}
    study = dataclasses.replace(QUICK if arguments.quick else FULL, **changed)
    try:
        results = run(study, arguments.output_dir)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues from {arguments.output_dir}", file=sys.stderr)
        return 130
    print(write(results, arguments.output_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
