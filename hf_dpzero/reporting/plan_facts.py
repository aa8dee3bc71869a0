"""Numbers that follow from the public plan alone: entries of a report, and a meter of what is spent."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.words import group_words, schedule_words
from hf_dpzero.values import encode

if TYPE_CHECKING:
    from hf_dpzero.privacy.plan import PrivacyPlan


def noise_name(plan: PrivacyPlan, source: str) -> str:
    """Names the noise of a run: "none" without any, else the source's own name.

    Noise on d-vectors is rounded to a grid, not exact ("_on_grid"); correlated noise is made again from
    a secret key ("_key").
    """
    if not plan.private:
        return "none"
    if plan.correlation is not None:
        return source.replace("_exact", "_key_on_grid")
    return source if plan.mechanism.replayable else source.replace("_exact", "_on_grid")


def plan_facts(plan: PrivacyPlan, delta: float, steps: int) -> dict[str, Any]:
    """Computes the entries of a report that follow from the public plan, delta and completed steps.

    A reader who holds the plan (it is in the trajectory's header) can recompute all of it.

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
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_distribution": mechanism.distribution,
        "clip": mechanism.clip,
        # first-order methods have one "direction", the gradient itself
        "num_directions": getattr(mechanism, "num_directions", 1),
        "method": mechanism.name,
        "schedules": schedule_words(plan, delta),
        "groups": group_words(plan),
    }


def other_terms(plan: PrivacyPlan, delta: float, steps: int, rows: bool) -> dict[str, Any]:
    """Says what completed steps of a private plan cost at other deltas, relations and numbers of rows.

    Returns:
      `other_terms` of a report; `rows`: with those of several rows of a person.
    """
    curve = {}
    for text in (f"1e-{digits}" for digits in range(3, 13)):
        with contextlib.suppress(ValueError):  # below what so many steps allow
            curve[text] = plan.epsilon(float(text), at=steps)
    if not delta:
        curve["0"] = plan.epsilon(0.0, at=steps)
    terms = {
        "mu": plan.mu(steps),
        "epsilon_at_delta": curve,
        "epsilon_by_relation": plan.epsilon_by_relation(delta, steps),
        "epsilon_of_rows": _of_rows(plan, delta, steps, curve) if rows else {},
    }
    return dict(encode(terms))


def _of_rows(
    plan: PrivacyPlan, delta: float, steps: int, curve: Mapping[str, float]
) -> dict[str, float | str]:
    """Epsilon of several rows together, where need be from that of one at other deltas."""
    numbers = [m for m in (2, 10, 100) if m <= plan.sampler.num_examples]
    # mixtures of many kinds of steps, or of large losses, take minutes; groups' losses are no such sums
    few = plan.groups is None and len(plan.own_parts(steps)) <= 4
    few = few and plan.epsilon(delta, at=steps) <= 20
    if few or plan.mu(steps) is not None:
        with contextlib.suppress(ValueError):  # another sampler, noise or relation
            found = {str(m): plan.epsilon_of_group(delta, m, steps) for m in numbers}
            return {**found, "by": "accountant"}
    by: dict[str, float | str] = {"by": "group privacy"}
    for m in numbers:  # m epsilon, and less than m e^((m - 1) epsilon) times one row's delta
        some = (m * e for d, e in curve.items() if float(d) * m <= delta * math.exp((1 - m) * e))
        by[str(m)] = min(some, default=math.inf)
    return by


def parts_of(
    plan: PrivacyPlan, delta: float, steps: int, extends: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Lists every run of a chain for the report's `parts`, oldest first; [] where there is only one.

    Args:
      plan: of the last run.
      delta: at which epsilon is computed.
      steps: completed steps of the last run.
      extends: entries of the header, one for each plan in `plan.after`.
    """
    if not plan.after:
        return []
    runs = [*plan.after, (replace(plan, after=()), steps)]
    known = [*map(dict, extends), {"folder": "this run"}]
    return [
        {
            **entry,  # of the log: it may add to what follows from the plan, and change nothing of it
            "method": part.mechanism.name,
            "noise_multiplier": part.mechanism.noise_multiplier,
            "steps": done,
            "planned_steps": part.steps,
            "epsilon": part.epsilon(delta, at=done),
        }
        for (part, done), entry in zip(runs, known, strict=True)
    ]


class BudgetMeter:
    """A cheap upper bound on the epsilon spent so far, for progress bars and logs.

    `plan.epsilon` is called on a grid of at most `points` steps, and every answer is that of the next
    grid point: never too small, exact on the grid and at the last step.
    """

    def __init__(self, plan: PrivacyPlan, delta: float, points: int = 20) -> None:
        if points < 1:
            raise ValueError(f"points={points} must be at least 1.")
        self._steps = plan.steps
        self._points = min(points, max(plan.steps, 1))
        self._epsilon_at = functools.cache(lambda step: plan.epsilon(delta, at=step))

    def at(self, step: int) -> float:
        """Bounds `plan.epsilon(delta, at=step)` from above, for 0 <= step <= plan.steps.

        Raises:
          ValueError: `step` is not within the plan, whose budget says nothing about it.
        """
        steps = self._steps
        if not 0 <= step <= steps:
            raise ValueError(f"step={step} is outside 0..{steps}, the steps of the plan.")
        if step == 0:
            return 0.0
        index = -(-step * self._points // steps)  # the first grid point at or after `step`
        return self._epsilon_at(-(-index * steps // self._points))
