"""What every process must have alike, compared before a run writes anything and while it trains.

Processes that differ would not evaluate the model, the rows or the plan that epsilon is stated for, and
their weights would drift apart in silence: only sums are exchanged. At the start digests of code,
settings, data length, weights, machine and the losses of a few rows are gathered; at the first step,
every `EVERY` steps and at the end a checksum, 8 bytes, of the bits that all hold alike: trained weights,
unless they lie in parts, and what updates and files are made of beside them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.random_state import drawing_from, isolated_randomness
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.objectives.losses import evaluation_mode, num_examples
from hf_dpzero.parallel.distributed import (
    active,
    control_group,
    differing,
    gather_numbers,
    gather_objects,
    shared,
)
from hf_dpzero.parallel.rank_failures import RankError
from hf_dpzero.perturbation.sharding import is_sharded, local

T = TypeVar("T")

EVERY = 100
"""Steps between two comparisons of the weights. A comparison reads them once, a step at least six times
(perturbed twice, evaluated twice, restored, updated), so it costs less than a part in 500 of a run."""

_CODE = ("collate_each", "collate_stacked")
LOOKED_AT = 16
"""Rows whose losses are compared, drawn at random: evenly spread ones may all be of one length."""

_STATED = {
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
    "process the same performance.perturbation_strategy and eval_dataset, on machines of one kind",
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


def check_agreement(trainer: Any, header: Mapping[str, Any]) -> None:
    """Refuses ranks that do not run the same thing. Called before a ledger is opened or anything moved.

    Args:
      trainer: a `DPZeroTrainer` after the checks before training.
      header: its `ledger_header`.

    Raises:
      RankError: on all ranks; names the ranks, what differs, and what to do.
    """
    if not active():
        return
    shapes, split = trainer.shapes, trainer.split
    fixed = (
        None
        if shapes is None
        else [getattr(shapes, field.name) for field in fields(shapes) if field.name not in _CODE]
    )
    own = {f"setting {key}": _digest(value) for key, value in header.items() if key not in _STATED}
    own |= {key: _digest(header[key]) for key in ("versions", "trainable", "plan")}
    own |= {
        "source": source_digest(),
        "rows": str(len(trainer.train_dataset)),
        "shapes": repr((fixed, split.rows, split.directions, trainer.args.physical_batch_size)),
        "device": _machine(trainer.args.device),
        "weights": digest_model(trainer.model),
    }
    compare(own)
    check_losses(trainer)


def compare(own: Mapping[str, str]) -> None:
    """Compares what ranks say of themselves.

    Args:
      own: of this rank: key of `_STATED`, or "setting NAME" -> a short text or a digest.

    Raises:
      RankError: on all ranks.
    """
    told = gather_objects(dict(own))
    keys = dict.fromkeys(key for one in told for key in one)
    found = [
        f"{differing(values)} in the {_STATED.get(key) or f'{key}: give the same'}"
        for key in keys
        if len(set(values := [one.get(key, "") for one in told])) > 1
    ]
    if found:
        raise RankError(
            "the processes do not agree, and nothing was written: " + "; ".join(found) + "."
        )


@torch.no_grad()
def check_losses(trainer: Any) -> None:
    """Refuses ranks that compute other losses for the same rows, in the run's own shapes.

    Which rank evaluates a row follows from the other rows of its batch. Nothing is compared where a
    collator draws from a random generator of its own: then rows are drawn anew each time, everywhere.

    Args:
      trainer: a `DPZeroTrainer` whose shapes are chosen. Runs without fixed shapes, and under FSDP
        (`sharded_runs.agreed`), pass.

    Raises:
      RankError: on all ranks; before anything is written.
    """
    if not active() or trainer.shapes is None or trainer.shards:
        return
    count, entropy = len(trainer.train_dataset), shared(secrets.randbits(100))
    rows = random.Random(entropy).sample(range(count), min(count, LOOKED_AT))
    objective = trainer.evaluated_objective()
    with drawing_from(entropy):
        parts = trainer.shapes.microbatches(rows)
        again = trainer.shapes.microbatches(rows)
    digest = hashlib.sha256(_bytes(parts))
    with evaluation_mode(trainer.model):
        for part in parts:
            with isolated_randomness(entropy):
                losses = objective.trial(trainer.model, part)[: num_examples(part)]
            digest.update(losses.detach().float().cpu().numpy().tobytes())
    if not any(gather_numbers(int(_bytes(again) != _bytes(parts)))):
        compare({"losses": digest.hexdigest()})


def _bytes(parts: Iterable[Mapping[str, Tensor]]) -> bytes:
    return repr([(k, v.tolist()) for part in parts for k, v in sorted(part.items())]).encode()


def check_strategy(differences: Any) -> None:
    """Refuses ranks that perturb in other ways, whose losses differ in the last bits.

    Args:
      differences: the `FiniteDifferences` of a run, whose strategy is chosen.

    Raises:
      RankError: on all ranks.
    """
    if active():
        compare({"strategy": f"{differences.strategy}, {differences.prefix is not None}"})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _machine(device: torch.device) -> str:
    """What the bits of a forward pass follow from, beside the model: processor and threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    threads = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith("model name")), "") + threads


