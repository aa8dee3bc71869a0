"""Several examples of one person together: bounds against exact curves."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats
from step_specs import FIXED, FULL, spec

from hf_dpzero.cli.main import main
from hf_dpzero.privacy.accounting import epsilon_after, epsilon_of_group

DELTA = 1e-5


def test_one_example_is_what_the_plan_says():
    step = spec(noise_multiplier=2.0)
    one, known = epsilon_of_group(((step, 200),), DELTA, 1), epsilon_after(step, 200, DELTA)
    assert known * (1 - 1e-3) < one < 1.03 * known


@pytest.mark.parametrize("m", [2, 10])
def test_in_a_full_batch_they_are_one_example_of_so_many_bounds(m):
    step = spec(sampling="full_batch", noise_multiplier=20.0)
    exact = epsilon_after(spec(sampling="full_batch", noise_multiplier=20.0 / m), 4, DELTA)
    assert exact <= epsilon_of_group(((step, 4),), DELTA, m) < 1.05 * exact


def test_poisson_batches_of_all_rows_are_full_batches():
    """The library's mixture of one Gaussian fails at some multipliers, others on other machines."""
    for quarters in range(12, 37):
        sampled = spec(sigma=quarters / 4, batch=1000.0)
        for m in (2, 3, 10):
            exact = epsilon_after(spec(quarters / 4 / m, **FULL), 1, DELTA)
            assert exact <= epsilon_of_group(((sampled, 1),), DELTA, m) < 1.01 * exact


def test_full_batches_after_sampled_ones_add_up():
    full, sampled = (spec(8.0, **FULL), 2), (spec(8.0), 5)
    alone = [epsilon_of_group((part,), DELTA, 4) for part in (full, sampled)]
    assert max(alone) < epsilon_of_group((full, sampled), DELTA, 4) < sum(alone)


def test_one_sampled_step_is_the_mixture_of_gaussians():
    """delta(epsilon) of (1 - q)^2 N(0) + 2 q (1 - q) N(1) + q^2 N(2) against N(0), by integration."""
    step = spec(noise_multiplier=0.8)
    q, sigma, x = step.probability, 0.8, np.linspace(-12, 16, 2_000_001)
    chances = [(1 - q) ** 2, 2 * q * (1 - q), q**2]
    p = sum(c * stats.norm.pdf(x, k, sigma) for k, c in enumerate(chances))
    r = stats.norm.pdf(x, 0, sigma)
    epsilon = epsilon_of_group(((step, 1),), DELTA, 2)

    def delta(e: float) -> float:
        both = [np.trapezoid(np.maximum(a - math.exp(e) * b, 0), x) for a, b in ((p, r), (r, p))]
        return float(max(both))

    assert delta(epsilon) <= DELTA < delta(0.97 * epsilon - 4e-3)


def test_so_little_noise_that_its_losses_fill_the_memory_is_refused():
    """2 rows at sigma = 0.02: losses up to (2 / 0.02)^2 / 2, 2.5 million points of a grid of 0.002."""
    with pytest.raises(ValueError, match="of at least a 2000th"):
        epsilon_of_group(((spec(noise_multiplier=0.02), 3),), DELTA, 2)


@pytest.mark.parametrize(
    "changes", [{"relation": "replace_one"}, {"distribution": "laplace"}, FIXED], ids=str
)
def test_other_combinations_have_no_bound(changes):
    with pytest.raises(ValueError, match="no bound for several examples"):
        epsilon_of_group(((spec(**changes), 3),), DELTA, 2)


def test_the_plan_says_it(capsys):
    settings = "--num_examples 1000 --max_steps 20 --expected_batch_size 50 --target_epsilon 1"
    main(["plan", *settings.split(), "--rows_of_one", "1,2", "--json"])
    found = json.loads(capsys.readouterr().out)["epsilon_of_rows"]
    assert 0.99 < found["1"] < 1.05 < 1.8 < found["2"] < 4
    assert main(["plan", *settings.split(), "--rows_of_one", "2", "--unit_column", "who"])
    assert "only where each row is a unit" in capsys.readouterr().err
