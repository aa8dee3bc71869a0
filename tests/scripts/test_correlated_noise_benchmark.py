"""The benchmark of correlated noise: what it measures is what the factorisations say."""

from __future__ import annotations

import pytest

from hf_dpzero.privacy.correlated.factorization import Restarted, independent, toeplitz
from scripts.benchmarks.correlated_noise import accumulated, direction_energies, step_times


def test_times_of_a_step():
    found = step_times(dimension=2000, bands=4, repeats=3)
    assert found["independent"] > 0 and found["ratio"] > 0
    assert found["cache_bytes"] == 8 * 2000 * 3


def test_correlated_noise_does_harm_along_fresh_directions_only():
    """Orthogonal directions add energies up, S^2 |row|^2 > 1 a step; fixed ones cancel."""
    found = direction_energies(steps=64, dimension=200, held=16, seeds=40)
    whole = toeplitz(64)
    rows = [
        float(whole.noise_row(step).weights @ whole.noise_row(step).weights) for step in range(64)
    ]
    fresh = whole.sensitivity**2 * sum(row * (64 - t) for t, row in enumerate(rows)) / 64
    expected = {
        "fresh": fresh,
        "fixed": whole.prefix_error,
        "held for 16": Restarted(toeplitz(16), 64).prefix_error,
        "fresh, independent": independent(64).prefix_error,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=0.2), name
    assert found["fresh"] > 2.5 * found["fresh, independent"]
    assert found["held for 16"] < 0.5 * found["fresh, independent"]


@pytest.mark.slow
def test_toeplitz_noise_of_a_run_accumulates_to_a_tenth_of_independent_noise():
    correlated, plain = (accumulated(kind, 256, 100) for kind in ("toeplitz", "none"))
    assert correlated < plain / 10
    assert correlated == pytest.approx(toeplitz(256).prefix_error, rel=0.25)
