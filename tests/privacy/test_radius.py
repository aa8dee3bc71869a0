"""A row and the row that it displaces move a mechanism's sum by the stated sensitivity at most.

What the displaced row adds is another vector, at most 2^-8 radii away (A2 of `batches.placement`). Each
search attains the stated sensitivity, never exceeds it, and does exceed it where the radius is C.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from hf_dpzero.privacy.group_losses import PerStepGroups, PrefixSumGroups, VertexGroups
from hf_dpzero.privacy.group_losses import base as group_losses
from hf_dpzero.privacy.mechanisms import (
    DPSGD,
    AdaptiveDPSGD,
    AdaptiveScalarMechanism,
    AveragedScalarMechanism,
    DPAdamW,
    ScalarMechanism,
    VectorMechanism,
    adaptive,
)
from hf_dpzero.privacy.mechanisms.base import NoisedSum
from hf_dpzero.privacy.sampling import FixedBatchesSampler, FullBatchSampler

SHARE = 2.0**-8
ROUNDING = 2.0**-20
"""A displaced row moves by this much less, so that what it adds moves by 2^-8 radii after truncation."""

COMMON = {"noise_multiplier": 3.0, "expected_batch_size": 8.0}
FACTOR = np.array([[2.0, 0.0, 0.0], [1.0, 3.0, 0.0], [-0.5, 0.25, 0.75]])
"""L of the Gram matrix L L' of three directions."""

MECHANISMS = [
    ScalarMechanism(clip=0.3, **COMMON),
    ScalarMechanism(clip=7.0, num_directions=3, **COMMON),
    ScalarMechanism(clip=7.0, num_directions=3, distribution="laplace", **COMMON),
    VectorMechanism(clip=7.0, num_directions=3, **COMMON),
    VectorMechanism(clip=0.3, **COMMON),
    AveragedScalarMechanism(clip=7.0, clip_groups=3, num_directions=3, **COMMON),
    AdaptiveScalarMechanism(clip=7.0, num_directions=3, clip_count_noise=2.5, **COMMON),
    AdaptiveDPSGD(clip=7.0, clip_count_noise=2.5, **COMMON),
    DPSGD(clip=0.3, **COMMON),
    DPAdamW(clip=7.0, clipping="automatic", clip_stability=0.05, **COMMON),
    DPSGD(clip=7.0, clipping="averaged", clip_groups=3, **COMMON),
]
mechanisms = pytest.mark.parametrize(
    "mechanism", MECHANISMS, ids=lambda m: f"{m.name}-{m.clip}-{getattr(m, 'clipping', '')}"
)


def width(mechanism) -> int:
    return getattr(mechanism, "num_directions", 3)


def total(mechanism, rows: np.ndarray, groups: list[int]) -> np.ndarray:
    """The clipped sum of rows [B, k]; of dpgd-0th they are coordinates of vectors."""
    k, x = width(mechanism), torch.from_numpy(rows)
    if isinstance(mechanism, VectorMechanism):
        factor = FACTOR[:k, :k]
        along = torch.from_numpy(np.linalg.solve(factor.T, rows.T).T.copy())
        return factor.T @ np.array(mechanism.clip_sum(along, factor @ factor.T))
    if hasattr(mechanism, "clip_sum"):
        averaged = isinstance(mechanism, AveragedScalarMechanism)
        sums = mechanism.clip_sum(x, groups) if averaged else mechanism.clip_sum(x)
        return np.array(sums[:k], dtype=float) * mechanism.granularity
    if mechanism.clipping == "averaged":
        x = torch.stack([x[torch.tensor(groups) == g].mean(dim=0) for g in sorted(set(groups))])
    return (mechanism.weights(x.norm(dim=1)).double()[:, None] * x).sum(dim=0).numpy()


def lipschitz(mechanism) -> float:
    """How much further the clip moves a row than it was moved: scaling is a projection in L2 alone."""
    if getattr(mechanism, "clipping", "") == "automatic":
        return mechanism.radius / mechanism.clip_stability
    return 2.0 if mechanism.distribution == "laplace" else 1.0


