"""Checks before training that a strategy and the frozen prefix give the very losses of full passes.

The very losses are the same bits; for `stacked`, whose kernels round in another order, the same to
`STACKED_TOLERANCE`. Losses that hide what they are made of, such as 0/1 losses, are compared by their
objective's `trial` (see `objectives.trial`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.estimators.finite_differences import FiniteDifferences, Microbatch, evaluation_mode
from hf_dpzero.estimators.layerwise import ModuleVisits
from hf_dpzero.estimators.stacked import AUTO_FLOATS, small_enough
from hf_dpzero.objectives.losses import is_compiled, single_pass, trial
from hf_dpzero.perturbation.directions import Direction

STACKED_TOLERANCE = 1e-5
"""Largest difference of a loss under `stacked`, relative to the trial batch's largest loss, or to 0.1
if all are below: the rounding of logits does not shrink with the loss."""


def make_exact(
    differences: FiniteDifferences,
    microbatch: Microbatch,
    direction: Direction,
    num_directions: int = 1,
) -> list[str]:
    """Tries the strategy and the frozen prefix on a microbatch; turns off what is not exact.

    Where "auto" stands for `whole_model`, goes over to `stacked` if that pays (see `stacked`) and its
    trial passes. Also teaches the prefix what it may forget, under `forget_unread`. Nothing is
    released; the parameters are at theta before and after.

    Args:
      num_directions: K of the steps to come; 1 never stacks by itself.

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
    _stack_if_it_pays(differences, microbatch, direction, num_directions)
    if not _prefix_made_exact(differences, microbatch, direction):
        messages.append("reuse_frozen_prefix is off: it would not be exact for this model.")
        differences.prefix = None
    return messages


def _stack_if_it_pays(
    differences: FiniteDifferences,
    microbatch: Microbatch,
    direction: Direction,
    num_directions: int,
) -> None:
    automatic = differences.chosen_automatically and differences.strategy == "whole_model"
    fits = single_pass(differences.objective) and not is_compiled(differences.model)
    if not automatic or not fits or not small_enough(differences.space, num_directions):
        return
    differences.use("stacked")
    assert differences.stack is not None
    failed = _inexactness(differences, microbatch, direction) is not None
    if failed or (differences.stack.floats_per_example or 0.0) > AUTO_FLOATS:
        differences.use("whole_model")


def strategy_is_exact(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> bool:
    """Whether the strategy in use gives `whole_model`'s losses (theta settled; see the module).

    Meanwhile every trainable parameter is NaN outside its module's forward, so that no read there
    passes unnoticed, however little it would matter.
    """
    return _inexactness(differences, microbatch, direction) is None


def _inexactness(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> str | None:
    """What is wrong with the strategy in use on this microbatch; None if nothing."""
    beside = differences.visits or differences.stack
    if beside is None:
        return None
    with _turned_off(differences, "prefix"):
        yardstick = _replaced(differences, "visits", _yardstick(differences))
        with yardstick, _turned_off(differences, "stack"):
            expected = _settled_losses(differences, microbatch, direction)
        if differences.visits is not None:
            differences.visits.visited.clear()
        try:
            with beside.poisoned():
                found = _settled_losses(differences, microbatch, direction)
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            return _failure(differences, error)
    if differences.stack is not None:
        return None if _close(found, expected) else _STACKED_DIFFERENCE
    if _equal(found, expected):
        return None
    assert differences.visits is not None
    named = () if differences.chosen_automatically else differences.visits.never_visited
    return _difference(named)


def _failure(differences: FiniteDifferences, error: Exception) -> str:
    """The error's kind alone: its text may hold rows."""
    found = f"fails on a trial batch ({type(error).__name__})"
    if differences.stack is None:
        return found
    return (
        f"{found}: torch.func.vmap takes no random numbers, no writes into shared tensors or "
        "parameters, no Python decisions on a loss, logit or weight, and not every custom kernel"
    )


def _equal(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, NaN being equal to NaN: one row's NaN loss decides nothing."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(), expected.nan_to_num()
    )


def _close(found: Tensor, expected: Tensor) -> bool:
    """Within `STACKED_TOLERANCE`, and equal where a loss is not finite."""
    finite = expected.isfinite()
    if not _equal(found[~finite], expected[~finite]):
        return False
    found, expected = found[finite], expected[finite]
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((found - expected).abs() <= STACKED_TOLERANCE * max(0.1, scale)).all())


def _yardstick(differences: FiniteDifferences) -> ModuleVisits | None:
    """What the strategy is compared with: whole_model, where that takes no copy of the weights.

    In half precision it is `layerwise`: what is read outside its module's forward is theta there and
    NaN in the trial, so the two agree only if nothing is.
    """
    space = differences.space
    wide = all(tensor.dtype == torch.float32 for tensor in space.tensors)
    return None if wide else ModuleVisits(differences.model, space)


_STACKED_DIFFERENCE = (
    f"gives other losses than full perturbation on a trial batch (beyond {STACKED_TOLERANCE} "
    "relative): a parameter is read by another way than as an attribute of its module, or a result "
    "is rounded to less than float32"
)


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
    """differences.prefix, .visits or .stack is None inside."""
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
    """The trial's losses at both signs, float32 [2, B]; the parameters are at theta afterwards."""
    try:
        with _replaced(differences, "objective", trial(differences.objective)):
            found = differences.losses([microbatch], [direction])
        return torch.stack([part[:, 0] for part in found])
    finally:
        differences.space.settle_()
