"""Blank slots of forward passes, from public settings: against batches that are drawn and packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_runs import config

from hf_dpzero.experiments.blank_slots import blank_slots, in_words


def found(tmp_path: Any, n: int = 20_000, longest: int | None = 30, **settings: Any) -> Any:
    args = config(tmp_path, **settings)
    return blank_slots(args.plan(n), args, longest, 10**6, low_precision=False)


def drawn(n: int, expected: float, rows: dict[str, int]) -> float:
    """The share of blanks in 4,000 Poisson batches whose rows spread evenly over widths."""
    slots = np.array(list(rows.values()))
    generator = np.random.default_rng(0)
    taken = generator.binomial(n, expected / n / len(slots), size=(4000, len(slots)))
    return float(1 - taken.sum() / (slots * -(-taken // slots)).sum())


@pytest.mark.parametrize("batch", [12, 64])
@pytest.mark.parametrize("longest", [30, None])
def test_shares_are_those_of_drawn_batches(tmp_path, batch: int, longest: int | None):
    told = found(tmp_path, longest=longest, expected_batch_size=batch, microbatch_size=10)
    assert list(told["rows_of_a_pass"])[-1] == ("any" if longest is None else "30")
    expected = drawn(20_000, batch, told["rows_of_a_pass"])
    assert 0.02 < expected < 0.6 and told["blank_share"] == pytest.approx(expected, abs=0.01)
    words = in_words(told)
    assert f"{100 * told['blank_share']:.0f} % of them blank" in words
    assert ("not looked at" in words) == (longest is not None)


def test_nothing_is_said_of_other_runs(tmp_path):
    assert found(tmp_path, method="dp-sgd") == {} and in_words({}) == ""
    alone = found(tmp_path, microbatch_size=1)
    assert alone["blank_share"] == pytest.approx(0.0, abs=1e-6) and in_words(alone) == ""
