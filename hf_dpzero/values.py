"""Turns what a YAML file or a command line says into the type that a field's annotation asks for.

`coerce` never guesses between meanings: a value either has one reading under the annotation or is
an error that names the value and the type. It covers the annotations that configuration classes
use: bool, int, float, str, None, Literal, Enum, list[...], dict[...], Any and unions of them.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal

import yaml

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_NULL = frozenset({"null", "none", "~", ""})


class RecipeLoader(yaml.SafeLoader):
    """YAML with the number and truth words of YAML 1.2, and without duplicate keys.

    YAML 1.1 reads `1e-6` as text and `no` as false, so that `learning_rate: 1e-6` and
    `eval_strategy: no` would both mean something else than what stands there.
    """


def _resolvers_without(*tags: str) -> dict[str, list[Any]]:
    inherited = yaml.SafeLoader.yaml_implicit_resolvers
    return {
        first: [rule for rule in rules if rule[0] not in tags] for first, rules in inherited.items()
    }


def _unique_mapping(loader: RecipeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"key {repeated[0]!r} appears more than once; keep one.")
    return dict(loader.construct_pairs(node, deep=True))


def _configure_loader() -> None:
    bool_tag, float_tag = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
    RecipeLoader.yaml_implicit_resolvers = _resolvers_without(bool_tag, float_tag)
    truth = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
    number = re.compile(
        r"^[-+]?(?:\d[\d_]*\.[\d_]*|\.\d+|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?$|^[-+]?\.(?:inf|Inf)$"
    )
    RecipeLoader.add_implicit_resolver(bool_tag, truth, list("tTfF"))
    RecipeLoader.add_implicit_resolver(float_tag, number, list("-+0123456789."))
    RecipeLoader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)


_configure_loader()


def parse_yaml(text: str) -> Any:
    """Parses YAML text with `RecipeLoader`.

    >>> parse_yaml("{a: 1e-6, b: no, c: [true, 2]}")
    {'a': 1e-06, 'b': 'no', 'c': [True, 2]}

    Raises:
      ValueError: not YAML, or a key twice in one mapping.
    """
    try:
        return yaml.load(text, Loader=RecipeLoader)  # a SafeLoader, so no objects are built
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error


def coerce(value: Any, annotation: Any) -> Any:
    """Returns `value` as an instance of `annotation`, or raises.

    Strings (what a command line gives) are read as the annotation asks. In a union the most
    specific member that accepts the value wins: None, bool, int, float, Literal and Enum, list
    and dict, and str last. A member of an Enum stays the plain string, as HF's arguments want it.

    >>> coerce("1e-6", float), coerce("1e4", int), coerce("null", int | None)
    (1e-06, 10000, None)
    >>> coerce("a,b", list[str]), coerce([1, 2], list[int])
    (['a', 'b'], [1, 2])
    >>> coerce(True, int)
    Traceback (most recent call last):
    ValueError: True is not an integer

    Raises:
      ValueError: the value has no reading under the annotation; the text says which is expected.
    """
    members = _members(annotation)
    first_error: ValueError | None = None
    for member in sorted(members, key=_rank):
        if _is_enum(member) and str in members and not isinstance(value, str):
            continue
        if member is str and any(map(_is_enum, members)):
            continue  # the Enum says which strings mean something
        if _origin(member) in (list, dict) and str in members and not _is_structured(value):
            continue  # plain text stays text
        try:
            return _coerce_one(value, member)
        except ValueError as error:
            first_error = _more_telling(first_error, error, member)
    raise first_error or ValueError(f"{value!r} does not fit {annotation}")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None when nothing is close.

    >>> nearest("lerning_rate", ["learning_rate", "max_steps"])
    'learning_rate'
    """
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(m for arg in typing.get_args(annotation) for m in _members(arg))
    return (annotation,)


def _origin(member: Any) -> Any:
    if _is_enum(member):
        return enum.Enum
    return typing.get_origin(member) or member


def _is_enum(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, enum.Enum)


