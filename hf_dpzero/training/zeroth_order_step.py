"""One private zeroth-order step. Knows nothing of transformers.

    S      = sampler.batch(t, secret key)                             sample (batches/logical_batch.py)
    u_k    = direction(public key, t, k),   k = 1..K                  perturb
    x_ik   = (f(theta + lambda u_k; xi_i) - f(theta - lambda u_k; xi_i)) / (2 lambda)      evaluate
           or (f(theta + lambda u_k; xi_i) - f(theta; xi_i)) / lambda, as `differences` says
    x_j    = mean of the x_i of unit j, where several rows are one                         average
    x_i    = w_i x_i, w_i the weight of example i's group (group-robust training only)     weigh
    total  = sum_{i in S} clip_C(x_i)                                 clip, sum
    value  = (total + noise) / B                                      noise
    ledger <- (t, value, alpha)                                       log, before the weights move
    theta  <- (1 - alpha wd) theta - alpha sum_k value_k u_k          update

DPZero, Algorithm 2 (Zhang et al. 2024). Algorithm 1 (DPGD-0th) adds d-dimensional noise instead.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.batches.units import unit_means
from hf_dpzero.estimators.finite_differences import FiniteDifferences, Microbatch
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.ledger.replay import apply_release, directions_of
from hf_dpzero.ledger.trajectory import Release
from hf_dpzero.parallel.collectives import active, broadcast_, is_main
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.mechanisms import Mechanism, ScalarReleases, VectorMechanism
from hf_dpzero.privacy.mechanisms.base import check_dimension
from hf_dpzero.privacy.schedules import MechanismSchedule
from hf_dpzero.training.private_step import PrivateStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ZerothOrderStep(PrivateStep):
    """Takes the steps of a zeroth-order run, one a call.

    Guarantee: `value` is all that a step makes of the data, and it is in the ledger before the
    weights move. The mechanism bounds what one example adds to `total`; the divisor B is public.

    Attributes:
      space: the trainable parameters.
      differences: finite differences of the losses along directions.
      smoothing_at: step -> lambda of that step; None for one that stays.
      units: rows are averaged by unit before the clip; `groups` has their codes.
      follow_clip: for so many steps, learning rate times clip squared is what it was for the plan's
        clip; then the rate stays with the clip of that step (see `settings.defaults`).
      follow_to: beyond them it follows as far as the clip is above this one.
      follow_most: it grows to so many times the given one at most.
      defer: leave restore and update to the next step's first forward pass, or to `space.settle_`,
        which is called before anything else reads them (`estimators.forward_passes`). A process that is
        alone then syncs the ledger beside the sampling of the next batch.
    """

    # Why the sync may run on after the step: all that the step leaves of the release lies in the
    # trajectory, whose readers wait: logs, checkpoints, reports, the next step. The weights stand where
    # the last pass left them, at a public perturbation, and whoever may see more (a forward pass, the
    # next step's too, state_dict, a copy) settles them, which asks the trajectory for the release. Other
    # processes, and callbacks that may read weights directly (`defer` is off), come after the sync.

    space: ParameterSpace
    differences: FiniteDifferences
    smoothing_at: Callable[[int], float] | None = None
    units: bool = False
    follow_clip: int = 0
    follow_to: float = math.inf
    follow_most: float = math.inf
    defer: bool = False

    def __call__(
        self,
        step: int,
        microbatches: Sequence[Microbatch],
        learning_rate: float,
        groups: Sequence[int] | None = None,
        row_groups: Sequence[int] = (),
        batch_digest: int = 0,
    ) -> Tensor | None:
        """Takes a step.

        A step that the ledger holds already (paid for before a crash) is applied again from there:
        no data, no noise.

        Args:
          step: its number t, from 0.
          microbatches: this process' share of the sampled batch; none releases noise alone.
          learning_rate: alpha.
          groups: averaged clipping: the group of each example, in order; of units their codes.
          row_groups: group-robust training: the group of each example, in order.
          batch_digest: of `logical_batch.fingerprint`; compared between processes before any release.

        Returns:
          The un-noised, weighted differences, float64 [B, K] (private: for opt-in diagnostics only);
          None for a step taken from the ledger.
        """
        if (recorded := self.trajectory.get(step)) is not None:
            if self.trajectory.header["replayable"]:
                apply_release(self.space, self.trajectory, recorded)
            else:
                logger.warning("step %s was paid for but its update is lost.", step)
            return None
        directions = directions_of(step, self.trajectory.header)
        if self.smoothing_at is not None:
            self.differences.smoothing = self.smoothing_at(step)
        # Draws of a forward pass may not move the global generators, whose state checkpoints hold.
        with isolated_randomness():
            x, losses = self.differences.with_losses(microbatches, directions, self.mesh)
        if self.units:
            x, groups = unit_means(x, groups or ()), None
        if self.weighting is not None:
            x = x * self.weighting.begin(row_groups).unsqueeze(1)
            self.weighting.losses = losses
        mechanism = self._schedule.after(self.trajectory.appended)  # `get` has waited
        if isinstance(mechanism, VectorMechanism):
            self._release_vector(mechanism, step, directions, x, learning_rate, batch_digest)
            return x
        assert isinstance(mechanism, ScalarReleases)
        own = mechanism.clip_sum(x, *([] if groups is None else [groups]))
        total: list[Any] = self.mesh.sum_checked(own, batch_digest)
        released = functools.partial(mechanism.release, total, step, self.noise)
        rate = learning_rate
        if self.follow_clip:
            followed = mechanism.clip
            if step > self.follow_clip:
                followed = min(self._held.clip, max(followed, self.follow_to))
            rate *= min(float((self.mechanism.clip / followed) ** 2), self.follow_most)
        late = self.defer and not active()
        release = self._release(step, rate, mechanism, released, wait=not late)
        if late:
            self.space.leave_(functools.partial(self._apply, step))
        else:
            apply_release(self.space, self.trajectory, release, defer=self.defer)
        return x

    def _apply(self, step: int) -> None:
        """Makes a step's update once its record is on disk; none for one that was taken back."""
        if (release := self.trajectory.get(step)) is not None:
            apply_release(self.space, self.trajectory, release, defer=True)

    @functools.cached_property
    def _held(self) -> Mechanism:
        """The mechanism of the last step whose clip the learning rate follows wherever it goes."""
        # A schedule of its own: `_schedule` only goes forward.
        schedule = MechanismSchedule(self.mechanism, self.mechanism_at)
        return schedule.after(self.trajectory.releases[: self.follow_clip])

    def _release_vector(
        self,
        mechanism: VectorMechanism,
        step: int,
        directions: Sequence[Direction],
        x: Tensor,
        learning_rate: float,
        batch_digest: int,
    ) -> None:
        """DPGD-0th: releases (sum_k total_k u_k + d-dimensional noise) / B as the update itself."""
        self.space.settle_()  # the whole update starts from theta
        check_dimension(mechanism, self.space.dimension)
        own = mechanism.clip_sum(x, self.space.gram(directions))
        totals = self.mesh.sum_checked(own, batch_digest)
        self.trajectory.append(Release(step, (), learning_rate))

        def update(part: int, total: Tensor) -> Tensor:
            moves = torch.empty(len(total))
            if is_main():
                mean = mechanism.release_part(total.cpu().numpy(), self.noise, step, part)
                moves = torch.from_numpy(-learning_rate * mean).float()
            broadcast_(moves)
            return moves.to(total.device)

        self.space.dense_step_(directions, totals, update)
