"""Recipes: flat YAML files whose keys are fields of the three configuration dataclasses.

`load_recipe` reads the file, lays command-line overrides over it (the last one wins), coerces
every value to its field's annotation and builds the dataclasses. Unknown keys, repeated keys,
nested keys and values of the wrong type are errors that name the file and the nearest known key.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hf_dpzero.recipe_arguments import DataArguments, ModelArguments
from hf_dpzero.recipe_values import coerce, nearest, parse_yaml

if TYPE_CHECKING:
    from hf_dpzero.arguments import DPZeroConfig

COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One experiment: model, data, training, and the settings that were written down.

    Attributes:
      model: which checkpoint and head.
      data: which rows.
      training: privacy and everything HF's Trainer takes.
      values: only what the recipe and the overrides said, after coercion; what `to_yaml` writes.
    """

    model: ModelArguments
    data: DataArguments
    training: DPZeroConfig
    values: Mapping[str, Any]

    def to_yaml(self) -> str:
        """The settings as a recipe that loads to the same values; secrets are left out."""
        public = {key: value for key, value in self.values.items() if not _is_secret(key)}
        return yaml.safe_dump(public, sort_keys=False, allow_unicode=True)


def load_recipe(
    path: str | Path, overrides: Sequence[str] | Mapping[str, Any] | None = None
) -> Recipe:
    """Reads a recipe and returns its three dataclasses.

    Args:
      path: the YAML file.
      overrides: command-line words (`["--max_steps", "5"]`) or a mapping; later ones win.

    Raises:
      FileNotFoundError: no such recipe.
      ValueError: unknown, repeated, missing or ill-typed keys, or a combination that
        `DPZeroConfig` refuses.
    """
    given = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides or ())
    values = {**coerce_fields(read_recipe(path), str(path)), **coerce_fields(given, COMMAND_LINE)}
    owners = _owners()
    _require_all(values, owners, str(path))
    built = {
        owner: owner(**{key: value for key, value in values.items() if owners[key][0] is owner})
        for owner in dict.fromkeys(owner for owner, _ in owners.values())
    }
    model, data, training = built.values()
    return Recipe(model=model, data=data, training=training, values=values)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The raw keys and values of a recipe file, types as YAML gives them.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not YAML, not UTF-8 text, a repeated key, or no flat mapping.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"recipe {str(path)!r} not found; give the path of a YAML file.")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a recipe is lines of `key: value`, this file holds {values!r}.")
    return {str(key): value for key, value in values.items()}


def parse_overrides(words: Sequence[str]) -> dict[str, str | list[str]]:
    """Reads command-line words as settings; the last mention of a key wins.

    `--key value`, `--key=value`, `--key` alone (true) and `--key a b` (a list) are understood;
    dashes inside a key read as underscores.

    >>> parse_overrides(["--clip=2.0", "--normalize", "--label_texts", "a", "b"])
    {'clip': '2.0', 'normalize': 'true', 'label_texts': ['a', 'b']}

    Raises:
      ValueError: a word that belongs to no key.
    """
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            groups.append((key.replace("-", "_"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise ValueError(f"{word!r} belongs to no setting; write --key value after the recipe.")
    return {key: _one_or_many(found) for key, found in groups}


def coerce_fields(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Each value as its field's annotation wants it; `source` is named in errors.

    Raises:
      ValueError: a key that is no field, or a value that does not fit its field.
    """
    owners = _owners()
    coerced = {}
    for key, value in values.items():
        if key not in owners:
            raise ValueError(f"{source}: {_unknown(key, owners)}")
        try:
            coerced[key] = coerce(value, owners[key][1])
        except ValueError as error:
            raise ValueError(f"{source}: {key}: {error}.") from error
    return coerced


@functools.cache
def _owners() -> dict[str, tuple[Any, Any]]:
    """field name -> (dataclass, annotation). Imports transformers on the first call."""
    from hf_dpzero.arguments import DPZeroConfig

    owners: dict[str, tuple[Any, Any]] = {}
    for owner in (ModelArguments, DataArguments, DPZeroConfig):
        hints = typing.get_type_hints(owner)
        names = [field.name for field in dataclasses.fields(owner) if field.init]
        assert owners.keys().isdisjoint(names), owners.keys() & set(names)
        owners.update({name: (owner, hints[name]) for name in names})
    return owners


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    near = nearest(key, known)
    hint = f"did you mean {near!r}?" if near else "recipes take the fields of the config classes."
    return f"unknown key {key!r}; {hint}"


def _require_all(values: Mapping[str, Any], owners: Mapping[str, Any], source: str) -> None:
    for owner in dict.fromkeys(owner for owner, _ in owners.values()):
        for field in dataclasses.fields(owner):
            if field.name in values or not field.init:
                continue
            if field.default is dataclasses.MISSING and (
                field.default_factory is dataclasses.MISSING
            ):
                raise ValueError(f"{source}: {field.name} is missing; add `{field.name}: ...`.")


def _one_or_many(found: list[str]) -> str | list[str]:
    if not found:
        return "true"
    return found[0] if len(found) == 1 else found


def _is_secret(key: str) -> bool:
    return key.endswith("_token") or key == "sampler_key"
