"""Peak memory of a recipe: its own passes on the meta device, counted, and what a step keeps beside.

Counted are the tensors that live. On top come the libraries and, on a GPU, its context (about 0.5 GB
each), and what an allocator holds unused: a device is said to fit with a tenth to spare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.ghost_clipping import DENSE_BYTES, GhostGradients
from hf_dpzero.estimators.per_example_gradients import PerExampleGradients
from hf_dpzero.estimators.prefix_cache import FrozenPrefix
from hf_dpzero.estimators.stacked import AUTO_DIRECTIONS, STACK_BYTES
from hf_dpzero.experiments.memory.live_bytes import (
    GIB,
    Footprint,
    FusedAttention,
    dp_adamw_bytes,
    dpzero_bytes,
    holding,
    largest_layer_bytes,
    resident_bytes,
)
from hf_dpzero.experiments.memory.model_on_meta import (
    Blueprint,
    NothingPadded,
    frozen_layers,
    text_config,
)
from hf_dpzero.experiments.memory.objective_passes import Classification, FreeText, Pass

CARDS = (24, 40, 80, 141)
"""GiB of common graphics cards."""
SPARE = 0.1
"""Share of a device that is left to what is not counted."""
DTYPES = ("float32", "bfloat16")
BITS_PER_WEIGHT = {4: 4 + 32 / 64, 8: 8}
"""bitsandbytes: 4-bit weights with a float32 scale for each block of 64; 8-bit ones with one a row."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Bytes at the peaks of a run whose weights are in one precision.

    Attributes:
      precision: "float32", "bfloat16", or "4-bit" or "8-bit" for a quantised base.
      weights: parameters and buffers, tied ones once.
      inference: a forward pass of one microbatch.
      evaluation: of the recipe's evaluation batch; with generation, the cache of keys and values.
      training: a step; None where the method does not work in this precision.
      how: how training perturbs or differentiates.
    """

    precision: str
    weights: int
    inference: int
    evaluation: int
    training: int | None
    how: str

    @property
    def peak(self) -> int | None:
        """Of the whole run."""
        return None if self.training is None else max(self.evaluation, self.training)

    def fits(self, room: int) -> bool:
        """Whether the whole run fits in `room` bytes with a tenth to spare."""
        return self.peak is not None and self.peak <= (1 - SPARE) * room


def all_peaks(work: Pass, recipe: Any) -> list[Peaks]:
    """One for each precision; a quantised base only if the recipe asks for one."""
    found = [peaks(work, recipe, dtype) for dtype in DTYPES]
    bits = quantised_bits(recipe.model)
    if bits is not None:
        found.append(_quantised(peaks(work, recipe, own_dtype(work.blueprint)), work, bits))
    return found


def own_dtype(blueprint: Blueprint) -> str:
    """The precision of the recipe's weights; "auto" is the checkpoint's."""
    asked = blueprint.arguments.torch_dtype
    if asked != "auto":
        return asked
    found = getattr(blueprint.config, "dtype", None) or torch.float32
    return str(found).removeprefix("torch.")


def quantised_bits(arguments: Any) -> int | None:
    """4, 8, or None."""
    if getattr(arguments, "load_in_4bit", False):
        return 4
    return 8 if getattr(arguments, "load_in_8bit", False) else None


def peaks(work: Pass, recipe: Any, dtype: str) -> Peaks:
    """Counts the recipe's passes with weights in `dtype`.

    Args:
      work: the recipe's objective.
      recipe: its training arguments say the method, the batch sizes, the strategy.
    """
    args = recipe.training
    model = work.blueprint.whole(dtype)
    weights = resident_bytes([*model.parameters(), *model.buffers()])
    count = _FirstOrder if args.first_order else _ZerothOrder
    step = count(work, model, weights, args)
    return Peaks(
        precision=dtype,
        weights=weights,
        inference=weights + forward_bytes(work, model, args.physical_batch_size),
        evaluation=weights + evaluation_bytes(work, model, args.per_device_eval_batch_size),
        training=step.bytes(),
        how=step.how,
    )


# ---------------------------------------------------------------- forward passes


def forward_bytes(
    work: Pass, model: nn.Module, size: int, prefix: FrozenPrefix | None = None
) -> int:
    """Peak of evaluations of `size` examples without gradients, over the weights.

    Args:
      prefix: remembers what runs before anything trained; the second evaluation reuses it.
    """
    batch, objective = work.batch(size, "meta"), work.traced(model)
    live = holding(model, batch)
    before = live.live
    with torch.no_grad(), FusedAttention(), live, NothingPadded(), _installed(prefix):
        for _ in range(1 if prefix is None else 2):
            if prefix is not None:
                prefix.begin_evaluation()
            objective(model, batch)
    return live.peak - before + mask_bytes(work, model, size)


@contextlib.contextmanager
def _installed(prefix: FrozenPrefix | None) -> Iterator[None]:
    with prefix.installed() if prefix is not None else contextlib.nullcontext():
        yield


def mask_bytes(work: Pass, model: nn.Module, size: int) -> int:
    """The mask `[rows, 1, T, T]` of padded rows, as truth values and as numbers.

    The meta device runs without: rows that are not padded have none.
    """
    if isinstance(work, Classification) and work.blueprint.arguments.precompute_features:
        return 0
    width = next(p for p in model.parameters() if p.is_floating_point()).element_size()
    return size * work.sequences * work.length**2 * (1 + width)


def evaluation_bytes(work: Pass, model: nn.Module, size: int) -> int:
    """Peak of evaluating `size` examples, over the weights; where it applies, of encoding them once."""
    if isinstance(work, FreeText):
        first = dataclasses.replace(work, by_generation=True)
        return forward_bytes(first, model, size) + generation_bytes(work, model, size)
    return forward_bytes(work.on_tokens(), model, size)


def generation_bytes(work: FreeText, model: nn.Module, size: int) -> int:
    """The cache that generation keeps beside a pass.

    Keys and values of every layer, T tokens each (the new ones have their room in T), and one layer's
    once more while it grows.
    """
    body = text_config(work.blueprint.config)
    width = next(p for p in model.parameters() if p.is_floating_point()).element_size()
    layer = size * work.length * width * cache_width(body)
    return (int(body.num_hidden_layers) + 1) * layer


def cache_width(body: Any) -> int:
    """Numbers that a layer's cache keeps for one token: a key and a value for each of its heads."""
    heads = int(body.num_attention_heads)
    size = getattr(body, "head_dim", None) or body.hidden_size // heads
    return 2 * int(getattr(body, "num_key_value_heads", None) or heads) * int(size)


