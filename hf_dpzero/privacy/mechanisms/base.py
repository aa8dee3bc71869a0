"""What all mechanisms share: what they state, neighbouring relations, checks of fields, JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

Relation = Literal["add_or_remove_one", "replace_one", "replace_special"]
RELATIONS: tuple[Relation, ...] = ("add_or_remove_one", "replace_one", "replace_special")

MIN_NOISE_MULTIPLIER = 2.0**-10
MAX_NOISE_MULTIPLIER = 2.0**25
MAX_CLIP = 2.0**64

LATER = {"omitted_at_default": True}
"""Metadata of a field added to a class that was already in use: `to_dict` leaves it out while it
has its default, so that the digests of the plans written before it still hold."""

M = TypeVar("M")
B = TypeVar("B", bound="MechanismBase")


class MechanismBase:
    """What every mechanism says about itself; subclasses are frozen dataclasses.

    Moves of the sum are counted in clips, that is, relative to C.

    Attributes:
      name: the method, and the key in the registry.
      replayable: whether the weights follow from what a run writes down.
      distribution: "gaussian", "laplace" or "none".
      sensitivity_add_remove: the largest move of the sum, over C, when one example appears or vanishes.
      sensitivity_replace: the same when one example is exchanged for another.
      noise_draws: coordinates of a step that receive discrete noise (1 where it is dense).
    """

    name: ClassVar[str]
    replayable: ClassVar[bool]
    sensitivity_add_remove: ClassVar[int] = 1
    sensitivity_replace: ClassVar[int] = 2

    def at(self: B, past: Sequence[tuple[float, ...]]) -> B:
        """The mechanism of the step that follows the releases `past`: itself, unless it adapts."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Fields and name, JSON-safe; `mechanism_from_dict` reads it back.

        Fields marked `LATER` are left out while they have their default.
        """
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        omitted = {
            f.name for f in fields if f.metadata == LATER and getattr(self, f.name) == f.default
        }
        values = {f.name: getattr(self, f.name) for f in fields if f.name not in omitted}
        return {"name": self.name, **values}

    @classmethod
    def from_dict(cls: type[B], values: Mapping[str, Any]) -> B:
        """Inverse of `to_dict`; unknown keys are errors."""
        given = {k: v for k, v in values.items() if k != "name"}
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(set(given) - known):
            raise ValueError(f"{cls.__name__} has no fields {unknown}; it has {sorted(known)}.")
        return cls(**given)


class NoisedSum(MechanismBase):
    """A sum of bounded contributions with noise: DP unless the noise multiplier is 0.

    Attributes:
      clip: C, the bound of one example's contribution.
      noise_multiplier: sigma; 0 releases without noise and is not private.
      expected_batch_size: B, public.
    """

    clip: float
    noise_multiplier: float
    expected_batch_size: float

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the accounting idealises; for the report."""
        return ()

    def _check_sum(self) -> None:
        """Makes the three fields floats and refuses values out of range."""
        as_floats(self, "clip", "noise_multiplier", "expected_batch_size")
        check_clip(self.clip)
        check_noise_multiplier(self.noise_multiplier)
        check_batch(self.expected_batch_size)

    @property
    def private(self) -> bool:
        """True if noise is added at all."""
        return self.noise_multiplier > 0

    @property
    def noise_scale(self) -> float:
        """Noise scale on the sum, sigma * C, in the units of `clip`."""
        return self.noise_multiplier * self.clip

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise scale of the one Gaussian (Laplace) that a step amounts to, over the presence move."""
        return self.noise_multiplier / self.sensitivity_add_remove

    @property
    def event_multipliers(self) -> tuple[float, ...]:
        """The same for each part of a step that has noise of its own."""
        return (self.effective_noise_multiplier,)

    def sensitivity(self, relation: Relation) -> float:
        """Largest move of the sum over neighbouring data sets, in the units of `clip`."""
        factor = sensitivity_factor(relation, self.sensitivity_add_remove, self.sensitivity_replace)
        return self.clip * factor


class NotNoised(MechanismBase):
    """A plain sum over B: no clip, no noise, no privacy. What is not finite counts as zero.

    Attributes:
      expected_batch_size: B, the divisor.
      private_counterpart: the method to use where privacy is wanted.
    """

    expected_batch_size: float

    private_counterpart: ClassVar[str]
    private: ClassVar[bool] = False
    clip: ClassVar[float] = math.inf
    noise_multiplier: ClassVar[float] = 0.0
    effective_noise_multiplier: ClassVar[float] = 0.0
    event_multipliers: ClassVar[tuple[float, ...]] = ()
    noise_scale: ClassVar[float] = 0.0
    noise_draws: ClassVar[int] = 0
    distribution: ClassVar[str] = "none"

    def _check_sum(self) -> None:
        as_floats(self, "expected_batch_size")
        check_batch(self.expected_batch_size)

    @property
    def caveats(self) -> tuple[str, ...]:
        """That it is not private."""
        return (f"method {self.name} is not private",)

    def sensitivity(self, relation: Relation) -> float:
        """Infinite: nothing bounds what one example does."""
        return math.inf * sensitivity_factor(relation)


def sensitivity_factor(relation: Relation, add_remove: int = 1, replace: int = 2) -> int:
    """Sensitivity under `relation`, in clipping norms.

    Args:
      relation: replace_special counts as adding or removing: the special example contributes zero.
      add_remove: sensitivity when one example is added or removed.
      replace: sensitivity when one example is replaced by another.

    Returns:
      One of the two.

    Raises:
      ValueError: an unknown relation.

    >>> sensitivity_factor("add_or_remove_one"), sensitivity_factor("replace_one")
    (1, 2)
    """
    if relation not in RELATIONS:
        raise ValueError(f"relation={relation!r} is unknown; use one of {RELATIONS}.")
    return replace if relation == "replace_one" else add_remove


def floating_point_caveat(name: str) -> str:
    """What a report says of dense noise."""
    return (
        f"{name} adds floating-point Gaussian noise, which the accounting treats as real-valued; "
        "attacks on floating-point noise (Mironov 2012) are not excluded"
    )


def as_floats(mechanism: Any, *fields: str) -> None:
    """Stores 64 as 64.0, so that equal mechanisms have equal JSON and equal digests."""
    for field in fields:
        object.__setattr__(mechanism, field, float(getattr(mechanism, field)))


def check_clip(clip: float) -> None:
    """ValueError unless 2^-64 <= clip <= 2^64."""
    if not (1 / MAX_CLIP <= clip <= MAX_CLIP):
        raise ValueError(
            f"clip={clip} must be finite and positive (between 2^-64 and 2^64); "
            "use method mezo (NonPrivateMean) to train without clipping."
        )


def check_noise_multiplier(sigma: float, name: str = "noise_multiplier") -> None:
    """ValueError unless sigma is 0 or in [2^-10, 2^25]."""
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"{name}={sigma} must be finite and >= 0.")
    if sigma > 0 and not MIN_NOISE_MULTIPLIER <= sigma <= MAX_NOISE_MULTIPLIER:
        raise ValueError(
            f"{name}={sigma} is outside [2^-10, 2^25], where the discrete noise on the "
            "grid is accounted as Gaussian; use 0 for no noise, or a larger (smaller) multiplier."
        )


def check_batch(expected_batch_size: float) -> None:
    """ValueError unless the public divisor is finite and positive."""
    if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
        raise ValueError(
            f"expected_batch_size={expected_batch_size} must be finite and positive; "
            "it is the public divisor of every release."
        )


def check_count(name: str, value: int) -> None:
    """ValueError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an integer.")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1.")
