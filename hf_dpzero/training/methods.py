"""The two kinds of training: zeroth-order steps in place, and noised gradients for torch's optimizers.

Both keep the same ledger under the same plan.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import LogicalBatch
from hf_dpzero.batches.placement import bucket
from hf_dpzero.batches.shapes import stacked
from hf_dpzero.estimators import precision_diagnostics
from hf_dpzero.estimators.deferred_updates import WeightReads, all_known
from hf_dpzero.estimators.exactness_checks import make_exact
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.estimators.per_example_gradients import per_example_gradients
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.ledger.replay import directions_of, space_from_header
from hf_dpzero.objectives.losses import Filled, PerExampleLoss, is_compiled
from hf_dpzero.parallel.rank_agreement import check_strategy, check_weights
from hf_dpzero.parallel.rank_failures import RankError
from hf_dpzero.parallel.sharded_runs import Lockstep
from hf_dpzero.run_folder.run_files import discard_unused
from hf_dpzero.settings.defaults import steps_that_follow
from hf_dpzero.settings.schedules import smoothing_of_steps
from hf_dpzero.training.before_training import invented_form, smallest_clip_and_scale
from hf_dpzero.training.between_steps import WeightsBetweenSteps
from hf_dpzero.training.first_order_step import FirstOrderStep, GroupMeans, PlainGradients
from hf_dpzero.training.group_training import WeighedLosses, weighting_of
from hf_dpzero.training.invented_rows import InventedRows
from hf_dpzero.training.precision import low_precision, refuse_compiled
from hf_dpzero.training.public_rows import (
    NOT_TAKEN,
    check_differences,
    public_microbatch,
    public_microbatches,
)
from hf_dpzero.training.smoke_test import ROOM
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep

logger = logging.get_logger(__name__)


class TrainingMethod(ABC):
    """Makes the steps of a run.

    Args:
      trainer: a `DPZeroTrainer` whose ledger is open.
      state: a checkpoint's `state_dict`, or None for a run that starts.

    Attributes:
      step: a `ZerothOrderStep` or a `FirstOrderStep`.
      optimizer: carries the learning rate, or None to take the one that `optim` names.
      weights: noted where the run leaves them, compared before it goes on.
    """

    step: Any
    optimizer: torch.optim.Optimizer | None = None
    weights: WeightsBetweenSteps

    @abstractmethod
    def __init__(self, trainer: Any, state: Mapping[str, Any] | None) -> None: ...

    @abstractmethod
    def take(self, batch: LogicalBatch, learning_rate: float) -> Tensor | None:
        """Takes a step.

        Args:
          batch: its number and microbatches.
          learning_rate: of this step.

        Returns:
          Un-noised statistics [B, K] (private), or None if no data was read.
        """

    @abstractmethod
    def settle_(self) -> None:
        """Makes the parameters hold theta; refuses weights that something else wrote to."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beyond weights and optimizer; public, JSON-safe."""
        return {}


