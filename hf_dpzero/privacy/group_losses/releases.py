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

Groups drawn by the exponential mechanism, from log-weights that stay hidden
---------------------------------------------------------------------------
In every step K groups are drawn independently with probability proportional to exp(tau sum_{s<t}
g_i,s); y is their share among the K. Nothing else leaves: the log-weights are un-noised, and are never
logged, saved or returned (the y-player of Algorithm 1 in the saddle-point paper, which samples
vertices of the simplex for that reason; Maurey's empirical method gives an unbiased y).

Cost of a draw: in t steps an example has been in at most e = ceil(t / P) (`FixedBatchesSampler`; P = 1
for a full batch), and moved its group's log-weight by at most tau b / (2 B pi_i) / (1 + 2^-8) in each,
and that of a displaced row's group, perhaps another one and the other way, by 2^-8 of that (`base.py`).
With D = tau b / (2 B min pi) the largest difference of two moves is at most e D under add-or-remove,
and 2 e D under replacement. Log-ratios of probabilities lie in an interval of length eta = e D, or
2 e D: the draw has bounded range eta (Durfee and Rogers 2019, arXiv:1905.04273; half of what pure
differential privacy of the exponential mechanism is stated for).

A mechanism of bounded range eta is dominated by the Gaussian mechanism of multiplier 1 / mu,

    mu(eta) = 2 Phi^-1(1 / (1 + e^(-eta/2))).

Proof: its likelihood ratio lies in [e^(t-eta), e^t] for some t in [0, eta] and has mean 1, so it is
below, in convex order, the one with these two values alone; the trade-off function of those two is
piecewise linear with one vertex, at (Q, 1 - P), P = (1 - e^(t-eta)) / (1 - e^-eta) and Q = e^-t P, and
lies above the Gaussian's, which is convex, where the vertex does: for mu >= Phi^-1(P) - Phi^-1(Q).
That is largest at t = eta / 2, where P = 1 - Q = 1 / (1 + e^(-eta/2)) (a test looks along t).
Domination by one fixed pair composes, also where draws depend on earlier ones. For small eta, mu is
1.2533 eta / 2; zero-concentrated accounting has eta / 2, but has no composition with the losses of
sampled Gaussians.

Draws are exact for the scores, which `mechanisms.vertex.HiddenScores` holds on a public grid; its
margin on the range is `SLACK`.

The rate follows from the budget: tau is the largest for which all K T draws cost the share s of the
run's precision, sum_t K mu(eta_t)^2 = s / (1 - s) E / z_w^2. (The 1 + 2^-8 is not undone here: no noise
stands between the losses and the draws.) A run without noise takes `default_rate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hf_dpzero.privacy.correlated.factorization import pattern_bound, square_root, toeplitz
from hf_dpzero.privacy.described import bisected, check_count
from hf_dpzero.privacy.discretization import GRID_BITS, float32s
from hf_dpzero.privacy.group_losses.base import BudgetedGroups, GroupLosses, GroupPlayer, noised
from hf_dpzero.privacy.mechanisms.base import Relation, sensitivity_factor
from hf_dpzero.privacy.mechanisms.vertex import ROUNDING, HiddenScores

if TYPE_CHECKING:
    from hf_dpzero.privacy.events import Part, StepSpec
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
        return _sensitivity(steps, sampler.period, released)

    def check(self, plan: PrivacyPlan) -> None:
        super().check(plan)
        n, often = plan.sampler.num_examples, plan.sampler.passes(plan.steps)
        if plan.steps**1.5 * n * often > MOST:
            raise ValueError(
                f"group_robust.weights='prefix_sum' with {plan.steps} steps on {n} examples: float64 "
                "sums of so many are not covered by the proof; use group_robust.weights='per_step', or "
                "fewer steps."
            )

    def parts(
        self, spec: StepSpec, multiplier: float, sampler: Sampler, steps: int, count: int
    ) -> tuple[Part, ...]:
        # One Gaussian event; of a part of the run with the sensitivity that this part has.
        z = self.multiplier(multiplier, sampler.passes(steps))
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
        # A release is a row of C V: with a step left out it would be a row of something else.
        assert len(self._sums) == step + 1, "sums of earlier steps are missing"
        history = np.asarray(self._sums, dtype=np.float64)
        row = self._column[: len(history)][::-1] @ history
        z = self.losses.multiplier(multiplier, self._sampler.passes(self._steps))
        return noised([round(v) for v in row.tolist()], z * self._sensitivity, step, noise)


@lru_cache(maxsize=256)
def _sensitivity(steps: int, period: int, count: int) -> float:
    return math.sqrt(pattern_bound(toeplitz(steps), np.arange(0, count, period), count))


# ---------------------------------------------------------------- drawn groups

SLACK = 1.0 + ROUNDING


def gaussian_precision(eta: float) -> float:
    """Returns mu(eta)^2: precision of the Gaussian that dominates a bounded range of eta.

    >>> round(gaussian_precision(0.01) / 0.005**2, 3)  # pi / 2 for small eta
    1.571
    """
    mu = 2 * NormalDist().inv_cdf(1 / (1 + math.exp(-eta / 2))) if eta < 60 else math.inf
    return mu**2 * (1 + 1e-9)


@dataclass(frozen=True, kw_only=True)
class VertexGroups(BudgetedGroups):
    """Groups drawn from hidden log-weights; fixed batches or a full batch. See the module.

    Attributes:
      draws: K >= 1, groups drawn in a step.
    """

    draws: int = 1

    name: ClassVar[str] = "vertex"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("draws", self.draws, " of groups")
        if self.rate is not None:
            raise ValueError(
                f"rate={self.rate} of drawn groups: it follows from their share of the budget; leave "
                "it out."
            )

    def precision(self, rate: float, sampler: Sampler, count: int, relation: Relation) -> float:
        """Returns sum K mu(eta_t)^2 over the first `count` steps at a rate tau."""
        each = rate * float(self.scales(sampler.expected_batch_size).max())
        each *= sensitivity_factor(relation)
        steps_between = sampler.period
        total = 0.0
        for taken in range(1, sampler.passes(count) + 1):  # e; the first draw sees no step
            steps = min(taken * steps_between, count - 1) - (taken - 1) * steps_between
            total += steps * self.draws * gaussian_precision(taken * each * SLACK)
        return total

    def paid_rate(self, spec: StepSpec, multiplier: float, sampler: Sampler, steps: int) -> float:
        """Returns tau: the largest, to a relative 1e-6, whose draws cost the share s.

        Args:
          spec: of one step.
          multiplier: the weights' part's, over the sensitivity; 0 for a run without noise.
          sampler: of the run.
          steps: T.
        """
        if not multiplier:
            return self.default_rate(steps)
        allowed = self.odds * sampler.passes(steps) * (spec.sensitivity / multiplier) ** 2
        start = 1.0 / float(self.scales(sampler.expected_batch_size).max())
        if steps == 1:
            return start  # the one draw is made before any loss is known: every rate costs nothing

        def fits(rate: float) -> bool:
            return self.precision(rate, sampler, steps, spec.relation) <= allowed

        return bisected(fits, 0.0, start, 1e-6)[0]

    def parts(
        self, spec: StepSpec, multiplier: float, sampler: Sampler, steps: int, count: int
    ) -> tuple[Part, ...]:
        # all draws as the one Gaussian event that dominates them
        rate = self.paid_rate(spec, multiplier, sampler, steps)
        total = self.precision(rate, sampler, count, spec.relation)
        if not total:
            return ()
        z = spec.sensitivity / math.sqrt(total)
        return ((replace(spec, noise_multiplier=z, num_directions=0, dense_draws=0), 1),)

    def player(self, plan: PrivacyPlan) -> GroupPlayer:
        multiplier = plan.mechanism.effective_noise_multiplier
        rate = self.paid_rate(plan.spec, multiplier, plan.sampler, plan.steps)
        most = plan.sampler.num_examples * plan.sampler.passes(plan.steps)
        return _Draws(self, rate * self.scales(plan.sampler.expected_batch_size), most)


class _Draws(GroupPlayer):
    def __init__(self, losses: VertexGroups, factors: np.ndarray, most: int) -> None:
        super().__init__(losses.num_groups)
        self.losses = losses
        self._factors, self._step = factors, 0
        largest = float(factors.max())
        self._scores = HiddenScores(losses.num_groups, largest, largest * most)
        self._y = np.zeros(losses.num_groups)

    def begin(self, new: Sequence[Sequence[float]], noise: NoiseSource) -> np.ndarray:
        drawn = self._scores.draw(self.losses.draws, noise, self._step)
        self._y = np.bincount(drawn, minlength=self.losses.num_groups) / self.losses.draws
        return self._y

    def end(
        self, total: Sequence[int], multiplier: float, step: int, noise: NoiseSource
    ) -> tuple[float, ...]:
        self._step = step + 1
        self._scores.add_(self._factors * np.array([math.ldexp(n, -GRID_BITS) for n in total]))
        return float32s(self._y.tolist())
