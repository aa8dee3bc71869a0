"""Blank slots of forward passes, from public settings: against batches that are drawn and packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_runs import config

from hf_dpzero.experiments.blank_slots import blank_slots, in_words


def found(
    tmp_path: Any, n: int = 2000, longest: int = 30, one: bool = False, **settings: Any
) -> Any:
    args = config(tmp_path, **settings)
    return blank_slots(args.plan(n), args, longest, one)


def drawn(n: int, expected: float, slots: int, widths: int) -> float:
    """The share of blanks in 4,000 Poisson batches whose rows spread evenly over widths."""
    generator = np.random.default_rng(0)
    rows = generator.binomial(n, expected / n / widths, size=(4000, widths))
    passes = -(-rows // slots)
    return 1 - rows.sum() / (slots * passes.sum())


@pytest.mark.parametrize("batch", [12, 64])
def test_shares_are_those_of_drawn_batches(tmp_path, batch: int):
    told = found(tmp_path, expected_batch_size=batch, microbatch_size=8)
    assert told["widths"] == 3  # 8, 16 and 30 tokens
    assert told["slots"] == min(8, round(batch**0.5))
    for share, widths in zip(told["blank_share"], (1, 3), strict=True):
        assert share == pytest.approx(drawn(2000, batch, told["slots"], widths), abs=0.005)
    assert "blank where all examples have one width" in in_words(told)
    assert "over 3 widths" in in_words(told)


def test_batches_of_one_size(tmp_path):
    fixed = {"sampling": "full_batch", "expected_batch_size": 60}
    told = found(tmp_path, n=60, one=True, microbatch_size=50, **fixed)
    assert told["slots"] == 50 and told["widths"] == 1  # two passes for 60 rows
    assert told["blank_share"] == pytest.approx([0.4, 0.4])
    assert "widths" not in in_words(told)


def test_nothing_is_said_of_other_runs(tmp_path):
    assert found(tmp_path, method="dp-sgd") == {} and in_words({}) == ""
    alone = found(tmp_path, microbatch_size=1)
    assert alone["blank_share"] == pytest.approx([0.0, 0.0]) and in_words(alone) == ""
