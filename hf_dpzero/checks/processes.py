"""What every process must have alike: rows, settings, weights, losses; before a run and while it trains.

Processes that differ would not evaluate the model, the rows or the plan that epsilon is stated for, and
their weights would drift apart in silence: only sums are exchanged.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.random_state import drawing_from, isolated_randomness
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.objectives.losses import evaluation_mode, num_examples
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.collectives import STATED, RankError, differing
from hf_dpzero.perturbation.sharding import is_sharded, local
from hf_dpzero.run import Dataset, Run
from hf_dpzero.run_folder.keys import digest_of_rows

EVERY = 100
"""Steps between two comparisons of the weights. A comparison reads them once, a step at least six times
(perturbed twice, evaluated twice, restored, updated), so it costs less than a part in 500 of a run."""

_CODE = ("collate_each", "collate_blocks")  # bound methods, whose repr has an address
COMPARED = 1000
"""Rows that are compared, spread evenly; of those that are drawn anew at each access the number is."""

LOOKED_AT = 16
"""Rows whose losses are compared, drawn at random: evenly spread ones may all be of one length."""


def check_same_rows(dataset: Dataset) -> None:
    """Refuses processes with other rows, or another order of them.

    Each takes its share of the drawn row numbers, so a row under two numbers would count twice.

    Raises:
      ValueError: on all processes; names the ranks.
    """
    if not collectives.active():
        return
    rows = range(0, len(dataset), max(1, -(-len(dataset) // COMPARED)))
    told = collectives.gather_objects((len(dataset), digest_of_rows(dataset, b"", rows)))
    if len(set(told)) > 1:
        raise ValueError(
            f"{differing(told)} in the rows, their number or order: every process must load the same "
            "rows in the same order, or a row could count once for each (an unseeded shuffle or "
            "train_test_split?). Seed it, or prepare the data in one process and save it."
        )


def check_agreement(run: Run, header: Mapping[str, object]) -> None:
    """Refuses ranks that do not run the same thing. Called before a ledger is opened or anything moved.

    Raises:
      RankError: on all ranks; names the ranks, what differs, and what to do.
    """
    if not collectives.active():
        return
    shapes, split = run.shapes, run.mesh
    compared = fields(shapes) if shapes is not None else ()
    fixed = [getattr(shapes, field.name) for field in compared if field.name not in _CODE]
    own = {f"setting {key}": digest_of(value) for key, value in header.items() if key not in STATED}
    own |= {key: digest_of(header[key]) for key in ("versions", "trainable", "plan")}
    own |= {
        "source": source_digest(),
        "rows": str(len(run.dataset)),
        "shapes": repr((fixed, split.rows, split.directions, run.args.physical_batch_size)),
        "device": machine(run.args.device),
        "weights": digest_model(run.model),
    }
    collectives.compare(own)
    check_losses(run)


@torch.no_grad()
def check_losses(run: Run) -> None:
    """Refuses ranks that compute other losses for the same rows, in the run's own shapes.

    Which rank evaluates a row follows from the other rows of its batch. Nothing is compared where a
    collator draws from a random generator of its own: then rows are drawn anew each time, everywhere.

    Args:
      run: a run whose shapes are chosen. Runs without fixed shapes, and under FSDP
        (`fsdp.assert_same_losses`), pass.

    Raises:
      RankError: on all ranks; before anything is written.
    """
    if not collectives.active() or run.shapes is None or run.sharded:
        return
    count, entropy = len(run.dataset), collectives.shared(secrets.randbits(100))
    # Of the first process' choice, so that all evaluate the same rows.
    rows = random.Random(entropy).sample(range(count), min(count, LOOKED_AT))
    with drawing_from(entropy):
        parts = run.shapes.microbatches(rows)
        # A collator with a generator of its own draws anew here, and then losses say nothing.
        again = run.shapes.microbatches(rows)
    digest = hashlib.sha256(_bytes(parts))
    with evaluation_mode(run.model):
        for part in parts:
            with isolated_randomness(entropy):
                losses = run.evaluate.comparison_loss(run.model, part)[: num_examples(part)]
            digest.update(losses.detach().float().cpu().numpy().tobytes())
    if not any(collectives.gather_numbers(int(_bytes(again) != _bytes(parts)))):
        collectives.compare({"losses": digest.hexdigest()})


def _bytes(parts: Iterable[Mapping[str, Tensor]]) -> bytes:
    return repr([(k, v.tolist()) for part in parts for k, v in sorted(part.items())]).encode()


def check_strategy(differences: FiniteDifferences) -> None:
    """Refuses ranks that perturb in other ways, whose losses differ in the last bits.

    Args:
      differences: the `FiniteDifferences` of a run, whose strategy is chosen.

    Raises:
      RankError: on all ranks.
    """
    if collectives.active():
        collectives.compare(
            {"strategy": f"{differences.strategy}, {differences.prefix is not None}"}
        )


def check_weights(run: Run, step: int | None = None) -> None:
    """Compares what all ranks hold alike: at the first step of a start, every `EVERY` and at the end.

    That is what is trained (of parameters in parts nothing, as every rank has others), the number of the
    step, the last releases, the grids that updates are rounded to, and the buffers that are saved. Other
    buffers may follow from the rows that a rank saw last (frequencies of long rotary positions).

    Args:
      run: a run that trains.
      step: to be taken; None at the end.

    Raises:
      RankError: on all ranks; before the step releases anything.
    """
    if not collectives.active():
        return
    if step is not None and step % EVERY and run.compared:
        return
    run.compared = True
    run.method.settle_()  # a deferred update is not in the weights yet
    own = replicated(run, step)
    if len(set(collectives.gather_numbers(number_of(list(own.values()))))) == 1:
        return
    when = "at the end" if step is None else f"before step {step}"
    told = {what: collectives.gather_numbers(number) for what, number in own.items()}
    found = [f"{differing(t)} in the {what} {when}" for what, t in told.items() if len(set(t)) > 1]
    raise RankError(
        f"{'; '.join(found)}: something wrote into them besides training (a callback on one rank?), or "
        "memory failed. What was released is in the ledger; resume from a checkpoint from before, or "
        "from the base."
    )


def replicated(run: Run, step: int | None) -> dict[str, int]:
    """Numbers of what is the same on every rank, by what they stand for; see `check_weights`.

    Args:
      run: settled.
      step: to be taken; None at the end.
    """
    trained = (p for p in run.model.parameters() if p.requires_grad and not is_sharded(p))
    recent = run.opened.releases[-EVERY:]  # those before them were compared the last time
    released = [[r.step, r.learning_rate, *r.values] for r in recent]
    return {
        "trained weights": checksum(trained),
        "step's number": number_of([step, run.opened.next_step]),
        "releases": checksum([torch.tensor(released, dtype=torch.float64)]),
        "grids of the trained weights": number_of(run.method.state_dict()),
        "saved buffers": checksum(_saved_buffers(run.model)),
    }


def _saved_buffers(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        unsaved = module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False):
            if name not in unsaved and buffer.device.type != "meta":
                yield local(buffer)


@functools.cache
def source_digest() -> str:
    """SHA-256 (hex) of the package's Python files and their names, 2 MB: what a version alone hides."""
    package, digest = Path(__file__).resolve().parent.parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def digest_of(value: object) -> str:
    """SHA-256 (hex) of a JSON-safe value."""
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


def number_of(value: object) -> int:
    """A signed 64-bit integer of a JSON-safe value."""
    return int.from_bytes(bytes.fromhex(digest_of(value))[:8], "little", signed=True)
