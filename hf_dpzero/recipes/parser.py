"""`RecipeParser`: Hugging Face's `HfArgumentParser`, fed from YAML values instead of words."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from transformers import HfArgumentParser

from hf_dpzero.values import nearest, parse_yaml

_NULLS = {"null", "none", "~", ""}


class RecipeParser(HfArgumentParser):
    """Converts recipe values with the argument types that `HfArgumentParser` derives from dataclasses.

    A value that already has its field's type stays as it is; any other becomes a command-line word,
    which argparse converts or refuses. Errors are `ValueError`s instead of exits.

    Args:
      dataclass_types: config classes whose field names do not overlap.
    """

    def __init__(self, dataclass_types: Sequence[type]) -> None:
        super().__init__(list[Any](dataclass_types), add_help=False, allow_abbrev=False)
        self.hints: dict[str, Any] = {}
        for owner in dataclass_types:
            hints = typing.get_type_hints(owner)
            self.hints |= {f.name: hints[f.name] for f in dataclasses.fields(owner) if f.init}
        for action in self._actions:  # one setting at a time is parsed, and defaults are not ours
            action.required, action.default = False, argparse.SUPPRESS
        self.actions = {a.dest: a for a in self._actions if a.option_strings[0] == f"--{a.dest}"}

    def error(self, message: str) -> NoReturn:
        """Raises argparse's message as a ValueError, with the nearest known choice."""
        message = re.sub(r"^argument \S+: ", "", message)
        if refused := re.match(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            near = nearest(refused[1], re.findall(r"[\w-]+", refused[2]))
            message += f"; did you mean {near!r}?" if near else ""
        raise ValueError(message)

    def convert(self, key: str, value: Any, source: str) -> Any:
        """Returns `value` as the type of field `key`.

        Words such as `null` mean None where the field allows it; lists may be written `a,b`, whole
        floats (`1e4`) count as integers.

        Args:
          key: field name of one of the config classes.
          value: what YAML or a command line gave: text, number, bool, None, list or mapping.
          source: file name or "command line", named in errors.

        Returns:
          A value of the field's type.

        Raises:
          ValueError: `key` is no field (the nearest one is named), or `value` does not fit it.
        """
        if key not in self.actions:
            near = nearest(key, self.actions)
            fields = "recipes take fields of the config classes."
            hint = f"did you mean {near!r}?" if near else fields
            raise ValueError(f"{source}: unknown key {key!r}; {hint}")
        try:
            return self._convert(key, value)
        except ValueError as error:
            message = str(error).rstrip(".")
            end = "" if message.endswith("?") else "."
            raise ValueError(f"{source}: {key}: {message}{end}") from error

    def _convert(self, key: str, value: Any) -> Any:
        action, members = self.actions[key], _members(self.hints[key])
        origins = {typing.get_origin(member) or member for member in members}
        text = value if isinstance(value, str) else None
        null = value is None or (text is not None and text.strip().lower() in _NULLS)
        if null and type(None) in members:
            # `report_to: none` is Hugging Face's word for nowhere, not an absent value
            return text if key == "report_to" else None
        if text and text.lstrip()[:1] in ("[", "{") and origins & {list, dict}:
            value = parse_yaml(text)
        if isinstance(value, dict) or (isinstance(value, list) and action.nargs != "+"):
            if type(value) in origins:
                return value
            raise ValueError(f"{value!r} is not a single value")
        if action.nargs == "+":
            items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
            if not isinstance(items, list):
                raise ValueError(f"{value!r} is not a list")
            if list[str] in members:  # argparse would take "-x" for an option, and None for "None"
                for item in items:
                    if not isinstance(item, str):
                        raise ValueError(_not_text(item))
                return items
            if not items:
                return items
            return getattr(self.parse_args([f"--{key}", *map(str, items)]), key)
        if value is None:
            raise ValueError("null is no value of this field")
        if type(value) in members and not action.choices:
            converted = value
        elif action.type is str and text is None:
            raise ValueError(_not_text(value))
        else:
            word = _whole(value) if action.type is int else str(value)
            converted = getattr(self.parse_args([f"--{key}={word}"]), key)
        if isinstance(converted, float) and math.isnan(converted):
            raise ValueError("NaN is not a number that a setting can have")
        return converted

    def build(self, values: Mapping[str, Any], source: str) -> tuple[Any, ...]:
        """Builds the config classes, in their order, from converted values.

        Args:
          values: field name -> converted value.
          source: named where a field without a default is missing.

        Returns:
          One object of each class.

        Raises:
          ValueError: a required field is missing, or a class refuses its values.
        """
        for owner in self.dataclass_types:
            for field in dataclasses.fields(owner):
                required = field.default is field.default_factory is dataclasses.MISSING
                if field.init and field.name not in values and required:
                    raise ValueError(f"{source}: {field.name} is missing; add `{field.name}: ...`.")
        return tuple(self.parse_dict(dict(values)))


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, nested unions flattened; a plain type is its only member."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(hint) for member in _members(part))
    return (hint,)


def _not_text(value: Any) -> str:
    return f"{value!r} is not text; put it in quotes if it is meant as text"


def _whole(value: Any) -> str:
    """Digits of a whole number, exact at any size, also from `0x1f`, 1e4 or "1e4"."""
    with contextlib.suppress(ValueError):
        return str(int(str(value), 0))
    with contextlib.suppress(ValueError, OverflowError):
        if float(value).is_integer() and not isinstance(value, bool):
            return str(int(float(value)))
    return str(value)
