"""Collective operations of a step (identities in one process), and which launches are refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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


def broadcast_(tensor: torch.Tensor) -> None:
    """Replaces a tensor by rank 0's, in place."""
    if active():
        dist.broadcast(tensor, 0)


def is_main() -> bool:
    """True on rank 0, which draws noise and writes files."""
    return not active() or dist.get_rank() == 0


def shared(value: T) -> T:
    """Rank 0's value, on every process."""
    if not active():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=_device())
    return box[0]


def shared_from_main(make: Callable[[], T]) -> T:
    """Calls `make` on rank 0 only and shares the result: noise is drawn once."""
    value = make() if is_main() else None
    return shared(value)  # type: ignore[return-value]


def on_main(main: Callable[[], T], others: Callable[[], T]) -> T:
    """Calls `main` on rank 0, then `others` on the other ranks.

    Args:
      main: its error is raised on all ranks.
      others: not called if `main` failed.

    Returns:
      What this rank's function returned.
    """
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


def wait() -> None:
    """Returns once every process has come here."""
    if active():
        dist.barrier()


def check_launch(trainer: Any) -> None:
    """Refuses sharding that `accelerate launch` asks for by environment variables, but for FSDP2.

    Raises:
      ValueError: the accelerator does anything but plain data parallelism and FSDP2.
    """
    kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
    if kind == "FSDP":
        check_version(int(trainer.accelerator.state.fsdp_plugin.fsdp_version))
    elif kind in ("DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        raise ValueError(
            f"distributed_type={kind} shards or copies parameters in ways that the in-place "
            "perturbation does not follow: use MULTI_GPU, MULTI_CPU or one process, or fsdp_version: 2 "
            f"({FSDP2}) for a model that does not fit on one device."
        )


FSDP2 = "configs/accelerate/fsdp2.yaml"


def check_version(version: int) -> None:
    """Refuses FSDP1, which moves parameters into flat buffers of its own.

    Raises:
      ValueError: says how to use FSDP2.
    """
    if version != 2:
        raise ValueError(
            f"fsdp_version={version} keeps parameters as parts of flat buffers, which the in-place "
            f"perturbation does not follow: set fsdp_version: 2, as in {FSDP2} (with TrainingArguments "
            'fsdp_config={"version": 2}).'
        )


def check_processes(args: Any) -> None:
    """Refuses methods that work in one process only.

    Raises:
      ValueError: dpgd-0th or averaged clipping on several processes.
    """
    if args.world_size == 1:
        return
    if args.method == "dpgd-0th":
        raise ValueError(
            f"dpgd-0th on {args.world_size} processes: its d-dimensional noise is drawn in one "
            "process only; run it in one, or use method='dpzero'."
        )
    if args.clipping == "averaged":
        raise ValueError(
            f"clipping='averaged' on {args.world_size} processes: a group's mean is clipped in one "
            "process only; run it in one, or use clipping='fixed'."
        )


def check_same_rows(dataset: Any) -> None:
    """Refuses processes that hold other rows, or the same in another order.

    Each takes its share of the drawn row numbers, so a row under two numbers would count twice.

    Args:
      dataset: of this process; rows by number.

    Raises:
      ValueError: on all processes.
    """
    if not active():
        return
    told = len(dataset), getattr(dataset, "_fingerprint", None)
    if told[1] is not None and _all_equal(told):
        return
    from datasets.fingerprint import Hasher

    digest = hashlib.sha256()
    for row in range(len(dataset)):
        digest.update(Hasher.hash(dataset[row]).encode())
    if not _all_equal((len(dataset), digest.hexdigest())):
        raise ValueError(
            "the processes do not hold the same rows in the same order (an unseeded shuffle or "
            "train_test_split?), so a row could count once for each: seed it, or prepare the data in "
            "one process and save it."
        )


def _all_equal(value: Any) -> bool:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return all(other == value for other in told)


def check_single_strategy(args: Any) -> None:
    """Refuses sharding other than FSDP2, and nn.DataParallel, that the arguments ask for.

    Raises:
      ValueError: FSDP1, DeepSpeed or nn.DataParallel.
    """
    if args.deepspeed:
        raise ValueError(
            "DeepSpeed shards or copies parameters in ways that the in-place perturbation does not "
            "follow: run on one device or with plain data parallelism (accelerate launch); for a model "
            f"that does not fit on one, FSDP2 ({FSDP2})."
        )
    if args.fsdp:
        check_version(int((getattr(args, "fsdp_config", None) or {}).get("version", 2)))
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process would use nn.DataParallel, which averages before "
            "clipping: start one process per GPU with `accelerate launch`, or set "
            "CUDA_VISIBLE_DEVICES to one."
        )
