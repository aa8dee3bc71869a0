"""DPZero, DPGD-0th and MeZO in a run: the estimator, the rate that public rows say, steps in place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import LogicalBatch
from hf_dpzero.batches.shapes import PassShapes, stacked
from hf_dpzero.checks.between_steps import WeightsBetweenSteps
from hf_dpzero.checks.passes import blank_microbatch, invented_rows, smallest_clip_and_scale
from hf_dpzero.checks.precision import (
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
from hf_dpzero.estimators import landscape, precision_diagnostics
from hf_dpzero.estimators.choose_strategy import choose_strategy, unmeasured
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import SettleBeforeRead, all_known
from hf_dpzero.estimators.landscape import Landscape
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.ledger.replay import directions_of, space_from_header
from hf_dpzero.objectives.losses import (
    PaddedMicrobatch,
    is_compiled,
)
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.collectives import RankError
from hf_dpzero.parallel.fsdp import Lockstep
from hf_dpzero.perturbation.sharding import local
from hf_dpzero.perturbation.trainable import is_prompt
from hf_dpzero.run import Run
from hf_dpzero.run_folder.base_model import are_fresh
from hf_dpzero.run_folder.folder import discard_unused
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.defaults import MOVED, rate_on, steps_that_follow
from hf_dpzero.settings.schedules import smoothing_of_steps
from hf_dpzero.training.private_step import weighting_of
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep

logger = logging.get_logger(__name__)


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
        self._follow_to = self._follow_most = math.inf
        if state is None:
            self.space.snap_()
        else:
            self.space.load_state_dict(state["grids"])
            self._follow_to, self._follow_most = (
                state.get("follow_to", math.inf),
                state["follow_most"],
            )
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
                self._follow_to = found.norm(run.args.num_directions)
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
            follow_to=self._follow_to,
            follow_most=self._follow_most,
            mechanism_at=run.plan.scheduled,
            smoothing_at=smoothing_of_steps(run.args, run.plan.steps),
            # An update may wait only if weights are read between steps through forward(),
            # state_dict() or copies, where it is made first; callbacks of others may read them
            # directly.
            defer=run.args.performance.defer_updates
            and all_known(run.readers())
            and not is_compiled(run.model),
            weighting=weighting_of(run),
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
            "follow_to": self._follow_to,
            "follow_most": self._follow_most,
        }


def size_of_moved(run: Run) -> float:
    """Root mean square of the trained weights where a run moves them at random (`settings.defaults`).

    Of LoRA factors what stands for it. 0 where there are fewer of them than directions in the run, of
    other adapters, and beside a fresh head, which has further to go.
    """
    named = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    directions = run.plan.steps * run.args.num_directions
    if sum(p.numel() for p in named.values()) <= directions:
        return 0.0
    if all("lora_" in name for name in named):
        size = _size_of_factors(run.model)
    elif all(map(is_prompt, named)) or not hasattr(run.model, "peft_config"):
        size = _root_mean_square(named.values())
    else:
        size = 0.0
    fresh = not hasattr(run.model, "peft_config") and are_fresh(run.model, run.args.trainable, any)
    return collectives.shared(0.0 if fresh else size)


def _root_mean_square(tensors: Iterable[Tensor]) -> float:
    here = [local(t.detach()) for t in tensors]  # of sharded ones rank 0's part, for all processes
    squares = sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in here)
    return math.sqrt(squares / max(1, sum(t.numel() for t in here)))


def _size_of_factors(model: Any) -> float:
    """The size of LoRA factors whose share `MOVED` moves B A by this share of the weight that it is on.

    Entries that walk by w change B A by scaling r^(1/2) w (a^2 + b^2 + w^2)^(1/2), a and b the factors'
    root mean squares at the start. Slopes grow with them: their square is a^2 + b^2 + w^2 over a^2 + b^2
    times the first one's on average over the run, so the walk that is foreseen from the first is less
    by the root of it. The least of all layers; 0 where weights are quantised.
    """
    sizes = []
    for layer in model.modules():
        for key, down in (getattr(layer, "lora_A", None) or {}).items():
            weight, up = layer.get_base_layer().weight, layer.lora_B[key].weight
            if weight.is_floating_point():
                start = sum(_root_mean_square([factor]) ** 2 for factor in (down.weight, up))
                aim = MOVED * _root_mean_square([weight])
                aim /= abs(layer.scaling[key]) * math.sqrt(len(down.weight))
                walk = (math.sqrt(start**2 + 4 * aim**2) - start) / 2
                sizes.append(math.sqrt(walk / (1 + walk / start)) / MOVED if start else 0.0)
    return min(sizes, default=0.0)


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
