"""Factorisations of prefix sums: rows of noise, exact column norms, published errors, participation."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest

from hf_dpzero.privacy.correlated.correlation import Correlation
from hf_dpzero.privacy.correlated.factorization import (
    Dense,
    Innovations,
    Restarted,
    banded,
    epoch_sensitivity,
    independent,
    optimized,
    toeplitz,
    tree,
    tree_least_squares,
)

KINDS = {
    "independent": independent,
    "tree": tree,
    "tree_least_squares": tree_least_squares,
    "optimized": optimized,
    "toeplitz": toeplitz,
    "banded": lambda rounds: banded(rounds, 4),
    "restarted": lambda rounds: Restarted(toeplitz(5), rounds),
}


def matrices(factorization) -> tuple[np.ndarray, np.ndarray]:
    """(C^{-1} from the rows of noise, C)."""
    inverse = np.zeros((factorization.rounds, factorization.rounds))
    for step in range(factorization.rounds):
        row = factorization.noise_row(step)
        assert row.draws[-1] == step and (np.diff(row.draws) > 0).all()
        inverse[step, row.draws] = row.weights
    return inverse, np.linalg.inv(inverse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [1, 2, 5, 12, 16, 23])
def test_what_a_factorization_says_is_what_its_rows_of_noise_are(kind, rounds):
    factorization = KINDS[kind](rounds)
    inverse, c = matrices(factorization)
    every = np.arange(rounds)
    tail = rounds % 5 if kind == "restarted" else 0  # norms of a block cut short are upper bounds
    exact = every[: rounds - tail]
    norms = (c**2).sum(axis=0)
    assert np.allclose(factorization.squared_column_norms[exact], norms[exact], rtol=1e-12)
    assert (factorization.squared_column_norms >= norms * (1 - 1e-12)).all()
    b = np.tril(np.ones((rounds, rounds))) @ inverse
    assert np.allclose(factorization.prefix_variances, (b**2).sum(axis=1), rtol=1e-9)
    if not tail:
        assert np.allclose(factorization.gram(every), c.T @ c, atol=1e-10)
    some = every[:: max(1, rounds // 4)]
    for count in {1, rounds // 2 + 1, rounds}:
        part = some[some < count]
        assert np.allclose(
            factorization.gram(part, count), c[:count, part].T @ c[:count, part], atol=1e-10
        )
        norm = (c[:count, :count] ** 2).sum(axis=0).max()
        assert factorization.largest_squared_norm(count) == pytest.approx(norm, rel=1e-12)


GOLDEN = {  # max column norm squared times ||B||_F^2 / R
    4: (2.5, 3.75, 1.929, 1.719, 1.908),
    16: (8.5, 10.31, 3.757, 2.854, 3.229),
    64: (32.5, 21.11, 6.339, 4.409, 4.971),
    256: (128.5, 36.04, 9.624, 6.373, 7.122),
}


@pytest.mark.parametrize("rounds", GOLDEN)
def test_prefix_errors_known_from_the_literature(rounds):
    kinds = (independent, tree, tree_least_squares, optimized, toeplitz)
    found = [kind(rounds).prefix_error for kind in kinds]
    assert found == pytest.approx(GOLDEN[rounds], rel=6e-4)


def test_a_tree_of_a_thousand_rounds_saves_the_level_that_no_prefix_uses():
    """The usual account pads to 1,024 rounds, whose root no prefix of 1,000 uses: 11 levels for 10."""
    assert tree(1000).sensitivity == pytest.approx(math.sqrt(10))
    assert tree(1000).prefix_error * 11 / 10 == pytest.approx(54.32, rel=1e-3)
    assert toeplitz(1000).prefix_error == pytest.approx(9.624, rel=1e-3)
    assert independent(1000).prefix_error == 500.5


def test_the_published_bound_of_the_column_norm_is_below_the_norm():
    for rounds in (2, 10, 100, 1000, 10_000):
        assert toeplitz(rounds).squared_column_norms[0] > 1 + math.log(4 * rounds / 5) / math.pi


def test_the_optimum_is_an_optimum():
    """No small change of C's Gram matrix with columns of norm 1 has a smaller error."""
    best, generator = optimized(8), np.random.Generator(np.random.Philox(3))
    assert best.squared_column_norms == pytest.approx(1.0, abs=1e-5)
    for _ in range(20):
        nudged = best.strategy + np.tril(generator.normal(size=(8, 8))) * 1e-2
        nudged = Dense(nudged / np.linalg.norm(nudged, axis=0), "nudged")
        assert nudged.prefix_error > best.prefix_error * (1 - 1e-6)


