"""What choosing settings on private data costs, and the noise that pays for it.

Private selection (Papernot and Steinke 2022, "Hyperparameter tuning with Renyi differential
privacy", arXiv:2110.03620). Let Q be one trial: draw settings uniformly from a public grid, train
privately, score the result on public data. Run Q a random number K of times and release the best
result alone, K and the other results staying secret. For K from the truncated negative binomial
distribution TNB(eta, gamma) (their Definition 1) and a run that is (lambda, eps(lambda))-RDP at every
order, the release is, at order lambda and for every lambda' >= 1 (Theorem 2),

    eps(lambda) + (1 + eta) (1 - 1/lambda') eps(lambda') + (1 + eta) log(1/gamma) / lambda'
    + log(E K) / (lambda - 1),

and for K ~ Poisson(mu) (Theorem 6) eps(lambda) + mu delta' + log(mu) / (lambda - 1), where one run
is (eps', delta')-DP with e^eps' <= 1 + 1/(lambda - 1). `dp_accounting` evaluates both as
`RepeatAndSelectDpEvent`; the tests check it against these lines.

Q is a mixture over settings that names its component, so its RDP curve is the largest of the
settings' curves; here all settings must share one event, so that no trial is noisier than it needs.
Ties in the score go to the earlier trial: trials are exchangeable, so this is the uniform
tie-breaker that the theorems allow.

*Noise on a grid.* The theorems need RDP of what really runs, which adds discrete noise. Beside the
continuous run its likelihood is within e^h everywhere that matters (`discretization.py`), so its Renyi
divergence of order a is larger by at most (2 a - 1) / (a - 1) h, which is 12 h at the smallest order
in use, 1.1, and less at larger ones: a `ZCDpEvent` with xi = 12 h.

Noised d-vectors on their grid are close to ideal ones over the whole search: its trials, at most
`TrialCount.most` of them, are one composition of draws (`discretization.py`, on vectors).

*Plain composition.* The grid is run once, in full, and everything may be released: the runs'
events compose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.accounting import rdp_accountant, smallest_argument
from hf_dpzero.privacy.composition import Part
from hf_dpzero.privacy.discretization import DENSE_DELTA, dense_slack, discretisation_slack
from hf_dpzero.privacy.events import Accountant, library_relation, step_event
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.trial_count import TrialCount

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_SMALLEST_ORDER = 1.1


# ------------------------------------------------------------------ private selection


def run_event(plan: PrivacyPlan) -> DpEvent:
    """One whole run in the RDP accountant's convention, as the one Gaussian that a step amounts to.

    Raises:
      ValueError: the RDP accountant has no sound event for sampler, noise and relation; the message
        says what to use instead.
    """
    return _run_event(_parts([plan], "rdp"))


def _parts(plans: Sequence[PrivacyPlan], accountant: Accountant) -> tuple[Part, ...]:
    """All steps of all plans, by kind, for one accountant."""
    return tuple(
        part for plan in plans for part in replace(plan, accountant=accountant).own_parts()
    )


def _run_event(parts: Sequence[Part]) -> DpEvent:
    import dp_accounting as dp

    events = [dp.SelfComposedDpEvent(step_event(spec), steps) for spec, steps in parts]
    return events[0] if len(events) == 1 else dp.ComposedDpEvent(events)


def _slack(parts: Sequence[Part]) -> float:
    return math.fsum(
        discretisation_slack(spec.noise_multiplier, steps * spec.num_directions)
        for spec, steps in parts
    )


def _dense_draws(parts: Sequence[Part]) -> int:
    return sum(steps * spec.dense_draws for spec, steps in parts)


def selection_event(parts: Sequence[Part], trials: TrialCount) -> DpEvent:
    """The event of "run the steps K times, release the best", for the RDP accountant.

    Args:
      parts: the steps of one trial by kind, for that accountant.
      trials: distribution of K.

    Returns:
      It, with room for noise on a grid.
    """
    import dp_accounting as dp
    from dp_accounting.dp_event import RepeatAndSelectDpEvent, ZCDpEvent

    xi = _slack(parts) * (2 * _SMALLEST_ORDER - 1) / (_SMALLEST_ORDER - 1)
    one = dp.ComposedDpEvent([_run_event(parts), ZCDpEvent(rho=0.0, xi=xi)])
    return RepeatAndSelectDpEvent(one, trials.mean, trials.shape)


def selection_epsilon(plan: PrivacyPlan, trials: TrialCount, delta: float) -> float:
    """Total epsilon of releasing the best of K runs of `plan` (Papernot and Steinke 2022).

    Args:
      plan: one trial; its accountant is not used.
      trials: distribution of K.
      delta: in (0, 1).

    Returns:
      An upper bound; infinity without noise.

    Raises:
      ValueError: delta out of (0, 1), or what `run_event` refuses.
    """
    _refuse_extended([plan])
    if not plan.private:
        return math.inf
    return _selection_epsilon(_parts([plan], "rdp"), trials, delta)


@functools.lru_cache(maxsize=1024)
def _selection_epsilon(parts: tuple[Part, ...], trials: TrialCount, delta: float) -> float:
    if not 0 < delta < 1:
        raise ValueError(
            f"delta={delta} must lie in (0, 1): private selection has no pure epsilon."
        )
    accountant, draws = rdp_accountant(library_relation(parts[0][0])), _dense_draws(parts)
    accountant.compose(selection_event(parts, trials))
    epsilon = float(accountant.get_epsilon(delta * (DENSE_DELTA if draws else 1.0)))
    return epsilon + 2 * dense_slack(trials.most * draws, epsilon, delta)


def calibrate_selection(
    plan: PrivacyPlan, trials: TrialCount, *, epsilon: float, delta: float
) -> PrivacyPlan:
    """The same run under the RDP accountant, its noise the smallest whose *total* keeps to epsilon.

    Guarantee: `selection_epsilon(calibrate_selection(...), trials, delta) <= epsilon`.

    Args:
      plan: one trial.
      trials: distribution of K.
      epsilon: target > 0 of the whole search.
      delta: in (0, 1).

    Returns:
      A new plan.

    Raises:
      ValueError: no noise reaches the target, or what `selection_epsilon` refuses.
    """
    plan = replace(plan, accountant="rdp")

    def spent(sigma: float) -> float:
        return _selection_epsilon(plan.parts_at(sigma), trials, delta)

    effective = _smallest_noise(plan, spent, epsilon, delta)
    plan = with_noise(plan, plan.stated_multiplier(effective))
    assert selection_epsilon(plan, trials, delta) <= epsilon, "calibrated over the target"
    return plan


def _refuse_extended(plans: Sequence[PrivacyPlan]) -> None:
    if any(plan.after for plan in plans):
        raise ValueError(
            "a run that extends another is not accounted together with a search for its settings: "
            "search from the base model, or fix the settings (tuning='none')."
        )


def with_noise(plan: PrivacyPlan, noise_multiplier: float) -> PrivacyPlan:
    """A copy of a plan with another noise multiplier.

    Args:
      plan: of a private mechanism. The noise on an adaptive clip's count is raised to the multiplier
        where it is less: more would be needed for the count than for the whole step.
      noise_multiplier: sigma.

    Returns:
      The new plan.
    """
    mechanism: Any = plan.mechanism
    changed: dict[str, float] = {"noise_multiplier": noise_multiplier}
    if (count_noise := getattr(mechanism, "clip_count_noise", None)) is not None:
        changed["clip_count_noise"] = max(count_noise, noise_multiplier)
    return replace(plan, mechanism=replace(mechanism, **changed))


def _smallest_noise(
    plan: PrivacyPlan, spent: Callable[[float], float], epsilon: float, delta: float
) -> float:
    """The smallest multiplier with spent(sigma) <= epsilon, to 4e-4; `plan` gives the size of it."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"target_epsilon={epsilon} must be finite and positive.")
    start = 1.5 * plan.calibrate(epsilon=epsilon, delta=delta).spec.noise_multiplier
    return smallest_argument(spent, epsilon, start, 4e-4)