def _is_structured(value: Any) -> bool:
    if isinstance(value, str):
        return value.lstrip().startswith(("[", "{"))
    return isinstance(value, (list, tuple, dict))


_ORDER = (type(None), bool, int, float, Literal, enum.Enum, list, dict, str)


def _rank(member: Any) -> int:
    origin = _origin(member)
    return _ORDER.index(origin) if origin in _ORDER else len(_ORDER)


def _more_telling(old: ValueError | None, new: ValueError, member: Any) -> ValueError:
    """Keeps the error of the member that was probably meant: any but None; the last of equals."""
    return new if old is None or member is not type(None) else old


def _coerce_one(value: Any, member: Any) -> Any:
    reader = _READERS.get(_origin(member))
    if reader is not None:
        return reader(value, member)
    if member is Any:
        return parse_yaml(value) if isinstance(value, str) and _is_structured(value) else value
    if isinstance(member, type) and isinstance(value, member):
        return value
    raise ValueError(f"{value!r} cannot be set from a recipe; pass it in Python")


def _read_none(value: Any, member: Any) -> None:
    if value is None or (isinstance(value, str) and value.strip().lower() in _NULL):
        return None
    raise ValueError(f"{value!r} is not null")


def _read_bool(value: Any, member: Any) -> bool:
    word = value.strip().lower() if isinstance(value, str) else value
    if isinstance(word, bool):
        return word
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(f"{value!r} is not true or false")


def _read_int(value: Any, member: Any) -> int:
    """An integer of any size, exactly; `0x...` and whole floats (`1e4`) count as integers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value, 0)
    with contextlib.suppress(ValueError):
        number = _read_float(value, member)
        if number.is_integer():
            return int(number)
    raise ValueError(f"{value!r} is not an integer")


def _read_float(value: Any, member: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None
    if math.isnan(number):
        raise ValueError("NaN is not a number that a setting can have")
    return number


def _read_literal(value: Any, member: Any) -> Any:
    choices = typing.get_args(member)
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
        if (
            isinstance(value, str)
            and not isinstance(choice, str)
            and value.lower() == str(choice).lower()
        ):
            return choice
    raise _not_a_choice(value, [str(choice) for choice in choices])


def _read_enum(value: Any, member: Any) -> str:
    choices = [str(item.value) for item in member]
    if isinstance(value, member):
        return str(value.value)
    if value in choices:
        return str(value)
    raise _not_a_choice(value, choices)


def _not_a_choice(value: Any, choices: list[str]) -> ValueError:
    near = nearest(str(value), choices)
    hint = f"; did you mean {near!r}?" if near else ""
    return ValueError(f"{value!r} is not one of {', '.join(choices)}{hint}")


def _read_list(value: Any, member: Any) -> list[Any]:
    if isinstance(value, str):
        items = parse_yaml(value) if _is_structured(value) else value.split(",")
        value = [item.strip() if isinstance(item, str) else item for item in items]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{value!r} is not a list")
    (item_type,) = typing.get_args(member) or (Any,)
    return [coerce(item, item_type) for item in value]


def _read_dict(value: Any, member: Any) -> dict[Any, Any]:
    if isinstance(value, str) and _is_structured(value):
        value = parse_yaml(value)
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a mapping")
    return value


def _read_str(value: Any, member: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is not text; put it in quotes if it is meant as text")


_READERS: dict[Any, Callable[[Any, Any], Any]] = {
    type(None): _read_none,
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    Literal: _read_literal,
    enum.Enum: _read_enum,
    list: _read_list,
    dict: _read_dict,
    str: _read_str,
}


def one_of(arguments: Any, name: str, choices: tuple[str | None, ...], hint: str) -> None:
    value = getattr(arguments, name)
    if value not in choices:
        known = ", ".join("null" if choice is None else choice for choice in choices)
        raise ValueError(f"{name}={value!r} is not one of {known} ({hint}).")


def positive(arguments: Any, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r} must be positive.")
