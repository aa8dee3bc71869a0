"""A search for settings keeps to its target where each step also releases the groups' losses."""

from __future__ import annotations

import pytest

from hf_dpzero.privacy.group_losses import PerStepGroups
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.privacy.selection import TrialCount, calibrate_selection, selection_epsilon


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_special"])
def test_private_selection_gives_noisy_losses_their_share(relation):
    """Noise that pays for the weights' part alone would be sqrt(1 - 0.3) too small."""
    plan = PrivacyPlan(
        sampler=PoissonSampler(num_examples=100, expected_batch_size=10),
        mechanism=ScalarMechanism(clip=1.0, noise_multiplier=1.0, expected_batch_size=10),
        steps=20,
        groups=PerStepGroups(names=("a", "b"), shares=(0.3, 0.7), budget=0.3),
        relation=relation,
    )
    trials = TrialCount(mean=10)
    found = calibrate_selection(plan, trials, epsilon=6.0, delta=1e-5)
    assert 5.9 < selection_epsilon(found, trials, 1e-5) <= 6.0