# ------------------------------------------------------------------ plain composition


def composed_epsilon(plans: Sequence[PrivacyPlan], delta: float) -> float:
    """Epsilon at `delta` of releasing every run of `plans`, an upper bound.

    Runs with the same step are one longer run. Different ones are composed by the RDP
    accountant where it knows all of them, else by the PLD accountant.

    Args:
      plans: the runs, at least one.
      delta: in (0, 1).

    Returns:
      Infinity if a run is not private.

    Raises:
      ValueError: no plans, different relations, or a combination without sound accounting.
    """
    if not plans:
        raise ValueError("no runs to compose: the grid is empty.")
    if len({plan.relation for plan in plans}) > 1:
        names = sorted({plan.relation for plan in plans})
        raise ValueError(f"neighboring_relation {names}: one guarantee has one relation; fix it.")
    _refuse_extended(plans)
    if not all(plan.private for plan in plans):
        return math.inf
    constant = all(plan.equal_steps for plan in plans)
    if constant and all(step_event(plan.spec) == step_event(plans[0].spec) for plan in plans):
        return _as_one_run(plans).epsilon(delta)
    parts = _parts(plans, plans[0].accountant)
    h, draws = _slack(parts), _dense_draws(parts)
    share = DENSE_DELTA if draws else 1.0
    epsilon = _accounted(plans, share * delta * math.exp(-h)) + 2 * h
    return epsilon + 2 * dense_slack(draws, epsilon, delta)


