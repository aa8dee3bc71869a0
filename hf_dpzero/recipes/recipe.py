"""Recipes: flat YAML files whose keys are fields of the three configuration dataclasses.

`load_recipe` reads the file, lays command-line overrides over it (the last one wins), coerces
every value to its field's annotation and builds the dataclasses. Unknown keys, repeated keys,
nested keys and values of the wrong type are errors that name the file and the nearest known key.

A recipe may start from another one: `extends: _minilm.yaml` (relative to its own folder) lays its
keys over that file's, which may extend a third; of a list of recipes, each is laid over those before
it. Files whose name starts with an underscore are such bases and no experiments by themselves. What a
run writes down has everything in one file.
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

from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.values import coerce, nearest, parse_yaml

if TYPE_CHECKING:
    from hf_dpzero.training.config import DPZeroConfig

COMMAND_LINE = "command line"
EXTENDS = "extends"


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
      FileNotFoundError: no such recipe, or none that it extends.
      ValueError: unknown, repeated, missing or ill-typed keys, recipes that extend each other in a
        circle, or a combination that `DPZeroConfig` refuses.
    """
    given = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides or ())
    values: dict[str, Any] = {}
    for file, written in _read_chain(Path(path)):
        values.update(coerce_fields(written, str(file)))
    values.update(coerce_fields(given, COMMAND_LINE))
    owners = _owners()
    _require_all(values, owners, str(path))
    built = {
        owner: owner(**{key: value for key, value in values.items() if owners[key][0] is owner})
        for owner in dict.fromkeys(owner for owner, _ in owners.values())
    }
    model, data, training = built.values()
    return Recipe(model=model, data=data, training=training, values=values)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The raw keys and values of a recipe and what it extends, types as YAML gives them.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not YAML, not UTF-8 text, a repeated key, no flat mapping, or a circle.
    """
    return {key: value for _, written in _read_chain(Path(path)) for key, value in written.items()}


def _read_chain(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """Each file and its own keys, the last base first; `above` are the files that lead here."""
    if path.resolve() in [file.resolve() for file in above]:
        circle = " -> ".join(str(file) for file in (*above, path))
        raise ValueError(f"{above[-1]}: recipes extend each other in a circle: {circle}.")
    values = _read_file(path)
    if EXTENDS not in values:
        return [(path, values)]
    chain: list[tuple[Path, dict[str, Any]]] = []
    for base in _bases(path, values.pop(EXTENDS)):
        chain += _read_chain(path.parent / base, (*above, path))
    return [*chain, (path, values)]


def _bases(path: Path, extends: Any) -> list[str]:
    """The recipes that `path` extends, one or several; later ones are laid over earlier ones."""
    bases = extends if isinstance(extends, list) else [extends]
    if not bases or not all(isinstance(base, str) and base for base in bases):
        raise ValueError(
            f"{path}: {EXTENDS}: {extends!r} is not the path of one recipe, or a list of paths, "
            "relative to this file."
        )
    for base in bases:
        if not (path.parent / base).is_file():
            raise FileNotFoundError(
                f"{path}: {EXTENDS}: {base!r} not found; give a path relative to {path.parent}."
            )
    return bases


def _read_file(path: Path) -> dict[str, Any]:
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
            coerced[key] = value if _is_word(key, value) else coerce(value, owners[key][1])
        except ValueError as error:
            raise ValueError(f"{source}: {key}: {error}.") from error
    return coerced


@functools.cache
def _owners() -> dict[str, tuple[Any, Any]]:
    """field name -> (dataclass, annotation). Imports transformers on the first call."""
    from hf_dpzero.training.config import DPZeroConfig

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


def _is_word(key: str, value: Any) -> bool:
    """`report_to: none` is Hugging Face's word for nowhere, and not an absent value."""
    return key == "report_to" and value == "none"


def _is_secret(key: str) -> bool:
    return key.endswith("_token") or key == "sampler_key"
