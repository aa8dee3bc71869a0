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
continuous run its likelihood is within e^h everywhere that matters (`mechanisms.py`), so its Renyi
divergence of order a is larger by at most (2 a - 1) / (a - 1) h, which is 12 h at the smallest order
in use, 1.1, and less at larger ones: a `ZCDpEvent` with xi = 12 h.

*Plain composition.* The grid is run once, in full, and everything may be released: the runs'
events compose.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.accounting import smallest_argument
from hf_dpzero.privacy.events import Accountant, StepSpec, library_relation, step_event
from hf_dpzero.privacy.mechanisms import discretisation_slack
from hf_dpzero.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from dp_accounting import DpEvent

TRIAL_SHAPES = {"geometric": 1.0, "poisson": math.inf, "logarithmic": 0.0}
"""Names of distributions of the number of trials -> `TrialCount.shape`."""

MAX_MEAN = 10_000.0
_SMALLEST_ORDER = 1.1
_BITS = (
    160  # of the uniform number behind a draw; the distribution is met to 2^-150 in total variation
)
_DIGITS = 60


# ------------------------------------------------------------------ how many trials


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
        """The name of the distribution.

        >>> TrialCount(mean=3, shape=0.5).name
        'truncated negative binomial (shape 0.5)'
        """
        known = {shape: name for name, shape in TRIAL_SHAPES.items()}
        return known.get(self.shape, f"truncated negative binomial (shape {self.shape:g})")

    @property
    def gamma(self) -> Decimal:
        """The parameter of TNB(eta, gamma) whose mean is at most `mean`; 1 for the Poisson distribution.

        The rounding is on the safe side: a larger gamma has a smaller mean and costs less.
        """
        return Decimal(1) if math.isinf(self.shape) else _gamma(self.mean, self.shape)

    def probability(self, count: int) -> float:
        """P[K = count]."""
        for number, value in self._probabilities():
            if number >= count:
                return float(value) if number == count else 0.0
        raise AssertionError("the probabilities never sum to one")

    def draw(self) -> int:
        """K, drawn by inversion from operating-system entropy. Secret: tell nobody."""
        with localcontext() as context:
            context.prec = _DIGITS
            left = Decimal(secrets.randbits(_BITS)) / Decimal(2**_BITS)
            for number, value in self._probabilities():
                left -= value
                if left < 0 or (number > self.mean and value < Decimal("1e-48")):
                    return number
        raise AssertionError("the probabilities never sum to one")

    def _probabilities(self) -> Iterator[tuple[int, Decimal]]:
        """Yields (k, P[K = k]) from the smallest k upwards, without end, as decimals."""
        with localcontext() as context:
            context.prec = _DIGITS
            poisson = math.isinf(self.shape)
            eta, mean, gamma = Decimal(self.shape), Decimal(self.mean), self.gamma
            number, value = (0, (-mean).exp()) if poisson else (1, _tnb_first(gamma, eta))
        while True:
            yield number, value
            with localcontext() as context:
                context.prec = _DIGITS
                ratio = mean if poisson else (1 - gamma) * (number + eta)
                value = value * ratio / (number + 1)
            number += 1


@functools.lru_cache(maxsize=256)
def _gamma(mean: float, shape: float) -> Decimal:
    """The smallest gamma, to 1e-40, with E K <= mean, by bisection."""
    with localcontext() as context:
        context.prec = _DIGITS
        low, high = Decimal(0), Decimal(1)
        while high - low > high * Decimal("1e-40"):
            middle = (low + high) / 2
            if _tnb_mean(middle, shape) <= Decimal(mean):
                high = middle
            else:
                low = middle
        return high


def _tnb_mean(gamma: Decimal, shape: float) -> Decimal:
    """E K = eta (1/gamma - 1) / (1 - gamma^eta); (1/gamma - 1) / log(1/gamma) for eta = 0."""
    odds, eta = 1 / gamma - 1, Decimal(shape)
    if gamma == 1:
        return Decimal(1)
    return odds / -gamma.ln() if shape == 0 else eta * odds / (1 - gamma**eta)


def _tnb_first(gamma: Decimal, eta: Decimal) -> Decimal:
    """P[K = 1] = eta (1 - gamma) / (gamma^-eta - 1); (1 - gamma) / log(1/gamma) for eta = 0."""
    if gamma == 1:
        return Decimal(1)
    return (1 - gamma) / -gamma.ln() if eta == 0 else eta * (1 - gamma) / (gamma**-eta - 1)


# ------------------------------------------------------------------ private selection


def run_event(plan: PrivacyPlan) -> DpEvent:
    """One whole run in the RDP accountant's convention, as the one Gaussian that a step amounts to.

    Raises:
      ValueError: the RDP accountant has no sound event for sampler, noise and relation; the message
        says what to use instead.
    """
    return _run_event(_rdp_spec(plan), plan.steps)


def _rdp_spec(plan: PrivacyPlan) -> StepSpec:
    return replace(plan.spec, accountant="rdp")


def _run_event(spec: StepSpec, steps: int) -> DpEvent:
    import dp_accounting as dp

    return dp.SelfComposedDpEvent(step_event(spec), steps)


def selection_event(plan: PrivacyPlan, trials: TrialCount) -> DpEvent:
    """The event of "run `plan` K times, release the best": what the total epsilon is of."""
    return _selection_event(_rdp_spec(plan), plan.steps, trials)


