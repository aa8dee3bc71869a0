"""Which correlation the noise of a run has, and the run as its accountant sees it: one Gaussian on C G.

All steps together release C G + Z times constants, so the run is ONE event. With noise multiplier
sigma the draws Z have deviation sigma S C_clip, where S is the sensitivity of C G in clipping norms with
the participation of the fixed batches (`factorization.epoch_sensitivity`); so the event's multiplier is
sigma, for whatever factorisation. A run that stops early releases the first rows, whose sensitivity is
smaller.

The sampler must be `FixedBatchesSampler`: an example that is drawn at random may take part in any
steps, and no amplification by sampling is claimed here for noise that is not independent over steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hf_dpzero.privacy.correlated import factorization as factorizations
from hf_dpzero.privacy.correlated.factorization import Factorization, epoch_sensitivity
from hf_dpzero.privacy.discretization import correlated_draws
from hf_dpzero.privacy.sampling import FixedBatchesSampler

if TYPE_CHECKING:
    from hf_dpzero.privacy.events import StepSpec
    from hf_dpzero.privacy.plan import PrivacyPlan

_MADE: dict[str, Callable[[int], Factorization]] = {
    "independent": factorizations.independent,
    "toeplitz": factorizations.toeplitz,
    "optimized": factorizations.optimized,
    "tree": factorizations.tree,
}
KINDS = (*_MADE, "banded")
"""What `Correlation.kind` may be."""

METHODS = ("dp-sgd", "dp-adamw", "dpzero")
"""Mechanisms whose noise may be correlated over steps; dpzero's where directions are held."""


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """How the noise of a step depends on that of earlier steps.

    Attributes:
      kind: a factorisation of `factorization.py`; "independent" is the noise of DP-SGD.
      bands: of "banded": draws that a step's noise is made of; 0 elsewhere.
      restart: steps after which noise begins anew; 0 for never.

    Raises:
      ValueError: an unknown kind, bands where there are none or none where there must be some.
    """

    kind: str = "banded"
    bands: int = 0
    restart: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"correlated_noise.kind={self.kind!r} is unknown; use one of {KINDS}.")
        if (self.kind == "banded") != (self.bands > 0):
            raise ValueError(
                f"correlated_noise.bands={self.bands} with correlated_noise.kind={self.kind!r}: give at "
                "least 1 for 'banded', and none for the others."
            )
        if self.restart < 0:
            raise ValueError(f"restart={self.restart} must be at least 0.")

    def factorization(self, steps: int) -> Factorization:
        """Returns A = B C for a run of so many steps; the same object for the same arguments."""
        return _factorization(self, steps)

    def sensitivity(self, steps: int, steps_per_epoch: int, count: int | None = None) -> float:
        """Returns that of the first `count` steps (default all), in clipping norms, under add-or-remove.

        Args:
          steps: R of the run.
          steps_per_epoch: an example takes part in every such step.
          count: 0 <= count <= steps.
        """
        return epoch_sensitivity(self.factorization(steps), steps_per_epoch, count)

    def words(self) -> str:
        """Describes it in a few words, for reports.

        >>> Correlation(kind="banded", bands=32).words()
        'banded, each noise made of the last 32 draws'
        """
        made_of = {
            "independent": "independent, one draw a step",
            "toeplitz": "Toeplitz square root, each noise made of all draws so far",
            "banded": f"banded, each noise made of the last {self.bands} draws",
            "optimized": "optimized factorization, each noise made of all draws so far",
            "tree": "binary tree",
        }
        anew = f", anew every {self.restart} steps" if self.restart else ""
        return made_of[self.kind] + anew

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, JSON-safe; `correlation_from_dict` is the inverse."""
        return dataclasses.asdict(self)


def correlation_from_dict(values: Mapping[str, Any]) -> Correlation:
    """Reads what `to_dict` described; unknown keys are errors."""
    known = {field.name for field in dataclasses.fields(Correlation)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"a correlation has no fields {unknown}; it has {sorted(known)}.")
    return Correlation(**values)


@lru_cache(maxsize=32)
def _factorization(correlation: Correlation, steps: int) -> Factorization:
    size = min(steps, correlation.restart or steps)
    banded = correlation.kind == "banded"
    block = (
        factorizations.banded(size, correlation.bands) if banded else _MADE[correlation.kind](size)
    )
    return block if size == steps else factorizations.Restarted(block, steps)


def check_correlated(plan: PrivacyPlan) -> None:
    """Refuses a correlation without an account in the plan, and fixed batches with a schedule.

    Raises:
      ValueError: says what to use instead.
    """
    fixed = isinstance(plan.sampler, FixedBatchesSampler)
    if fixed and plan.noise_schedule is not None:
        raise ValueError(
            f"noise_schedule={plan.noise_schedule} with sampling='fixed_batches' is not accounted: an "
            "example sees the noise of some steps only. Leave it out, or use sampling='poisson'."
        )
    if plan.correlation is None:
        return
    mechanism = plan.mechanism
    refusals = [
        (
            not fixed,
            f"with sampling={plan.sampler.name!r}: its account needs to know in which steps an example "
            "takes part, and amplification by sampling is not accounted here for noise that is "
            "correlated over steps. Use sampling='fixed_batches'.",
        ),
        (
            getattr(mechanism, "clipping", "fixed") == "averaged",
            "with averaged clipping is not accounted: use clipping='fixed' or 'automatic'.",
        ),
        (
            mechanism.name == "dpzero" and not plan.correlation.restart,
            "with method 'dpzero' and fresh directions does harm: the noise of a step lies along its "
            "own directions, nearly orthogonal to those of other steps, so nothing cancels. Set "
            "hold_direction_for, or use independent noise.",
        ),
        (
            # Adaptive clipping: the clip of a step would scale the noise of others.
            mechanism.name not in METHODS,
            f"with method {mechanism.name!r} is not accounted: use one of {', '.join(METHODS)}, with "
            "clipping='fixed' or 'automatic'.",
        ),
        (
            mechanism.distribution != "gaussian",
            f"with {mechanism.distribution} noise is not accounted: use noise_distribution='gaussian'.",
        ),
        (
            plan.noise_schedule is not None or plan.clip_schedule is not None,
            "with a noise_schedule or clip_schedule is not accounted: the noise of a step is a sum over "
            "steps of other scales. Leave the schedule out.",
        ),
        (
            plan.accountant == "advanced_composition",
            "with accountant='advanced_composition', which knows equal steps: use accountant='pld'.",
        ),
    ]
    for applies, message in refusals:
        if applies:
            raise ValueError(f"correlated_noise.kind={plan.correlation.kind!r} {message}")


def sensitivity(plan: PrivacyPlan, count: int | None = None) -> float:
    """Returns S of the first `count` steps (default all), in clipping norms under add-or-remove."""
    assert plan.correlation is not None
    return plan.correlation.sensitivity(plan.steps, plan.sampler.period, count)


def step_deviation(plan: PrivacyPlan) -> float:
    """Returns the largest deviation of a step's noise on the sum, in sigma C."""
    if plan.correlation is None:
        return 1.0
    factorization = plan.correlation.factorization(plan.steps)
    return sensitivity(plan) * math.sqrt(factorization.largest_squared_row())


