"""Kills short runs at random moments, with SIGKILL and a third with SIGTERM, and checks what is left.

    python scripts/soak.py --kills 200 --output_dir out/soak

A run is started in a process that is forked from this one and killed: one time at a moment drawn
uniformly over the length of an uninterrupted run, most of which comes before the first step, the next
time after a drawn number of the things that it tells. It is resumed, and after some kills it is left to
end; then the next kind of run begins, until there were as many kills as asked for. The runs write what
they release to a file of their own, before they use it. After each kill that file is held against the
ledger, and every checkpoint folder is read; at the end, the weights against a replay and epsilon against
an uninterrupted run's. After SIGTERM every step that the process paid for must be in a whole checkpoint,
also of first-order runs, which lose updates by SIGKILL. The result is `soak.json`; one failed check ends
the soak with an error, so a result says that no release was lost or paid twice.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file
from tqdm.auto import tqdm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainerCallback,
    default_data_collator,
)

from hf_dpzero import DPZeroConfig, DPZeroTrainer
from hf_dpzero.ledger.replay import replay
from hf_dpzero.ledger.trajectory import LEDGER_NAME, Trajectory
from hf_dpzero.privacy.mechanisms.base import MechanismBase
from hf_dpzero.run_folder import checkpoints
from hf_dpzero.training.termination import EXIT_STATUS, Terminated

KINDS: dict[str, dict[str, Any]] = {
    "dpzero from its ledger alone": {"save_strategy": "no"},
    "dpzero": {},
    "dpzero, K = 8": {"num_directions": 8, "save_strategy": "no"},
    "dpzero, adaptive clip": {"clipping": "adaptive"},
    "dpzero, fixed batches": {
        "sampling": "fixed_batches",
        "correlated_noise": {"kind": "optimized", "hold_direction_for": 4},
        "save_strategy": "no",
    },
    "dp-sgd": {"method": "dp-sgd", "clip": 0.5},
    "dp-adamw": {"method": "dp-adamw", "clip": 0.5, "save_steps": 1},
    "mezo": {"method": "mezo", "noise_multiplier": None, "target_delta": None, "clip": None},
}
"""Kind -> its settings. They keep one checkpoint only, `dp-adamw` from its first step on."""

QUICK = ("dpzero from its ledger alone", "dp-sgd")
FIRST_ORDER = ("dp-sgd", "dp-adamw")

MOST = 6
"""Kills of one run; then it is left to end."""

LONGEST = 120.0
"""Seconds after which a run that was not killed counts as stuck."""


def model() -> BertForSequenceClassification:
    """Two layers of BERT, the same at every call."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    lengths = {"vocab_size": 50, "intermediate_size": 32, "max_position_embeddings": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForSequenceClassification(BertConfig(**sizes, **lengths))


