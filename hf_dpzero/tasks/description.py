"""A task in words: where its rows are, what their columns are called, how they become prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_dpzero.tasks.sources import HubSource

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
      ValueError: neither labels nor answers, both, or a metric of the other kind.
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
        if not self.fields:
            raise ValueError(f"task {self.name!r} has no fields: name its text columns.")
        kind = "generation" if self.generates else "classification"
        if self.metric not in METRICS[kind]:
            raise ValueError(
                f"task {self.name!r} has metric={self.metric!r}; a {kind} task has one of "
                f"{', '.join(METRICS[kind])}."
            )
        for unknown in set(self.prompts) - set(PROMPT_KINDS):
            raise ValueError(
                f"task {self.name!r} has a prompt {unknown!r}; there are {', '.join(PROMPT_KINDS)}."
            )

    @property
    def generates(self) -> bool:
        """Whether the answer is a generated text."""
        return bool(self.answer_columns)
