"""Published architectures, with random weights: nothing is downloaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.objectives.losses import base_model

_ROBERTA = {
    "model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514,
    "type_vocab_size": 1, "pad_token_id": 1,
}  # fmt: skip


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Zhang et al. 2022 (arXiv:2205.01068), Table 1; the feed-forward layer is 4 times as wide."""
    return {
        "model_type": "opt", "hidden_size": hidden, "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {
        "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536,
    },
    "roberta-base": _ROBERTA,
    "roberta-large": {
        **_ROBERTA, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "tiny": {
        "model_type": "bert", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 32,
    },
    "tiny-opt": {**_opt(16, 2, 2), "vocab_size": 64, "max_position_embeddings": 512},
}  # fmt: skip
"""Configurations of the published checkpoints, where they differ from transformers' defaults."""

PUBLISHED = tuple(name for name in SHAPES if not name.startswith("tiny"))


def build_config(shape: str) -> Any:
    """The transformers configuration of a key of `SHAPES`, with two classes."""
    from transformers import AutoConfig

    return AutoConfig.for_model(num_labels=2, **SHAPES[shape])


def empty_model(shape: str, dtype: str, device: str, attention: str = "sdpa") -> nn.Module:
    """A two-class sequence classifier in eval mode, its parameters allocated and not filled.

    Args:
      shape: key of `SHAPES`.
      dtype: of the weights, such as "float32"; they are created in it.
      device: torch device; "meta" takes no memory.
      attention: transformers' implementation, "sdpa" or "eager".

    Returns:
      The model; `fill_` gives it weights.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device(device):
        model: nn.Module = AutoModelForSequenceClassification.from_config(
            build_config(shape), dtype=getattr(torch, dtype), attn_implementation=attention
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
