"""From what a run does to the epsilon that it costs, and back to the noise that it needs.

Which event and accountant describe a step is decided in `events.py`.

*Numerical error.* PLD results are pessimistic in their discretisation and tail truncation. Their
floating-point error is one in delta: T-fold self-composition raises Fourier coefficients, each with a
relative error of about 2^-53, to the power T. So epsilon is evaluated at delta - (T 2^-53 + 1e-15), and
refused where that is not most of delta: at T = 10^6 and delta = 3e-12 the library's answer is 6 % below
the truth. Grids stay near 1/64 of the typical loss of one step, where an independent accountant in the
tests agrees to 1e-3.

*Number of steps.* dp-accounting raises the size of a grid to the power T as a Python integer on its way,
which takes longer than the run from some T on: above `MAX_PLD_STEPS` the PLD accountant is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.discretization import DENSE_DELTA, dense_slack, discretisation_slack
from hf_dpzero.privacy.events import (
    StepSpec,
    accountant_used,
    check_sound,
    library_relation,
    step_event,
)
from hf_dpzero.privacy.mechanisms.base import MAX_NOISE_MULTIPLIER, MIN_NOISE_MULTIPLIER

if TYPE_CHECKING:
    from dp_accounting import DpEvent

MIN_DELTA = 1e-12
"""Below this delta the accountants' tail truncation and floating-point errors matter in any run."""
MAX_PLD_STEPS = 2_000_000
"""A calibration takes about a minute there, a quarter of an hour at five times as many."""


@lru_cache(maxsize=4096)
def epsilon_after(spec: StepSpec, steps: int, delta: float) -> float:
    """Epsilon at `delta` after `steps` adaptive steps of `spec`, an upper bound.

    Args:
      spec: one step; `noise_multiplier` = 0 gives infinity.
      steps: T >= 0; 0 gives 0.
      delta: in [1e-12, 1); 0 is allowed for Laplace noise, which has a pure epsilon.

    Returns:
      Epsilon >= 0, perhaps infinity.

    Raises:
      ValueError: an unsound combination or a delta out of range.
    """
    check_sound(spec)
    if not MIN_DELTA <= delta < 1 and not (delta == 0 and spec.distribution == "laplace"):
        raise ValueError(
            f"delta={delta} is outside [{MIN_DELTA}, 1); choose one well below 1/n "
            "(delta=0 needs distribution='laplace')."
        )
    if steps == 0:
        return 0.0
    if spec.noise_multiplier == 0:
        return math.inf
    if spec.distribution == "laplace":
        return min(pure_epsilon(spec, steps), _continuous_epsilon(spec, steps, delta))
    h = discretisation_slack(spec.noise_multiplier, steps * spec.num_directions)
    share = DENSE_DELTA if spec.dense_draws else 1.0
    epsilon = max(0.0, _continuous_epsilon(spec, steps, share * delta * math.exp(-h))) + 2 * h
    return epsilon + 2 * dense_slack(steps * spec.dense_draws, epsilon, delta)


def _continuous_epsilon(spec: StepSpec, steps: int, delta: float) -> float:
    """Epsilon of the run with real-valued noise."""
    if delta == 0:
        return math.inf
    used = accountant_used(spec)
    if used == "gaussian_exact":
        return _gaussian_epsilon(spec, steps, delta)
    if used == "advanced_composition":
        lemma = _lemma_epsilon(spec.noise_multiplier * 2 / spec.sensitivity, steps, delta)
        return max(lemma, _gaussian_epsilon(spec, steps, delta))
    if used == "pld":
        return _pld_epsilon(spec, steps, delta)
    import dp_accounting as dp

    accountant = rdp_accountant(library_relation(spec))
    accountant.compose(dp.SelfComposedDpEvent(step_event(spec), steps))
    return float(accountant.get_epsilon(delta))


def rdp_accountant(relation: Any) -> Any:
    """The library's RDP accountant for one of its own relations.

    An order whose series does not converge is left out, which can only raise epsilon; the library's
    line about each of them is kept out of the log.
    """
    from dp_accounting import rdp

    logging.getLogger("absl").addFilter(_is_no_left_out_order)
    return rdp.RdpAccountant(neighboring_relation=relation)


