r"""Groups drawn by the exponential mechanism, from log-weights that stay hidden.

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
from statistics import NormalDist
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hf_dpzero.privacy.described import check_count
from hf_dpzero.privacy.discretization import GRID_BITS, float32s
from hf_dpzero.privacy.group_losses.base import (
    BudgetedGroups,
    GroupPlayer,
    passes,
    period,
)
from hf_dpzero.privacy.mechanisms.base import Relation, sensitivity_factor
from hf_dpzero.privacy.mechanisms.vertex import ROUNDING, HiddenScores

if TYPE_CHECKING:
    from hf_dpzero.privacy.events import StepSpec
    from hf_dpzero.privacy.noise import NoiseSource
    from hf_dpzero.privacy.plan import PrivacyPlan
    from hf_dpzero.privacy.sampling import Sampler

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
        steps_between = period(sampler)
        total = 0.0
        for taken in range(1, passes(sampler, count) + 1):  # e; the first draw sees no step
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
        allowed = self.odds * passes(sampler, steps) * (spec.sensitivity / multiplier) ** 2
        low, high = 0.0, 1.0 / float(self.scales(sampler.expected_batch_size).max())
        while steps > 1 and self.precision(high, sampler, steps, spec.relation) < allowed:
            high *= 2
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            fits = self.precision(middle, sampler, steps, spec.relation) <= allowed
            low, high = (middle, high) if fits else (low, middle)
            if high < 1e-30:
                break
        return low

    def parts(
        self, spec: StepSpec, multiplier: float, sampler: Sampler, steps: int, count: int
    ) -> tuple[tuple[StepSpec, int], ...]:
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
        most = plan.sampler.num_examples * passes(plan.sampler, plan.steps)
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
