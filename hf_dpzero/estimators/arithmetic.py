"""Autocast and torch.compile around forward passes, which must read the perturbed weights.

Autocast caches low-precision copies of the weights while its outermost block lasts; a forward pass at
another perturbation would see the old copies, so the cache is off. Compiled code reads the parameters
anew in each call; only Inductor's freezing would fold them into constants, and is refused.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_dpzero.objectives.losses import is_compiled

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

GRAPHS = 4096
"""Graphs of one function, at most: more than a run has shapes, also where rows go one by one."""


def uncached_autocast(
    accelerator: Accelerator, half: bool = False
) -> contextlib.AbstractContextManager[None]:
    """The autocast of `accelerator` (perhaps none), set to keep no copies of weights.

    Accelerate puts it around `model.forward` too, but only after training has been prepared; checks
    run before that.

    Args:
      accelerator: of the trainer.
      half: float16 in its place, of which Accelerate would scale gradients.
    """
    from accelerate.utils import AutocastKwargs

    if half:
        kind = accelerator.device.type
        return torch.autocast(kind, torch.float16, cache_enabled=False)
    if accelerator.autocast_handler is None:
        accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)
    accelerator.autocast_handler.cache_enabled = False
    # Where nothing is cast, finding that out takes accelerate half a millisecond of each forward pass.
    return accelerator.autocast() if accelerator.native_amp else contextlib.nullcontext()


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


def compile_(
    model: nn.Module,
    args: TrainingArguments,
    one_graph_a_shape: bool = False,
    scope: contextlib.ExitStack | None = None,
) -> None:
    """Compiles `model` in place if `torch_compile` is set.

    Args:
      model: compiled already, perhaps.
      args: `TrainingArguments`.
      one_graph_a_shape: compile every shape for itself, and never give up. Otherwise the second shape
        that comes makes a graph for all further ones, and the ninth runs uncompiled: which graph
        evaluates a row, and so its rounding, would follow from the rows that came before it. Beyond
        `GRAPHS` shapes torch raises.
      scope: until it is closed, dynamo's settings are the run's; None for the whole process.

    Raises:
      ValueError: Inductor would fold the weights into constants, which no perturbation reaches.
    """
    if args.torch_compile and not is_compiled(model):
        dynamic = False if one_graph_a_shape else None
        backend, mode = args.torch_compile_backend, args.torch_compile_mode
        model.compile(backend=backend, mode=mode, dynamic=dynamic)
    if not is_compiled(model):
        return
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    if one_graph_a_shape:  # also for models that are compiled already
        own: contextlib.AbstractContextManager[object] = dynamo.patch(
            automatic_dynamic_shapes=False,
            recompile_limit=max(dynamo.recompile_limit, GRAPHS),
            accumulated_recompile_limit=max(dynamo.accumulated_recompile_limit, 64 * GRAPHS),
            fail_on_recompile_limit_hit=True,
        )
        own.__enter__() if scope is None else scope.enter_context(own)
    if inductor.freezing:
        raise ValueError(
            "torch._inductor.config.freezing is on: compiled code would keep the weights of its first "
            "call, and no perturbation would reach it. Set it (TORCHINDUCTOR_FREEZING) to False."
        )


def uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Inside, a compiled model runs uncompiled: for passes of shapes that no step has."""
    if not is_compiled(model):
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
