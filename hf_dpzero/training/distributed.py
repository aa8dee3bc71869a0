"""The few collective operations a step needs; without torch.distributed they are identities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
N = TypeVar("N", int, float)


def active() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _device() -> torch.device:
    gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def sum_over_processes(values: Sequence[N]) -> list[N]:
    """Element-wise sums over processes: exact for integers, whatever the order of reduction."""
    if not active():
        return list(values)
    exact = all(isinstance(value, int) for value in values)
    dtype = torch.int64 if exact else torch.float64
    total = torch.tensor(list(values), dtype=dtype, device=_device())
    dist.all_reduce(total)
    return total.tolist()


def sum_tensor_(tensor: torch.Tensor) -> None:
    """Replaces a float tensor by its sum over processes, the same on each; in place."""
    if active():
        dist.all_reduce(tensor)


def is_main() -> bool:
    """Whether this is the process that draws noise and writes files."""
    return not active() or dist.get_rank() == 0


def shared(value: T) -> T:
    """The main process' value, on every process."""
    if not active():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=_device())
    return box[0]


def shared_from_main(make: Callable[[], T]) -> T:
    """Calls `make` on the main process only and shares the result: noise is drawn once."""
    value = make() if is_main() else None
    return shared(value)  # type: ignore[return-value]


def on_main(main: Callable[[], T], others: Callable[[], T]) -> T:
    """main() on the main process, then others() on the rest; an error of main's reaches all."""
    if not active():
        return main()
    result, failure = None, None
    if dist.get_rank() == 0:
        try:
            result = main()
        except Exception as error:
            failure = error
    failure = shared(failure)
    if failure is not None:
        raise failure
    return result if dist.get_rank() == 0 else others()  # type: ignore[return-value]
