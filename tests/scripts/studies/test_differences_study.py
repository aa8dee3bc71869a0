"""The study of differences: what its arms have in common, and its table."""

from __future__ import annotations

import math
from types import SimpleNamespace

from scripts.studies.differences import Study, _of_arm, write


def test_arms_of_equal_passes_have_the_clip_and_the_rate_of_more_directions():
    config = SimpleNamespace(num_directions=64, clip=32.0, learning_rate=2.0)
    assert _of_arm("forward", config) == {"differences": "forward"}
    more = _of_arm("forward, 2 K passes", config)
    assert more["num_directions"] + 1 == 2 * config.num_directions
    assert math.isclose(more["clip"] ** 2 / more["num_directions"], 32.0**2 / 64)
    assert math.isclose(more["learning_rate"] * more["num_directions"], 2.0 * 64)


def test_the_table_has_means_and_each_run(tmp_path):
    study = Study(tasks=("TREC, head",), arms=("central", "forward"))
    rows = [{"task": "TREC, head", "arm": "central", "accuracy": a} for a in (80.0, 82.0)]
    assert "| 81.00 ± 1.00 (80.0 82.0) |  |" in write(study, rows, tmp_path)
