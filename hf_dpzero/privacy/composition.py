"""Epsilon of several runs on the same data together: a run that another one continues from.

All runs are under one neighbouring relation on the same n examples, so the events of all their steps
compose: the pair of neighbours is the same one in each. Slacks for discrete noise add up, because
log-likelihood ratios do (`discretization.py`). Composition allows a later run to depend on what earlier
ones released (its starting weights do), for settings that were fixed without looking at it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from hf_dpzero.privacy.accounting import (
    MIN_DELTA,
    coarse_grid,
    epsilon_after,
    first_guess,
    largest_loss,
    pure_epsilon,
    rdp_accountant,
    smallest_argument,
    typical_loss,
)
from hf_dpzero.privacy.discretization import DENSE_DELTA, dense_slack, discretisation_slack
from hf_dpzero.privacy.events import StepSpec, accountant_used, library_relation, step_event
from hf_dpzero.privacy.heterogeneous import MOST_LEVELS, composed_epsilon, grouped

Part = tuple[StepSpec, int]
"""A run as the accounting sees it: one step, and how many of them were taken."""


FEW_LEVELS, ALL_LEVELS = 24, 4096
"""Different noise multipliers that are told apart: where dp-accounting composes one after another; where
a full batch makes them one Gaussian."""


@lru_cache(maxsize=4096)
def epsilon_together(parts: tuple[Part, ...], delta: float) -> float:
    """Epsilon at `delta` of all steps of all parts, an upper bound.

    Args:
      parts: runs on the same data; equal steps are added up, and one part alone costs what
        `epsilon_after` says.
      delta: as there; 0 needs Laplace noise everywhere.

    Returns:
      Epsilon >= 0, perhaps infinity.

    Raises:
      ValueError: the parts have no common account, or delta is out of range.
    """
    merged: dict[StepSpec, int] = {}
    for spec, steps in parts:
        merged[spec] = merged.get(spec, 0) + steps
    parts = tuple((spec, steps) for spec, steps in merged.items() if steps)
    if len(parts) < 2:
        return epsilon_after(*parts[0], delta) if parts else 0.0
    name = common_accountant(parts)
    pure = all(spec.distribution == "laplace" for spec, _ in parts)
    if not MIN_DELTA <= delta < 1 and not (delta == 0 and pure):
        raise ValueError(
            f"delta={delta} is outside [{MIN_DELTA}, 1), where runs are composed; choose one well "
            "below 1/n (delta=0 needs distribution='laplace' in every run)."
        )
    bound = math.fsum(pure_epsilon(spec, steps) for spec, steps in parts) if pure else math.inf
    return min(bound, _with_slack(parts, delta, _ACCOUNTS[name])) if delta else bound


def _with_slack(
    parts: Sequence[Part], delta: float, account: Callable[[Sequence[Part], float], float]
) -> float:
    """Epsilon of discrete noise from that of real-valued noise, as in `accounting.epsilon_after`."""
    h = math.fsum(
        discretisation_slack(spec.noise_multiplier, steps * spec.num_directions)
        for spec, steps in parts
        if spec.distribution == "gaussian"
    )
    draws = sum(steps * spec.dense_draws for spec, steps in parts)
    share = DENSE_DELTA if draws else 1.0
    epsilon = max(0.0, account(parts, share * delta * math.exp(-h))) + 2 * h
    return epsilon + 2 * dense_slack(draws, epsilon, delta)


def common_accountant(parts: Sequence[Part]) -> str:
    """The accountant that composes all parts: "gaussian_exact", "pld" or "rdp".

    Raises:
      ValueError: there is none; says which accountants the parts have.
    """
    names = {accountant_used(spec) for spec, _ in parts}
    if len({spec for spec, _ in parts}) == 1:
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
        "here: give the later run the accountant, sampling and noise_distribution of the earlier one."
    )


def _gaussian(parts: Sequence[Part], delta: float) -> float:
    """Full-batch Gaussians of any multipliers are one: precisions (Delta / sigma)^2 add up."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    squares = (n * (spec.sensitivity / spec.noise_multiplier) ** 2 for spec, n in parts)
    epsilon = float(get_epsilon_gaussian(1 / math.sqrt(math.fsum(squares)), delta))
    return epsilon * (1 + 1e-9) + 1e-11 if epsilon > 0 else 0.0


def _rdp(parts: Sequence[Part], delta: float) -> float:
    import dp_accounting as dp

    accountant = rdp_accountant(library_relation(parts[0][0]))
    for spec, steps in parts:
        accountant.compose(dp.SelfComposedDpEvent(step_event(spec), steps))
    return float(accountant.get_epsilon(delta))


def _pld(parts: Sequence[Part], delta: float) -> float:
    """On a grid fitted to all parts; of truncated events the worse of two sizes of the data set."""
    steps = sum(steps for _, steps in parts)
    error = steps * 2.0**-53 + 1e-15 * (
        2 * len(parts) - 1
    )  # `accounting`, and one for each convolution
    if delta < 4 * error:
        raise ValueError(
            f"delta={delta} with {steps} steps in all: the PLD accountant's floating-point error is up "
            f"to {error:.2g}; use a delta of at least {4 * error:.2g}."
        )
    two_sizes = any(
        spec.sampling == "truncated_poisson" and spec.relation == "add_or_remove_one"
        for spec, _ in parts
    )
    return max(
        _pld_on_fitted_grid(parts, delta - error, n)
        for n in ((False, True) if two_sizes else (False,))
    )


