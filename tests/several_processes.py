"""Runs of a tiny model that are the same in one process and in several; also what starts the several."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tiny_runs import build, tiny_data, tiny_model
from transformers import TrainerCallback

from hf_dpzero.parallel.mesh import step_bytes
from hf_dpzero.training.step_meter import StepMeter


def texts(rows: int = 60) -> Dataset:
    """Rows of 3 to 16 tokens."""
    generator = torch.Generator().manual_seed(4)
    lengths = [3 + 7 * row % 14 for row in range(rows)]
    ids = [torch.randint(5, 50, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": [row[0] % 2 for row in ids]})


def padded(rows):
    """A collator: pads to the longest row."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[i, : len(row["input_ids"])] = 1
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def mean_of_rows(outputs, labels, num_items_in_batch=None):
    """A script's compute_loss_func, which is asked for one row at a time."""
    assert num_items_in_batch is None
    return torch.nn.functional.cross_entropy(outputs.logits, labels)


def half() -> torch.nn.Module:
    return tiny_model().to(torch.bfloat16)


_NAMES = ["few" if row % 5 == 0 else "many" for row in range(120)]
_GROUPS = {
    "data": tiny_data().add_column("where", _NAMES),
    "group_robust.column": "where",
    "group_robust.shares": {"few": 0.2, "many": 0.8},
    "microbatch_size": 1,
}
_FIXED = {**_GROUPS, "sampling": "fixed_batches"}
_TEXTS = {"data": texts(), "collator": padded, "microbatch_size": 4}
_OWN_LOSS = {**_TEXTS, "trainer_settings": {"compute_loss_func": mean_of_rows}}
_WHOLE = {"performance.perturbation_strategy": "whole_model"}
_DIRECTIONS = {"num_directions": 4, "performance.direction_parallel_size": 2, **_WHOLE}

SAME = {
    "one-row-passes": {"microbatch_size": 1, "num_directions": 2},
    "texts": {**_TEXTS, "num_directions": 3, **_WHOLE},
    # many shares and batches of these are empty
    "few-rows": {**_TEXTS, "expected_batch_size": 1, "microbatch_size": 1},
    "adaptive": {**_TEXTS, "clipping": "adaptive", "schedules.noise": "exp(gamma=0.5)"},
    "fixed-batches": {**_TEXTS, "sampling": "fixed_batches", "schedules.smoothing": "linear(0.5)"},
    "averaged": {**_TEXTS, "clipping": "averaged", "clipping_config.groups": 3},
    "dpgd": {**_TEXTS, "method": "dpgd-0th"},
    "own-loss": _OWN_LOSS,
    "directions-half": {
        **_TEXTS, **_DIRECTIONS, "model": half, "num_directions": 3,
        "performance.perturbation_strategy": "auto",
    },
    "groups-directions": {**_GROUPS, **_DIRECTIONS, "differences": "forward"},
    "groups-prefix": {**_FIXED, "group_robust.weights": "prefix_sum"},
    "groups-vertex": {**_FIXED, "group_robust.weights": "vertex", "group_robust.draws": 2},
}  # fmt: skip
"""Ledgers and weights have the same bits whatever the number of processes."""

CLOSE = {
    "dp-sgd-own-loss": {**_OWN_LOSS, "method": "dp-sgd", "clip": 0.5, "learning_rate": 0.1},
    "dp-sgd": {"microbatch_size": 4, "method": "dp-sgd", "clip": 0.5, "learning_rate": 0.1},
    "dp-sgd-averaged": {
        "method": "dp-sgd", "clipping": "averaged", "clipping_config.groups": 3, "clip": 0.5,
        "learning_rate": 0.1,
    },
}  # fmt: skip
"""The same up to the order of float64 additions."""

SECRET = {"secret": {"microbatch_size": 1, "testing.insecure_noise_seed": None}}
ALL = {**SAME, **CLOSE, **SECRET}
OF_FOUR = (
    "one-row-passes", "texts", "few-rows", "directions-half", "groups-directions", "dp-sgd", "secret",
)  # fmt: skip
"""What four processes train: a way to divide the rows or the directions each, two draws of noise."""
METERED = ("texts", "adaptive", "groups-directions", "dpgd", "dp-sgd")
"""Runs whose bytes are counted."""


def names_of(world: int) -> tuple[str, ...]:
    """The runs that so many processes train."""
    return OF_FOUR if world > 2 else tuple(ALL)


def trainer_of(folder: Path, name: str, **more):
    """The trainer of a run."""
    others = {"noise": NOISE, "interrupted": INTERRUPTED}
    known = ALL.get(name) or others.get(name, _TEXTS)
    settings = {"max_steps": 2, "eval_strategy": "no", **known, **more}
    model = settings.pop("model", tiny_model)()
    collator = settings.pop("collator", None)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        settings["ddp_backend"] = "gloo"
    else:
        settings.pop("performance.direction_parallel_size", None)
    trainer = build(folder / name, model, **settings)
    if collator is not None:
        trainer.data_collator = collator
    return trainer


def train(folder: Path, world: int) -> dict[str, Any]:
    """Leaves the flat weights of every run, one file a process; tells what was sent and what may be."""
    told: dict[str, Any] = {}
    for name in names_of(world):
        meter, trainer = StepMeter(), trainer_of(folder, name)
        trainer.add_callback(meter)
        trainer.train()
        if name in METERED and world > 1:
            count = sum(p.numel() for p in trainer.model.parameters())
            # the first step compares weights
            told[f"bytes {name}"] = (
                meter.sent[1],
                step_bytes(
                    trainer.plan, trainer.run.args, trainer.run.mesh, trainer.run.sharded, count
                ),
            )
        flat = torch.cat([p.detach().view(-1) for p in trainer.model.parameters()])
        torch.save(flat, folder / f"{name}.rank{trainer.args.process_index}")
    return told


