"""Recipes: flat YAML files whose keys are fields of the three configuration dataclasses.

`load_recipe` reads the file, lets command-line overrides replace its values (the last one wins),
converts every value to its field's type and builds the dataclasses. Unknown keys, repeated keys,
nested keys and values of the wrong type are errors that name the file and the nearest known key.

`extends: _minilm.yaml` (relative to the recipe's folder) starts from another recipe, whose keys the
recipe's own replace; in a list of recipes, later ones replace keys of earlier ones. Files whose name
starts with an underscore only serve as such bases. A task file is looked for beside the recipe that
names it, then in the current folder. A finished run stores all its values in one file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from transformers import HfArgumentParser

from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.shipped import SUFFIXES, find_recipe
from hf_dpzero.tasks.description import DataArguments
from hf_dpzero.values import listed, nearest, parse_yaml

if TYPE_CHECKING:
    from hf_dpzero.settings.config import DPZeroConfig

COMMAND_LINE = "command line"
EXTENDS = "extends"
_NULLS = {"null", "none", "~", ""}


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

    @property
    def output_dir(self) -> Path:
        """Where the run puts everything; `TrainingArguments` always sets it."""
        return Path(str(self.training.output_dir))

    def to_yaml(self) -> str:
        """Writes the settings as a recipe that loads to the same values; secrets are left out."""
        public = {key: v for key, v in self.values.items() if not key.endswith("_token")}
        testing = dict(public.pop("testing", {}))
        testing.pop("sampler_key", None)
        public |= {"testing": testing} if testing else {}
        return yaml.safe_dump(public, sort_keys=False, allow_unicode=True)


def load_recipe(
    path: str | Path, overrides: Sequence[str] | Mapping[str, Any] | None = None
) -> Recipe:
    """Reads a recipe and returns its three dataclasses.

    Args:
      path: the YAML file, or the name of a recipe that comes with the package.
      overrides: command-line words (`["--max_steps", "5"]`) or a mapping; later ones win.

    Raises:
      FileNotFoundError: no such recipe, or none that it extends.
      ValueError: unknown, repeated, missing or ill-typed keys, recipes that extend each other in a
        circle, or a combination that `DPZeroConfig` refuses.
    """
    given = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides or ())
    return build_recipe(recipe_chain(find_recipe(path)), given, str(path))


def build_recipe(
    chain: Sequence[tuple[Path, Mapping[str, Any]]], overrides: Mapping[str, Any], source: str
) -> Recipe:
    """Builds the dataclasses from the keys of several files.

    Args:
      chain: each file and its own keys; later files replace keys of earlier ones (`recipe_chain`).
      overrides: settings that replace those of all files.
      source: the recipe's name in errors about the whole.

    Raises:
      ValueError: see `load_recipe`.
    """
    values: dict[str, Any] = {}
    # Converted file by file, so that an error names the one it stands in.
    for file, written in chain:
        own, task = dict(written), written.get("task")
        # As `extends`, and unlike data files: a recipe and its task file are copied together.
        if isinstance(task, str) and task.endswith(SUFFIXES) and (file.parent / task).is_file():
            own["task"] = str(file.parent / task)
        values = merged(values, coerce_fields(own, str(file)))
    values = merged(values, coerce_fields(overrides, COMMAND_LINE))
    model, data, training = recipe_parser().build(values, source)
    # Groups and units are the trainer's settings, and their column is the task's to keep.
    column = training.group_robust.column or training.unit_column  # never both
    if column is not None:
        units = training.unit_column is not None
        data = dataclasses.replace(data, keep_column=column, whole_units=units)
    return Recipe(model=model, data=data, training=training, values=values)


def merged(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Lets later settings replace earlier ones; of nested settings, key by key.

    >>> merged({"testing": {"direction_key": 7}}, {"testing.sampler_key": None, "clip": 1.0})
    {'testing': {'direction_key': 7, 'sampler_key': None}, 'clip': 1.0}
    """
    result = dict(values)
    for key, value in later.items():
        group, dot, inner = key.partition(".")
        if dot:
            value = {inner: value}
        if isinstance(value, Mapping) and isinstance(result.get(group), Mapping):
            value = {**result[group], **value}
        result[group] = value
    return result


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Reads the raw keys and values of a recipe and what it extends, types as YAML gives them.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not YAML, not UTF-8 text, a repeated key, no flat mapping, or a circle.
    """
    return {
        key: value
        for _, written in recipe_chain(find_recipe(path))
        for key, value in written.items()
    }


def recipe_chain(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """Reads a recipe and all that it extends.

    Args:
      path: the YAML file.
      above: the files that lead here, to find circles.

    Returns:
      Each file and its own keys without `extends`; a file stands after those that it extends.

    Raises:
      FileNotFoundError: no such file.
      ValueError: see `read_recipe`.
    """
    if path.resolve() in [file.resolve() for file in above]:
        circle = " -> ".join(str(file) for file in (*above, path))
        raise ValueError(f"{above[-1]}: recipes extend each other in a circle: {circle}.")
    if not path.is_file():
        raise FileNotFoundError(f"recipe {str(path)!r} not found; give the path of a YAML file.")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        # names what it holds, but quotes nothing: these may be private rows
        kind = "a list" if isinstance(values, list) else "one text or number"
        raise ValueError(
            f"{path}: a recipe is lines of `key: value`, this file holds {kind}. For a file of rows, "
            f"`hf-dpzero init --train_file {path} --target_epsilon 2` writes a recipe."
        )
    values = {str(key): value for key, value in values.items()}  # YAML has keys that are numbers
    if EXTENDS not in values:
        return [(path, values)]
    extends = values.pop(EXTENDS)
    bases = extends if isinstance(extends, list) else [extends]
    if not bases or not all(isinstance(base, str) and base for base in bases):
        raise ValueError(
            f"{path}: {EXTENDS}: {extends!r} is not the path of one recipe, or a list of paths, "
            "relative to this file."
        )
    chain: list[tuple[Path, dict[str, Any]]] = []
    for base in bases:
        if not (path.parent / base).is_file():
            raise FileNotFoundError(
                f"{path}: {EXTENDS}: {base!r} not found; give a path relative to {path.parent}."
            )
        chain += recipe_chain(path.parent / base, (*above, path))
    return [*chain, (path, values)]


def unused_settings(recipe: Recipe) -> str:
    """Names in one message what was written down and has no effect beside the rest; "" if nothing.

    Settings of `DPZeroConfig` have a warning of their own (`settings.hf_arguments`).
    """
    model, data, written = recipe.model, recipe.data, recipe.values
    local = Path(model.model_name_or_path).is_dir()
    done = {"do_train": True, "do_eval": True, "do_predict": False}
    peft, vectors, hub = model.peft_method, model.architecture != "auto", data.train_file is None
    uses: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
        (
            "it is for peft_method: lora",
            peft == "lora",
            ("lora_r", "lora_alpha", "lora_target_modules"),
        ),
        ("it is for peft_method: prefix", peft == "prefix", ("num_virtual_tokens",)),
        ("it is for device_map", model.device_map is not None, ("offload_folder", "max_memory")),
        ("it is for architecture: sentence_classifier", vectors, ("pooling", "normalize")),
        ("it is for head_init: label_text", model.head_init == "label_text", ("label_texts",)),
        ("the model is a local folder", not local, ("model_revision",)),
        ("train_file goes first", hub, ("dataset_name", "dataset_config_name")),
        ("it is for a prompt", data.prompt is not None, ("max_new_tokens",)),
        ("the command says what is done", False, tuple(done)),
    )
    unused = [
        f"{name}={written[name]!r} ({why})"
        for why, used, names in uses
        for name in names
        # None is as good as left out, and what the command does anyhow may be written down.
        if not used and written.get(name) not in (None, done.get(name))
    ]
    return f"no effect in this recipe: {', '.join(unused)}" if unused else ""


def parse_overrides(words: Sequence[str]) -> dict[str, str | list[str]]:
    """Reads command-line words as settings; the last mention of a key wins.

    `--key value`, `--key=value`, `--key` alone (true) and `--key a b` (a list) are understood;
    dashes inside a key read as underscores.

    Raises:
      ValueError: a word that belongs to no key, or a key alone whose field is no truth value.

    >>> parse_overrides(["--clip=2.0", "--normalize", "--label_texts", "a", "b"])
    {'clip': '2.0', 'normalize': 'true', 'label_texts': ['a', 'b']}
    """
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            groups.append((key.replace("-", "_"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            hint = f" (or --recipe {word})" if Path(word).suffix in (".yaml", ".yml") else ""
            raise ValueError(
                f"{word!r} belongs to no setting; write --key value after the recipe{hint}."
            )
    for key, items in groups:
        # An unknown key is refused elsewhere; `--resume_from_checkpoint` alone means the last one.
        may_stand_alone = bool in _members(recipe_parser().hints.get(key, bool))
        if not items and not may_stand_alone and key != "resume_from_checkpoint":
            raise ValueError(f"{COMMAND_LINE}: {key}: needs a value; write --{key} VALUE.")
    return {k: items[0] if len(items) == 1 else items or "true" for k, items in groups}


def coerce_fields(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Converts each value to the type of its field (see `RecipeParser.convert`).

    Args:
      values: field name -> what YAML or a command line gave.
      source: file name or "command line", named in errors.

    Returns:
      field name -> converted value, in the same order.

    Raises:
      ValueError: a key that is no field (the nearest field is named), or a value that does not fit.
    """
    parser = recipe_parser()
    return {key: parser.convert(key, value, source) for key, value in values.items()}


