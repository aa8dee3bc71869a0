"""Tensors that FSDP2 has split over processes (DTensors): the part that lies here, small agreements.

`torch.distributed.fsdp.fully_shard` cuts every parameter into blocks of rows, one a process; a small
tensor may leave some processes with nothing. A process perturbs and updates its own part, for which it
needs to know where the part begins in the whole tensor: coordinates of directions are random-access, so
it makes those of its part only. What crosses the wire are a few bytes: the largest magnitude of a
tensor, which its grid follows from, and a direction's norm on the sphere.

Plain tensors pass through every function here as they are.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from hf_dpzero.perturbation.directions import NORMAL_UNIT, Direction, DirectionStream, SumOfSquares

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_HALF = 1 << 31  # of an exact sum that travels as two int64
_KNOWN = 1 << 14  # squared norms that are kept


class Part(NamedTuple):
    """What lies on this process of a tensor.

    Attributes:
      tensor: plain, contiguous, maybe empty; the tensor itself where it is not split.
      first: index of its first element in the whole tensor.
    """

    tensor: Tensor
    first: int


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is split over processes."""
    # Imports nothing: where nobody has imported DTensors there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Returns the processes that a tensor is split over; None where it is not."""
    return tensor.device_mesh if is_sharded(tensor) else None


def own_class(model: nn.Module) -> type[nn.Module]:
    """Returns a model's class, without the one that `fully_shard` puts in front of it."""
    module = sys.modules.get("torch.distributed.fsdp")
    return next(
        kind
        for kind in type(model).__mro__
        if module is None or not issubclass(kind, module.FSDPModule)
    )


def local(tensor: Tensor) -> Tensor:
    """Returns the part that lies here, in the tensor's memory: the next forward pass sees writes."""
    if is_sharded(tensor):
        with torch.no_grad():  # the very part, not a differentiable view of it
            return tensor.to_local()
    return tensor


def address(tensor: Tensor) -> int:
    """Returns where the part that lies here begins; the first process has one of every tensor."""
    return local(tensor).data_ptr()


def own_part(name: str, tensor: Tensor) -> Part:
    """Returns the part of a tensor that lies here, and where it begins.

    Raises:
      ValueError: it is split otherwise than by rows over one row of processes (tensor parallelism,
        hybrid sharding).
    """
    if not is_sharded(tensor):
        return Part(tensor, 0)
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if tuple(tensor.placements) != (Shard(0),):
        raise ValueError(
            f"{name} is placed as {tuple(tensor.placements)}: only blocks of rows over all processes "
            "(Shard(0), what fsdp_version: 2 makes) can be perturbed in place; switch tensor, context "
            "and hybrid parallelism off."
        )
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    part = local(tensor)
    assert tuple(part.shape) == tuple(shape) or not part.numel(), (
        "another block than its place says"
    )
    return Part(part, offset[0] * math.prod(tensor.shape[1:]) if part.numel() else 0)


_lender: Callable[[Tensor], None] | None = None  # on the first process, inside `on_first`


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Returns all of a tensor. Every process of its mesh must ask, in the same order."""
    if not is_sharded(tensor):
        return tensor
    if _lender is not None:
        _lender(tensor)
    split, kind = tensor.detach(), tensor.device_mesh.device_type
    if split.device.type != kind:  # parts that are kept on the CPU
        split = split.to(kind)
    return cast("DTensor", split).full_tensor()


def on_first(tensors: Sequence[Tensor], work: Callable[[], None]) -> None:
    """Calls `work` on the first process only, where `whole` may ask for any of `tensors`, in any order.

    The others lend their parts meanwhile. Without split tensors, the others do nothing.

    Args:
      tensors: the same on every process.
      work: must not communicate otherwise.
    """
    global _lender
    import torch.distributed as dist

    split = [tensor for tensor in tensors if is_sharded(tensor)]
    if not split:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            work()
        return
    mesh, numbers = split[0].device_mesh, {address(t): n for n, t in enumerate(split)}

    def of_first(number: int) -> int:
        box = torch.tensor([number], device=mesh.device_type)
        dist.broadcast(box, 0)
        return int(box)

    def lend(tensor: Tensor) -> None:
        of_first(numbers[address(tensor)])

    if mesh.get_rank() == 0:
        _lender = lend
        try:
            work()
        finally:
            _lender = None
            of_first(-1)
    else:
        while (number := of_first(0)) >= 0:
            whole(split[number])


def largest_over(tensor: Tensor) -> Callable[[float], float]:
    """Returns a function: a number of each process that holds a part of `tensor` -> the largest.

    NaN counts as infinity, so that every process refuses it alike. Identity where it is not split.
    """
    mesh = mesh_of(tensor)
    return float if mesh is None else functools.partial(_largest, mesh)


def _largest(mesh: DeviceMesh, value: float) -> float:
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
        sum_of_squares: SumOfSquares,
        parts: list[tuple[int, int]],
        mesh: DeviceMesh,
        known: dict[Direction, int],
    ) -> None:
        super().__init__(direction, distribution, layout, sum_of_squares)
        self._parts, self._mesh, self._known = parts, mesh, known
        if distribution == "sphere":
            _ = self.scale  # now, where every process is

    def squared_norm(self) -> float:
        """Returns ||z||^2, exact as in `DirectionStream`; communicates if it is not known yet."""
        import torch.distributed as dist

        if self.distribution == "rademacher":
            return super().squared_norm()
        if self.direction not in self._known:
            own = self._sum_of_squares(self.key, self._parts)
            # The exact sum of integers below 2^93 travels as two int64.
            box = torch.tensor([own % _HALF, own // _HALF], device=self._mesh.device_type)
            dist.all_reduce(box, group=self._mesh.get_group())
            low, high = box.tolist()
            if len(self._known) >= _KNOWN:
                del self._known[next(iter(self._known))]
            self._known[self.direction] = int(low) + int(high) * _HALF
        return self._known[self.direction] * NORMAL_UNIT**2
