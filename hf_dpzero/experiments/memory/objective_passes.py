"""The forward passes of a recipe's objective, in operations that the meta device can follow.

On the meta device nothing can be read from a tensor, such as where a row's tokens end. So the
objective's own model call (`selected_logits`, at the positions that it scores) is followed by the same
loss, for rows that are as long as they may be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dpzero.experiments.memory.model_on_meta import MetaModel
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import classification_losses
from hf_dpzero.objectives.prompted import selected_logits
from hf_dpzero.tasks import description_of

Batch = Mapping[str, Tensor]
WORD_TOKENS = 4
"""Tokens taken for a label of several words."""


@dataclass(frozen=True)
class ObjectivePass(ABC):
    """One evaluation of a recipe's objective."""

    meta: MetaModel  # whose model runs
    length: int  # T, tokens of a row

    def batch(self, size: int, device: str = "meta") -> Batch:
        """Makes examples of zeros, without padding.

        Args:
          size: B.
          device: where they are; on "meta" they take no memory.

        Returns:
          Tensors with leading dimension B.
        """
        with torch.device(device):
            return self._batch(size)

    @abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Evaluates the objective on rows without padding.

        Args:
          model: as `MetaModel.build` makes it.
          batch: as `batch` makes it.

        Returns:
          The losses [B].
        """

    @property
    def rows_per_example(self) -> int:
        """Rows that the model runs for one example."""
        return 1

    @abstractmethod
    def _batch(self, size: int) -> Batch: ...


@dataclass(frozen=True)
class Classification(ObjectivePass):
    """A classification head, on tokens or on stored features of them."""

    from_features: bool = False  # the batch holds a frozen encoder's outputs (precompute_features)

    def _batch(self, size: int) -> Batch:
        siamese = self.meta.arguments.pair_features == "siamese"
        if self.from_features:
            width = self.meta.body.hidden_size * (4 if siamese else 1)
            return {
                "sentence_embedding": torch.ones(size, width),
                "labels": torch.zeros(size, dtype=torch.int64),
            }
        names = ("input_ids", "input_ids_pair") if siamese else ("input_ids",)
        rows = {name: torch.zeros(size, self.length, dtype=torch.int64) for name in names}
        return {**rows, "labels": torch.zeros(size, dtype=torch.int64)}

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Losses [B] of the model's own head."""
        return select_objective(model)(model, batch)


@dataclass(frozen=True)
class SingleWords(ObjectivePass):
    """Label words of one token, at one position in the middle of the row: `LabelWords`."""

    def _batch(self, size: int) -> Batch:
        positions = torch.zeros(size, dtype=torch.int64) + self.length // 2
        ids = torch.zeros(size, self.length, dtype=torch.int64)
        return {
            "input_ids": ids,
            "positions": positions,
            "labels": torch.zeros(size, dtype=torch.int64),
        }

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Losses [B] of the label words at the one position."""
        inputs = {"input_ids": batch["input_ids"]}
        logits = selected_logits(model, inputs, batch["positions"].unsqueeze(1))
        words = logits[:, 0, : self.meta.num_labels]
        return classification_losses(words, batch["labels"], "single_label_classification")


@dataclass(frozen=True)
class SeveralWords(ObjectivePass):
    """Labels of several tokens, each example a row for each label: `Candidates`."""

    def _batch(self, size: int) -> Batch:
        ids = torch.zeros(size, self.meta.num_labels, self.length, dtype=torch.int64)
        return {"input_ids": ids, "labels": torch.zeros(size, dtype=torch.int64)}

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Losses [B] of each example's candidates, scored together."""
        ids = batch["input_ids"]
        scored = min(WORD_TOKENS, self.length - 2)
        scores = -_answer_losses(model, ids.flatten(0, 1), scored).view(ids.shape[:2])
        return classification_losses(scores, batch["labels"], "single_label_classification")

    @property
    def rows_per_example(self) -> int:
        """One for each label."""
        return self.meta.num_labels


@dataclass(frozen=True)
class FreeText(ObjectivePass):
    """A generated answer, the last tokens of a row, which training scores: `Answers`."""

    max_new_tokens: int  # of an answer
    # the objective itself generates (objective: f1), one token a forward pass; what generation
    # keeps is counted in `peaks`
    by_generation: bool = False

    def _batch(self, size: int) -> Batch:
        return {"input_ids": torch.zeros(size, self.length, dtype=torch.int64)}

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Losses [B] of the answer's tokens; of one token where it is generated."""
        scored = max(1, min(self.max_new_tokens, self.length - 2))
        return _answer_losses(model, batch["input_ids"], 1 if self.by_generation else scored)


def _answer_losses(model: nn.Module, ids: Tensor, scored: int) -> Tensor:
    """Mean cross entropy `[R]` of each row's last `scored` tokens, a row at a time as `token_losses`."""
    places = torch.arange(ids.shape[1] - scored - 1, ids.shape[1] - 1, device=ids.device)
    logits = selected_logits(model, {"input_ids": ids}, places.expand(len(ids), -1))
    pairs = zip(logits, ids[:, -scored:], strict=True)
    return torch.stack([F.cross_entropy(row.float(), targets) for row, targets in pairs])


def objective_pass(meta: MetaModel, data: Any) -> ObjectivePass:
    """The objective that a recipe asks for, on rows as long as `max_seq_length` and the model allow.

    Args:
      meta: the recipe's model.
      data: the recipe's DataArguments.

    Returns:
      Its forward pass.
    """
    length = meta.longest_row(data.max_seq_length)
    if meta.head == "sequence_classification":
        return Classification(meta, length, meta.arguments.precompute_features)
    if meta.num_labels == 0:
        return FreeText(meta, length, data.max_new_tokens, data.objective == "f1")
    words: Any = data.label_words
    if words is None:  # the task's own
        prompts = getattr(description_of(data.task), "prompts", {})
        words = prompts[data.prompt].label_words if data.prompt in prompts else ()
    several = meta.head == "causal_lm" and any(" " in word.strip() for word in words)
    return SeveralWords(meta, length) if several else SingleWords(meta, length)
