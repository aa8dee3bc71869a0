"""Comparisons of processes: digests of what each is, and a checksum of the bits that all hold alike.

`checks.processes` says what is compared, and when.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_dpzero.parallel.distributed import (
    differing,
    gather_objects,
)
from hf_dpzero.parallel.rank_failures import RankError

T = TypeVar("T")

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


@functools.cache
def source_digest() -> str:
    """SHA-256 (hex) of the package's Python files and their names, 2 MB: what a version alone hides."""
    package, digest = Path(__file__).resolve().parent.parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def compare(own: Mapping[str, str]) -> None:
    """Compares what ranks say of themselves.

    Args:
      own: of this rank: key of `STATED`, or "setting NAME" -> a short text or a digest.

    Raises:
      RankError: on all ranks.
    """
    told = gather_objects(dict(own))
    keys = dict.fromkeys(key for one in told for key in one)
    found = [
        f"{differing(values)} in the {STATED.get(key) or f'{key}: give the same'}"
        for key in keys
        if len(set(values := [one.get(key, "") for one in told])) > 1
    ]
    if found:
        raise RankError(
            "the processes do not agree, and nothing was written: " + "; ".join(found) + "."
        )


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def machine(device: torch.device) -> str:
    """What the bits of a forward pass follow from, beside the model: processor and threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    threads = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith("model name")), "") + threads


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> int:
    """A checksum of tensors' bits, in order: any changed bit changes it, two seldom cancel.

    Sums of their 64-bit words modulo 2^64 (the last bytes apart), folded together by hashing. One pass
    over the memory, on the tensors' device, without a copy.

    Returns:
      A signed 64-bit integer.
    """
    sums = [_words(tensor) for tensor in tensors]
    digest = hashlib.blake2b(digest_size=8)
    for total in torch.stack([s.cpu() for s in sums]).tolist() if sums else []:
        digest.update(total.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little", signed=True)


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    each = max(1, 8 // flat.element_size())
    if flat.storage_offset() % each:  # words must be aligned; no parameter of a model begins so
        flat = flat.clone()
    whole = flat.numel() // each * each
    rest = flat[whole:].view(torch.uint8).to(torch.int64)
    last = (rest * torch.arange(1, len(rest) + 1, device=rest.device)).sum()
    return flat[:whole].view(torch.int64).sum() + last


def number_of(value: Any) -> int:
    """A signed 64-bit integer of a JSON-safe value."""
    return int.from_bytes(bytes.fromhex(digest_of(value))[:8], "little", signed=True)
