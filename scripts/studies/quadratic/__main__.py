"""Figures 1 and 2 of the DPZero paper: DPZero, DPGD-0th and DP-GD on quadratics of d = 20 ... 2000.

    python -m scripts.studies.quadratic --output_dir out/quadratic           # the paper's grid
    python -m scripts.studies.quadratic --quick --output_dir out/quadratic-quick

The table has the best train gradient norm over the grid, of one draw or the mean of `--seeds`. Writes
rows.jsonl, table.md, figure1.png and figure2.png.
"""

import sys

from scripts.studies import harness
from scripts.studies.quadratic.study import QUICK, Study, write

if __name__ == "__main__":
    sys.exit(harness.main(__doc__, Study(), QUICK, write, harness.first_seeds))