@functools.cache
def recipe_parser() -> RecipeParser:
    """Returns the parser of recipes, made on the first call."""
    from hf_dpzero.settings.config import DPZeroConfig

    return RecipeParser((ModelArguments, DataArguments, DPZeroConfig))


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
            for f in dataclasses.fields(owner):
                if f.init:  # None by default: it is chosen, and has the type of what is chosen
                    unset = f.default is None
                    self.hints[f.name] = hints[f.name] | None if unset else hints[f.name]
        for action in self._actions:  # one setting at a time is parsed, and defaults are not ours
            action.required, action.default = False, argparse.SUPPRESS
        self.actions = {a.dest: a for a in self._actions if a.option_strings[0] == f"--{a.dest}"}
        from hf_dpzero.settings.nested import NESTED

        self.nested = {n: RecipeParser((kind,)) for n, kind in NESTED.items() if n in self.hints}
        for name, part in self.nested.items():
            self.hints |= {f"{name}.{inner}": hint for inner, hint in part.hints.items()}

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

        Raises:
          ValueError: `key` is no field (the nearest one is named), or `value` does not fit it.
        """
        group, dot, inner = key.partition(".")
        if group in self.nested:
            return self._convert_nested(group, {inner: value} if dot else value, source, bool(dot))
        if key not in self.actions:
            nested = {i: f"{name}.{i}" for name, part in self.nested.items() for i in part.actions}
            near = nearest(key, self.actions) or nested.get(nearest(key, nested) or "")
            names = ", ".join(kind.__name__ for kind in self.dataclass_types)
            fields = f"no field of {names} is like it."
            hint = f"did you mean {near!r}?" if near else fields
            raise ValueError(f"{source}: unknown key {key!r}; {hint}")
        try:
            return self._convert(key, value)
        except ValueError as error:
            message = str(error).rstrip(".")
            end = "" if message.endswith("?") else "."
            raise ValueError(f"{source}: {key}: {message}{end}") from error

    def _convert_nested(self, group: str, given: Any, source: str, one: bool) -> Any:
        """A mapping of a nested setting, or its JSON, converted key by key; the value alone of `one`."""
        if isinstance(given, str) and given.strip().lower() in _NULLS:
            given = None
        if isinstance(given, str) and given.lstrip().startswith("{"):
            given = parse_yaml(given)
        if not isinstance(given or {}, Mapping):
            raise ValueError(
                f"{source}: {group}: {given!r} is no mapping; write {{name: value}}, or "
                f"{group}.NAME for one of {', '.join(self.nested[group].actions)}."
            )
        part, where = self.nested[group], f"{source}: {group}"
        values = {str(key): part.convert(str(key), v, where) for key, v in (given or {}).items()}
        return next(iter(values.values())) if one else values

    def _convert(self, key: str, value: Any) -> Any:
        action, members = self.actions[key], _members(self.hints[key])
        origins = {typing.get_origin(member) or member for member in members}
        text = value if isinstance(value, str) else None
        null = value is None or (text is not None and text.strip().lower() in _NULLS)
        if null and type(None) in members:
            # `report_to: none` is Hugging Face's word for nowhere, not an absent value
            return text if key == "report_to" else None
        # A command line writes lists and mappings as YAML's flow style.
        if text and text.lstrip()[:1] in ("[", "{") and origins & {list, dict}:
            value = parse_yaml(text)
        elif text and "," in text and key == "report_to":
            value = listed(text)
        if isinstance(value, dict) or (isinstance(value, list) and action.nargs != "+"):
            if type(value) in origins:
                return value
            raise ValueError(f"{value!r} is not a single value")
        if action.nargs == "+":
            items = listed(value)
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
        # What YAML typed right stays as it is: argparse would print and read it again.
        if type(value) in members and not action.choices:
            converted = value
        elif action.type is str and text is None:
            raise ValueError(_not_text(value))
        else:
            word = _whole(value) if action.type is int else str(value)
            converted = getattr(self.parse_args([f"--{key}={word}"]), key)
        # Every comparison with NaN is false, so it would pass the checks of ranges.
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
    with contextlib.suppress(ValueError):  # before any float, which has 53 bits: keys have 128
        return str(int(str(value), 0))
    with contextlib.suppress(ValueError, OverflowError):
        if float(value).is_integer() and not isinstance(value, bool):
            return str(int(float(value)))
    return str(value)
