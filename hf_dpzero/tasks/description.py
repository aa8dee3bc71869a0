"""A task in words: where its rows are, what their columns are called, how they become prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_dpzero.tasks.rows import HubSource
from hf_dpzero.tasks.templates import ANSWER, MASK, checked_template

METRICS = {"classification": ("accuracy", "macro_f1"), "generation": ("squad", "drop")}
PROMPT_KINDS = ("masked_lm", "causal_lm")


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
    """Everything about a task but its rows. Classification has `label_names`, generation
    `answer_columns`.

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
            raise ValueError(
                f"task {self.name!r} has label_names={list(self.label_names)} and answer_columns="
                f"{list(self.answer_columns)}: give label_names for a classification, or "
                "answer_columns where the answer is a text."
            )
        self._check_fields()
        kind = "generation" if self.generates else "classification"
        if self.metric not in METRICS[kind]:
            raise ValueError(
                f"task {self.name!r} has metric={self.metric!r}; a {kind} task has one of "
                f"{', '.join(METRICS[kind])}."
            )
        for prompt_kind, prompt in self.prompts.items():
            self._check_prompt(prompt_kind, prompt)

    def _check_fields(self) -> None:
        if not self.fields:
            raise ValueError(f"task {self.name!r} has no fields: name its text columns.")
        for name in (MASK, ANSWER):
            if name in self.fields:
                raise ValueError(
                    f"task {self.name!r} has a field {name!r}, which in a template stands for the "
                    "place of the label: call the field (or the column) something else."
                )
        for name in self.optional_fields:
            if name not in self.fields:
                raise ValueError(
                    f"task {self.name!r} has optional_fields with {name!r}, which is none of its "
                    f"fields {', '.join(self.fields)}."
                )

    def _check_prompt(self, kind: str, prompt: Prompt) -> None:
        known = PROMPT_KINDS[1:] if self.generates else PROMPT_KINDS
        if kind not in known:
            raise ValueError(
                f"task {self.name!r} has a prompt {kind!r}; there are {', '.join(known)}."
            )
        checked_template(prompt.template, kind, tuple(self.fields), self.optional_fields)
        if prompt.passage is not None and prompt.passage not in self.fields:
            raise ValueError(
                f"task {self.name!r} has passage={prompt.passage!r} in its prompt {kind}, which is "
                f"none of its fields {', '.join(self.fields)}."
            )
        if prompt.label_words and len(prompt.label_words) != len(self.label_names):
            raise ValueError(
                f"task {self.name!r} has {len(prompt.label_words)} label_words in its prompt {kind} "
                f"and {len(self.label_names)} labels: give one each."
            )

    @property
    def generates(self) -> bool:
        """Whether the answer is a generated text."""
        return bool(self.answer_columns)
