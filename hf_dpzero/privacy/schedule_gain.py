"""What a noise schedule is worth: how much less noise reaches the result than under constant noise."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from hf_dpzero.privacy.plan import PrivacyPlan


@functools.lru_cache(maxsize=8)  # one calibration, which reports ask for again and again
def gain_against_uniform(plan: PrivacyPlan, delta: float) -> float:
    """Noise term of constant noise over that of the plan's schedule, at the same epsilon and delta.

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
    uniform: Any = replace(alone, noise_schedule=None)
    constant = uniform.calibrate(epsilon=alone.epsilon(delta), delta=delta).mechanism
    influence = np.exp(plan.log_influence - plan.log_influence.max())
    scheduled = float(influence @ plan.multipliers**2)
    return float(constant.noise_multiplier) ** 2 * float(influence.sum()) / scheduled


def schedule_words(plan: PrivacyPlan, delta: float | None = None) -> dict[str, str]:
    """The plan's schedules in a few words each, for reports and screens; none where none is set.

    Args:
      plan: any.
      delta: adds what a private plan's noise schedule gains at it; None leaves that out.

    Returns:
      Words by "noise" and "clip".
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
    return words


def schedule_curves(plan: PrivacyPlan) -> dict[str, list[float]]:
    """Noise multiplier and clip of each step, for plots: T numbers by name; none where none is set."""
    curves = {}
    if plan.noise_schedule is not None:
        curves["noise multiplier"] = plan.multipliers.tolist()
    if plan.clip_schedule is not None:
        mechanism: Any = plan.mechanism
        factors = plan.clip_schedule.factors(plan.steps)
        curves["clip"] = (mechanism.clip * factors).tolist()
    return curves
