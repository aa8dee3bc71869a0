"""What the parts of a plan share: a name, JSON that reads back, the check of a count, a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

D = TypeVar("D")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A part of a plan that its name and fields describe.

    Attributes:
      name: the key in the table of its kind, and in settings.
    """

    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns name and fields, JSON-safe; `read` is the inverse."""
        # Lists in place of tuples: a description equals the one that comes back from a file.
        fields = {
            k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()
        }
        return {"name": self.name, **fields}


def read(kinds: Mapping[str, type[D]], what: str, values: Mapping[str, object]) -> D:
    """Makes the part that `Described.to_dict` described.

    Args:
      kinds: name -> class.
      what: what a name is a name of, for messages.
      values: a description; lists stand for tuples.

    Raises:
      ValueError: an unknown name, an unknown field, or one that is missing or out of range.
    """
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    name = str(settings.pop("name", None))
    if name not in kinds:
        raise ValueError(f"{what}={name!r} is unknown; use one of {', '.join(kinds)}.")
    fields = dataclasses.fields(kinds[name])  # type: ignore[arg-type]
    known = sorted(field.name for field in fields)
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"{what} {name!r} has no {unknown[0]!r}; it has {', '.join(known)}.")
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    if not set(needed) <= set(settings):
        raise ValueError(f"{what} {name!r} needs {', '.join(needed)}.")
    return kinds[name](**settings)


def check_count(name: str, value: object, of: str = "") -> None:
    """Refuses what is no integer of at least 1; True is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}{of} must be an integer of at least 1.")


def bisected(
    holds: Callable[[float], bool], low: float, high: float, tolerance: float
) -> tuple[float, float]:
    """Finds where `holds`, which is true below some number and false above it, changes.

    Args:
      holds: asked between `low`, where it is true, and what `high` doubles to while it is true there.
      low, high: where to begin, low < high.
      tolerance: of their distance at the end, relative to high.

    Returns:
      (the largest number found where it holds, the smallest where it does not).

    >>> bisected(lambda x: x * x <= 2.0, 0.0, 1.0, 1e-3)
    (1.4140625, 1.4150390625)
    """
    while holds(high):
        low, high = high, 2 * high
    while high - low > tolerance * high and low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high
