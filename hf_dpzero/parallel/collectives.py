"""Collective operations of a run (identities in one process), and comparisons of its processes.

What a step sends goes through here, as tensors of a fixed size, and is counted (`sent_bytes`). Values
that are Python objects are pickled; only starts, resumes and checkpoints send such.

Tensors on the CPU go by gloo, also where GPUs train by NCCL: a step's integers and noised values are
on the CPU in any case. gloo fails at once where a peer's process has ended, and after `ddp_timeout`
where one hangs, but names nobody. torchrun (and so `accelerate launch`) prints which rank ended first
and how, and ends the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from transformers.utils import logging

from hf_dpzero.ledger.trajectory import Release, Trajectory

if TYPE_CHECKING:
    from hf_dpzero.settings.config import DPZeroConfig

logger = logging.get_logger(__name__)


class RankError(Exception):
    """Another process failed, or differs from this one. No subclass of RuntimeError: nothing retries."""


def active() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """Turns the failure of a collective operation inside into a `RankError` with advice.

    Raises:
      RankError: another process ended, or did not come in time.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"rank {dist.get_rank()} stops, because an exchange with the other processes failed: one of "
            "them ended, or did not come within ddp_timeout. The launcher's last lines name the rank "
            "that ended first and how (exit code -9: killed, or out of memory), and its own output says "
            "more. What was released is in the ledger: start again with resume_from_checkpoint=True, "
            "with as many processes as you like."
        ) from error


T = TypeVar("T")
N = TypeVar("N", int, float)


class _Stop:
    """Whether SIGTERM asked this process to stop, and whether a step told that it asked one of them."""

    asked = heard = False


stop = _Stop()
_sent = 0
_control: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
"""The default group; the group of the CPU's tensors."""


def sent_bytes() -> int:
    """Bytes that this process has given to collective operations so far, whatever they make of them.

    Of an all-reduce, an all-gather and a broadcast the tensor that this rank puts in (of a broadcast the
    same on the ranks that receive it). Pickled objects of starts and checkpoints are not counted.
    """
    return _sent


def control_group(seconds: float = 1800.0) -> dist.ProcessGroup | None:
    """The gloo group of all processes, for tensors on the CPU; None in one.

    Args:
      seconds: that its operations may take; read in the first call, which must be on all processes. The
        default is Hugging Face's.
    """
    global _control
    if not active():
        return None
    world = dist.group.WORLD
    # A process may leave its default group and join another one, whose members are others.
    if _control[0] is not world:
        own, limit = "cpu:gloo" in str(dist.get_backend_config()), timedelta(seconds=seconds)
        _control = world, world if own else dist.new_group(backend="gloo", timeout=limit)
    return _control[1]


def _run(operation: Callable[..., Any], tensor: torch.Tensor, *given: Any, **settings: Any) -> None:
    """A collective operation on a tensor, counted."""
    global _sent
    _sent += tensor.nbytes
    settings.setdefault("group", control_group() if tensor.device.type == "cpu" else None)
    with exchanging():
        operation(*given, tensor, **settings)


def sum_over_processes(values: Sequence[N]) -> list[N]:
    """Element-wise sums over processes: exact for integers, whatever the order of reduction."""
    if not active():
        return list(values)
    exact = all(isinstance(value, int) for value in values)
    total = torch.tensor(list(values), dtype=torch.int64 if exact else torch.float64)
    _run(dist.all_reduce, total)
    return total.tolist()


def stop_agreed(ask: bool = False) -> bool:
    """Whether the run stops here, the same on all processes: SIGTERM has come to one of them.

    Args:
      ask: by a message of 8 bytes. Else what the last step's sums told counts.
    """
    if not active():
        return stop.asked
    stop.heard = stop.heard or (ask and any(gather_numbers(int(stop.asked))))
    return stop.heard


AGREED_BITS = 22
_ASKED = 40  # in the same integer, the bit above sums of that number; counts who is asked to stop


