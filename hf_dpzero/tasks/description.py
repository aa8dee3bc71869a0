"""A task in words: where its rows are, what their columns are called, how they become prompts.

In Python a `TaskDescription`; as a file, `task: my_task.yaml` in a recipe:

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

The tasks that come with the package are such files too: `configs/tasks/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn, get_args

from hf_dpzero.shipped import find_config
from hf_dpzero.tasks.templates import ANSWER, MASK, checked_template
from hf_dpzero.values import listed, nearest, one_of, parse_yaml, positive

PromptKind = Literal["masked_lm", "causal_lm"]
Objective = Literal["loss", "accuracy", "f1"]
METRICS = {"classification": ("accuracy", "macro_f1"), "generation": ("squad", "drop")}
_KEYS = (
    "name", "dataset", "config", "revision", "validation_split", "fields", "optional_fields",
    "labels", "label_column", "drop_unlabelled", "answers", "metric", "prompts",
)  # fmt: skip
_PROMPT_KEYS = ("template", "label_words", "passage", "source")

Yaml = None | bool | float | str | list["Yaml"] | Mapping[str, "Yaml"]
"""What a YAML file may hold."""


@dataclass(frozen=True)
class HubSource:
    """Where a task's rows are on the Hub.

    Attributes:
      name: the data set.
      config: its configuration, if it has several.
      revision: branch, tag or commit; None is the default branch.
      validation: the split that is evaluated on; "test" is taken where there is none.
    """

    name: str
    config: str | None = None
    revision: str | None = None
    validation: str = "validation"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """How a row becomes text that a language model completes.

    Attributes:
      template: text with {field}s of the task; `{mask}` where a masked language model fills in the
        label word, or `{answer}` at the end for a decoder. See `templates` for {field:filter}s.
      label_words: the words that stand for the labels, in label order; () if answers are generated.
      passage: the field that is cut where a prompt is too long; None takes the row's longest.
      source: who wrote the template.
    """

    template: str
    label_words: tuple[str, ...] = ()
    passage: str | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskDescription:
    """Everything about a task but its rows.

    A classification has `label_names`, a task with generated answers `answer_columns`.

    Attributes:
      name: in the task registry.
      source: where the rows are on the Hub; None for a task of local files only.
      fields: name of each text field -> what its column may be called; the first that is there is
        taken. The first two are the texts of a classification head.
      optional_fields: fields whose column may be missing or empty; template lines with an empty one
        are left out.
      label_columns: names of the label column; the first that is there is taken.
      label_names: names of the labels 0, 1, ...; assumed public.
      answer_columns: the same for gold answers: a text, a list of texts, a list of lists of spans,
        or a mapping with such a list as `text` (SQuAD) or `spans` (DROP).
      drop_unlabelled: leave out rows with the label -1, instead of refusing them.
      prompts: "masked_lm" or "causal_lm" -> `Prompt`.
      metric: accuracy or macro_f1; squad or drop for generated answers.

    Raises:
      ValueError: neither labels nor answers, both, or a metric of the other kind; fields or prompts
        that do not fit together.
    """

    name: str
    source: HubSource | None = None
    fields: Mapping[str, tuple[str, ...]]
    optional_fields: tuple[str, ...] = ()
    label_columns: tuple[str, ...] = ("label",)
    label_names: tuple[str, ...] = ()
    answer_columns: tuple[str, ...] = ()
    drop_unlabelled: bool = False
    prompts: Mapping[str, Prompt] = field(default_factory=dict)
    metric: str = "accuracy"

    def __post_init__(self) -> None:
        if bool(self.label_names) == bool(self.answer_columns):
            self._refuse(
                f"label_names={list(self.label_names)} and answer_columns={list(self.answer_columns)}: "
                "give label_names for a classification, or answer_columns where the answer is a text."
            )
        if not self.fields:
            self._refuse("no fields: name its text columns.")
        for name in {MASK, ANSWER} & set(self.fields):
            self._refuse(
                f"a field {name!r}, which in a template stands for the place of the label: call the "
                "field (or the column) something else."
            )
        none = f"which is none of its fields {', '.join(self.fields)}."
        for name in self.optional_fields:
            if name not in self.fields:
                self._refuse(f"optional_fields with {name!r}, {none}")
        kind = "generation" if self.generates else "classification"
        if self.metric not in METRICS[kind]:
            self._refuse(
                f"metric={self.metric!r}; a {kind} task has one of {', '.join(METRICS[kind])}."
            )
        # A mask is filled by one token, which is no answer.
        kinds = ("causal_lm",) if self.generates else ("masked_lm", "causal_lm")
        for kind, prompt in self.prompts.items():
            if kind not in kinds:
                self._refuse(f"a prompt {kind!r}; there are {', '.join(kinds)}.")
            checked_template(prompt.template, kind, tuple(self.fields), self.optional_fields)
            if prompt.passage is not None and prompt.passage not in self.fields:
                self._refuse(f"passage={prompt.passage!r} in its prompt {kind}, {none}")
            if prompt.label_words and len(prompt.label_words) != len(self.label_names):
                self._refuse(
                    f"{len(prompt.label_words)} label_words in its prompt {kind} and "
                    f"{len(self.label_names)} labels: give one each."
                )

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"task {self.name!r} has {why}")

    @property
    def generates(self) -> bool:
        """Whether the answer is a generated text."""
        return bool(self.answer_columns)


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Which rows a recipe trains and evaluates on.

    Attributes:
      task: name in the task registry: "sst2", "sst5", "trec", "rte", "snli", "mnli", "boolq",
        "squad", "drop", "quickstart" (generated, no network) or "text_classification" (any text
        column with a label column); or the path of a YAML file that describes a task.
      prompt: "masked_lm" asks a masked language model for the word at the mask, "causal_lm" a
        decoder for the words that follow the prompt.
      template: the prompt instead of the task's own: text with {field}s, and {mask} for masked_lm;
        for causal_lm with {answer} at its end. With prompt: null the text that the head reads,
        without either: both texts of a pair in one.
      label_words: the words that stand for the labels, in label order.
      objective: per example "loss" (cross entropy), or what cannot be differentiated: "accuracy" (1
        - [right]) of a classification, "f1" (1 - F1) of a generated answer. Zeroth order only.
      max_new_tokens: most tokens of a generated answer, >= 1; room for them is kept in
        max_seq_length.
      num_demonstrations: training rows, drawn by `subset_seed`, put in front of each prompt; for
        `hf-dpzero evaluate` only, whose result is then not private.
      dataset_name: Hub data set.
      dataset_config_name: its configuration, for example "qqp" of "nyu-mll/glue".
      train_file: a file (.jsonl, .json, .csv, .tsv, .parquet) instead of the Hub; the private rows.
      validation_file: the same for evaluation, which is assumed public.
      text_column: column with the text.
      text_pair_column: second text of sentence pairs.
      label_column: column with the label.
      class_names: names of the labels in order, for text_classification; published. A row with
        another label is refused.
      keep_column: a further column that stays beside the rows; a recipe's `group_robust.column` or
        `unit_column` sets it. Of classifications only.
      whole_units: max_train_samples counts values of keep_column, with all rows of each; a recipe's
        `unit_column` sets it.
      max_seq_length: tokens a text is cut to, >= 2.
      max_train_samples: keep this many training rows (with `unit_column` units), those whose keyed
        hashes by `subset_seed` are smallest.
      max_eval_samples: the same for evaluation.
      holdout: share of the training rows that are not trained on, for private evaluation
        (`hf-dpzero evaluate --epsilon`), by a keyed hash of each row or unit.
      num_examples_per_class: keep this many training rows of each class (few-shot).
      allow_fewer_per_class: where a class has fewer rows than num_examples_per_class, take all of
        them; without it, such a class is refused.
      subset_seed: seed of the choice of rows.
    """

    task: str = "text_classification"
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    train_file: str | None = None
    validation_file: str | None = None
    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str | None = None
    class_names: list[str] | None = None
    keep_column: str | None = None
    whole_units: bool = False
    max_seq_length: int = 128
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    holdout: float = 0.0
    num_examples_per_class: int | None = None
    allow_fewer_per_class: bool = False
    subset_seed: int = 0
    prompt: PromptKind | None = None
    template: str | None = None
    label_words: list[str] | None = None
    objective: Objective = "loss"
    max_new_tokens: int = 50
    num_demonstrations: int = 0

    def __post_init__(self) -> None:
        positive(self, "max_train_samples", "max_eval_samples", "num_examples_per_class")
        positive(self, "max_new_tokens")
        one_of(self, "prompt", (None, *get_args(PromptKind)), "null trains a head")
        one_of(self, "objective", get_args(Objective), "loss suits every method")
        for name in ("subset_seed", "num_demonstrations"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more.")
        columns = [self.text_column, self.text_pair_column, self.label_column]
        named = [column for column in columns if column is not None]
        if len(set(named)) < len(named):
            raise ValueError(
                f"text_column, text_pair_column and label_column are {named}: name different columns."
            )
        if self.whole_units and self.num_examples_per_class:
            raise ValueError(
                f"num_examples_per_class={self.num_examples_per_class} with unit_column: one unit more "
                "could change the drawn rows of several. Set max_train_samples, which counts units then."
            )
        if not 0 <= self.holdout < 1:
            raise ValueError(
                f"holdout={self.holdout} is no share of the rows: at least 0, below 1."
            )
        if self.max_seq_length < 2:
            raise ValueError(
                f"max_seq_length={self.max_seq_length} leaves no room for text; use at least 2."
            )
        names = self.class_names
        if names is not None and (
            len(names) < 2 or len(set(names)) < len(names) or not all(map(str.strip, names))
        ):
            raise ValueError(
                f"class_names={names!r} must be two or more different names, one for each label."
            )
        if self.prompt is None and any(f"{{{n}}}" in (self.template or "") for n in (MASK, ANSWER)):
            raise ValueError(
                f"template={self.template!r} has a place for the label and needs a prompt: set prompt "
                "to masked_lm or causal_lm, or leave out {mask} and {answer}, where a head answers."
            )
        for name in ("label_words", "num_demonstrations", "objective"):
            value = getattr(self, name)
            if self.prompt is None and value and value != "loss":
                loss = ", or objective to loss" if name == "objective" else ""
                raise ValueError(
                    f"{name}={value!r} needs a prompt: set prompt to masked_lm or causal_lm{loss}."
                )


def read_task(path: str) -> TaskDescription:
    """Reads a description from a YAML file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not YAML, unknown or missing keys, or what `TaskDescription` refuses; names the file.
    """
    file = find_config(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"task {path!r} not found, neither beside the recipe nor in {Path.cwd()}."
        )
    try:
        return described(parse_yaml(file.read_text(encoding="utf-8")), file.stem)
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path}: {error}") from error


