"""The published architectures with random weights: nothing is downloaded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.experiments import memory
from hf_dpzero.objectives.losses import base_model
from hf_dpzero.recipes.models import settle_quantised_

DECODER = "smollm2-135m"
SHAPES = memory.SHAPES
PUBLISHED = tuple(name for name in SHAPES if not name.startswith("tiny"))


def build_config(shape: str) -> Any:
    """The transformers configuration of a key of `SHAPES`, with two classes."""
    from transformers import AutoConfig

    return AutoConfig.for_model(num_labels=2, **SHAPES[shape])


@functools.cache
def parameters_of(shape: str) -> int:
    """The number of parameters of a shape's classifier."""
    return sum(p.numel() for p in empty_model(shape, "float32", "meta").parameters())


def empty_model(shape: str, dtype: str, device: str) -> nn.Module:
    """A two-class sequence classifier in eval mode, its parameters allocated and not filled.

    Args:
      shape: key of `SHAPES`.
      dtype: of the weights, such as "float32"; they are created in it.
      device: torch device; "meta" takes no memory.

    Returns:
      The model; `fill_` gives it weights.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device(device):
        model: nn.Module = AutoModelForSequenceClassification.from_config(
            build_config(shape), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    return model.eval()


@torch.no_grad()
def fill_(model: nn.Module) -> None:
    """Draws normal weights of standard deviation 0.02, around 1 for the scales of layer norms.

    They come from a generator of its own with a fixed seed, on the model's device.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            scale = isinstance(module, nn.LayerNorm) and name == "weight"
            parameter.normal_(float(scale), 0.02, generator=generator)


def model_inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keyword arguments that an objective calls the model with: no labels, no key-value cache.

    Args:
      model: a transformers model.
      batch: tensors with leading dimension B.

    Returns:
      The batch without `labels`, and `use_cache=False` if the model knows that argument.
    """
    accepted = inspect.signature(type(base_model(model)).forward).parameters
    cache = {"use_cache": False} if "use_cache" in accepted else {}
    return {**cache, **{name: value for name, value in batch.items() if name != "labels"}}


def quantise_(model: nn.Module, dtype: str) -> None:
    """Puts the linear layers of a classifier's encoder into NF4, as `load_in_4bit` would load them.

    Args:
      model: with weights, on the device where they are packed; its head stays as it is.
      dtype: that the layers compute in.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    encoder = base_model(model).base_model
    for parent in list(encoder.modules()):
        for name, old in list(parent.named_children()):
            if type(old) is not nn.Linear:
                continue
            wide = (old.in_features, old.out_features, old.bias is not None)
            new = Linear4bit(*wide, compute_dtype=getattr(torch, dtype), device="meta")
            new.weight = Params4bit(old.weight.detach(), requires_grad=False, quant_type="nf4")
            new.bias = old.bias
            setattr(parent, name, new.to(old.weight.device))
    settle_quantised_(model)


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """The classifier with LoRA adapters where PEFT puts them by default; they and its head train.

    The adapters are float32, and both of their factors are drawn, so that nothing is zero.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    adapted = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=rank))
    generator = torch.Generator(next(model.parameters()).device).manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.02, generator=generator)
    return adapted.eval()
