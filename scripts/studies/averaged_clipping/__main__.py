"""Tables of the averaged-clipping paper: AClipped-dpSGD, DP-SGD and DP-GD on heavy-tailed regressions.

    python -m scripts.studies.averaged_clipping --output_dir out/aclip                # 100,000 examples
    python -m scripts.studies.averaged_clipping --quick --output_dir out/aclip-quick

Writes rows.jsonl, table.md and excess.png.
"""

import sys

from scripts.studies import harness
from scripts.studies.averaged_clipping.report import write
from scripts.studies.averaged_clipping.study import QUICK, Study

if __name__ == "__main__":
    sys.exit(harness.main(__doc__, Study(), QUICK, write, harness.first_seeds))
