"""Tensors that FSDP2 has split over processes (DTensors): the part that lies here, small agreements.

`torch.distributed.fsdp.fully_shard` cuts every parameter into blocks of rows, one a process; a small
tensor may leave some processes with nothing. A process perturbs and updates its own part, for which it
needs to know where the part begins in the whole tensor: coordinates of directions are random-access, so
it makes those of its part only. Nothing crosses the wire for that. What does: the largest magnitude of a
tensor, which its grid follows from, and a direction's norm on the sphere; both are a few bytes.

Plain tensors pass through every function here as they are.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dpzero.perturbation.directions import NORMAL_UNIT, Direction, DirectionStream

_HALF = 1 << 31  # of an exact sum that travels as two int64


class Part(NamedTuple):
    """What lies on this process of a tensor.

    Attributes:
      tensor: plain, contiguous, maybe empty; the tensor itself where it is not split.
      first: index of its first element in the whole tensor.
    """

    tensor: Tensor
    first: int


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is split over processes. Imports nothing: without DTensors there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def mesh_of(tensor: Any) -> Any:
    """The processes that a tensor is split over; None where it is not."""
    return tensor.device_mesh if is_sharded(tensor) else None


def own_class(model: Any) -> type:
    """A model's class, without the one that `fully_shard` puts in front of it."""
    module = sys.modules.get("torch.distributed.fsdp")
    return next(
        kind
        for kind in type(model).__mro__
        if module is None or not issubclass(kind, module.FSDPModule)
    )


def local(tensor: Any) -> Tensor:
    """The part that lies here, sharing the tensor's memory: writes are seen by the next forward pass."""
    if is_sharded(tensor):
        with torch.no_grad():  # the very part, not a differentiable view of it
            tensor = tensor.to_local()
    assert isinstance(tensor, Tensor)
    return tensor


def address(tensor: Tensor) -> int:
    """Where the part that lies here begins in memory; the first process has one of every tensor."""
    return local(tensor).data_ptr()


def own_part(name: str, tensor: Tensor) -> Part:
    """The part that lies here, and where it begins.

    Args:
      name: used in the message.
      tensor: any.

    Returns:
      See `Part`.

    Raises:
      ValueError: it is split otherwise than by rows over one row of processes (tensor parallelism,
        hybrid sharding).
    """
    if not is_sharded(tensor):
        return Part(tensor, 0)
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    split: Any = tensor
    if tuple(split.placements) != (Shard(0),):
        raise ValueError(
            f"{name} is placed as {tuple(split.placements)}: only blocks of rows over all processes "
            "(Shard(0), what fsdp_version: 2 makes) can be perturbed in place; switch tensor, context "
            "and hybrid parallelism off."
        )
    shape, offset = compute_local_shape_and_global_offset(
        split.shape, split.device_mesh, split.placements
    )
    part = local(tensor)
    assert tuple(part.shape) == tuple(shape) or not part.numel(), (
        "another block than its place says"
    )
    return Part(part, offset[0] * math.prod(split.shape[1:]) if part.numel() else 0)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Every process of its mesh must ask, in the same order.

    Args:
      tensor: any; one that is not split comes back as it is.
    """
    if not is_sharded(tensor):
        return tensor
    lender = _lender
    if lender is not None:
        lender(tensor)
    split: Any = tensor.detach()
    kind = split.device_mesh.device_type
    if split.device.type != kind:  # parts that are kept on the CPU
        split = split.to(kind)
    gathered: Tensor = split.full_tensor()
    return gathered


_lender: Callable[[Tensor], None] | None = None


def on_first(tensors: Sequence[Tensor], work: Callable[[], None]) -> None:
    """Calls `work` on the first process only, where `whole` may ask for any of `tensors`, in any order.

    The others lend their parts meanwhile. Without split tensors, the others do nothing.

    Args:
      tensors: the same on every process.
      work: must not communicate otherwise.
    """
    split: list[Any] = [tensor for tensor in tensors if is_sharded(tensor)]
    if not split:
        if _rank() == 0:
            work()
        return
    mesh, numbers = split[0].device_mesh, {address(t): n for n, t in enumerate(split)}
    if mesh.get_rank() == 0:
        _lend(mesh, numbers, work)
        return
    while (number := _told(mesh, 0)) >= 0:
        whole(split[number])


def _lend(mesh: Any, numbers: dict[int, int], work: Callable[[], None]) -> None:
    global _lender
    _lender = lambda tensor: void(_told(mesh, numbers[address(tensor)]))  # noqa: E731
    try:
        work()
    finally:
        _lender = None
        _told(mesh, -1)


def void(_: Any) -> None:
    """Drops a value."""


def _told(mesh: Any, number: int) -> int:
    """The first process' number, on all."""
    import torch.distributed as dist

    box = torch.tensor([number], device=mesh.device_type)
    dist.broadcast(box, 0)
    return int(box)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def largest_over(tensor: Tensor) -> Callable[[float], float]:
    """A function: a number of each process that holds a part of `tensor` -> the largest of them.

    NaN counts as infinity, so that every process refuses it alike. Identity where it is not split.
    """
    mesh = mesh_of(tensor)
    return float if mesh is None else functools.partial(_largest, mesh)


def _largest(mesh: Any, value: float) -> float:
    import torch.distributed as dist

    value = math.inf if math.isnan(value) else float(value)
    box = torch.tensor([value], dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=mesh.get_group())
    return float(box)


class ShardedStream(DirectionStream):
    """A direction's coordinates, whose squared norm each process adds its own part to.

    Args:
      direction, distribution, layout, sum_of_squares: as in `DirectionStream`.
      parts: (first index, number) of the coordinates that this process makes, all processes' together
        being those of the layout.
      mesh: of the processes.
      known: squared norms so far, in units of 2^-42; added to. A process may then use a direction again
        by itself.
    """

    def __init__(
        self,
        direction: Direction,
        distribution: str,
        layout: list[tuple[int, int]],
        sum_of_squares: Any,
        parts: list[tuple[int, int]],
        mesh: Any,
        known: dict[Direction, int],
    ) -> None:
        super().__init__(direction, distribution, layout, sum_of_squares)
        self._parts, self._mesh, self._known = parts, mesh, known
        if distribution == "sphere":
            _ = self.scale  # now, where every process is

    def squared_norm(self) -> float:
        """||z||^2, exact as in `DirectionStream`; communicates if it is not known yet."""
        if self.distribution == "rademacher":
            return super().squared_norm()
        if self.direction not in self._known:
            own = sum(self._sum_of_squares(self.key, *part) for part in self._parts)
            if len(self._known) >= _KNOWN:
                del self._known[next(iter(self._known))]
            self._known[self.direction] = _added_up(self._mesh, own)
        return self._known[self.direction] * NORMAL_UNIT**2


_KNOWN = 1 << 14


def _added_up(mesh: Any, value: int) -> int:
    """The exact sum of a non-negative integer below 2^93 over processes."""
    import torch.distributed as dist

    box = torch.tensor([value % _HALF, value // _HALF], device=mesh.device_type)
    dist.all_reduce(box, group=mesh.get_group())
    low, high = box.tolist()
    return int(low) + int(high) * _HALF