@dataclass
class Neighbours:
    """Row 0 is added, or exchanged for another one; rows 1 and 2 may be displaced.

    Attributes:
      rows: [B, k].
      exchanged: what row 0 is exchanged for; None where it is added.
      moves: of rows 1 and 2, [2, k]; the second one of an exchange alone.
      groups: of each row.
    """

    rows: np.ndarray
    exchanged: np.ndarray | None
    moves: np.ndarray
    groups: list[int]

    def moved(self, mechanism) -> float:
        """The change of the sum over the stated sensitivity."""
        after, before, relation = self.rows.copy(), self.rows, "replace_one"
        after[1] += self.moves[0]
        if self.exchanged is None:
            after_sum, relation = total(mechanism, after, self.groups), "add_or_remove_one"
            before_sum = total(mechanism, before[1:], self.groups[1:])
        else:
            after[0], after[2] = self.exchanged, after[2] + self.moves[1]
            after_sum, before_sum = (total(mechanism, r, self.groups) for r in (after, before))
        order = 1 if mechanism.distribution == "laplace" else 2
        return float(np.linalg.norm(after_sum - before_sum, order)) / mechanism.sensitivity(
            relation
        )


def worst_case(mechanism, exchange: bool) -> Neighbours:
    """All in one direction; averaged clipping: displaced rows in groups of their own."""
    k, r = width(mechanism), mechanism.radius
    axis, rows = np.eye(k)[0], np.zeros((5, k))
    rows[3:] = -5 * r * axis
    rows[0] = (-1e9 if exchange else 1e9) * r * axis
    move = SHARE * r * (1 - ROUNDING)  # after the clip
    if getattr(mechanism, "clipping", "") == "automatic":  # r v / (v + gamma) = move
        move = move * mechanism.clip_stability / (r - move)
    moves = np.stack([move * axis] * 2)
    return Neighbours(rows, 1e9 * r * axis if exchange else None, moves, [0, 1, 2, 0, 0])


def random_case(mechanism, exchange: bool, rng: np.random.Generator) -> Neighbours:
    """Rows of every size around the radius, displaced anywhere."""
    k, r = width(mechanism), mechanism.radius
    order = 1 if mechanism.distribution == "laplace" else 2

    def unit(count: int) -> np.ndarray:
        v = rng.standard_normal((count, k))
        return v / np.linalg.norm(v, order, axis=1, keepdims=True)

    rows = unit(5) * r * 10.0 ** rng.choice([rng.uniform(-4, 4), 0.0], (5, 1))
    moves = unit(2) * (SHARE * r * (1 - ROUNDING) / lipschitz(mechanism))
    other = unit(1)[0] * r * 10.0 ** rng.uniform(-2, 6)
    return Neighbours(
        rows, other if exchange else None, moves, [0, *rng.integers(0, 3, 4).tolist()]
    )


def cases(mechanism, exchange: bool, count: int = 200):
    rng = np.random.default_rng(7)
    yield worst_case(mechanism, exchange)
    for _ in range(count):
        yield random_case(mechanism, exchange, rng)


def room(mechanism) -> float:
    """What mechanisms keep for float rounding, of the radius."""
    return 1e-7 if hasattr(mechanism, "granularity") else 2.0**-15


@pytest.mark.parametrize("exchange", [False, True])
@mechanisms
def test_a_row_and_the_row_that_it_displaces_move_the_sum_by_its_sensitivity(mechanism, exchange):
    moved = [case.moved(mechanism) for case in cases(mechanism, exchange)]
    assert max(moved) <= 1.0 + 1e-15
    attained = 1.0
    if getattr(mechanism, "clipping", "") == "averaged" and not exchange:
        attained = (1 + SHARE / 2) / (1 + SHARE)  # 2 radii and one displaced row, of 2 C
    assert max(moved) >= attained * (1 - room(mechanism))


@pytest.mark.parametrize("exchange", [False, True])
@mechanisms
def test_the_search_finds_more_where_the_radius_is_the_clip(mechanism, exchange, monkeypatch):
    monkeypatch.setattr(NoisedSum, "radius", property(lambda m: m.clip))
    moved = max(case.moved(mechanism) for case in cases(mechanism, exchange, 0))
    averaged = getattr(mechanism, "clipping", "") == "averaged" and not exchange
    expected = 1 + (SHARE / 2 if averaged else SHARE)
    assert moved == pytest.approx(expected, rel=2 * room(mechanism)) and moved > 1.001


def test_the_radius_in_integers_is_never_rounded_up():
    """2^38 / 257 is 0.249 above an integer, so that no rounding of C reaches the next one."""
    rng = np.random.default_rng(0)
    for clip in [2.0**-64, 2.0**64, *10.0 ** rng.uniform(-15, 15, 500)]:
        mechanism = ScalarMechanism(clip=float(clip), **COMMON)
        (most,) = mechanism.clip_sum(torch.tensor([[1e300]], dtype=torch.float64))
        assert most == 2**38 // 257
        assert most * 257 <= 2**30 * 256


# ---------------------------------------------------------------- whatever the numbers are

ROW, COUNTED = 2**38 // 257, 2**36 // 65
"""What a row adds to a sum at most, in units of 2^-30 C, and to the count, in units of 2^-31."""

