"""What happens before step 0, then the two kinds of training: steps in place, or noised gradients.

Both kinds keep the same ledger under the same plan.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import LogicalBatch, StepBatches, StepSampler
from hf_dpzero.batches.shapes import PassShapes, stacked
from hf_dpzero.checks import passes
from hf_dpzero.checks.between_steps import WeightsBetweenSteps
from hf_dpzero.checks.data import SAMPLE, of_first_row
from hf_dpzero.checks.passes import blank_microbatch, invented_rows, smallest_clip_and_scale
from hf_dpzero.checks.precision import (
    keep_layout_,
    low_precision,
    low_precision_of,
    whole_products,
)
from hf_dpzero.checks.processes import check_strategy, check_weights
from hf_dpzero.checks.public_rows import (
    check_differences,
    leaving_out,
    public_microbatch,
    public_microbatches,
)
from hf_dpzero.checks.smoke_test import ROOM
from hf_dpzero.checks.table import run_checks
from hf_dpzero.estimators import landscape, precision_diagnostics
from hf_dpzero.estimators.arithmetic import compile_
from hf_dpzero.estimators.choose_strategy import choose_strategy, unmeasured
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import SettleBeforeRead, all_known
from hf_dpzero.estimators.landscape import Landscape
from hf_dpzero.estimators.per_example_gradients import per_example_gradients
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.ledger.replay import directions_of, space_from_header
from hf_dpzero.objectives.heads import select_objective, smoothed
from hf_dpzero.objectives.losses import (
    PaddedMicrobatch,
    PerExampleLoss,
    batch_size,
    is_compiled,
    num_examples,
    single_pass,
)
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.collectives import RankError
from hf_dpzero.parallel.fsdp import Lockstep
from hf_dpzero.perturbation.sharding import local
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.privacy.mechanisms import Mechanism, NotNoised
from hf_dpzero.privacy.words import group_warning
from hf_dpzero.run import Run
from hf_dpzero.run_folder.base_model import are_fresh
from hf_dpzero.run_folder.folder import discard_unused
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.defaults import rate_on, steps_that_follow
from hf_dpzero.settings.plan_of import extension_warning
from hf_dpzero.settings.schedules import judge_schedule, smoothing_of_steps
from hf_dpzero.training.first_order_step import (
    FirstOrderStep,
    Gradients,
    GroupMeans,
    PlainGradients,
)
from hf_dpzero.training.private_step import GroupWeighting
from hf_dpzero.training.signal import ReleasedSignal
from hf_dpzero.training.termination import left_to_parent
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep

logger = logging.get_logger(__name__)


def prepare(run: Run) -> None:
    """Makes the checks before step 0; chooses the objective, what trains, passes and mesh; compiles.

    Nothing of it is released.

    Raises:
      ValueError: what cannot be accounted or would break the guarantee; says what to change.
    """
    model, args = run.model, run.args
    keep_layout_(model)
    select_trainable(model, args.trainable)
    run_checks(run, "model")
    if run.objective is None:
        run.objective = smoothed(select_objective(model), args.label_smoothing_factor)
    run.cut_model()  # before the checks that evaluate: their passes are those of the steps
    run_checks(run, "objective")
    if collectives.is_main():
        judge_schedule(run.plan, run.delta)
        extended = extension_warning(run.plan, args.target_epsilon, run.delta)
        for warning in filter(None, (group_warning(run.plan), extended, run.rate_said)):
            logger.warning(warning)
    run.shapes = passes.shapes_of(run)
    compile_(model, args, run.shapes is not None, run.resources)
    run_checks(run, "passes")
    passes.compile_passes(run)


def loader_of(run: Run, key: bytes, taken: Callable[[], int]) -> DataLoader[LogicalBatch]:
    """Returns this process' logical batches, one item per step, split into microbatches.

    Args:
      run: whose ledger is open.
      key: of the sampler, secret.
      taken: steps taken so far, asked for when an epoch begins.
    """
    batches = StepBatches(
        rows=run.rows,
        plan=run.plan,
        key=key,
        microbatch_size=run.args.physical_batch_size,
        share=run.mesh.row,
        shares=run.mesh.rows,
        paid=run.opened.next_step,
        shapes=run.shapes,
        row_groups=run.row_groups,
        units=run.units,
        gradients=run.args.first_order,
    )
    return DataLoader(
        batches,
        batch_size=None,  # an item is a step's whole batch
        collate_fn=_as_it_is,
        sampler=StepSampler(run.plan, taken),
        num_workers=run.args.dataloader_num_workers,
        worker_init_fn=left_to_parent,
        pin_memory=False,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


class ZerothOrderMethod:
    """DPZero, DPGD-0th and MeZO: the parameters move along public directions, in place.

    Args:
      run: whose ledger is open.
      state: a checkpoint's `state_dict`, or None for a run that starts.

    Attributes:
      step: takes the steps.
      weights: noted where the run leaves them, compared before it goes on.
      optimizer: carries the learning rate for Hugging Face's schedulers; it moves nothing.
      space: the trainable coordinates.
    """

    def __init__(self, run: Run, state: Mapping[str, Any] | None) -> None:
        self.run = run
        self.space = space_from_header(run.model, run.header)
        self._follow_most = math.inf
        if state is None:
            self.space.snap_()
        else:
            self.space.load_state_dict(state["grids"])
            self._follow_most = state["follow_most"]
            if told := state["landscape"]:
                run.landscape = Landscape(*told)
        self.lockstep = (
            Lockstep(run.objective, blank_microbatch(run))
            if run.sharded and run.objective is not None
            else list
        )
        try:
            differences = self._differences()
        except (ValueError, RankError):
            # Nothing was released, so the folder may be used again.
            if not run.opened.releases:
                discard_unused(run.opened)
            raise
        self._cheap = differences.stack is not None
        if state is None and "learning_rate" in run.chosen and not run.rate_said:
            found = self._landscape()
            if found is not None and (rate := self._rate_on(found)):
                self._follow_most = max(1.0, rate / run.args.learning_rate)
                if rate < run.args.learning_rate:
                    run.landscape, run.args.learning_rate = found, rate
        self.step = ZerothOrderStep(
            mechanism=run.plan.mechanism,
            units=run.units is not None,
            space=self.space,
            differences=differences,
            noise=run.step_noise or run.noise,
            trajectory=run.opened,
            follow_clip=0
            if run.landscape
            else steps_that_follow(run.chosen, run.args.clipping, run.plan.steps),
            follow_most=self._follow_most,
            mechanism_at=run.plan.scheduled,
            smoothing_at=smoothing_of_steps(run.args, run.plan.steps),
            # An update may wait only if weights are read between steps through forward(),
            # state_dict() or copies, where it is made first; callbacks of others may read them
            # directly.
            defer=run.args.performance.defer_updates
            and all_known(run.readers())
            and not is_compiled(run.model),
            weighting=_weighting_of(run),
            mesh=run.mesh,
        )
        run.mesh.connect()
        self.weights = WeightsBetweenSteps(run.model)
        self.reads = SettleBeforeRead(run.model, self.space, self.settle_)
        run.resources.enter_context(self.reads)
        _warn_of_rounding(run, differences)
        self.optimizer = LearningRate(self.space.tensors, run.args)

    def _differences(self) -> FiniteDifferences:
        """Returns the estimator with the quickest strategy whose losses are those of full passes."""
        run, args = self.run, self.run.args
        differences = FiniteDifferences(
            run.model,
            self.space,
            run.evaluate,
            args.smoothing,
            args.performance.reuse_frozen_prefix,
            args.performance.perturbation_strategy,
            run.expected_passes,
            args.differences,
        )
        with isolated_randomness():
            direction = directions_of(0, run.header)[0]
            trial = public_microbatch(run)  # what it decides, private rows may not decide
            public = trial is not None or not run.plan.mechanism.private
            messages = choose_strategy(
                differences,
                trial or run.probe(),
                direction,
                args.num_directions,
                public,
                may_stack=not low_precision(run.model, args),
            )
        if differences.stack is not None and run.shapes and not run.shapes.one_by_one:
            messages += _try_stacked(run, run.shapes, differences)
        messages += unmeasured(differences, args.device.type, args.num_directions)
        for message in messages:
            logger.warning(message)
        check_strategy(differences)
        if not run.opened.releases:
            check_differences(run, differences)
        return differences

    def _landscape(self) -> Landscape | None:
        """What public rows' losses do around theta, in float32.

        None where there are no such rows, and in half precision, whose rounding hides curvature.
        """
        run, args, found = self.run, self.run.args, None
        around = FiniteDifferences(run.model, self.space, run.evaluate, args.smoothing)
        draws = landscape.CHEAP_DIRECTIONS if self._cheap else landscape.DIRECTIONS
        left_out = leaving_out("curvature of public rows was not looked at")
        with whole_products(), left_out, isolated_randomness():
            if args.mixed_precision != "no" or low_precision_of(run.model):
                return None
            if public := public_microbatches(run, landscape.ROWS, published=True):
                found = collectives.shared(landscape.measure(around, public, draws))
        return found

    @functools.cached_property
    def _size(self) -> float:  # once: it reads the checkpoint
        return size_of_moved(self.run)

    def _rate_on(self, found: Landscape) -> float:
        return rate_on(found, self.run.plan, self.run.args.lr_scheduler_type, self._size)

    def lower_rate(self) -> float:
        """Looks at public rows again, and lowers the run's rate where their losses curve more by now.

        The slope counts as at the start: that it falls is what a schedule is for.

        Returns:
          By what factor, at most 1.
        """
        run = self.run
        if run.landscape is None:
            return 1.0
        with self.weights.own_write(), self.reads.own_step():
            found = self._landscape()
        if found is None:
            return 1.0
        now = self._rate_on(found._replace(slope=run.landscape.slope))
        factor = min(1.0, now / run.args.learning_rate)
        run.args.learning_rate *= factor
        return factor

    def take(self, batch: LogicalBatch, learning_rate: float) -> Tensor | None:
        """Takes a step; settles at once if a callback of others was added since the start.

        Returns:
          Un-noised differences [B, K] (private), or None if no data was read.
        """
        check_weights(self.run, batch["step"])
        with self.weights.own_write(), self.reads.own_step():
            differences = self.step(
                batch["step"],
                self.lockstep(
                    list(map(PaddedMicrobatch, batch["microbatches"], batch["examples"]))
                ),
                learning_rate,
                batch["groups"]
                if self.step.units or self.run.args.clipping == "averaged"
                else None,
                batch["row_groups"],
                batch["batch_digest"],
            )
            if self.step.defer and not all_known(self.run.readers()):
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
        """Returns the grids of the parameter space, and what public rows' losses say of the rate."""
        return {
            "grids": self.space.state_dict(),
            "landscape": self.run.landscape,
            "follow_most": self._follow_most,
        }


