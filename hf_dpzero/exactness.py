"""Checks before training that a strategy and the frozen prefix give the very losses of full passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.directions import Direction
from hf_dpzero.estimator import FiniteDifferences, Microbatch, evaluation_mode
from hf_dpzero.layerwise import ModuleVisits


def make_exact(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> list[str]:
    """Tries the strategy and the frozen prefix on a microbatch; turns off what is not exact.

    Also teaches the prefix what it may forget, under `forget_unread`. Nothing is released; the
    parameters are at theta before and after.

    Returns:
      what was turned off and why, for a log; [] if nothing was.

    Raises:
      ValueError: the strategy that was asked for by name is not exact for this model.
    """
    messages = []
    reason = _inexactness(differences, microbatch, direction)
    if reason is not None:
        if not differences.chosen_automatically:
            raise ValueError(f"strategy={differences.strategy!r} {reason}; use 'whole_model'.")
        messages.append(f"the strategy is whole_model: {differences.strategy} {reason}.")
        differences.use("whole_model")
    if not _prefix_made_exact(differences, microbatch, direction):
        messages.append("reuse_frozen_prefix is off: it would not be exact for this model.")
        differences.prefix = None
    return messages


def strategy_is_exact(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> bool:
    """Whether the strategy in use gives bit for bit `whole_model`'s losses (theta settled).

    Meanwhile every trainable parameter is NaN outside its module's forward, so that no read there
    passes unnoticed, however little it would matter.
    """
    return _inexactness(differences, microbatch, direction) is None


def _inexactness(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> str | None:
    """What is wrong with the strategy in use on this microbatch; None if nothing."""
    visits = differences.visits
    if visits is None:
        return None
    with _turned_off(differences, "prefix"):
        with _replaced(differences, "visits", _yardstick(differences)):
            expected = _settled_losses(differences, microbatch, direction)
        visits.visited.clear()
        try:
            with visits.poisoned():
                found = _settled_losses(differences, microbatch, direction)
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            return f"fails on a trial batch ({type(error).__name__})"  # its text may hold rows
    if _equal(found, expected):
        return None
    named = () if differences.chosen_automatically else visits.never_visited
    return _difference(named)


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, NaN being equal to NaN: one row's NaN loss decides nothing."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(), expected.nan_to_num()
    )


def _yardstick(differences: FiniteDifferences) -> ModuleVisits | None:
    """What the strategy is compared with: whole_model, where that takes no copy of the weights.

    In half precision it is `layerwise`: what is read outside its module's forward is theta there and
    NaN in the trial, so the two agree only if nothing is.
    """
    space = differences.space
    wide = all(tensor.dtype == torch.float32 for tensor in space.tensors)
    return None if wide else ModuleVisits(differences.model, space)


def _difference(never_visited: Sequence[str]) -> str:
    found = "does not give the losses of full perturbation on a trial batch"
    if not never_visited:
        return f"{found}: a parameter is read outside its module's forward"
    return f"{found}: these were read outside their module's forward, or not at all: " + ", ".join(
        never_visited
    )


def _prefix_made_exact(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> bool:
    """Whether reuse is exact: with what the prefix learns here forgotten, or else with all kept."""
    prefix = differences.prefix
    if prefix is None:
        return True
    if differences.forget_unread:
        with contextlib.suppress(RuntimeError, LookupError, TypeError, ValueError):
            with torch.no_grad(), evaluation_mode(differences.model):
                prefix.learn(lambda: differences.evaluate(microbatch))
            if prefix_is_exact(differences, microbatch, direction):
                return True
        prefix.keep_everything()
    return prefix_is_exact(differences, microbatch, direction)


def prefix_is_exact(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> bool:
    """Whether reuse gives bit for bit the losses of full passes on this microbatch (theta settled)."""
    if differences.prefix is None:
        return True
    with _turned_off(differences, "prefix"):
        without = _settled_losses(differences, microbatch, direction)
    try:
        with_reuse = _settled_losses(differences, microbatch, direction)
    except (RuntimeError, LookupError, TypeError, ValueError):
        return False
    return _equal(with_reuse, without)


def _turned_off(
    differences: FiniteDifferences, name: str
) -> contextlib.AbstractContextManager[None]:
    """differences.prefix or differences.visits is None inside."""
    return _replaced(differences, name, None)


@contextlib.contextmanager
def _replaced(differences: FiniteDifferences, name: str, other: Any) -> Iterator[None]:
    """An attribute of `differences` is another inside."""
    value = getattr(differences, name)
    setattr(differences, name, other)
    try:
        yield
    finally:
        setattr(differences, name, value)


def _settled_losses(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> Tensor:
    """Losses at both signs, float32 [2, B]; the parameters are at theta afterwards."""
    try:
        return torch.stack([part[:, 0] for part in differences.losses([microbatch], [direction])])
    finally:
        differences.space.settle_()
