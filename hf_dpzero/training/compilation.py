"""torch.compile for private steps: the model itself is compiled, so that every caller runs it.

Compiled code reads the parameters anew in each call, so it sees them perturbed in place.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_dpzero.objectives.losses import is_compiled


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
