"""The benchmark of parts runs, and its parts end in the weights of the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_parts_are_halves_and_end_as_the_whole():
    small = "--hidden 32 --layers 12 --vocabulary 90 --tokens 6 --rows 2 --repeats 1".split()  # noqa: SIM905
    found = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks.sharded", *small],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    result = json.loads(found.stdout[found.stdout.index("{\n") :])
    assert result["same_weights"] is True
    ratio = result["ratio"]
    assert 0.5 <= ratio["rest_bytes"] < 0.52
    largest = 1 / 12  # a layer; embeddings and head, which the root holds meanwhile, are fewer
    peak = ratio["peak_bytes"] - ratio["rest_bytes"]
    assert 0.8 * largest < peak < 1.3 * largest
    # how many messages are on their way at a time is a matter of the machine
    assert ratio["peak_bytes"] < ratio["peak_with_buffers_bytes"]
    assert all(ratio[f"{name}_s"] > 0 for name in ("perturbation", "perturbation_cpu", "step"))
