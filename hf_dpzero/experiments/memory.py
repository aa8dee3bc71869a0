"""Whether a recipe's run will fit: a table of bytes, and one pass of its model without values.

Weights, one copy, optimizer and per-example gradients follow from the parameters. What a pass holds
follows from what its modules return on the meta device, by the rule that caps passes in training
(`batches.pass_memory`). On top come the libraries and, on a GPU, its context (about 0.5 GB each): a
device is said to fit with a tenth to spare.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.batches import pass_memory
from hf_dpzero.batches.pass_memory import PassBytes, measured
from hf_dpzero.estimators.per_example_gradients import DENSE_BYTES
from hf_dpzero.estimators.stacked import AUTO_DIRECTIONS, STACK_BYTES
from hf_dpzero.experiments.model_on_meta import MetaModel, NothingPadded
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.prompted import selected_logits
from hf_dpzero.settings.defaults import resolve
from hf_dpzero.tasks import description_of

GIB = 1 << 30
CARDS = (8, 12, 16, 24, 40, 80, 141)
"""GiB of common graphics cards."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Bytes at the peaks of a run whose weights are in one precision."""

    precision: str  # "float32", "bfloat16", or "4-bit" or "8-bit" for a quantised base
    weights: int  # parameters and buffers, tied ones once
    inference: int  # a forward pass of one microbatch
    # of the recipe's evaluation batch; with generation, the cache of keys and values
    evaluation: int
    training: int | None  # a step; None where the method does not work in this precision
    how: str  # how training perturbs or differentiates

    @property
    def peak(self) -> int | None:
        """Of the whole run."""
        return None if self.training is None else max(self.evaluation, self.training)

    def fits(self, room: int) -> bool:
        """True if the whole run fits in `room` bytes with a tenth to spare."""
        return self.peak is not None and self.peak <= 0.9 * room


def all_peaks(meta: MetaModel, recipe: Any) -> list[Peaks]:
    """The recipe's memory in each precision; in 4 or 8 bits only if the recipe asks for it."""
    counts = [peaks_in(meta, recipe, dtype) for dtype in ("float32", "bfloat16")]
    if recipe.model.quantised:
        base = peaks_in(meta, recipe, own_dtype(meta))
        counts.append(_quantised(base, meta, recipe.model.quantised))
    return counts


def own_dtype(meta: MetaModel) -> str:
    """The precision of the recipe's weights; "auto" is the checkpoint's."""
    asked = meta.arguments.torch_dtype
    if asked != "auto":
        return asked
    return str(getattr(meta.config, "dtype", None) or torch.float32).removeprefix("torch.")


def peaks_in(meta: MetaModel, recipe: Any, dtype: str) -> Peaks:
    """The recipe's memory with the base model's weights in one precision."""
    args, data, model = recipe.training, recipe.data, meta.build(dtype)
    rows, evaluated = args.physical_batch_size, args.per_device_eval_batch_size
    generates = meta.head != "sequence_classification" and meta.num_labels == 0
    weights = weight_bytes(model)
    found = measured_pass(meta, data, model, rows, meta.arguments.precompute_features)
    every = measured_pass(meta, data, model, evaluated)  # with stored features, of making them
    cache = _cache_bytes(meta, data, model) if generates else 0  # of a row
    if args.first_order:
        how, training = first_order_bytes(model, args, rows, found)
    else:
        how, training = zeroth_order_bytes(
            model, args, rows * meta.longest_row(data.max_seq_length), found,
            meta.trains_head_alone(model),
        )  # fmt: skip
        training += rows * cache * (data.objective == "f1")
    return Peaks(
        precision=dtype,
        weights=weights,
        inference=weights + forward_bytes(found),
        evaluation=weights + forward_bytes(every) + evaluated * cache,
        training=training,
        how=how,
    )


