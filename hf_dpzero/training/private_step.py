"""What steps of both orders share: ledger, learning rate, weights of group-robust training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.objectives.losses import (
    Inputs,
    PaddedMicrobatch,
    PerExampleLoss,
    WrappedObjective,
    batch_size,
    num_examples,
)
from hf_dpzero.parallel.collectives import (
    numbers_of_main,
    release_on_all_ranks,
    sum_over_processes,
)
from hf_dpzero.parallel.mesh import ALONE, ProcessMesh
from hf_dpzero.privacy.group_losses import metric_keys
from hf_dpzero.privacy.mechanisms import Mechanism, NotNoised
from hf_dpzero.privacy.noise import NoiseSource
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.schedules import MechanismSchedule
from hf_dpzero.run import Run

LOGGED = 32
"""The weights of so many groups are logged one by one."""

WEIGHTS, PLACES = "hf_dpzero_example_weights", "hf_dpzero_example_places"
"""Of each example of a microbatch: its weight, and its place in the batch."""


class GroupWeighting:
    """Weighs a run's examples by their groups.

    Guarantee: weights follow from releases alone (and, of `vertex`, from draws that are accounted); what
    `end` returns is all that is made of the losses, and it is what the ledger gets.

    Args:
      plan: with `groups`.
      noise: of the run.
      trajectory: the ledger.

    Attributes:
      y: of the last step, a function of what was released; None before the first one.
      losses: of the step's examples, unweighted, [B]; who evaluates them sets it.
    """

    y: np.ndarray | None = None
    losses: Tensor

    def __init__(self, plan: PrivacyPlan, noise: NoiseSource, trajectory: Trajectory) -> None:
        assert plan.groups is not None
        self.groups, self._noise, self._trajectory = plan.groups, noise, trajectory
        self._player = plan.groups.player(plan)
        self._own = plan.mechanism.values_per_release  # the groups' numbers come after these
        self._seen = 0

    def begin(self, row_groups: Sequence[int]) -> Tensor:
        """The weight y_i / pi_i of each example in the next step, float64 [B]."""
        new = self._trajectory.appended[self._seen :]  # on disk: the step has asked for its own
        self._seen += len(new)
        values = [release.values[self._own :] for release in new]
        # Rank 0 draws for `vertex`; what follows from releases is the same everywhere.
        y = numbers_of_main(
            lambda: self._player.begin(values, self._noise).tolist(), self.groups.num_groups
        )
        self.y = np.array(y)
        self._row_groups = np.asarray(row_groups, dtype=np.int64)
        return torch.from_numpy(self.groups.example_weights(self.y)[self._row_groups])

    def total(self, counts: bool) -> list[int]:
        """The un-noised sum of the groups' `losses` over all processes; private.

        Args:
          counts: whether no other process adds the same examples.
        """
        losses = self.losses.detach().cpu().double().numpy()
        total = self.groups.total(losses, self._row_groups)
        return sum_over_processes(total if counts else [0] * len(total))

    def end(self, total: Sequence[int], mechanism: Mechanism, step: int) -> tuple[float, ...]:
        """What the step writes to the ledger of its losses; on rank 0 alone, which draws noise."""
        multiplier = mechanism.effective_noise_multiplier
        return tuple(self._player.end(list(total), multiplier, step, self._noise))

    def objective(self, objective: PerExampleLoss) -> WrappedObjective:
        """The objective times the weights that `weighed` puts beside inputs; others stay as they are.

        The gradient of w l is w times the gradient of l, so per-example gradients are weighted before
        their norms are taken and clipped.
        """
        return WrappedObjective(objective, self._evaluate)

    def _evaluate(self, objective: PerExampleLoss, model: nn.Module, inputs: Inputs) -> Tensor:
        losses = objective(model, {k: v for k, v in inputs.items() if k not in (WEIGHTS, PLACES)})
        if WEIGHTS not in inputs:
            return losses
        places = inputs[PLACES].cpu()
        self.losses[places[places >= 0]] = losses.detach().double().cpu()[places >= 0]
        return losses * inputs[WEIGHTS].to(losses)

    def weighed(
        self, microbatches: Sequence[Inputs], row_groups: Sequence[int]
    ) -> list[PaddedMicrobatch]:
        """The microbatches with each example's weight; evaluating them sets `losses`."""
        self.losses = torch.full((len(row_groups),), torch.nan, dtype=torch.float64)
        each, parts, start = self.begin(row_groups), [], 0
        for part in microbatches:
            stop, blanks = start + num_examples(part), batch_size(part) - num_examples(part)
            # Rows that fill a pass up weigh nothing and have no place among the losses.
            weight = torch.cat([each[start:stop], each.new_zeros(blanks)])
            places = torch.cat([torch.arange(start, stop), torch.full((blanks,), -1)])
            parts.append(PaddedMicrobatch({**part, WEIGHTS: weight, PLACES: places}, stop - start))
            start = stop
        return parts


