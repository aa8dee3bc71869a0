r"""Optimisers on the released scalars: what an update is made of, given all that is public so far.

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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

NEGLIGIBLE = 1e-2
"""The default window ends where a release's weight falls to this share of its first weight."""


class Release(NamedTuple):
    """What one step made public.

    Attributes:
      step: from 0.
      values: the K noised means, each a float32 number, and what else the step released (the share of
        unclipped examples that an adaptive clip follows); no means for a mechanism that cannot be
        replayed (DPGD-0th releases a d-vector, which only the weights hold).
      learning_rate: of this step.
    """

    step: int
    values: tuple[float, ...]
    learning_rate: float


class Term(NamedTuple):
    """c_{s,k}: by how much the update follows the direction of `step` and `query`."""

    step: int
    query: int
    coefficient: float


@dataclass(frozen=True, kw_only=True)
class UpdateRule(ABC):
    """An optimiser on released scalars. A new one is a dataclass and a row in `UPDATE_RULES`."""

    name: ClassVar[str]

    @property
    def length(self) -> int:
        """W >= 1: how many of the last releases an update is made of."""
        return 1

    @abstractmethod
    def weights(self, count: int) -> list[float]:
        """w_{t,s} for the last `count` = min(t + 1, W) steps s, oldest first."""

    def to_dict(self) -> dict[str, Any]:
        """Name and fields, JSON-safe, for the header; `update_rule_from_dict` reads it back."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """w_{t,t} = 1: the update of Algorithm 2, line 3."""

    name: ClassVar[str] = "sgd"

    def weights(self, count: int) -> list[float]:
        """1 for the present release."""
        return [1.0]


@dataclass(frozen=True, kw_only=True)
class Momentum(UpdateRule):
    """Heavy ball (Polyak, 1964): m_t = beta m_{t-1} + g_t, theta <- theta - lr_t m_t.

    w_{t,s} = beta^(t-s), cut off after W steps. As in `torch.optim.SGD` there is no factor
    1 - beta: with a gradient that lasts, a step is 1/(1 - beta) times as long as sgd's.

    Attributes:
      momentum: beta in [0, 1).
      window: W >= 1. None takes the smallest W with beta^W <= 1e-2: what is cut off is at most 1 %
        of the weight, and W is 44 for beta = 0.9.
    """

    momentum: float = 0.9
    window: int | None = None

    name: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", float(self.momentum))
        _check_fraction("momentum", self.momentum)
        if self.window is None:
            object.__setattr__(self, "window", default_window(self.momentum))
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(
                f"update_window={self.window!r} must be an integer of at least 1, or None for the "
                "smallest that leaves out weights of at most 1 %."
            )

    @property
    def length(self) -> int:
        """W."""
        assert self.window is not None
        return self.window

    def weights(self, count: int) -> list[float]:
        """beta^(count - 1), ..., beta, 1, each the one after it times beta."""
        powers = [1.0]
        while len(powers) < count:
            powers.append(powers[-1] * self.momentum)
        return powers[::-1]


UPDATE_RULES: dict[str, type[UpdateRule]] = {rule.name: rule for rule in (SGD, Momentum)}


def make_update_rule(name: str, momentum: float = 0.9, window: int | None = None) -> UpdateRule:
    """The rule of that name; sgd takes neither setting.

    Args:
      name: a key of `UPDATE_RULES`.
      momentum: beta of `momentum`, in [0, 1).
      window: W >= 1; None for the smallest with momentum^W <= 1e-2.

    Returns:
      The rule.

    Raises:
      ValueError: an unknown name, or a setting out of range.

    >>> make_update_rule("momentum").to_dict()
    {'name': 'momentum', 'momentum': 0.9, 'window': 44}
    """
    settings = {} if name == SGD.name else {"momentum": momentum, "window": window}
    return update_rule_from_dict({"name": name, **settings})


def update_rule_from_dict(values: Mapping[str, Any]) -> UpdateRule:
    """Inverse of `to_dict`; an unknown name and unknown keys are errors.

    >>> update_rule_from_dict({"name": "sgd"})
    SGD()
    """
    settings = dict(values)
    name = settings.pop("name", None)
    if name not in UPDATE_RULES:
        raise ValueError(f"update_rule={name!r} is unknown; use one of {', '.join(UPDATE_RULES)}.")
    known = {field.name for field in dataclasses.fields(UPDATE_RULES[name])}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"update_rule {name} has no {unknown}; it has {sorted(known)}.")
    return UPDATE_RULES[name](**settings)


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
    weights = rule.weights(min(step + 1, rule.length))
    rate, terms = -releases[step].learning_rate, []
    for age, weight in enumerate(reversed(weights)):
        for query, value in enumerate(releases[step - age].values[:num_directions]):
            coefficient = rate * (weight * value)
            if coefficient or age == 0:
                terms.append(Term(step - age, query, coefficient))
    return terms


def _check_fraction(field: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{field}={value} must be at least 0 and below 1.")
