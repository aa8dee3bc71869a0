"""Runs a grid, each run in a process of its own, and appends a row as each one ends."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hf_dpzero.experiments.grid import Run
from hf_dpzero.experiments.outcome import Exit, row_of
from hf_dpzero.experiments.results import ROWS_FILE, Row, append_row, latest, read_rows
from hf_dpzero.ledger.trajectory import LEDGER_NAME
from hf_dpzero.training.run_files import STATE_NAME

LOCK_FILE = ".lock"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process of a run: what it trains by, where it writes, and whether it continues.

    Attributes:
      run: of the grid.
      folder: its output_dir.
      recipe: the run's settings as a file.
      log: stem of the files that its output (.out) and errors (.err) go to.
      checkpoint: where it continues from; None for a fresh start.
    """

    run: Run
    folder: Path
    recipe: Path
    log: Path
    checkpoint: Path | None = None

    @property
    def words(self) -> list[str]:
        """The command line after `hf-dpzero`."""
        resume = ["--resume_from_checkpoint", str(self.checkpoint)] if self.checkpoint else []
        return ["train", str(self.recipe), *resume]

    def errors(self) -> str:
        """What it has said on stderr."""
        path = Path(f"{self.log}.err")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


class Child(Protocol):
    """A process that has been started."""

    def poll(self) -> Exit | None:
        """How it ended, or None while it runs."""

    def stop(self) -> None:
        """Ends it, and waits until it has ended."""


Start = Callable[[Attempt], Child]