def sum_checked(values: Sequence[N], digest: int, what: str) -> list[N]:
    """Element-wise sums over processes, after the processes have shown that they agree on something.

    In the same message go a and a^2 of a 22-bit number a. With n processes n sum a^2 = (sum a)^2 only
    where all a are equal (Cauchy and Schwarz), so every process sees whether they are, before anything
    is made of the sums. Beside a goes whether this process was asked to stop (`stop_agreed`).

    Args:
      values: integers, or floats.
      digest: the same on all processes; its lowest 22 bits are compared.
      what: it stands for, for the error.

    Raises:
      RankError: they do not agree; names the ranks that differ from most.
    """
    if not active():
        return list(values)
    own, world = digest % (1 << AGREED_BITS), dist.get_world_size()
    sent: list[Any] = [*values, own + (stop.asked << _ASKED), own * own]
    if any(isinstance(value, float) for value in values):
        sent = list(map(float, sent))  # exact, also summed, for fewer than 2^9 processes
    *total, first, second = sum_over_processes(sent)
    asked, first = divmod(int(first), 1 << _ASKED)
    stop.heard = stop.heard or asked > 0
    if world * second != first * first:
        raise RankError(f"{differing(gather_numbers(own))} {what}")
    return total


def differing(told: Sequence[object]) -> str:
    """Words for the ranks whose value is not the most frequent one (of two such rank 0's)."""
    most = max(told, key=list(told).count)
    others = [str(rank) for rank, value in enumerate(told) if value != most]
    who = f"rank {others[0]} differs" if len(others) == 1 else f"ranks {', '.join(others)} differ"
    return f"{who} from rank {list(told).index(most)}"


def gather_numbers(value: int) -> list[int]:
    """An integer of each process, by rank."""
    if not active():
        return [value]
    own = torch.tensor([value], dtype=torch.int64)
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    _run(dist.all_gather, own, told)
    return [int(one) for one in told]