def described(written: Yaml, name: str) -> TaskDescription:
    """Builds the description of a mapping with the keys of a task file.

    Args:
      written: the mapping; a key that is null counts as left out.
      name: of a task that has none.

    Raises:
      ValueError: as `read_task`.
    """
    values = _checked_keys(written, _KEYS, "a task")
    if "fields" not in values:
        raise ValueError("fields is missing: name the text columns, such as {text: text}.")
    columns = values["fields"]
    if not isinstance(columns, Mapping):  # a field without a column is called as its column
        columns = dict.fromkeys(_words(columns, "fields"))
    fields = {str(key): _words(named, key) or (str(key),) for key, named in columns.items()}
    if empty := [key for key, named in columns.items() if named == []]:
        raise ValueError(f"field {empty[0]}: [] names no column.")
    prompts = values.get("prompts", {})
    if not isinstance(prompts, Mapping):
        raise ValueError(f"prompts: {prompts!r} is not a mapping of masked_lm or causal_lm.")
    source = None
    if "dataset" in values:
        source = HubSource(
            name=_text(values, "dataset"),
            config=_text(values, "config") or None,
            revision=_text(values, "revision") or None,
            validation=_text(values, "validation_split", "validation"),
        )
    # `no` is text in YAML 1.2, so that a label may be called so.
    unlabelled = str(values.get("drop_unlabelled", False)).lower()
    if unlabelled not in ("true", "yes", "false", "no"):
        raise ValueError(f"drop_unlabelled: {values['drop_unlabelled']!r} is not true or false.")
    answers = _words(values.get("answers"), "answers")
    return TaskDescription(
        name=_text(values, "name", name),
        source=source,
        fields=fields,
        optional_fields=_words(values.get("optional_fields"), "optional_fields"),
        label_columns=_words(values.get("label_column", "label"), "label_column"),
        label_names=_words(values.get("labels"), "labels"),
        answer_columns=answers,
        drop_unlabelled=unlabelled in ("true", "yes"),
        prompts={str(kind): _prompt(prompt, str(kind)) for kind, prompt in prompts.items()},
        metric=_text(values, "metric", METRICS["generation" if answers else "classification"][0]),
    )


