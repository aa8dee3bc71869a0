"""A recipe's model without its weights: whole on the meta device, or a few layers to be timed."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.recipes.adapters import _peft_config, with_adapters
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.recipe import Recipe

HEADS = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "masked_lm": "AutoModelForMaskedLM",
    "causal_lm": "AutoModelForCausalLM",
}
"""What a recipe's model ends in -> the class of transformers that builds it."""


@dataclass(frozen=True)
class Blueprint:
    """Everything that a recipe's model is made from but its weights.

    Attributes:
      arguments: the recipe's.
      config: of the checkpoint (of the encoder for architecture: sentence_classifier).
      head: key of `HEADS`.
      num_labels: classes of a classification head.
      trainable: as in `DPZeroConfig`.
    """

    arguments: ModelArguments
    config: Any
    head: str
    num_labels: int
    trainable: str | None

    @classmethod
    def of(cls, recipe: Recipe, config: Any, num_labels: int) -> Blueprint:
        """The recipe's; `num_labels` counts where its head has classes."""
        head = recipe.data.prompt or "sequence_classification"
        return cls(recipe.model, config, head, num_labels, recipe.training.trainable)

    def whole(self, dtype: str) -> nn.Module:
        """The model on the meta device in eval mode, with the recipe's adapters, and what trains."""
        model = self._built(self.config, dtype, "meta")
        select_trainable(model, self.trainable)
        return model

    def shortened(self, layers: int, dtype: str, device: str) -> nn.Module:
        """The embeddings, the last `layers` layers and the head, at full width, with random weights.

        What trains in them trains here, and nothing else.
        """
        whole = self.whole(dtype)
        model = self._built(_with_layers(self.config, layers), dtype, device)
        stack, dropped = layer_stack(whole, self.num_layers), self.num_layers - layers
        trains = {n: p.requires_grad for n, p in whole.named_parameters()}
        for name, parameter in model.named_parameters():
            own = trains.get(_shifted(name, stack, dropped), parameter.requires_grad)
            parameter.requires_grad_(own)
        fill_(model)
        return model

    @property
    def num_layers(self) -> int:
        """Hidden layers of the body."""
        return int(text_config(self.config).num_hidden_layers)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that there are."""
        return int(text_config(self.config).vocab_size)

    def _built(self, config: Any, dtype: str, device: str) -> Any:
        from transformers.initialization import no_init_weights

        with no_init_weights(), torch.device(device):
            model = self._bare(copy.deepcopy(config), getattr(torch, dtype)).eval()
        model.tie_weights()  # comes with the initialisation, which was left out
        if device == "meta":
            with torch.device(device), NothingPadded():
                return self._adapted(model, on_meta=True).eval()
        return self._adapted(model).eval().to(device)

    def _adapted(self, model: Any, on_meta: bool = False) -> Any:
        """With the recipe's adapters; a prefix starts from a pass, which the meta device needs not."""
        if on_meta and self.arguments.peft_method == "prefix":
            import peft

            return peft.get_peft_model(model, _peft_config(model, self.arguments, self.head))
        return with_adapters(model, self.arguments, self.head)

    def _bare(self, config: Any, dtype: torch.dtype) -> Any:
        import transformers

        wrapped = self.arguments.architecture == "sentence_classifier"
        if wrapped and config.model_type != "sentence_classifier":
            return self._sentence_classifier(config, dtype)
        if self.head == "sequence_classification" and config.model_type != "sentence_classifier":
            config.num_labels = self.num_labels
        return getattr(transformers, HEADS[self.head]).from_config(config, dtype=dtype)

    def _sentence_classifier(self, config: Any, dtype: torch.dtype) -> Any:
        from transformers import AutoModel

        from hf_dpzero.recipes.sentence_classifier import SentenceClassifier

        names = ("pooling", "normalize", "logit_scale", "pair_features")
        settings = {name: getattr(self.arguments, name) for name in names}
        encoder = AutoModel.from_config(config, dtype=dtype)
        return SentenceClassifier.from_encoder(encoder, num_labels=self.num_labels, **settings)


