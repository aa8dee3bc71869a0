"""From what runs do to the epsilon that they cost together; the way back is `calibration`.

Which event and accountant describe a step is decided in `events.py`.

*Several kinds of steps* (a schedule, a run that another one continues from) are on the same n examples
under one neighbouring relation, so the events of all of them compose: the pair of neighbours is the same
one in each. Slacks for discrete noise add up, because log-likelihood ratios do (`discretization.py`).
Composition allows a later step to depend on what earlier ones released (a later run's starting weights
do), for settings that were fixed without looking at it.

*Numerical error.* PLD results are pessimistic in their discretisation and tail truncation. Their
floating-point error is one in delta: T-fold self-composition raises Fourier coefficients, each with a
relative error of about 2^-53, to the power T. So epsilon is evaluated at delta - (T 2^-53 + 1e-15), and
refused where that is not most of delta: at T = 10^6 and delta = 3e-12 the library's answer is 6 % below
the truth. Grids stay near 1/64 of the typical loss of one step, where an independent accountant
(`bracket`) agrees to 1e-3.

*Number of steps.* dp-accounting raises the size of a grid to the power T as a Python integer on its way,
which takes longer than the run from some T on: above `MAX_PLD_STEPS` the PLD accountant is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

import numpy as np

from hf_dpzero.privacy.described import bisected
from hf_dpzero.privacy.discretization import DENSE_DELTA, dense_slack, discretisation_slack
from hf_dpzero.privacy.events import (
    Part,
    StepSpec,
    accountant_used,
    check_sound,
    composed_event,
    library_relation,
    step_event,
)
from hf_dpzero.privacy.heterogeneous import MOST_LEVELS, composed_epsilon, grouped

if TYPE_CHECKING:
    from dp_accounting import NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from dp_accounting.rdp import RdpAccountant

MIN_DELTA = 1e-12
"""Below this delta the accountants' tail truncation and floating-point errors matter in any run."""
MAX_PLD_STEPS = 2_000_000
"""A calibration takes about a minute there, a quarter of an hour at five times as many."""
FEW_LEVELS, ALL_LEVELS = 24, 4096
"""Different noise multipliers that are told apart: where dp-accounting composes one after another; where
a full batch makes them one Gaussian."""


def epsilon_after(spec: StepSpec, steps: int, delta: float) -> float:
    """Returns `epsilon_together` of `steps` adaptive steps of one kind."""
    return epsilon_together(((spec, steps),), delta)


@lru_cache(maxsize=4096)  # logs, reports and checks ask for the same steps again
def epsilon_together(parts: tuple[Part, ...], delta: float) -> float:
    """Returns epsilon at `delta` of all steps of all parts, an upper bound.

    Args:
      parts: kinds of steps on the same data, T >= 0 of each; equal kinds are added up. A
        `noise_multiplier` of 0 gives infinity.
      delta: in [1e-12, 1); 0 is allowed for Laplace noise, which has a pure epsilon.

    Returns:
      Epsilon >= 0, perhaps infinity.

    Raises:
      ValueError: an unsound combination, no common account, or a delta out of range.
    """
    for spec, _ in parts:
        check_sound(spec)
    pure = all(spec.distribution == "laplace" for spec, _ in parts)
    if not MIN_DELTA <= delta < 1 and not (delta == 0 and pure):
        raise ValueError(
            f"delta={delta} is outside [{MIN_DELTA}, 1); choose one well below 1/n "
            "(delta=0 needs distribution='laplace')."
        )
    parts = tuple((spec, steps) for spec, steps in parts if steps)
    if not parts:
        return 0.0
    if not all(spec.noise_multiplier for spec, _ in parts):
        return math.inf
    account, events = _ACCOUNTS[common_accountant(parts)], _events(parts)
    bound = math.fsum(pure_epsilon(spec, steps) for spec, steps in parts) if pure else math.inf
    if not delta:
        return bound
    return min(bound, _on_grids(parts, delta, lambda left: account(events, left)))


