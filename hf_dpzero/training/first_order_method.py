"""DP-SGD, DP-AdamW and their plain forms in a run: noised gradients for torch's optimizers."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.batches.logical_batch import LogicalBatch
from hf_dpzero.batches.shapes import stacked
from hf_dpzero.checks.between_steps import WeightsBetweenSteps
from hf_dpzero.checks.data import SAMPLE, of_first_row
from hf_dpzero.checks.processes import check_weights
from hf_dpzero.estimators.per_example_gradients import per_example_gradients
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.losses import (
    PerExampleLoss,
    batch_size,
    num_examples,
    single_pass,
)
from hf_dpzero.run import Run
from hf_dpzero.training.first_order_step import (
    FirstOrderStep,
    Gradients,
    GroupMeans,
    PlainGradients,
)
from hf_dpzero.training.private_step import weighting_of
from hf_dpzero.training.signal import ReleasedSignal


class FirstOrderMethod:
    """DP-SGD and DP-AdamW, and sgd and adamw without privacy: gradients for torch's optimizers.

    Args:
      run: whose ledger is open.
      signal: what noised means are added to.

    Attributes:
      step, weights: as of `ZerothOrderMethod`.
      optimizer: None: the one that `optim` names.

    Raises:
      ValueError: a trainable layer without per-example gradients.
    """

    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, run: Run, signal: ReleasedSignal) -> None:
        self.run = run
        objective: PerExampleLoss = run.evaluate
        if (weighting := weighting_of(run)) is not None:
            objective = weighting.objective(objective)
        self.weights = WeightsBetweenSteps(run.model, run.plan.mechanism.private)
        self.step = FirstOrderStep(
            mechanism=run.plan.mechanism,
            gradients=self._gradients(objective),
            noise=run.step_noise or run.noise,
            trajectory=run.opened,
            mechanism_at=run.plan.scheduled,
            signal=signal,
            weighting=weighting,
            mesh=run.mesh,
        )

    def _gradients(self, objective: PerExampleLoss) -> Gradients:
        model, args = self.run.model, self.run.args
        by_group = args.clipping == "averaged" or self.run.units is not None
        if args.not_private or by_group:
            plain = PlainGradients(model, objective)
            return GroupMeans(plain) if by_group else plain
        if not single_pass(objective):  # passes of one row, each its own group
            by_row = GroupMeans(PlainGradients(model, objective))
            with isolated_randomness(), of_first_row("differentiated"):
                by_row.weighted_sum([self.run.rows.collate_rows([0])], torch.ones_like)
            return by_row
        gradients = per_example_gradients(
            model,
            objective,
            args.performance.per_example_gradients,
            args.physical_batch_size,
            autocast=args.mixed_precision != "no",
        )
        shapes = self.run.shapes
        with isolated_randomness():
            several = shapes is not None and not shapes.one_by_one
            gradients.check_attribution(self._rows_together(), exact=several)
        return gradients

    def _rows_together(self) -> Mapping[str, Tensor]:
        """Three of the first rows in one batch; the run's own pass where the collator cannot pad."""
        rows, count = self.run.rows, len(self.run.dataset)
        try:
            return rows.collate_rows([i % count for i in range(3)])
        except (RuntimeError, ValueError):
            assert self.run.shapes is not None
            passes = self.run.shapes.microbatches(list(range(min(count, SAMPLE))))
            fullest = max(passes, key=num_examples)
            return fullest if batch_size(fullest) > 1 else stacked([fullest] * 3)

    def take(self, batch: LogicalBatch, learning_rate: float) -> Tensor | None:
        """Leaves the noised gradient in the parameters, for the optimizer."""
        self.weights.check()
        check_weights(self.run, batch["step"])
        parts: Sequence[Any] = batch["microbatches"]
        if self.run.units is not None or self.run.args.clipping == "averaged":
            # Microbatches of one group follow each other, and none has examples of two.
            last = itertools.accumulate(batch["examples"])
            paired = zip((batch["groups"][end - 1] for end in last), parts, strict=True)
            by_group = itertools.groupby(paired, key=operator.itemgetter(0))
            parts = [[part for _, part in group] for _, group in by_group]
        row_groups = batch["row_groups"]
        return self.step(batch["step"], parts, learning_rate, row_groups, batch["batch_digest"])

    def lower_rate(self) -> float:
        """Returns 1: the rate is a given one."""
        return 1.0

    def settle_(self) -> None:
        """Refuses weights that something else wrote to; the parameters always hold theta."""
        self.weights.check()

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: all is in the weights and the optimizer."""
        return {}
