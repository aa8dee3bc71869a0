r"""Weights of groups without a cost, and from losses released with Gaussian noise.

`PerStepGroups` releases each step's losses in that step's own mechanism; `base.py` has its proof.

Prefix sums of group losses with Toeplitz-correlated Gaussian noise
-------------------------------------------------------------------
The weights of step t need sum_{s<t} g_s only, so noise is added where it cancels in these sums: with
A = C C (A the lower-triangular ones, C the Toeplitz square root) a step releases

    r_t = (C V)_t + noise_t,       V_s the step's sums of contributions, noise_t independent,

one row of one Gaussian mechanism on C V (Denisov et al. 2022, arXiv:2202.08312; the factorisation:
Fichtenberger, Henzinger and Upadhyay 2023, arXiv:2202.11205). What is used of it is post-processing:
A V + C noise = C r, whose rows are the prefix sums, with noise that grows as log t instead of t.

Sensitivity: an example, with the row that it displaces, moves V in each step that has it by a vector of
norm at most 1 (`base.py`). These are E = ceil(T / P) steps, P apart (`FixedBatchesSampler`; P = 1 for a
full batch). It moves C V by at most S = ||sum of these columns of C||, since C' C has no negative
entry; column 0 and those P, 2P, .. behind it have the largest sum. Under replacement twice that. Noise
of deviation z_g S costs one Gaussian event of multiplier z_g, whatever E is;
z_g = z_w sqrt((1-s) / (s E)) is the share s of the run's precision, of which E / z_w^2 is the weights'
part.

Arithmetic: (C V)_t is computed in float64 from exact integers and rounded to an integer in units of
2^-30. In float64 the errors of a row's m numbers add up to at most T 2^-53 sum |V| <= T 2^-23 n E units,
over T rows of both runs to at most 2 sqrt(T) T 2^-23 n E units in L2 norm. Only the coordinates of an
example's groups and of the rows that it displaces differ between neighbours, at most 2 (E + 1) <= 4 E,
and rounding adds at most 1 unit to each in each row: sqrt(4 E T). `ROOM` covers both, 2^-10 of S 2^30
with S >= 1, for T^1.5 n E up to `MOST`: 2^19 each, as E <= T. Larger runs are refused.

The history V is private and stays in memory: a run that was interrupted cannot go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hf_dpzero.privacy.correlated.factorization import pattern_bound, square_root, toeplitz
from hf_dpzero.privacy.group_losses.base import (
    BudgetedGroups,
    GroupLosses,
    GroupPlayer,
    noised,
    passes,
    period,
)

if TYPE_CHECKING:
    from hf_dpzero.privacy.events import StepSpec
    from hf_dpzero.privacy.noise import NoiseSource
    from hf_dpzero.privacy.plan import PrivacyPlan
    from hf_dpzero.privacy.sampling import Sampler

ROOM, MOST = 1.0 + 2.0**-10, 2.0**41


@dataclass(frozen=True, kw_only=True)
class BalancedGroups(GroupLosses):
    """y = 1/m in every step: groups count alike. Nothing is released, nothing is paid."""

    name: ClassVar[str] = "balanced"

    @property
    def num_values(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class PerStepGroups(BudgetedGroups):
    """g with independent Gaussian noise in every step, in one mechanism with the weights' part.

    Guarantee: with z_w the weights' multiplier, g receives z_g = z_w sqrt((1-s)/s), and both together
    are one Gaussian mechanism of multiplier z_w sqrt(1-s); see the module's docstring.
    """

    name: ClassVar[str] = "per_step"
    joint: ClassVar[bool] = True

    @property
    def kept(self) -> float:
        # sqrt(1 - s), rounded down
        return math.sqrt(1 - self.budget) * (1 - 2.0**-45)

    def player(self, plan: PrivacyPlan) -> GroupPlayer:
        return _PerStep(self, plan.sampler.expected_batch_size, plan.steps)


class _PerStep(GroupPlayer):
    def __init__(self, losses: PerStepGroups, batch_size: float, steps: int) -> None:
        super().__init__(losses.num_groups)
        self.losses = losses
        self._batch, self._steps = batch_size, steps
        self._sums = np.zeros(losses.num_groups)

    def begin(self, new: Sequence[Sequence[float]], noise: NoiseSource) -> np.ndarray:
        for values in new:  # one after the other, also where a run resumes: sums round alike
            self._sums = self._sums + np.asarray(values, dtype=np.float64)
        return self.losses.softmax(self._sums, self._batch, self._steps)

    def end(
        self, total: Sequence[int], multiplier: float, step: int, noise: NoiseSource
    ) -> tuple[float, ...]:
        return noised(total, self.losses.multiplier(multiplier), step, noise)


@dataclass(frozen=True, kw_only=True)
class PrefixSumGroups(BudgetedGroups):
    """Prefix sums of g with correlated noise; fixed batches or a full batch. See the module."""

    name: ClassVar[str] = "prefix_sum"

    def sensitivity(self, sampler: Sampler, steps: int, count: int | None = None) -> float:
        """Returns that of C V under add-or-remove, after `count` of T steps (default all): S."""
        released = steps if count is None else count
        return _sensitivity(steps, period(sampler), released)

    def check(self, plan: PrivacyPlan) -> None:
        super().check(plan)
        n, often = plan.sampler.num_examples, passes(plan.sampler, plan.steps)
        if plan.steps**1.5 * n * often > MOST:
            raise ValueError(
                f"group_weights='prefix_sum' with {plan.steps} steps on {n} examples: float64 sums of "
                "so many are not covered by the proof; use group_weights='per_step', or fewer steps."
            )

    def parts(
        self, spec: StepSpec, multiplier: float, sampler: Sampler, steps: int, count: int
    ) -> tuple[tuple[StepSpec, int], ...]:
        # One Gaussian event; of a part of the run with the sensitivity that this part has.
        z = self.multiplier(multiplier, passes(sampler, steps))
        z *= self.sensitivity(sampler, steps) / self.sensitivity(sampler, steps, count)
        event = replace(
            spec, noise_multiplier=z, num_directions=steps * self.num_groups, dense_draws=0
        )
        return ((event, 1),)

    def player(self, plan: PrivacyPlan) -> GroupPlayer:
        return _PrefixSums(self, plan.sampler, plan.steps)


class _PrefixSums(GroupPlayer):
    def __init__(self, losses: PrefixSumGroups, sampler: Sampler, steps: int) -> None:
        super().__init__(losses.num_groups)
        self.losses = losses
        self._sampler, self._steps = sampler, steps
        self._column = square_root(steps)
        self._sums: list[list[int]] = []  # V, private
        self._released: list[Sequence[float]] = []
        self._sensitivity = losses.sensitivity(sampler, steps) * ROOM

    def begin(self, new: Sequence[Sequence[float]], noise: NoiseSource) -> np.ndarray:
        self._released += new
        known = np.asarray(self._released, dtype=np.float64).reshape(-1, self.losses.num_groups)
        sums = self._column[: len(known)][::-1] @ known
        return self.losses.softmax(sums, self._sampler.expected_batch_size, self._steps)

    def end(
        self, total: Sequence[int], multiplier: float, step: int, noise: NoiseSource
    ) -> tuple[float, ...]:
        self._sums.append(list(total))
        assert len(self._sums) == step + 1, "sums of earlier steps are missing"
        history = np.asarray(self._sums, dtype=np.float64)
        row = self._column[: len(history)][::-1] @ history
        z = self.losses.multiplier(multiplier, passes(self._sampler, self._steps))
        return noised([round(v) for v in row.tolist()], z * self._sensitivity, step, noise)


@lru_cache(maxsize=256)
def _sensitivity(steps: int, period: int, count: int) -> float:
    return math.sqrt(pattern_bound(toeplitz(steps), np.arange(0, count, period), count))