NOISY = np.random.default_rng(3).standard_normal((3, 6))
DIRECTIONS = {"signs": np.sign(NOISY), "close": 1 + 1e-3 * NOISY, "nearly equal": 1 + 1e-9 * NOISY,
              "equal": 1 + 0 * NOISY}  # fmt: skip
EXACT = [m for m in MECHANISMS if hasattr(m, "granularity")]
EXACT += [ScalarMechanism(clip=0.1, num_directions=16, **COMMON)]
VECTORS = [m for m in MECHANISMS if isinstance(m, VectorMechanism)]
CASES = [*((m, "") for m in EXACT), *itertools.product(VECTORS, DIRECTIONS)]


def at_the_bound(mechanism, u: np.ndarray | None, seed: int) -> np.ndarray:
    """Rows of norm r to a few units in the last place: entries of many sizes, and axes to 2^-30."""
    rng, k = np.random.default_rng(seed), width(mechanism)
    rows = rng.standard_normal((30, k)) * 10.0 ** rng.uniform(-3, 3, (30, k))
    rows[20:] = np.eye(k)[rng.integers(k, size=10)] + 2.0**-30 * rng.integers(-3, 4, (10, k))
    vectors = rows if u is None else rows @ u[:k]
    order = 1 if mechanism.distribution == "laplace" else 2
    norms = np.linalg.norm(vectors, order, axis=1, keepdims=True)
    return rows / norms * mechanism.radius * (1 + rng.integers(-8, 9, (30, 1)) * 2.0**-52)


def size_of(mechanism, u: np.ndarray | None, moved: list[float]) -> Fraction:
    """The squared norm over C^2 of what coefficients or integers stand for; of Laplace the L1 norm."""
    if u is not None:
        columns = u[: len(moved)].T.tolist()
        along = (
            sum(Fraction(c) * Fraction(v) for c, v in zip(moved, column, strict=True))
            for column in columns
        )
        return sum(v**2 for v in along) / Fraction(mechanism.clip) ** 2
    own = [Fraction(int(n), 2**30) for n in moved]
    return sum(map(abs, own)) if mechanism.distribution == "laplace" else sum(n**2 for n in own)


@pytest.mark.parametrize(("mechanism", "kind"), CASES, ids=lambda c: getattr(c, "name", c))
@settings(max_examples=40, derandomize=True, deadline=None)
@given(data=st.data())
def test_no_row_moves_an_exact_sum_by_more_than_a_row_may(mechanism, kind, data):
    """In rational numbers, for any float64; the rest of the sensitivity is a displaced row's."""
    k, u = width(mechanism), DIRECTIONS[kind] if kind else None
    averaged = isinstance(mechanism, AveragedScalarMechanism)
    gram = {} if u is None else {"gram": u[:k] @ u[:k].T}
    any_numbers = data.draw(hypothesis_numpy.arrays(float, (4, k), elements=st.floats()))
    bound = at_the_bound(mechanism, u, data.draw(st.integers(0, 2**32)))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=34, max_size=34))
    rows = torch.from_numpy(np.concatenate([any_numbers, bound]))

    def sums(chosen: list[int]) -> list[float]:
        more = {"groups": [groups[i] for i in chosen]} if averaged else gram
        return list(mechanism.clip_sum(rows[chosen], **more))

    everybody, most = list(range(34)), mechanism.sensitivity_add_remove * Fraction(256, 257)
    whole = sums(everybody)
    for i in everybody:
        rest = sums([j for j in everybody if j != i])
        moved = [a - b for a, b in zip(whole, rest, strict=True)]
        exact = (
            sums([i]) if u is not None else moved
        )  # float sums are exact, differences may not be
        assert averaged or sums([i]) == moved
        power = 1 if mechanism.distribution == "laplace" else 2
        assert size_of(mechanism, u, exact[:k]) <= most**power
        assert all(abs(count) <= COUNTED for count in moved[k:])


# ---------------------------------------------------------------- adaptive clipping's count


def joint(mechanism, size: float, displaced: float) -> float:
    """Over 1/z: the move of sum and count where a row is added and another one moves outwards."""
    r = mechanism.radius
    before = torch.tensor([[displaced * mechanism.clip]], dtype=torch.float64)
    after = torch.cat([before + SHARE * r, torch.tensor([[size]], dtype=torch.float64)])
    moved = [
        a - b for a, b in zip(mechanism.clip_sum(after), mechanism.clip_sum(before), strict=True)
    ]
    parts = [
        n / 2**30 / z
        for n, z in zip(moved, (mechanism.sum_multiplier, mechanism.count_multiplier), strict=True)
    ]
    return math.hypot(*parts) * mechanism.noise_multiplier


