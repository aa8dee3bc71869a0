"""What a composed sweep costs: one noise multiplier for all its trials, and their epsilon together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_dpzero.experiments.plan import choose_directions
from hf_dpzero.privacy import selection
from hf_dpzero.privacy.plan import PrivacyPlan

CHANGES_EVENT = (
    "changes the privacy event of a run, and all trials of a private selection share one. Fix it, or "
    "sweep with --selection all or --tuning public. Allowed: learning_rate, clip, smoothing, "
    "num_directions, direction, update_rule, momentum, weight_decay, lr_scheduler_type and whatever "
    "else leaves the privacy event of one run alone."
)


@dataclass(frozen=True, kw_only=True)
class SweepBudget:
    """What every trial of a composed sweep runs with, and what its report says."""

    tuning: Any  # the entry of the reports
    noise_multiplier: float
    accountant: str  # of the trials' plans
    delta: float
    epsilon: float  # of everything released together
    epsilon_one_run: float  # of one trial alone


def sweep_budget(settings: Any, task: Any) -> SweepBudget:
    """Plans every point of a composed sweep and calibrates the noise that all share.

    Args:
      settings: the `SweepSettings`.
      task: its training rows are counted; `label_names` make the model's head.

    Returns:
      The budget.

    Raises:
      ValueError: a method that is not private, or runs that no accountant composes.
    """
    training = settings.load(settings.points[0]).training
    delta = training.delta(len(task.splits["train"]))
    sigma = _noise_of_trials(settings, task, delta)
    plans = _plans(settings, task, sigma)
    if settings.secret:
        chosen = _most_directions(plans)
        tuning = selection.selection_entry(chosen, settings.trials, list(settings.grid), delta)
        epsilon = selection.selection_epsilon(chosen, settings.trials, delta)
    else:
        tuning = selection.composition_entry(plans, list(settings.grid))
        epsilon = selection.composed_epsilon(plans, delta)
    return SweepBudget(
        tuning=tuning,
        noise_multiplier=sigma,
        accountant=plans[0].accountant,
        delta=delta,
        epsilon=epsilon,
        epsilon_one_run=max(plan.epsilon(delta) for plan in plans),
    )


def _noise_of_trials(settings: Any, task: Any, delta: float) -> float:
    """The noise multiplier of every trial: the recipe's own, or what its target_epsilon allows."""
    training = settings.load(settings.points[0]).training
    given, target = training.noise_multiplier, training.target_epsilon
    plans = _plans(settings, task, 1.0 if given is None else given)
    if not all(plan.private for plan in plans):
        raise ValueError(
            f"method={training.method!r} is not private, so there is nothing to account: use "
            "--tuning public or --tuning not_accounted."
        )
    if settings.secret:
        _refuse_different_events(settings.points, plans)
    if target is None:
        calibrated = plans[0]
    elif settings.secret:
        goal = {"epsilon": target, "delta": delta}
        calibrated = selection.calibrate_selection(_most_directions(plans), settings.trials, **goal)
    else:
        calibrated = selection.calibrate_composed(plans, epsilon=target, delta=delta)[0]
    mechanism: Any = calibrated.mechanism
    return float(mechanism.noise_multiplier)


def _plans(settings: Any, task: Any, noise_multiplier: float) -> list[PrivacyPlan]:
    """The plans of all points, as their runs will make them from the same settings."""
    plans = []
    for point in settings.points:
        recipe = settings.load(
            point, {"target_epsilon": None, "noise_multiplier": noise_multiplier}
        )
        recipe = choose_directions(recipe, len(task.label_names))
        plans.append(recipe.training.plan(len(task.splits["train"])))
    if settings.secret:
        plans = [dataclasses.replace(plan, accountant="rdp") for plan in plans]
    return plans


def _most_directions(plans: Sequence[PrivacyPlan]) -> PrivacyPlan:
    return max(plans, key=lambda plan: plan.spec.num_directions)


def _refuse_different_events(
    points: Sequence[Mapping[str, Any]], plans: Sequence[PrivacyPlan]
) -> None:
    """Private selection accounts for trials of one event: refuses a grid whose runs differ in it."""
    events = [selection.run_event(plan) for plan in plans]
    if all(event == events[0] for event in events):
        return
    names = set()
    for i, j in itertools.combinations(range(len(points)), 2):
        changed = [name for name in points[i] if points[i][name] != points[j][name]]
        if events[i] != events[j] and len(changed) == 1:
            names.add(changed[0])
    raise ValueError(f"{', '.join(sorted(names)) or 'the grid'} {CHANGES_EVENT}")
