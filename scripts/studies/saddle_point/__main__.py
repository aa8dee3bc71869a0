"""DP stochastic saddle points: gaps against n and dimension, DP-SCO, synthetic data for linear queries.

    python -m scripts.studies.saddle_point --output_dir out/saddle --texts ../shared/data/sst2
    python -m scripts.studies.saddle_point --quick --output_dir out/saddle-quick

Writes rows.jsonl, table.md, gaps.png and queries.png.
"""

import sys

from scripts.studies import harness
from scripts.studies.saddle_point.report import write
from scripts.studies.saddle_point.study import QUICK, Study

TEXTS = {"help": "folder with a train.jsonl of labelled texts"}

if __name__ == "__main__":
    sys.exit(harness.main(__doc__, Study(), QUICK, write, harness.first_seeds, texts=TEXTS))
