"""The y-player of group-robust training in a run: weights before a step, releases after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.losses import (
    Inputs,
    PaddedMicrobatch,
    PerExampleLoss,
    WrappedObjective,
    batch_size,
    num_examples,
)
from hf_dpzero.parallel.collectives import numbers_of_main, sum_over_processes
from hf_dpzero.privacy.group_losses import metric_keys
from hf_dpzero.privacy.noise import NoiseSource
from hf_dpzero.privacy.plan import PrivacyPlan
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
    """

    y: np.ndarray | None = None

    def __init__(self, plan: PrivacyPlan, noise: NoiseSource, trajectory: Trajectory) -> None:
        assert plan.groups is not None
        self.groups, self._noise, self._trajectory = plan.groups, noise, trajectory
        self._player = plan.groups.player(plan)
        self._own = plan.mechanism.values_per_release  # the groups' numbers come after these
        self._seen = 0

    def begin(self) -> np.ndarray:
        """y_i / pi_i of each group for the next step, float64 [m]."""
        new = self._trajectory.releases[self._seen :]
        self._seen += len(new)
        values = [release.values[self._own :] for release in new]
        y = numbers_of_main(
            lambda: self._player.begin(values, self._noise).tolist(), self.groups.num_groups
        )
        self.y = np.array(y)
        return self.groups.example_weights(self.y)

    def total(self, losses: Tensor, of: Sequence[int], counts: bool = True) -> list[int]:
        """The un-noised sum of the groups' losses over all processes; private.

        Args:
          losses: of this process' examples, [B].
          of: their groups.
          counts: whether no other process adds the same examples.
        """
        total = self.groups.total(losses.detach().cpu().double().numpy(), of)
        return sum_over_processes(total if counts else [0] * len(total))

    def end(self, total: Sequence[int], mechanism: Any, step: int) -> tuple[float, ...]:
        """What the step writes to the ledger of its losses. Called on rank 0 alone, which draws noise.

        Args:
          total: of `total`.
          mechanism: of this step; its noise multiplier is the weights' part's.
          step: its number.
        """
        multiplier = mechanism.effective_noise_multiplier
        return tuple(self._player.end(list(total), multiplier, step, self._noise))


class WeighedLosses:
    """An objective whose losses are multiplied by weights that come with the inputs, and remembered.

    The gradient of w l is w times the gradient of l, so per-example gradients are weighted before their
    norms are taken and clipped.

    Attributes:
      objective: the weighed one; inputs without `WEIGHTS` are evaluated as they are.
      losses: of the last batch, unweighted, float64 [B] on the CPU.
    """

    def __init__(self, objective: PerExampleLoss) -> None:
        self.objective = WrappedObjective(objective, self._weighing)
        self.losses = torch.zeros(0, dtype=torch.float64)

    def _weighing(self, objective: PerExampleLoss, model: nn.Module, inputs: Inputs) -> Tensor:
        own = {k: v for k, v in inputs.items() if k not in (WEIGHTS, PLACES)}
        losses = objective(model, own)
        if WEIGHTS not in inputs:
            return losses
        places = inputs[PLACES].cpu()
        self.losses[places[places >= 0]] = losses.detach().double().cpu()[places >= 0]
        return losses * inputs[WEIGHTS].to(losses)

    def weighed(
        self, microbatches: Sequence[Inputs], of: Sequence[int], weights: np.ndarray
    ) -> Sequence[Mapping[str, Tensor]]:
        """The microbatches with each example's weight; forgets the losses of the last batch.

        Args:
          microbatches: B examples in all.
          of: their groups, in order.
          weights: of the groups.
        """
        self.losses = torch.full((len(of),), torch.nan, dtype=torch.float64)
        each, parts, start = torch.from_numpy(weights[np.asarray(of, dtype=np.int64)]), [], 0
        for part in microbatches:
            stop, blanks = start + num_examples(part), batch_size(part) - num_examples(part)
            weight = torch.cat([each[start:stop], each.new_zeros(blanks)])
            places = torch.cat([torch.arange(start, stop), torch.full((blanks,), -1)])
            own = {WEIGHTS: weight, PLACES: places}
            parts.append(PaddedMicrobatch({**part, **own}, stop - start))
            start = stop
        return parts


def weighting_of(run: Run) -> GroupWeighting | None:
    """Returns the weighting of a run whose ledger is open; None without groups."""
    if run.plan.groups is None:
        return None
    return GroupWeighting(run.plan, run.noise, run.opened)


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
