"""Experiments of the online federated paper: correlated against independent noise, correctly accounted.

    python -m scripts.studies.online_federated --output_dir out/onlinefl
    python -m scripts.studies.online_federated --quick --output_dir out/onlinefl-quick

Needs scikit-learn (its small digits). Writes rows.jsonl, table.md and a plot of each part.
"""

import sys

from scripts.studies import harness
from scripts.studies.online_federated.report import write
from scripts.studies.online_federated.study import QUICK, Study


def seeds(count: int) -> harness.Row:
    return {"seeds": count, "digit_seeds": count}


if __name__ == "__main__":
    sys.exit(harness.main(__doc__, Study(), QUICK, write, seeds))
