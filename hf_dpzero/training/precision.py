"""Arithmetic of the forward passes: autocast, torch.compile, and where low precision is refused.

Every forward pass must read the perturbed weights, and an example's loss must not depend on others.
Autocast caches low-precision copies of the weights while its outermost block lasts; a forward pass at
another perturbation would see the old copies, so the cache is off. Compiled code reads the parameters
anew in each call; only Inductor's freezing would fold them into constants, and is refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.per_example_gradients import rounds_products
from hf_dpzero.ledger.digests import is_packed
from hf_dpzero.objectives.losses import is_compiled
from hf_dpzero.perturbation.trainable import quantised_kind

PRODUCTS = "float32 products in TF32 or bfloat16 (torch.set_float32_matmul_precision, allow_tf32)"


def uncached_autocast(accelerator: Any) -> contextlib.AbstractContextManager[None]:
    """The autocast of `accelerator` (perhaps none), set to keep no copies of weights.

    Accelerate puts it around `model.forward` too, but only after training has been prepared; checks
    run before that.
    """
    from accelerate.utils import AutocastKwargs

    if accelerator.autocast_handler is None:
        accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    accelerator.autocast_handler.cache_enabled = False
    return accelerator.autocast()


def check_mixed_precision(args: Any, device_type: str) -> None:
    """Refuses an autocast around the call, and mixed precision other than bfloat16.

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
    """Compiles `model` in place if `torch_compile` is set.

    Args:
      model: compiled already, perhaps.
      args: `TrainingArguments`.

    Raises:
      ValueError: Inductor would fold the weights into constants, which no perturbation reaches.
    """
    if args.torch_compile and not is_compiled(model):
        model.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    if not is_compiled(model):
        return
    import torch._inductor.config as inductor

    if inductor.freezing:
        raise ValueError(
            "torch._inductor.config.freezing is on: compiled code would keep the weights of its first "
            "call, and no perturbation would reach it. Set it (TORCHINDUCTOR_FREEZING) to False."
        )


def refuse_compiled(model: nn.Module, method: str) -> None:
    """Refuses compiled models for methods whose hooks must see every layer.

    Args:
      model: to be trained.
      method: of the configuration, for the message.

    Raises:
      ValueError: the model is compiled.
    """
    if is_compiled(model):
        raise ValueError(
            f"method={method!r} takes per-example gradients by hooks, which compiled code does not "
            "call: turn torch_compile off, or use method='dpzero'."
        )


def check_precision(model: nn.Module, args: Any) -> None:
    """Refuses low-precision arithmetic where it would let examples influence each other.

    Matrix kernels round differently for other batch shapes, and the rounding is divided by 2 lambda.
    In float32 that is negligible; in bfloat16, TF32 or quantised arithmetic it can exceed the
    clipping norm. A forward pass of one example cannot depend on another.

    Args:
      model: to be trained.
      args: `DPZeroConfig`.

    Raises:
      ValueError: low precision (see `low_precision`) with a larger microbatch.
    """
    causes = low_precision(model, args)
    if causes and args.physical_batch_size > 1:
        raise ValueError(
            f"{causes} with microbatch_size={args.physical_batch_size}: low-precision "
            "rounding depends on what else is in the microbatch, which the sensitivity does not "
            "cover. Set microbatch_size=1, or compute in float32."
        )


def low_precision(model: nn.Module, args: Any) -> str:
    """Why a run does not compute in float32.

    Args:
      model: to be trained.
      args: `DPZeroConfig`.

    Returns:
      bf16 (from the arguments or from accelerate's configuration), tf32, half-precision or quantised
      weights in words; "" where all is float32.
    """
    causes = [f"{name}=True" for name in ("bf16", "tf32") if getattr(args, name, False)]
    if not causes and getattr(args, "mixed_precision", "no") != "no":
        causes.append(f"mixed_precision={args.mixed_precision!r} (accelerate's configuration)")
    cause = low_precision_of(model)
    if cause == PRODUCTS and "tf32=True" in causes:
        cause = None  # said already
    return " and ".join(causes if cause is None else [*causes, cause])


def low_precision_of(model: nn.Module) -> str | None:
    """Why the model does not compute in float32; None if it does.

    Looked at: torch's settings, which any script may change; parameters, frozen ones too; buffers,
    where GPTQ, AWQ and BitNet keep their weights; tensor subclasses, whose dtype says nothing; and
    configurations that quantise only while running.
    """
    if rounds_products():
        return PRODUCTS
    if torch.backends.cudnn.allow_tf32 and _convolves_on_cuda(model):
        return "convolutions in TF32 (torch.backends.cudnn.allow_tf32)"
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            return f"parameters that are not float32 ({name}, ...)"
        kind = quantised_kind(parameter)
        if kind is not None:
            return f"quantised parameters ({name}: {kind})"
    for name, buffer in model.named_buffers():
        half = buffer.is_floating_point() and buffer.element_size() < 4
        subclass = type(buffer.data) is not Tensor
        if half or subclass or is_packed(buffer):
            kind = f"{type(buffer.data).__name__}, " * subclass + str(buffer.dtype)
            return f"buffers of low precision, as quantised layers have ({name}: {kind})"
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "quantization_config", None) is not None:
            return f"a quantization_config in the configuration of {name or 'the model'}"
    return None


def _convolves_on_cuda(model: nn.Module) -> bool:
    return any(
        "Conv" in type(module).__name__
        and any(p.device.type == "cuda" for p in module.parameters(recurse=False))
        for module in model.modules()
    )
