"""The YAML 1.2 loader, numbers that JSON lacks, and the checks of field values."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_TRUTH = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NUMBER = re.compile(
    r"^[-+]?(?:\d[\d_]*\.[\d_]*|\.\d+|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?$|^[-+]?\.(?:inf|Inf)$"
)


class RecipeLoader(yaml.SafeLoader):
    """YAML with the number and truth words of YAML 1.2, and without duplicate keys.

    YAML 1.1 reads `1e-6` as text and `no` as false, so that `learning_rate: 1e-6` and
    `eval_strategy: no` would both mean something else than what stands there.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 # by the first character of a word
        first: [rule for rule in rules if rule[0] not in (_BOOL, _FLOAT)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuses a key that appears twice, of which YAML would keep the last."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if repeated := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise ValueError(f"key {repeated[0]!r} appears more than once; keep one.")
        return super().construct_mapping(node, deep=deep)


RecipeLoader.add_implicit_resolver(_BOOL, _TRUTH, list("tTfF"))
RecipeLoader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+0123456789."))


def parse_yaml(text: str) -> Any:
    """Reads YAML text with `RecipeLoader`.

    >>> parse_yaml("{a: 1e-6, b: no, c: [true, 2]}")
    {'a': 1e-06, 'b': 'no', 'c': [True, 2]}

    Raises:
      ValueError: not YAML, or a key twice in one mapping.
    """
    try:
        return yaml.load(text, Loader=RecipeLoader)  # a SafeLoader, so no objects are built
    except yaml.YAMLError as error:
        # not its text, which quotes lines: the file may be one of private rows
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"not valid YAML: {problem or 'it cannot be read'}{where}") from None


def listed(value: Any) -> Any:
    """Reads a list, however it is written: `[a, b]` in YAML, `a,b` or `a b` on a command line.

    A list stays as it is (its items may hold commas), and so does anything else but text, which is a
    YAML list if it begins with "[", else words between commas.

    >>> listed("a, b"), listed("[a, 'b, c']"), listed(["a, b", "c"]), listed(3)
    (['a', 'b'], ['a', 'b, c'], ['a, b', 'c'], 3)
    """
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return parse_yaml(value)
    return [item.strip() for item in value.split(",")]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Finds the known word most like `word`, or else one that has it as a part; None if none is close.

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


def one_of(arguments: object, name: str, choices: Sequence[str | None], hint: str) -> None:
    """Refuses a value of a field `name` that is none of `choices`; the message ends with the hint."""
    value = getattr(arguments, name)
    if value not in choices:
        known = ", ".join("null" if choice is None else choice for choice in choices)
        raise ValueError(f"{name}={value!r} is not one of {known} ({hint}).")


def positive(arguments: object, *names: str) -> None:
    """Refuses numeric fields that are not above 0; None passes."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r} must be positive.")


def encode(value: Any) -> Any:
    """Writes infinity and NaN, which JSON lacks, as strings, as in privacy_report.json."""
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(value: Any) -> Any:
    """Reads what `encode` wrote."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value
