"""The parameters are what only this package writes: how a write by someone else is noticed.

A forward pass that writes into the parameters would carry un-noised private data into the weights,
and would leave the finite differences of something else than the model that is trained.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

# Called through `map`: the cheapest way over ten thousand tensors.
_version: Callable[[Tensor], int] = operator.attrgetter("_version")
_address: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr


class ParameterChanged(RuntimeError):
    """A parameter was written to, or its storage was replaced, by code other than this package's."""


class ParameterGuard:
    """Notices that tensors were written to between two moments: version counters and addresses.

    About a millisecond for 10,000 tensors, whatever their size. Writes through `tensor.data` move
    neither and go unseen here; `digests.checksums` sees them.

    Args:
      named_tensors: (name, tensor); not inference tensors, which keep no version counter.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named_tensors)
        self.names = [name for name, _ in named]
        self.tensors = [tensor for _, tensor in named]
        self._armed: tuple[list[int], list[int]] | None = None

    def _state(self) -> tuple[list[int], list[int]]:
        return list(map(_version, self.tensors)), list(map(_address, self.tensors))

    def arm(self) -> None:
        """From here until `check` nobody may write."""
        self._armed = self._state()

    def check(self) -> None:
        """Compares with the last `arm`.

        Raises:
          ParameterChanged: names the first tensor that was written to or replaced.
          RuntimeError: `arm` was never called.
        """
        if self._armed is None:
            raise RuntimeError("ParameterGuard.check() before arm(): there is nothing to compare.")
        now = self._state()
        if now != self._armed:
            raise ParameterChanged(_message(self._first_difference(now)))

    def _first_difference(self, now: tuple[list[int], list[int]]) -> str:
        assert self._armed is not None
        pairs = zip(zip(*self._armed, strict=True), zip(*now, strict=True), strict=True)
        return next(name for name, (a, b) in zip(self.names, pairs, strict=True) if a != b)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """`arm` on entry and `check` on exit; an exception from inside comes through unchanged."""
        self.arm()
        yield
        self.check()


def _message(name: str) -> str:
    return (
        f"{name} was written to during a forward pass: that would put un-noised private data into "
        "the weights. Discard these weights; make forward() leave its parameters alone (compute into "
        "new tensors), or freeze and register what it must update as a buffer."
    )
