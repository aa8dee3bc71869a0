"""From a target epsilon to the noise that a run needs."""

from __future__ import annotations

import math
from collections.abc import Callable

from hf_dpzero.privacy.accounting import epsilon_together, lemma_noise_multiplier
from hf_dpzero.privacy.events import Part, StepSpec
from hf_dpzero.privacy.mechanisms.base import MAX_NOISE_MULTIPLIER, MIN_NOISE_MULTIPLIER


def calibrated_noise_multiplier(
    at: Callable[[float], tuple[Part, ...]],
    *,
    epsilon: float,
    delta: float,
    before: tuple[Part, ...] = (),
    tolerance: float = 4e-4,
) -> float:
    """Returns the smallest noise multiplier of a run with which it and earlier runs keep to `epsilon`.

    Args:
      at: noise multiplier -> the run, perhaps of several kinds of steps.
      epsilon: of all runs together, > 0.
      delta: as in `epsilon_together`.
      before: the earlier runs.
      tolerance: relative distance to the smallest multiplier.

    Returns:
      sigma with epsilon_together((*before, *at(sigma))) <= epsilon, at least 2^-10.

    Raises:
      ValueError: the target is not positive, the earlier runs have spent it all, or no multiplier up to
        2^25 reaches it.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"target epsilon={epsilon} must be finite and positive.")
    spent = epsilon_together(before, delta) if before else 0.0
    if spent >= epsilon:
        raise ValueError(
            f"target epsilon={epsilon:g} at delta={delta:g} is the total with the runs before, which "
            f"have spent {spent:.4g} of it: nothing is left. Give a larger target_epsilon."
        )

    def excess(total: float) -> float:
        # about proportional to 1 / sigma, as the new run's own epsilon is
        return math.sqrt(max(total**2 - spent**2, 0.0))

    def beyond(sigma: float) -> float:
        return excess(epsilon_together((*before, *at(sigma)), delta))

    new = at(1.0)
    start = _first_guess(new[0][0], sum(count for _, count in new), excess(epsilon), delta)
    return smallest_argument(beyond, excess(epsilon), start, tolerance)


def _first_guess(spec: StepSpec, steps: int, epsilon: float, delta: float) -> float:
    """Returns a multiplier of the right size."""
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    if spec.accountant == "advanced_composition":
        return lemma_noise_multiplier(epsilon, steps, delta) * spec.sensitivity / 2
    if spec.distribution == "laplace":
        return max(1.0, spec.probability * math.sqrt(steps)) / epsilon
    mu = 1 / float(get_sigma_gaussian(epsilon, max(delta, 1e-300)))
    # Central limit for subsampled Gaussians: mu = q sqrt(T (e^(1/sigma^2) - 1)), Dong et al. 2022.
    ratio = mu / (spec.probability * math.sqrt(steps))
    return spec.sensitivity / math.sqrt(math.log1p(ratio**2))


def smallest_argument(
    f: Callable[[float], float], target: float, start: float, tolerance: float
) -> float:
    """Returns the smallest x among the allowed noise multipliers with f(x) <= target, f decreasing.

    Guarantee: x was evaluated and found to satisfy the target.

    Args:
      f: epsilon as a function of the noise multiplier.
      target: epsilon > 0.
      start: first guess.
      tolerance: relative distance to the smallest x.

    Returns:
      x in [2^-10, 2^25].

    Raises:
      ValueError: f exceeds the target up to the largest multiplier.
    """
    # secant steps on (log x, log f), kept inside a bracket
    low, high = math.log(MIN_NOISE_MULTIPLIER), math.log(MAX_NOISE_MULTIPLIER)
    best, slope, x0, y0 = math.inf, -1.0, math.nan, math.nan
    x = min(max(math.log(start), low), high)
    for attempt in range(80):
        y = math.log(max(f(math.exp(x)), 1e-300) / target)
        if y <= 0:
            best, high = math.exp(x), x
        else:
            low = x
        if math.isfinite(y0) and math.isfinite(y) and x != x0:
            slope = min((y - y0) / (x - x0), -0.2)  # d log f / d log x
        x0, y0 = x, y
        if (attempt > 0 and 0 <= y / slope <= tolerance) or high - low <= tolerance:
            break
        # the secant's root plus a third of the tolerance: just on the side that keeps the target
        guess = x - y / slope + tolerance / 3 if math.isfinite(y) else math.nan
        # f may have steps and infinities, where secants do not converge: bisection always does.
        x = guess if low < guess < high and attempt < 20 else (low + high) / 2
    if math.isfinite(best) and not (
        low == math.log(MIN_NOISE_MULTIPLIER) and high - low <= tolerance
    ):
        return best
    for sigma in (MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER):
        if f(sigma) <= target:
            return sigma
    raise ValueError(
        f"target epsilon={target} cannot be reached: noise_multiplier={MAX_NOISE_MULTIPLIER:.3g} "
        f"still costs epsilon={f(MAX_NOISE_MULTIPLIER):.4g}; use fewer steps, a larger data set, "
        "a smaller batch, or a larger delta."
    )
