"""What a trainer gets in place of Trainer's own functions: honoured, refused or named in a warning."""

from __future__ import annotations

import inspect

from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from hf_dpzero.objectives.losses import PerExampleLoss
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.hf_arguments import refused_fields
from hf_dpzero.settings.setting import refuse

logger = logging.get_logger(__name__)

INSTEAD = {
    "training_step": "write the loss as compute_per_example_loss, and what else happens as a callback",
    "get_train_dataloader": "set sampling and expected_batch_size, and pass a data_collator",
    "create_optimizer": "set method, update_rule (zeroth order) or optim (dp-adamw, adamw)",
    "create_optimizer_and_scheduler": "override create_scheduler",
    "_get_train_sampler": "set sampling",
}
"""Methods that the accounting rests on, or that are never called, and what to use in their place."""

_LOSS = (
    "pass compute_per_example_loss, a function (model, inputs) -> losses [B], such as "
    "F.cross_entropy(logits, labels, reduction='none')"
)


def warn_of_unused(
    kind: type[Trainer], args: TrainingArguments, loss: PerExampleLoss | None
) -> None:
    """Names in one warning what training does not use.

    A learning-rate scheduler in `optimizers=(None, scheduler)` is honoured in zeroth-order runs, and an
    overridden `create_scheduler` in all: learning rates are public.

    Args:
      kind: of the trainer.
      args: its settings.
      loss: `compute_per_example_loss`, or None.

    Raises:
      ValueError: a method that the accounting rests on is overridden; says what to use instead.
    """
    unused = []
    for name, instead in INSTEAD.items():
        owner, above = overriding(kind, name)
        if owner and above:
            raise ValueError(
                f"{owner.__name__}.{name} replaces what the accounting rests on, or is never called: "
                f"{instead}."
            )
        if owner:
            unused.append(f"{owner.__name__}.{name} ({instead})")
    if loss is not None and args.label_smoothing_factor:
        unused.append(
            f"label_smoothing_factor={args.label_smoothing_factor} (compute_per_example_loss is what is "
            "trained on)"
        )
    if unused:
        logger.warning(f"not used by {kind.__name__}: {'; '.join(unused)}.")


def refuse_overrides(trainer: Trainer, loss: PerExampleLoss | None, begun: bool) -> None:
    """Refuses what would break the accounting, when a trainer is made and when it trains.

    In between fields, a loss or an optimizer can be set.

    Args:
      trainer: with its settings.
      loss: `compute_per_example_loss`, or None.
      begun: whether optimizer and scheduler are those of a run of this package.

    Raises:
      ValueError: says what to use instead.
    """
    args, scheduler = trainer.args, trainer.lr_scheduler
    assert isinstance(args, DPZeroConfig)
    refuse(refused_fields(args))
    if loss is None:
        _check_losses(trainer)
    if begun:
        return
    optimizer = trainer.optimizer or (trainer.optimizer_cls_and_kwargs or (None,))[0]
    if optimizer is not None:
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise ValueError(
            f"the optimizer {kind.__name__} with method={args.method!r} is not what the ledger would "
            f"say: {INSTEAD['create_optimizer']}. A schedule alone, optimizers=(None, scheduler), is "
            "taken in zeroth-order runs."
        )
    if scheduler is not None and args.first_order:
        raise ValueError(
            f"a scheduler in optimizers= with method={args.method!r} sets the rates of an optimizer "
            "that is not the run's: set lr_scheduler_type, or override create_scheduler."
        )
    if scheduler is not None and "metrics" in inspect.signature(scheduler.step).parameters:
        raise ValueError(
            f"the scheduler {type(scheduler).__name__} follows a metric and the optimizer that it was "
            "made with: set lr_scheduler_type='reduce_lr_on_plateau' or 'greedy'."
        )


def _check_losses(trainer: Trainer) -> None:
    """Refuses a loss of its own that a run would not train on; evaluation may have one beside it."""
    kind = type(trainer)
    owner = kind if "compute_loss" in vars(trainer) else overriding(kind, "compute_loss")[0]
    # TRL overrides compute_loss to log beside it
    if owner and (owner.__module__.split(".")[0], owner.__name__) == ("trl", "SFTTrainer"):
        loss = getattr(trainer.args, "loss_type", "nll")
        if loss not in ("nll", "chunked_nll"):
            raise ValueError(
                f"loss_type={loss!r} would not be trained on: leave it at 'nll', or {_LOSS}."
            )
        owner = None  # the objective of causal language models is its default loss
    if owner or trainer.compute_loss_func:
        raise ValueError(
            f"{f'{owner.__name__}.compute_loss' if owner else 'compute_loss_func'} returns one number "
            "for a batch, and a step needs each example's loss, so it would not be trained on: "
            f"{_LOSS}. Beside it, evaluation still uses yours."
        )


def overriding(kind: type, name: str) -> tuple[type | None, bool]:
    """The class outside hf_dpzero and transformers that defines a method.

    Args:
      kind: a class of trainers.
      name: of the method.

    Returns:
      The first such class, or None; and whether it stands before all classes of hf_dpzero, so
      that its method is the one that runs.
    """
    above = True
    for parent in kind.__mro__:
        package = parent.__module__.split(".")[0]
        above = above and package != "hf_dpzero"
        if package not in ("hf_dpzero", "transformers") and name in vars(parent):
            return parent, above
    return None, False
