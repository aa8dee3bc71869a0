"""Peak memory of a recipe: its forward passes on the meta device, and what a step keeps beside them.

Counted are the tensors that live. On top come the libraries and, on a GPU, its context (about 0.5 GB
each), and what an allocator holds unused: a device is said to fit with a tenth to spare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dpzero.estimators.ghost_clipping import DENSE_BYTES, GhostGradients
from hf_dpzero.estimators.prefix_cache import FrozenPrefix
from hf_dpzero.estimators.stacked import AUTO_DIRECTIONS, STACK_BYTES
from hf_dpzero.experiments.memory.live_bytes import (
    counted,
    dense_gradient_bytes,
    forward_bytes,
    resident_bytes,
)
from hf_dpzero.experiments.memory.model_on_meta import MetaModel
from hf_dpzero.experiments.memory.objective_passes import Classification, FreeText, ObjectivePass
from hf_dpzero.training.defaults import resolve

CARDS = (8, 12, 16, 24, 40, 80, 141)
"""GiB of common graphics cards."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a model on one microbatch, from which those of each method follow."""

    weights: int  # parameters and buffers, tied ones once
    examples: int  # B
    dimension: int  # number of trained parameters
    trained: int  # bytes of them
    half: int  # bytes of those that are not float32
    largest: int  # elements of the largest of them
    # bytes of the largest single layer's own trained parameters; of an embedding twice the rows
    # that the batch can use, gathered and perturbed
    module: int

    @classmethod
    def of(cls, model: nn.Module, examples: int, tokens: int) -> Footprint:
        """Adds the sizes of a model's parameters.

        Args:
          model: on the meta device.
          examples: B.
          tokens: in all rows that the model runs for them.

        Returns:
          The footprint.
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() * p.element_size() for p in trained]
        half = [size for p, size in zip(trained, sizes, strict=True) if p.dtype != torch.float32]
        return cls(
            weights=resident_bytes([*model.parameters(), *model.buffers()]),
            examples=examples,
            dimension=sum(p.numel() for p in trained),
            trained=sum(sizes),
            half=sum(half),
            largest=max((p.numel() for p in trained), default=0),
            module=max(_own_bytes(module, tokens) for module in model.modules()),
        )


def _own_bytes(module: nn.Module, tokens: int) -> int:
    if isinstance(module, nn.Embedding) and module.weight.requires_grad:
        rows, width = module.weight.shape
        return 2 * min(rows, tokens) * width * module.weight.element_size()
    trained = (p for p in module.parameters(recurse=False) if p.requires_grad)
    return sum(p.numel() * p.element_size() for p in trained)


def dpzero_bytes(footprint: Footprint, forward: int, strategy: str) -> int:
    """Peak of a zeroth-order step: weights, a forward pass and what the strategy keeps.

    Working buffers of a few MB, where passes are made of torch operations, are not counted.

    Args:
      footprint: of the model and its microbatch.
      forward: peak of a forward pass without gradients, over the weights.
      strategy: "whole_model" keeps a second copy of half-precision weights, "layerwise" a copy of one
        layer's; "auto" is layerwise where half-precision weights train.

    Returns:
      Bytes.
    """
    if strategy == "layerwise" or (strategy == "auto" and footprint.half):
        return footprint.weights + forward + footprint.module
    return footprint.weights + forward + footprint.half


def dp_adamw_bytes(footprint: Footprint, backward: int, moments: int = 2) -> int:
    """Peak of a first-order private step: weights, moments, float64 sums, and the largest phase.

    Differentiating: activations and dense per-example gradients, as counted. Clipping: all of the
    latter, one gradient, and of the largest tensor a float32 sum.
    Updating: the gradients and one more copy of them in torch's fused loops.

    Args:
      footprint: of the model and its microbatch.
      backward: peak of a pass that leaves dense per-example gradients, over the weights.
      moments: copies of the trained parameters that the optimizer keeps: 2 for AdamW, 0 for SGD.

    Returns:
      Bytes.
    """
    size = footprint.trained
    clipping = (footprint.examples + 1) * size + 4 * footprint.largest
    phases = max(backward, clipping, 2 * size)
    return footprint.weights + moments * size + 8 * footprint.dimension + phases


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


def all_peaks(objective: ObjectivePass, recipe: Any) -> list[Peaks]:
    """Counts the recipe's memory in each precision; in 4 or 8 bits only if the recipe asks for it.

    Args:
      objective: the recipe's.
      recipe: its training arguments say the method, the batch sizes, the strategy.

    Returns:
      One for each precision.
    """
    counts = [_peaks(objective, recipe, dtype) for dtype in ("float32", "bfloat16")]
    if recipe.model.quantised:
        base = _peaks(objective, recipe, own_dtype(objective.meta))
        counts.append(_quantised(base, objective, recipe.model.quantised))
    return counts


def own_dtype(meta: MetaModel) -> str:
    """The precision of the recipe's weights; "auto" is the checkpoint's."""
    asked = meta.arguments.torch_dtype
    if asked != "auto":
        return asked
    return str(getattr(meta.config, "dtype", None) or torch.float32).removeprefix("torch.")


def _peaks(objective: ObjectivePass, recipe: Any, dtype: str) -> Peaks:
    """Counts the recipe's memory with the base model's weights in one precision."""
    args = recipe.training
    model = objective.meta.build(dtype)
    weights = resident_bytes([*model.parameters(), *model.buffers()])
    size = args.physical_batch_size
    tokens = size * objective.rows_per_example * objective.length
    step = _first_order_step if args.first_order else _zeroth_order_step
    how, training = step(objective, model, args, Footprint.of(model, size, tokens))
    return Peaks(
        precision=dtype,
        weights=weights,
        inference=weights + _evaluation_bytes(objective, model, size),
        evaluation=weights + _prediction_bytes(objective, model, args.per_device_eval_batch_size),
        training=training,
        how=how,
    )


def _evaluation_bytes(
    objective: ObjectivePass, model: nn.Module, size: int, prefix: FrozenPrefix | None = None
) -> int:
    """Peak over the weights of evaluating the objective on `size` examples without gradients."""
    batch = objective.batch(size)

    def evaluate() -> None:
        with prefix.installed() if prefix is not None else contextlib.nullcontext():
            for _ in range(1 if prefix is None else 2):
                if prefix is not None:
                    prefix.begin_evaluation()
                objective.losses(model, batch)

    return forward_bytes(model, batch, evaluate) + _mask_bytes(objective, model, size)


def _width(model: nn.Module) -> int:
    return next(p for p in model.parameters() if p.is_floating_point()).element_size()


def _mask_bytes(objective: ObjectivePass, model: nn.Module, size: int) -> int:
    """The mask `[rows, 1, T, T]` of padded rows, as truth values and as numbers."""
    # the meta device runs without it: rows that are not padded have none
    if isinstance(objective, Classification) and objective.from_features:
        return 0
    return size * objective.rows_per_example * objective.length**2 * (1 + _width(model))


def _prediction_bytes(objective: ObjectivePass, model: nn.Module, size: int) -> int:
    """Peak of evaluating `size` examples, over the weights; with stored features, of making them."""
    if isinstance(objective, FreeText):
        first = dataclasses.replace(objective, by_generation=True)
        return _evaluation_bytes(first, model, size) + _generation_bytes(first, model, size)
    if isinstance(objective, Classification):
        objective = dataclasses.replace(objective, from_features=False)
    return _evaluation_bytes(objective, model, size)


def _generation_bytes(objective: FreeText, model: nn.Module, size: int) -> int:
    """The cache that generation keeps: keys and values of every layer for T tokens."""
    # the new tokens have their room in T; one layer's cache exists twice while it grows
    layer = size * objective.length * _width(model) * cache_width(objective.meta.body)
    return (objective.meta.num_layers + 1) * layer


def cache_width(body: Any) -> int:
    """Numbers that a layer's cache keeps for one token: a key and a value for each of its heads."""
    heads = int(body.num_attention_heads)
    size = getattr(body, "head_dim", None) or body.hidden_size // heads
    return 2 * int(getattr(body, "num_key_value_heads", None) or heads) * int(size)


