"""What a trainer delegates to: zeroth-order steps on a parameter space, or noised gradients for torch's
optimizers. Both keep the same ledger under the same plan.
"""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_dpzero.estimators import precision_diagnostics
from hf_dpzero.estimators.deferred_updates import WeightReads, all_known
from hf_dpzero.estimators.exactness_checks import make_exact
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.ghost_clipping import per_example_gradients
from hf_dpzero.estimators.parameter_guard import ParameterChanged
from hf_dpzero.ledger.replay import directions_of, space_from_header
from hf_dpzero.objectives.losses import PerExampleLoss, is_compiled
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.training.batches import LogicalBatch
from hf_dpzero.training.first_order_step import FirstOrderStep, GroupMeans, PlainGradients
from hf_dpzero.training.precision import refuse_compiled
from hf_dpzero.training.random_state import isolated_randomness
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep

logger = logging.get_logger(__name__)


class TrainingMethod(ABC):
    """One way of making a run's steps.

    Args:
      trainer: a `DPZeroTrainer` whose ledger is open.
      state: a checkpoint's `state_dict`, or None for a run that starts.

    Attributes:
      step: what takes one step under the ledger.
      optimizer: carries the learning rate, or None to take the one that `optim` names.
    """

    step: Any
    optimizer: torch.optim.Optimizer | None

    @abstractmethod
    def __init__(self, trainer: Any, state: Mapping[str, Any] | None) -> None: ...

    @abstractmethod
    def take(self, batch: LogicalBatch, learning_rate: float) -> Tensor | None:
        """Takes a step; its un-noised statistics [B, K], or None."""

    @abstractmethod
    def settle_(self) -> None:
        """Afterwards the parameters may be read."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beyond weights and optimizer; public, JSON-safe."""


class ZerothOrderMethod(TrainingMethod):
    """DPZero, DPGD-0th and MeZO: the parameters move along public directions, in place."""

    def __init__(self, trainer: Any, state: Mapping[str, Any] | None) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.space = self._parameter_space(state)
        self.step = ZerothOrderStep(
            mechanism=trainer.plan.mechanism,
            space=self.space,
            differences=self._estimator(trainer.evaluated_objective()),
            noise=trainer.noise,
            trajectory=trainer.trajectory,
            defer=self._may_defer(),
        )
        self.reads = WeightReads(trainer.model, self.space)
        trainer.while_training(self.reads)
        _warn_of_rounding(trainer, self.step.differences)
        self.optimizer = _LearningRate(self.space.tensors, self.args.learning_rate)

    def _parameter_space(self, state: Mapping[str, Any] | None) -> ParameterSpace:
        space = space_from_header(self.trainer.model, self.trainer.trajectory.header)
        if state is None:
            space.snap_()
        else:
            space.load_state_dict(state)
        return space

    def _estimator(self, objective: PerExampleLoss) -> FiniteDifferences:
        differences = FiniteDifferences(
            self.trainer.model,
            self.space,
            objective,
            self.args.smoothing,
            self.args.reuse_frozen_prefix,
            self.args.perturbation_strategy,
        )
        direction = directions_of(0, self.trainer.trajectory.header)[0]
        with isolated_randomness():
            messages = make_exact(
                differences, self.trainer.probe(), direction, self.args.num_directions
            )
        for message in messages:
            logger.warning(message)
        return differences

    def _may_defer(self) -> bool:
        """True if weights are read between steps only through forward(), state_dict() or copies."""
        known = all_known([self.trainer, *self.trainer.callback_handler.callbacks])
        return self.args.defer_updates and known and not is_compiled(self.trainer.model)

    def take(self, batch: LogicalBatch, learning_rate: float) -> Tensor | None:
        """One private step (see `zeroth_order_step`), on settled parameters if others may look."""
        with self.reads.own_step():
            differences = self.step(batch["step"], batch["microbatches"], learning_rate)
            if self.step.defer and not all_known(self.trainer.callback_handler.callbacks):
                self.space.settle_()  # a callback came in after the start
        return differences

    def settle_(self) -> None:
        """Takes the perturbation off and makes the update that waits."""
        self.space.settle_()

    def state_dict(self) -> dict[str, Any]:
        """The grids of the parameter space."""
        return self.space.state_dict()


