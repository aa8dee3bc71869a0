"""Figure 1 of "Dynamic privacy budget allocation" (Hong, Wang and Zhou 2022): uniform against exp noise.

    python -m scripts.studies.budget --output_dir out/budget              # 4 minutes of one core
    python -m scripts.studies.budget --quick --output_dir out/budget-quick

Needs scikit-learn (its small digits, nothing is downloaded). Writes rows.jsonl, table.md and
figure1.png.
"""

import sys

from scripts.studies import harness
from scripts.studies.budget.report import write
from scripts.studies.budget.study import FULL, QUICK

STEPS = {"nargs": "+", "help": "T (default 50 100 150, as the paper)"}
HIDDEN = {"type": int, "help": "units of the network (default 64; paper: 1000)"}

if __name__ == "__main__":
    sys.exit(
        harness.main(
            __doc__,
            FULL,
            QUICK,
            write,
            lambda count: {"seeds": count},
            steps={"type": harness.at_least_two, **STEPS},
            hidden=HIDDEN,
        )
    )
