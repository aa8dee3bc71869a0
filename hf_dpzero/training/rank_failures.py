"""What happens to the other processes when one fails: they stop soon, and say which one it was.

A collective operation whose peer is gone fails with a message that names nobody, or waits. So while a
run trains, each process (a rank) leaves two things in the key-value store that torch's rendezvous has
opened anyway: a beat, once a second from a thread of its own, and, when it stops, a word why. A rank
that waits for others looks there once a second; one whose collective failed asks who has given no sign
since.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

LOOK = 1.0
"""Seconds between two beats, and between two looks of a rank that waits."""

GRACE = 8 * LOOK
"""Seconds without a sign after which a rank counts as dead; asked only once something has failed."""

WAITED, STOPPED = "waited", "stopped"
"""Keys in the store; `WAITED` is also the word of a rank that only noticed another's failure."""

ADVICE = (
    "Its own output says more. What was released is in the ledger: start again with "
    "resume_from_checkpoint=True, with as many processes as you like."
)


class RankError(Exception):
    """Another process failed, or differs from this one. No subclass of RuntimeError: nothing retries."""


def active() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Watch:
    """One process' view of the others during one call of `train`.

    Args:
      number: of the call, the same on every rank; keys of several calls do not mix.
      seconds: that a collective operation may take (`ddp_timeout`).
    """

    def __init__(self, number: int, seconds: float) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        store: Any = _get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if hasattr(store, "clone"):  # a connection of its own: others may block theirs
            store = store.clone()
            store.set_timeout(timedelta(seconds=GRACE))
        self._store = dist.PrefixStore(f"hf_dpzero/{number}", store)
        self.seconds, self.rank, self.world = seconds, dist.get_rank(), dist.get_world_size()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="hf_dpzero beat")
        self._thread.start()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: whoever waits will see it
            while not self._ended.is_set():
                self._store.add(f"beat/{self.rank}", 1)
                self._ended.wait(LOOK)

    def end(self) -> None:
        """Stops the beat."""
        self._ended.set()
        self._thread.join(GRACE)

    def say(self, word: str) -> None:
        """Leaves this rank's last word; the first one counts."""
        with contextlib.suppress(RuntimeError):
            key = f"word/{self.rank}"
            if not self._store.check([key]):
                self._store.set(key, word)
                self._store.set(STOPPED, str(self.rank))

    def linger(self) -> None:
        """Waits until the others have read this rank's word and left theirs, or for `GRACE`.

        One that went on could meet them in an operation of something else; rank 0 may hold the store.
        """
        with contextlib.suppress(RankError):
            until = time.monotonic() + GRACE
            while len(self._words()) < self.world - 1 and time.monotonic() < until:
                time.sleep(LOOK / 10)

    def look(self) -> None:
        """Raises if another rank has stopped.

        Raises:
          RankError: names it.
        """
        if self._asked(lambda: self._store.check([STOPPED])):
            raise self.blame()

    def _asked(self, question: Callable[[], T]) -> T | None:
        """The store's answer; None where it takes too long.

        Raises:
          RankError: the process that keeps the store is gone.
        """
        try:
            return question()
        except dist.DistNetworkError as error:
            raise RankError(
                "the process that keeps the ranks' store (rank 0 or its launcher, at MASTER_ADDR) "
                f"cannot be reached any more: it was killed, or its machine is gone. {ADVICE}"
            ) from error
        except dist.DistStoreError:
            return None

    def blame(self, waited: float = 0.0) -> RankError:
        """Who failed, by the words and beats of the others; says that this rank only noticed.

        Args:
          waited: seconds that a collective operation had, where these ran out.
        """
        self.say(WAITED)
        before, started = self._beats(), time.monotonic()
        others = [rank for rank in range(self.world) if rank != self.rank]
        while True:
            words, beats = self._words(), self._beats()
            raised = {rank: word for rank, word in words.items() if word != WAITED}
            unseen = [r for r in others if r not in words and beats[r] == before[r]]
            asked = time.monotonic() - started
            if (
                raised or asked > GRACE or (asked > 3 * LOOK and not unseen)
            ):  # a word may be under way
                break
            time.sleep(LOOK / 10)
        if raised:
            said = "; ".join(f"rank {rank} stopped with {word}" for rank, word in raised.items())
        elif unseen:
            said = (
                f"{_ranks(unseen)} gave no sign of life for {GRACE:.0f} s: killed, or out of memory"
            )
        elif late := [rank for rank in others if rank not in words]:
            time_out = f" within {waited:.0f} s (ddp_timeout)" if waited else ""
            said = (
                f"{_ranks(late)} did not come to the exchange{time_out}: alive, but stuck or slow"
            )
        else:
            said = "the connection between the processes failed, and all of them run"
        return RankError(f"rank {self.rank} stops, because {said}. {ADVICE}")

    def _words(self) -> dict[int, str]:
        def read() -> dict[int, str]:
            keys = {rank: f"word/{rank}" for rank in range(self.world) if rank != self.rank}
            left = {rank: key for rank, key in keys.items() if self._store.check([key])}
            return {rank: self._store.get(key).decode() for rank, key in left.items()}

        return self._asked(read) or {}

    def _beats(self) -> list[int]:
        def read() -> list[int]:
            return [self._store.add(f"beat/{rank}", 0) for rank in range(self.world)]

        return self._asked(read) or [0] * self.world


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