class FirstOrderMethod(TrainingMethod):
    """DP-SGD and DP-AdamW, and sgd and adamw without privacy: gradients for torch's optimizers.

    Raises:
      ValueError: a compiled model, or a trainable layer without per-example gradients.
    """

    optimizer = None

    def __init__(self, trainer: Any, state: Mapping[str, Any] | None) -> None:
        self.trainer = trainer
        self.step = FirstOrderStep(
            mechanism=trainer.plan.mechanism,
            gradients=self._gradients(trainer.evaluated_objective()),
            noise=trainer.noise,
            trajectory=trainer.trajectory,
        )

    def _gradients(self, objective: PerExampleLoss) -> Any:
        model, args = self.trainer.model, self.trainer.args
        if args.not_private or args.clipping == "averaged":
            plain = PlainGradients(model, objective)
            return GroupMeans(plain) if args.clipping == "averaged" else plain
        refuse_compiled(model, args.method)
        gradients = per_example_gradients(
            model,
            objective,
            args.per_example_gradients,
            args.physical_batch_size,
            autocast=args.mixed_precision != "no",
        )
        rows = self.trainer._training_rows()
        tried = [i % len(self.trainer.train_dataset) for i in range(3)]
        with isolated_randomness():
            gradients.check_attribution(rows.collate_rows(tried))
        return gradients

    def take(self, batch: LogicalBatch, learning_rate: float) -> Tensor | None:
        """Leaves the noised gradient in the parameters (see `hf_dpzero.training.first_order_step`)."""
        parts: Sequence[Any] = batch["microbatches"]
        if self.trainer.args.clipping == "averaged":
            paired = zip(batch["groups"], parts, strict=True)
            by_group = itertools.groupby(paired, key=operator.itemgetter(0))
            parts = [[part for _, part in group] for _, group in by_group]
        return self.step(batch["step"], parts, learning_rate)

    def settle_(self) -> None:
        """Nothing: the parameters always hold theta."""

    def state_dict(self) -> dict[str, Any]:
        """{}: optimizer and weights are in the checkpoint already."""
        return {}


class _LearningRate(torch.optim.Optimizer):
    """Carries the learning rate for Hugging Face's schedulers; the update happens in the step."""

    def __init__(self, tensors: list[Tensor], learning_rate: float) -> None:
        super().__init__(tensors, {"lr": learning_rate})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing: the step has updated the parameters."""


def _warn_of_rounding(trainer: Any, differences: FiniteDifferences) -> None:
    """Logs signal and rounding of a `DPZeroTrainer` in low precision; nothing in float32."""
    dtype = precision_diagnostics.low_precision(trainer.model, trainer.args)
    if dtype is None:
        return
    try:
        with isolated_randomness():
            public = _public_microbatches(trainer)
            found = precision_diagnostics.measure(differences, public, dtype) if public else None
    except ParameterChanged:
        raise
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        logger.info(f"signal and rounding were not compared: {error}")
        return
    if found is None:
        logger.info("signal and rounding were not compared: no public batch could be made.")
    elif trainer.is_world_process_zero():
        (logger.info if found.sufficient else logger.warning)(str(found))


def _public_microbatches(trainer: Any) -> list[Mapping[str, Tensor]]:
    """A few rows of eval_dataset, or random tokens, split as the run splits its batches."""
    evaluation = trainer.eval_dataset
    if isinstance(evaluation, dict):
        evaluation = next(iter(evaluation.values()), None)
    size = trainer.args.physical_batch_size
    if hasattr(evaluation, "__len__") and len(evaluation):
        return _rows_of(trainer, evaluation, size)
    batch = precision_diagnostics.random_tokens(trainer.probe(), trainer.model)
    if batch is None:
        return []
    return [
        {name: value[i : i + size] for name, value in batch.items()}
        for i in range(0, precision_diagnostics.ROWS, size)
    ]


def _rows_of(trainer: Any, evaluation: Any, size: int) -> list[Mapping[str, Tensor]]:
    trainer.refuse_private(evaluation)
    rows, count = trainer.rows_of(evaluation), min(precision_diagnostics.ROWS, len(evaluation))
    starts = range(0, count, size)
    return [rows.collate_rows(list(range(i, min(i + size, count)))) for i in starts]
