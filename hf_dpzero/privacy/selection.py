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

*The number of trials* is drawn from its law computed with 60 decimal digits.

*Plain composition.* The grid is run once, in full, and everything may be released: the runs'
events compose.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.accounting import Part, rdp_accountant, smallest_argument
from hf_dpzero.privacy.discretization import DENSE_DELTA, dense_slack, discretisation_slack
from hf_dpzero.privacy.events import Accountant, library_relation, step_event
from hf_dpzero.privacy.mechanisms.adaptive import AdaptiveClipping
from hf_dpzero.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_SMALLEST_ORDER = 1.1


# ------------------------------------------------------------------ the number of trials

TRIAL_SHAPES = {"geometric": 1.0, "poisson": math.inf, "logarithmic": 0.0}
"""Names of distributions of the number of trials -> `TrialCount.shape`."""

MAX_MEAN = 10_000.0
_BITS = 160  # of the uniform number behind a draw, which is met to 2^-150 in total variation
_CONTEXT = Context(prec=60)


@dataclass(frozen=True, kw_only=True)
class TrialCount:
    """The distribution of the secret number of trials K (Papernot and Steinke 2022, Definition 1).

    Attributes:
      mean: E K, in 1..10^4. The distribution is public; the draw is not.
      shape: eta. 1 is the geometric distribution, 0 the logarithmic, others above 0 the truncated
        negative binomial, all on {1, 2, ...}; infinity is the Poisson distribution, on {0, 1, ...}.
        A smaller shape costs less privacy and has a heavier tail.

    Raises:
      ValueError: mean or shape out of range.

    >>> trials = TrialCount(mean=4.0, shape=1.0)
    >>> [trials.probability(k) for k in (0, 1, 2)]
    [0.0, 0.25, 0.1875]
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MAX_MEAN:
            raise ValueError(
                f"mean_trials={self.mean} must lie in 1..{MAX_MEAN:g}; the theorems need at least 1."
            )
        if math.isnan(self.shape) or self.shape < 0:
            raise ValueError(
                f"shape={self.shape} must be at least 0; infinity is the Poisson distribution."
            )
        if 100 < self.shape < math.inf:
            raise ValueError(f"shape={self.shape} is above 100; use 'poisson', the limit.")

    @property
    def name(self) -> str:
        """Names the distribution.

        >>> TrialCount(mean=3, shape=0.5).name
        'truncated negative binomial (shape 0.5)'
        """
        known = {shape: name for name, shape in TRIAL_SHAPES.items()}
        return known.get(self.shape, f"truncated negative binomial (shape {self.shape:g})")

    @property
    def gamma(self) -> Decimal:
        """Returns the parameter of TNB(eta, gamma) of mean at most `mean`; 1 for Poisson.

        The rounding is on the safe side: a larger gamma has a smaller mean and costs less.
        """
        return Decimal(1) if math.isinf(self.shape) else _gamma(self.mean, self.shape)

    @property
    def most(self) -> int:
        """Returns what K exceeds with probability below 1e-48: 128 / gamma, or for Poisson 128 E K."""
        return math.ceil(128 * (self.mean if math.isinf(self.shape) else 1 / float(self.gamma)))

    def probability(self, count: int) -> float:
        """Returns P[K = count]."""
        number, value = next(p for p in self._probabilities() if p[0] >= count)
        return float(value) if number == count else 0.0

    def draw(self) -> int:
        """Draws K by inversion from operating-system entropy. Secret: tell nobody."""
        with localcontext(_CONTEXT):
            left = Decimal(secrets.randbits(_BITS)) / Decimal(2**_BITS)
            for number, value in self._probabilities():
                left -= value
                if left < 0 or (number > self.mean and value < Decimal("1e-48")):
                    return number
        raise AssertionError("the probabilities never sum to one")

    def _probabilities(self) -> Iterator[tuple[int, Decimal]]:
        """Yields (k, P[K = k]) from the smallest k upwards, without end, as decimals."""
        with localcontext(_CONTEXT):
            poisson = math.isinf(self.shape)
            eta, mean, gamma = Decimal(self.shape), Decimal(self.mean), self.gamma
            number, value = (0, (-mean).exp()) if poisson else (1, _tnb_first(gamma, eta))
        while True:
            yield number, value
            with localcontext(_CONTEXT):
                ratio = mean if poisson else (1 - gamma) * (number + eta)
                value = value * ratio / (number + 1)
            number += 1


@lru_cache(maxsize=256)
def _gamma(mean: float, shape: float) -> Decimal:
    """Returns the smallest gamma, to 1e-40, with E K <= mean, by bisection."""

    def expected(gamma: Decimal) -> Decimal:
        # eta (1/gamma - 1) / (1 - gamma^eta); (1/gamma - 1) / log(1/gamma) for eta = 0
        odds, eta = 1 / gamma - 1, Decimal(shape)
        if gamma == 1:
            return Decimal(1)
        return odds / -gamma.ln() if shape == 0 else eta * odds / (1 - gamma**eta)

    with localcontext(_CONTEXT):
        low, high = Decimal(0), Decimal(1)
        while high - low > high * Decimal("1e-40"):
            middle = (low + high) / 2
            low, high = (low, middle) if expected(middle) <= Decimal(mean) else (middle, high)
        return high


def _tnb_first(gamma: Decimal, eta: Decimal) -> Decimal:
    """Returns P[K = 1] = eta (1 - gamma) / (gamma^-eta - 1); (1 - gamma) / log(1/gamma) for eta = 0."""
    if gamma == 1:
        return Decimal(1)
    return (1 - gamma) / -gamma.ln() if eta == 0 else eta * (1 - gamma) / (gamma**-eta - 1)


# ------------------------------------------------------------------ private selection


def _refuse_extended(plans: Sequence[PrivacyPlan]) -> None:
    if any(plan.after for plan in plans):
        raise ValueError(
            "a run that extends another is not accounted together with a search for its settings: "
            "search from the base model, or fix the settings (tuning='none')."
        )


def run_event(plan: PrivacyPlan) -> DpEvent:
    """Returns one whole run as the RDP accountant reads it, and refuses one that it does not know."""
    return _run_event(_parts([plan], "rdp"))


def _parts(plans: Sequence[PrivacyPlan], accountant: Accountant) -> tuple[Part, ...]:
    """Returns all steps of all plans, by kind, for one accountant."""
    plans = [replace(plan, accountant=accountant) for plan in plans]
    return tuple(part for plan in plans for part in plan.own_parts())


def _run_event(parts: Sequence[Part]) -> DpEvent:
    import dp_accounting as dp

    events = [dp.SelfComposedDpEvent(step_event(spec), steps) for spec, steps in parts]
    return events[0] if len(events) == 1 else dp.ComposedDpEvent(events)


def _slack(parts: Sequence[Part]) -> tuple[float, int]:
    """Returns h of all discrete noise, and the number of noised coordinates of vectors."""
    h = math.fsum(
        discretisation_slack(spec.noise_multiplier, steps * spec.num_directions)
        for spec, steps in parts
    )
    return h, sum(steps * spec.dense_draws for spec, steps in parts)


def selection_event(parts: Sequence[Part], trials: TrialCount) -> DpEvent:
    """Returns the event of "run the steps K times, release the best", for the RDP accountant.

    It has room for noise on a grid.

    Args:
      parts: the steps of one trial by kind, for that accountant.
      trials: distribution of K.
    """
    import dp_accounting as dp
    from dp_accounting.dp_event import RepeatAndSelectDpEvent, ZCDpEvent

    xi = _slack(parts)[0] * (2 * _SMALLEST_ORDER - 1) / (_SMALLEST_ORDER - 1)
    one = dp.ComposedDpEvent([_run_event(parts), ZCDpEvent(rho=0.0, xi=xi)])
    return RepeatAndSelectDpEvent(one, trials.mean, trials.shape)


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
    _refuse_extended([plan])
    if not plan.private:
        return math.inf
    return _selection_epsilon(_parts([plan], "rdp"), trials, delta)


@lru_cache(maxsize=1024)
def _selection_epsilon(parts: tuple[Part, ...], trials: TrialCount, delta: float) -> float:
    if not 0 < delta < 1:
        raise ValueError(
            f"delta={delta} must lie in (0, 1): private selection has no pure epsilon."
        )
    accountant, (_, draws) = rdp_accountant(library_relation(parts[0][0])), _slack(parts)
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

    effective = _smallest_noise(plan, spent, epsilon, delta)
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


def _smallest_noise(
    plan: PrivacyPlan, spent: Callable[[float], float], epsilon: float, delta: float
) -> float:
    """Returns the smallest multiplier with spent(sigma) <= epsilon, to 4e-4."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"target_epsilon={epsilon} must be finite and positive.")
    start = 1.5 * plan.calibrate(epsilon=epsilon, delta=delta).spec.noise_multiplier
    return smallest_argument(spent, epsilon, start, 4e-4)


