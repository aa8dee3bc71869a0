"""Chooses the strategy before training: it, and the frozen prefix, must give the losses of full passes.

The very losses are the same bits; for `stacked`, whose kernels round in another order, the same to
`STACKED_TOLERANCE`. Losses that hide what they are made of, such as 0/1 losses, are compared by their
objective's `comparison_loss` (see `objectives.losses.comparison_loss`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.estimators.finite_differences import FiniteDifferences, Microbatch
from hf_dpzero.estimators.layerwise import ModuleVisits
from hf_dpzero.estimators.stacked import AUTO_FLOATS, small_enough
from hf_dpzero.objectives.losses import comparison_loss, is_compiled, single_pass
from hf_dpzero.perturbation.directions import Direction

STACKED_TOLERANCE = 1e-5
"""Largest difference of a loss under `stacked`, relative to the trial batch's largest loss, or to 0.1
if all are below: the rounding of logits does not shrink with the loss."""

_TRIAL_ERRORS = (RuntimeError, LookupError, TypeError, ValueError)
"""What a trial may raise where a strategy or the prefix does not fit the model."""


def choose_strategy(
    differences: FiniteDifferences,
    microbatch: Microbatch,
    direction: Direction,
    num_directions: int = 1,
    public: bool = True,
    may_stack: bool = True,
) -> list[str]:
    """Tries the strategy and the frozen prefix on a microbatch; turns off what is not exact.

    Where "auto" stands for `whole_model`, goes over to `stacked` if that pays (see `stacked`) and it
    passes. Nothing is released; the parameters are at theta before and after.

    Args:
      differences: of the run to come; changed in place.
      microbatch: a few examples.
      direction: any; both its signs are tried.
      num_directions: K of the steps to come; 1 never stacks by itself.
      public: whether the microbatch is. Private rows choose nothing: the bits of all others follow from
        the choice. They may only refuse it, and "auto" does not stack.
      may_stack: False in low precision, where no trial says how stacked kernels round a row.

    Returns:
      What was turned off and why, for a log; [] if nothing was.

    Raises:
      ValueError: the strategy that was asked for by name is not exact for this model; or, with private
        rows, whatever is not exact.
    """
    messages = []
    if differences.stack is not None and not public:
        differences.stack.one_copy_a_pass()
    reason = inexactness(differences, microbatch, direction)
    if reason is not None:
        if differences.visits is not None and differences.visits.arriving:
            raise ValueError(
                f"the model is offloaded, and strategy='layerwise' {reason}; name the class of the "
                "module that reads it in Accelerate's preload_module_classes, or load the model without "
                "offload."
            )
        if not (differences.chosen_automatically and public):
            raise ValueError(f"strategy={differences.strategy!r} {reason}; use 'whole_model'.")
        messages.append(f"the strategy is whole_model: {differences.strategy} {reason}.")
        differences.use("whole_model")
    automatic = differences.chosen_automatically and differences.strategy == "whole_model"
    if (
        automatic
        and public
        and may_stack
        and single_pass(differences.objective)
        and not is_compiled(differences.model)
        and not differences.space.sharded
        and small_enough(differences.space, num_directions, differences.forward)
    ):
        differences.use("stacked")
        assert differences.stack is not None
        failed = inexactness(differences, microbatch, direction) is not None
        if failed or (differences.stack.floats_per_example or 0.0) > AUTO_FLOATS:
            differences.use("whole_model")
    if not prefix_is_exact(differences, microbatch, direction):
        if not public:
            raise ValueError(
                "the frozen first layers do not give the same losses when they are reused: set "
                "performance.reuse_frozen_prefix=False, or pass a public eval_dataset that can tell."
            )
        messages.append(
            "performance.reuse_frozen_prefix is off: it would not be exact for this model."
        )
        differences.prefix = None
    return messages


def unmeasured(differences: FiniteDifferences, device: str, num_directions: int) -> list[str]:
    """Says in a line which choices rest on a CPU's measurements or an estimate where a GPU computes.

    [] where all was measured: on a CPU (type of `device`), and in bfloat16 on an H100.
    """
    visits, automatic = differences.visits, differences.chosen_automatically
    stacks = automatic and small_enough(differences.space, num_directions, differences.forward)
    wide = all(p.dtype == torch.float32 for p in differences.model.parameters())
    named = [
        (stacks, f"strategy {differences.strategy} (by hand: performance.perturbation_strategy)"),
        (visits is not None and bool(visits.arriving), "what offloaded weights cost a pass"),
        (wide, "rows of a float32 pass (by hand: microbatch_size)"),
    ]
    choices = [choice for applies, choice in named if applies and device != "cpu"]
    return [f"chosen and never measured on a GPU: {', '.join(choices)}."] if choices else []


def inexactness(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> str | None:
    """Says what is wrong with the strategy in use on this microbatch.

    Args:
      differences: with theta settled, before and after.
      microbatch: a few examples.
      direction: any; both its signs are tried.

    Returns:
      None if the losses are those of `whole_model` (see the module).
    """
    visits, stack = differences.visits, differences.stack
    if visits is None and stack is None:
        return None
    # The yardstick is whole_model where that takes no copy of the weights. In half precision and with
    # offload it is layerwise: what is read outside its module's forward is theta there and NaN in the
    # trial, so the two agree only if nothing is.
    space = differences.space
    wide = all(tensor.dtype == torch.float32 for tensor in space.tensors)
    wide = wide and not (visits is not None and visits.arriving)
    reference = None if wide else ModuleVisits(differences.model, space)
    with _replaced(differences, prefix=None):
        with _replaced(differences, visits=reference, stack=None):
            expected = _settled_losses(differences, microbatch, direction)
        if visits is not None:
            visits.visited.clear()
        try:
            # NaN outside its module's forward: no read there goes unnoticed, however little it matters
            with poisoned_tensors(space.tensors):
                losses = _settled_losses(differences, microbatch, direction)
        except _TRIAL_ERRORS as error:  # its kind alone is reported: its text may hold rows
            failure = f"fails on a trial batch ({type(error).__name__})"
            return failure if stack is None else f"{failure}: {_VMAP_LIMITS}"
    if visits is None:
        return None if _close(losses, expected) else _STACKED_DIFFERENCE
    if _equal(losses, expected):
        return None
    never_visited = [n for i, n in enumerate(space.names) if i not in visits.visited]
    if differences.chosen_automatically or not never_visited:
        return f"{_DIFFERENCE}: a parameter is read outside its module's forward"
    return (
        f"{_DIFFERENCE}: these were read outside their module's forward, or not at all: "
        + ", ".join(never_visited)
    )


_DIFFERENCE = "does not give the losses of full perturbation on a trial batch"
_STACKED_DIFFERENCE = (
    f"gives other losses than full perturbation on a trial batch (beyond {STACKED_TOLERANCE} "
    "relative): a parameter is read by another way than as an attribute of its module, or a result "
    "is rounded to less than float32"
)
_VMAP_LIMITS = (
    "torch.func.vmap takes no random numbers, no writes into shared tensors or parameters, no Python "
    "decisions on a loss, logit or weight, and not every custom kernel"
)


@contextlib.contextmanager
def poisoned_tensors(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the tensors are NaN (which takes no memory); their values come back on exit.

    A read of them that the strategy does not serve from a perturbed copy then shows in the losses.
    """
    values = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            nan = tensor.new_full((), torch.nan, requires_grad=False)
            tensor.data = nan.expand(tensor.shape)
        yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data = value