def largest_joint() -> float:
    m = AdaptiveScalarMechanism(clip=7.0, clip_count_noise=2.5, **COMMON)
    return max(joint(m, s, d) for s in (1e9, 6.0, 0.1, -1e9) for d in np.linspace(0.5, 1.5, 101))


def test_sum_and_count_together_move_by_1_over_z():
    """All but 2^-14 of the count's half: there the displaced norm moves by 2^-8 radii, not clips."""
    assert 1 - 2.0**-14 <= largest_joint() <= 1.0


def bits(self, norms: np.ndarray, finite: np.ndarray) -> int:
    return int((np.where(norms[finite] <= self.clip, 1, -1) * 2**30).sum())


def test_the_search_finds_more_where_the_count_leaves_no_room_or_counts_bits(monkeypatch):
    monkeypatch.setattr(adaptive, "COUNT_DISPLACEMENT", 0.0)
    assert largest_joint() > 1.005
    monkeypatch.setattr(adaptive.AdaptiveClipping, "_count_of", bits)
    assert largest_joint() > 1.9  # the count alone moves by 3/2, of 1/2


# ---------------------------------------------------------------- losses of groups

THREE = {"names": ("a", "b", "c"), "shares": (0.5, 0.3, 0.2)}


def largest_move_of_losses() -> float:
    """In L1 norm: one more loss, and one that moves by 2^-9 b, of any groups."""
    groups, found = PerStepGroups(**THREE, loss_bound=3.0), 0.0
    move = SHARE * 1.5 * (1 - ROUNDING)
    sizes = (-1e300, 0.0, 2.0**-40, 1.0, 3.0, 1e300)
    for loss, other, sign in itertools.product(sizes, (0.0, 0.7, 3.0), (-1, 1)):
        for of, place in itertools.product(range(3), repeat=2):
            before = np.array(groups.total(np.array([other]), [place]))
            after = groups.total(np.array([other + sign * move, loss]), [place, of])
            found = max(found, float(np.abs(after - before).sum()) / 2**30)
    return found


def test_losses_of_groups_move_by_one(monkeypatch):
    assert 1 - 1e-7 <= largest_move_of_losses() <= 1.0
    groups = PerStepGroups(**THREE, loss_bound=3.0)
    beyond, at = (groups.total(np.array([loss]), [0]) for loss in (1e6, 3.0))
    assert list(beyond) == list(at)
    monkeypatch.setattr(group_losses, "DISPLACEMENT", 0.0)
    assert largest_move_of_losses() > 1.003


def row_moves() -> list[np.ndarray]:
    """Of the losses of two groups by one more row, of group 0, and one displaced one, of either."""
    signs = itertools.product((-1, 1), repeat=2)
    own, other = np.eye(2)
    return [(a * own + SHARE * b * place) / (1 + SHARE) for a, b in signs for place in (own, other)]


@pytest.mark.parametrize(("period", "steps"), [(4, 4), (4, 10), (1, 3), (2, 5)])
def test_prefix_sums_of_rows_with_displaced_ones_stay_within_their_sensitivity(period, steps):
    """Another displaced row in each step, of any group and sign."""
    sampler = (
        FixedBatchesSampler(num_examples=10 * period, expected_batch_size=10)
        if period > 1
        else FullBatchSampler(num_examples=10, expected_batch_size=10)
    )
    column = np.cumprod([1.0, *(1 - 0.5 / k for k in range(1, steps))])
    strategy = np.array(
        [[column[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)]
    )
    columns = strategy[:, ::period]
    largest = max(
        float(np.linalg.norm(columns @ np.stack(moves)))
        for moves in itertools.product(row_moves(), repeat=columns.shape[1])
    )
    assert largest == pytest.approx(PrefixSumGroups(**THREE).sensitivity(sampler, steps), rel=1e-9)


def test_draws_of_groups_stay_within_their_range_where_a_displaced_row_is_of_another_group():
    """Log-weights that move both ways: the range is that of one unscaled row of one group."""
    groups = VertexGroups(names=("a", "b"), shares=(0.5, 0.5))
    factors = 0.7 * groups.scales(10.0)

    def log_probabilities(sums: np.ndarray) -> np.ndarray:
        scores = factors * (np.array([0.3, -1.2]) + sums)
        return scores - np.log(np.exp(scores).sum())

    ranges = [np.ptp(log_probabilities(m) - log_probabilities(np.zeros(2))) for m in row_moves()]
    assert max(ranges) == pytest.approx(float(factors.max()))