class ZerothOrderMethod(TrainingMethod):
    """DPZero, DPGD-0th and MeZO: the parameters move along public directions, in place."""

    def __init__(self, trainer: Any, state: Mapping[str, Any] | None) -> None:
        args, header = trainer.resolved_args, trainer.trajectory.header
        self.trainer = trainer
        self.space = space_from_header(trainer.model, header)
        if state is None:
            self.space.snap_()
        else:
            self.space.load_state_dict(state)
        self.lockstep = Lockstep(trainer) if trainer.shards else list
        differences = FiniteDifferences(
            trainer.model,
            self.space,
            trainer.evaluated_objective(),
            args.smoothing,
            args.performance.reuse_frozen_prefix,
            args.performance.perturbation_strategy,
            passes_of(trainer),
        )
        with isolated_randomness():
            direction = directions_of(0, header)[0]
            trial = public_microbatch(trainer)  # what it decides, private rows may not decide
            public = trial is not None or not trainer.plan.mechanism.private
            messages = make_exact(
                differences,
                trial or trainer.probe(),
                direction,
                args.num_directions,
                public,
                may_stack=not low_precision(trainer.model, args),
            )
        if differences.stack is not None and trainer.shapes and not trainer.shapes.one_by_one:
            with _discarding(trainer):
                messages += _try_stacked(trainer, differences)
        for message in messages:
            logger.warning(message)
        with _discarding(trainer):
            check_strategy(differences)
            if not trainer.trajectory.releases:
                check_differences(trainer, differences)
        # An update may wait only if weights are read between steps through forward(), state_dict()
        # or copies, where it is made first; callbacks of others may read them directly.
        readers = [trainer, *trainer.callback_handler.callbacks]
        self.step = ZerothOrderStep(
            mechanism=trainer.plan.mechanism,
            space=self.space,
            differences=differences,
            noise=trainer.step_noise(),
            trajectory=trainer.trajectory,
            follow_clip=steps_that_follow(trainer.args, trainer.plan.steps),
            mechanism_at=trainer.plan.scheduled,
            smoothing_at=smoothing_of_steps(args, trainer.plan.steps),
            defer=args.performance.defer_updates
            and all_known(readers)
            and not is_compiled(trainer.model),
            weighting=weighting_of(trainer),
            split=trainer.split,
        )
        trainer.split.connect()
        self.weights = WeightsBetweenSteps(trainer.model)
        self.reads = WeightReads(trainer.model, self.space, self.settle_)
        trainer.while_training(self.reads)
        _warn_of_rounding(trainer, differences)
        self.optimizer = _LearningRate(self.space.tensors, args.learning_rate)

    def take(self, batch: LogicalBatch, learning_rate: float) -> Tensor | None:
        """As in the base class; settles at once if a callback of others was added since the start."""
        check_weights(self.trainer, batch["step"])
        with self.weights.own_write(), self.reads.own_step():
            parts: Sequence[Any] = list(map(Filled, batch["microbatches"], batch["examples"]))
            groups = batch["groups"] if self.trainer.args.clipping == "averaged" else None
            row_groups = batch["row_groups"]
            parts = self.lockstep(parts)
            differences = self.step(
                batch["step"], parts, learning_rate, groups, row_groups, batch["agreed"]
            )
            if self.step.defer and not all_known(self.trainer.callback_handler.callbacks):
                self.space.settle_()
        return differences

    def settle_(self) -> None:
        """Removes the perturbation and makes the update that waits, if nobody wrote to the weights."""
        if self.space.settled:
            self.space.settle_()  # refuses what failed half-way
            return self.weights.check()
        with self.weights.own_write():
            self.space.settle_()

    def state_dict(self) -> dict[str, Any]:
        """The grids of the parameter space."""
        return self.space.state_dict()


class FirstOrderMethod(TrainingMethod):
    """DP-SGD and DP-AdamW, and sgd and adamw without privacy: gradients for torch's optimizers.

    Raises:
      ValueError: a compiled model, or a trainable layer without per-example gradients.
    """

    def __init__(self, trainer: Any, state: Mapping[str, Any] | None) -> None:
        self.trainer = trainer
        objective: PerExampleLoss = trainer.evaluated_objective()
        weighting = weighting_of(trainer)
        weighed = None if weighting is None else WeighedLosses(objective)
        self.weights = WeightsBetweenSteps(trainer.model, trainer.plan.mechanism.private)
        self.step = FirstOrderStep(
            mechanism=trainer.plan.mechanism,
            gradients=self._gradients(objective if weighed is None else weighed.objective),
            noise=trainer.step_noise(),
            trajectory=trainer.trajectory,
            mechanism_at=trainer.plan.scheduled,
            signal=trainer.watch.signal,
            weighting=weighting,
            weighed=weighed,
            split=trainer.split,
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
            args.performance.per_example_gradients,
            args.physical_batch_size,
            autocast=args.mixed_precision != "no",
        )
        rows, shapes = self.trainer.training_rows(), self.trainer.shapes
        tried = [i % len(self.trainer.train_dataset) for i in range(3)]
        with isolated_randomness():
            several = shapes is not None and not shapes.one_by_one
            gradients.check_attribution(rows.collate_rows(tried), exact=several)
        return gradients

    def take(self, batch: LogicalBatch, learning_rate: float) -> Tensor | None:
        """Leaves the noised gradient in the parameters, for the optimizer."""
        self.weights.check()
        check_weights(self.trainer, batch["step"])
        parts: Sequence[Any] = batch["microbatches"]
        if self.trainer.args.clipping == "averaged":
            last = itertools.accumulate(batch["examples"])
            paired = zip((batch["groups"][end - 1] for end in last), parts, strict=True)
            by_group = itertools.groupby(paired, key=operator.itemgetter(0))
            parts = [[part for _, part in group] for _, group in by_group]
        row_groups = batch["row_groups"]
        return self.step(batch["step"], parts, learning_rate, row_groups, batch["agreed"])

    def settle_(self) -> None:
        """As in the base class: the parameters always hold theta."""
        self.weights.check()