_watch: Watch | None = None
_failures = 0
_calls = itertools.count()


def failures() -> int:
    """Calls of `train` that failed so far, on all ranks; groups of theirs may hold what never ended."""
    return _failures


@contextlib.contextmanager
def watching(seconds: float) -> Iterator[None]:
    """Inside, failures of other ranks become a `RankError` here, and this rank's are told to them.

    Does nothing in one process.

    Args:
      seconds: that a collective operation may take.

    Raises:
      RankError: another rank failed or gave no sign of life; it is named.
    """
    global _watch, _failures
    if not active() or _watch is not None:
        yield
        return
    _watch = watch = Watch(next(_calls), seconds)
    try:
        yield
    except BaseException as error:
        _failures += 1
        ours = isinstance(error, RankError)
        named = None
        if isinstance(error, RuntimeError) and _of_a_connection(error):  # of an operation not ours
            named = watch.blame()
        watch.say(WAITED if ours else type(error).__name__)
        watch.linger()
        if named is not None:
            raise named from error
        raise
    finally:
        watch.end()
        _watch = None


def _of_a_connection(error: RuntimeError) -> bool:
    words = ("gloo", "Connection", "Timed out waiting", "Operation timed out", "NCCL")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def complete(issue: Callable[[], Any], patient: bool = True) -> None:
    """Issues a collective operation and returns when it is done.

    Args:
      issue: starts it with `async_op=True`.
      patient: whether one that was waited for too shortly goes on, as gloo's do. NCCL aborts it, and so
        is only asked whether it is done.

    Raises:
      RankError: another rank has stopped, is dead, or did not come in time.
    """
    started, watch = time.monotonic(), _watch
    try:
        work = issue()
        while not _done(work, patient):
            if watch is None:
                continue
            watch.look()
            if time.monotonic() - started > watch.seconds:
                raise watch.blame(watch.seconds)
    except RuntimeError as error:
        if watch is None:
            raise
        raise watch.blame() from error


def _done(work: Any, patient: bool) -> bool:
    """Waits for at most `LOOK`; the operation's own error is raised."""
    until = time.monotonic() + LOOK
    while not patient and not work.is_completed() and time.monotonic() < until:
        time.sleep(1e-4)
    if work.is_completed():
        work.wait()
        return True
    if not patient:
        return False
    try:
        work.wait(timedelta(seconds=LOOK))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True
