"""What a trainer gets in place of Trainer's own functions: honoured, refused or named in a warning."""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.utils import logging

from hf_dpzero.ledger.digests import digest_tensors
from hf_dpzero.objectives.heads import OneRowLoss, own_loss_objective, select_objective
from hf_dpzero.objectives.losses import PerExampleLoss, base_model
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.hf_arguments import refused_fields
from hf_dpzero.settings.nested import SGD
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

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"),
    *("reduce", "reduce_scatter_tensor", "all_to_all", "barrier"),
)
_LARGE = 1000  # entries of a container that are not looked at one by one


def warn_of_unused(trainer: Trainer, loss: PerExampleLoss | None) -> None:
    """Names in one warning what training does not use, and in another a loss that is slow.

    Schedulers in `optimizers=` are honoured, and an overridden `create_scheduler`: rates are public.

    Raises:
      ValueError: a method that the accounting rests on is overridden; says what to use instead.
    """
    kind, args, unused = type(trainer), trainer.args, []
    for name, instead in INSTEAD.items():
        owner, above = overriding(kind, name)
        if owner and above:
            ours = any(parent.__module__.startswith("hf_dpzero.") for parent in owner.__mro__)
            first = (
                "" if ours else f"; or name DPZeroMixin before {owner.__name__} among the parents"
            )
            raise ValueError(
                f"{owner.__name__}.{name} replaces what the accounting rests on, or is never called: "
                f"{instead}{first}."
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
    name = own_loss_name(kind, vars(trainer))
    model: Any = trainer.model
    trains = loss is None and trainer.train_dataset is not None
    if trains and not name and select_objective(model) is own_loss_objective:
        name = f"the loss of {type(base_model(model)).__name__}"
    if loss is None and name:
        logger.warning(
            f"{name} is evaluated on one row at a time, with num_items_in_batch=None; what it prints, "
            f"keeps or sends itself is not private. It is faster to {_LOSS}."
        )


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
    loss_type = getattr(args, "loss_type", "nll")  # of TRL
    if loss is None and loss_type not in ("nll", "chunked_nll"):
        raise ValueError(
            f"loss_type={loss_type!r} would not be trained on: leave it at 'nll', or {_LOSS}."
        )
    if begun:
        return
    given = trainer.optimizer or (trainer.optimizer_cls_and_kwargs or (None,))[0]
    kind = given if isinstance(given, type) else type(given)
    fitting = torch.optim.SGD if args.method in SGD else torch.optim.AdamW
    if given is not None and not args.first_order:
        logger.warning_once(
            f"the optimizer {kind.__name__} has no effect in a {args.method} run: learning_rate, "
            "update_rule and momentum are its settings. Of a scheduler beside it the shape is taken."
        )
    elif given is not None and not issubclass(kind, fitting):
        raise ValueError(
            f"the optimizer {kind.__name__} with method={args.method!r} is not what the report would "
            f"say: pass a torch.optim.{fitting.__name__}, or set method."
        )
    if args.first_order and getattr(trainer.optimizer, "state", None):
        raise ValueError(
            f"the optimizer {kind.__name__} has taken steps, whose gradients it keeps traces of and no "
            "budget accounts for: make a new one."
        )
    if scheduler is not None and args.first_order and trainer.optimizer is None:
        raise ValueError(
            f"a scheduler alone in optimizers= with method={args.method!r} sets the rates of an "
            "optimizer that is not the run's: pass both, set lr_scheduler_type, or override "
            "create_scheduler."
        )
    follows = scheduler is not None and "metrics" in inspect.signature(scheduler.step).parameters
    if follows and not args.first_order:
        raise ValueError(
            f"the scheduler {type(scheduler).__name__} follows a metric and the optimizer that it was "
            "made with: set lr_scheduler_type='reduce_lr_on_plateau' or 'greedy'."
        )


def check_held(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses a given optimizer without some of the trained parameters, which it would leave alone."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise ValueError(
                f"{name} is trained, and the optimizer in optimizers= does not hold it: make that of "
                "the parameters of the model that is passed (with its adapter on), or leave it out."
            )


def own_loss_name(kind: type, given: Mapping[str, Any]) -> str:
    """What a script computes its loss with, in place of the head's.

    Returns:
      "Mine.compute_loss" or "compute_loss_func"; "" for neither, and for TRL's `SFTTrainer`, which
      logs beside the loss of causal language models.
    """
    owner = kind if "compute_loss" in given else overriding(kind, "compute_loss")[0]
    if owner and (owner.__module__.split(".")[0], owner.__name__) != ("trl", "SFTTrainer"):
        return f"{owner.__name__}.compute_loss"
    return "compute_loss_func" if given.get("compute_loss_func") else ""


def loss_by_row(trainer: Trainer) -> OneRowLoss | None:
    """A script's `compute_loss` or `compute_loss_func`, asked for one row at a time; None without one.

    It neither logs nor talks to other processes there: both would tell of private rows.
    """
    name = own_loss_name(type(trainer), vars(trainer))

    def compute(model: nn.Module, row: dict[str, Any]) -> Any:
        with _silenced(trainer, name):
            try:
                return trainer.compute_loss(model, row, num_items_in_batch=None)
            except TypeError as error:
                raise ValueError(
                    f"{name} fails for one row with num_items_in_batch=None ({type(error).__name__}): "
                    f"divide by what is in the row, or {_LOSS}."
                ) from error

    return OneRowLoss(compute, name, trainer) if name else None


@contextlib.contextmanager
def _silenced(trainer: Trainer, name: str) -> Iterator[None]:
    """Refuses, inside, what would publish a row's numbers or add those of other rows to them."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError(
            f"{name} logs what it computes of a private row, or exchanges it with other processes, "
            "which have other rows: leave that out."
        )

    hidden: list[tuple[Any, str, Any]] = [(trainer, "is_in_train", True)]
    hidden += [(torch.distributed, call, refuse) for call in _COLLECTIVES]
    if not trainer.args.not_private:  # type: ignore[attr-defined]
        hidden += [(trainer, "log", refuse), (trainer.accelerator, "log", refuse)]
    before = [vars(owner).get(call) for owner, call, _ in hidden]
    for entry in hidden:
        setattr(*entry)
    try:
        yield
    finally:
        for (owner, call, _), own in zip(hidden, before, strict=True):
            delattr(owner, call) if own is None else setattr(owner, call, own)


def kept_by(objective: PerExampleLoss | None) -> dict[str, object]:
    """What a script's loss may keep of the rows that it saw, by name: to be compared.

    Looked at: numbers, tensors and containers among the attributes of the trainer and its state, and
    among the variables that its own functions read.

    Args:
      objective: of `loss_by_row`; of others nothing is looked at.
    """
    holder = getattr(objective, "holder", None)
    if holder is None:
        return {}
    kept = {**vars(holder), **vars(holder.state)}
    libraries = ("hf_dpzero", "transformers", "builtins")
    own = [p for p in type(holder).__mro__ if p.__module__.partition(".")[0] not in libraries]
    functions = [*kept.values(), *(f for parent in own for f in vars(parent).values())]
    for function in filter(inspect.isfunction, functions):
        with contextlib.suppress(ValueError):  # a variable that is not set yet
            read = inspect.getclosurevars(function)
            kept |= {**read.globals, **read.nonlocals}
    return {name: _content(value) for name, value in kept.items()}


def _content(value: Any, depth: int = 3) -> object:
    """A value by what is in it, so far as scripts keep numbers there; others by their identity."""
    if isinstance(value, bool | int | float | str | bytes | np.generic):
        return repr(value)
    if isinstance(value, np.ndarray):
        return hash(value.tobytes())
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        return digest_tensors([("", value.detach())])
    if isinstance(value, Mapping | list | tuple | set | deque) and depth:
        if len(value) > _LARGE:
            return id(value), len(value)
        if isinstance(value, Mapping):
            return {repr(key): _content(part, depth - 1) for key, part in value.items()}
        return [_content(part, depth - 1) for part in value]
    return id(value)


def overriding(kind: type, name: str) -> tuple[type | None, bool]:
    """The class outside hf_dpzero and transformers that defines a method.

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