def private_diagnostics(differences: Tensor, mechanism: Any) -> dict[str, float]:
    """Un-noised statistics of a step, logged only on request (they break the guarantee).

    Args:
      differences: finite differences or gradient norms [B, K].
      mechanism: its clip is compared.

    Returns:
      Batch size, share of clipped examples and median norm.
    """
    if not len(differences):
        return {"private_batch_size": 0.0}
    norms = differences.norm(dim=1)
    return {
        "private_batch_size": float(len(differences)),
        "private_clip_fraction": float((norms > mechanism.radius).double().mean()),
        "private_difference_norm": float(norms.median()),
    }


class _LearningRate(torch.optim.Optimizer):
    """Carries the learning rate for Hugging Face's schedulers; the update happens in the step."""

    def __init__(self, tensors: list[Tensor], learning_rate: float) -> None:
        super().__init__(tensors, {"lr": learning_rate})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Does nothing: the training step has updated the parameters."""


def passes_of(trainer: Any) -> float:
    """Microbatches that a step is expected to have on this process, by public numbers."""
    rows = trainer.plan.sampler.expected_batch_size / trainer.split.rows
    if trainer.shapes is None:
        return float(rows / trainer.args.physical_batch_size)
    return float(trainer.shapes.placement.expected_passes() / trainer.split.rows)


def _try_stacked(trainer: Any, differences: FiniteDifferences) -> list[str]:
    """Leaves out small passes whose places move what a row adds under `stacked` (see `smoke_test`).

    Where a pass' own places do, the strategy is `whole_model`.

    Returns:
      What was turned off and why, for a log.

    Raises:
      ValueError: `stacked` was asked for by name.
    """
    shapes, directions = trainer.shapes, directions_of(0, trainer.trajectory.header)
    invented = InventedRows(invented_form(trainer, shapes), trainer.model, shapes.side)
    least = bucket(1, shapes.most, shapes.cut)
    row = invented.narrow(1, least)
    clip, scale = smallest_clip_and_scale(trainer)
    try:
        with isolated_randomness(0):
            found = [
                differences([Filled(stacked([row] * size), size)], directions)
                for size in shapes.placement.sizes
            ]
    finally:
        differences.space.settle_()
    order = 1 if trainer.plan.mechanism.distribution == "laplace" else 2
    # what is above one: other smoothing than this step's, the norm of u, weights of groups
    beyond = scale * differences.smoothing / len(directions) ** (1 / order)
    for left_out in range(len(found)):
        placed = torch.cat(found[left_out:])
        if beyond * float((placed - placed[0]).norm(p=order, dim=1).max()) <= ROOM * clip:
            shapes.placement.restrict_(shapes.placement.sizes[left_out:])
            return []
    reason = "moves what an example adds by its place in a pass"
    if not differences.chosen_automatically:
        raise ValueError(
            f"strategy='stacked' {reason}: use 'whole_model', or set microbatch_size=1."
        )
    differences.use("whole_model")
    return [f"the strategy is whole_model: stacked {reason}."]


@contextlib.contextmanager
def _discarding(trainer: Any) -> Iterator[None]:
    """Removes the ledger of a run that is refused before it has released anything."""
    try:
        yield
    except (ValueError, RankError):
        if not trainer.trajectory.releases:
            discard_unused(trainer.trajectory)
        raise


def _warn_of_rounding(trainer: Any, differences: FiniteDifferences) -> None:
    """In low precision, logs how large rounding is beside the finite differences of public rows."""
    dtype = low_precision(trainer.model, trainer.args)
    if not dtype:
        return
    try:
        with isolated_randomness():
            public = public_microbatches(trainer)
            ratio = precision_diagnostics.measure(differences, public, dtype) if public else None
    except ParameterChanged:
        raise
    except NOT_TAKEN as error:
        logger.info(f"signal and rounding were not compared: {error}")
        return
    if ratio is None:
        logger.info("signal and rounding were not compared: no public batch could be made.")
    elif trainer.is_world_process_zero():
        (logger.info if ratio.sufficient else logger.warning)(str(ratio))