# ------------------------------------------------------------------ plain composition


def composed_epsilon(plans: Sequence[PrivacyPlan], delta: float) -> float:
    """Returns epsilon at `delta` of releasing every run of `plans`, an upper bound.

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
    h, draws = _slack(_parts(plans, plans[0].accountant))
    share = DENSE_DELTA if draws else 1.0
    epsilon = _accounted(plans, share * delta * math.exp(-h)) + 2 * h
    return epsilon + 2 * dense_slack(draws, epsilon, delta)


def _as_one_run(plans: Sequence[PrivacyPlan]) -> PrivacyPlan:
    """Returns one run of T1 + T2 + ... steps."""
    # the plan with the most directions has the most discrete noise
    largest = max(plans, key=lambda plan: (plan.spec.num_directions, plan.spec.dense_draws))
    steps = sum(plan.steps for plan in plans)
    return replace(largest, steps=steps, noise_schedule=None, clip_schedule=None)


def _accounted(plans: Sequence[PrivacyPlan], delta: float) -> float:
    """Returns epsilon of different events under one accountant that knows them all."""
    from dp_accounting import pld

    gaussian = all(plan.spec.distribution == "gaussian" for plan in plans)
    relation = library_relation(plans[0].spec)
    if gaussian and all(_knows("rdp", plan) for plan in plans):
        accountant, parts = rdp_accountant(relation), _parts(plans, "rdp")
    elif gaussian and all(_knows("pld", plan) for plan in plans):
        accountant = pld.PLDAccountant(relation, value_discretization_interval=1e-4)
        parts = _parts(plans, "pld")
    else:
        raise ValueError(
            "the grid's runs differ in sampling or noise in a way that no one accountant composes here; "
            "sweep settings that leave the step's event alone (learning_rate, clip, smoothing, "
            "num_directions, ...), or sweep the others one by one."
        )
    accountant.compose(_run_event(parts))
    return float(accountant.get_epsilon(delta))


def _knows(accountant: Accountant, plan: PrivacyPlan) -> bool:
    """Says whether `accountant` itself reads the plan's event; truncation has its own two sizes."""
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
    """Returns the runs under one noise multiplier, the smallest whose composition keeps to epsilon.

    Guarantee: `composed_epsilon(calibrate_composed(...), delta) <= epsilon`.

    Args:
      plans: the runs, at least one.
      epsilon: target > 0 of all of them together.
      delta: in (0, 1).
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
    """Returns what a report says of a run that private selection chose, JSON-safe for `total_epsilon`.

    Args:
      plan: of the run.
      trials: distribution of the number of runs.
      swept: names of the settings that were searched.
      delta: of the report.
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
    """Returns what a report says of a run among others that are all accounted, for `total_epsilon`.

    Args:
      plans: of all runs.
      swept: names of the settings that were searched.
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