NOISE = {
    "method": "dp-sgd", "microbatch_size": 4, "noise_multiplier": 1e4, "clip": 0.5,
    "learning_rate": 1e-3, "max_steps": 1, "testing.insecure_noise_seed": None,
    "lr_scheduler_type": "constant",
}  # fmt: skip
"""One step of dp-sgd on noise alone: gradients vanish beside it."""

STEPS, STOP = 6, 3
INTERRUPTED = {
    **_TEXTS,
    "num_directions": 2,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 2,
}


class Stop(TrainerCallback):
    """Stops a run after three steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == STOP


class Fail(TrainerCallback):
    """Raises, or kills its process, before a step."""

    def __init__(self, kills: bool) -> None:
        self.kills = kills

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("of this rank alone")


class Meddle(TrainerCallback):
    """Changes a weight as a fault of memory would: as if the step had left it so."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 2.0**-10
        self.trainer.method.weights.note()


class Widen(TrainerCallback):
    """Turns `own_shapes` on after the checks before training, and off again."""

    on = False

    def on_train_begin(self, args, state, control, **kwargs):
        Widen.on = True


def own_shapes(rows):
    """Gives every other row another shape on every other process, as a generator of its own might."""
    batch = padded(rows)
    if Widen.on and int(os.environ["RANK"]) % 2 and int(batch["input_ids"].sum()) % 2:
        more = 16 - batch["input_ids"].shape[1]
        pad = torch.nn.functional.pad
        wide = {k: pad(batch[k], (0, more), value=1) for k in ("input_ids", "attention_mask")}
        batch |= wide  # no masked column is left
    return batch


def interrupted(folder: Path) -> None:
    """A run that stops in the middle, with a checkpoint one step behind its ledger."""
    trainer = trainer_of(folder, "interrupted")
    trainer.add_callback(Stop())
    trainer.train()


def flat(trainer) -> torch.Tensor:
    return torch.cat([p.detach().float().view(-1) for p in trainer.model.parameters()])


def evaluated(folder: Path) -> list[float]:
    """The mean loss of 32 texts of several lengths, and their scores in the order of the data."""
    found = trainer_of(folder / "evaluated", "secret", collator=padded).predict(texts(32))
    return [float(found.metrics["test_loss"]), *found.predictions[:, 0].tolist()]


def checks(folder: Path, rank: int) -> dict[str, Any]:
    """What several processes are asked besides training; errors by what was wrong on the last rank."""
    told: dict[str, Any] = {}
    last = rank == int(os.environ["WORLD_SIZE"]) - 1

    def refused(what: str, trainer) -> None:
        try:
            trainer.train()
        except Exception as error:
            left = sorted(path.name for path in (folder / "refused").glob("*"))
            told[what] = f"{type(error).__name__}: {error}", left

    told["evaluated"] = evaluated(folder)
    noisy = trainer_of(folder, "noise")
    before = flat(noisy)
    noisy.train()
    told["noise"] = float((flat(noisy) - before).double().square().mean())
    for processes in (1, 2):
        if (folder / f"from{processes}").is_dir():
            resumed = trainer_of(folder / f"from{processes}", "interrupted")
            resumed.train(resume_from_checkpoint=True)
            told[f"resumed {processes}"] = flat(resumed).double().sum().item()
    interrupted(folder / "stopped")
    refused("weights", trainer_of(folder, "refused", model=lambda: tiny_model(int(last))))
    refused("rows", trainer_of(folder, "refused", data=texts(59 if last else 60)))
    refused("setting", trainer_of(folder, "refused", weight_decay=0.1 * last))
    refused("trainable", trainer_of(folder, "refused", trainable="query|key" if last else "query"))
    widened = trainer_of(folder, "refused", collator=own_shapes)
    widened.add_callback(Widen())
    refused("widths", widened)
    meddled = trainer_of(folder, "meddled")
    if last:
        meddled.add_callback(Meddle(meddled))
    refused("meddled", meddled)
    failing = trainer_of(folder, "failing")
    if last:
        failing.add_callback(Fail(kills=int(os.environ["WORLD_SIZE"]) > 2))
    began = time.monotonic()
    refused("failing", failing)
    told["seconds"] = time.monotonic() - began
    return told


def cheaper_runs() -> None:
    """Takes libraries out of garbage collections, which accelerate asks for."""
    gc.collect()
    gc.freeze()


def in_processes(world: int, work: Callable[[int], None]) -> None:
    """Forks `world - 1` times, before any thread, and calls `work(rank)` in all. Ends the several."""
    cheaper_runs()
    if world == 1:
        torch.set_num_threads(1)
        return work(0)
    os.environ["WORLD_SIZE"] = str(world)
    children, rank = [], 0
    for number in range(1, world):
        child = os.fork()
        if child == 0:
            rank, children = number, []
            break
        children.append(child)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    try:
        torch.set_num_threads(1)
        work(rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.stdout.flush()
    os._exit(int(any(statuses)))  # some builds' gloo threads abort an ordinary interpreter exit


@contextlib.contextmanager
def started(script: str, *words: str, log: Path):
    """A Python script in a process group of its own, with a free port to meet at; killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join(filter(None, sys.path))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, script, *words],
            env={**os.environ, **place, "PYTHONPATH": paths},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def everything(folder: Path, rank: int) -> None:
    """Trains all runs and writes what `checks` found, one file a process."""
    told = train(folder, int(os.environ["WORLD_SIZE"]))
    (folder / f"checks.rank{rank}").write_text(json.dumps({**told, **checks(folder, rank)}))


if __name__ == "__main__":
    in_processes(int(sys.argv[1]), lambda rank: everything(Path(sys.argv[2]), rank))
