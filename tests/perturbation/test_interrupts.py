"""Ctrl-C between two states of the parameters, and changes that fail half-way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from hf_dpzero.perturbation import segments
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace, interrupts_held_back


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Python's handler, also where the parent process ignores SIGINT (a shell's background job)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def space_of() -> ParameterSpace:
    sizes = {"a": (300, 300), "b": (310, 300), "c": (320, 300)}  # none small: three segments
    space = ParameterSpace({name: torch.ones(size) for name, size in sizes.items()}.items())
    space.snap_()
    return space


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_is_delivered_on_exit_and_the_handler_is_back():
    before, seen = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), interrupts_held_back():
        interrupt()
        seen.append("went on")
    assert seen == ["went on"]
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_are_left_alone():
    def work() -> None:
        with interrupts_held_back():
            done.append(signal.getsignal(signal.SIGINT))

    done: list[object] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGINT)]


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_in_a_change_leaves_whole_states(monkeypatch, at, defer):
    """Ctrl-C during the at-th segment: after settling, theta is what the change was leading to."""
    u, v = Direction(1, 0), Direction(1, 1)
    expected = space_of()
    expected.step_([u], [0.5])
    space, calls = space_of(), []
    apply = segments.GridSegment.apply_

    def interrupted(segment, *given):
        calls.append(1)
        if len(calls) == at:
            interrupt()
        return apply(segment, *given)

    space.move_to_(((u, -1e-3),))
    if defer:
        space.step_([u], [0.5], defer=True)
    with monkeypatch.context() as patch:
        patch.setattr(segments.GridSegment, "apply_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            if defer:
                space.move_to_(((v, 1e-3),))
            else:
                space.step_([u], [0.5])
    space.settle_()
    assert all(torch.equal(a, b) for a, b in zip(space.tensors, expected.tensors, strict=True))


def test_a_change_that_failed_half_way_is_never_carried_on(monkeypatch):
    space, calls = space_of(), []
    apply = segments.GridSegment.apply_

    def failing(segment, *given):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return apply(segment, *given)

    with monkeypatch.context() as patch:
        patch.setattr(segments.GridSegment, "apply_", failing)
        with pytest.raises(MemoryError):
            space.move_to_(((Direction(1, 0), 1e-3),))
    assert not space.settled
    for operation in (space.settle_, lambda: space.step_([Direction(1, 0)], [0.1])):
        with pytest.raises(RuntimeError, match="failed half-way.*resume from a checkpoint"):
            operation()
