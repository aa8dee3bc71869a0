"""What happens before step 0, and which batches a run then takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import LogicalBatch, StepBatches, StepSampler
from hf_dpzero.checks import passes
from hf_dpzero.checks.precision import (
    keep_layout_,
)
from hf_dpzero.checks.table import run_checks
from hf_dpzero.estimators.arithmetic import compile_
from hf_dpzero.objectives.heads import select_objective, smoothed
from hf_dpzero.parallel import collectives
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.privacy.words import group_warning
from hf_dpzero.run import Run
from hf_dpzero.settings.plan_of import extension_warning
from hf_dpzero.settings.schedules import judge_schedule
from hf_dpzero.training.termination import left_to_parent

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
