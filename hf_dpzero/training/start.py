"""What happens between `train()` and step 0, in order. Nothing of it is released."""

from __future__ import annotations

from transformers.utils import logging

from hf_dpzero.checks import passes
from hf_dpzero.checks.precision import keep_layout_
from hf_dpzero.checks.table import run_checks
from hf_dpzero.estimators.arithmetic import compile_
from hf_dpzero.objectives.heads import select_objective, smoothed
from hf_dpzero.parallel import collectives
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.privacy.words import group_warning
from hf_dpzero.run import Run
from hf_dpzero.settings.plan_of import extension_warning
from hf_dpzero.settings.schedules import judge_schedule

logger = logging.get_logger(__name__)


def prepare(run: Run) -> None:
    """Makes the checks before step 0; chooses the objective, what trains, passes and mesh; compiles.

    Raises:
      ValueError: what cannot be accounted or would break the guarantee; says what to change.
    """
    model, args = run.model, run.args
    keep_layout_(model)
    select_trainable(model, args.trainable)
    run_checks(run, "model")
    if run.objective is None:
        run.objective = smoothed(select_objective(model), args.label_smoothing_factor)
    run.cut_model()
    run_checks(run, "objective")
    if collectives.is_main():
        _warn(run)
    run.shapes = passes.shapes_of(run)
    compile_(model, args, run.shapes is not None, run.resources)
    run_checks(run, "passes")


def _warn(run: Run) -> None:
    """Says what a run may do and will hardly want."""
    judge_schedule(run.plan, run.delta)
    for warning in (
        group_warning(run.plan),
        extension_warning(run.plan, run.args.target_epsilon, run.delta),
        run.rate_hint,
    ):
        if warning:
            logger.warning(warning)
