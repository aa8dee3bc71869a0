"""Peak memory without memory: the real forward and backward passes on the meta device, counted.

Tensors on the meta device have shapes and no data. A dispatch mode sees every tensor that an
operation returns; its storage counts from then until Python and autograd have let go of it. What a
kernel allocates and frees inside itself is not seen, nor what an allocator leaves unused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dpzero.estimators.per_example_gradients import PerExampleGradients
from hf_dpzero.experiments.memory.shapes import empty_model, model_inputs
from hf_dpzero.objectives.losses import select_objective

GIB = 1 << 30


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that live, and their peak, from the operations inside the block.

    Attributes:
      live: bytes now; storages that existed before count once `hold` has named them.
      peak: the largest `live` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that no operation inside the block returned: weights, inputs."""
        for tensor in tensors:
            self._see(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.hold(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return output

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, storage.nbytes())

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class FusedAttention(TorchFunctionMode):
    """Scaled dot product attention as the fused kernels allocate it: no matrix of scores.

    On the meta device PyTorch takes its unfused path, which no real device of the bench takes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Fused.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    """Output like the query, one float32 for each of its rows kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        normaliser = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, normaliser)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model on one batch.

    Attributes:
      weights: parameters and buffers, tied ones once.
      forward: peak of a forward pass without gradients, over the weights.
      backward: peak of a forward and backward pass that leaves dense per-example gradients, over
        the weights; 0 if it was not asked for.
      examples: B.
      dimension: number of trained parameters.
      largest: elements of the largest of them.
      module: bytes of the largest single layer's own trained parameters; of an embedding twice the
        rows that the batch can use, gathered and perturbed.
    """

    weights: int
    forward: int
    backward: int
    examples: int
    dimension: int
    largest: int
    module: int


def footprint(
    shape: str,
    dtype: str,
    batch_size: int,
    seq_length: int,
    attention: str = "sdpa",
    per_example: bool = True,
) -> Footprint:
    """Runs the shape on the meta device. Attributes and limits: see `Footprint` and this module."""
    model = empty_model(shape, dtype, "meta", attention)
    ids = torch.zeros(batch_size, seq_length, dtype=torch.int64, device="meta")
    # No attention mask: without padding the models leave it out of the attention as well.
    batch = {"input_ids": ids, "labels": ids[:, 0]}
    parameters = list(model.parameters())
    return Footprint(
        weights=resident_bytes([*parameters, *model.buffers()]),
        forward=forward_bytes(model, batch),
        backward=backward_bytes(model, batch) if per_example else 0,
        examples=batch_size,
        dimension=sum(p.numel() for p in parameters),
        largest=max(p.numel() for p in parameters),
        module=largest_layer_bytes(model, batch_size * seq_length),
    )


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, shared ones once."""
    live = LiveBytes()
    live.hold(tensors)
    return live.live


def forward_bytes(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Peak of one forward pass of a meta model without gradients, over weights and inputs."""
    live = holding(model, batch)
    before = live.live
    with torch.no_grad(), FusedAttention(), live:
        model(**model_inputs(model, batch))
    return live.peak - before


def backward_bytes(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Peak while the per-example gradients of a meta model are computed, over weights and inputs."""
    live = holding(model, batch)
    before = live.live
    gradients = PerExampleGradients(model, select_objective(model))
    with FusedAttention(), live:
        gradients.per_example(batch)
    return live.peak - before


def holding(model: nn.Module, batch: Mapping[str, Tensor]) -> LiveBytes:
    """A counter that already holds the weights and the batch."""
    live = LiveBytes()
    live.hold([*model.parameters(), *model.buffers(), *batch.values()])
    return live


def largest_layer_bytes(model: nn.Module, tokens: int) -> int:
    """The most that a layer's perturbed copy takes; of an embedding, `tokens` rows. 0: none trains."""
    return max(_layer_bytes(module, tokens) for module in model.modules())


def _layer_bytes(module: nn.Module, tokens: int) -> int:
    if isinstance(module, nn.Embedding) and module.weight.requires_grad:
        rows, width = module.weight.shape
        return 2 * min(rows, tokens) * width * module.weight.element_size()
    own = (p for p in module.parameters(recurse=False) if p.requires_grad)
    return sum(p.numel() * p.element_size() for p in own)


def dpzero_bytes(found: Footprint, dtype: str, strategy: str) -> int:
    """Weights, a forward pass and what the strategy keeps (`auto`: layerwise in half precision).

    whole_model keeps nothing in float32, and in half precision a second copy of the weights.
    layerwise keeps a copy of one layer's.
    Working buffers of a few MB, where passes are made of torch operations, are not counted.
    """
    size = int(getattr(torch, dtype).itemsize)
    if strategy == "auto":
        strategy = "whole_model" if dtype == "float32" else "layerwise"
    if strategy == "whole_model":
        copy = 0 if dtype == "float32" else found.dimension * size
        return found.weights + found.forward + copy
    return found.weights + found.forward + found.module


def dp_adamw_bytes(found: Footprint, dtype: str, moments: int = 2) -> int:
    """Weights, AdamW's moments, the float32 sums, and the most of what three phases add to these.

    Differentiating: activations and dense per-example gradients, as counted. Clipping: all of the
    latter, one gradient, and of the largest tensor two sums and a float32 copy in half precision.
    Updating: the gradients and one more copy of them in torch's fused loops. `moments` is 0 for SGD.
    """
    w = int(getattr(torch, dtype).itemsize)
    size, widened = found.dimension * w, 0 if dtype == "float32" else 4
    clipping = (found.examples + 1) * size + (2 * w + widened) * found.largest
    phases = max(found.backward, clipping, 2 * size)
    return found.weights + moments * size + 4 * found.dimension + phases
