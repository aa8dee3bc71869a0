"""Whole runs give the recorded releases and weights (`tests/golden_runs.py` records them anew)."""

from __future__ import annotations

import json

import golden_runs
import pytest

SAME = 3 * 3
"""Cases with the numbers of another strategy: of 3 methods layerwise, twice, and stacked."""
RECORDED = json.loads(golden_runs.GOLDEN.read_text(encoding="utf-8"))


def test_every_case_is_recorded():
    assert RECORDED.keys() == golden_runs.CASES.keys()
    numbers = {str((r["released"], r["gradients"], r["weights"])) for r in RECORDED.values()}
    assert len(RECORDED) > 20 and len(numbers) == len(RECORDED) - SAME


def cases():
    """All of them; those that take again what another strategy gives are slow, except dpzero's."""
    for case in golden_runs.CASES:
        method, strategy, _ = case.split()
        again = method in ("dpgd-0th", "mezo") and strategy != "whole_model"
        yield pytest.param(case, marks=[pytest.mark.slow] * again)


@pytest.mark.parametrize("case", cases())
def test_a_run_gives_the_recorded_numbers(tmp_path, case):
    found, recorded = golden_runs.outcome(case, str(tmp_path)), RECORDED[case]
    assert found["released"] == recorded["released"]
    assert len(found["released"]) == golden_runs.STEPS
    assert found["gradients"] == recorded["gradients"]
    assert found["weights"] == recorded["weights"]
    first_order, updates = recorded["weights"] is None, 690 * golden_runs.STEPS
    assert first_order == bool(recorded["gradients"])
    last_bits = first_order * updates * 2.0**-24
    assert abs(found["sum"] - recorded["sum"]) <= last_bits


def test_strategies_give_the_same_bits():
    """Where no sum is rounded, where the perturbation stands during a pass changes nothing."""
    for case, recorded in RECORDED.items():
        method, strategy, dtype = case.split()
        if strategy in ("layerwise", "stacked"):
            assert recorded == RECORDED[f"{method} whole_model {dtype}"], case


def test_ghost_clipping_gives_the_numbers_of_dense_gradients(tmp_path):
    """Layers in float32 move a coordinate's sum by about 2^-22 C; the grid has cells of 2^-8 C.

    So one of 2^13 coordinates of a step, at most, lands in the cell beside: of 3 * 690 fewer than
    10 but for a chance of 1e-12. Each moves the sum of the weights by rate * cell / B.
    """
    found = golden_runs.outcome(
        "dp-sgd dense float32",
        str(tmp_path),
        exact=False,
        performance={"per_example_gradients": "ghost"},
    )
    cell = golden_runs.CLIP * 2.0**-8
    moved = golden_runs.RATE * cell / golden_runs.BATCH
    dense, adam = RECORDED["dp-sgd dense float32"]["sum"], RECORDED["dp-adamw dense float32"]["sum"]
    assert abs(found["sum"] - dense) < 10 * moved < abs(dense - adam) / 100
