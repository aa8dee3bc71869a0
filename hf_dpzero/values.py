"""The YAML 1.2 loader, numbers that JSON lacks, and the checks of field values."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml


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


def listed(value: Any) -> Any:
    """A list, however it is written: `[a, b]` in YAML, `a,b` or `a b` on a command line.

    Args:
      value: a list stays as it is (its items may hold commas); text is a YAML list if it begins with
        "[", else words between commas; anything else is no list.

    Returns:
      The list, or `value` where it is none.

    >>> listed("a, b"), listed("[a, 'b, c']"), listed(["a, b", "c"]), listed(3)
    (['a', 'b'], ['a', 'b, c'], ['a, b', 'c'], 3)
    """
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return parse_yaml(value)
    return [item.strip() for item in value.split(",")]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Finds the known word most like `word`, or else one that has it as a part.

    Args:
      word: as written.
      known: what may be written.

    Returns:
      The nearest known word, or None if none is close.

    >>> nearest("lerning_rate", ["learning_rate", "max_steps"])
    'learning_rate'
    >>> nearest("delta", ["max_steps", "target_delta"])
    'target_delta'
    """
    names = list(known)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not matches and len(word) > 3:
        matches = [name for name in names if word in name.split("_")]
    return matches[0] if matches else None


def one_of(arguments: Any, name: str, choices: tuple[str | None, ...], hint: str) -> None:
    """Checks that a field has one of the known values.

    Args:
      arguments: config object.
      name: its field.
      choices: known values; None is written `null`.
      hint: what to choose, for the message.

    Raises:
      ValueError: names the field, its value and the known ones.
    """
    value = getattr(arguments, name)
    if value not in choices:
        known = ", ".join("null" if choice is None else choice for choice in choices)
        raise ValueError(f"{name}={value!r} is not one of {known} ({hint}).")


def positive(arguments: Any, *names: str) -> None:
    """Checks that numeric fields are above 0; None passes.

    Args:
      arguments: config object.
      names: its fields.

    Raises:
      ValueError: names the field and its value.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r} must be positive.")


def encode(value: Any) -> Any:
    """JSON has no infinity and no NaN: they are written as strings, as in privacy_report.json."""
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value
