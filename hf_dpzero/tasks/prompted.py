"""Rows as prompts for a language model: what all prompted tasks share, and classification.

A masked language model is asked for the word at the mask (Gao et al. 2021, LM-BFF, arXiv:2012.15723), a
decoder for the words after the prompt: one pass over the prompt where every label is one token, one over
each candidate where not (Malladi et al. 2023, MeZO, arXiv:2305.17333).

Collators pad row by row with tensor operations, never token by token, and give one row for each example.
Positions are counted from a row's first attended token, so they hold whichever side is padded.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch
from torch import Tensor

from hf_dpzero import __version__
from hf_dpzero.objectives.losses import IGNORE_INDEX
from hf_dpzero.tasks.classification import PAD_TO_MULTIPLE_OF, Task, chosen_scores
from hf_dpzero.tasks.description import DataArguments, Prompt, TaskDescription
from hf_dpzero.tasks.templates import (
    ANSWER,
    MASK,
    Encoded,
    PromptEncoder,
    Template,
    checked_template,
    mask_word_ids,
)

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

    from hf_dpzero.objectives.prompted import PromptObjective

    Metrics = Callable[[EvalPrediction], dict[str, float]]

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
Batch = dict[str, Tensor]
Columns = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class PromptTask(ABC):
    """A task whose rows become prompts for a language model.

    Attributes:
      name: its name in the task registry.
      head: "masked_lm" or "causal_lm": what kind of model it is for.
      prompt: template, label words, and which field may be cut.
      template: the prompt's, parsed.
      columns: field -> its column in `splits`.
      splits: "train" (the private rows) and "validation" (assumed public).
      data: the recipe's settings: lengths, objective, demonstrations.
      label_names: of a classification, in label order; assumed public.
      metric: the name of what evaluation returns.
    """

    name: str
    head: str
    prompt: Prompt
    template: Template
    columns: Mapping[str, str]
    splits: datasets.DatasetDict
    data: DataArguments
    label_names: tuple[str, ...] = ()
    metric: str = "accuracy"

    @property
    def num_labels(self) -> int:
        """The number of classes; 0 where answers are generated."""
        return len(self.label_names)

    @abstractmethod
    def collator(self, tokenizer: PreTrainedTokenizerBase) -> PromptCollator:
        """Returns what pads encoded rows into one batch, a row an example."""

    def _collator(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: tuple[str, ...],
        candidates: tuple[tuple[int, ...], ...] = (),
    ) -> PromptCollator:
        padding = padding_id(tokenizer)
        most = self.data.max_seq_length
        return PromptCollator(padding, columns, tokenizer.padding_side, most, candidates)

    @abstractmethod
    def objective(self, tokenizer: PreTrainedTokenizerBase) -> PromptObjective:
        """Returns what is minimised, and what a model predicts."""

    @abstractmethod
    def metrics(self, tokenizer: PreTrainedTokenizerBase) -> Metrics:
        """Returns what makes named scores in [0, 1] of predictions of the objective."""

    @abstractmethod
    def _answer(self, row: Row) -> str:
        """A row's answer as text."""

    @abstractmethod
    def _encode(
        self, rows: list[dict[str, Any]], encoder: PromptEncoder, places: list[int]
    ) -> tuple[Columns, list[Encoded]]:
        """Columns for the collator, and the prompts that they were made of.

        `places` are the rows' numbers, counted through all splits.
        """

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        pair_features: str = "joint",
        only: str | None = None,
    ) -> datasets.DatasetDict:
        """Encodes the rows as `collator` takes them.

        Passages that are too long are cut; of validation rows it is logged how many. `datasets` keeps
        what was made of rows from files, and finds it again by its fingerprint of the rows, of this task
        without its rows, of the tokenizer and of the package's version.

        Args:
          tokenizer: the model's.
          pair_features: has no meaning here; as in `Task.tokenize`.
          only: the split that is wanted; None for all.

        Returns:
          The splits, a row an example.

        Raises:
          ValueError: label words that the tokenizer cannot spell, no room for the template,
            max_seq_length beyond what the tokenizer allows, or demonstrations for training rows.
        """
        limit, shown = self.data.max_seq_length, self.data.num_demonstrations
        if limit > tokenizer.model_max_length:
            raise ValueError(
                f"max_seq_length={limit} is beyond the {tokenizer.model_max_length} tokens that the "
                "model takes; lower it."
            )
        if shown and only != "validation":
            raise ValueError(
                f"num_demonstrations={shown} would put these training rows into every example, so that "
                "no clip bounds them: they are for evaluation, tokenize(..., only='validation')."
            )
        settings = {
            "task": dataclasses.replace(self, splits=datasets.DatasetDict()),  # rows have their own
            "encoder": self.encoder(tokenizer),
            "version": __version__,  # the fingerprint does not see how this package's code changes
        }
        # A row is known by its place among all splits, also those that are not wanted now.
        encoded, start = datasets.DatasetDict(), 0
        for split, rows in self.splits.items():
            if only in (None, split):
                made = rows.map(
                    _encode_batch,
                    with_indices=True,
                    batched=True,
                    batch_size=256,
                    remove_columns=rows.column_names,
                    fn_kwargs={**settings, "start": start},
                    desc=f"prompts ({split})",
                )
                self._say_what_is_cut(split, sum(made["cut"][:]), len(made))
                if any(made["left_out"][:]):
                    logger.warning(
                        "some prompts have no room for all demonstrations, and the first are left out: "
                        "raise max_seq_length, or lower num_demonstrations."
                    )
                encoded[split] = made.remove_columns(["cut", "left_out"])
            start += len(rows)
        return encoded

    def _say_what_is_cut(self, split: str, cut: int, rows: int) -> None:
        limit = f"more than max_seq_length={self.data.max_seq_length} tokens"
        end = f"cut at the end of their {self.prompt.passage or 'longest field'}"
        # A count of private rows, even 0, would be published with the logs.
        if split != "validation":
            logger.info(f"{split} prompts of {limit} are {end}; raise it to keep them whole.")
        elif cut:
            logger.warning(f"{cut} of {rows} {split} prompts have {limit}: they are {end}.")

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
        """Returns what makes tokens of prompts, with the training rows shown in front of each."""
        train, wanted = self.splits.get("train", ()), self.data.num_demonstrations
        if wanted > len(train):
            raise ValueError(
                f"num_demonstrations={wanted}, but there are {len(train)} training rows; lower it."
            )
        generator = np.random.Generator(np.random.PCG64([self.data.subset_seed, 2]))
        chosen = generator.choice(len(train), wanted, replace=False) if wanted else ()
        shown = tuple(self.example(train[int(index)]) for index in chosen)
        return PromptEncoder(tokenizer, self.template, self.head, self.prompt.passage, shown)

    def example(self, row: Row) -> str:
        """Returns a demonstration: a row's prompt with its answer."""
        answer = self._answer(row)
        return self.template.render({**self.texts(row), MASK: answer, ANSWER: answer})

    def texts(self, row: Row) -> dict[str, str]:
        """Returns a row's fields, "" for those that it does not have."""
        texts = {}
        for name, column in self.columns.items():
            value = row.get(column)
            if isinstance(value, (list, dict)):
                raise ValueError(
                    f"column {column!r} holds a {type(value).__name__} of {len(value)} entries, and a "
                    "prompt is made of text: choose another column, or join it."
                )
            texts[name] = "" if value is None else str(value)
        return texts