# ---------------------------------------------------------------- a training step


class _Step:
    """What a step keeps alive at its peak.

    Args:
      weights: bytes of the model.
      args: the recipe's training arguments.
    """

    how = ""

    def __init__(self, work: Pass, model: nn.Module, weights: int, args: Any) -> None:
        self.work, self.model, self.weights, self.args = work, model, weights, args
        self.size = args.physical_batch_size
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.dimension = sum(p.numel() for p in self.trained)
        half = any(p.dtype != torch.float32 for p in self.trained)
        self.dtype = "bfloat16" if half else "float32"

    def footprint(self, forward: int = 0, backward: int = 0) -> Footprint:
        """In the terms of `hf-dpzero bench memory`."""
        tokens = self.size * self.work.sequences * self.work.length
        return Footprint(
            weights=self.weights,
            forward=forward,
            backward=backward,
            examples=self.size,
            dimension=self.dimension,
            largest=max((p.numel() for p in self.trained), default=0),
            module=largest_layer_bytes(self.model, tokens),
        )


class _ZerothOrder(_Step):
    """Forward passes, and copies where the strategy or the subspace keeps some."""

    def bytes(self) -> int:
        self.how = self._strategy()
        found = self.footprint(forward_bytes(self.work, self.model, self.size, self._prefix()))
        extra = self._generation() + self._subspace()
        if self.how == "stacked":
            return found.weights + found.forward + min(STACK_BYTES, self._copies) + extra
        return dpzero_bytes(found, self.dtype, self.how) + extra

    @property
    def _copies(self) -> int:
        """Both signs of every direction."""
        size = sum(p.numel() * p.element_size() for p in self.trained)
        return 2 * self.args.num_directions * size

    def _strategy(self) -> str:
        asked: str = self.args.perturbation_strategy
        if asked != "auto":
            return asked
        if self.args.subspace != "full":
            return "whole_model"
        if self.dtype != "float32":
            return "layerwise"
        alone = frozen_layers(self.work.blueprint, self.model) == self.work.blueprint.num_layers
        many = self.args.num_directions >= AUTO_DIRECTIONS and self._copies <= STACK_BYTES
        return "stacked" if alone and many else "whole_model"

    def _prefix(self) -> FrozenPrefix | None:
        prefix = FrozenPrefix(self.model)
        reuse = self.args.reuse_frozen_prefix and prefix.worthwhile
        return prefix if reuse else None

    def _generation(self) -> int:
        if isinstance(self.work, FreeText) and self.work.by_generation:
            return generation_bytes(self.work, self.model, self.size)
        return 0

    def _subspace(self) -> int:
        """low_rank: U and V."""
        if self.args.subspace == "low_rank":
            sides = (sum(p.shape[:1]) + p.shape[1:].numel() for p in self.trained if p.dim() > 1)
            return max((4 * self.args.subspace_rank * side for side in sides), default=0)
        return 0


