"""Attack: a delta so small that the PLD accountant's floating-point error hides part of epsilon."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

from hf_dpzero.privacy import accounting
from hf_dpzero.privacy.accounting import epsilon_after
from hf_dpzero.privacy.events import StepSpec
from hf_dpzero.reporting.wording import delta_words


@pytest.mark.parametrize(
    ("steps", "delta", "q"),
    [(300_000, 1e-11, 0.01), (1_000_000, 3e-12, 0.01), (100_000, 1e-12, 0.5)],
)
def test_answers_below_the_numerical_error_are_refused(steps: int, delta: float, q: float):
    """The library said 3.574 for 3.612, 3.156 for 3.369, and 1.1 % too little."""
    spec = StepSpec(
        sampling="poisson", num_examples=1000, batch_size=1000 * q, noise_multiplier=20.0
    )
    with pytest.raises(
        ValueError, match="floating-point error.*accountant='rdp', delta of at least"
    ):
        epsilon_after(spec, steps, delta)


@pytest.mark.parametrize("steps", [1000, 100_000])
def test_the_smallest_accepted_delta_is_not_understated(steps: int):
    """Full batches through the PLD accountant, against the exact Gaussian."""
    delta = 4.01 * (steps * 2.0**-53 + 1e-15)
    sigma = 2.0 * math.sqrt(steps)
    spec = StepSpec(sampling="full_batch", num_examples=10, batch_size=10.0, noise_multiplier=sigma)
    exact = get_epsilon_gaussian(sigma / math.sqrt(steps), delta)
    found = accounting._pld([(spec, steps)], delta)
    assert exact <= found <= 1.02 * exact


def test_what_arithmetic_may_hide_is_taken_off_delta():
    """T convolutions may lose T 2^-53 of the mass; epsilon is that at the delta which is left."""
    steps, delta = 100_000, 5e-11
    spec = StepSpec(sampling="poisson", num_examples=1000, batch_size=1.0, noise_multiplier=2.0)
    left = delta - (steps * 2.0**-53 + 1e-15)
    assert left < 0.8 * delta
    parts = [(spec, steps)]
    at = {d: accounting._pld_on_fitted_grid(parts, d, smaller=False) for d in (delta, left)}
    assert at[delta] < accounting._pld(parts, delta) == at[left]


@pytest.mark.parametrize("delta", [1e-5, 0.1 / 67349, 0.1 / 3, 1.0000004e-6, 9.9999999e-8, 0.0])
def test_delta_in_words_is_never_below_delta(delta):
    said = Fraction(delta_words(delta))
    assert said >= Fraction(repr(delta))
    assert said <= Fraction(repr(delta)) * (1 + Fraction(1, 10**5))