def _selection_event(spec: StepSpec, steps: int, trials: TrialCount) -> DpEvent:
    import dp_accounting as dp
    from dp_accounting.dp_event import RepeatAndSelectDpEvent, ZCDpEvent

    h = discretisation_slack(spec.noise_multiplier, steps * spec.num_directions)
    xi = h * (2 * _SMALLEST_ORDER - 1) / (_SMALLEST_ORDER - 1)
    one = dp.ComposedDpEvent([_run_event(spec, steps), ZCDpEvent(rho=0.0, xi=xi)])
    return RepeatAndSelectDpEvent(one, trials.mean, trials.shape)


def selection_epsilon(plan: PrivacyPlan, trials: TrialCount, delta: float) -> float:
    """Total epsilon at `delta` of releasing the best of K runs of `plan`; infinity without noise.

    Raises:
      ValueError: delta out of (0, 1), or what `run_event` refuses.
    """
    if not plan.private:
        return math.inf
    return _selection_epsilon(_rdp_spec(plan), plan.steps, trials, delta)


@functools.lru_cache(maxsize=1024)
def _selection_epsilon(spec: StepSpec, steps: int, trials: TrialCount, delta: float) -> float:
    from dp_accounting import rdp

    if not 0 < delta < 1:
        raise ValueError(
            f"delta={delta} must lie in (0, 1): private selection has no pure epsilon."
        )
    accountant = rdp.RdpAccountant(neighboring_relation=library_relation(spec))
    accountant.compose(_selection_event(spec, steps, trials))
    return float(accountant.get_epsilon(delta))


def calibrate_selection(
    plan: PrivacyPlan, trials: TrialCount, *, epsilon: float, delta: float
) -> PrivacyPlan:
    """The same run under the RDP accountant, its noise the smallest whose *total* keeps to epsilon.

    Guarantee: `selection_epsilon(calibrate_selection(...), trials, delta) <= epsilon`.

    Raises:
      ValueError: no noise reaches the target, or what `selection_epsilon` refuses.
    """
    plan = replace(plan, accountant="rdp")
    spec, mechanism = plan.spec, plan.mechanism

    def spent(sigma: float) -> float:
        return _selection_epsilon(replace(spec, noise_multiplier=sigma), plan.steps, trials, delta)

    sigma = _smallest_noise(plan, spent, epsilon, delta) * mechanism.sensitivity_add_remove
    found = with_noise(plan, sigma)
    assert selection_epsilon(found, trials, delta) <= epsilon, "calibrated over the target"
    return found


def with_noise(plan: PrivacyPlan, noise_multiplier: float) -> PrivacyPlan:
    """The same plan with another noise multiplier."""
    mechanism: Any = plan.mechanism
    return replace(plan, mechanism=replace(mechanism, noise_multiplier=noise_multiplier))


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

    Raises:
      ValueError: no plans, different relations, or a combination without sound accounting.
    """
    if not plans:
        raise ValueError("no runs to compose: the grid is empty.")
    if len({plan.relation for plan in plans}) > 1:
        names = sorted({plan.relation for plan in plans})
        raise ValueError(f"neighboring_relation {names}: one guarantee has one relation; fix it.")
    if not all(plan.private for plan in plans):
        return math.inf
    if all(step_of(plan) == step_of(plans[0]) for plan in plans):
        return _as_one_run(plans).epsilon(delta)
    h = sum(_slack(plan) for plan in plans)
    return _accounted(plans, delta * math.exp(-h)) + 2 * h


def step_of(plan: PrivacyPlan) -> DpEvent:
    """The event of one step; two plans with equal steps are parts of one longer run."""
    return step_event(plan.spec)


def _as_one_run(plans: Sequence[PrivacyPlan]) -> PrivacyPlan:
    """T1 + T2 + ... steps; the plan with the most directions has the most discrete noise."""
    largest = max(plans, key=lambda plan: plan.spec.num_directions)
    return replace(largest, steps=sum(plan.steps for plan in plans))


def _slack(plan: PrivacyPlan) -> float:
    return discretisation_slack(plan.spec.noise_multiplier, plan.steps * plan.spec.num_directions)


def _accounted(plans: Sequence[PrivacyPlan], delta: float) -> float:
    """Epsilon of different events under one accountant that knows them all."""
    import dp_accounting as dp
    from dp_accounting import pld, rdp

    relation = library_relation(plans[0].spec)
    name = _common_accountant(plans)
    accountant: Any = (
        rdp.RdpAccountant(neighboring_relation=relation)
        if name == "rdp"
        else pld.PLDAccountant(relation, value_discretization_interval=1e-4)
    )
    events = [_run_event(replace(plan.spec, accountant=name), plan.steps) for plan in plans]
    accountant.compose(dp.ComposedDpEvent(events))
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
    """What a report says of a run that was chosen by private selection; JSON-safe."""
    values = {
        "law": trials.name,
        "mean_trials": trials.mean,
        "shape": "inf" if math.isinf(trials.shape) else trials.shape,
        "swept": list(swept),
        "epsilon_one_run": plan.epsilon(delta),
    }
    return {"repeat_and_select": values}


def composition_entry(plans: Sequence[PrivacyPlan], swept: Sequence[str]) -> dict[str, Any]:
    """What a report says of a run among others that are all accounted; JSON-safe."""
    found: list[dict[str, Any]] = []
    for plan in plans:
        values = plan.to_dict()
        same = next((item for item in found if item["plan"] == values), None)
        if same is None:
            found.append({"count": 1, "plan": values})
        else:
            same["count"] += 1
    return {"composition": {"runs": len(plans), "swept": list(swept), "plans": found}}


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
    """Epsilon at `delta` of a whole run of `plan` with the tuning that a report's entry describes.

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
