"""What a plan says of its schedules, its correlated noise and its groups: words and numbers for people.

Public, as the plan is; nothing here is accounted with.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from hf_dpzero.privacy.correlated.correlation import gain_against_independent, sensitivity
from hf_dpzero.privacy.group_losses import (
    BudgetedGroups,
    PerStepGroups,
    PrefixSumGroups,
    VertexGroups,
)
from hf_dpzero.privacy.mechanisms.base import NoisedSum
from hf_dpzero.privacy.plan import PrivacyPlan

LABELS = {"noise": "noise plan", "clip": "clip plan", "correlation": "correlated"}
"""Of `schedule_words` on screens."""

NAMED = 6
"""So many groups are named; of more, their number is said."""

_RELEASES = {
    "balanced": "weighted alike, nothing released",
    "per_step": "noisy losses in every step",
    "prefix_sum": "prefix sums of losses with correlated noise",
    "vertex": "groups drawn from hidden weights",
}


@functools.lru_cache(maxsize=8)  # one calibration, which reports ask for again and again
def gain_against_uniform(plan: PrivacyPlan, delta: float) -> float:
    """Returns the noise term of constant noise over that of the plan's schedule, at the same epsilon.

    The noise term is sum_t q_t C_t^2 sigma_t^2 with the influence q_t that the schedule assumes, or,
    of given levels, that they would be best for. Above 1 the schedule is the better one, if the
    influence is right.

    Args:
      plan: private, with a noise schedule; earlier runs are left out.
      delta: in (0, 1).

    Returns:
      A number > 0; 1.0 for a plan without a schedule.
    """
    if plan.noise_schedule is None:
        return 1.0
    alone = replace(plan, after=())
    uniform = replace(alone, noise_schedule=None)
    constant = uniform.calibrate(epsilon=alone.epsilon(delta), delta=delta).mechanism
    influence = np.exp(plan.log_influence - plan.log_influence.max())
    scheduled = float(influence @ plan.multipliers**2)
    return constant.noise_multiplier**2 * float(influence.sum()) / scheduled


def schedule_words(plan: PrivacyPlan, delta: float | None = None) -> dict[str, str]:
    """Returns the plan's schedules in a few words each, by "noise", "clip" and "correlation".

    Args:
      plan: any; one without schedules has no words.
      delta: adds what a private plan's noise schedule gains at it; None leaves that out.
    """
    words = {}
    if plan.noise_schedule is not None:
        first, last, sizes = plan.multipliers[0], plan.multipliers[-1], plan.multipliers
        words["noise"] = (
            f"{plan.noise_schedule}: multiplier {first:.4g} at first, {last:.4g} at last, "
            f"{sizes.min():.4g} to {sizes.max():.4g}"
        )
        if delta is not None and plan.private:
            gain = gain_against_uniform(plan, delta)
            words["noise"] += f"; gain against constant noise {gain:.3g}"
    if plan.clip_schedule is not None:
        factors = plan.clip_schedule.factors(plan.steps)
        words["clip"] = (
            f"{plan.clip_schedule}: times {factors[0]:.4g} at first, {factors[-1]:.4g} at last"
        )
    if plan.correlation is not None:
        gain, clips = gain_against_independent(plan), sensitivity(plan)
        words["correlation"] = (
            f"{plan.correlation.words()}; sensitivity {clips:.4g} C; noise variance of sums over steps "
            f"{1 / gain:.3g} of what independent noise gives"
        )
    return words


def schedule_curves(plan: PrivacyPlan) -> dict[str, list[float]]:
    """Returns noise multiplier and clip of each step, for plots; those alone that are scheduled."""
    curves = {}
    if plan.noise_schedule is not None:
        curves["noise multiplier"] = plan.multipliers.tolist()
    if plan.clip_schedule is not None and isinstance(plan.mechanism, NoisedSum):
        factors = plan.clip_schedule.factors(plan.steps)
        curves["clip"] = (plan.mechanism.clip * factors).tolist()
    return curves


def group_words(plan: PrivacyPlan) -> str:
    """Returns what is released of groups, and at what price; "" for a plan without groups."""
    groups = plan.groups
    if groups is None:
        return ""
    named = zip(groups.names, groups.shares, strict=True)
    listed = ", ".join(f"{name} {share:.4g}" for name, share in named)
    who = f"{groups.num_groups} groups" + (f" ({listed})" if groups.num_groups <= NAMED else "")
    words = f"{groups.name}, {_RELEASES[groups.name]}: {who}"
    if not isinstance(groups, BudgetedGroups):
        return words
    words += f", losses to {groups.loss_bound:g}, {100 * groups.budget:.3g} % of the budget"
    weights = plan.mechanism.effective_noise_multiplier
    if not plan.private:
        return words
    if isinstance(groups, PerStepGroups):
        return f"{words}, noise multiplier {groups.multiplier(weights):.4g}"
    if isinstance(groups, PrefixSumGroups):
        multiplier = groups.multiplier(weights, plan.sampler.passes(plan.steps))
        return f"{words}, noise multiplier {multiplier:.4g} for the whole run"
    assert isinstance(groups, VertexGroups)
    rate = groups.paid_rate(plan.spec, weights, plan.sampler, plan.steps)
    return f"{words}, {groups.draws} drawn in a step at rate {rate:.4g}"


def group_warning(plan: PrivacyPlan) -> str:
    """Returns what to say of groups that are too small for the noise on their losses; "" if none is.

    A `per_step` run knows group i's mean loss, over all T steps, with noise of standard deviation
    z_g b / (2 B pi_i sqrt T). Where that exceeds b / 2, half the range of losses, y follows the noise:
    the softmax then gives most of its weight to some of the small groups, whatever their losses.
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
        "take a larger expected_batch_size or group_robust.budget, or group_robust.weights='balanced'."
    )
