"""Passes by width and place: the cheapest sequence, what is public, the shares of processes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hf_dpzero.batches.placement import (
    Placement,
    bucket,
    buckets,
    cheapest,
    pass_cost,
    pass_sequence,
    public_shares,
    sizes_up_to,
)


def chances(mean: float, top: int) -> np.ndarray:
    """Of N rows: Poisson, or in three cases of ten geometric of a mean of at least 4."""
    k, stray = np.arange(top), max(mean, 4.0)
    poisson = np.exp(k * math.log(mean) - mean - [math.lgamma(i + 1) for i in k])
    return 0.7 * poisson + 0.3 * (stray / (1 + stray)) ** k / (1 + stray)


def cost_of(sequence: tuple[int, ...], mean: float, cost: float, width: int) -> float:
    """The expected time of passes of these rows, the last repeated, by summing over all N."""
    total = 0.0
    for count, chance in enumerate(chances(mean, 60)):
        start, number = 0, 0
        while start < count:
            rows = sequence[min(number, len(sequence) - 1)]
            total += chance * (cost + rows * width)
            start, number = start + rows, number + 1
    return total


@pytest.mark.parametrize("mean", [0.3, 2.0, 5.0])
@pytest.mark.parametrize("cost", [0.0, 10.0, 200.0])
def test_the_sequence_is_the_cheapest(mean: float, cost: float):
    found = cost_of(pass_sequence(mean, (1, 2, 4), cost, 8), mean, cost, 8)
    others = [
        cost_of((*head, last), mean, cost, 8)
        for head in itertools.product((1, 2, 4), repeat=4)
        for last in (1, 2, 4)
    ]
    assert found <= min(others) * (1 + 1e-2)  # beyond 40 places the largest are taken


def test_many_rows_go_in_full_passes_and_the_rest_in_smaller_ones():
    sequence = pass_sequence(1e5, (1, 4, 16, 64), 40.0, 8)
    assert set(sequence[:1000]) == {64} and sum(sequence) >= 1e5 + 4 * math.sqrt(1e5)
    assert sequence[-1] == 16 and pass_sequence(20.0, (1, 4, 16), 40.0, 8)[:5] == (16, 4, 4, 4, 4)
    assert pass_sequence(3.0, (1,), 40.0, 8)[:9] == (1,) * 9


@pytest.mark.parametrize("most", [None, 40, 64])
@pytest.mark.parametrize("step", [8, 16])
def test_a_bucket_leaves_a_masked_column_where_it_can(most: int | None, step: int):
    for width in range(1, 1200):
        wide = bucket(width, most, None, step)
        assert wide > width or (most is not None and width >= most)
        if most is None or width < most:
            assert wide - width <= max(step, width / 8 + 1)
        assert bucket(wide - 1, most, None, step) == wide or wide == 1
    assert all(wide % step == 0 for wide in buckets(500, None, None, step))
    assert buckets(40, 40, None, step)[-1] == 40


def test_passes_follow_from_public_numbers_alone():
    placement = Placement(64.0, sizes_up_to(64), {8: 0.6, 16: 0.3, 24: 0.1}, 40.0)
    assert placement == Placement(64.0, (1, 4, 16, 64), {8: 0.6, 16: 0.3, 24: 0.1}, 40.0)
    for width, few, many in itertools.product((8, 24, 999), (3, 20), (40, 200)):
        short, long = placement.filled(width, few), placement.filled(width, many)
        assert long[: len(short) - 1] == short[:-1]  # more rows change no earlier pass
        assert long[len(short) - 1].start == short[-1].start
        assert [part.start for part in long][1:] == [part.stop for part in long][:-1]
        assert len(long[-1]) <= placement.rows_of(width, len(long) - 1)


def test_expected_passes_and_tokens_are_those_of_draws():
    placement = Placement(40.0, (1, 4, 16), {8: 0.7, 16: 0.3}, 40.0)
    generator = np.random.default_rng(0)
    passes, tokens = [], []
    for _ in range(4000):
        parts = [
            (width, number)
            for width, share in placement.shares.items()
            for number in range(len(placement.filled(width, generator.poisson(40 * share))))
        ]
        rows = [placement.rows_of(*part) for part in parts]
        passes.append(len(parts))
        tokens.append(sum(40.0 + n * width for n, (width, _) in zip(rows, parts)))
    assert placement.expected_passes() == pytest.approx(np.mean(passes), rel=0.02)
    assert placement.expected_tokens() == pytest.approx(np.mean(tokens), rel=0.02)


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_processes_have_even_loads(processes: int):
    placement = Placement(256.0, (1, 4, 16), public_shares([], buckets(60)), 40.0)
    whole = placement.busiest(1)
    assert whole == pytest.approx(placement.expected_tokens())
    assert whole / processes <= placement.busiest(processes) <= 1.15 * whole / processes
    owners = [placement.process_of(8, n, processes) for n in range(40)]
    assert set(owners) <= set(range(processes)) and len(set(owners)) > 1


def test_memory_bounds_the_tokens_of_a_pass_but_not_of_one_row():
    placement = Placement(64.0, (1, 4, 16, 64), {8: 0.5, 256: 0.5}, 1e4, tokens=600)
    assert max(placement.passes(8)) == 64 and set(placement.passes(256)) == {1}


def test_small_models_pay_more_for_a_pass():
    assert pass_cost("cpu", 10_000, False) > 1000 > 60 > pass_cost("cpu", 22_000_000, False)
    offloaded = pass_cost("cuda", 13 * 10**9, True, arriving=26 * 10**9)
    # 26 GB at 25 GB/s, tokens of 26 GFLOP at 500 TFLOP/s; 400 to perturb, 231 to start
    assert round(offloaded) == 20_000 + 400 + 231


def test_widths_are_joined_where_a_pass_costs_more_than_padding():
    # lengths as of SST-2's prompts, rows cut at 96: a pass on an H100 costs 8,000 tokens
    widths = [11 + i % 50 for i in range(500)]
    given = {"expected": 64.0, "sizes": sizes_up_to(64), "tokens": None}
    on = {
        device: cheapest(
            widths, True, 8192, 96, cost=pass_cost(device, 135_000_000, False), **given
        )
        for device in ("cpu", "cuda")
    }
    assert on["cuda"].step == 64 and on["cuda"].shares[64] > 0.99
    assert on["cuda"].expected_passes() < 2 < 8 < on["cpu"].expected_passes()
    assert on["cpu"].step in (8, 16)
