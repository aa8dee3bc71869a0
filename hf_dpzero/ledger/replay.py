r"""What releases make of the weights: update rules, one update, and the replay of a whole log.

Training and replay both go through `apply_release`, so they cannot differ.

Step t releases K noised scalars v_{t,k} along public directions u_{t,k}, and v_{t,k} u_{t,k} summed
over k is its estimate g_t of the gradient (Zhang et al. 2024, arXiv:2310.09639, Algorithm 2). A rule
turns the releases of steps 0 .. t into the update

    theta <- theta + sum_{s, k} c_{s,k} u_{s,k},        c_{s,k} = -lr_t w_{t,s} v_{s,k},   s <= t,

so momentum needs no d-vector: the directions of the last W steps are generated again, which costs
W K directions instead of K in the pass that makes the update.

Privacy: post-processing, and therefore free. A rule reads released values, the learning rate and
K, and nothing else: not the batch, not a loss, not a weight.

Replay and resume: an update is a pure function of the releases up to its step. The results agree to
the last bit on all machines because the arithmetic is + and * alone (powers, exponentials and
Python's own `sum` do not agree).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.ledger.trajectory import Release, Trajectory
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace

NEGLIGIBLE = 1e-2
"""The default window ends where a release's weight falls to this share of its first weight."""


class Term(NamedTuple):
    """c_{s,k}: by how much the update follows the direction of `step` and `query`."""

    step: int
    query: int
    coefficient: float


UPDATE_RULES = ("sgd", "momentum")


@dataclass(frozen=True)
class UpdateRule:
    """An optimiser on released scalars.

    "sgd" has w_{t,t} = 1: the update of Algorithm 2, line 3. "momentum" is the heavy ball (Polyak,
    1964), m_t = beta m_{t-1} + g_t and theta <- theta - lr_t m_t: w_{t,s} = beta^(t-s), cut off after W
    steps. As in `torch.optim.SGD` there is no factor 1 - beta: with a gradient that lasts, a step is
    1/(1 - beta) times as long as sgd's.

    Attributes:
      name: of `UPDATE_RULES`.
      momentum: beta in [0, 1); sgd has none.
      window: W >= 1. None takes the smallest W with beta^W <= 1e-2: what is cut off is at most 1 %
        of the weight, and W is 44 for beta = 0.9.

    Raises:
      ValueError: an unknown name, or a setting out of range.

    >>> UpdateRule("momentum").to_dict(), UpdateRule().to_dict()
    ({'name': 'momentum', 'momentum': 0.9, 'window': 44}, {'name': 'sgd'})
    """

    name: str = "sgd"
    momentum: float = 0.9
    window: int | None = None

    def __post_init__(self) -> None:
        if self.name not in UPDATE_RULES:
            raise ValueError(
                f"update_rule={self.name!r} is unknown; use one of {', '.join(UPDATE_RULES)}."
            )
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum={self.momentum} must be at least 0 and below 1.")
        window = default_window(self.momentum) if self.window is None else self.window
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(
                f"update_window={window!r} must be an integer of at least 1, or None for the "
                "smallest that leaves out weights of at most 1 %."
            )
        # equal updates make equal rules, and equal headers: 0 and 0.0 are one beta
        beta, window = (0.0, 1) if self.name == "sgd" else (float(self.momentum), window)
        object.__setattr__(self, "momentum", beta)
        object.__setattr__(self, "window", window)

    def weights(self, step: int) -> list[float]:
        """w_{t,t}, w_{t,t-1}, ... of step t: 1, beta, beta^2, ...; min(t + 1, W) of them.

        Each is the one before it times beta, since powers differ between machines.
        """
        assert self.window is not None
        powers = [1.0]
        while len(powers) < min(step + 1, self.window):
            powers.append(powers[-1] * self.momentum)
        return powers

    def to_dict(self) -> dict[str, str | float | None]:
        """Returns the fields that count, JSON-safe, for the header."""
        return {"name": "sgd"} if self.name == "sgd" else dataclasses.asdict(self)


def default_window(momentum: float) -> int:
    """The smallest W >= 1 with momentum^W <= 1e-2.

    >>> [default_window(beta) for beta in (0.0, 0.5, 0.9, 0.99)]
    [1, 7, 44, 459]
    """
    if momentum <= NEGLIGIBLE:
        return 1
    return math.ceil(math.log(NEGLIGIBLE) / math.log(momentum))


