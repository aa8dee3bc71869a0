"""Where directions may point: everywhere, or to low-rank matrices.

A subspace is public and costs no privacy: it is a function of the direction key and of settings in
the header of the log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from hf_dpzero.perturbation.low_rank_subspace import LowRankSpace
from hf_dpzero.perturbation.parameter_space import ParameterSpace


@dataclass(frozen=True)
class Subspace:
    """A choice of directions. A new one is a dataclass, a space and an entry of `SUBSPACES`."""

    name: ClassVar[str]
    space: ClassVar[type[ParameterSpace]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; `subspace_from_dict` undoes it."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def space_of(self, model: nn.Module, **settings: Any) -> ParameterSpace:
        """The space of the model's trainable parameters.

        Args:
          model: its parameters with `requires_grad` are taken.
          settings: as for `ParameterSpace`.

        Returns:
          What moves them.
        """
        return self.space.from_model(model, **dataclasses.asdict(self), **settings)


@dataclass(frozen=True)
class Full(Subspace):
    """All coordinates, each on its own."""

    name: ClassVar[str] = "full"
    space: ClassVar[type[ParameterSpace]] = ParameterSpace


@dataclass(frozen=True)
class LowRank(Subspace):
    """Matrices of low rank, with one factor held for some steps (see `low_rank_subspace`).

    Attributes:
      rank: r, 1 to 256: signs and their products stay exact in any precision.
      hold: v, steps that V is held, at least 1.
    """

    rank: int = 4
    hold: int = 50
    name: ClassVar[str] = "low_rank"
    space: ClassVar[type[ParameterSpace]] = LowRankSpace

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 256:
            raise ValueError(f"subspace_rank={self.rank} must lie in 1 .. 256.")
        if self.hold < 1:
            raise ValueError(f"subspace_steps={self.hold} must be at least 1: how long V is held.")


SUBSPACES: dict[str, type[Subspace]] = {kind.name: kind for kind in (Full, LowRank)}


def subspace_from_dict(given: Mapping[str, Any]) -> Subspace:
    """The subspace of a log's header.

    Raises:
      ValueError: an unknown name or setting, or a setting out of range.

    >>> subspace_from_dict({"name": "low_rank", "rank": 8})
    LowRank(rank=8, hold=50)
    """
    settings = dict(given)
    name = settings.pop("name", None)
    kind = SUBSPACES.get(str(name))
    if kind is None:
        raise ValueError(f"subspace={name!r} is not known; choose one of {', '.join(SUBSPACES)}.")
    known = {field.name for field in dataclasses.fields(kind)}
    if set(settings) - known:
        raise ValueError(
            f"subspace {name!r} has no setting {sorted(set(settings) - known)}; it takes "
            f"{sorted(known)}."
        )
    return kind(**settings)