def _equal(losses: Tensor, expected: Tensor) -> bool:
    """Bit for bit, NaN being equal to NaN: one row's NaN loss decides nothing."""
    return torch.equal(losses.isnan(), expected.isnan()) and torch.equal(
        losses.nan_to_num(), expected.nan_to_num()
    )


def _close(losses: Tensor, expected: Tensor) -> bool:
    """Within `STACKED_TOLERANCE`, and equal where a loss is not finite."""
    finite = expected.isfinite()
    if not _equal(losses[~finite], expected[~finite]):
        return False
    losses, expected = losses[finite], expected[finite]
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((losses - expected).abs() <= STACKED_TOLERANCE * max(0.1, scale)).all())


def prefix_is_exact(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> bool:
    """Whether reuse of the prefix gives bit for bit the losses of full passes on this microbatch.

    Args:
      differences: with theta settled, before and after.
      microbatch: a few examples.
      direction: any; both its signs are tried.

    Returns:
      True also where no prefix is reused.
    """
    if differences.prefix is None:
        return True
    with _replaced(differences, prefix=None):
        without = _settled_losses(differences, microbatch, direction)
    try:
        return _equal(_settled_losses(differences, microbatch, direction), without)
    except _TRIAL_ERRORS:
        return False


@contextlib.contextmanager
def _replaced(differences: FiniteDifferences, **others: Any) -> Iterator[None]:
    """Attributes of `differences` are others inside."""
    values = {name: getattr(differences, name) for name in others}
    vars(differences).update(others)
    try:
        yield
    finally:
        vars(differences).update(values)


def _settled_losses(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> Tensor:
    """The trial's losses at both signs, float32 [2, B]; the parameters are at theta afterwards."""
    try:
        with _replaced(differences, objective=comparison_loss(differences.objective)):
            losses = differences.losses([microbatch], [direction])
        return torch.stack([part[:, 0] for part in losses])
    finally:
        differences.space.settle_()
