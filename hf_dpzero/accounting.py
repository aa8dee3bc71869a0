"""From what a run does to the epsilon that it costs, and back to the noise that it needs.

The numbers come from Google's `dp-accounting` 0.6. This module decides which of its events and
accountants is a sound description of a run, and refuses every combination for which it has none.

| sampler | relation | noise | event, accountant |
|---|---|---|---|
| poisson | add_or_remove_one, replace_special | Gaussian | PoissonSampled(Gaussian), PLD or RDP |
| poisson | replace_one | Gaussian | the same event, PLD with REPLACE_ONE |
| poisson | add_or_remove_one, replace_special | Laplace | PoissonSampled(Laplace), PLD |
| truncated_poisson | all three | Gaussian | TruncatedSubsampledGaussian, PLD |
| fixed_size_without_replacement | replace_one | Gaussian | SampledWithoutReplacement, RDP |
| full_batch | all three | Gaussian | T Gaussians = one Gaussian; exact, or RDP |
| full_batch | all three | Laplace | Laplace, PLD or RDP |
| full_batch | replace_one | Gaussian | `advanced_composition`: Lemma 2.2 of the DPZero paper |

Notes on soundness
------------------
*Vectors under replace_one.* With P = (1-q) N(0) + q N(a) and Q = (1-q) N(0) + q N(b), a and b in
the unit ball of R^K, every hockey-stick divergence is largest at b = -a, |a| = 1, which is the
one-dimensional pair that the PLD uses. Proof: for alpha >= 1, H_alpha(P || Q) is q times the
divergence of N(a) from w1 N(b) + w0 N(0), w1 + w0 >= 1. Its optimal set S = {c1 exp<b-a, x> +
c0 exp<-a, x> <= 1} has an outward normal that is a positive combination of b - a and -a, so by the
envelope theorem and the divergence theorem turning b away from a at fixed |b| increases the
divergence; once b points against a the problem is one-dimensional and grows with |a| and |b|.
alpha < 1 follows by exchanging P and Q.

*Truncation.* `TruncatedSubsampledGaussianDpEvent` describes what `TruncatedPoissonSampler` does: a
uniformly random subset, without replacement, of an oversized Poisson sample. Condition on the
sample of the other examples. If it is below the cap, the step is ordinary Poisson sampling. If not,
the batch without example x is a uniform cap-subset of the others, and with x, whatever the number
sampled, is that or, with the event's conditional probability, a uniform (cap-1)-subset plus x: a
batch in which x has replaced another example. That moves the sum by at most 2C from the untouched
batch and by at most 2C between two values of x, which the library bounds by a replace-one pair with
noise sigma / 2, under all three relations. The event's `dataset_size` counts x. For
add_or_remove_one a data set of n has neighbours on both sides, so epsilon is the larger of those
for dataset_size n and n + 1.

*Laplace vectors.* A product of Laplace shifts s_1..s_K (in units of b) is dominated by one shift
S = sum s_i. Proof for two, s >= t: the curve of one shift s is
d(eps; s) = max(0, 1 - e^((eps - s)/2), 1 - e^eps). By symmetry take eps >= 0. The product's
divergence is E[d(eps - L; s)] over the second loss |L| <= t <= s; there eps - L >= -s, so the third
branch is never the larger one, and pointwise
d(eps - L; s) <= max(0, 1 - e^((eps - t - s)/2)) = d(eps; s + t). Induction gives K, and Poisson
sampling preserves domination.

*Numerical error.* PLD results are pessimistic in their discretisation and tail truncation. Their
floating-point error grows as the grid is refined and acts mostly upwards; grids here stay near 1/64
of the typical loss of one step, where an independent accountant in the tests agrees to 1e-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

from hf_dpzero.mechanisms import (
    MAX_NOISE_MULTIPLIER,
    MIN_NOISE_MULTIPLIER,
    RELATIONS,
    Relation,
    discretisation_slack,
    sensitivity_factor,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Accountant = Literal["pld", "rdp", "advanced_composition"]
ACCOUNTANTS: tuple[Accountant, ...] = ("pld", "rdp", "advanced_composition")

MIN_DELTA = 1e-12
"""The PLD accountant truncates tails at 1e-15; below this delta its answers mean nothing."""

LAPLACE_MARGIN = 1.0 - 1e-12
"""Shrinks b for the discreteness of the noise; see the docstring of `mechanisms.py`."""


@dataclass(frozen=True, kw_only=True)
class StepLaw:
    """Everything about one step that its privacy depends on. Hashable.

    Attributes:
      sampling: name of the sampler.
      num_examples: n.
      batch_size: expected batch size B; q = B / n.
      max_batch_size: the cap of truncated_poisson, else 0.
      distribution: "gaussian" or "laplace".
      noise_multiplier: sigma, noise scale over C.
      num_directions: K, the number of noise draws in a step.
      relation: the neighbouring relation.
      accountant: the accountant asked for.
    """

    sampling: str
    num_examples: int
    batch_size: float
    max_batch_size: int = 0
    distribution: str = "gaussian"
    noise_multiplier: float = 1.0
    num_directions: int = 1
    relation: Relation = "add_or_remove_one"
    accountant: Accountant = "pld"

    @property
    def probability(self) -> float:
        """q, the chance that one example is in the batch."""
        return 1.0 if self.sampling == "full_batch" else self.batch_size / self.num_examples


def check_sound(law: StepLaw) -> None:
    """Refuses, with what to use instead, every combination that has no sound event here.

    Raises:
      ValueError: unknown names, or a combination outside the table in the module docstring.
    """
    if law.relation not in RELATIONS:
        raise ValueError(f"relation={law.relation!r} is unknown; use one of {RELATIONS}.")
    if law.accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant={law.accountant!r} is unknown; use one of {ACCOUNTANTS}.")
    for applies, message in _refusals(law):
        if applies:
            raise ValueError(message)


def _refusals(law: StepLaw) -> list[tuple[bool, str]]:
    fixed = law.sampling == "fixed_size_without_replacement"
    poisson = law.sampling == "poisson"
    truncated = law.sampling == "truncated_poisson"
    laplace = law.distribution == "laplace"
    replace_one = law.relation == "replace_one"
    lemma = law.accountant == "advanced_composition"
    rdp = law.accountant == "rdp"
    return [
        (
            lemma and law.sampling != "full_batch",
            f"accountant='advanced_composition' (Lemma 2.2 of the DPZero paper) gives no "
            f"amplification by sampling, and sampling={law.sampling!r} has a larger sensitivity "
            "per step than it assumes; use accountant='pld', or the full_batch sampler.",
        ),
        (
            lemma and laplace,
            "accountant='advanced_composition' is stated for Gaussian noise; "
            "use accountant='pld' with distribution='laplace'.",
        ),
        (
            lemma and not replace_one,
            f"accountant='advanced_composition' is stated for replace_one neighbours, not "
            f"{law.relation!r}; use relation='replace_one', or accountant='pld'.",
        ),
        (
            fixed and not replace_one,
            f"fixed_size_without_replacement sampling has no sound event under "
            f"relation={law.relation!r} (its batch size reveals that an example is missing); use "
            "relation='replace_one', or the poisson sampler.",
        ),
        (
            fixed and laplace,
            "fixed_size_without_replacement sampling has no event for Laplace noise; use "
            "distribution='gaussian', or the poisson sampler with relation='add_or_remove_one'.",
        ),
        (
            truncated and laplace,
            "truncated_poisson sampling has no event for Laplace noise; use "
            "distribution='gaussian', or the poisson sampler.",
        ),
        (
            truncated and rdp,
            "accountant='rdp' does not support truncated_poisson sampling; use accountant='pld', "
            "or the poisson sampler.",
        ),
        (
            poisson and laplace and replace_one,
            "poisson sampling of a Laplace mechanism has no event under relation='replace_one'; "
            "use relation='add_or_remove_one', or distribution='gaussian'.",
        ),
        (
            poisson and laplace and rdp,
            "accountant='rdp' does not support poisson sampling of Laplace noise; "
            "use accountant='pld'.",
        ),
        (
            poisson and replace_one and rdp,
            "accountant='rdp' does not support poisson sampling under relation='replace_one'; "
            "use accountant='pld', or relation='add_or_remove_one'.",
        ),
    ]


def accountant_used(law: StepLaw) -> str:
    """The accountant whose number is reported: `gaussian_exact`, `pld`, `rdp` or the lemma.

    Fixed-size sampling is always RDP (a PLD for it is not in the library); a Gaussian full batch
    under "pld" is exact, because T Gaussians compose to one.
    """
    if law.sampling == "fixed_size_without_replacement":
        return "rdp"
    if law.accountant == "pld" and law.sampling == "full_batch" and law.distribution == "gaussian":
        return "gaussian_exact"
    return law.accountant


def step_event(law: StepLaw) -> DpEvent:
    """The `DpEvent` of one step, in the convention of the accountant that reads it.

    The PLD accountant doubles the sensitivity of a Gaussian by itself under REPLACE_ONE; the RDP
    accountant and Laplace events do not, so there the factor is divided out of the noise. For
    truncated_poisson under add_or_remove_one this is the event of the pair (n + 1, n).
    """
    import dp_accounting as dp

    check_sound(law)
    sigma, q = law.noise_multiplier, law.probability
    if law.distribution == "laplace":
        b = sigma * LAPLACE_MARGIN / sensitivity_factor(law.relation)
        inner: DpEvent = dp.LaplaceDpEvent(b)
        return inner if law.sampling == "full_batch" else dp.PoissonSampledDpEvent(q, inner)
    if law.sampling == "truncated_poisson":
        larger = law.num_examples + (law.relation == "add_or_remove_one")
        return dp.TruncatedSubsampledGaussianDpEvent(larger, q, law.max_batch_size, sigma)
    if law.sampling == "poisson":
        return dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma))
    if law.sampling == "fixed_size_without_replacement":
        gaussian = dp.GaussianDpEvent(sigma / 2)
        return dp.SampledWithoutReplacementDpEvent(law.num_examples, int(law.batch_size), gaussian)
    pld_convention = accountant_used(law) == "gaussian_exact"
    return dp.GaussianDpEvent(sigma if pld_convention else sigma / sensitivity_factor(law.relation))


@lru_cache(maxsize=4096)
def epsilon_after(law: StepLaw, steps: int, delta: float) -> float:
    """Epsilon at `delta` after `steps` adaptive steps of `law`, an upper bound.

    Args:
      law: one step; `noise_multiplier` = 0 gives infinity.
      steps: T >= 0; 0 gives 0.
      delta: in [1e-12, 1); 0 is allowed for Laplace noise, which has a pure epsilon.

    Raises:
      ValueError: an unsound combination or a delta out of range.
    """
    check_sound(law)
    _check_delta(delta, law)
    if steps == 0:
        return 0.0
    if law.noise_multiplier == 0:
        return math.inf
    if law.distribution == "laplace":
        return min(_pure_epsilon(law, steps), _continuous_epsilon(law, steps, delta))
    h = discretisation_slack(law.noise_multiplier, steps * law.num_directions)
    return max(0.0, _continuous_epsilon(law, steps, delta * math.exp(-h))) + 2 * h


def _continuous_epsilon(law: StepLaw, steps: int, delta: float) -> float:
    """Epsilon of the run with real-valued noise."""
    if delta == 0:
        return math.inf
    used = accountant_used(law)
    if used == "gaussian_exact":
        return _gaussian_epsilon(law, steps, delta)
    if used == "advanced_composition":
        lemma = _lemma_epsilon(law.noise_multiplier, steps, delta)
        return max(lemma, _gaussian_epsilon(law, steps, delta))
    if used == "rdp":
        return _rdp_epsilon(law, steps, delta)
    return _pld_epsilon(law, steps, delta)


def _gaussian_epsilon(law: StepLaw, steps: int, delta: float) -> float:
    """T full-batch Gaussians are one with sigma / sqrt(T) (Balle and Wang 2018 for its epsilon)."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    sigma = law.noise_multiplier / sensitivity_factor(law.relation) / math.sqrt(steps)
    found = float(get_epsilon_gaussian(sigma, delta))
    return found * (1 + 1e-9) + 1e-11 if found > 0 else 0.0