def size_of_moved(run: Run) -> float:
    """Root mean square of the trained weights where a run moves them at random (`settings.defaults`).

    0 where there are fewer of them than directions in the run, of adapters, and beside a fresh head,
    which has further to go.
    """
    trained = [p for p in run.model.parameters() if p.requires_grad]
    directions = run.plan.steps * run.args.num_directions
    if sum(p.numel() for p in trained) <= directions or hasattr(run.model, "peft_config"):
        return 0.0
    here = [
        local(p.detach()) for p in trained
    ]  # of sharded weights rank 0's part, for all processes
    squares = sum(float(torch.linalg.vector_norm(p, dtype=torch.float64)) ** 2 for p in here)
    size = math.sqrt(squares / max(1, sum(p.numel() for p in here)))
    return collectives.shared(0.0 if are_fresh(run.model, run.args.trainable, any) else size)


class FirstOrderMethod:
    """DP-SGD and DP-AdamW, and sgd and adamw without privacy: gradients for torch's optimizers.

    Args:
      run: whose ledger is open.
      signal: what noised means are added to.

    Attributes:
      step, weights: as of `ZerothOrderMethod`.
      optimizer: None: the one that `optim` names.

    Raises:
      ValueError: a compiled model, or a trainable layer without per-example gradients.
    """

    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, run: Run, signal: ReleasedSignal) -> None:
        self.run = run
        objective: PerExampleLoss = run.evaluate
        if (weighting := _weighting_of(run)) is not None:
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
        if is_compiled(model):
            raise ValueError(
                f"method={args.method!r} takes per-example gradients by hooks, which compiled code does "
                "not call: turn torch_compile off, or use method='dpzero'."
            )
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


