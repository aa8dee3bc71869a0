"""Blank slots of forward passes, from public settings: against batches that are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_runs import config

from hf_dpzero.batches.placement import Placement, pass_cost
from hf_dpzero.experiments.plan import blank_slots


def found(tmp_path: Any, n: int = 20_000, longest: int | None = 30, **settings: Any) -> Any:
    args = config(tmp_path, **settings)
    return blank_slots(args.plan(n), args, longest, 10**6, low_precision=False)


def drawn(args: Any, longest: int | None) -> tuple[float, float]:
    """Passes, and the share of blanks, of 4,000 Poisson batches whose rows spread evenly over widths."""
    widths = [8, 16, 24, 30] if longest == 30 else [0]
    cost = pass_cost("cpu", 10**6, low_precision=False)
    expected, sizes = args.expected_batch_size, (1, 4, 10)
    placement = Placement(expected, sizes, dict.fromkeys(widths, 1 / len(widths)), cost)
    taken = np.random.default_rng(0).poisson(expected / len(widths), size=(4000, len(widths)))
    slots = passes = 0
    for row in taken.tolist():
        for width, count in zip(widths, row, strict=True):
            begun = len(placement.filled(width, count))
            slots += sum(placement.rows_of(width, number) for number in range(begun))
            passes += begun
    return passes / 4000, float(1 - taken.sum() / slots)


@pytest.mark.parametrize("batch", [12, 64])
@pytest.mark.parametrize("longest", [30, None])
def test_shares_are_those_of_drawn_batches(tmp_path, batch: int, longest: int | None):
    settings = {"expected_batch_size": batch, "microbatch_size": 10}
    told = found(tmp_path, longest=longest, **settings)
    passes, share = drawn(config(tmp_path, **settings), longest)
    assert 0.02 < share < 0.6 and told["blank_share"] == pytest.approx(share, abs=0.01)
    assert 1 < passes < batch and told["passes"] == pytest.approx(passes, rel=0.02)
    assert told["rows_of_a_pass"] == pytest.approx(batch / passes / (1 - share), rel=0.03)


def test_nothing_is_said_of_other_runs(tmp_path):
    assert found(tmp_path, method="mezo") == {}
    assert found(tmp_path, method="dp-sgd")["passes"] > 1
    alone = found(tmp_path, microbatch_size=1)
    assert alone["blank_share"] == pytest.approx(0.0, abs=1e-6)