def _is_no_left_out_order(record: logging.LogRecord) -> bool:
    return "failed to converge" not in str(record.msg)


def _gaussian_epsilon(spec: StepSpec, steps: int, delta: float) -> float:
    """T full-batch Gaussians are one with sigma / sqrt(T) (Balle and Wang 2018 for its epsilon)."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    sigma = spec.noise_multiplier / spec.sensitivity / math.sqrt(steps)
    epsilon = float(get_epsilon_gaussian(sigma, delta))
    return epsilon * (1 + 1e-9) + 1e-11 if epsilon > 0 else 0.0


def _less_numerical_error(spec: StepSpec, steps: int, delta: float) -> float:
    """delta minus what floating-point arithmetic may hide of it in T-fold convolution."""
    error = steps * 2.0**-53 + 1e-15
    if delta < 4 * error:
        way_out = "accountant='rdp', " if _rdp_knows(spec) else ""
        raise ValueError(
            f"delta={delta} with {steps} steps: the PLD accountant's floating-point error is up to "
            f"{error:.2g}; use {way_out}delta of at least {4 * error:.2g}, or fewer steps."
        )
    return delta - error


def _rdp_knows(spec: StepSpec) -> bool:
    try:
        check_sound(replace(spec, accountant="rdp"))
    except ValueError:
        return False
    return True


def _pld_epsilon(spec: StepSpec, steps: int, delta: float) -> float:
    """PLD epsilon on a grid fitted to the run; for the truncated event the worse of two sizes."""
    event, delta = step_event(spec), _less_numerical_error(spec, steps, delta)
    epsilon = _pld_on_fitted_grid(spec, event, steps, delta)
    if spec.sampling == "truncated_poisson" and spec.relation == "add_or_remove_one":
        import attr

        smaller = attr.evolve(event, dataset_size=spec.num_examples)
        epsilon = max(epsilon, _pld_on_fitted_grid(spec, smaller, steps, delta))
    return epsilon


def _pld_on_fitted_grid(spec: StepSpec, event: DpEvent, steps: int, delta: float) -> float:
    """One coarse pass for the size of the answer, one on a grid fine enough for it.

    The result is a bound on any grid; the grid decides only how tight it is and how long it takes.
    """
    rough = coarse_grid(spec)
    coarse = _pld_epsilon_on_grid(spec, event, steps, delta, rough)
    total = coarse if math.isfinite(coarse) else 0.0
    fine = min(typical_loss(spec) / 64, 1e-3)
    grid = max(fine, largest_loss(spec) / 2**17, total / 2**17, 1e-10)
    if grid >= rough:
        return coarse
    return min(coarse, _pld_epsilon_on_grid(spec, event, steps, delta, grid))


def _pld_epsilon_on_grid(
    spec: StepSpec, event: DpEvent, steps: int, delta: float, grid: float
) -> float:
    import dp_accounting as dp
    from dp_accounting import pld

    if steps > MAX_PLD_STEPS:
        way_out = "use accountant='rdp', or take fewer" if _rdp_knows(spec) else "take fewer"
        raise ValueError(
            f"{steps} steps are more than the PLD accountant composes in reasonable time, "
            f"{MAX_PLD_STEPS}: {way_out} steps with a larger batch."
        )
    accountant = pld.PLDAccountant(library_relation(spec), value_discretization_interval=grid)
    accountant.compose(dp.SelfComposedDpEvent(event, steps))
    return float(accountant.get_epsilon(delta))


def coarse_grid(spec: StepSpec) -> float:
    """A discretisation that shows the size of an epsilon, cheaply."""
    return max(typical_loss(spec) / 4, largest_loss(spec) / 2**14, 1e-10)


def typical_loss(spec: StepSpec) -> float:
    """Standard deviation of one step's privacy loss, roughly: q sqrt(chi^2), capped."""
    u = spec.sensitivity / spec.noise_multiplier
    if spec.distribution == "laplace":
        u = min(u, 4.0)
        chi2 = (2 * math.exp(u) + math.exp(-2 * u)) / 3 - 1
    else:
        chi2 = math.expm1(min(u, 2.0) ** 2)
    return spec.probability * math.sqrt(chi2)