def _weighting_of(run: Run) -> GroupWeighting | None:
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


class LearningRate(torch.optim.Optimizer):
    """Carries the learning rate for Hugging Face's schedulers; the update happens in the step."""

    def __init__(self, tensors: list[Tensor], args: DPZeroConfig) -> None:
        super().__init__(tensors, {"lr": args.learning_rate})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Does nothing: the training step has updated the parameters."""


def _try_stacked(run: Run, shapes: PassShapes, differences: FiniteDifferences) -> list[str]:
    """Leaves out small passes whose places move what a row adds under `stacked` (see `smoke_test`).

    Where a pass' own places do, the strategy is `whole_model`.

    Returns:
      What was turned off and why, for a log.

    Raises:
      ValueError: `stacked` was asked for by name.
    """
    directions = directions_of(0, run.header)
    row = invented_rows(run, shapes).narrow(1)
    clip, scale = smallest_clip_and_scale(run)
    try:
        with isolated_randomness(0):
            found = [
                differences([PaddedMicrobatch(stacked([row] * size), size)], directions)
                for size in shapes.placement.sizes
            ]
    finally:
        differences.space.settle_()
    order = 1 if run.plan.mechanism.distribution == "laplace" else 2
    # what is above one: other smoothing than this step's, the norm of u, weights of groups
    beyond = scale * differences.smoothing / len(directions) ** (1 / order)
    beyond /= 2 if differences.forward else 1  # both losses' moves are in what was found
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


def _warn_of_rounding(run: Run, differences: FiniteDifferences) -> None:
    """In low precision, logs how large rounding is beside the finite differences of public rows."""
    dtype = low_precision(run.model, run.args)
    if not dtype:
        return
    ratio = None
    with leaving_out("signal and rounding were not compared"), isolated_randomness():
        if public := public_microbatches(run):
            ratio = precision_diagnostics.measure(differences, public, dtype)
    if ratio is not None and collectives.is_main():
        (logger.info if ratio.sufficient else logger.warning)(str(ratio))
