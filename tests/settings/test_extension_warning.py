"""What a run says before it starts of the budget that the runs it extends have left."""

from __future__ import annotations

import dataclasses

import pytest

from hf_dpzero import PrivacyPlan
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.settings.plan_of import extension_warning


@pytest.mark.parametrize(
    ("share", "warned"), [(1.0, True), (1.005, True), (1.02, False), (1.5, False)]
)
def test_a_total_that_earlier_runs_spent_is_told(share: float, warned: bool) -> None:
    """The first run's target given again leaves less than a hundredth of it: noise alone."""
    sampler = PoissonSampler(num_examples=1000, expected_batch_size=50.0)
    mechanism = ScalarMechanism(clip=1.0, noise_multiplier=1.0, expected_batch_size=50.0)
    first = PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=20)
    first = first.calibrate(epsilon=2.0, delta=1e-4)
    second = dataclasses.replace(first, steps=5, after=((first, 20),))
    target = 2.0 * share
    if share > 1:
        second = second.calibrate(epsilon=target, delta=1e-4)
    said = extension_warning(second, target, 1e-4)
    if warned:
        spent = f"{first.epsilon(1e-4):.5g}"
        assert f"target_epsilon={target:g} is the total" in said and f"spent {spent} of it" in said
    else:
        assert said == ""
    assert extension_warning(second, None, 1e-4) == ""  # the noise was given
    assert extension_warning(first, 1e-9, 1e-4) == ""  # extends none
