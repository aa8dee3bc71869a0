"""The placement lemma by enumeration: one row more displaces one other row, never more.

A scheme says where the rows of a step stand: in which pass, of how many rows, in which slot, on which
process. Contributions may depend on that by arbitrary amounts. All outcomes of a scheme, equally likely,
for S and for S + {x} are matched one to one such that as few rows as possible change their place (an
assignment problem). The lemma says that a matching exists in which one row does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from hf_dpzero.batches import logical_batch as batches
from hf_dpzero.batches.logical_batch import Rows, StepBatches
from hf_dpzero.batches.placement import Placement
from hf_dpzero.batches.shapes import PassShapes
from hf_dpzero.privacy import sampling
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan

Cell = tuple[Any, ...]
Outcome = dict[int, Cell]
PLACEMENT = Placement(6.0, (1, 2, 4), {8: 0.5, 16: 0.5}, cost=4.0)
LENGTHS = [3, 4, 12, 5, 11, 6, 9]  # 8 and 16 columns


def collate(rows: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    each = [torch.full((1, LENGTHS[i]), i + 1) for i in rows]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in each]


def cells(order: Sequence[int], processes: int = 1, placement: Placement = PLACEMENT) -> Outcome:
    """Where the package puts rows that come in this order."""
    shapes = PassShapes(collate, placement)
    found: Outcome = {}
    for process in range(processes):
        numbers: dict[tuple[int, ...], int] = {}
        for part in shapes.dealt(order, process, processes)[0]:
            shape = tuple(part["input_ids"].shape)
            number = numbers[shape] = numbers.get(shape, -1) + 1
            for slot, place in enumerate(part.places):
                found[order[place]] = (process, shape, number, slot)
    return found


def as_it_is(processes: int) -> Callable[[list[int]], list[Outcome]]:
    return lambda rows: [cells(order, processes) for order in itertools.permutations(rows)]


def by_row_number(rows: list[int]) -> list[Outcome]:
    return [cells(sorted(rows))]


def sized_by_the_draw(rows: list[int]) -> list[Outcome]:
    """Passes of as many rows as are left, at most four."""
    found = []
    for order in itertools.permutations(rows):
        outcome: Outcome = {}
        for width in (8, 16):
            of = [row for row in order if (LENGTHS[row] > 7) == (width == 16)]
            for start in range(0, len(of), 4):
                part = of[start : start + 4]
                outcome |= {row: (width, start, len(part), slot) for slot, row in enumerate(part)}
        found.append(outcome)
    return found


def same_words_for_both_shapes(rows: list[int]) -> list[Outcome]:
    """The i-th row of each shape has the i-th word."""
    of = [[r for r in sorted(rows) if (LENGTHS[r] > 7) == wide] for wide in (False, True)]
    found = []
    for words in itertools.permutations(range(max(map(len, of)))):
        orders = [[r for _, r in sorted(zip(words, group))] for group in of]
        found.append(cells(orders[0]) | cells(orders[1]))
    return found


def excess(scheme: Callable[[list[int]], list[Outcome]], rows: list[int], more: list[int]) -> int:
    """Rows displaced beyond one for each row more, in the best matching of all outcomes; 0 if none."""
    without, with_ = scheme(rows), scheme([*rows, *more])
    size = int(np.lcm(len(without), len(with_)))
    without, with_ = without * (size // len(without)), with_ * (size // len(with_))
    cost = np.array([[sum(one[r] != other[r] for r in rows) for other in with_] for one in without])
    beyond = np.maximum(cost - len(more), 0)
    return int(beyond[linear_sum_assignment(beyond)].sum())


ONE_ROW = [([0, 1, 3], [5]), ([0, 1, 2, 4], [3]), ([0, 2], [1]), ([1, 3, 4, 5], [0]), ([], [2])]
TWO_ROWS = [([0, 1], [3, 5]), ([0, 2, 4], [1, 6])]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize(("rows", "more"), [*ONE_ROW, *TWO_ROWS])
def test_a_row_displaces_one_other_row(rows: list[int], more: list[int], processes: int):
    """And a unit of two rows displaces two."""
    assert excess(as_it_is(processes), rows, more) == 0


@pytest.mark.parametrize(
    ("scheme", "rows", "more"),
    [
        (by_row_number, [1, 3, 5], [0]),
        (sized_by_the_draw, [0, 1, 3], [5]),
        (same_words_for_both_shapes, [0, 1, 2, 4], [3]),
    ],
)
def test_the_test_rejects_what_displaces_more(scheme: Any, rows: list[int], more: list[int]):
    assert excess(scheme, rows, more) > 0


def test_sums_move_by_the_row_and_one_displaced_row():
    """Along the proof's coupling, with contributions of +-1 that follow from the place: 3 at most."""
    generator, table = np.random.default_rng(0), dict[Any, float]()

    def total(outcome: Outcome) -> float:
        return sum(table.setdefault(at, generator.choice([-1.0, 1.0])) for at in outcome.items())

    moves = []
    for order in itertools.permutations([0, 1, 3]):
        for j in range(4):
            longer = [*order, 5]
            longer[j], longer[3] = longer[3], longer[j]
            before, after = cells(order), cells(longer)
            assert sum(before[row] != after[row] for row in order) <= 1
            moves.append(abs(total(after) - total(before)))
    assert max(moves) == 3.0


def test_a_step_takes_places_in_the_order_of_words_of_their_own(monkeypatch: pytest.MonkeyPatch):
    mechanism = ScalarMechanism(clip=1.0, noise_multiplier=2.0, expected_batch_size=7)
    sampler = sampling.FullBatchSampler(num_examples=7, expected_batch_size=7)
    key, plan = bytes(range(32)), PrivacyPlan(mechanism=mechanism, sampler=sampler, steps=5)
    rows = Rows(list(range(7)), lambda chosen: collate(chosen)[0])
    steps = StepBatches(rows, plan, key, 4, shapes=PassShapes(rows.collate_each, PLACEMENT))
    taken = []

    def reversed_order(*given: Any) -> np.ndarray:
        taken.append(given)
        return np.arange(given[0])[::-1]

    monkeypatch.setattr(batches, "place_order", reversed_order)
    backwards = steps[3]["microbatches"]
    assert taken == [(7, 3, key)]
    wide = next(p for p in backwards if p["input_ids"].shape[1] == 16)
    assert wide["input_ids"][0, 0].item() == 7
    domains = []
    words = sampling._words
    monkeypatch.setattr(sampling, "_words", lambda *a: domains.append(a[3]) or words(*a))
    plan.sampler.batch(3, key), sampling.place_order(7, 3, key)
    assert domains[-1] == b"places" and b"places" not in domains[:-1]


@pytest.mark.false_alarm(0)
def test_orders_are_uniform():
    """24 orders of four rows, 4,800 steps: chi-square with 23 degrees of freedom, and places of rows."""
    counts: dict[tuple[int, ...], int] = {}
    for step in range(4800):
        order = tuple(sampling.place_order(4, step, bytes(32)).tolist())
        counts[order] = counts.get(order, 0) + 1
    statistic = sum((n - 200) ** 2 / 200 for n in counts.values())
    assert len(counts) == 24 and statistic < 72.0  # P(chi2_23 > 72) = 6e-7, of a fixed key