def rows(count: int = 120) -> Any:
    """Rows of random tokens whose label is in the first."""
    from datasets import Dataset

    ids = torch.randint(5, 50, (count, 8), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(ids), (ids[:, 0] > 27).long()
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Dataset.from_dict({name: column.tolist() for name, column in columns.items()})


def trainer_of(folder: Path, kind: str, steps: int, *callbacks: TrainerCallback) -> DPZeroTrainer:
    """A run's trainer, with the noise and keys of a real one."""
    settings = {
        "output_dir": str(folder), "noise_multiplier": 1.0, "target_delta": 1e-3, "clip": 5.0,
        "expected_batch_size": 12, "microbatch_size": 8, "max_steps": steps, "learning_rate": 1e-2,
        "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1, "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, **KINDS[kind],
    }  # fmt: skip
    return DPZeroTrainer(
        model=model(),
        args=DPZeroConfig(**settings),
        train_dataset=rows(),
        data_collator=default_data_collator,
        callbacks=list(callbacks),
    )


# ------------------------------------------------------------------ in the run's process


class Witness(TrainerCallback):
    """Writes a line of what happens to a file that outlives the process: what was told is told."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(self, what: str, step: int = -1, values: Any = ()) -> None:
        os.write(self.file, json.dumps([what, step, list(values)]).encode() + b"\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.tell("logged", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tell("moved", state.global_step - 1)

    def watch(self) -> None:
        """Has noise, ledger and checkpoints tell before and after they do something."""
        append, save = Trajectory.append, checkpoints.save_checkpoint

        def appended(log: Trajectory, release: Any, wait: bool = True) -> None:
            append(log, release)  # first: told is told only of what is on disk
            self.tell("paid", release.step, release.values)

        def saved(*given: Any) -> None:
            self.tell("saving")
            save(*given)
            self.tell("saved")

        Trajectory.append = appended  # type: ignore[method-assign]
        checkpoints.save_checkpoint = saved

        def drawing(release: Any, place: int) -> Any:
            def drawn(mechanism: Any, *given: Any) -> Any:
                self.tell("drawn", given[place])
                return release(mechanism, *given)

            return drawn

        kinds: list[type] = [MechanismBase]
        for kind in kinds:  # which grows: subclasses of subclasses too
            kinds += kind.__subclasses__()
            for name, place in (("release", 1), ("release_part", 2)):
                if name in vars(kind):
                    setattr(kind, name, drawing(vars(kind)[name], place))


def train(folder: Path, kind: str, steps: int, told: Path) -> None:
    """Trains a run to its end, from where it was left."""
    witness = Witness(told)
    witness.tell("begun")
    witness.watch()
    trainer = trainer_of(folder, kind, steps, witness)
    trainer.train(resume_from_checkpoint=(folder / LEDGER_NAME).exists())
    witness.tell("ending")
    trainer.save_model()
    witness.tell("ended")


def life(folder: Path, kind: str, steps: int, told: Path, killed_after: float,
         by: signal.Signals = signal.SIGKILL, lines: float = math.inf) -> tuple[int, str]:  # fmt: skip
    """One process of a run.

    Args:
      folder: of the run.
      kind: of the run.
      steps: of its plan.
      told: file of the witness, added to.
      killed_after: seconds.
      by: the signal; after SIGTERM the process may take its time.
      lines: that it has told when it is killed, if that comes first.

    Returns:
      (signal that ended it, or 143, or 0; its last words where it did not end well).
    """
    with tempfile.TemporaryFile("w+") as words:
        child = os.fork()  # not a new process: imports and compiled code would take most of a life
        if child == 0:
            torch.set_num_threads(1)
            for stream in (1, 2):
                os.dup2(words.fileno(), stream)
            try:
                train(folder, kind, steps, told)
            except Terminated as stopped:
                sys.stderr.flush()
                os._exit(int(str(stopped.code)))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        end, start = time.monotonic() + min(killed_after, LONGEST), told_lines(told)
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() >= end or told_lines(told) - start >= lines:
                os.kill(child, by)
                by, end, lines = signal.SIGKILL, time.monotonic() + LONGEST, math.inf
            time.sleep(0.002)
        if os.WIFSIGNALED(ended[1]):
            return os.WTERMSIG(ended[1]), ""
        words.seek(0)
        status = os.WEXITSTATUS(ended[1])
        return status * (status == EXIT_STATUS), words.read()[-2000:] if status else ""


# ------------------------------------------------------------------ what is checked


PHASES = {
    "begun": "before the first step",
    "drawn": "between noise and ledger",
    "paid": "in the update",
    "moved": "between two steps",
    "logged": "between two steps",
    "saving": "in a checkpoint",
    "saved": "between two steps",
    "ending": "while the model is saved",
    "ended": "at the end",
}


def phase(told: list[Any], resumes: bool) -> str:
    """Where a process was killed, by the last that it told."""
    last = told[-1][0] if told else "begun"
    drew = any(what == "drawn" for what, _, _ in told)
    if resumes and not drew and last in ("begun", "moved", "logged"):
        return "while it resumes"
    return PHASES[last]


@dataclass
class Soak:
    """Counts of what was done and seen."""

    kills: int = 0
    lives: int = 0
    runs: Counter = field(default_factory=Counter)
    refused: int = 0
    phases: Counter = field(default_factory=Counter)
    released: int = 0
    torn_tails: int = 0
    checkpoints_read: int = 0
    replayed: Counter = field(default_factory=Counter)
    table: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))


def lines_of(told: Path, start: int = 0) -> list[Any]:
    """What the witness told, from line `start` on; a line that was cut short was not told."""
    lines = told.read_bytes().split(b"\n")[:-1] if told.exists() else []
    return [json.loads(line) for line in lines[start:]]


def told_lines(told: Path) -> int:
    """How many lines the witness told, without reading them: it is asked every other millisecond."""
    return told.read_bytes().count(b"\n") if told.exists() else 0


def log_of(folder: Path) -> tuple[Any, bool]:
    """(the ledger or None, whether its tail was cut short); the file stays as it is."""
    path = folder / LEDGER_NAME
    if not path.exists():
        return None, False
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copy(path, place))
        log = Trajectory.open(copy)
        log.close()
        return log, copy.stat().st_size != path.stat().st_size


def check_ledger(before: list[Any], now: list[Any], told: list[Any]) -> None:
    """Holds a ledger against what it was at the start of a process and what that process told.

    Raises:
      AssertionError: a release was lost, changed, or drawn again after it was paid.
    """
    assert now[: len(before)] == before, "a release that was in the ledger changed"
    drawn = sorted({step for what, step, _ in told if what == "drawn"})
    assert all(step >= len(before) for step in drawn), f"drawn again: {drawn} after {len(before)}"
    for what, step, values in told:
        if what == "paid":
            assert list(now[step].values) == values, f"step {step} is not what was released"
        assert what != "moved" or step < len(now), f"the weights moved by step {step}, unpaid"
        assert what != "logged" or step <= len(now), f"step {step} was logged, unpaid"
    assert abs(len(now) - len(before) - len(drawn)) <= 1, (
        "a release without a draw, or a draw too many"
    )


def check_checkpoints(folder: Path, log: Any) -> int:
    """Reads every folder that is named a checkpoint; one that is not whole raises. Returns how many."""
    found = sorted(folder.glob("checkpoint-*"))
    for path in found:
        checkpoints.load_state(str(path), log)
    return len(found)


def updates_lost(folder: Path, now: int, before: int, told: list[Any], by: str, last: int) -> int:
    """Steps that a process paid for and no checkpoint holds; after SIGTERM that may not be.

    Args:
      folder: of the run.
      now, before: steps in the ledger after the process and before it.
      told: by the process.
      by: what ended it.
      last: number of steps after which a run needs no checkpoint: its ledger is whole, and `train`
        has nothing left to stop, so the signal is delivered as if there were no trainer.
    """
    kept = max(map(checkpoints.step_of, folder.glob("checkpoint-*")), default=0)
    moved = max((step + 1 for what, step, _ in told if what == "moved"), default=0)
    if by == "SIGTERM" and told[-1][0] not in ("ending", "ended") and moved < last:
        assert kept >= moved, f"{moved} steps, {kept} kept"
        assert now in (before, kept), f"{now} paid, {kept} kept"
    return max(0, now - max(before, kept))


def check_end(folder: Path, kind: str, steps: int, straight: Path) -> bool:
    """Compares a finished run with an uninterrupted one. Returns whether its weights were replayed."""
    reports = [json.loads((f / "privacy_report.json").read_text()) for f in (folder, straight)]
    assert reports[0]["epsilon"] == reports[1]["epsilon"], f"{kind}: epsilon differs"
    assert reports[0]["steps"] == reports[1]["steps"] == steps
    log = Trajectory.load(folder / LEDGER_NAME)
    assert log.next_step == steps
    if not log.header["replayable"]:
        return False
    rebuilt = model()
    replay(rebuilt, log)
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in rebuilt.named_parameters()), (
        f"{kind}: the weights are not what the ledger says"
    )
    return True


def one_run(soak: Soak, kind: str, steps: int, place: Path, length: float, draw: random.Random,
            kills: int, bar: Any) -> None:  # fmt: skip
    """A run from its start to its end, killed on the way until `kills` are reached in all."""
    folder, told, own = place / "run", place / "told", 0
    events = len(lines_of(place.parent / kind / "told"))
    before: list[Any] = []
    while True:
        start = len(lines_of(told))
        kill = soak.kills < kills and own < MOST
        after = draw.uniform(0, length) if kill and soak.kills % 2 else LONGEST
        lines = draw.randint(1, events) if kill and not soak.kills % 2 else math.inf
        by = signal.SIGTERM if soak.kills % 3 == 0 else signal.SIGKILL
        ended, words = life(folder, kind, steps, told, after, by, lines)
        soak.lives += 1
        said = lines_of(told, start)
        if words and "what they spent is lost. Train in another" in words:
            assert kind in FIRST_ORDER and not list(folder.glob("checkpoint-*"))
            soak.refused += 1
            return
        if ended == EXIT_STATUS:
            assert by == signal.SIGTERM and words.count("stopped by SIGTERM after step") == 1, words
        else:
            assert not words, f"{kind}: {words}"
        log, torn = log_of(folder)
        now = log.releases if log else []
        check_ledger(before, now, said)
        soak.checkpoints_read += check_checkpoints(folder, log)
        soak.torn_tails += torn
        soak.released += len(now) - len(before)
        if ended == 0:
            soak.replayed[kind] += check_end(folder, kind, steps, place.parent / kind / "run")
            soak.runs[kind] += 1
            return
        assert kill, f"{kind}: no end after {LONGEST} s"
        soak.kills += 1
        own += 1
        at, row = phase(said, bool(before)), soak.table[f"{kind}, {by.name}"]
        soak.phases[f"{by.name} {at}"] += 1
        last = sys.maxsize if kind in FIRST_ORDER else steps
        lost = updates_lost(folder, len(now), len(before), said, by.name, last)
        if kind in FIRST_ORDER:
            assert not lost or by == signal.SIGKILL, f"{kind}: {lost} steps lost by SIGTERM {at}"
            row["updates lost"] += lost
        row["kills"] += 1
        row["exits 143"] += ended == EXIT_STATUS
        row["releases"] += len(now) - len(before)
        row["checkpoints whole"] += len(list(folder.glob("checkpoint-*")))
        before = now
        bar.update()


def straight_runs(place: Path, kinds: list[str], steps: int) -> dict[str, float]:
    """An uninterrupted run of each kind; seconds that it took.

    Trained here once first, so that the processes inherit all that is imported and compiled.
    """
    lengths = {}
    for kind in kinds:
        with open(os.devnull, "w") as away, contextlib.redirect_stdout(away):
            trainer_of(place / kind / "warm", kind, 1).train()
        began = time.monotonic()
        ended, words = life(place / kind / "run", kind, steps, place / kind / "told", LONGEST)
        assert ended == 0 and not words, f"{kind}, uninterrupted: {words}"
        lengths[kind] = time.monotonic() - began
    return lengths


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs the soak; returns what it wrote to soak.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="two kinds of runs, of six steps")
    parser.add_argument("--output_dir", type=Path, default=Path("out/soak"))
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    given = parser.parse_args(arguments)
    if given.kills < 1:
        parser.error(f"--kills {given.kills}: give a number above 0.")
    kinds = list(QUICK if given.quick else KINDS)
    steps, draw, soak = (6 if given.quick else 12), random.Random(given.seed), Soak()
    given.output_dir.mkdir(parents=True, exist_ok=True)
    if not __debug__:
        raise SystemExit("run it without -O: what it checks are assertions.")
    gc.collect()
    gc.freeze()  # libraries: each run asks for collections
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=given.output_dir) as name:
        lengths = straight_runs(Path(name), kinds, steps)
        # Its lock is shared with forked processes, and a run that is killed may hold it.
        tqdm.set_lock(threading.RLock())
        with tqdm(total=given.kills, desc="kills") as bar:
            number = 0
            while soak.kills < given.kills:
                kind, place = kinds[number % len(kinds)], Path(name) / str(number)
                place.mkdir()
                one_run(soak, kind, steps, place, lengths[kind], draw, given.kills, bar)
                shutil.rmtree(place)
                number += 1
    result = {
        **vars(soak),
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "seconds_of_a_straight_run": {kind: round(s, 2) for kind, s in lengths.items()},
        "seed": given.seed,
    }
    columns = ("kills", "exits 143", "releases", "updates lost", "checkpoints whole")
    print(" | ".join(["kind of run, kind of kill", *columns]))
    for name in sorted(soak.table):
        print(" | ".join([name, *(str(soak.table[name][column]) for column in columns)]))
    (given.output_dir / "soak.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    main()
