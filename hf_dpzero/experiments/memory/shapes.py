"""Named architectures with random weights: nothing is downloaded, nothing is slow to fill."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_dpzero.objectives.losses import base_model
from hf_dpzero.perturbation.trainable import select_trainable

if TYPE_CHECKING:
    from scripts.benchmarks.settings import StepBench

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
    """The transformers configuration of a shape, with two classes; nothing is downloaded."""
    from transformers import AutoConfig

    return AutoConfig.for_model(num_labels=2, **SHAPES[shape])


def check_sizes(shape: str, seq_length: int) -> None:
    """Refuses a shape that is not known, and more tokens than it has positions for."""
    if shape not in SHAPES:
        raise ValueError(f"shape={shape!r} is unknown; use one of {', '.join(PUBLISHED)}.")
    config = build_config(shape)
    padding = config.pad_token_id + 1 if config.model_type == "roberta" else 0  # spent on padding
    limit = config.max_position_embeddings - padding
    if seq_length > limit:
        raise ValueError(
            f"seq_length={seq_length} is more than {shape} has positions for: use at most {limit}."
        )


def build_model(bench: StepBench) -> nn.Module:
    """The shape's classifier with random weights in their dtype on the device, in eval mode."""
    model = empty_model(bench.shape, bench.dtype, bench.device, bench.attention)
    fill_(model)
    select_trainable(model, bench.trainable)
    if bench.compile:
        model.compile()
    return model


def empty_model(shape: str, dtype: str, device: str, attention: str = "sdpa") -> nn.Module:
    """The classifier with its parameters allocated and not filled; `meta` takes no memory.

    Created in `dtype` on `device`, so that the peak is one copy of the weights.
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
    """Normal weights of standard deviation 0.02, around 1 for the scales of layer norms.

    All on one device, drawn there from a generator with a fixed seed.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            scale = isinstance(module, nn.LayerNorm) and name == "weight"
            parameter.normal_(float(scale), 0.02, generator=generator)


def build_batch(bench: StepBench, vocabulary: int) -> dict[str, Tensor]:
    """One microbatch of random tokens without padding, the same each time."""
    generator = torch.Generator().manual_seed(0)
    size = (bench.batch_size, bench.seq_length)
    batch = {
        "input_ids": torch.randint(4, vocabulary, size, generator=generator),
        "attention_mask": torch.ones(size, dtype=torch.int64),
        "labels": torch.randint(0, 2, size[:1], generator=generator),
    }
    return {name: value.to(bench.device) for name, value in batch.items()}


def model_inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What an objective gives the model: the batch without labels, no key-value cache."""
    accepted = inspect.signature(type(base_model(model)).forward).parameters
    cache = {"use_cache": False} if "use_cache" in accepted else {}
    return {**cache, **{name: value for name, value in batch.items() if name != "labels"}}