def weight_bytes(model: nn.Module) -> int:
    """Of parameters and buffers, tied ones once."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def forward_bytes(found: PassBytes) -> int:
    """That a pass without gradients holds at a time, by what its modules returned."""
    return int(pass_memory._ALIVE * found.largest)


def measured_pass(
    meta: MetaModel, data: Any, model: nn.Module, examples: int, from_features: bool = False
) -> PassBytes:
    """One evaluation of the recipe's objective on the meta device, of rows as long as may be.

    Args:
      meta: the recipe's model.
      data: the recipe's DataArguments.
      model: of `meta.build`.
      examples: B.
      from_features: the batch holds a frozen encoder's outputs (`precompute_features`).
    """
    length, features = meta.longest_row(data.max_seq_length), from_features
    if meta.head != "sequence_classification":
        rows = examples * (meta.num_labels if several_words(meta, data) else 1)
        scored = 1 if meta.num_labels else max(1, min(data.max_new_tokens, length - 2))
        places = torch.zeros(rows, scored, dtype=torch.int64, device="meta")
        ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
        with torch.no_grad(), measured(model) as found, NothingPadded():
            selected_logits(model, {"input_ids": ids}, places)
        return found
    siamese = meta.arguments.pair_features == "siamese"
    labels = torch.zeros(examples, dtype=torch.int64, device="meta")
    width = meta.body.hidden_size * (4 if siamese else 1)
    names = ("input_ids", "input_ids_pair") if siamese else ("input_ids",)
    batch: dict[str, Tensor] = (
        {"sentence_embedding": torch.ones(examples, width, device="meta")}
        if features
        else {name: labels.unsqueeze(1).expand(-1, length) for name in names}
    )
    with torch.no_grad(), measured(model) as found, NothingPadded():
        select_objective(model)(model, {**batch, "labels": labels})
    return found


def several_words(meta: MetaModel, data: Any) -> bool:
    """Whether labels have several tokens, so that an example is a row for each label."""
    words: Any = data.label_words
    if words is None:  # the task's own
        prompts = getattr(description_of(data.task), "prompts", {})
        words = prompts[data.prompt].label_words if data.prompt in prompts else ()
    return meta.head == "causal_lm" and any(" " in word.strip() for word in words)


def _cache_bytes(meta: MetaModel, data: Any, model: nn.Module) -> int:
    """Keys and values of every layer for a row's tokens; one layer's exists twice while it grows."""
    width = next(p for p in model.parameters() if p.is_floating_point()).element_size()
    length = meta.longest_row(data.max_seq_length)
    return (meta.num_layers + 1) * length * width * cache_width(meta.body)


def cache_width(body: Any) -> int:
    """Numbers that a layer's cache keeps for one token: a key and a value for each of its heads."""
    heads = int(body.num_attention_heads)
    size = getattr(body, "head_dim", None) or body.hidden_size // heads
    return 2 * int(getattr(body, "num_key_value_heads", None) or heads) * int(size)


def zeroth_order_bytes(
    model: nn.Module, args: Any, tokens: int, found: PassBytes, head_alone: bool = False
) -> tuple[str, int]:
    """The strategy, and bytes: weights, a pass, and what the strategy keeps a copy of.

    Args:
      model: on the meta device.
      args: `performance`, `num_directions`.
      tokens: in all rows of a pass; a layer-by-layer embedding copies no more of its rows.
      found: of a pass.
      head_alone: every trained parameter comes after the body's layers.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    half = sum(p.numel() * p.element_size() for p in trained if p.dtype != torch.float32)
    directions = resolve(args, model).num_directions
    copies = 2 * directions * sum(p.numel() * p.element_size() for p in trained)
    strategy = args.performance.perturbation_strategy
    if strategy == "auto":
        many = directions >= AUTO_DIRECTIONS and copies <= STACK_BYTES
        strategy = "layerwise" if half else "stacked" if many and head_alone else "whole_model"
    copy = {
        "layerwise": max((_own_bytes(m, tokens) for m in model.modules()), default=0),
        "stacked": min(STACK_BYTES, copies),
    }.get(strategy, half)
    return strategy, weight_bytes(model) + forward_bytes(found) + copy


def _own_bytes(module: nn.Module, tokens: int) -> int:
    if isinstance(module, nn.Embedding) and module.weight.requires_grad:
        rows, width = module.weight.shape
        return 2 * min(rows, tokens) * width * module.weight.element_size()
    trained = (p for p in module.parameters(recurse=False) if p.requires_grad)
    return sum(p.numel() * p.element_size() for p in trained)


def first_order_bytes(
    model: nn.Module, args: Any, examples: int, found: PassBytes
) -> tuple[str, int | None]:
    """How gradients are taken, and bytes: weights, activations, gradients, their sum, the optimizer.

    Args:
      model: on the meta device.
      args: `method`, `clipping`, `performance`, `not_private`, `bf16`.
      examples: of a pass.
      found: of it.

    Returns:
      None for the bytes where the method refuses the weights' precision.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    count, size = (
        sum(p.numel() for p in trained),
        sum(p.numel() * p.element_size() for p in trained),
    )
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
    gradients = (examples + 1) * size if how == "dense" else 2 * size
    sums = 8 * count if how == "dense" else 4 * count
    return how, weight_bytes(model) + moments * size + sums + gradients + found.total


def _quantised(base: Peaks, meta: MetaModel, bits: int) -> Peaks:
    """The same with the frozen linear layers of the body in 4 or 8 bits, written out one by one."""
    # Heads, output embeddings and what trains stay as they are.
    kept = ("lm_head", "classifier", "score", "lora_", "modules_to_save", "original_module")
    weights = [
        module.weight
        for name, module in meta.build(base.precision).named_modules()
        if type(module) is nn.Linear
        and not module.weight.requires_grad
        and not any(word in name for word in kept)
    ]
    full = [w.numel() * w.element_size() for w in weights]
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
    """Bytes of memory of this machine's devices: the processor's in all, and each GPU's."""
    sizes = {"CPU": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sizes[f"cuda:{index} {properties.name}"] = int(properties.total_memory)
    return sizes