def _on_grids(parts: Sequence[Part], delta: float, account: Callable[[float], float]) -> float:
    """Returns the epsilon of noise on grids, of that of real noise at a delta."""
    h, draws = grid_slack(parts)
    share = DENSE_DELTA if draws else 1.0
    epsilon = max(0.0, account(share * delta * math.exp(-h))) + 2 * h
    return epsilon + 2 * dense_slack(draws, epsilon, delta)


@lru_cache(maxsize=64)
def epsilon_of_group(parts: tuple[Part, ...], delta: float, examples: int) -> float:
    """Returns epsilon at `delta` for several examples that are added or removed together.

    Each is sampled by itself, so a step's sum moves by as many bounds as a binomial number says, and the
    worst is that all point one way: a mixture of Gaussians (Ganesh 2024, "Tight group-level DP
    guarantees for DP-SGD with sampling via mixture of Gaussians mechanisms", arXiv:2401.10294). Where
    one costs a Gaussian mu, m cost m mu, also under replace_one (Dong, Roth and Su, arXiv:1905.02383).

    Args:
      parts: as `epsilon_together`.
      delta: in [1e-12, 1).
      examples: m >= 1; the grid of privacy losses grows with it.

    Returns:
      An upper bound, at least that of one example.

    Raises:
      ValueError: another sampler, noise or relation.
    """
    from dp_accounting.pld.privacy_loss_distribution import (
        from_gaussian_mechanism,
        from_mixture_gaussian_mechanism,
    )
    from scipy.stats import binom

    parts = tuple((spec, steps) for spec, steps in parts if steps)
    if parts and gaussian_mu(parts) is not None:
        moved = [(replace(s, noise_multiplier=s.noise_multiplier / examples), n) for s, n in parts]
        return _on_grids(parts, delta, lambda left: _gaussian(moved, left))
    for spec, _ in parts:
        known = spec.sampling in ("poisson", "full_batch") and spec.distribution == "gaussian"
        little = examples > 2000 * spec.noise_multiplier**2  # grids of above 10^6 points
        if not known or spec.relation == "replace_one" or little:
            raise ValueError(
                f"no bound for several examples together of sampling={spec.sampling!r}, "
                f"{spec.distribution} noise of multiplier {spec.noise_multiplier:g} and "
                f"{spec.relation}: known is Gaussian noise with poisson or full_batch, without "
                "replace_one, of a squared multiplier of at least a 2000th of the examples."
            )

    # A tenth of what a step's loss is like: a finer grid is hardly tighter (0.4 %) and slow.
    typical = min((typical_loss(spec) for spec, _ in parts), default=0.0)
    grid = examples * min(max(typical / 10, 1e-3), 3e-2)

    def account(left: float) -> float:
        found = []
        for spec, steps in parts:
            if spec.probability == 1:  # the library fails at some mixtures of one Gaussian
                multiplier = spec.noise_multiplier / examples
                step = from_gaussian_mechanism(multiplier, value_discretization_interval=grid)
            else:
                chances = binom.pmf(np.arange(examples + 1), examples, spec.probability)
                often = np.flatnonzero(chances)
                step = from_mixture_gaussian_mechanism(
                    spec.noise_multiplier,
                    often.astype(float).tolist(),
                    chances[often].tolist(),
                    value_discretization_interval=grid,
                )
            found.append(step.self_compose(steps))
        whole = reduce(lambda a, b: a.compose(b), found)
        error = sum(steps for _, steps in parts) * 2.0**-53 + 1e-15 * (
            2 * len(parts) - 1
        )  # as `_pld`
        return float(whole.get_epsilon_for_delta(left - error)) if left > 4 * error else math.inf

    return _on_grids(parts, delta, account) if parts else 0.0


def grid_slack(parts: Sequence[Part]) -> tuple[float, int]:
    """Returns h of all discrete noise, and the number of noised coordinates (`discretization.py`)."""
    h = math.fsum(
        discretisation_slack(spec.noise_multiplier, steps * spec.num_directions)
        for spec, steps in parts
        if spec.distribution == "gaussian"
    )
    return h, sum(steps * spec.dense_draws for spec, steps in parts)


