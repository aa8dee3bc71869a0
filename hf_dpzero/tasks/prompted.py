"""What classification and generation by prompts have in common."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from hf_dpzero import __version__
from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.tasks.description import Prompt, TaskDescription
from hf_dpzero.tasks.prompt_encoding import Encoded, PromptEncoder
from hf_dpzero.tasks.templates import ANSWER, MASK, Template, checked_template

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

    from hf_dpzero.objectives.prompted import PromptObjective

logger = logging.getLogger(__name__)


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
    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Any], dict[str, Any]]:
        """Encoded rows -> one padded batch, a row an example."""

    @abstractmethod
    def objective(self, tokenizer: PreTrainedTokenizerBase) -> PromptObjective:
        """What is minimised, and what a model predicts."""

    @abstractmethod
    def metrics(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[EvalPrediction], dict[str, float]]:
        """Predictions of the objective -> named scores in [0, 1]."""

    @abstractmethod
    def _answer(self, row: Mapping[str, Any]) -> str:
        """A row's answer as text."""

    @abstractmethod
    def _encode(
        self, rows: list[dict[str, Any]], encoder: PromptEncoder, places: list[int]
    ) -> tuple[dict[str, list[Any]], list[Encoded]]:
        """Rows -> columns for the collator, and the prompts that they were made of.

        `places` are the rows' numbers, counted through all splits.
        """

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        pair_features: str = "joint",
        only: str | None = None,
    ) -> datasets.DatasetDict:
        """The rows as `collator` takes them.

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
        if self.data.max_seq_length > tokenizer.model_max_length:
            raise ValueError(
                f"max_seq_length={self.data.max_seq_length} is beyond the "
                f"{tokenizer.model_max_length} tokens that the model takes; lower it."
            )
        if self.data.num_demonstrations and only != "validation":
            raise ValueError(
                f"num_demonstrations={self.data.num_demonstrations} would put these training rows into "
                "every example, so that no clip bounds them: they are for evaluation, tokenize(..., "
                "only='validation')."
            )
        settings = {
            "task": dataclasses.replace(self, splits=datasets.DatasetDict()),
            "encoder": self.encoder(tokenizer),
            "version": __version__,  # the fingerprint does not see how this package's code changes
        }
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
        """A count for public rows; for private ones the same words whatever they are."""
        limit = f"more than max_seq_length={self.data.max_seq_length} tokens"
        end = f"cut at the end of their {self.prompt.passage or 'longest field'}"
        if split == "train":
            logger.info(f"train prompts of {limit} are {end}; raise it to keep them whole.")
        elif cut:
            logger.warning(f"{cut} of {rows} {split} prompts have {limit}: they are {end}.")

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
        """How prompts become tokens, with the training rows that the recipe shows in front of each."""
        encoder = PromptEncoder(tokenizer, self.template, self.head, self.prompt.passage)
        train, wanted = self.splits.get("train", ()), self.data.num_demonstrations
        if wanted > len(train):
            raise ValueError(
                f"num_demonstrations={wanted}, but there are {len(train)} training rows; lower it."
            )
        generator = np.random.Generator(np.random.PCG64([self.data.subset_seed, 2]))
        chosen = generator.choice(len(train), wanted, replace=False) if wanted else ()
        shown = tuple(self.example(train[int(index)]) for index in chosen)
        return dataclasses.replace(encoder, demonstrations=shown)

    def example(self, row: Mapping[str, Any]) -> str:
        """A demonstration: a row's prompt with its answer."""
        answer = self._answer(row)
        return self.template.render({**self.texts(row), MASK: answer, ANSWER: answer})

    def texts(self, row: Mapping[str, Any]) -> dict[str, str]:
        """A row's fields, "" for those that it does not have."""
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
    batch: Mapping[str, list[Any]],
    indices: list[int],
    *,
    task: PromptTask,
    encoder: PromptEncoder,
    start: int,
    version: str,
) -> dict[str, list[Any]]:
    """`PromptTask._encode` for `datasets.Dataset.map`, which hashes the arguments."""
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    columns, prompts = task._encode(rows, encoder, [start + index for index in indices])
    columns["cut"] = [prompt.cut for prompt in prompts]
    columns["left_out"] = [prompt.left_out for prompt in prompts]
    return columns


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, or where there is none the end token: the attention mask leaves it out."""
    token = tokenizer.pad_token_id
    return int(token if token is not None else tokenizer.eos_token_id or 0)


def prompt_of(data: DataArguments, description: TaskDescription) -> tuple[Prompt, Template]:
    """The task's prompt of the kind that a recipe asks for.

    Args:
      data: the recipe's kind of prompt, and its own template and label words if it has any.
      description: the task's prompts.

    Returns:
      The prompt, and its template parsed.

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
    passage = known.passage if known.passage in template.used_fields else None
    return Prompt(template=text, label_words=words, passage=passage, source=known.source), template
