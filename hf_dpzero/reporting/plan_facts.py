"""The entries of a privacy report that follow from the public plan and the number of steps taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.words import group_words, schedule_words

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan


def noise_name(plan: PrivacyPlan, source: str) -> str:
    """The report's name of the noise: that of d-vectors is rounded to a grid, not exact.

    Args:
      plan: the plan that ran.
      source: the noise source's own name.

    Returns:
      "none" for a run without noise, else `source`, with "_on_grid" for noise on d-vectors, and "_key"
      for noise that is made again from a secret key.
    """
    if not plan.private:
        return "none"
    if plan.correlation is not None:
        return source.replace("_exact", "_key_on_grid")
    return source if plan.mechanism.replayable else source.replace("_exact", "_on_grid")


def plan_facts(plan: PrivacyPlan, delta: float, steps: int) -> dict[str, Any]:
    """The entries of a report that the plan, delta and the number of completed steps determine.

    A reader who holds the public plan (it is in the trajectory's header) can recompute all of it.

    Args:
      plan: the plan that ran.
      delta: at which epsilon is computed.
      steps: completed steps, 0..plan.steps.

    Returns:
      Field names of `PrivacyReport` and their values.
    """
    mechanism, sampler = plan.mechanism, plan.sampler
    return {
        "epsilon": plan.epsilon(delta, at=steps),
        "planned_epsilon": plan.epsilon(delta),
        "delta": delta,
        "accountant": plan.accountant_used,
        "neighboring_relation": plan.relation,
        "sampling": sampler.name,
        "sampling_probability": sampler.sampling_probability,
        "expected_batch_size": sampler.expected_batch_size,
        "num_examples": sampler.num_examples,
        "steps": steps,
        "planned_steps": plan.steps,
        "noise_multiplier": getattr(mechanism, "noise_multiplier", 0.0),
        "clip": getattr(mechanism, "clip", math.inf),
        "num_directions": getattr(mechanism, "num_directions", 1),
        "method": mechanism.name,
        "schedules": schedule_words(plan, delta),
        "groups": group_words(plan),
    }


def parts_of(
    plan: PrivacyPlan, delta: float, steps: int, extends: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The report's `parts`: every run of a chain, what it alone costs, and what is known of it.

    Args:
      plan: of the last run.
      delta: at which epsilon is computed.
      steps: completed steps of the last run.
      extends: entries of the header, one for each plan in `plan.after`.

    Returns:
      One entry a run, oldest first; none where there is only one run.
    """
    if not plan.after:
        return []
    runs = [*plan.after, (replace(plan, after=()), steps)]
    known = [*map(dict, extends), {"folder": "this run"}]
    return [
        {
            "method": part.mechanism.name,
            "noise_multiplier": getattr(part.mechanism, "noise_multiplier", 0.0),
            "steps": done,
            "planned_steps": part.steps,
            "epsilon": part.epsilon(delta, at=done),
            **entry,
        }
        for (part, done), entry in zip(runs, known, strict=True)
    ]