def _rdp_epsilon(law: StepLaw, steps: int, delta: float) -> float:
    import dp_accounting as dp
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=_relation(law))
    accountant.compose(dp.SelfComposedDpEvent(step_event(law), steps))
    return float(accountant.get_epsilon(delta))


def _pld_epsilon(law: StepLaw, steps: int, delta: float) -> float:
    """PLD epsilon on a grid fitted to the run; for the truncated event the worse of two sizes."""
    found = _pld_on_fitted_grid(law, step_event(law), steps, delta)
    if law.sampling == "truncated_poisson" and law.relation == "add_or_remove_one":
        event = replace_dataset_size(step_event(law), law.num_examples)
        found = max(found, _pld_on_fitted_grid(law, event, steps, delta))
    return found


def replace_dataset_size(event: Any, dataset_size: int) -> DpEvent:
    """The same truncated event for a data set of another size."""
    import attr

    return attr.evolve(event, dataset_size=dataset_size)


def _pld_on_fitted_grid(law: StepLaw, event: DpEvent, steps: int, delta: float) -> float:
    """One coarse pass for the size of the answer, one on a grid fine enough for it.

    The result is a bound on any grid; the grid decides only how tight it is and how long it takes.
    """
    spread = _typical_loss(law)
    width = _largest_loss(law)
    coarse_grid = _coarse_grid(law)
    coarse = _pld_epsilon_on_grid(law, event, steps, delta, coarse_grid)
    total = coarse if math.isfinite(coarse) else 0.0
    grid = max(min(spread / 64, 1e-3), width / 2**17, total / 2**17, 1e-10)
    if grid >= coarse_grid:
        return coarse
    return min(coarse, _pld_epsilon_on_grid(law, event, steps, delta, grid))