def gather_blocks(block: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Tensors on the CPU of one shape, of every process of a group, in the order of its ranks."""
    told = [torch.empty_like(block) for _ in range(dist.get_world_size(group))]
    _run(dist.all_gather, block.contiguous(), told, group=group)
    return told


def sum_tensor_(tensor: torch.Tensor) -> None:
    """Replaces a float tensor by its sum over processes, the same on each; in place."""
    if active():
        _run(dist.all_reduce, tensor)


def broadcast_(tensor: torch.Tensor) -> None:
    """Replaces a tensor by rank 0's, in place."""
    if active():
        _run(dist.broadcast, tensor, src=0)


def is_main() -> bool:
    """True on rank 0, which draws noise and writes files."""
    return not active() or dist.get_rank() == 0


def numbers_of_main(make: Callable[[], Sequence[float]], count: int) -> tuple[float, ...]:
    """Calls `make` on rank 0 only and shares its floats, exactly: noise is drawn once."""
    if not active():
        return tuple(make())
    made = list(make()) if is_main() else [0.0] * count
    assert len(made) == count, f"{len(made)} values made, {count} expected"
    values = torch.tensor(made, dtype=torch.float64)  # exact for the float32 values of a ledger
    if count:  # gloo refuses a tensor without elements
        broadcast_(values)
    return tuple(values.tolist())


def release_on_all_ranks(
    trajectory: Trajectory,
    step: int,
    learning_rate: float,
    values: Callable[[], tuple[float, ...]],
    wait: bool = True,
) -> Release:
    """Appends a step's release to the ledger, on rank 0 before any other rank knows of it.

    So no process holds a release that is not paid for, wherever rank 0 is killed or its disk is full.

    Args:
      trajectory: on disk on rank 0, in memory on the others.
      step: its number.
      learning_rate: written beside the values.
      values: draws noise; called on rank 0 only.
      wait: False lets a process that is alone return before the record is synced.

    Returns:
      The release, the same on all ranks.

    Raises:
      LedgerWriteError: on rank 0, where it could not be written; the others hear nothing of it.
    """

    def written() -> tuple[float, ...]:
        drawn = values()
        trajectory.append(Release(step, drawn, learning_rate), wait=wait or active())
        return drawn

    told = numbers_of_main(written, trajectory.num_values)
    if not is_main():
        trajectory.append(Release(step, told, learning_rate))
    return trajectory.appended[step]


def shared(value: T) -> T:
    """Rank 0's value, on every process; pickled."""
    if not active():
        return value
    box = [value]
    with exchanging():
        dist.broadcast_object_list(box, src=0, group=control_group())
    return box[0]


def gather_objects(value: T) -> list[T]:
    """A value of each process, by rank; pickled."""
    if not active():
        return [value]
    told = [value] * dist.get_world_size()
    with exchanging():
        dist.all_gather_object(told, value, group=control_group())
    return told


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
    result, failure = [], None
    if dist.get_rank() == 0:
        try:
            result.append(main())
        except Exception as error:
            failure = error
    failure = shared(failure)  # else the others would wait for ever
    if failure is not None:
        raise failure
    return result[0] if result else others()


def wait() -> None:
    """Returns once every process has come here."""
    if active():
        with exchanging():
            dist.barrier(group=control_group())


STATED = {
    "source": "hf_dpzero's source files (another version, or edited?): install the same package",
    "versions": "installed versions of packages: install the same",
    "trainable": "names of the trainable parameters: build the same model, with the same `trainable`",
    "plan": "privacy plan: give the same settings",
    "rows": "number of rows of train_dataset: load the same data",
    "shapes": "shapes of forward passes, which rows of evaluation or the hardware decided: run on "
    "machines of one kind, or set microbatch_size=1",
    "device": "kind of processor or number of threads, and with it the last bits of an example's loss: "
    "run on machines of one kind, with the same OMP_NUM_THREADS",
    "weights": "weights of the model at the start: load the same checkpoint, and seed fresh heads and "
    "adapters alike",
    "losses": "losses of the same rows of train_dataset, bit for bit: what an example adds would follow "
    "from which process evaluates it, and so from the other examples. Give every process the same "
    "collator and compute_per_example_loss, on machines of one kind",
    "strategy": "way to perturb the model, which rows of evaluation or the hardware decided: give every "
    "process the same perturbation_strategy and eval_dataset, on machines of one kind",
    "releases": "releases that the ledger in output_dir holds: resume from one folder that all can read",
}


def compare(own: Mapping[str, str]) -> None:
    """Compares what ranks say of themselves.

    Args:
      own: of this rank: key of `STATED`, or "setting NAME" -> a short text or a digest.

    Raises:
      RankError: on all ranks.
    """
    told = gather_objects(dict(own))
    found = [
        f"{differing(values)} in the {STATED.get(key) or f'{key}: give the same'}"
        for key in dict.fromkeys(key for one in told for key in one)
        if len(set(values := [one.get(key, "") for one in told])) > 1
    ]
    if found:
        raise RankError(
            "the processes do not agree, and nothing was written: " + "; ".join(found) + "."
        )


def check_world(args: DPZeroConfig) -> None:
    """Refuses processes that each take the whole batch.

    Each would evaluate the whole batch, and the sum over all would count every row once a process: the
    noise is for once. Accelerate leaves them so on a CPU without `use_cpu` and `ddp_backend`.

    Raises:
      ValueError: says what to set.
    """
    if active() and args.world_size != dist.get_world_size():
        raise ValueError(
            f"{dist.get_world_size()} processes were started, and the arguments know of "
            f"{args.world_size}: each would take the whole batch, and a row would count once for each. "
            "On a CPU set use_cpu=True and ddp_backend='gloo'; elsewhere make DPZeroConfig before "
            "anything starts torch.distributed."
        )
    # `accelerate launch` names a port for several processes also where it then starts one.
    launched = os.environ.keys() >= {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"}
    if launched and not active() and "WORLD_SIZE" not in os.environ:
        logger.warning_once(
            "accelerate launch was asked for several processes and started this one alone: add "
            "--multi_gpu, or --config_file for CPUs (docs/how_to/two_gpus.md)."
        )


def check_one_device(args: DPZeroConfig, model: object = None) -> None:
    """Refuses nn.DataParallel, which one process with several GPUs would use.

    Raises:
      ValueError: says what to use instead.
    """
    devices = set((getattr(model, "hf_device_map", None) or {}).values()) - {"cpu", "disk"}
    if args.n_gpu > 1 and len(devices) < 2:
        raise ValueError(
            f"{args.n_gpu} GPUs in one process would use nn.DataParallel, which averages before "
            "clipping: start one process per GPU with `accelerate launch`, set CUDA_VISIBLE_DEVICES to "
            "one, or load a model that needs them all with device_map='auto'."
        )
