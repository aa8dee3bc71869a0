"""Classification by prompts: which of the label words does the language model expect?

A masked language model is asked for the word at the mask (Gao et al. 2021, LM-BFF,
arXiv:2012.15723), a decoder for the words after the prompt: one pass over the prompt where every
label is one token, one over each candidate where not (Malladi et al. 2023, MeZO, arXiv:2305.17333).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.tasks.collators import CandidateCollator, LabelWordCollator
from hf_dpzero.tasks.description import TaskDescription
from hf_dpzero.tasks.metrics import classification_scores
from hf_dpzero.tasks.prompt_encoding import Encoded, PromptEncoder, mask_word_ids
from hf_dpzero.tasks.prompted import PromptTask, padding_id, prompt_of
from hf_dpzero.tasks.task import Task

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

    from hf_dpzero.objectives.prompted import PromptObjective

logger = logging.getLogger(__name__)


def prompted_classification(
    task: Task, data: DataArguments, description: TaskDescription
) -> PromptedClassification:
    """A classification task's rows as prompts.

    Args:
      task: with its labelled rows.
      data: the recipe's prompt, template, label words and objective.
      description: the task's fields and prompts.

    Returns:
      The prompted task.

    Raises:
      ValueError: as `prompt_of`; label words missing, blank, with braces, or of another number
        than the labels; a second text that the task does not have; an objective other than loss and
        accuracy.
    """
    if len(task.text_columns) != len(description.fields):
        raise ValueError(
            f"text_pair_column={data.text_pair_column!r} names a second text, and task {task.name!r} "
            f"has one text ({', '.join(description.fields)}): leave it out, or use task: "
            "text_classification with a template and label_words."
        )
    prompt, template = prompt_of(data, description)
    words, names = prompt.label_words, task.label_names
    if len(words) != len(names):
        raise ValueError(
            f"label_words has {len(words)} words ({', '.join(words)}) for the {len(names)} "
            f"labels {', '.join(names)}; give one each, in this order."
        )
    for word, label in zip(words, names, strict=True):
        if not word or word != word.strip():
            raise ValueError(
                f"label word {word!r} of {label} is blank or has white space around it: give the bare "
                "word, and put the space before it into the template."
            )
        if "{" in word or "}" in word:
            raise ValueError(
                f"label word {word!r} of {label} holds a brace: label words are the same for every row, "
                "and no templates of its fields. Choices that differ from row to row are multiple "
                "choice: start from scripts/examples/multiple_choice.py."
            )
    lower_words, lower_names = [[text.lower() for text in texts] for texts in (words, names)]
    if lower_words != lower_names and sorted(lower_words) == sorted(lower_names):
        raise ValueError(
            f"label_words are {', '.join(words)}, but the labels in their order are {', '.join(names)} "
            "(labels that are text are sorted): write label_words in the order of the labels, or give "
            "class_names in the order of the words."
        )
    pairs = ", ".join(f"{name}: {word!r}" for name, word in zip(names, words, strict=True))
    logger.info("label words: %s", pairs)
    if data.objective == "f1":
        raise ValueError(
            f"objective='f1' scores generated answers, and {task.name!r} is a classification: use "
            "accuracy or loss."
        )
    return PromptedClassification(
        name=task.name,
        head=str(data.prompt),
        prompt=prompt,
        template=template,
        columns=dict(zip(description.fields, task.text_columns, strict=True)),
        splits=task.splits,
        data=data,
        label_names=task.label_names,
        metric=task.metric,
    )


@dataclass(frozen=True, kw_only=True)
class PromptedClassification(PromptTask):
    """See `PromptTask`; rows have an integer column "label"."""

    def _encode(
        self, rows: list[dict[str, Any]], encoder: PromptEncoder, places: list[int]
    ) -> tuple[dict[str, list[Any]], list[Encoded]]:
        """Columns input_ids, positions, labels."""
        longest = max(map(len, self.words(encoder.tokenizer))) if self.head == "causal_lm" else 0
        limits = [self.data.max_seq_length - longest] * len(rows)
        prompts = encoder.encode([self.texts(row) for row in rows], limits)
        columns: dict[str, list[Any]] = {
            "input_ids": [prompt.input_ids for prompt in prompts],
            "positions": [prompt.position for prompt in prompts],
            "labels": [row["label"] for row in rows],
        }
        return columns, prompts

    def _answer(self, row: Mapping[str, Any]) -> str:
        return self.prompt.label_words[row["label"]]

    def words(self, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
        """The tokens of each label's words."""
        words = self.prompt.label_words
        if self.head == "masked_lm":
            ids: list[Any] = [(token,) for token in mask_word_ids(tokenizer, words)]
        else:
            encoder = PromptEncoder(tokenizer, self.template, self.head)
            row = dict.fromkeys(self.columns, "x")
            ids = [*map(tuple, encoder.answer_ids([row] * len(words), words))]
        for index, word in enumerate(words):
            first = ids.index(ids[index])
            if first != index:
                raise ValueError(
                    f"label words {words[first]!r} and {word!r} are the same tokens {ids[index]}, so "
                    "the model cannot tell these labels apart: choose other label_words."
                )
        return tuple(ids)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Any], dict[str, Any]]:
        """One row of tokens an example, or L where label words have several tokens."""
        padding = (padding_id(tokenizer), tokenizer.padding_side, self.data.max_seq_length)
        words = self.words(tokenizer)
        if all(len(word) == 1 for word in words):
            return LabelWordCollator(*padding)
        return CandidateCollator(*padding, answers=words)

    def objective(self, tokenizer: PreTrainedTokenizerBase) -> PromptObjective:
        """Cross entropy over the labels, or with objective: accuracy 1 - [right]."""
        from hf_dpzero.objectives.bounded import ZeroOne
        from hf_dpzero.objectives.prompted import Candidates, LabelWords

        words = self.words(tokenizer)
        single = all(len(word) == 1 for word in words)
        scored: Any = LabelWords(tuple(word[0] for word in words)) if single else Candidates()
        return ZeroOne(scored) if self.data.objective == "accuracy" else scored

    def metrics(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[EvalPrediction], dict[str, float]]:
        """{"accuracy": ...}, and {"macro_f1": ...} where that is the task's metric."""

        def compute(prediction: EvalPrediction) -> dict[str, float]:
            chosen = np.argmax(np.asarray(prediction.predictions), axis=-1)
            return classification_scores(chosen, np.asarray(prediction.label_ids), self.metric)

        return compute
