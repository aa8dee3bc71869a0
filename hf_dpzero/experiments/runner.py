"""Runs training runs, each in a process of its own, and appends a row as each one ends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from hf_dpzero.experiments.results import Exit, Row, Run, append_row, read_rows, row_of
from hf_dpzero.ledger import log_file
from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME
from hf_dpzero.reporting.hub import INITIAL_VALUES_FILE
from hf_dpzero.reporting.public import RECIPE_FILE
from hf_dpzero.run_folder.checkpoints import complete_checkpoints

LOCK_FILE = ".lock"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process of a run: what it trains by, where it writes, and whether it continues."""

    run: Run
    folder: Path  # its output_dir
    recipe: Path  # the run's settings as a file
    log: Path  # stem of the files that its output (.out) and errors (.err) go to
    checkpoint: Path | None = None  # where it continues from; None for a fresh start
    finished: bool = False  # it has left all of its results already, and only its row is missing

    @property
    def words(self) -> list[str]:
        """The command line after `hf-dpzero`."""
        resume = ["--resume_from_checkpoint", str(self.checkpoint)] if self.checkpoint else []
        return ["train", str(self.recipe), *resume]


class Child(Protocol):
    """A process that has been started; `Process` says what its methods do."""

    def poll(self) -> Exit | None: ...

    def stop(self) -> None: ...


Start = Callable[[Attempt], Child]


class Workspace:
    """The files of many runs: a file of rows, and a folder, a recipe and a log for each run.

    Args:
      folder: made if it is not there.
      runs: in the order in which they start.
      rows: name of the file of rows.
      folders: names of the folders that hold the runs, their recipes and their logs.
      abandoned: a folder that takes a run's files where the run cannot be continued; without it they
        stay, for what they spent stays spent, and the run starts in another folder.
    """

    def __init__(
        self,
        folder: Path,
        runs: Sequence[Run],
        *,
        rows: str = "rows.jsonl",
        folders: tuple[str, str, str] = ("runs", "recipes", "logs"),
        abandoned: Path | None = None,
    ) -> None:
        self.folder, self.runs, self.abandoned = folder, list(runs), abandoned
        self.path = folder / rows
        self.run_folder, self._recipes, self._logs = (folder / name for name in folders)
        for path in (self.run_folder, self._recipes, self._logs):
            path.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[Row]:
        """Returns the last row of each run that has one, in the order of the runs."""
        rows = {row.digest: row for row in read_rows(self.path)}
        return [rows[run.digest] for run in self.runs if run.digest in rows]

    def pending(self, retry_failed: bool = False) -> list[Run]:
        """Returns runs without a row; with `retry_failed` also those whose row is no success."""
        settled = {row.digest for row in self.rows() if row.done or not retry_failed}
        return [run for run in self.runs if run.digest not in settled]

    def attempt(self, run: Run) -> Attempt:
        """Returns where `run` goes next; half-finished, it continues from its last whole checkpoint."""
        recorded = {row.folder for row in read_rows(self.path)}
        number = 0
        while True:
            number += 1
            name = run.name if number == 1 else f"{run.name}-attempt{number}"
            if name in recorded:  # what a run left stays, also where it failed: it may have spent
                continue
            folder, recipe = self.run_folder / name, self._recipes / f"{name}.yaml"
            attempt = Attempt(run=run, folder=folder, recipe=recipe, log=self._logs / name)
            text = run.to_yaml(str(folder))
            if (folder / LEDGER_NAME).exists():  # something was spent here
                if recipe.is_file() and recipe.read_text(encoding="utf-8") == text:
                    if (folder / RECIPE_FILE).is_file():  # the last file that training leaves
                        return dataclasses.replace(attempt, finished=True)
                    if complete := complete_checkpoints(folder):
                        return dataclasses.replace(attempt, checkpoint=complete[-1])
                if self.abandoned is None:
                    continue
                self.abandoned.mkdir(parents=True, exist_ok=True)
                count = len(list(self.abandoned.iterdir()))
                shutil.move(folder, self.abandoned / f"{name}-{count}")
            recipe.write_text(text, encoding="utf-8")
            return attempt