def _as_one_run(plans: Sequence[PrivacyPlan]) -> PrivacyPlan:
    """T1 + T2 + ... steps; the plan with the most directions has the most discrete noise."""
    largest = max(plans, key=lambda plan: (plan.spec.num_directions, plan.spec.dense_draws))
    steps = sum(plan.steps for plan in plans)
    return replace(largest, steps=steps, noise_schedule=None, clip_schedule=None)


def _accounted(plans: Sequence[PrivacyPlan], delta: float) -> float:
    """Epsilon of different events under one accountant that knows them all."""
    from dp_accounting import pld

    relation = library_relation(plans[0].spec)
    name = _common_accountant(plans)
    accountant: Any = (
        rdp_accountant(relation)
        if name == "rdp"
        else pld.PLDAccountant(relation, value_discretization_interval=1e-4)
    )
    accountant.compose(_run_event(_parts(plans, name)))
    return float(accountant.get_epsilon(delta))


def _common_accountant(plans: Sequence[PrivacyPlan]) -> Accountant:
    gaussian = all(plan.spec.distribution == "gaussian" for plan in plans)
    if gaussian and all(_knows("rdp", plan) for plan in plans):
        return "rdp"
    if gaussian and all(_knows("pld", plan) for plan in plans):
        return "pld"
    raise ValueError(
        "the grid's runs differ in sampling or noise in a way that no one accountant composes here; "
        "sweep settings that leave the step's event alone (learning_rate, clip, smoothing, "
        "num_directions, ...), or sweep the others one by one."
    )


def _knows(accountant: Accountant, plan: PrivacyPlan) -> bool:
    """Whether `accountant` itself reads the plan's event; truncation has its own two sizes."""
    if plan.spec.sampling == "truncated_poisson":
        return False
    try:
        used = replace(plan, accountant=accountant).accountant_used
    except ValueError:
        return False
    return used == accountant or (accountant == "pld" and used == "gaussian_exact")