def _zeroth_order_step(
    objective: ObjectivePass, model: nn.Module, args: Any, footprint: Footprint
) -> tuple[str, int]:
    """The strategy, and bytes: forward passes, and copies where the strategy keeps some."""
    size, prefix = args.physical_batch_size, FrozenPrefix(model)
    reused = prefix if args.reuse_frozen_prefix and prefix.worthwhile else None
    forward = _evaluation_bytes(objective, model, size, reused)
    extra = 0
    if isinstance(objective, FreeText) and objective.by_generation:
        extra += _generation_bytes(objective, model, size)
    directions = resolve(args, model).num_directions
    copies = 2 * directions * footprint.trained
    strategy = args.perturbation_strategy
    if strategy == "auto":
        many = directions >= AUTO_DIRECTIONS and copies <= STACK_BYTES
        if footprint.half:
            strategy = "layerwise"
        elif many and objective.meta.trains_head_alone(model):
            strategy = "stacked"
        else:
            strategy = "whole_model"
    if strategy == "stacked":
        return strategy, footprint.weights + forward + min(STACK_BYTES, copies) + extra
    return strategy, dpzero_bytes(footprint, forward, strategy) + extra


def _first_order_step(
    objective: ObjectivePass, model: nn.Module, args: Any, footprint: Footprint
) -> tuple[str, int | None]:
    """How gradients are taken, and bytes: activations, what each example keeps, sums, moments."""
    floating = [p for p in model.parameters() if p.is_floating_point()]
    any_half = any(p.dtype != torch.float32 for p in floating)
    how = args.per_example_gradients
    if args.not_private or args.clipping == "averaged":
        how = "plain"
    elif how == "auto":  # as `ghost_clipping.per_example_gradients` chooses
        few = 4 * footprint.dimension * footprint.examples < DENSE_BYTES
        how = "dense" if few or any_half or args.bf16 else "ghost"
    moments = 0 if args.method in ("sgd", "dp-sgd") else 2
    batch = objective.batch(footprint.examples)
    mask = _mask_bytes(objective, model, footprint.examples)
    if how == "dense":
        backward = dense_gradient_bytes(model, objective.losses, batch) + mask
        return how, dp_adamw_bytes(footprint, backward, moments)
    if how == "ghost" and any_half:
        return how, None
    with torch.enable_grad(), counted(model, batch) as live:
        if how == "plain":
            losses = objective.losses(model, batch)
            trained = [p for p in model.parameters() if p.requires_grad]
            gradient = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
            del losses, gradient
        else:
            gradients = GhostGradients(model, objective.losses)
            with gradients._hooked() as hooks:
                gradients._losses(hooks, batch).sum().backward()
                model.zero_grad()
                # all that the hooks keep while they sum, and one layer's weighted again
                kept = [use.left for uses in hooks.uses.values() for use in uses]
                weighted = max((t.numel() * t.element_size() for t in kept), default=0)
                live.peak = max(live.peak, live.live + weighted)
    phase = max(live.peak + mask, 2 * footprint.trained)
    sums = 4 * footprint.dimension
    return how, footprint.weights + moments * footprint.trained + sums + phase


def _quantised(base: Peaks, objective: ObjectivePass, bits: int) -> Peaks:
    """The same with the frozen linear layers of the body in 4 or 8 bits, written out one by one."""
    # Heads, output embeddings and what trains stay as they are.
    kept = ("lm_head", "classifier", "score", "lora_", "modules_to_save", "original_module")
    weights = [
        module.weight
        for name, module in objective.meta.build(base.precision).named_modules()
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