def _events(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Adds up equal steps, whatever their number of noisy coordinates, which `grid_slack` counts."""
    merged: dict[StepSpec, int] = {}
    for spec, steps in parts:
        event = replace(spec, num_directions=1, dense_draws=0)
        merged[event] = merged.get(event, 0) + steps
    return tuple(merged.items())


def common_accountant(parts: Sequence[Part]) -> str:
    """Returns the accountant that composes all parts, by its name in `_ACCOUNTS`.

    Raises:
      ValueError: there is none; says which accountants the parts have.
    """
    names = {accountant_used(spec) for spec, _ in parts}
    if len(_events(parts)) == 1:
        return names.pop()
    if len({library_relation(spec) for spec, _ in parts}) == 1:
        if names == {"gaussian_exact"}:
            return "gaussian_exact"
        if names <= {"gaussian_exact", "pld"}:
            return "pld"
        if names == {"rdp"}:
            return "rdp"
    raise ValueError(
        f"runs under the accountants {', '.join(sorted(names))} with "
        f"{', '.join(sorted({spec.distribution for spec, _ in parts}))} noise have no common account "
        "here: give the later run the accountant, sampling and noise_distribution of the earlier one; "
        "in a sweep, vary settings that leave these alone."
    )


def gaussian_mu(parts: Sequence[Part]) -> float | None:
    """Returns mu of the one Gaussian that full-batch Gaussian steps are, without grids; else None."""
    if any((s.sampling, s.distribution) != ("full_batch", "gaussian") for s, _ in parts):
        return None
    return math.sqrt(math.fsum(n * (s.sensitivity / s.noise_multiplier) ** 2 for s, n in parts))


def _gaussian(parts: Sequence[Part], delta: float) -> float:
    """Full-batch Gaussians are one: precisions (Delta / sigma)^2 add up (Balle and Wang 2018)."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    if len(parts) == 1:
        ((spec, steps),) = parts
        sigma = spec.noise_multiplier / spec.sensitivity / math.sqrt(steps)
    else:
        squares = (n * (spec.sensitivity / spec.noise_multiplier) ** 2 for spec, n in parts)
        sigma = 1 / math.sqrt(math.fsum(squares))
    epsilon = float(get_epsilon_gaussian(sigma, delta))
    # The library finds a root numerically: a little more is a bound whatever its last bits are.
    return epsilon * (1 + 1e-9) + 1e-11 if epsilon > 0 else 0.0


def _lemma(parts: Sequence[Part], delta: float) -> float:
    """Inverts sigma = 4 sqrt(2 T log(e + eps/delta)) / eps (DPZero, Lemma 2.2, on the sum)."""
    # The lemma puts std 2 Delta sqrt(2 T log(e + eps/delta)) / eps on the mean, Delta = 2C/n; times
    # n / C that is the multiplier. Its right-hand side falls in eps, so bisection finds the root. For
    # epsilons in the hundreds it promises less than Gaussians cost: never less than the exact account.
    ((spec, steps),) = parts
    sigma = spec.noise_multiplier * 2 / spec.sensitivity
    _, high = bisected(lambda e: lemma_noise_multiplier(e, steps, delta) > sigma, 0.0, 1.0, 1e-12)
    return max(high, _gaussian(parts, delta))


def _rdp(parts: Sequence[Part], delta: float) -> float:
    accountant = rdp_accountant(library_relation(parts[0][0]))
    accountant.compose(composed_event(parts))
    return float(accountant.get_epsilon(delta))


def rdp_accountant(relation: NeighboringRelation) -> RdpAccountant:
    """Returns the library's RDP accountant for one of its own relations.

    An order whose series does not converge is left out, which can only raise epsilon; the library's
    line about each of them is kept out of the log.
    """
    from dp_accounting import rdp

    logging.getLogger("absl").addFilter(_is_no_left_out_order)
    return rdp.RdpAccountant(neighboring_relation=relation)


def _is_no_left_out_order(record: logging.LogRecord) -> bool:
    return "failed to converge" not in str(record.msg)


def _pld(parts: Sequence[Part], delta: float) -> float:
    steps = sum(steps for _, steps in parts)
    # what floating-point arithmetic may hide of delta: the module, and one for each convolution
    error = steps * 2.0**-53 + 1e-15 * (2 * len(parts) - 1)
    if delta < 4 * error:
        way_out = "accountant='rdp', " if _rdp_knows(parts) else ""
        raise ValueError(
            f"delta={delta} with {steps} steps: the PLD accountant's floating-point error is up to "
            f"{error:.2g}; use {way_out}delta of at least {4 * error:.2g}, or fewer steps."
        )
    # A truncated event has n or n + 1 examples where one is added or removed: the worse of the two.
    two_sizes = any(
        spec.sampling == "truncated_poisson" and spec.relation == "add_or_remove_one"
        for spec, _ in parts
    )
    sizes = (False, True) if two_sizes else (False,)
    return max(_pld_on_fitted_grid(parts, delta - error, smaller) for smaller in sizes)


_ACCOUNTS = {"gaussian_exact": _gaussian, "pld": _pld, "rdp": _rdp, "advanced_composition": _lemma}


def _rdp_knows(parts: Sequence[Part]) -> bool:
    try:
        for spec, _ in parts:
            check_sound(replace(spec, accountant="rdp"))
    except ValueError:
        return False
    return True


def _pld_on_fitted_grid(parts: Sequence[Part], delta: float, smaller: bool) -> float:
    """Makes one coarse pass for the size of the answer, and one on a grid fine enough for it.

    The result is a bound on any grid; the grid decides only how tight it is and how long it takes.
    """
    specs = [spec for spec, _ in parts]
    at_once = len(parts) > 1 and all(map(composes_at_once, specs))
    widest = max(map(largest_loss, specs))
    if at_once:
        kinds = [(spec.noise_multiplier, spec.probability, steps) for spec, steps in parts]
        squares = sum(typical_loss(spec) ** 2 * steps for spec, steps in parts)
        typical = math.sqrt(squares / sum(steps for _, steps in parts))
        points = max(2**17, 2**21 // len(parts))
        rough = max(typical / 4, widest / 2**14, 1e-10)
    else:
        # One grid for all: what one kind with wide losses needs may not swamp another's small ones.
        typical, points = min(map(typical_loss, specs)), 2**17 if len(parts) == 1 else 2**18
        rough = max(min(map(coarse_grid, specs)), widest / 2**15)

    def epsilon(grid: float) -> float:
        if at_once:
            return composed_epsilon(kinds, delta, grid)
        return _pld_on_grid(parts, delta, smaller, grid)

    found, grid = epsilon(rough), rough
    while True:  # each is a bound, so the smallest may be taken
        total = found if math.isfinite(found) else 0.0
        finer = max(min(typical / 64, 1e-3), widest / points, total / 2**17, 1e-10)
        if at_once:
            # A coarse bound may be so large that it asks for a coarse grid again: step by step.
            finer = max(min(typical / 64, 1e-3), widest / points, total / 2**20, grid / 8, 1e-10)
        if finer >= grid:
            return found
        found, grid = min(found, epsilon(finer)), finer
        if not at_once:
            return found


def _pld_on_grid(parts: Sequence[Part], delta: float, smaller: bool, grid: float) -> float:
    from dp_accounting import pld

    if (most := max(steps for _, steps in parts)) > MAX_PLD_STEPS:
        way_out = "use accountant='rdp', or take fewer" if _rdp_knows(parts) else "take fewer"
        raise ValueError(
            f"{most} steps are more than the PLD accountant composes in reasonable time, "
            f"{MAX_PLD_STEPS}: {way_out} steps with a larger batch."
        )
    (first, steps), *others = parts
    relation = library_relation(first)
    if (first.sampling, first.distribution) == ("poisson", "gaussian") and not others:
        one = _sampled_gaussian(step_event(first), relation, grid)
        return float(one.self_compose(steps).get_epsilon_for_delta(delta))
    accountant = pld.PLDAccountant(relation, value_discretization_interval=grid)
    accountant.compose(composed_event(parts, smaller))
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=4)  # it takes longest, and logs ask for more and more steps of one kind
def _sampled_gaussian(
    event: PoissonSampledDpEvent, relation: NeighboringRelation, grid: float
) -> PrivacyLossDistribution:
    """Returns the privacy loss of one step, as `PLDAccountant` makes it."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(
        event.event.noise_multiplier,
        value_discretization_interval=grid,
        sampling_prob=event.sampling_probability,
        neighboring_relation=relation,
    )


def composes_at_once(spec: StepSpec) -> bool:
    """Says whether `heterogeneous` knows a step: a Gaussian sum, moved by its bound once."""
    plain = spec.sampling in ("poisson", "full_batch") and spec.distribution == "gaussian"
    return plain and spec.sensitivity == 1


def coarse_grid(spec: StepSpec) -> float:
    """Returns a discretisation that shows the size of an epsilon, cheaply."""
    return max(typical_loss(spec) / 4, largest_loss(spec) / 2**14, 1e-10)


def typical_loss(spec: StepSpec) -> float:
    """Returns the standard deviation of a step's privacy loss, roughly: q sqrt(chi^2), capped."""
    u = spec.sensitivity / spec.noise_multiplier
    if spec.distribution == "laplace":
        u = min(u, 4.0)
        chi2 = (2 * math.exp(u) + math.exp(-2 * u)) / 3 - 1
    else:
        chi2 = math.expm1(min(u, 2.0) ** 2)
    return spec.probability * math.sqrt(chi2)


def largest_loss(spec: StepSpec) -> float:
    """Returns the width of the loss range that one step's discretisation covers (ten deviations)."""
    factor = 2.0 if spec.sampling == "truncated_poisson" else spec.sensitivity
    u = factor / spec.noise_multiplier
    tail = u if spec.distribution == "laplace" else u * (10.0 + u / 2)
    q = 1.0 if spec.sampling == "truncated_poisson" else spec.probability
    return 2 * (math.log1p(q * math.expm1(tail)) if tail < 30 else max(tail + math.log(q), 1e-3))


def pure_epsilon(spec: StepSpec, steps: int) -> float:
    """Returns the pure epsilon of T Laplace releases, each amplified to log(1 + q (e^eps - 1))."""
    one = spec.sensitivity / spec.noise_multiplier
    if spec.probability == 1.0:
        return steps * one * (1 + 1e-12)
    if one > 500:
        return math.inf
    return steps * math.log1p(spec.probability * math.expm1(one)) * (1 + 1e-12)


def lemma_noise_multiplier(epsilon: float, steps: int, delta: float) -> float:
    """Returns the DPZero paper's noise: std on the mean times n / C (Lemma 2.2, Delta = 2C/n).

    Args:
      epsilon: target > 0.
      steps: T.
      delta: in (0, 1).

    >>> round(lemma_noise_multiplier(6.0, 10_000, 1e-5), 1)
    343.9
    """
    return 4 * math.sqrt(2 * steps * math.log(math.e + epsilon / delta)) / epsilon


def scheduled_parts(spec: StepSpec, effective: np.ndarray) -> tuple[Part, ...]:
    """Returns steps of these effective noise multipliers as parts, as few as the accountant needs."""
    if not len(effective):
        return ()
    most = FEW_LEVELS
    if accountant_used(spec) == "gaussian_exact":
        most = ALL_LEVELS
    elif accountant_used(spec) == "pld" and composes_at_once(spec):
        most = MOST_LEVELS
    levels = grouped(effective, most)
    return tuple((replace(spec, noise_multiplier=sigma), count) for sigma, count in levels)
