"""Peak memory without memory: forward and backward passes on the meta device, counted.

Tensors on the meta device have shapes and no data. A dispatch mode sees every tensor that an
operation returns; its storage counts from then until Python and autograd have let go of it. Not seen
is what a kernel allocates and frees inside itself, and what an allocator leaves unused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dpzero.estimators.per_example_gradients import PerExampleGradients
from hf_dpzero.objectives.losses import PerExampleLoss

GIB = 1 << 30


class LiveBytes(TorchDispatchMode):
    """Bytes of the live storages, and their peak, from the operations inside the block.

    Storages that existed before count once `hold` has named them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0  # bytes now, and the most so far
        self._known: set[int] = set()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts the tensors' storages, shared ones once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, key, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.hold(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        return output

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class FusedAttention(TorchFunctionMode):
    """Scaled dot product attention as the fused kernels allocate it: no matrix of scores.

    On the meta device PyTorch takes its unfused path, which no real device here takes.
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
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class NothingPadded(TorchDispatchMode):
    """Answers "yes" where code asks a truth value of a tensor on the meta device.

    What transformers asks there is whether a mask attends to every token.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool
        if asks and args[0].device.type == "meta":
            return True
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[LiveBytes]:
    """Counts what operations on a meta model keep alive inside the block.

    Args:
      model: its weights and buffers are not counted.
      batch: its tensors on the meta device; not counted either.

    Returns:
      The counter.
    """
    live = LiveBytes()
    live.hold([*model.parameters(), *model.buffers(), *batch.values()])
    live.live = live.peak = 0
    with FusedAttention(), live, NothingPadded():
        yield live


def forward_bytes(
    model: nn.Module, batch: Mapping[str, Tensor], evaluate: Callable[[], object]
) -> int:
    """Peak of `evaluate` without gradients, over the weights and the batch.

    Args:
      model: on the meta device.
      batch: what it runs on, on the meta device.
      evaluate: runs the model on the batch.

    Returns:
      Bytes.
    """
    with torch.no_grad(), counted(model, batch) as live:
        evaluate()
    return live.peak


def dense_gradient_bytes(
    model: nn.Module, objective: PerExampleLoss, batch: Mapping[str, Tensor]
) -> int:
    """Peak of a pass that leaves dense per-example gradients, over the weights and the batch.

    Args:
      model: on the meta device.
      objective: (model, batch) -> losses [B].
      batch: B examples on the meta device.

    Returns:
      Bytes.
    """
    gradients = PerExampleGradients(model, objective)
    with torch.enable_grad(), counted(model, batch) as live:
        gradients.per_example(batch)
    return live.peak


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, shared ones once."""
    live = LiveBytes()
    live.hold(tensors)
    return live.live