def _encode_batch(
    batch: Columns,
    indices: list[int],
    *,
    task: PromptTask,
    encoder: PromptEncoder,
    start: int,
    version: str,
) -> Columns:
    """`PromptTask._encode` for `datasets.Dataset.map`, which hashes the arguments."""
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    columns, prompts = task._encode(rows, encoder, [start + index for index in indices])
    cut, left_out = [p.cut for p in prompts], [p.left_out for p in prompts]
    return {**columns, "cut": cut, "left_out": left_out}


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the padding token, or where there is none the end token, which the mask leaves out."""
    token = tokenizer.pad_token_id
    return int(token if token is not None else tokenizer.eos_token_id or 0)


def prompt_of(data: DataArguments, description: TaskDescription) -> tuple[Prompt, Template]:
    """Returns the task's prompt of the kind that a recipe asks for, and its template parsed.

    Args:
      data: the recipe's kind of prompt, and its own template and label words if it has any.
      description: the task's prompts.

    Raises:
      ValueError: the task has no such prompt and the recipe no template, or the template drops the
        label or the text.
    """
    kind = str(data.prompt)
    known = description.prompts.get(kind)
    if known is None and data.template is None:
        others = ", ".join(description.prompts) or "none"
        raise ValueError(
            f"task {description.name!r} has no template for prompt={kind} (it has: {others}); set "
            "template (and label_words), or another prompt."
        )
    known = known or Prompt(template="")
    words = tuple(data.label_words) if data.label_words is not None else known.label_words
    text = (known.template if data.template is None else data.template).rstrip("\n")
    template = checked_template(text, kind, tuple(description.fields), description.optional_fields)
    # A template of the recipe's own may leave out the field that the task's would cut.
    passage = known.passage if known.passage in template.used_fields else None
    return Prompt(template=text, label_words=words, passage=passage, source=known.source), template


def padded(rows: Sequence[Tensor], value: int, side: str, most: int | None = None) -> Tensor:
    """Stacks 1-D tensors as one `[N, T]`, T the longest rounded up to a multiple of 8, or to `most`.

    >>> padded([torch.tensor([1, 2]), torch.tensor([3])], 0, "left")[:, -2:]
    tensor([[1, 2],
            [0, 3]])
    """
    longest = max(row.numel() for row in rows)
    length = -(-longest // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF
    # Never beyond what the model has positions for, but for a row that is longer itself.
    length = max(longest, min(length, most or length))
    padded_rows = torch.full((len(rows), length), value, dtype=torch.int64)
    for target, row in zip(padded_rows, rows, strict=True):
        part = slice(None, row.numel()) if side == "right" else slice(length - row.numel(), None)
        target[part] = row
    return padded_rows


@dataclass(frozen=True)
class PromptCollator:
    """Pads encoded prompts: input_ids and attention_mask `[B, T]`, and other columns `[B]`, all int64.

    With a column prompt_length labels `[B, T]` are the tokens after each prompt (see `Answers`). With
    candidates each row becomes L, `[B, L, T]`, with answer_lengths `[B, L]` (see `Candidates`).

    Attributes:
      pad_token_id: what fills up a row.
      columns: of encoded rows, which a trainer must not drop.
      side: "right" or "left".
      most: tokens that no row exceeds; padding to a multiple of 8 stops there.
      candidates: the tokens of each of L answers, put behind the prompt.
    """

    pad_token_id: int
    columns: tuple[str, ...]
    side: str = "right"
    most: int | None = None
    candidates: tuple[tuple[int, ...], ...] = ()

    def __call__(self, rows: Sequence[Row]) -> Batch:
        ids = [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
        shape, others = [len(rows)], dict[str, Tensor]()
        for name in self.columns:
            if name not in ("input_ids", "prompt_length"):
                others[name] = torch.tensor([int(row[name]) for row in rows])
        if "prompt_length" in self.columns:
            labels = [tokens.clone() for tokens in ids]
            for row, tokens in zip(rows, labels, strict=True):
                tokens[: int(row["prompt_length"])] = IGNORE_INDEX
            others["labels"] = padded(labels, IGNORE_INDEX, self.side, self.most)
        if self.candidates:
            endings = [torch.tensor(answer) for answer in self.candidates]
            ids = [torch.cat([row, end]) for row in ids for end in endings]
            shape.append(len(endings))
            lengths = torch.tensor([len(answer) for answer in self.candidates])
            others["answer_lengths"] = lengths.expand(len(rows), -1).contiguous()
        masks = [torch.ones_like(row) for row in ids]
        return {
            "input_ids": padded(ids, self.pad_token_id, self.side, self.most).reshape(*shape, -1),
            "attention_mask": padded(masks, 0, self.side, self.most).reshape(*shape, -1),
            **others,
        }


def prompted_classification(
    task: Task, data: DataArguments, description: TaskDescription | None
) -> PromptedClassification:
    """Returns a classification task with its rows as prompts.

    Args:
      task: with its labelled rows.
      data: the recipe's prompt, template, label words and objective.
      description: the task's fields and prompts; None takes the columns as fields, and all else from
        the recipe.

    Raises:
      ValueError: as `prompt_of`; label words missing, blank, with braces, or of another number
        than the labels; a second text that the task does not have; an objective other than loss and
        accuracy.
    """
    names = task.label_names
    if description is None:
        fields = {column: (column,) for column in task.text_columns}
        description = TaskDescription(name=task.name, fields=fields, label_names=names)
    if len(task.text_columns) != len(description.fields):
        raise ValueError(
            f"text_pair_column={data.text_pair_column!r} names a second text, and task {task.name!r} "
            f"has one text ({', '.join(description.fields)}): leave it out, or use task: "
            "text_classification with a template and label_words."
        )
    prompt, template = prompt_of(data, description)
    _check_words(prompt.label_words, names)
    pairs = zip(names, prompt.label_words, strict=True)
    logger.info("label words: %s", ", ".join(f"{name}: {word!r}" for name, word in pairs))
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
        label_names=names,
        metric=task.metric,
    )


def _check_words(words: tuple[str, ...], names: tuple[str, ...]) -> None:
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


@dataclass(frozen=True, kw_only=True)
class PromptedClassification(PromptTask):
    """Asks which of the label words the model expects; rows have an integer column "label"."""

    def _encode(
        self, rows: list[dict[str, Any]], encoder: PromptEncoder, places: list[int]
    ) -> tuple[Columns, list[Encoded]]:
        """Columns input_ids, positions, labels."""
        # The words stand at the mask, and behind a decoder's prompt, where they need room.
        longest = max(map(len, self.words(encoder.tokenizer))) if self.head == "causal_lm" else 0
        limits = [self.data.max_seq_length - longest] * len(rows)
        prompts = encoder.encode([self.texts(row) for row in rows], limits)
        columns: Columns = {
            "input_ids": [prompt.input_ids for prompt in prompts],
            "positions": [prompt.position for prompt in prompts],
            "labels": [row["label"] for row in rows],
        }
        return columns, prompts

    def _answer(self, row: Row) -> str:
        return self.prompt.label_words[row["label"]]

    def words(self, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of each label's words."""
        words = self.prompt.label_words
        ids: list[tuple[int, ...]]
        if self.head == "masked_lm":
            ids = [(token,) for token in mask_word_ids(tokenizer, words)]
        else:
            encoder = PromptEncoder(tokenizer, self.template, self.head)
            # They depend on what the template has before them, and not on a row's texts.
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

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> PromptCollator:
        """Returns one row of tokens an example, or L where label words have several tokens."""
        words = self.words(tokenizer)
        if all(len(word) == 1 for word in words):
            return self._collator(tokenizer, ("input_ids", "positions", "labels"))
        return self._collator(tokenizer, ("input_ids", "labels"), words)

    def objective(self, tokenizer: PreTrainedTokenizerBase) -> PromptObjective:
        """Returns cross entropy over the labels, or with objective: accuracy 1 - [right]."""
        from hf_dpzero.objectives.bounded import ZeroOne
        from hf_dpzero.objectives.prompted import Candidates, ClassScores, LabelWords

        words: tuple[tuple[int, ...], ...] = self.words(tokenizer)
        scored: ClassScores = Candidates()
        if all(len(word) == 1 for word in words):
            scored = LabelWords(tuple(word[0] for word in words))
        return ZeroOne(scored) if self.data.objective == "accuracy" else scored

    def metrics(self, tokenizer: PreTrainedTokenizerBase) -> Metrics:
        """Returns {"accuracy": ...}, and {"macro_f1": ...} where that is the task's metric."""
        return functools.partial(chosen_scores, metric=self.metric)
