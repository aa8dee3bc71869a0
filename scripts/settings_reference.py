"""Every setting and what it costs: `python -m scripts.settings_reference` writes docs/settings.md."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.nested import NESTED, PRIVATELY, ZEROTH
from hf_dpzero.settings.setting import Allowed, Setting, settings_of
from hf_dpzero.tasks.description import DataArguments
from scripts.markdown import table
from scripts.setting_costs import COSTS, INHERITED, NOTHING, Cost
from scripts.training_arguments import DOCS

PAGE = DOCS / "settings.md"
CLASSES: Mapping[str, type] = {
    kind.__name__: kind for kind in (DPZeroConfig, ModelArguments, DataArguments)
}
WORDS: Mapping[str, str] = {
    **dict.fromkeys(("logit_scale", "lora_alpha"), "above 0"),
    **dict.fromkeys(("lora_r", "num_virtual_tokens", "max_new_tokens", "components"), "at least 1"),
    **dict.fromkeys(
        ("max_train_samples", "max_eval_samples", "num_examples_per_class"), "at least 1"
    ),
    "holdout": "a share below 1",
    **{"max_seq_length": "at least 2", "num_demonstrations": "at least 0"},
    "features": "`last`, `all_layers`, numbers of layers",
    "torch_dtype": "`float32`, `bfloat16`, `float16`, `auto`",
}
"""Ranges of recipes' settings of model and rows."""

_INTRODUCTION = """\
# Settings

Written by `python -m scripts.settings_reference`; those of `DPZeroConfig` say themselves what they cost.

A recipe is a YAML file of these settings. Nested ones stand below their name,
`testing: {direction_key: 7}`, on a command line `--testing.direction_key 7`; in a script one is a dict,
its JSON, or the dataclass. `DPZeroConfig` and `DPZeroSeq2SeqConfig` also take all fields of
[`TrainingArguments`](training_arguments.md) and `Seq2SeqTrainingArguments`.

*Costs in privacy*: in epsilon, in noise at the same epsilon, or in what is published. *Costs in time*
include memory. An empty cell: nothing. Private methods: dpzero, dpgd-0th, dp-sgd, dp-adamw; zeroth
order: dpzero, dpgd-0th, mezo. Letters: [table of symbols](index.md#symbols).
"""
_TITLES = {
    "DPZeroConfig": "`DPZeroConfig`",
    "ModelArguments": "`ModelArguments`, of recipes",
    "DataArguments": "`DataArguments`, of recipes",
}
_METHODS = {PRIVATELY: "Private methods", ZEROTH: "Zeroth order"}
_HEAD = ("setting", "default", "values", "what it does", "costs in privacy", "costs in time")


def page() -> str:
    """The Markdown, ending in a new line."""
    parts = [_INTRODUCTION]
    for name, kind in CLASSES.items():
        parts.append(f"## {_TITLES[name]}\n")
        parts += _described(kind) if kind is DPZeroConfig else _groups(name, kind)
    parts += ["## Of `TrainingArguments`\n", _inherited()]
    return "\n".join(parts)


def _described(kind: type) -> Iterator[str]:
    """Tables of fields that describe themselves: the flat ones, then each nested setting."""
    texts = {field.name: described.text for field, described in settings_of(kind)}
    yield _table(_rows(kind))
    for name, part in NESTED.items():
        yield f"### `{name}`\n\n`{part.__name__}`: {texts[name]}.\n"
        yield _table(_rows(part, f"{name}."))


def _rows(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Any, Setting]]:
    hints = typing.get_type_hints(kind)
    for field, described in settings_of(kind):
        if prefix or field.name not in NESTED:
            yield prefix + field.name, field.default, hints[field.name], described


def _table(rows: Iterable[tuple[str, Any, Any, Setting]]) -> str:
    lines = []
    for name, default, hint, described in rows:
        allowed, text = described.allowed, described.text.rstrip(".")
        if isinstance(allowed, tuple):
            values = ", ".join(f"`{word}`" for word in allowed)
        else:
            words = allowed.words if isinstance(allowed, Allowed) else ""
            values = "; ".join(filter(None, (_kind(hint), words)))
        if described.needs and not text.startswith(described.needs[1][0]):
            needs = f"For `{described.needs[0]}`: {', '.join(described.needs[1])}"
            text += f". {_METHODS.get(described.needs, needs)}"
        cells = (f"`{name}`", _default(default, described.none), values, text)
        lines.append([_cell(cell) for cell in (*cells, described.privacy, described.time)])
    return table(_HEAD, lines)


def own_fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields that a class declares itself, in their order."""
    declared = {field.name: field for field in dataclasses.fields(kind)}
    return {name: declared[name] for name in kind.__annotations__ if name in declared}


def what_they_do(kind: type) -> dict[str, str]:
    """Field -> its help, or its entry under `Attributes` of the class."""
    text = inspect.getdoc(kind) or ""
    section = text.partition("Attributes:\n")[2]
    entries = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE)
    written = {name: " ".join(entry.split()) for name, entry in entries}
    return {n: f.metadata.get("help", written.get(n, "")) for n, f in own_fields(kind).items()}


def _groups(name: str, kind: type) -> Iterator[str]:
    fields, help_of, hints = own_fields(kind), what_they_do(kind), typing.get_type_hints(kind)
    for title, costs in COSTS[name].items():
        rows = [
            (f"`{setting}`", _default(fields[setting].default, cost.none),
             _values(setting, hints[setting], cost), help_of[setting], cost.privacy, cost.time)
            for setting, cost in costs.items()
        ]  # fmt: skip
        yield f"### {title}\n\n{table(_HEAD, (map(_cell, row) for row in rows))}"


def _default(value: Any, none: str) -> str:
    if value is dataclasses.MISSING:
        return "none: must be given"
    return f"None: {none}" if value is None else f"`{value}`"


def _values(name: str, hint: Any, cost: Cost) -> str:
    """Type, range or choices, and unit."""
    members = [m for m in typing.get_args(hint) or (hint,) if m is not type(None)]
    kind = hint if typing.get_origin(hint) is typing.Literal else members[0]
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{word}`" for word in typing.get_args(kind))
    if name == "torch_dtype":
        return WORDS[name]
    return "; ".join(filter(None, (_kind(hint), WORDS.get(name, ""), _unit(cost.unit))))


def _kind(hint: Any) -> str:
    """A type as it is written, without the None that it may be."""
    union = isinstance(hint, types.UnionType)
    kind = next(m for m in (typing.get_args(hint) if union else (hint,)) if m is not type(None))
    return f"`{kind.__name__ if kind in (bool, int, float, str) else kind}`"


def _unit(unit: str) -> str:
    return unit and f"in {unit}"


def _inherited() -> str:
    head = ("field", "what it does here", "costs in privacy", "costs in time")
    rows = [(f"`{n}`", text, cost.privacy, cost.time) for n, (text, cost) in INHERITED.items()]
    cells = table(head, (map(_cell, row) for row in rows))
    return f"{cells}\nAll others: [training arguments](training_arguments.md).\n"


def _cell(text: str) -> str:
    return "" if text == NOTHING else text.replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