def test_bands():
    assert np.array_equal(banded(10, 1).noise_row(7).weights, [1.0])
    assert banded(10, 99).prefix_error == pytest.approx(toeplitz(10).prefix_error)
    assert banded(10, 3).noise_row(9).draws.tolist() == [7, 8, 9]
    assert banded(300, 32).sensitivity != pytest.approx(toeplitz(300).sensitivity, rel=1e-3)


def test_long_runs_hold_no_matrix_of_rounds_by_rounds():
    tracemalloc.start()
    for factorization in (toeplitz(100_000), tree(100_000)):
        factorization.noise_row(99_999)
        assert factorization.sensitivity < 5
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000 * 8 * 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rounds", "per_epoch"), [(7, 3), (8, 4), (6, 1), (5, 9), (1, 1)])
def test_participation_is_the_worst_pattern(kind, rounds, per_epoch):
    """Largest ||sum_i +-c_i|| over places and signs; attained where no inner product is negative."""
    factorization = KINDS[kind](rounds)
    _, c = matrices(factorization)
    worst = 0.0
    for place in range(min(per_epoch, rounds)):
        pattern = list(range(place, rounds, per_epoch))
        for signs in itertools.product((1, -1), repeat=len(pattern)):
            worst = max(worst, np.linalg.norm(c[:, pattern] @ np.array(signs)))
    claimed = epoch_sensitivity(factorization, per_epoch)
    assert claimed >= worst
    if (np.linalg.inv(matrices(factorization)[0]).T @ c >= -1e-12).all() and kind != "restarted":
        assert claimed == pytest.approx(worst, rel=1e-8)


def test_sensitivity_of_a_part_of_the_rounds():
    factorization = toeplitz(12)
    _, c = matrices(factorization)
    assert epoch_sensitivity(factorization, 12, 1) == pytest.approx(1.0)
    assert epoch_sensitivity(factorization, 12, 0) == 0.0
    assert epoch_sensitivity(factorization, 4, 6) == pytest.approx(
        np.linalg.norm(c[:6, 0] + c[:6, 4])
    )
    assert epoch_sensitivity(factorization, 4, 6) < epoch_sensitivity(factorization, 4)


# ---------------------------------------------------------------- innovations

CORRELATIONS = [
    Correlation(kind="toeplitz"),
    Correlation(kind="banded", bands=4),
    Correlation(kind="optimized"),
    Correlation(kind="tree"),
    Correlation(kind="toeplitz", restart=5),
    Correlation(kind="independent"),
]


def left(factorization, steps, history=32, deviation=1.0) -> tuple[np.ndarray, np.ndarray]:
    innovations = Innovations(factorization, deviation, history)
    inverse = matrices(factorization)[0]
    found = [innovations.of(step, inverse[step]) for step in steps]
    return np.stack([rest for rest, _ in found]), np.array([variance for _, variance in found])


@pytest.mark.parametrize("correlation", CORRELATIONS, ids=lambda c: f"{c.kind}-{c.restart}")
def test_with_all_of_the_past_nothing_but_the_newest_draw_is_left(correlation):
    """Innovations of C^{-1} Z are its diagonal times Z: here rows of that diagonal matrix."""
    factorization = correlation.factorization(23)
    rest, variance = left(factorization, range(23), deviation=1.5)
    diagonal = np.diag(matrices(factorization)[0])
    assert np.allclose(rest, np.diag(diagonal), atol=1e-9)
    assert np.allclose(variance, 1.5**2 * diagonal**2)


@pytest.mark.parametrize("correlation", CORRELATIONS, ids=lambda c: f"{c.kind}-{c.restart}")
@pytest.mark.parametrize("steps", [range(23), range(9, 23), [0, 1, 5, 6, 7, 20]])
def test_a_short_past_or_one_with_gaps_leaves_the_variance_that_it_says(correlation, steps):
    """|rest|^2 over the R draws is its variance; and it is orthogonal to the releases used."""
    factorization = correlation.factorization(23)
    rest, variance = left(factorization, steps, history=4)
    assert np.allclose((rest**2).sum(axis=1), variance)
    used = matrices(factorization)[0][list(steps)]
    for i in range(1, len(rest)):
        assert np.abs(used[max(0, i - 4) : i] @ rest[i]).max() < 1e-9


def test_a_run_that_begins_again_forgets():
    factorization = Correlation(kind="toeplitz").factorization(9)
    rest, _ = left(factorization, [0, 1, 2, 1, 2])
    fresh, _ = left(factorization, [1, 2])
    assert np.allclose(rest[3:], fresh) and not np.allclose(rest[1], rest[3])