def _prompt(written: Yaml, kind: str) -> Prompt:
    values = _checked_keys(written, _PROMPT_KEYS, f"the prompt {kind}")
    if "template" not in values:
        raise ValueError(f"the prompt {kind} has no template.")
    return Prompt(
        template=_text(values, "template").rstrip("\n"),  # a block of YAML ends with a new line
        label_words=_words(values.get("label_words"), "label_words"),
        passage=_text(values, "passage") or None,
        source=_text(values, "source"),
    )


def _text(values: Mapping[str, Yaml], key: str, otherwise: str = "") -> str:
    value = values.get(key, otherwise)
    if not isinstance(value, str):
        raise ValueError(f"{key}: {value!r} is not text; put it into quotes.")
    return value


def _words(value: Yaml, key: str) -> tuple[str, ...]:
    """Reads a list of texts, or text with commas between them; () of None."""
    words = [] if value is None else listed(value)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{key}: {value!r} is not text or a list of texts; put it into quotes.")
    return tuple(words)


def _checked_keys(values: Yaml, known: tuple[str, ...], what: str) -> dict[str, Yaml]:
    """Returns a mapping of known keys, less those that are null."""
    if not isinstance(values, Mapping):
        kind = "a list" if isinstance(values, list) else "one text or number"
        raise ValueError(f"{what} is lines of `key: value`, this is {kind}.")
    for key in values:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}."
            raise ValueError(f"{what} has an unknown key {key!r}; {hint}")
    return {key: value for key, value in values.items() if value is not None}