def _pld_epsilon_on_grid(
    law: StepLaw, event: DpEvent, steps: int, delta: float, grid: float
) -> float:
    import dp_accounting as dp
    from dp_accounting import pld

    accountant = pld.PLDAccountant(_relation(law), value_discretization_interval=grid)
    accountant.compose(dp.SelfComposedDpEvent(event, steps))
    return float(accountant.get_epsilon(delta))


def _typical_loss(law: StepLaw) -> float:
    """Standard deviation of one step's privacy loss, roughly: q sqrt(chi^2), capped."""
    u = sensitivity_factor(law.relation) / law.noise_multiplier
    if law.distribution == "laplace":
        u = min(u, 4.0)
        chi2 = (2 * math.exp(u) + math.exp(-2 * u)) / 3 - 1
    else:
        chi2 = math.expm1(min(u, 2.0) ** 2)
    return law.probability * math.sqrt(chi2)


def _largest_loss(law: StepLaw) -> float:
    """Width of the loss range that one step's discretisation covers (ten deviations)."""
    factor = 2.0 if law.sampling == "truncated_poisson" else sensitivity_factor(law.relation)
    u = factor / law.noise_multiplier
    tail = u if law.distribution == "laplace" else u * (10.0 + u / 2)
    q = 1.0 if law.sampling == "truncated_poisson" else law.probability
    return 2 * (math.log1p(q * math.expm1(tail)) if tail < 30 else max(tail + math.log(q), 1e-3))


