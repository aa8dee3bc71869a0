"""Group-robust training in words, for reports and screens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_dpzero.privacy.group_losses.base import BudgetedGroups, passes
from hf_dpzero.privacy.group_losses.per_step import PerStepGroups
from hf_dpzero.privacy.group_losses.prefix_sum import PrefixSumGroups
from hf_dpzero.privacy.group_losses.vertex import VertexGroups

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan

NAMED = 6
"""So many groups are named; of more, their number is said."""

_KINDS = {
    "balanced": "weighted alike, nothing released",
    "per_step": "noisy losses in every step",
    "prefix_sum": "prefix sums of losses with correlated noise",
    "vertex": "groups drawn from hidden weights",
}


def group_words(plan: PrivacyPlan) -> str:
    """What is released of groups, and at what price; "" for a plan without groups."""
    groups = plan.groups
    if groups is None:
        return ""
    named = zip(groups.names, groups.shares, strict=True)
    listed = ", ".join(f"{name} {share:.4g}" for name, share in named)
    who = f"{groups.num_groups} groups" + (f" ({listed})" if groups.num_groups <= NAMED else "")
    words = f"{groups.name}, {_KINDS[groups.name]}: {who}"
    if not isinstance(groups, BudgetedGroups):
        return words
    words += f", losses to {groups.loss_bound:g}, {100 * groups.budget:.3g} % of the budget"
    weights = plan.mechanism.effective_noise_multiplier
    if not plan.private:
        return words
    if isinstance(groups, PerStepGroups):
        return f"{words}, noise multiplier {groups.multiplier(weights):.4g}"
    often = passes(plan.sampler, plan.steps)
    if isinstance(groups, PrefixSumGroups):
        return (
            f"{words}, noise multiplier {groups.multiplier(weights, often):.4g} for the whole run"
        )
    assert isinstance(groups, VertexGroups)
    rate = groups.paid_rate(plan.spec, weights, plan.sampler, plan.steps)
    return f"{words}, {groups.draws} drawn in a step at rate {rate:.4g}"


def group_warning(plan: PrivacyPlan) -> str:
    """What to say of groups that are too small for the noise on their losses; "" if none is.

    A `per_step` run knows group i's mean loss, over all T steps, with noise of standard deviation
    z_g b / (2 B pi_i sqrt T). Where that exceeds b / 2, half the range of losses, y follows the noise:
    the softmax then gives most of its weight to some of the small groups, whatever their losses.
    Public: a function of the settings alone.
    """
    groups = plan.groups
    if not isinstance(groups, PerStepGroups) or not plan.private:
        return ""
    multiplier = groups.multiplier(plan.mechanism.effective_noise_multiplier)
    deviations = groups.scales(plan.sampler.expected_batch_size) * multiplier / plan.steps**0.5
    small = int((deviations > groups.loss_bound / 2).sum())
    if not small:
        return ""
    return (
        f"the noise on the mean loss of {small} of {groups.num_groups} groups is as large as the losses "
        f"(standard deviation {deviations.max():.3g} over all {plan.steps} steps for the smallest one, "
        f"losses in [0, {groups.loss_bound:g}]): their weights follow the noise. Join small groups, or "
        "take a larger expected_batch_size or group_budget, or group_weights='balanced'."
    )
