"""Where directions may point: everywhere, or to low-rank matrices.

A subspace is public and costs no privacy: it is a function of the direction key and of settings in
the header of the log.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from hf_dpzero.perturbation.low_rank_subspace import LowRankSpace, check_rank
from hf_dpzero.perturbation.parameter_space import ParameterSpace


@dataclass(frozen=True)
class Subspace(ABC):
    """A choice of directions. A new one is a dataclass and an entry of `SUBSPACES`."""

    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; `subspace_from_dict` undoes it."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @abstractmethod
    def space_of(self, model: nn.Module, **settings: Any) -> ParameterSpace:
        """The space of the model's trainable parameters; settings as for `ParameterSpace`."""


@dataclass(frozen=True)
class Full(Subspace):
    """All coordinates, each on its own."""

    name: ClassVar[str] = "full"

    def space_of(self, model: nn.Module, **settings: Any) -> ParameterSpace:
        """An ordinary `ParameterSpace`."""
        return ParameterSpace.from_model(model, **settings)


@dataclass(frozen=True)
class LowRank(Subspace):
    """Matrices of low rank, with one factor held for some steps (see `low_rank_subspace`).

    Attributes:
      rank: r, 1 to 256.
      hold: v, steps that V is held, at least 1.
    """

    rank: int = 4
    hold: int = 50
    name: ClassVar[str] = "low_rank"

    def __post_init__(self) -> None:
        check_rank(self.rank, self.hold)

    def space_of(self, model: nn.Module, **settings: Any) -> LowRankSpace:
        """A `LowRankSpace`."""
        return LowRankSpace.from_model(model, rank=self.rank, hold=self.hold, **settings)


SUBSPACES: dict[str, type[Subspace]] = {kind.name: kind for kind in (Full, LowRank)}


def subspace_from_dict(found: Mapping[str, Any] | None) -> Subspace:
    """The subspace of a log's header; None, a header that names none, is the full one.

    Raises:
      ValueError: an unknown name or setting, or a setting out of range.

    >>> subspace_from_dict({"name": "low_rank", "rank": 8})
    LowRank(rank=8, hold=50)
    """
    settings = {"name": Full.name} if found is None else dict(found)
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
