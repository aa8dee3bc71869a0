"""Question answering by generation: the answer's tokens are trained on, and decoded greedily.

The loss is the mean over an answer's own tokens; an answer ends with a new line (Malladi et al. 2023,
MeZO, arXiv:2305.17333, Appendix E).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dpzero.objectives.losses import IGNORE_INDEX
from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.tasks.description import TaskDescription
from hf_dpzero.tasks.metrics import Answer, answer_f1, answer_scores
from hf_dpzero.tasks.prompted import (
    Batch,
    Columns,
    PromptCollator,
    PromptTask,
    Row,
    column_tensor,
    id_tensors,
    padded,
    padding_id,
    prompt_of,
)
from hf_dpzero.tasks.rows import column_of, load_splits, require_columns, subset
from hf_dpzero.tasks.templates import Encoded, PromptEncoder

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

    from hf_dpzero.objectives.prompted import PromptObjective
    from hf_dpzero.training.evaluation import Metrics

END = "\n"
Golds = list[list[str]]


def prompted_generation(data: DataArguments, description: TaskDescription) -> PromptedGeneration:
    """Loads a question answering task from the Hub or from local files.

    Args:
      data: the recipe's rows, prompt and objective.
      description: the task's columns, prompts and metric.

    Raises:
      ValueError: no prompt, a masked one, settings of a classification, missing columns.
      OSError: the data cannot be found.
    """
    if data.prompt != "causal_lm":
        raise ValueError(
            f"task {description.name!r} generates its answers, which needs prompt: causal_lm, not "
            f"{data.prompt or 'a classification head'}."
        )
    if data.objective == "accuracy":
        raise ValueError("objective='accuracy' is for label words: use f1 or loss here.")
    no_labels = "has no labels; set max_train_samples for fewer rows"
    columns_own = "names its own columns: rename those of the rows, or describe it in a .yaml file"
    for why, names in (
        (no_labels, ("num_examples_per_class", "label_words", "class_names")),
        (columns_own, ("text_column", "text_pair_column", "label_column")),
    ):
        for name in names:
            value = getattr(data, name)
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} is not for task {description.name!r}, which {why}."
                )
    prompt, template = prompt_of(data, description)
    splits = load_splits(data, description.source)
    columns = {name: column_of(splits, known) for name, known in description.fields.items()}
    answers = column_of(splits, description.answer_columns)
    needed = [c for name, c in columns.items() if name not in description.optional_fields]
    require_columns(splits, [*needed, answers])
    return PromptedGeneration(
        name=description.name,
        head="causal_lm",
        prompt=prompt,
        template=template,
        columns=columns,
        answers=answers,
        splits=subset(splits, data),
        data=data,
        metric="f1",
        scored_as=description.metric,
    )


def gold_answers(value: Any) -> Golds:
    """Returns every accepted answer of a row, each as a list of spans.

    Args:
      value: a text or number, a list of them, a list of lists of spans, or a mapping that holds one of
        these as `text` (SQuAD) or `spans` (DROP).

    >>> gold_answers({"text": ["in May", "May", "May"], "answer_start": [1, 4, 4]})
    [['in May'], ['May']]
    >>> gold_answers([["red", "blue"]])
    [['red', 'blue']]
    >>> gold_answers("42")
    [['42']]
    """
    if isinstance(value, Mapping):
        value = value.get("text", value.get("spans"))

    def listed(value: Any) -> list[Any]:
        return [v for v in (value if isinstance(value, list) else [value]) if v is not None]

    golds = [[str(span) for span in listed(spans)] for spans in listed(value)]
    # Annotators mostly agree: the same answer three times would be scored three times.
    distinct = {tuple(spans): spans for spans in golds if any(span.strip() for span in spans)}
    return list(distinct.values())


class AnswerCollator(PromptCollator):
    """input_ids, attention_mask, labels `[B, T]`, references `[B]`; see `Answers`."""

    columns = ("input_ids", "prompt_length", "references")

    def __call__(self, rows: Sequence[Row]) -> Batch:
        ids = id_tensors(rows)
        labels = [tokens.clone() for tokens in ids]
        for row, tokens in zip(rows, labels, strict=True):
            tokens[: int(row["prompt_length"])] = IGNORE_INDEX
        return {
            **self.tokens(ids),
            "labels": padded(labels, IGNORE_INDEX, self.side, self.most),
            "references": column_tensor(rows, "references"),
        }


@dataclass(frozen=True, kw_only=True)
class PromptedGeneration(PromptTask):
    """Trains on an answer's tokens and scores the decoded one; see `PromptTask`.

    Attributes:
      answers: the column with the gold answers; the first is trained on, all are scored against.
      scored_as: "squad" or "drop".
    """

    answers: str
    scored_as: str

    def _encode(
        self, rows: list[dict[str, Any]], encoder: PromptEncoder, places: list[int]
    ) -> tuple[Columns, list[Encoded]]:
        """Columns input_ids (prompt and answer), prompt_length, references."""
        texts = [self.texts(row) for row in rows]
        answers = encoder.answer_ids(texts, [self._answer(row) + END for row in rows])
        # The model may answer in more tokens than the gold answer has.
        room = [max(len(answer), self.data.max_new_tokens) for answer in answers]
        prompts = encoder.encode(texts, [self.data.max_seq_length - size for size in room])
        columns: Columns = {
            "input_ids": [p.input_ids + a for p, a in zip(prompts, answers, strict=True)],
            "prompt_length": [len(prompt.input_ids) for prompt in prompts],
            "references": places,
        }
        return columns, prompts

    def _answer(self, row: Row) -> str:
        """The first gold answer, in one line, for a new line ends an answer."""
        golds = gold_answers(row[self.answers])
        if not golds:
            raise ValueError(
                f"column {self.answers!r} has rows without an answer; drop them (task {self.name!r} "
                "trains on answers and scores against them)."
            )
        return ", ".join(" ".join(span.split()) for span in golds[0])

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> AnswerCollator:
        """Returns prompt and answer in a row, labels on the answer alone."""
        most = self.data.max_seq_length
        return AnswerCollator(padding_id(tokenizer), tokenizer.padding_side, most)

    def objective(self, tokenizer: PreTrainedTokenizerBase) -> PromptObjective:
        """Returns the answer tokens' mean cross entropy, or with objective: f1 1 - F1 of the decoded."""
        from hf_dpzero.objectives.bounded import AnswerF1
        from hf_dpzero.objectives.prompted import Answers

        answers = Answers(
            max_new_tokens=self.data.max_new_tokens,
            stop_token_ids=stop_tokens(tokenizer),
            pad_token_id=padding_id(tokenizer),
        )
        if self.data.objective != "f1":
            return answers

        def f1(ids: Sequence[int], reference: int) -> float:
            answer, golds = self._scored(decoded_answer(tokenizer, ids), self._golds[reference])
            return answer_f1(answer, golds, self.scored_as)

        return AnswerF1(answers, f1)

    def _scored(self, text: str, golds: Golds) -> tuple[Answer, Sequence[Answer]]:
        """A text and its gold answers as the metric takes them: DROP's are lists of spans."""
        if self.scored_as == "squad":
            return text, [", ".join(spans) for spans in golds]
        # A comma separates spans only where the question has several: "Reno, Nevada" is one.
        return text.split(", ") if any(len(spans) > 1 for spans in golds) else [text], golds

    def metrics(self, tokenizer: PreTrainedTokenizerBase) -> Metrics:
        """Returns {"f1": ..., "exact_match": ...} by the official rules of SQuAD or DROP."""

        def compute(prediction: EvalPrediction) -> dict[str, float]:
            texts = [decoded_answer(tokenizer, ids) for ids in np.asarray(prediction.predictions)]
            golds = [self._golds[int(place)] for place in np.asarray(prediction.label_ids)]
            answers, references = zip(*map(self._scored, texts, golds), strict=True)
            return answer_scores(answers, references, self.scored_as)

        return compute

    @functools.cached_property
    def _golds(self) -> list[Golds]:
        """By place: those of the training rows, then those of the validation rows."""
        return [
            gold_answers(value) for rows in self.splits.values() for value in rows[self.answers][:]
        ]


def decoded_answer(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Returns generated tokens as an answer: up to the first new line, without white space around it."""
    kept = [int(token) for token in ids if token >= 0]
    return str(tokenizer.decode(kept, skip_special_tokens=True)).split(END, 1)[0].strip()


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that end an answer: the end of text, and a new line where it is a token."""
    # In the middle of a text, where some tokenizers write a new line otherwise than by itself.
    after = tokenizer(f"x{END}", add_special_tokens=False)["input_ids"]
    before = tokenizer("x", add_special_tokens=False)["input_ids"]
    lines = after[len(before) :] if after[: len(before)] == before else []
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return tuple(dict.fromkeys([*ends, *(lines if len(lines) == 1 else [])]))