def calibrate_composed(
    plans: Sequence[PrivacyPlan], *, epsilon: float, delta: float
) -> list[PrivacyPlan]:
    """The same runs under one noise multiplier, the smallest whose composition keeps to epsilon.

    Guarantee: `composed_epsilon(calibrate_composed(...), delta) <= epsilon`.

    Args:
      plans: the runs, at least one.
      epsilon: target > 0 of all of them together.
      delta: in (0, 1).

    Returns:
      The new plans, in order.
    """

    def spent(sigma: float) -> float:
        return composed_epsilon([with_noise(plan, sigma) for plan in plans], delta)

    sigma = _smallest_noise(_as_one_run(plans), spent, epsilon, delta)
    return [with_noise(plan, sigma) for plan in plans]


# ------------------------------------------------------------------ the `tuning` entry of a report

WORDS = ("none", "public", "not_accounted")
_ENTRIES = {
    "repeat_and_select": {"law", "mean_trials", "shape", "swept", "epsilon_one_run"},
    "composition": {"runs", "swept", "plans"},
}


def selection_entry(
    plan: PrivacyPlan, trials: TrialCount, swept: Sequence[str], delta: float
) -> dict[str, Any]:
    """What a report says of a run that was chosen by private selection.

    Args:
      plan: of the run.
      trials: distribution of the number of runs.
      swept: names of the settings that were searched.
      delta: of the report.

    Returns:
      JSON-safe; `total_epsilon` reads it.
    """
    values = {
        "law": trials.name,
        "mean_trials": trials.mean,
        "shape": "inf" if math.isinf(trials.shape) else trials.shape,
        "swept": list(swept),
        "epsilon_one_run": plan.epsilon(delta),
    }
    return {"repeat_and_select": values}


def composition_entry(plans: Sequence[PrivacyPlan], swept: Sequence[str]) -> dict[str, Any]:
    """What a report says of a run among others that are all accounted.

    Args:
      plans: of all runs.
      swept: names of the settings that were searched.

    Returns:
      JSON-safe; `total_epsilon` reads it.
    """
    counted: list[dict[str, Any]] = []
    for plan in plans:
        values = plan.to_dict()
        same = next((item for item in counted if item["plan"] == values), None)
        if same is None:
            counted.append({"count": 1, "plan": values})
        else:
            same["count"] += 1
    return {"composition": {"runs": len(plans), "swept": list(swept), "plans": counted}}


def check_tuning(tuning: Any) -> None:
    """Refuses a `tuning` entry that is none of the known ones.

    Raises:
      ValueError: an unknown word, kind or set of keys.
    """
    if tuning in WORDS:
        return
    kind = next(iter(tuning)) if isinstance(tuning, dict) and len(tuning) == 1 else None
    keys = _ENTRIES.get(str(kind))
    if keys is None or not isinstance(tuning[kind], dict) or set(tuning[kind]) != keys:
        raise ValueError(
            f"tuning={tuning!r} in a privacy report; it is one of {', '.join(WORDS)}, or an entry "
            "that `hf-dpzero sweep` writes."
        )


def total_epsilon(plan: PrivacyPlan, tuning: Any, delta: float) -> float:
    """Epsilon of a whole run with the search for its settings that a report's entry describes.

    Args:
      plan: of the run.
      tuning: one of `WORDS`, which add nothing, or an entry made by the functions above.
      delta: of the report.

    Returns:
      An upper bound.

    Raises:
      ValueError: an unknown entry, or a composition that does not hold `plan`.
    """
    check_tuning(tuning)
    if tuning in WORDS:
        return plan.epsilon(delta)
    if "repeat_and_select" in tuning:
        entry = tuning["repeat_and_select"]
        trials = TrialCount(mean=float(entry["mean_trials"]), shape=float(entry["shape"]))
        return selection_epsilon(plan, trials, delta)
    listed = tuning["composition"]["plans"]
    if plan.to_dict() not in [item["plan"] for item in listed]:
        raise ValueError("tuning: the composition does not list the plan of this very run.")
    runs = [PrivacyPlan.from_dict(item["plan"]) for item in listed for _ in range(item["count"])]
    if len(runs) != tuning["composition"]["runs"]:
        raise ValueError(f"tuning: {len(runs)} plans are listed for another number of runs.")
    return composed_epsilon(runs, delta)
