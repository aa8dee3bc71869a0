"""A field that knows its range, its use and its cost; checks, messages and docs read them here."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from hf_dpzero.values import nearest

NOTHING = "nothing"


@dataclass(frozen=True)
class Allowed:
    """Values that a setting may have.

    Attributes:
      words: what follows on "must be" in an error.
      holds: of the value, once it is of `kind`; NaN fails every comparison.
      kind: float and int stand for any real number, which an int setting keeps as an int.
      secret: an error does not show the value.
    """

    words: str
    holds: Callable[[Any], bool]
    kind: type = float
    secret: bool = False

    def problem(self, name: str, value: object) -> str:
        """Says what is wrong with a value: what, the value, what it must be; "" if it may stand."""
        kinds = {float: Real, int: Real}.get(self.kind, self.kind)
        # True is a number to Python, and would be taken for 1.
        fits = isinstance(value, kinds) and (self.kind is bool or not isinstance(value, bool))
        if fits and self.holds(value):
            return ""
        return f"{name}{'' if self.secret else f'={value!r}'} must be {self.words}."


POSITIVE = Allowed("a finite number above 0", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Allowed("a finite number of at least 0", lambda x: 0 <= x < math.inf)
SHARE = Allowed("a number in (0, 1)", lambda x: 0 < x < 1)
BELOW_ONE = Allowed("a number in [0, 1)", lambda x: 0 <= x < 1)
COUNT = Allowed("an integer of at least 1", lambda x: 1 <= x < math.inf and x == int(x), int)
TRUTH = Allowed("True or False", lambda x: True, bool)
TEXT = Allowed("a text, or left out", bool, str)
HEX_KEY = Allowed(
    "64 hex digits; leave it out for a secret one",
    lambda x: re.fullmatch("[0-9a-fA-F]{64}", x) is not None, str, secret=True,
)  # fmt: skip


def _bits(number: int) -> Allowed:
    return Allowed(
        f"an integer of at least 0, below 2^{number}",
        lambda x: isinstance(x, Integral) and 0 <= int(x) < 1 << number,
    )


BITS_128, BITS_32 = _bits(128), _bits(32)
PATH = Allowed(
    "a text, or left out",
    lambda x: isinstance(x, str | os.PathLike) and bool(str(x)), object,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What the metadata of a field says.

    Attributes:
      text: what it is for.
      allowed: a range, or the words to choose from; None: text or a mapping that is read elsewhere.
      needs: the setting without which this one has no effect, and its values where it has one.
      privacy: its cost: budget, noise at the same epsilon, or what is published.
      time: and memory.
      none: what None stands for, where that is the default.
    """

    text: str
    allowed: Allowed | tuple[str, ...] | None = None
    needs: tuple[str, tuple[str, ...]] | None = None
    privacy: str = NOTHING
    time: str = NOTHING
    none: str = ""


class _Help(str):
    """Help on a command line that carries its `Setting`.

    Beside the help there is no place: HfArgumentParser hands all metadata of a field to argparse.
    """

    setting: Setting


def setting(
    default: Any, text: str, allowed: Allowed | tuple[str, ...] | None = None, **metadata: Any
) -> Any:
    """Returns a dataclass field with this default; the rest is its `Setting`, all of it its help."""
    made = Setting(text, allowed, **metadata)
    words = allowed.words if isinstance(allowed, Allowed) else ", ".join(allowed or ())
    unset = f"; None: {made.none}" if made.none else ""
    described = _Help(text + unset + (f" ({words})" if words else ""))
    described.setting = made
    return dataclasses.field(default=default, metadata={"help": described})


def settings_of(kind: Any) -> Iterator[tuple[dataclasses.Field[Any], Setting]]:
    """The fields of a dataclass, or of an object of one, that were made by `setting`."""
    for field in dataclasses.fields(kind):
        if isinstance(text := field.metadata.get("help"), _Help):
            yield field, text.setting


def describe(kind: type, parent: type) -> None:
    """Adds a list of the fields that `parent` declares to the docstring of `kind`: what `help` shows."""
    lines = (f"{field.name}: {field.metadata['help']}" for field, _ in settings_of(parent))
    fields = (textwrap.fill(line, 96, subsequent_indent="  ") for line in lines)
    listed = textwrap.indent("\n".join(fields), "  ")
    kind.__doc__ = f"{inspect.getdoc(kind)}\n\nFields:\n{listed}"


def ranges_of(part: Any) -> dict[str, Allowed | tuple[str, ...]]:
    """The ranges and words that a dataclass's fields allow, by name."""
    return {f.name: s.allowed for f, s in settings_of(part) if s.allowed is not None}


def take_numbers(part: Any) -> None:
    """Makes Python's numbers of those of numpy, and of texts, in the numeric fields of a dataclass.

    A script that reads its settings by YAML 1.1 has 1e-4 as a text. A text that is no number stays.
    """
    for field in dataclasses.fields(part):
        kinds = set(re.findall(r"\w+", str(field.type)))
        if field.init and kinds & {"int", "float"} and not kinds & {"str", "bool"}:
            setattr(part, field.name, _number(getattr(part, field.name)))


def _number(value: Any) -> Any:
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, str):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(value)
    return value


def out_of_range(
    part: Any, ranges: Mapping[str, Allowed | tuple[str, ...]], prefix: str = ""
) -> Iterator[str]:
    """Says what is wrong with values of a dataclass's fields; whole floats become integers.

    Args:
      part: the object. None where that is the default is not looked at.
      ranges: of its fields; of words, a wrong one is told the nearest.
      prefix: what stands before a field's name, e.g. "testing.".

    Yields:
      For each value out of range its name, the value and what it must be.
    """
    for name, allowed in ranges.items():
        value = getattr(part, name)
        # A dataclass keeps the default of a field as an attribute of the class.
        if value is None and getattr(type(part), name, ...) is None:
            continue
        if isinstance(allowed, tuple):
            if value not in allowed:
                close = nearest(str(value), allowed)
                hint = f"; did you mean {close!r}?" if close else "."
                yield f"{prefix}{name}={value!r} is not one of {', '.join(allowed)}{hint}"
        elif problem := allowed.problem(prefix + name, value):
            yield problem
        elif allowed.kind is int:
            setattr(part, name, int(value))


def refuse(problems: Iterable[str]) -> None:
    """Raises one ValueError that lists all problems; none if there are none."""
    found = list(problems)
    if len(found) > 1:
        found.insert(0, f"{len(found)} settings are refused:")
    if found:
        raise ValueError("\n- ".join(found))
