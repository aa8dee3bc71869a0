"""Everything that is checked before step 0, in order. Nothing of it is released."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.estimators.finite_differences import batch_size, evaluation_mode
from hf_dpzero.objectives.losses import PerExampleLoss, check_per_example, select_objective
from hf_dpzero.objectives.prompted import PromptObjective
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.training import data_checks, distributed, validation
from hf_dpzero.training.independence_check import check_independence, check_widths
from hf_dpzero.training.precision import check_mixed_precision, check_precision, compile_
from hf_dpzero.training.random_state import isolated_randomness


def check_before_training(trainer: Any) -> None:
    """Refuses a run of a `DPZeroTrainer` that cannot be accounted or would break the guarantee.

    Also chooses what is trained, the objective where none was given, and `max_steps`, and compiles
    the model if that is asked for.

    Raises:
      ValueError: says what to change.
    """
    model, args = trainer.model, trainer.args
    data_checks.num_examples(trainer.train_dataset)
    select_trainable(model, args.trainable)
    validation.check_adapters(model)
    validation.check_model(model)
    if trainer.per_example_loss is None:
        if not set(trainer.probe()) & set(data_checks.LABEL_COLUMNS):  # a collator may add them
            data_checks.check_labels(trainer.train_dataset)
        trainer.per_example_loss = select_objective(model)
    distributed.check_processes(args)
    check_mixed_precision(args, args.device.type)
    if trainer.plan.mechanism.private:
        check_precision(model, args)
        check_widths(model, args.physical_batch_size)
        if args.rows_are is None and not isinstance(trainer.per_example_loss, PromptObjective):
            rows = trainer.training_rows()
            data_checks.check_unit(model, rows.collate_rows, len(trainer.train_dataset))
    args.max_steps = trainer.plan.steps
    compile_(model, args)
    _try_objective(trainer)


@torch.no_grad()
def _try_objective(trainer: Any) -> None:
    """Checks that the objective returns one loss per example, independent of the other examples.

    The losses are discarded.
    """

    def losses_of(objective: PerExampleLoss, batch: Mapping[str, Tensor]) -> Tensor:
        return check_per_example(objective(trainer.model, batch), batch_size(batch)).cpu()

    rows, objective = trainer.training_rows(), trainer.evaluated_objective()
    watched = validation.parameters_left_alone(trainer.model)
    with watched, evaluation_mode(trainer.model), isolated_randomness():
        validation.check_evaluation_mode(trainer.model)
        losses_of(objective, rows.collate_rows([0]))
        check_independence(
            rows.collate_rows,
            len(trainer.train_dataset),
            lambda batch: losses_of(objective.trial, batch),
            widths=trainer.plan.mechanism.private and trainer.args.physical_batch_size > 1,
        )