def update_terms(
    rule: UpdateRule, num_directions: int, releases: Sequence[Release], step: int
) -> list[Term]:
    """The terms of the update of `step`, the newest release first; finite.

    Args:
      rule: the run's.
      num_directions: K; further values of a record, such as a clip's count, are not coefficients.
      releases: those of a run from step 0 on, at least up to `step`; later ones are not read.
      step: t, also the release's place in the list.

    Returns:
      All K terms of step t, and those of the W - 1 steps before that are not zero.
    """
    rate, terms = -releases[step].learning_rate, []
    for age, weight in enumerate(rule.weights(step)):
        for query, value in enumerate(releases[step - age].values[:num_directions]):
            coefficient = rate * (weight * value)
            # A zero of an older step moves nothing; the present one is a step even where it is zero.
            if coefficient or age == 0:
                terms.append(Term(step - age, query, coefficient))
    return terms


def terms_of(trajectory: Trajectory, step: int) -> list[Term]:
    """Returns what the update of `step` is made of, by the rule that the header names.

    Raises:
      LedgerError: the step was not released, or no rule of that name is known.
    """
    if not 0 <= step < len(trajectory.appended):
        raise LedgerError(
            f"step {step} has no update: the last release is of {trajectory.next_step - 1}."
        )
    try:
        rule = UpdateRule(**trajectory.header["update_rule"])
    except (TypeError, ValueError) as error:
        raise LedgerError(f"the header's {error}") from None
    return update_terms(rule, trajectory.num_directions, trajectory.appended, step)


def space_from_header(model: nn.Module, header: Mapping[str, Any]) -> ParameterSpace:
    """The parameter space that a trajectory's releases act on.

    Returns:
      The space, with the header's direction, smoothing and decayed tensors.
    """
    settings = {"smoothing": header["smoothing"], "decayed": header["decayed"]}
    return ParameterSpace.from_model(model, distribution=header["direction"], **settings)


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
    return int(header.get("hold_direction_for", 1))


def apply_release(
    space: ParameterSpace, trajectory: Trajectory, release: Release, defer: bool = False
) -> None:
    """One public update: theta <- (1 - lr wd) theta + sum_{s,k} c_{s,k} u_{s,k}.

    The header's update rule gives the terms; for sgd, -lr value_k along the K directions of this step
    (DPZero, Algorithm 2, line 3). Post-processing of the releases.
    """
    trajectory.wait()  # whoever sees the weights sees the release
    header, hold = trajectory.header, held_for(trajectory.header)
    key, decay = int(header["direction_key"], 16), release.learning_rate * header["weight_decay"]
    update: dict[Direction, float] = {}
    for term in terms_of(trajectory, release.step):  # steps that share a direction add up along it
        direction = Direction(key, term.step // hold, term.query)
        update[direction] = update.get(direction, 0.0) + term.coefficient
    ages = None if hold == 1 else [release.step - hold * u.step for u in update]
    space.step_(list(update), list(update.values()), decay=decay, defer=defer, ages=ages)


def replay(
    model: nn.Module,
    trajectory: Trajectory,
    upto: int | None = None,
    average_last: int | None = None,
) -> None:
    """Rebuilds the trained weights in place from the base model and the public log, bit for bit.

    Args:
      model: the base model, as it was before training (its digest is checked).
      trajectory: a replayable log.
      upto: stop before this step; None for the weights that were shipped with the log.
      average_last: N, the mean of the weights after each of the last N steps, all post-processing of
        the log; 1 for the last alone; None for what was shipped with the log. More than one needs 8
        bytes more for each trained parameter: sums are float64, where those of float32 weights on
        their grids are exact.

    Raises:
      LedgerError: another base model, other trainable tensors, a log that cannot be replayed, or one
        of fewer steps than are to be averaged.
    """
    header = trajectory.header
    upto = trajectory.shipped_step if upto is None else upto
    releases = trajectory.releases[:upto]
    count = trajectory.average_last if average_last is None else average_last
    if not isinstance(count, int) or not 1 <= count <= max(len(releases), 1):
        raise LedgerError(
            f"average_last={count} must be between 1 (the last weights alone) and the "
            f"{len(releases)} steps that made these weights."
        )
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
    space.snap_()  # training starts on the grid of representable steps, and so must its repetition
    averaged = space.tensors if count > 1 else []
    sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in averaged]
    with torch.no_grad():
        for release in releases:
            apply_release(space, trajectory, release)
            if release.step >= len(releases) - count:
                for total, tensor in zip(sums, averaged, strict=True):
                    total += tensor
        for total, tensor in zip(sums, averaged, strict=True):
            tensor.copy_(total / count)