class _FirstOrder(_Step):
    """Activations, gradients of single examples or what ghost clipping keeps, sums, moments."""

    def bytes(self) -> int | None:
        self.how = self._gradients()
        count = {"plain": self._plain, "dense": self._dense, "ghost": self._ghost}
        if self.how == "ghost" and self._any_half:
            return None
        return count[self.how]()

    @property
    def _moments(self) -> int:
        return 0 if self.args.method in ("sgd", "dp-sgd") else 2

    @property
    def _any_half(self) -> bool:
        floating = (p for p in self.model.parameters() if p.is_floating_point())
        return any(p.dtype != torch.float32 for p in floating)

    def _gradients(self) -> str:
        """As `ghost.per_example_gradients` chooses."""
        if self.args.not_private or self.args.clipping == "averaged":
            return "plain"
        asked: str = self.args.per_example_gradients
        if asked != "auto":
            return asked
        few = 4 * self.dimension * self.size < DENSE_BYTES
        return "dense" if few or self._any_half or self.args.bf16 else "ghost"

    def _plain(self) -> int:
        with self._watched() as (live, batch):
            losses = self.work.traced(self.model)(self.model, batch)
            gradient = torch.autograd.grad(losses.sum(), self.trained, allow_unused=True)
            del losses, gradient
        return self._with_sums(live.peak - live.before)

    def _dense(self) -> int:
        gradients = PerExampleGradients(self.model, self.work.traced(self.model))
        with self._watched() as (live, batch):
            gradients.per_example(batch)
        found = self.footprint(backward=live.peak - live.before)
        return dp_adamw_bytes(found, self.dtype, self._moments)

    def _ghost(self) -> int:
        """Then the sum: beside what was seen, one layer's weighted once more."""
        gradients = GhostGradients(self.model, self.work.traced(self.model))
        with self._watched() as (live, batch), gradients._hooked() as hooks:
            gradients._losses(hooks, batch).sum().backward()
            for p in self.trained:
                p.grad = None
            seen = [use.left for uses in hooks.uses.values() for use in uses]
            widest = max((t.numel() * t.element_size() for t in seen), default=0)
            kept = live.live - live.before + widest
        return self._with_sums(max(live.peak - live.before, kept))

    def _with_sums(self, phase: int) -> int:
        size = sum(p.numel() * p.element_size() for p in self.trained)
        sums = 4 * self.dimension
        return self.weights + self._moments * size + sums + max(phase, 2 * size)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Any]:
        batch = self.work.batch(self.size, "meta")
        live: Any = holding(self.model, batch)
        live.before = live.live
        with torch.enable_grad(), FusedAttention(), live, NothingPadded():
            yield live, batch
        live.peak += mask_bytes(self.work, self.model, self.size)


# ---------------------------------------------------------------- a quantised base


def _quantised(found: Peaks, work: Pass, bits: int) -> Peaks:
    """The same with the frozen linear layers of the body in 4 or 8 bits.

    A layer is written out in the other weights' precision while it runs.
    """
    model = work.blueprint.whole(found.precision)
    layers = quantised_layers(model)
    full = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    packed = sum(packed_bytes(layer.weight, bits) for layer in layers)
    largest = max((w.weight.numel() * w.weight.element_size() for w in layers), default=0)
    less = full - packed

    def at(size: int) -> int:
        return size - less + largest

    return dataclasses.replace(
        found,
        precision=f"{bits}-bit",
        weights=found.weights - less,
        inference=at(found.inference),
        evaluation=at(found.evaluation),
        training=None if found.training is None else at(found.training),
    )


def quantised_layers(model: nn.Module) -> list[nn.Linear]:
    """Frozen linear layers of the body; heads, output embeddings and what trains stay as they are."""
    kept = ("lm_head", "classifier", "score", "lora_", "modules_to_save", "original_module")
    return [
        module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and not module.weight.requires_grad
        and not any(word in name for word in kept)
    ]


def packed_bytes(weight: Tensor, bits: int) -> int:
    """A quantised weight with its scales."""
    scales = 0 if bits == 4 else 4 * len(weight)
    return math.ceil(weight.numel() * BITS_PER_WEIGHT[bits] / 8) + scales


# ---------------------------------------------------------------- devices


def devices() -> dict[str, int]:
    """Memory of this machine's devices: what the processor has in all, and each GPU."""
    import os

    found = {"CPU": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index} {properties.name}"] = int(properties.total_memory)
    return found


def rooms(machine: Mapping[str, int]) -> dict[str, int]:
    """Name -> bytes, of this machine's devices and of common cards."""
    return {**machine, **{f"{size} GiB": size * GIB for size in CARDS}}
