"""One private step: evaluate, clip, sum, noise, write down, update. Knows nothing of transformers.

x_ik = (f(theta + lambda u_k; xi_i) - f(theta - lambda u_k; xi_i)) / (2 lambda)
value = (sum_i clip_C(x_i) + noise) / B
theta <- (1 - alpha wd) theta - alpha sum_k value_k u_k           (DPZero, Algorithm 2)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.estimators.finite_differences import FiniteDifferences, Microbatch
from hf_dpzero.ledger.trajectory import Release, Trajectory, apply_release, directions_of
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.mechanisms import Mechanism, VectorMechanism
from hf_dpzero.privacy.mechanisms.adaptive_clipping import Following
from hf_dpzero.privacy.noise import NoiseSource
from hf_dpzero.training.distributed import shared_from_main, sum_over_processes
from hf_dpzero.training.random_state import isolated_randomness

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivateStep:
    """What a step needs; calling it takes one.

    Attributes:
      mechanism: the plan's.
      space: the trainable parameters.
      differences: their finite differences.
      noise: drawn once for each step, on the main process.
      trajectory: the ledger; written before the update.
      defer: leave restore and update to the next step's first pass, or to whoever settles the space
        before the parameters are read (see `estimators.deferred_updates`).
    """

    mechanism: Mechanism
    space: ParameterSpace
    differences: FiniteDifferences
    noise: NoiseSource
    trajectory: Trajectory
    defer: bool = False

    def __call__(
        self, step: int, microbatches: Sequence[Microbatch], learning_rate: float
    ) -> Tensor | None:
        """Takes step number `step` on this process' microbatches, maybe none.

        A step that the ledger holds already (it was paid for before a crash) is applied again from
        there: no data, no noise.

        Returns:
          The un-noised differences, float64 [B, K] (private: for opt-in diagnostics only), or None
          for a step taken from the ledger.
        """
        recorded = self.trajectory.get(step)
        if recorded is not None:
            self._repeat(recorded)
            return None
        directions = directions_of(step, self.trajectory.header)
        with isolated_randomness():
            x = self.differences(microbatches, directions)
        if isinstance(self.mechanism, VectorMechanism):
            self._release_vector(self.mechanism, step, directions, x, learning_rate)
        else:
            self._release_scalars(step, x, learning_rate)
        return x

    @functools.cached_property
    def _current(self) -> Following[Any]:
        return Following(self.mechanism)

    def _release_scalars(self, step: int, x: Tensor, learning_rate: float) -> None:
        """Algorithm 2, line 3, for K directions."""
        mechanism = self._current.after(self.trajectory.releases)
        total: list[Any] = sum_over_processes(mechanism.clip_sum(x))
        values = shared_from_main(lambda: mechanism.release(total, step, self.noise))
        release = Release(step, tuple(values), learning_rate)
        self.trajectory.append(release)
        apply_release(self.space, self.trajectory, release, defer=self.defer)

    def _release_vector(
        self,
        mechanism: VectorMechanism,
        step: int,
        directions: Sequence[Direction],
        x: Tensor,
        learning_rate: float,
    ) -> None:
        """Algorithm 1 (DPGD-0th): what is released is a d-vector with d-dimensional noise."""
        self.space.settle_()
        totals = mechanism.clip_sum(x, self.space.gram(directions))
        self.trajectory.append(Release(step, (), learning_rate))

        def noise(part: int, count: int) -> Tensor:
            drawn = torch.from_numpy(mechanism.noise_part(self.noise, count, step, part))
            return drawn * learning_rate

        coefficients = [-learning_rate * t / mechanism.expected_batch_size for t in totals]
        self.space.dense_step_(directions, coefficients, noise)

    def _repeat(self, release: Release) -> None:
        if self.trajectory.header["replayable"]:
            apply_release(self.space, self.trajectory, release)
        else:
            logger.warning("step %s was paid for but its update is lost.", release.step)