def watched_training(train: Callable[..., T]) -> Callable[..., T]:
    """Decorates `train` of a trainer: all ranks end with the same weights."""

    @functools.wraps(train)
    def wrapped(self: Any, *positional: Any, **settings: Any) -> T:
        if active():
            control_group(float(self.args.ddp_timeout))
        output = train(self, *positional, **settings)
        check_weights(self)
        return output

    return wrapped


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


def check_weights(trainer: Any, step: int | None = None) -> None:
    """Compares what all ranks hold alike: at the first step of a start, every `EVERY` and at the end.

    That is what is trained (of parameters in parts nothing, as every rank has others), the number of the
    step, the last releases, the grids that updates are rounded to, and the buffers that are saved. Other
    buffers may follow from the rows that a rank saw last (frequencies of long rotary positions).

    Args:
      trainer: a `DPZeroTrainer` that trains.
      step: to be taken; None at the end.

    Raises:
      RankError: on all ranks; before the step releases anything.
    """
    if not active():
        return
    first = getattr(trainer, "_compared_weights", None) is not trainer.trajectory
    if step is not None and step % EVERY and not first:
        return
    trainer._compared_weights = trainer.trajectory
    trainer.method.settle_()
    own = replicated(trainer, step)
    if len(set(gather_numbers(_number(list(own.values()))))) == 1:
        return
    when = "at the end" if step is None else f"before step {step}"
    told = {what: gather_numbers(number) for what, number in own.items()}
    found = [f"{differing(t)} in the {what} {when}" for what, t in told.items() if len(set(t)) > 1]
    raise RankError(
        f"{'; '.join(found)}: something wrote into them besides training (a callback on one rank?), or "
        "memory failed. What was released is in the ledger; resume from a checkpoint from before, or "
        "from the base."
    )


def replicated(trainer: Any, step: int | None) -> dict[str, int]:
    """Numbers of what is the same on every rank, by what they stand for; see `check_weights`.

    Args:
      trainer: settled.
      step: to be taken; None at the end.
    """
    trained = (p for p in trainer.model.parameters() if p.requires_grad and not is_sharded(p))
    recent = trainer.trajectory.releases[-EVERY:]  # those before them were compared
    released = [[r.step, r.learning_rate, *r.values] for r in recent]
    return {
        "trained weights": checksum(trained),
        "step's number": _number([step, trainer.state.global_step, trainer.trajectory.next_step]),
        "releases": checksum([torch.tensor(released, dtype=torch.float64)]),
        "grids of the trained weights": _number(trainer.method.state_dict()),
        "saved buffers": checksum(_saved_buffers(trainer.model)),
    }


def _saved_buffers(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        unsaved = module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False):
            if name not in unsaved and buffer.device.type != "meta":
                yield local(buffer)


def _number(value: Any) -> int:
    """A signed 64-bit integer of a JSON-safe value."""
    return int.from_bytes(bytes.fromhex(_digest(value))[:8], "little", signed=True)