def _pure_epsilon(law: StepLaw, steps: int) -> float:
    """Pure epsilon of T Laplace releases, each amplified to log(1 + q (e^eps - 1))."""
    one = sensitivity_factor(law.relation) / law.noise_multiplier
    if law.probability == 1.0:
        return steps * one * (1 + 1e-12)
    if one > 500:
        return math.inf
    return steps * math.log1p(law.probability * math.expm1(one)) * (1 + 1e-12)


def _lemma_epsilon(sigma: float, steps: int, delta: float) -> float:
    """Inverts sigma = 4 sqrt(2 T log(e + eps/delta)) / eps (DPZero, Lemma 2.2, on the sum).

    The lemma puts std 2 Delta sqrt(2 T log(e + eps/delta)) / eps on the mean, Delta = 2C/n; times
    n / C that is the multiplier. Its right-hand side falls in eps, so bisection finds the root.
    """
    low, high = 0.0, 1.0
    while lemma_noise_multiplier(high, steps, delta) > sigma:
        low, high = high, high * 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if lemma_noise_multiplier(middle, steps, delta) > sigma:
            low = middle
        else:
            high = middle
    return high


def lemma_noise_multiplier(epsilon: float, steps: int, delta: float) -> float:
    """The DPZero paper's noise: std on the mean times n / C (Lemma 2.2 with Delta = 2C/n).

    >>> round(lemma_noise_multiplier(6.0, 10_000, 1e-5), 1)
    343.9
    """
    return 4 * math.sqrt(2 * steps * math.log(math.e + epsilon / delta)) / epsilon


def _relation(law: StepLaw) -> Any:
    """dp-accounting's relation. Laplace events carry the factor of replace_one themselves."""
    from dp_accounting import NeighboringRelation

    if law.distribution == "laplace":
        return NeighboringRelation.ADD_OR_REMOVE_ONE
    return NeighboringRelation[law.relation.upper()]


def _check_delta(delta: float, law: StepLaw) -> None:
    if delta == 0 and law.distribution == "laplace":
        return
    if not MIN_DELTA <= delta < 1:
        raise ValueError(
            f"delta={delta} is outside [{MIN_DELTA}, 1); choose one well below 1/n "
            "(delta=0 needs distribution='laplace')."
        )


