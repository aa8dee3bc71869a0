"""Weights of groups without a cost, and from losses that are released in every step's own mechanism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hf_dpzero.privacy.group_losses.base import (
    BudgetedGroups,
    GroupLosses,
    GroupPlayer,
    check_multiplier,
    noised,
)

if TYPE_CHECKING:
    from hf_dpzero.privacy.noise import NoiseSource


@dataclass(frozen=True, kw_only=True)
class BalancedGroups(GroupLosses):
    """y = 1/m in every step: groups count alike. Nothing is released, nothing is paid."""

    name: ClassVar[str] = "balanced"

    @property
    def num_values(self) -> int:
        """0."""
        return 0

    def player(self, plan: Any) -> GroupPlayer:
        """One without state."""
        return _Balanced(self)


class _Balanced(GroupPlayer):
    def __init__(self, losses: BalancedGroups) -> None:
        self.losses = losses

    def begin(self, new: Sequence[Sequence[float]], noise: NoiseSource) -> np.ndarray:
        return np.full(self.losses.num_groups, 1 / self.losses.num_groups)

    def end(
        self, total: Sequence[int], multiplier: float, step: int, noise: NoiseSource
    ) -> tuple[float, ...]:
        return ()


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
        """sqrt(1 - s), rounded down."""
        return math.sqrt(1 - self.budget) * (1 - 2.0**-45)

    def multiplier(self, weights: float) -> float:
        """z_g for the weights' multiplier; 0 for 0."""
        return check_multiplier(weights / math.sqrt(self.odds)) if weights else 0.0

    def player(self, plan: Any) -> GroupPlayer:
        """One whose y follows from the ledger."""
        return _PerStep(self, plan.sampler.expected_batch_size, plan.steps)


class _PerStep(GroupPlayer):
    def __init__(self, losses: PerStepGroups, batch_size: float, steps: int) -> None:
        self.losses: PerStepGroups = losses
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
