"""A task described in a YAML file: `task: my_task.yaml` in a recipe.

```yaml
name: tickets
dataset: me/tickets            # on the Hub; or leave it out and set train_file, validation_file
fields: {subject: subject, body: [body, text]}   # field: its column, or what it may be called
labels: [billing, outage]      # or `answers: COLUMN` where the answer is a text
label_column: label
metric: macro_f1               # accuracy, macro_f1; squad or drop for answers
prompts:
  masked_lm:
    template: "{subject}. {body} This is about {mask}."
    label_words: [money, failure]
    passage: body              # what is cut where a prompt is too long
```
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dpzero.tasks.description import METRICS, Prompt, TaskDescription
from hf_dpzero.tasks.rows import HubSource
from hf_dpzero.values import nearest, parse_yaml

_KEYS = (
    "name", "dataset", "config", "revision", "validation_split", "fields", "optional_fields",
    "labels", "label_column", "drop_unlabelled", "answers", "metric", "prompts",
)  # fmt: skip
_PROMPT_KEYS = ("template", "label_words", "passage", "source")


def read_task(path: str) -> TaskDescription:
    """The description in a YAML file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not YAML, unknown or missing keys, or what `TaskDescription` refuses; names the file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"task {path!r} not found (paths are relative to {Path.cwd()}).")
    try:
        return described_by(parse_yaml(Path(path).read_text(encoding="utf-8")), Path(path).stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def described_by(values: Any, name: str = "task") -> TaskDescription:
    """The description in a mapping with the keys of a task file; `name` where it has none.

    Raises:
      ValueError: as `read_task`.
    """
    values = _given(values, _KEYS, "a task")
    if "fields" not in values:
        raise ValueError("fields is missing: name the text columns, such as {text: text}.")
    answers = _words(values.get("answers"), "answers")
    return TaskDescription(
        name=_text(values, "name", name),
        source=_source(values),
        fields=_fields(values["fields"]),
        optional_fields=_words(values.get("optional_fields"), "optional_fields"),
        label_columns=_words(values.get("label_column", "label"), "label_column"),
        label_names=_words(values.get("labels"), "labels"),
        answer_columns=answers,
        drop_unlabelled=_truth(values, "drop_unlabelled"),
        prompts=_prompts(values.get("prompts", {})),
        metric=_text(values, "metric", METRICS["generation" if answers else "classification"][0]),
    )


def _source(values: Mapping[str, Any]) -> HubSource | None:
    if "dataset" not in values:
        return None
    given = {"config": "config", "revision": "revision", "validation_split": "validation"}
    settings = {field: _text(values, key) for key, field in given.items() if key in values}
    return HubSource(_text(values, "dataset"), **settings)


def _fields(values: Any) -> dict[str, tuple[str, ...]]:
    if isinstance(values, Mapping):
        return {str(name): _columns(str(name), columns) for name, columns in values.items()}
    return {name: (name,) for name in _words(values, "fields")}


def _columns(field: str, values: Any) -> tuple[str, ...]:
    """What a field's column may be called; the field's own name where nothing is said."""
    columns = _words(values, field)
    if not columns and values is not None:
        raise ValueError(f"field {field}: {values!r} names no column.")
    return columns or (field,)


def _prompts(values: Any) -> dict[str, Prompt]:
    if not isinstance(values, Mapping):
        raise ValueError(f"prompts: {values!r} is not a mapping of masked_lm or causal_lm.")
    return {str(kind): _prompt(str(kind), prompt) for kind, prompt in values.items()}


def _prompt(kind: str, values: Any) -> Prompt:
    values = _given(values, _PROMPT_KEYS, f"the prompt {kind}")
    if "template" not in values:
        raise ValueError(f"the prompt {kind} has no template.")
    return Prompt(
        template=_text(values, "template").rstrip("\n"),
        label_words=_words(values.get("label_words"), "label_words"),
        passage=_text(values, "passage") or None,
        source=_text(values, "source"),
    )


def _text(values: Mapping[str, Any], key: str, otherwise: str = "") -> str:
    value = values.get(key, otherwise)
    if not isinstance(value, str):
        raise ValueError(f"{key}: {value!r} is not text; put it into quotes.")
    return value


def _truth(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key}: {value!r} is not true or false.")
    return value


def _words(value: Any, key: str) -> tuple[str, ...]:
    """One text or a list of texts."""
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(word, str) for word in listed):
        raise ValueError(f"{key}: {value!r} is not text or a list of texts; put it into quotes.")
    return tuple(listed)


def _given(values: Any, known: tuple[str, ...], what: str) -> dict[str, Any]:
    """A mapping of known keys, less those that are null."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} is lines of `key: value`, this is {values!r}.")
    for key in values:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}."
            raise ValueError(f"{what} has an unknown key {key!r}; {hint}")
    return {key: value for key, value in values.items() if value is not None}
