"""Autocast and torch.compile for private steps: every forward pass reads the perturbed weights.

Autocast caches low-precision copies of the weights while its outermost block lasts; a forward pass at
another perturbation would see the old copies, so the cache is off. Compiled code reads the parameters
anew in each call; only Inductor's freezing would fold them into constants, and is refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from hf_dpzero.objectives.losses import is_compiled


def uncached_autocast(accelerator: Any) -> contextlib.AbstractContextManager[None]:
    """The autocast that `accelerator` is set to (none, perhaps), which keeps no copies of weights.

    Accelerate puts it around `model.forward` as well, but only once training has been prepared; this
    one is also there for what is checked before.
    """
    from accelerate.utils import AutocastKwargs

    if accelerator.autocast_handler is None:
        accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    accelerator.autocast_handler.cache_enabled = False
    return accelerator.autocast()


def check_mixed_precision(args: Any, device_type: str) -> None:
    """Refuses arithmetic that `args` do not show or that is too coarse.

    Args:
      args: `TrainingArguments`; `mixed_precision` also holds what `accelerate launch` asks for.
      device_type: of the training device.

    Raises:
      ValueError: autocast around the call, or a mixed precision other than "no" and "bf16".
    """
    if torch.is_autocast_enabled(device_type):
        raise ValueError(
            "train() was called under torch.autocast, which keeps copies of the weights that no "
            "perturbation reaches: call it outside, with bf16=True."
        )
    if args.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={args.mixed_precision!r} (accelerate's configuration or "
            "ACCELERATE_MIXED_PRECISION) is too coarse for finite differences: use 'bf16' or 'no'."
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what `torch.compile(model)` returns, compiled in place; others as they are.

    Names of parameters, the forward's signature and saved files are then those of the model.
    """
    inner = getattr(model, "_orig_mod", None)
    if not isinstance(inner, nn.Module):
        return model
    if not is_compiled(inner):
        inner._compiled_call_impl = model.dynamo_ctx(inner._call_impl)  # type: ignore[operator]
    return inner


def compile_(model: nn.Module, args: Any) -> None:
    """Compiles `model` in place as `TrainingArguments` ask for; nothing without `torch_compile`.

    Raises:
      ValueError: Inductor would fold the weights into constants, which no perturbation reaches.
    """
    if args.torch_compile and not is_compiled(model):
        model.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    if is_compiled(model) and _folds_weights():
        raise ValueError(
            "torch._inductor.config.freezing is on: compiled code would keep the weights of its first "
            "call, and no perturbation would reach it. Set it (TORCHINDUCTOR_FREEZING) to False."
        )


def refuse_compiled(model: nn.Module, method: str) -> None:
    """Refuses compiled models where hooks must see every layer.

    Raises:
      ValueError: the model is compiled.
    """
    if is_compiled(model):
        raise ValueError(
            f"method={method!r} takes per-example gradients by hooks, which compiled code does not "
            "call: turn torch_compile off, or use method='dpzero'."
        )


def _folds_weights() -> bool:
    import torch._inductor.config as inductor

    return bool(inductor.freezing)