class Comparison:
    """The folder of a comparison: rows.jsonl, and runs/, recipes/ and logs/ with one name a run.

    Args:
      folder: made if it is not there.
      runs: the grid.
    """

    def __init__(self, folder: str | Path, runs: Sequence[Run]) -> None:
        self.folder, self.runs = Path(folder), list(runs)
        for name in ("runs", "recipes", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.path = self.folder / ROWS_FILE

    def rows(self) -> list[Row]:
        """The last row of each run of the grid that has one, in the order of the grid."""
        found = latest(read_rows(self.path))
        return [found[run.digest] for run in self.runs if run.digest in found]

    def pending(self, retry_failed: bool = False) -> list[Run]:
        """Runs without a row; with `retry_failed` also those whose row is no success."""
        settled = {row.digest for row in self.rows() if row.done or not retry_failed}
        return [run for run in self.runs if run.digest not in settled]

    def attempt(self, run: Run) -> Attempt:
        """Where `run` goes next.

        A half-finished run continues from its last whole checkpoint. A folder whose ledger can not
        be continued is left as it is, for what it spent stays spent, and another one is taken.
        """
        recorded = {row.folder for row in read_rows(self.path)}
        number = 1
        while True:
            name = run.name if number == 1 else f"{run.name}-attempt{number}"
            folder, recipe = self.folder / "runs" / name, self.folder / "recipes" / f"{name}.yaml"
            attempt = Attempt(
                run=run, folder=folder, recipe=recipe, log=self.folder / "logs" / name
            )
            text = run.to_yaml(str(folder))
            if not (folder / LEDGER_NAME).exists() and name not in recorded:
                recipe.write_text(text, encoding="utf-8")
                return attempt
            mine = recipe.is_file() and recipe.read_text(encoding="utf-8") == text
            if mine and name not in recorded and (found := last_checkpoint(folder)):
                return _resumed(attempt, found)
            number += 1


def _resumed(attempt: Attempt, checkpoint: Path) -> Attempt:
    return Attempt(
        run=attempt.run,
        folder=attempt.folder,
        recipe=attempt.recipe,
        log=attempt.log,
        checkpoint=checkpoint,
    )


def last_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the most steps that was written to its end, or None.

    Its grid state is the last file that is written (`run_files.save_state`).
    """
    found = {int(p.parent.name.split("-")[1]): p.parent for p in _states(folder)}
    return found[max(found)] if found else None


def _states(folder: Path) -> Iterator[Path]:
    for path in folder.glob(f"checkpoint-*/{STATE_NAME}"):
        if path.parent.name.split("-")[1].isdecimal() and path.stat().st_size:
            yield path


def execute(
    comparison: Comparison,
    runs: Sequence[Run],
    start: Start,
    *,
    jobs: int = 1,
    started: Callable[[Attempt], None] = lambda attempt: None,
    ended: Callable[[Attempt, Row], None] = lambda attempt, row: None,
) -> None:
    """Runs `runs`, `jobs` at a time; each one's row is on disk before the next one starts.

    Interrupted, it stops the processes that run and writes no row for them: they are continued by
    the next call.
    """
    waiting, running = list(runs), dict[str, tuple[Attempt, Child]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                attempt = comparison.attempt(waiting.pop(0))
                running[attempt.folder.name] = attempt, start(attempt)
                started(attempt)
            if not _collect(comparison, running, jobs, ended):
                time.sleep(_POLL_SECONDS)
    finally:
        for _, child in running.values():
            child.stop()


def _collect(
    comparison: Comparison,
    running: dict[str, tuple[Attempt, Child]],
    jobs: int,
    ended: Callable[[Attempt, Row], None],
) -> bool:
    """Writes the rows of processes that have ended; whether there were any."""
    found = [(name, exit_) for name, (_, c) in running.items() if (exit_ := c.poll()) is not None]
    for name, exit_ in found:
        attempt, _ = running.pop(name)
        row = row_of(
            attempt.run,
            attempt.folder,
            attempt.errors(),
            exit_,
            resumed=attempt.checkpoint is not None,
            jobs=jobs,
        )
        append_row(comparison.path, row)
        ended(attempt, row)
    return bool(found)


class Process:
    """A training process, in a session of its own: Ctrl-C reaches the comparison, which stops it.

    Its peak memory is the kernel's account (`ru_maxrss`). A new process inherits in it what its
    parent took; where it has not outgrown that, the last look at its own mark (VmHWM) counts.

    Args:
      words: the command line.
      log: stem of its .out and .err files.
      environment: variables on top of ours.
      lock: a file descriptor that it holds open, so that the lock lasts as long as it does.
    """

    def __init__(
        self, words: Sequence[str], log: Path, environment: dict[str, str], lock: int | None = None
    ) -> None:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(Path(f"{log}.out").open("wb"))
            err = stack.enter_context(Path(f"{log}.err").open("wb"))
            self._process = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
            )
        self._since = time.monotonic()
        self._inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._seen: int | None = None
        self._exit: Exit | None = None

    def poll(self) -> Exit | None:
        """How it ended, or None while it runs."""
        if self._exit is None:
            self._seen = high_water_mark(self._process.pid) or self._seen
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._keep(status, usage)
        return self._exit

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that is not heeded in 10 seconds; the ledger stands either way."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + _GRACE_SECONDS
            with contextlib.suppress(ProcessLookupError):
                if self.poll() is None:
                    os.killpg(self._process.pid, number)
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _keep(self, status: int, usage: Any) -> None:
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code  # so that Popen does not wait for it again
        outgrown = usage.ru_maxrss > self._inherited or self._seen is None
        unit = 1 if sys.platform == "darwin" else 1024
        peak = usage.ru_maxrss * unit if outgrown else self._seen
        self._exit = Exit(code, time.monotonic() - self._since, peak)


def high_water_mark(pid: int) -> int | None:
    """Peak resident bytes of a running process so far; None where the platform does not tell."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 if found else None
    return None


def train_in_process(jobs: int, lock: int | None = None) -> Start:
    """Starts attempts as `python -m hf_dpzero.cli.main train ...`, with their share of the cores."""
    environment = {}
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, cores() // jobs))

    def start(attempt: Attempt) -> Child:
        words = [sys.executable, "-m", "hf_dpzero.cli.main", *attempt.words]
        return Process(words, attempt.log, environment, lock)

    return start


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Holds the lock of a comparison's folder; yields its descriptor for the processes it starts.

    Raises:
      OSError: another comparison, or a run that outlived one, is at work in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a") as file:
        try:
            import fcntl
        except ImportError:  # no advisory locks on this platform
            yield file.fileno()
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(
                f"another comparison, or a run that outlived one, is at work in {folder}: wait for "
                "it, stop it, or give another --output_dir."
            ) from error
        yield file.fileno()


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM inside is a KeyboardInterrupt, so that `kill` leaves no process behind either."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def discard_weights(folder: Path) -> None:
    """Removes the weights and checkpoints of a finished run; results, report and ledger stay.

    The trajectory stays too, from which `hf-dpzero replay` rebuilds weights of zeroth order.
    """
    import shutil

    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    for pattern in WEIGHTS:
        for path in folder.glob(pattern):
            if not path.name.startswith("trajectory"):
                path.unlink()