def execute(
    workspace: Workspace,
    runs: Sequence[Run],
    start: Start,
    *,
    jobs: int = 1,
    started: Callable[[Attempt], None] = lambda attempt: None,
    check: Callable[[Row], None] = lambda row: None,
    ended: Callable[[Attempt, Row], None] = lambda attempt, row: None,
) -> None:
    """Runs `runs`, `jobs` at a time; each one's row is on disk before the next one starts.

    Interrupted, it stops the processes that run and writes no row for them: they are continued by
    the next call.

    Args:
      workspace: their files.
      runs: what to run, of those of the workspace.
      start: starts an attempt.
      jobs: runs at once.
      started: called before a process starts.
      check: called before a row is written; what it raises ends everything without that row.
      ended: called after a row is written.
    """
    # By folder: two runs never write into one.
    waiting, running = list(runs), dict[str, tuple[Attempt, Child]]()

    def collect(attempt: Attempt, exit_: Exit) -> None:
        log = Path(f"{attempt.log}.err")
        errors = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        resumed = attempt.finished or attempt.checkpoint is not None
        row = row_of(attempt.run, attempt.folder, errors, exit_, resumed=resumed, jobs=jobs)
        check(row)
        append_row(workspace.path, row)
        ended(attempt, row)

    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                attempt = workspace.attempt(waiting.pop(0))
                started(attempt)
                if attempt.finished:
                    collect(attempt, Exit(0, 0.0))
                else:
                    running[attempt.folder.name] = attempt, start(attempt)
            exits = {name: child.poll() for name, (_, child) in running.items()}
            for name, exit_ in exits.items():
                if exit_ is not None:
                    collect(running.pop(name)[0], exit_)
            if running and not any(exits.values()):
                time.sleep(0.05)  # nothing in Python waits for the first of several processes
    finally:
        for _, child in running.values():
            child.stop()


class Process:
    """A training process, in a session of its own: Ctrl-C reaches the parent, which stops it.

    `log` is the stem of its .out and .err files, `environment` comes on top of ours, and the process
    holds `lock`, a file descriptor, open, so that the lock lasts as long as it does.
    """

    def __init__(
        self, words: Sequence[str], log: Path, environment: dict[str, str], lock: int | None = None
    ) -> None:
        with Path(f"{log}.out").open("wb") as out, Path(f"{log}.err").open("wb") as err:
            self._process = subprocess.Popen(
                list(words),
                # a library that asks a question (trust_remote_code) fails at once, and waits for nobody
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
                start_new_session=True,  # so that `stop` ends its own children too
                pass_fds=() if lock is None else (lock,),
            )
        self._since = time.monotonic()

    def poll(self) -> Exit | None:
        """Returns how it ended, or None while it runs."""
        status = self._process.poll()
        return None if status is None else Exit(status, time.monotonic() - self._since)

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL if that is not heeded in 10 seconds; returns once it has ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):  # the ledger stands either way
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if self._process.poll() is None:
                    os.killpg(self._process.pid, number)
                    self._process.wait(10.0)


def train_in_process(jobs: int, lock: int | None = None) -> Start:
    """Returns what starts attempts as `python -m hf_dpzero.cli.main train ...`, `jobs` at a time."""
    # Each process would take every core, and wait for the others at each operation.
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // jobs))} if jobs > 1 else {}

    def start(attempt: Attempt) -> Child:
        words = [sys.executable, "-m", "hf_dpzero.cli.main", *attempt.words]
        return Process(words, attempt.log, environment, lock)

    return start


def cores() -> int:
    """Returns how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Holds the lock of a folder; yields its descriptor for the processes it starts.

    SIGTERM inside is a KeyboardInterrupt, so that `kill` leaves no process behind either.

    Raises:
      OSError: the folder is in use.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    path.touch()
    try:
        handle = log_file.locked(path)
    except log_file.LedgerError as error:
        raise OSError(
            f"another comparison or sweep, or a run that outlived one, is at work in {folder}: wait "
            "for it, stop it, or give another --output_dir."
        ) from error
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with handle:
            yield handle.fileno()
    finally:
        signal.signal(signal.SIGTERM, before)


def discard_weights(folder: Path) -> None:
    """Removes the weights and checkpoints of a finished run; results, report and ledger stay.

    The trajectory stays too, from which `hf-dpzero replay` rebuilds weights of zeroth order.
    """
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    for path in folder.iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth")
        if weights and path.name not in (SHIPPING_NAME, INITIAL_VALUES_FILE):
            path.unlink()
