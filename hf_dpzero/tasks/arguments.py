"""`DataArguments`: which rows a recipe trains and evaluates on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hf_dpzero.values import one_of, positive

PromptKind = Literal["masked_lm", "causal_lm"]
Objective = Literal["loss", "accuracy", "f1"]


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Which rows a recipe trains and evaluates on.

    Attributes:
      task: name in the task registry: "sst2", "sst5", "trec", "rte", "snli", "mnli", "boolq",
        "squad", "drop", "quickstart" (generated, no network) or "text_classification" (any text
        column with a label column); or the path of a YAML file that describes a task.
      prompt: null trains a classification head; "masked_lm" asks a masked language model for the
        word at the mask, "causal_lm" a decoder for the words that follow the prompt.
      template: the prompt instead of the task's own: text with {field}s, and {mask} for masked_lm;
        for causal_lm with {answer} at its end.
      label_words: the words that stand for the labels, in label order, instead of the task's.
      objective: per example "loss" (cross entropy), or what cannot be differentiated: "accuracy"
        (1 - [right]) of a classification, "f1" (1 - F1) of a generated answer. Zeroth order only.
      max_new_tokens: most tokens of a generated answer, >= 1; room for them is kept in
        max_seq_length.
      num_demonstrations: training rows, drawn by `subset_seed`, put in front of each prompt; for
        `hf-dpzero evaluate` only, whose result is then not private.
      dataset_name: Hub data set; null takes the task's own.
      dataset_config_name: its configuration, for example "qqp" of "nyu-mll/glue".
      train_file: local JSON lines or CSV instead of the Hub; the private rows.
      validation_file: the same for evaluation, which is assumed public (see the privacy report).
      text_column: column with the text; null takes the task's own.
      text_pair_column: second text for sentence pairs; null for single sentences.
      label_column: column with the label; null takes the task's own.
      class_names: names of the labels in order; null reads them from the validation rows. The set of
        names is public (config.json ships it). For text_classification; other tasks name their
        labels. A row with another label is refused.
      keep_column: a further column that stays beside the rows; a recipe's `group_robust.column` sets
        it. Of classifications only.
      max_seq_length: tokens a text is cut to, >= 2.
      max_train_samples: keep this many training rows, chosen by `subset_seed`; null keeps all.
      max_eval_samples: the same for evaluation.
      num_examples_per_class: keep this many training rows of each class (few-shot, as in the
        paper's RoBERTa experiments); null keeps all.
      allow_fewer_per_class: where a class has fewer rows than num_examples_per_class, take all of
        them and say so (TREC's ABBR has 86); without it, such a class is refused.
      subset_seed: seed of the choice of rows, independent of every seed in the training arguments
        (`data_seed` is already the name of an argument of HF's Trainer).
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
    max_seq_length: int = 128
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
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
        for name in ("template", "label_words", "num_demonstrations", "objective"):
            value = getattr(self, name)
            if self.prompt is None and value and value != "loss":
                loss = ", or objective to loss" if name == "objective" else ""
                raise ValueError(
                    f"{name}={value!r} needs a prompt: set prompt to masked_lm or causal_lm{loss}."
                )
