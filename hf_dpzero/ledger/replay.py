"""The update that a release makes, and the rebuilding of trained weights from a trajectory.

Training and replay both go through `apply_release`, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.ledger.update_rules import Release
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace


def space_from_header(model: nn.Module, header: Mapping[str, Any]) -> ParameterSpace:
    """The parameter space that a trajectory's releases act on.

    Args:
      model: its trainable parameters make the space.
      header: of the trajectory.

    Returns:
      The space, with the header's direction, smoothing and decayed tensors.
    """
    return ParameterSpace.from_model(
        model,
        distribution=header["direction"],
        smoothing=header["smoothing"],
        decayed=header["decayed"],
    )


def directions_of(step: int, header: Mapping[str, Any]) -> list[Direction]:
    """The K public directions of a step, in order.

    Args:
      step: from 0.
      header: of the trajectory; holds the direction key, K, and how many steps directions are held for.

    Returns:
      K directions, numbered by step // hold.
    """
    key, number = int(header["direction_key"], 16), step // held_for(header)
    return [Direction(key, number, k) for k in range(int(header["num_directions"]))]


def held_for(header: Mapping[str, Any]) -> int:
    """Steps that share their directions; 1 where a header says nothing."""
    return int(header["hold_direction_for"]) if "hold_direction_for" in header else 1


def apply_release(
    space: ParameterSpace, trajectory: Trajectory, release: Release, defer: bool = False
) -> None:
    """One public update: theta <- (1 - lr wd) theta + sum_{s,k} c_{s,k} u_{s,k}.

    The header's update rule gives the terms; for sgd, -lr value_k along the K directions of this step
    (DPZero, Algorithm 2, line 3). Post-processing of the releases.

    Args:
      space: the parameters.
      trajectory: holds the release and those before it.
      release: of the step whose update is made.
      defer: as in `ParameterSpace.step_`.
    """
    header = trajectory.header
    terms, hold = trajectory.update_terms(release.step), held_for(header)
    key, decay = int(header["direction_key"], 16), release.learning_rate * header["weight_decay"]
    update: dict[Direction, float] = {}
    for term in terms:  # steps that share a direction add up along it
        direction = Direction(key, term.step // hold, term.query)
        update[direction] = update.get(direction, 0.0) + term.coefficient
    ages = None if hold == 1 else [release.step - hold * u.step for u in update]
    space.step_(list(update), list(update.values()), decay=decay, defer=defer, ages=ages)


def replay(model: nn.Module, trajectory: Trajectory, upto: int | None = None) -> None:
    """Rebuilds the trained weights in place from the base model and the public log, bit for bit.

    Args:
      model: the base model, as it was before training (its digest is checked).
      trajectory: a replayable log.
      upto: stop before this step; None for the end.

    Raises:
      LedgerError: another base model, other trainable tensors, or a log that cannot be replayed.
    """
    header = trajectory.header
    if not header["replayable"]:
        raise LedgerError(
            "this run released whole vectors, not numbers along public directions "
            "(dpgd-0th and first-order methods do), so its log cannot rebuild the weights: use the "
            "saved ones."
        )
    if digest_model(model) != header["base_model_digest"]:
        raise LedgerError(
            "this model is not the base that the trajectory was trained from (its digest differs): "
            "load the base model in the same dtype, with the same head and adapters. The recipe.yaml "
            "that the run wrote beside its trajectory holds every setting: give it as the base."
        )
    trained = set(header["trainable"])
    if missing := trained - {name for name, _ in model.named_parameters()}:
        raise LedgerError(f"the model lacks the trained tensors {sorted(missing)[:5]}.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    space = space_from_header(model, header)
    space.snap_()
    for release in trajectory.releases:
        if upto is not None and release.step >= upto:
            break
        apply_release(space, trajectory, release)