def largest_loss(spec: StepSpec) -> float:
    """Width of the loss range that one step's discretisation covers (ten deviations)."""
    factor = 2.0 if spec.sampling == "truncated_poisson" else spec.sensitivity
    u = factor / spec.noise_multiplier
    tail = u if spec.distribution == "laplace" else u * (10.0 + u / 2)
    q = 1.0 if spec.sampling == "truncated_poisson" else spec.probability
    return 2 * (math.log1p(q * math.expm1(tail)) if tail < 30 else max(tail + math.log(q), 1e-3))


def pure_epsilon(spec: StepSpec, steps: int) -> float:
    """Pure epsilon of T Laplace releases, each amplified to log(1 + q (e^eps - 1))."""
    one = spec.sensitivity / spec.noise_multiplier
    if spec.probability == 1.0:
        return steps * one * (1 + 1e-12)
    if one > 500:
        return math.inf
    return steps * math.log1p(spec.probability * math.expm1(one)) * (1 + 1e-12)


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

    Args:
      epsilon: target > 0.
      steps: T.
      delta: in (0, 1).

    Returns:
      The noise multiplier.

    >>> round(lemma_noise_multiplier(6.0, 10_000, 1e-5), 1)
    343.9
    """
    return 4 * math.sqrt(2 * steps * math.log(math.e + epsilon / delta)) / epsilon


def calibrated_noise_multiplier(
    spec: StepSpec, steps: int, *, epsilon: float, delta: float, tolerance: float = 4e-4
) -> float:
    """The smallest noise multiplier whose epsilon at `delta` is at most `epsilon`.

    Args:
      spec: one step; its own noise multiplier is ignored.
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
        return epsilon_after(replace(spec, noise_multiplier=sigma), steps, delta)

    start = first_guess(spec, steps, epsilon, delta)
    return smallest_argument(spent, epsilon, start, tolerance)


def first_guess(spec: StepSpec, steps: int, epsilon: float, delta: float) -> float:
    """A multiplier of the right size, from a cheaper question with nearly the same answer."""
    if spec.accountant == "advanced_composition":
        return lemma_noise_multiplier(epsilon, steps, delta) * spec.sensitivity / 2
    if spec.sampling == "truncated_poisson":
        plain = replace(spec, sampling="poisson", max_batch_size=0)
        return calibrated_noise_multiplier(plain, steps, epsilon=epsilon, delta=delta)
    if spec.distribution == "laplace":
        return max(1.0, spec.probability * math.sqrt(steps)) / epsilon
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    mu = spec.sensitivity / float(get_sigma_gaussian(epsilon, max(delta, 1e-300)))
    # Central limit for subsampled Gaussians: mu = q sqrt(T (e^(1/sigma^2) - 1)), Dong et al. 2022.
    ratio = mu / (spec.probability * math.sqrt(steps) * spec.sensitivity)
    guess = spec.sensitivity / math.sqrt(math.log1p(ratio**2))
    if accountant_used(spec) != "pld" or not math.isfinite(guess):
        return guess

    def rough(sigma: float) -> float:
        """On the coarse grid: an upper bound within a percent or so, at a tenth of the cost."""
        noisier = replace(spec, noise_multiplier=sigma)
        grid = coarse_grid(noisier)
        return _pld_epsilon_on_grid(noisier, step_event(noisier), steps, delta, grid)

    return smallest_argument(rough, epsilon, guess, tolerance=1e-3)


def smallest_argument(
    f: Callable[[float], float], target: float, start: float, tolerance: float
) -> float:
    """The smallest x in the allowed noise multipliers with f(x) <= target, f decreasing.

    Secant steps on (log x, log f), kept inside a bracket; ends at an x that was evaluated and
    found to satisfy the target.

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
