"""Refusals that need the model or the data set: everything that is checked before step 0.

Nothing here releases anything: what is looked at decides only whether training starts.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

LABEL_COLUMNS = ("labels", "label", "label_ids", "start_positions", "decoder_input_ids")


def num_examples(dataset: Any) -> int:
    """n, which the privacy plan is computed from.

    Raises:
      ValueError: no data set, one without a length, or an empty one.
    """
    if dataset is None:
        raise ValueError("train_dataset is None: the privacy plan needs the training data's size.")
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__} without length or random access: a "
            "streamed data set cannot be sampled as the plan accounts; load it as a map-style one."
        )
    if len(dataset) == 0:
        raise ValueError("train_dataset is empty.")
    return len(dataset)


def check_labels(dataset: Any) -> None:
    """Refuses a data set whose columns hold no labels (needs `column_names`; else looks at row 0)."""
    columns = getattr(dataset, "column_names", None) or _keys(dataset[0])
    if columns is not None and not set(columns) & set(LABEL_COLUMNS):
        raise ValueError(
            f"train_dataset has columns {sorted(columns)} but no labels: name the label column "
            "'labels', or pass compute_per_example_loss."
        )


def _keys(row: Any) -> list[str] | None:
    return list(row) if hasattr(row, "keys") else None


def select_trainable(model: nn.Module, pattern: str | None) -> None:
    """Freezes every parameter whose name `pattern` (re.search) does not find; None changes nothing.

    Raises:
      ValueError: the pattern finds no parameter.
    """
    if pattern is None:
        return
    names = [name for name, _ in model.named_parameters()]
    if not any(re.search(pattern, name) for name in names):
        raise ValueError(
            f"trainable={pattern!r} matches no parameter; there are e.g. {names[-3:]}."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(pattern, name) is not None)


def check_model(model: nn.Module, smoothing: float) -> None:
    """Refuses layers that couple examples, and half-precision weights that smoothing cannot move.

    Raises:
      ValueError: batch normalisation with batch statistics; a trainable tensor in which more than
        half of the coordinates would not change under +-smoothing.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not module.track_running_stats:
            raise ValueError(
                f"{name} normalises with the statistics of its batch, so one example's loss depends "
                "on the others and cannot be clipped: use track_running_stats=True, LayerNorm or "
                "GroupNorm."
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _check_smoothing(name, parameter, smoothing)


def check_evaluation_mode(model: nn.Module) -> None:
    """After model.eval(): refuses batch normalisation that stays in training mode.

    Raises:
      ValueError: names the layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                f"{name} stays in training mode after model.eval(): its batch statistics couple the "
                "examples. Do not override its train()/eval()."
            )


@torch.no_grad()
def vanishing_fraction(parameter: Tensor, smoothing: float) -> float:
    """The fraction of coordinates that theta + smoothing leaves unchanged in the tensor's dtype."""
    if parameter.numel() == 0:
        return 0.0
    moved = (parameter.float() + smoothing).to(parameter.dtype)
    return float((moved == parameter).float().mean())


def _check_smoothing(name: str, parameter: Tensor, smoothing: float) -> None:
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return
    fraction = vanishing_fraction(parameter, smoothing)
    if fraction > 0.5:
        raise ValueError(
            f"smoothing={smoothing} vanishes in rounding for {fraction:.0%} of {name} "
            f"({parameter.dtype}): load the trainable weights in float32, or raise smoothing."
        )


def check_single_strategy(args: Any) -> None:
    """Refuses ways of running that the step does not cover.

    Raises:
      ValueError: FSDP, DeepSpeed or nn.DataParallel.
    """
    if args.deepspeed or args.fsdp:
        raise ValueError(
            "FSDP and DeepSpeed shard or copy parameters in ways that the in-place perturbation does "
            "not follow: run on one device or with plain data parallelism (accelerate launch)."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process would use nn.DataParallel, which averages before "
            "clipping: start one process per GPU with `accelerate launch`, or set "
            "CUDA_VISIBLE_DEVICES to one."
        )