@dataclass(frozen=True, kw_only=True)
class PrivateStep:
    """What steps of both orders share: the mechanism of a step, its noise, and the ledger.

    Guarantee: what `_release` writes to the ledger is all that a step tells of its scalars, and it is
    on disk before anything outside the step can act on it.

    Attributes:
      mechanism: the plan's: clipping norm, noise, expected batch size.
      mechanism_at: step -> the mechanism that the plan's schedules give it; None without schedules.
      noise: drawn once a step, on rank 0.
      trajectory: the ledger.
      weighting: of group-robust training, else None.
      mesh: which rows and directions this process evaluates.
    """

    mechanism: Mechanism
    noise: NoiseSource
    trajectory: Trajectory
    mechanism_at: Callable[[int], Mechanism] | None = None
    weighting: GroupWeighting | None = None
    mesh: ProcessMesh = ALONE

    @functools.cached_property
    def _schedule(self) -> MechanismSchedule[Mechanism]:
        return MechanismSchedule(self.mechanism, self.mechanism_at)

    def _release(
        self,
        step: int,
        learning_rate: float,
        mechanism: Mechanism,
        released: Callable[[], tuple[float, ...]],
        wait: bool = True,
    ) -> Release:
        """Writes down what `released` draws, and after it what groups' losses give."""
        weighting = self.weighting
        if weighting is None:
            return release_on_all_ranks(self.trajectory, step, learning_rate, released, wait)
        total = weighting.total(self.mesh.counts)

        def with_groups() -> tuple[float, ...]:
            return released() + weighting.end(total, mechanism, step)

        return release_on_all_ranks(self.trajectory, step, learning_rate, with_groups, wait)


def group_logs(weighting: GroupWeighting | None) -> dict[str, float]:
    """`group_weight_NAME`, y of each group in the last step; none without groups, or where y stays.

    Of more than 32 groups only the largest weight: `largest_group_weight`.
    """
    if weighting is None or weighting.y is None or not weighting.groups.num_values:
        return {}
    if weighting.groups.num_groups > LOGGED:
        return {"largest_group_weight": float(weighting.y.max())}
    keys = metric_keys(weighting.groups.names)
    return {f"group_weight_{key}": y for key, y in zip(keys, weighting.y.tolist(), strict=True)}


def weighting_of(run: Run) -> GroupWeighting | None:
    """Returns what weighs the groups of a run, where its plan has some."""
    return GroupWeighting(run.plan, run.noise, run.opened) if run.plan.groups else None


def private_diagnostics(
    differences: Tensor, mechanism: Mechanism, examples: int
) -> dict[str, float]:
    """Un-noised statistics of a step, logged only on request (they break the guarantee).

    Args:
      differences: finite differences [B, K] or gradient norms [B, 1] (averaged clipping: one for
        each group); [0, 1] of methods that take no norms.
      mechanism: its clip is compared, if it has one.
      examples: B, of this process.

    Returns:
      Batch size, and where there are norms their median and the share that is clipped.
    """
    found = {"private_batch_size": float(examples)}
    if not len(differences):
        return found
    norms = differences.norm(dim=1)
    found["private_difference_norm"] = float(norms.median())
    if not isinstance(mechanism, NotNoised):  # these do not clip
        found["private_clip_fraction"] = float((norms > mechanism.radius).double().mean())
    return found


class LearningRates:
    """Reads the rate of each step before its release, and holds the update to it.

    Attributes:
      used: the last step's; NaN before the first one.
    """

    used = math.nan

    def take(self, optimizer: torch.optim.Optimizer) -> float:
        """Returns the rate of the next update, which a callback may have set.

        Raises:
          ValueError: groups of parameters have several rates.
        """
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
        if len(rates) > 1:
            raise ValueError(
                f"learning rates {rates} of several groups of parameters, and the ledger writes one for "
                "each step: set the same in all of optimizer.param_groups."
            )
        self.used = rates[0]
        return self.used

    def check(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Refuses an update with another rate than that of the step's release."""
        before = self.used
        if (rate := self.take(optimizer)) != before:
            raise ValueError(
                f"a callback set the learning rate from {before:g} to {rate:g} between a step's "
                "release, which the ledger has, and its update: set it in on_step_begin or on_step_end."
            )
