"""What a task is, and how its rows become the inputs of a model with a classification head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from hf_dpzero.tasks.metrics import classification_scores

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

SPLITS = ("train", "validation")
PAD_TO_MULTIPLE_OF = 8
PAIR_SUFFIX = "_pair"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A text classification task with its rows.

    Attributes:
      name: its name in the task registry.
      label_names: names of the labels 0, 1, ...; assumed public.
      text_columns: the column with the text, or two for sentence pairs.
      max_seq_length: tokens a text is cut to.
      splits: "train" (the private rows) and "validation" (assumed public), with the text columns
        and an integer column "label".
      metric: the name of what `compute_metrics` returns.
      head: what kind of model it is for; prompted tasks have others.
    """

    name: str
    label_names: tuple[str, ...]
    text_columns: tuple[str, ...]
    max_seq_length: int = 128
    splits: datasets.DatasetDict
    metric: str = "accuracy"
    head: str = "sequence_classification"

    @property
    def num_labels(self) -> int:
        """The number of classes."""
        return len(self.label_names)

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        pair_features: str = "joint",
        only: str | None = None,
    ) -> datasets.DatasetDict:
        """The rows as input_ids, attention_mask (and what else the model takes) and labels.

        Args:
          tokenizer: the model's.
          pair_features: as in `ModelArguments`: "joint" puts both texts of a pair into input_ids,
            cut together to `max_seq_length`; "siamese" cuts each to `max_seq_length` and puts the
            second into input_ids_pair, attention_mask_pair, ...
          only: the split that is wanted; None for all.

        Returns:
          The splits, a row an example.

        Raises:
          ValueError: siamese without two text columns.
        """
        siamese = pair_features == "siamese"
        if siamese and len(self.text_columns) != 2:
            raise ValueError(
                f"pair_features=siamese compares two texts, but task {self.name!r} has the text "
                f"columns {', '.join(self.text_columns)}; use pair_features: joint, or set "
                "text_pair_column."
            )
        settings = {
            "tokenizer": tokenizer,
            "columns": self.text_columns,
            "max_length": self.max_seq_length,
            "apart": siamese,
        }
        encoded = datasets.DatasetDict()
        for split in self.splits if only is None else [only]:
            rows = self.splits[split]
            encoded[split] = rows.map(
                _encode,
                batched=True,
                remove_columns=rows.column_names,
                desc="tokenizing",
                fn_kwargs=settings,
            )
        return encoded

    def collator(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[list[Mapping[str, Any]]], dict[str, Any]]:
        """Rows -> one padded batch of tensors; also takes rows of precomputed features."""
        return Collator(tokenizer)

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """{"accuracy": the share of rows whose largest logit is at the label}, and macro_f1 if asked."""
        logits: Any = prediction.predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        chosen = np.argmax(logits, axis=-1)
        return classification_scores(chosen, np.asarray(prediction.label_ids), self.metric)

    def metrics(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[EvalPrediction], dict[str, float]]:
        """`compute_metrics`, whatever the tokenizer; see `PromptTask.metrics`."""
        return self.compute_metrics

    def objective(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """None: the model's head says what is minimised (`objectives.select_objective`)."""


@dataclass(frozen=True)
class Collator:
    """Pads token rows to the longest of the batch, rounded up to a multiple of 8.

    The second texts of pairs (columns that end in "_pair") are padded by themselves. Rows of
    precomputed features have nothing to pad and are stacked.
    """

    tokenizer: PreTrainedTokenizerBase

    def stacks(self, row: Mapping[str, Any]) -> bool:
        """Whether rows like this one are stacked, so that each one's tensors follow from it alone."""
        return "input_ids" not in row

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        from transformers import default_data_collator

        if self.stacks(rows[0]):
            return default_data_collator(rows)
        batch: dict[str, Any] = {}
        for suffix in ("", PAIR_SUFFIX):
            names = [n for n in rows[0] if n.endswith(PAIR_SUFFIX) == bool(suffix)]
            if names:
                own = [{name.removesuffix(suffix): row[name] for name in names} for row in rows]
                padded = self.tokenizer.pad(
                    own, pad_to_multiple_of=PAD_TO_MULTIPLE_OF, return_tensors="pt"
                )
                batch |= {name + suffix: value for name, value in padded.items()}
        return batch


def _encode(
    rows: Mapping[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str],
    max_length: int,
    apart: bool,
) -> dict[str, Any]:
    """Both texts together, or with `apart` as input_ids, ... and input_ids_pair, ..."""
    texts = [rows[column] for column in columns]
    groups = [[text] for text in texts] if apart else [texts]
    first, *second = (tokenizer(*g, truncation=True, max_length=max_length) for g in groups)
    pair = {key + PAIR_SUFFIX: value for columns in second for key, value in columns.items()}
    return {**first, **pair, "labels": rows["label"]}