def calibrated_noise_multiplier(
    law: StepLaw, steps: int, *, epsilon: float, delta: float, tolerance: float = 4e-4
) -> float:
    """The smallest noise multiplier whose epsilon at `delta` is at most `epsilon`.

    Args:
      law: one step; its own noise multiplier is ignored.
      steps: T >= 1.
      epsilon: target > 0.
      delta: as in `epsilon_after`.
      tolerance: relative distance to the smallest multiplier.

    Returns:
      sigma with epsilon_after(sigma) <= epsilon, at least 2^-10.

    Raises:
      ValueError: the target is not positive, or no multiplier up to 2^25 reaches it.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"target epsilon={epsilon} must be finite and positive.")

    def spent(sigma: float) -> float:
        return epsilon_after(replace(law, noise_multiplier=sigma), steps, delta)

    start = _first_guess(law, steps, epsilon, delta)
    return smallest_argument(spent, epsilon, start, tolerance)


def _first_guess(law: StepLaw, steps: int, epsilon: float, delta: float) -> float:
    """A multiplier of the right size, from a cheaper question with nearly the same answer."""
    if law.accountant == "advanced_composition":
        return lemma_noise_multiplier(epsilon, steps, delta)
    if law.sampling == "truncated_poisson":
        plain = replace(law, sampling="poisson", max_batch_size=0)
        return calibrated_noise_multiplier(plain, steps, epsilon=epsilon, delta=delta)
    if law.distribution == "laplace":
        return max(1.0, law.probability * math.sqrt(steps)) / epsilon
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    mu = sensitivity_factor(law.relation) / float(get_sigma_gaussian(epsilon, max(delta, 1e-300)))
    # Central limit for subsampled Gaussians: mu = q sqrt(T (e^(1/sigma^2) - 1)), Dong et al. 2022.
    ratio = mu / (law.probability * math.sqrt(steps) * sensitivity_factor(law.relation))
    guess = sensitivity_factor(law.relation) / math.sqrt(math.log1p(ratio**2))
    if accountant_used(law) != "pld" or not math.isfinite(guess):
        return guess
    rough = partial(_rough_epsilon, law, steps, delta)
    return smallest_argument(rough, epsilon, guess, tolerance=1e-3)


def _rough_epsilon(law: StepLaw, steps: int, delta: float, noise_multiplier: float) -> float:
    """Epsilon on the coarse grid: an upper bound within a percent or so, at a tenth of the cost."""
    law = replace(law, noise_multiplier=noise_multiplier)
    return _pld_epsilon_on_grid(law, step_event(law), steps, delta, _coarse_grid(law))


def _coarse_grid(law: StepLaw) -> float:
    return max(_typical_loss(law) / 4, _largest_loss(law) / 2**14, 1e-10)


def smallest_argument(
    f: Callable[[float], float], target: float, start: float, tolerance: float
) -> float:
    """The smallest x in the allowed noise multipliers with f(x) <= target, f decreasing.

    Secant steps on (log x, log f), kept inside a bracket; ends at an x that was evaluated and
    found to satisfy the target.

    Raises:
      ValueError: f exceeds the target up to the largest multiplier.
    """
    low, high = math.log(MIN_NOISE_MULTIPLIER), math.log(MAX_NOISE_MULTIPLIER)
    best, slope, last = math.inf, -1.0, (math.nan, math.nan)
    x = min(max(math.log(start), low), high)
    for attempt in range(80):
        y = math.log(max(f(math.exp(x)), 1e-300) / target)
        if y <= 0:
            best, high = math.exp(x), x
        else:
            low = x
        slope, last = _slope(last, (x, y), slope), (x, y)
        close = attempt > 0 and 0 <= y / slope <= tolerance
        if close or high - low <= tolerance:
            break
        x = _next_point(x, y, slope, low, high, tolerance, bisect=attempt >= 20)
    at_an_end = high - low <= tolerance and low == math.log(MIN_NOISE_MULTIPLIER)
    return _ends(f, target) if at_an_end or math.isinf(best) else best


def _slope(last: tuple[float, float], new: tuple[float, float], previous: float) -> float:
    """d log f / d log x through two points; at most -1/5, and `previous` where it is undefined."""
    (x0, y0), (x1, y1) = last, new
    if not (math.isfinite(y0) and math.isfinite(y1)) or x0 == x1:
        return previous
    return min((y1 - y0) / (x1 - x0), -0.2)


def _next_point(
    x: float, y: float, slope: float, low: float, high: float, tolerance: float, *, bisect: bool
) -> float:
    """The secant's root plus a third of the tolerance: just on the side that keeps the target."""
    guess = x - y / slope + tolerance / 3 if math.isfinite(y) else math.nan
    return guess if low < guess < high and not bisect else (low + high) / 2


def _ends(f: Callable[[float], float], target: float) -> float:
    for sigma in (MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER):
        if f(sigma) <= target:
            return sigma
    raise ValueError(
        f"target epsilon={target} cannot be reached: noise_multiplier={MAX_NOISE_MULTIPLIER:.3g} "
        f"still costs epsilon={f(MAX_NOISE_MULTIPLIER):.4g}; use fewer steps, a larger data set, "
        "a smaller batch, or a larger delta."
    )
