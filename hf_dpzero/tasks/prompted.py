"""What classification and generation by prompts have in common."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.tasks.description import Prompt, TaskDescription
from hf_dpzero.tasks.prompt_encoding import Encoded, PromptEncoder
from hf_dpzero.tasks.templates import Template, checked_template

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

    from hf_dpzero.objectives.prompted import PromptObjective

logger = logging.getLogger(__name__)

_NOTES = ("cut", "left_out")  # columns that are counted and dropped
_UNSEEN = ("name", "splits", "data", "label_names", "metric", "scored_as")  # by a row's tokens
_BATCH = 256


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
    def example(self, encoder: PromptEncoder, row: Mapping[str, Any]) -> str:
        """A row with its answer, as a demonstration."""

    @abstractmethod
    def encode(
        self, rows: list[dict[str, Any]], encoder: PromptEncoder, places: list[int]
    ) -> dict[str, list[Any]]:
        """Columns of encoded rows; `places` are the rows' numbers among those of both splits."""

    # ---------------------------------------------------------------- rows -> tokens

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        pair_features: str = "joint",
        only: str | None = None,
    ) -> datasets.DatasetDict:
        """The rows as `collator` takes them; kept by `datasets` beside rows that come from files.

        Passages that are too long are cut, and how many were is logged.

        Args:
          tokenizer: the model's.
          pair_features: of no meaning here; as in `Task.tokenize`.
          only: the split that is wanted; None for all.
        Raises:
          ValueError: label words that the tokenizer cannot spell, no room for the template,
            max_seq_length beyond what the tokenizer allows, or demonstrations for training rows.
        """
        self._check_length(tokenizer)
        if self.data.num_demonstrations and only != "validation":
            raise ValueError(
                f"num_demonstrations={self.data.num_demonstrations} would put these training rows into "
                "every example, so that no clip bounds them: they are for evaluation, tokenize(..., "
                "only='validation')."
            )
        encoder = self.encoder(tokenizer)
        found, start = {}, 0
        for split, rows in self.splits.items():
            if only in (None, split):
                found[split] = self._tokenized(rows, encoder, split, start)
            start += len(rows)
        return datasets.DatasetDict(found)

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> PromptEncoder:
        """How prompts become tokens, with the demonstrations that the recipe asks for."""
        encoder = PromptEncoder(tokenizer, self.template, self.head, self.prompt.passage)
        shown = [self.example(encoder, row) for row in self._demonstrations()]
        return dataclasses.replace(encoder, demonstrations=tuple(shown))

    def texts(self, row: Mapping[str, Any]) -> dict[str, str]:
        """A row's fields, "" for those that it does not have.

        Raises:
          ValueError: a column of lists or mappings.
        """
        return {name: _text(row.get(column), column) for name, column in self.columns.items()}

    def _demonstrations(self) -> list[Mapping[str, Any]]:
        """Training rows, drawn by subset_seed."""
        train, wanted = self.splits.get("train"), self.data.num_demonstrations
        if not wanted:
            return []
        if train is None or wanted > len(train):
            raise ValueError(
                f"num_demonstrations={wanted}, but there are {len(train or ())} training rows; lower it."
            )
        generator = np.random.Generator(np.random.PCG64([self.data.subset_seed, 2]))
        return [train[int(i)] for i in generator.choice(len(train), wanted, replace=False)]

    def _tokenized(
        self, rows: datasets.Dataset, encoder: PromptEncoder, split: str, start: int
    ) -> datasets.Dataset:
        def encode(batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
            values = zip(*batch.values(), strict=True)
            listed = [dict(zip(batch, row, strict=True)) for row in values]
            return self.encode(listed, encoder, [start + index for index in indices])

        encoded = rows.map(
            encode,
            with_indices=True,
            batched=True,
            batch_size=_BATCH,
            remove_columns=rows.column_names,
            new_fingerprint=self._fingerprint(rows, encoder, start),
            desc=f"prompts ({split})",
        )
        self._say_what_was_cut(encoded, split)
        return encoded.remove_columns(list(_NOTES))

    def _fingerprint(self, rows: datasets.Dataset, encoder: PromptEncoder, start: int) -> str:
        """Names the result by all that it depends on, so that another run finds it."""
        from datasets.fingerprint import Hasher

        return Hasher.hash(
            (
                (rows._fingerprint, start),
                tokenizer_state(encoder.tokenizer),
                [(name, repr(getattr(self, name))) for name in self._decisive()],
                encoder.demonstrations,
                (self.data.max_seq_length, self.data.max_new_tokens),
                (type(self).__name__, code_digest()),
            )
        )

    def _decisive(self) -> list[str]:
        """The attributes that a row's tokens depend on."""
        return [field.name for field in dataclasses.fields(self) if field.name not in _UNSEEN]

    def _say_what_was_cut(self, encoded: datasets.Dataset, split: str) -> None:
        cut, left_out = (int(np.sum(encoded[name][:], dtype=np.int64)) for name in _NOTES)
        if cut:
            logger.warning(
                "%s of %s %s prompts have more than max_seq_length=%s tokens: they are cut at the "
                "end of their %s%s.",
                cut,
                len(encoded),
                split,
                self.data.max_seq_length,
                self.prompt.passage or "longest field",
                " (a count of private rows: do not publish it)" if split == "train" else "",
            )
        if left_out:
            logger.warning(
                "%s demonstrations were left out of %s %s prompts for lack of room.",
                left_out,
                len(encoded),
                split,
            )

    def _check_length(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.data.max_seq_length > tokenizer.model_max_length:
            raise ValueError(
                f"max_seq_length={self.data.max_seq_length} is beyond the "
                f"{tokenizer.model_max_length} tokens that the model takes; lower it."
            )


def notes(encoded: list[Encoded]) -> dict[str, list[Any]]:
    """What was cut off or left out, for `PromptTask` to count."""
    return {"cut": [e.cut for e in encoded], "left_out": [e.left_out for e in encoded]}


def _text(value: Any, column: str) -> str:
    if isinstance(value, (list, dict)):
        raise ValueError(
            f"column {column!r} holds a {type(value).__name__} of {len(value)} entries, and a prompt is "
            "made of text: choose another column, or join it."
        )
    return "" if value is None else str(value)


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, or where there is none the end token: the attention mask leaves it out."""
    found = tokenizer.pad_token_id
    return int(found if found is not None else tokenizer.eos_token_id or 0)


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that decides which tokens come out, as text; not what padding was last asked for."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    if backend is None:
        settings = sorted((name, repr(value)) for name, value in tokenizer.init_kwargs.items())
        vocabulary = sorted(tokenizer.get_vocab().items())
        return repr((type(tokenizer).__name__, special, settings, vocabulary))
    state = json.loads(backend.to_str())
    return json.dumps(
        {**state, "truncation": None, "padding": None, "special": special}, sort_keys=True
    )


@functools.cache
def code_digest() -> str:
    """SHA-256 of the files that make prompts and tokens, so that another release encodes anew."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def prompt_of(data: DataArguments, description: TaskDescription) -> tuple[Prompt, Template]:
    """The task's prompt of the kind that a recipe asks for, with the recipe's own template and words.

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
