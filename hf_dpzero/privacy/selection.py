"""What choosing settings on private data costs, and the noise that pays for it.

Private selection (Papernot and Steinke 2022, "Hyperparameter tuning with Renyi differential
privacy", arXiv:2110.03620). Let Q be one trial: draw settings uniformly from a public grid, train
privately, score the result on public data. Run Q a random number K of times and release the best
result alone, K and the other results staying secret. For K from the geometric distribution (their
Definition 1 with eta = 1, gamma = 1 / E K) and a run that is (lambda, eps(lambda))-RDP at every
order, the release is, at order lambda and for every lambda' >= 1 (Theorem 2),

    eps(lambda) + 2 (1 - 1/lambda') eps(lambda') + 2 log(E K) / lambda' + log(E K) / (lambda - 1).

`dp_accounting` evaluates it as `RepeatAndSelectDpEvent`; the tests check it against this line.

Q is a mixture over settings that names its component, so its RDP curve is the largest of the
settings' curves; here all settings must share one event, so that no trial is noisier than it needs.
Ties in the score go to the earlier trial: trials are exchangeable, so this is the uniform
tie-breaker that the theorem allows.

*Noise on a grid.* The theorem needs RDP of what really runs, which adds discrete noise. Beside the
continuous run its likelihood is within e^h everywhere that matters (`discretization.py`), so its Renyi
divergence of order a is larger by at most (2 a - 1) / (a - 1) h, which is 12 h at the smallest order
in use, 1.1, and less at larger ones: a `ZCDpEvent` with xi = 12 h.

Noised d-vectors on their grid are close to ideal ones over the whole search: its trials, at most
`TrialCount.most` of them, are one composition of draws (`discretization.py`, on vectors).

*Plain composition.* The grid is run once, in full, and everything may be released: the runs'
events compose.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.accounting import epsilon_together, grid_slack, rdp_accountant
from hf_dpzero.privacy.calibration import calibrated_noise_multiplier, smallest_argument
from hf_dpzero.privacy.discretization import DENSE_DELTA, dense_slack
from hf_dpzero.privacy.events import Part, composed_event, library_relation
from hf_dpzero.privacy.mechanisms.adaptive import AdaptiveClipping
from hf_dpzero.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_SMALLEST_ORDER = 1.1


# ------------------------------------------------------------------ the number of trials

MAX_MEAN = 10_000.0


@dataclass(frozen=True, kw_only=True)
class TrialCount:
    """The geometric distribution of the secret number of trials K, on {1, 2, ...}.

    Attributes:
      mean: E K, in 1..10^4. The distribution is public; the draw is not.

    Raises:
      ValueError: mean out of range.
    """

    mean: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MAX_MEAN:
            raise ValueError(
                f"mean_trials={self.mean} must lie in 1..{MAX_MEAN:g}; the theorem needs at least 1."
            )

    @property
    def most(self) -> int:
        """Returns what K exceeds with probability (1 - 1 / E K)^most, below 1e-48: 128 E K."""
        return math.ceil(128 * self.mean)

    def draw(self) -> int:
        """Draws K, exactly, from operating-system entropy. Secret: tell nobody."""
        # Coins of probability 1 / E K, in integers: rounding would change the law that is accounted.
        last, count = 1 / Fraction(self.mean), 1
        while secrets.randbelow(last.denominator) >= last.numerator:
            count += 1
        return count


# ------------------------------------------------------------------ private selection


def run_event(plan: PrivacyPlan) -> DpEvent:
    """Returns one whole run as the RDP accountant reads it, and refuses one that it does not know."""
    return composed_event(replace(plan, accountant="rdp").own_parts())


def selection_event(parts: Sequence[Part], trials: TrialCount) -> DpEvent:
    """Returns the event of "run the steps K times, release the best", for the RDP accountant.

    It has room for noise on a grid.

    Args:
      parts: the steps of one trial by kind, for that accountant.
      trials: distribution of K.
    """
    import dp_accounting as dp
    from dp_accounting.dp_event import RepeatAndSelectDpEvent, ZCDpEvent

    xi = grid_slack(parts)[0] * (2 * _SMALLEST_ORDER - 1) / (_SMALLEST_ORDER - 1)
    one = dp.ComposedDpEvent([composed_event(parts), ZCDpEvent(rho=0.0, xi=xi)])
    return RepeatAndSelectDpEvent(one, trials.mean, 1.0)


def selection_epsilon(plan: PrivacyPlan, trials: TrialCount, delta: float) -> float:
    """Returns the total epsilon of releasing the best of K runs of `plan` (Papernot and Steinke 2022).

    Args:
      plan: one trial; its accountant is not used.
      trials: distribution of K.
      delta: in (0, 1).

    Returns:
      An upper bound; infinity without noise.

    Raises:
      ValueError: delta out of (0, 1), a plan that extends another, or one for which the RDP accountant
        has no sound event; the message says what to use instead.
    """
    _refuse_extended(plan)
    if not plan.private:
        return math.inf
    return _selection_epsilon(replace(plan, accountant="rdp").own_parts(), trials, delta)


def _refuse_extended(plan: PrivacyPlan) -> None:
    if plan.after:
        raise ValueError(
            "a run that extends another is not accounted together with a search for its settings: "
            "search from the base model, or fix the settings (tuning='none')."
        )


@lru_cache(maxsize=1024)
def _selection_epsilon(parts: tuple[Part, ...], trials: TrialCount, delta: float) -> float:
    if not 0 < delta < 1:
        raise ValueError(
            f"delta={delta} must lie in (0, 1): private selection has no pure epsilon."
        )
    accountant, (_, draws) = rdp_accountant(library_relation(parts[0][0])), grid_slack(parts)
    accountant.compose(selection_event(parts, trials))
    epsilon = float(accountant.get_epsilon(delta * (DENSE_DELTA if draws else 1.0)))
    return epsilon + 2 * dense_slack(trials.most * draws, epsilon, delta)


def calibrate_selection(
    plan: PrivacyPlan, trials: TrialCount, *, epsilon: float, delta: float
) -> PrivacyPlan:
    """Returns the run under the RDP accountant, its noise the smallest whose *total* keeps to epsilon.

    Guarantee: `selection_epsilon(calibrate_selection(...), trials, delta) <= epsilon`.

    Args:
      plan: one trial.
      trials: distribution of K.
      epsilon: target > 0 of the whole search.
      delta: in (0, 1).

    Raises:
      ValueError: no noise reaches the target, or what `selection_epsilon` refuses.
    """
    plan = replace(plan, accountant="rdp")

    def spent(sigma: float) -> float:
        return _selection_epsilon(plan.parts_at(sigma), trials, delta)

    start = 1.5 * plan.calibrate(epsilon=epsilon, delta=delta).spec.noise_multiplier
    effective = smallest_argument(spent, epsilon, start, 4e-4)
    plan = with_noise(plan, plan.stated_multiplier(effective))
    assert selection_epsilon(plan, trials, delta) <= epsilon, "calibrated over the target"
    return plan


def with_noise(plan: PrivacyPlan, noise_multiplier: float) -> PrivacyPlan:
    """Returns a copy of a plan, of a private mechanism, with another noise multiplier."""
    mechanism, changed = plan.mechanism, {"noise_multiplier": noise_multiplier}
    if isinstance(mechanism, AdaptiveClipping):
        # With less on the count, the count would need more than the whole step.
        changed["clip_count_noise"] = max(mechanism.clip_count_noise, noise_multiplier)
    return replace(plan, mechanism=replace(mechanism, **changed))  # type: ignore[arg-type]


# ------------------------------------------------------------------ plain composition


def composed_epsilon(plans: Sequence[PrivacyPlan], delta: float) -> float:
    """Returns epsilon at `delta` of releasing every run of `plans`, an upper bound.

    Args:
      plans: the runs, at least one.
      delta: in (0, 1).

    Returns:
      Infinity if a run is not private.

    Raises:
      ValueError: no plans, different relations, a run that extends another, or runs without a common
        accountant (`accounting.common_accountant`).
    """
    if not plans:
        raise ValueError("no runs to compose: the grid is empty.")
    if len(names := sorted({plan.relation for plan in plans})) > 1:
        raise ValueError(f"neighboring_relation {names}: one guarantee has one relation; fix it.")
    for plan in plans:
        _refuse_extended(plan)
    if not all(plan.private for plan in plans):
        return math.inf
    return epsilon_together(tuple(part for plan in plans for part in plan.own_parts()), delta)


def calibrate_composed(
    plans: Sequence[PrivacyPlan], *, epsilon: float, delta: float
) -> list[PrivacyPlan]:
    """Returns the runs under one noise multiplier, the smallest whose composition keeps to epsilon.

    Guarantee: `composed_epsilon(calibrate_composed(...), delta) <= epsilon`.

    Args:
      plans: the runs, of private mechanisms, at least one.
      epsilon: target > 0 of all of them together.
      delta: in (0, 1).
    """
    composed_epsilon(
        [with_noise(plan, 1.0) for plan in plans], delta
    )  # refuses what has no account

    def at(sigma: float) -> tuple[Part, ...]:
        return tuple(part for plan in plans for part in with_noise(plan, sigma).own_parts())

    sigma = calibrated_noise_multiplier(at, epsilon=epsilon, delta=delta)
    return [with_noise(plan, sigma) for plan in plans]


# ------------------------------------------------------------------ the `tuning` entry of a report

WORDS = ("none", "public", "not_accounted")
Tuning = str | dict[str, dict[str, Any]]
"""One of `WORDS`, or an entry made by the functions below."""
_ENTRIES = {
    "repeat_and_select": {"mean_trials", "swept", "epsilon_one_run"},
    "composition": {"runs", "swept", "plans"},
}


def selection_entry(
    plan: PrivacyPlan, trials: TrialCount, swept: Sequence[str], delta: float
) -> Tuning:
    """Returns what a report says of a run that private selection chose, JSON-safe for `total_epsilon`.

    Args:
      plan: of the run.
      trials: distribution of the number of runs.
      swept: names of the settings that were searched.
      delta: of the report.
    """
    values = {
        "mean_trials": trials.mean,
        "swept": list(swept),
        "epsilon_one_run": plan.epsilon(delta),
    }
    return {"repeat_and_select": values}


def composition_entry(plans: Sequence[PrivacyPlan], swept: Sequence[str]) -> Tuning:
    """Returns what a report says of a run among others that are all accounted, for `total_epsilon`.

    Args:
      plans: of all runs.
      swept: names of the settings that were searched.
    """
    counted = [{"count": n, "plan": plan.to_dict()} for plan, n in Counter(plans).items()]
    return {"composition": {"runs": len(plans), "swept": list(swept), "plans": counted}}


def check_tuning(tuning: Tuning) -> None:
    """Refuses a `tuning` entry that is none of the known ones.

    Raises:
      ValueError: an unknown word, kind or set of keys.
    """
    items = tuning.items() if isinstance(tuning, dict) else ()
    known = [isinstance(entry, dict) and set(entry) == _ENTRIES.get(kind) for kind, entry in items]
    if tuning not in WORDS and known != [True]:
        raise ValueError(
            f"tuning={tuning!r} in a privacy report; it is one of {', '.join(WORDS)}, or an entry "
            "that `hf-dpzero sweep` writes."
        )


def total_epsilon(plan: PrivacyPlan, tuning: Tuning, delta: float) -> float:
    """Returns epsilon of a whole run with the search for its settings that a report's entry describes.

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
    if isinstance(tuning, str):
        return plan.epsilon(delta)
    if "repeat_and_select" in tuning:
        trials = TrialCount(mean=float(tuning["repeat_and_select"]["mean_trials"]))
        return selection_epsilon(plan, trials, delta)
    listed = tuning["composition"]["plans"]
    if plan.to_dict() not in [item["plan"] for item in listed]:
        raise ValueError("tuning: the composition does not list the plan of this very run.")
    counts = [item["count"] for item in listed]
    if not all(type(count) is int and count > 0 for count in counts):
        raise ValueError(f"tuning: plans are listed {counts} times, which are no numbers of runs.")
    runs = [PrivacyPlan.from_dict(item["plan"]) for item in listed for _ in range(item["count"])]
    if any(item["plan"] not in [run.to_dict() for run in runs] for item in listed):
        raise ValueError("tuning: a plan is listed with more than a plan has.")
    if len(runs) != tuning["composition"]["runs"]:
        raise ValueError(f"tuning: {len(runs)} plans are listed for another number of runs.")
    return composed_epsilon(runs, delta)
