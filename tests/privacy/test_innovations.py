"""What releases hold beyond the noise that earlier ones foretell."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dpzero.privacy.correlated.correlation import Correlation
from hf_dpzero.privacy.correlated.factorization import Innovations

CORRELATIONS = [
    Correlation(kind="toeplitz"),
    Correlation(kind="banded", bands=4),
    Correlation(kind="optimized"),
    Correlation(kind="tree"),
    Correlation(kind="toeplitz", restart=5),
    Correlation(kind="independent"),
]


def rows_of(factorization) -> np.ndarray:
    """C^{-1}, float64 [R, R]: releases whose R numbers are the draws' own weights."""
    inverse = np.zeros((factorization.rounds,) * 2)
    for step in range(factorization.rounds):
        row = factorization.noise_row(step)
        inverse[step, row.draws] = row.weights
    return inverse


def left(factorization, steps, history=32, deviation=1.0) -> tuple[np.ndarray, np.ndarray]:
    innovations = Innovations(factorization, deviation, history)
    inverse = rows_of(factorization)
    found = [innovations.of(step, inverse[step]) for step in steps]
    return np.stack([rest for rest, _ in found]), np.array([variance for _, variance in found])


@pytest.mark.parametrize("correlation", CORRELATIONS, ids=lambda c: f"{c.kind}-{c.restart}")
def test_with_all_of_the_past_nothing_but_the_newest_draw_is_left(correlation):
    """Innovations of C^{-1} Z are its diagonal times Z: here rows of that diagonal matrix."""
    factorization = correlation.factorization(23)
    rest, variance = left(factorization, range(23), deviation=1.5)
    diagonal = np.diag(rows_of(factorization))
    assert np.allclose(rest, np.diag(diagonal), atol=1e-9)
    assert np.allclose(variance, 1.5**2 * diagonal**2)


@pytest.mark.parametrize("correlation", CORRELATIONS, ids=lambda c: f"{c.kind}-{c.restart}")
@pytest.mark.parametrize("steps", [range(23), range(9, 23), [0, 1, 5, 6, 7, 20]])
def test_a_short_past_or_one_with_gaps_leaves_the_variance_that_it_says(correlation, steps):
    """|rest|^2 over the R draws is its variance; and it is orthogonal to the releases used."""
    factorization = correlation.factorization(23)
    rest, variance = left(factorization, steps, history=4)
    assert np.allclose((rest**2).sum(axis=1), variance)
    used = rows_of(factorization)[list(steps)]
    for i in range(1, len(rest)):
        assert np.abs(used[max(0, i - 4) : i] @ rest[i]).max() < 1e-9


def test_a_run_that_begins_again_forgets():
    factorization = Correlation(kind="toeplitz").factorization(9)
    rest, _ = left(factorization, [0, 1, 2, 1, 2])
    fresh, _ = left(factorization, [1, 2])
    assert np.allclose(rest[3:], fresh) and not np.allclose(rest[1], rest[3])