class NothingPadded(TorchDispatchMode):
    """Inside, code that asks a tensor on the meta device a yes-no question hears yes.

    What transformers asks there is whether a mask attends to everything.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool
        if asks and args[0].device.type == "meta":
            return True
        return func(*args, **(kwargs or {}))


def text_config(config: Any) -> Any:
    """The part of a configuration that says how deep and how wide the body is."""
    return getattr(config, "encoder", None) or config.get_text_config()


def _with_layers(config: Any, layers: int) -> Any:
    changed = copy.deepcopy(config)
    body = text_config(changed)
    body.num_hidden_layers = layers
    if getattr(body, "layer_types", None):
        body.layer_types = body.layer_types[-layers:]
    return changed


def layer_stack(model: nn.Module, num_layers: int) -> str:
    """The name of the list of the body's layers.

    Raises:
      ValueError: there is none.
    """
    lists = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    }
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of its {num_layers} layers.")
    return max(lists, key=lambda name: lists[name])


def frozen_layers(blueprint: Blueprint, model: nn.Module) -> int:
    """How many first layers run before anything that trains: what `FrozenPrefix` may remember.

    0 if embeddings or a prefix train; all of them if only the head does.
    """
    stack = layer_stack(model, blueprint.num_layers)
    names = [name for name, _ in model.named_parameters()]
    start = next(i for i, name in enumerate(names) if name.startswith(f"{stack}."))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    if trained.intersection(names[:start]) or any("prompt_encoder" in name for name in trained):
        return 0
    inside = [re.match(rf"{re.escape(stack)}\.(\d+)\.", name) for name in trained]
    return min((int(found[1]) for found in inside if found), default=blueprint.num_layers)


def _shifted(name: str, stack: str, by: int) -> str:
    """The name in the whole model of a parameter whose layers are counted from `by`.

    >>> _shifted("bert.layer.0.output.bias", "bert.layer", 4)
    'bert.layer.4.output.bias'
    """
    found = re.match(rf"{re.escape(stack)}\.(\d+)\.(.*)", name)
    return name if found is None else f"{stack}.{int(found[1]) + by}.{found[2]}"


@torch.no_grad()
def fill_(model: nn.Module) -> None:
    """Normal weights of standard deviation 0.02, around 1 for norm scales; a block of them, repeated."""
    generator = torch.Generator().manual_seed(0)
    block = torch.empty(1 << 20).normal_(0.0, 0.02, generator=generator)
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        for part in flat.split(len(block)):
            part.copy_(block[: len(part)])
        if parameter.dim() == 1 and name.endswith("weight"):
            flat.add_(1.0)


# ---------------------------------------------------------------- batches


def longest(config: Any, max_seq_length: int) -> int:
    """`max_seq_length`, or the positions that the model has if they are fewer."""
    limit = getattr(text_config(config), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return max_seq_length
    offset = 2 if "roberta" in str(text_config(config).model_type) else 0
    return min(max_seq_length, limit - offset)


def token_batch(vocabulary: int, size: int, length: int, device: str) -> dict[str, Tensor]:
    """`size` rows of `length` random tokens, one of them padded by one token; the same each time.

    On the meta device there is no mask: without one, models that build theirs from the data can run.
    """
    if device == "meta":
        ids = torch.zeros(size, length, dtype=torch.int64, device=device)
        return {"input_ids": ids}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(4, vocabulary - 1), vocabulary, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def classification_batch(
    blueprint: Blueprint, size: int, length: int, device: str
) -> dict[str, Tensor]:
    """A microbatch for a classification head: tokens, or with precompute_features what they become."""
    labels = {"labels": torch.zeros(size, dtype=torch.int64, device=device)}
    if blueprint.arguments.precompute_features:
        return {"sentence_embedding": _features(blueprint, size, device), **labels}
    tokens = token_batch(blueprint.vocabulary, size, length, device)
    if blueprint.arguments.pair_features == "siamese":
        tokens |= {f"{name}_pair": value for name, value in tokens.items()}
    return {**tokens, **labels}


def _features(blueprint: Blueprint, size: int, device: str) -> Tensor:
    width = text_config(blueprint.config).hidden_size
    times = 4 if blueprint.arguments.pair_features == "siamese" else 1
    return torch.ones(size, times * width, device=device)