def run_deviation(plan: PrivacyPlan) -> float:
    """Returns the deviation of the noise in the sum of all steps, in sigma C; else root of T."""
    if plan.correlation is None:
        return math.sqrt(plan.steps)
    variances = plan.correlation.factorization(plan.steps).prefix_variances
    return sensitivity(plan) * math.sqrt(float(variances[-1]))


def gain_against_independent(plan: PrivacyPlan) -> float:
    """Returns the mean noise variance of sums over steps 0..r under independent noise, over the plan's.

    Both on the plan's fixed batches, at the same epsilon. It says what reaches weights that plain SGD
    moves at a constant rate; below 1 the correlation does harm.
    """
    assert plan.correlation is not None
    epochs = plan.sampler.passes(plan.steps)
    variances = plan.correlation.factorization(plan.steps).prefix_variances
    return epochs * (plan.steps + 1) / 2 / (sensitivity(plan) ** 2 * float(variances.mean()))


def fixed_batches_part(plan: PrivacyPlan, step: StepSpec) -> StepSpec:
    """Returns what fixed batches are to the accountant: a full batch an epoch; correlated, a run.

    With independent noise an example is in one step of an epoch, and the other steps are functions of
    the past and of other examples.

    Args:
      plan: with fixed batches.
      step: a step of it, taken alone.

    Returns:
      An event with room for the discrete or rounded noise of all its steps.
    """
    epoch, whole = plan.sampler.period, replace(step, sampling="full_batch")
    if plan.correlation is None:
        return replace(
            whole, num_directions=epoch * step.num_directions, dense_draws=epoch * step.dense_draws
        )
    draws = correlated_draws(
        step.dense_draws or step.num_directions,
        plan.steps,
        plan.correlation.factorization(plan.steps).rounding,
    )
    return replace(whole, dense_draws=draws)


def prefix_part(plan: PrivacyPlan, whole: StepSpec, count: int) -> StepSpec:
    """Returns the first `count` steps: the same draws over a sensitivity that is no larger."""
    if count == plan.steps:
        return whole
    # Both are rounded up, by 1e-9 at most: their ratio could be too large by as much.
    ratio = sensitivity(plan) / sensitivity(plan, count)
    return replace(whole, noise_multiplier=whole.noise_multiplier * max(1.0, ratio * (1 - 1e-8)))