def _pld_on_fitted_grid(parts: Sequence[Part], delta: float, smaller: bool) -> float:
    """As `accounting._pld_on_fitted_grid`: a coarse pass for the size of the answer, then a fine one."""
    if _together(parts):
        return _many_levels(parts, delta)
    widest = max(largest_loss(spec) for spec, _ in parts)
    rough = max(min(coarse_grid(spec) for spec, _ in parts), widest / 2**15)
    coarse = _pld_on_grid(parts, delta, smaller, rough)
    total = coarse if math.isfinite(coarse) else 0.0
    fine = min(min(typical_loss(spec) for spec, _ in parts) / 64, 1e-3)
    grid = max(fine, widest / 2**18, total / 2**17, 1e-10)
    return min(coarse, _pld_on_grid(parts, delta, smaller, grid))


def composes_at_once(spec: StepSpec) -> bool:
    """Whether `heterogeneous` knows a step: a Gaussian sum that an example moves by its bound once."""
    plain = spec.sampling in ("poisson", "full_batch") and spec.distribution == "gaussian"
    return plain and spec.sensitivity == 1


def _together(parts: Sequence[Part]) -> bool:
    same = len({spec.probability for spec, _ in parts}) == 1
    return same and all(composes_at_once(spec) for spec, _ in parts)


def _many_levels(parts: Sequence[Part], delta: float) -> float:
    """On a grid of a 64th of the typical loss of a step, but of at most 2^18 points in all."""
    levels = [(spec.noise_multiplier, steps) for spec, steps in parts]
    steps = sum(count for _, count in levels)
    typical = math.sqrt(sum(typical_loss(spec) ** 2 * count for spec, count in parts) / steps)
    widest = max(largest_loss(spec) for spec, _ in parts)
    q = parts[0][0].probability
    rough = max(typical / 4, widest / 2**14, 1e-10)
    coarse = composed_epsilon(levels, q, delta, rough)
    total = coarse if math.isfinite(coarse) else 0.0
    grid = max(min(typical / 64, 1e-3), widest / 2**17, total / 2**17, 1e-10)
    return coarse if grid >= rough else min(coarse, composed_epsilon(levels, q, delta, grid))


def _pld_on_grid(parts: Sequence[Part], delta: float, smaller: bool, grid: float) -> float:
    import dp_accounting as dp
    from dp_accounting import pld

    accountant = pld.PLDAccountant(
        library_relation(parts[0][0]), value_discretization_interval=grid
    )
    for spec, steps in parts:
        accountant.compose(dp.SelfComposedDpEvent(_event(spec, smaller), steps))
    return float(accountant.get_epsilon(delta))


def _event(spec: StepSpec, smaller: bool) -> Any:
    """A step's event; `smaller` takes the pair (n, n - 1) of a truncated one for (n + 1, n)."""
    event = step_event(spec)
    if not (smaller and spec.sampling == "truncated_poisson"):
        return event
    import attr

    return attr.evolve(event, dataset_size=spec.num_examples)


_ACCOUNTS = {"gaussian_exact": _gaussian, "pld": _pld, "rdp": _rdp}


def calibrated_after(
    before: tuple[Part, ...],
    at: Callable[[float], tuple[Part, ...]],
    *,
    epsilon: float,
    delta: float,
    tolerance: float = 4e-4,
) -> float:
    """The smallest noise multiplier of a new run with which all runs together keep to `epsilon`.

    Args:
      before: the earlier runs; none is allowed.
      at: noise multiplier -> the new run, perhaps of several kinds of steps.
      epsilon: of all runs together, > 0.
      delta: as in `epsilon_together`.
      tolerance: relative distance to the smallest multiplier.

    Returns:
      sigma with epsilon_together((*before, at(sigma))) <= epsilon.

    Raises:
      ValueError: the earlier runs have spent it all, or no multiplier reaches the target.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"target epsilon={epsilon} must be finite and positive.")
    spent = epsilon_together(before, delta)
    if spent >= epsilon:
        raise ValueError(
            f"target epsilon={epsilon:g} at delta={delta:g} is the total with the runs before, which "
            f"have spent {spent:.4g} of it: nothing is left. Give a larger target_epsilon."
        )

    def excess(total: float) -> float:
        """About proportional to 1 / sigma, as the new run's own epsilon is."""
        return math.sqrt(max(total**2 - spent**2, 0.0))

    def beyond(sigma: float) -> float:
        return excess(epsilon_together((*before, *at(sigma)), delta))

    new = at(1.0)
    steps = sum(count for _, count in new)
    start = first_guess(replace(new[0][0], noise_multiplier=1.0), steps, excess(epsilon), delta)
    return smallest_argument(beyond, excess(epsilon), start, tolerance)


def scheduled_parts(spec: StepSpec, effective: np.ndarray) -> tuple[Part, ...]:
    """Parts of steps whose effective noise multipliers are these; as few as the accountant needs."""
    if not len(effective):
        return ()
    most = FEW_LEVELS
    if accountant_used(spec) == "gaussian_exact":
        most = ALL_LEVELS
    elif accountant_used(spec) == "pld" and composes_at_once(spec):
        most = MOST_LEVELS
    levels = grouped(effective, most)
    return tuple((replace(spec, noise_multiplier=sigma), count) for sigma, count in levels)
