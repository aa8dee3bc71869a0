"""What a trainer gets in place of Trainer's own functions: honoured, refused or named in a warning."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from transformers import EarlyStoppingCallback, Seq2SeqTrainer
from transformers.utils import logging

from hf_dpzero.settings.hf_arguments import refuse_fields

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


def check_overrides(trainer: Any) -> None:
    """Calls `refuse_overrides`, and names in one warning what training does not use.

    A learning-rate scheduler in `optimizers=(None, scheduler)` is honoured in zeroth-order runs, and an
    overridden `create_scheduler` in all: learning rates are public.

    Args:
      trainer: a `DPZeroTrainer` that has its arguments.

    Raises:
      ValueError: says what to use instead.
    """
    refuse_overrides(trainer)
    unused = [*_unused_methods(trainer), *_unused_losses(trainer), *_unused_generation(trainer)]
    if unused:
        logger.warning(f"not used by {type(trainer).__name__}: {'; '.join(unused)}.")


def refuse_overrides(trainer: Any) -> None:
    """Refuses what would break the accounting, when a trainer is made and when it trains.

    Much can be set in between: fields of the arguments, a loss, an optimizer.
    """
    refuse_fields(trainer.args)
    _check_losses(trainer)
    if trainer.trajectory is None:  # else they are of the run before
        _check_optimizers(trainer)
    _check_early_stopping(trainer)


def _check_losses(trainer: Any) -> None:
    """Refuses a loss of its own that a run would not train on; evaluation may have one beside it."""
    if trainer.per_example_loss is not None:
        return
    owner, _ = overriding(type(trainer), "compute_loss")
    if "compute_loss" in vars(trainer):
        owner = type(trainer)
    kind = getattr(trainer.args, "loss_type", "nll")
    if owner and (owner.__module__.split(".")[0], owner.__name__) == ("trl", "SFTTrainer"):
        if kind not in ("nll", "chunked_nll"):
            raise ValueError(
                f"loss_type={kind!r} would not be trained on: leave it at 'nll', or {_LOSS}."
            )
        owner = None  # the objective of causal language models is its default loss
    if owner or trainer.compute_loss_func:
        raise ValueError(
            f"{f'{owner.__name__}.compute_loss' if owner else 'compute_loss_func'} returns one number "
            "for a batch, and a step needs each example's loss, so it would not be trained on: "
            f"{_LOSS}. Beside it, evaluation still uses yours."
        )


def _check_optimizers(trainer: Any) -> None:
    method, scheduler = trainer.args.method, trainer.lr_scheduler
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        given = trainer.optimizer or trainer.optimizer_cls_and_kwargs[0]
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        raise ValueError(
            f"the optimizer {name} with method={method!r} is not what the ledger would say: set "
            f"{INSTEAD['create_optimizer'].removeprefix('set ')}. A schedule alone, "
            "optimizers=(None, scheduler), is taken in zeroth-order runs."
        )
    if scheduler is None:
        return
    if trainer.args.first_order:
        raise ValueError(
            f"a scheduler in optimizers= with method={method!r} sets the rates of an optimizer that is "
            "not the run's: set lr_scheduler_type, or override create_scheduler."
        )
    if "metrics" in inspect.signature(scheduler.step).parameters:
        raise ValueError(
            f"the scheduler {type(scheduler).__name__} follows a metric and the optimizer that it was "
            "made with: set lr_scheduler_type='reduce_lr_on_plateau' or 'greedy'."
        )


def _check_early_stopping(trainer: Any) -> None:
    args = trainer.args
    stops = any(isinstance(c, EarlyStoppingCallback) for c in trainer.callback_handler.callbacks)
    evaluates = getattr(args.eval_strategy, "value", args.eval_strategy) != "no"
    if stops and not (evaluates and args.metric_for_best_model):
        raise ValueError(
            f"EarlyStoppingCallback with metric_for_best_model={args.metric_for_best_model!r} and "
            "eval_strategy="
            f"{getattr(args.eval_strategy, 'value', args.eval_strategy)!r}: set both, 'eval_loss' and "
            "'steps' say."
        )


def _unused_methods(trainer: Any) -> Iterator[str]:
    for name, instead in INSTEAD.items():
        owner, above = overriding(type(trainer), name)
        if owner and above:
            raise ValueError(
                f"{owner.__name__}.{name} replaces what the accounting rests on, or is never called: "
                f"{instead}."
            )
        if owner:
            yield f"{owner.__name__}.{name} ({instead})"


def _unused_losses(trainer: Any) -> Iterator[str]:
    smoothing = trainer.args.label_smoothing_factor
    if trainer.per_example_loss is not None and smoothing:
        yield f"label_smoothing_factor={smoothing} (compute_per_example_loss is what is trained on)"


def _unused_generation(trainer: Any) -> Iterator[str]:
    args = trainer.args
    if getattr(args, "predict_with_generate", False) and not isinstance(trainer, Seq2SeqTrainer):
        yield "predict_with_generate=True (it is for a Seq2SeqTrainer)"


def overriding(trainer: type, name: str) -> tuple[type | None, bool]:
    """The class outside hf_dpzero and transformers that defines a method.

    Args:
      trainer: a class of trainers.
      name: of the method.

    Returns:
      The first such class, or None; and whether it stands before all classes of hf_dpzero, so
      that its method is the one that runs.
    """
    packages = [parent.__module__.split(".")[0] for parent in trainer.__mro__]
    ours = packages.index("hf_dpzero") if "hf_dpzero" in packages else len(packages)
    for place, (parent, package) in enumerate(zip(trainer.__mro__, packages, strict=True)):
        if package not in ("hf_dpzero", "transformers") and name in vars(parent):
            return parent, place < ours
    return None, False
