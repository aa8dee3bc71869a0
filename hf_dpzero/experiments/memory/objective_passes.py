"""What a recipe's objective runs, and on what batch: real ones to be timed, traced ones to be counted.

On the meta device nothing can be read from a tensor, such as where a row's tokens end. There the
objective's own model call (`selected_logits`, at the positions that it scores) is followed by the same
loss, for rows that are as long as they may be.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dpzero.experiments.memory.model_on_meta import Blueprint, classification_batch, token_batch
from hf_dpzero.objectives.losses import PerExampleLoss, classification_losses, select_objective
from hf_dpzero.objectives.prompted import Answers, Candidates, LabelWords, selected_logits

Batch = dict[str, Tensor]
WORD_TOKENS = 4
"""Tokens of a label of several words; nobody has counted them yet."""


@dataclass(frozen=True)
class Pass(ABC):
    """One evaluation of the objective, with batches for it.

    Attributes:
      blueprint: whose model runs.
      length: T, tokens of a row.
    """

    blueprint: Blueprint
    length: int

    @abstractmethod
    def batch(self, size: int, device: str) -> Batch:
        """`size` examples, as `objective` takes them."""

    @abstractmethod
    def objective(self, model: nn.Module) -> PerExampleLoss:
        """What training evaluates: (model, batch) -> losses [B]."""

    def traced(self, model: nn.Module) -> PerExampleLoss:
        """The same in operations that the meta device can follow."""
        return self.objective(model)

    def tokens(self, size: int, device: str) -> Batch:
        """Rows of `length` tokens."""
        return token_batch(self.blueprint.vocabulary, size, self.length, device)

    def on_tokens(self) -> Pass:
        """The same from tokens where it starts from stored features."""
        arguments = dataclasses.replace(self.blueprint.arguments, precompute_features=False)
        blueprint = dataclasses.replace(self.blueprint, arguments=arguments)
        return dataclasses.replace(self, blueprint=blueprint)

    @property
    def sequences(self) -> int:
        """Rows that the model runs for one example."""
        return 1


@dataclass(frozen=True)
class Classification(Pass):
    """A classification head, on tokens or on stored features."""

    def batch(self, size: int, device: str) -> Batch:
        """As the task's collator makes it."""
        return classification_batch(self.blueprint, size, self.length, device)

    def objective(self, model: nn.Module) -> PerExampleLoss:
        """`sequence_classification_objective`."""
        return select_objective(model)


@dataclass(frozen=True)
class SingleWords(Pass):
    """Label words of one token, at one position of the row."""

    def batch(self, size: int, device: str) -> Batch:
        """The position is in the middle."""
        positions = torch.full((size,), self.length // 2, dtype=torch.int64, device=device)
        return {**self.tokens(size, device), "positions": positions, "labels": positions * 0}

    def objective(self, model: nn.Module) -> PerExampleLoss:
        """`LabelWords`, whichever words they are."""
        return LabelWords(tuple(range(self.blueprint.num_labels)))

    def traced(self, model: nn.Module) -> PerExampleLoss:
        """Logits at one position, cross entropy over the label words."""

        def losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            inputs = {"input_ids": batch["input_ids"]}
            logits = selected_logits(model, inputs, batch["positions"].unsqueeze(1))
            words = logits[:, 0, : self.blueprint.num_labels]
            return classification_losses(words, batch["labels"], "single_label_classification")

        return losses


@dataclass(frozen=True)
class SeveralWords(Pass):
    """Labels of several tokens: each example runs as many rows as there are labels."""

    def batch(self, size: int, device: str) -> Batch:
        """`[B, L, T]`."""
        shape = (size, self.blueprint.num_labels, self.length)
        tokens = self.tokens(size * self.blueprint.num_labels, device)
        lengths = torch.full(shape[:2], self._scored, dtype=torch.int64, device=device)
        rows = {name: value.view(shape) for name, value in tokens.items()}
        return {**rows, "answer_lengths": lengths, "labels": lengths[:, 0] * 0}

    def objective(self, model: nn.Module) -> PerExampleLoss:
        """`Candidates`."""
        return Candidates()

    def traced(self, model: nn.Module) -> PerExampleLoss:
        """Losses of the last tokens of every row, one row after the other."""

        def losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            ids = batch["input_ids"]
            scores = -_answer_losses(model, ids.flatten(0, 1), self._scored)
            kind = "single_label_classification"
            return classification_losses(scores.view(ids.shape[:2]), batch["labels"], kind)

        return losses

    @property
    def sequences(self) -> int:
        """One for each label."""
        return self.blueprint.num_labels

    @property
    def _scored(self) -> int:
        return min(WORD_TOKENS, self.length - 2)


@dataclass(frozen=True)
class FreeText(Pass):
    """A generated answer: training scores its tokens.

    Attributes:
      max_new_tokens: of an answer.
      by_generation: whether the objective itself generates (objective: f1).
    """

    max_new_tokens: int
    by_generation: bool = False

    def batch(self, size: int, device: str) -> Batch:
        """The last `max_new_tokens` tokens are the answer."""
        tokens = self.tokens(size, device)
        labels = tokens["input_ids"].clone()
        labels[:, : -self._scored] = -100
        return {**tokens, "labels": labels}

    def objective(self, model: nn.Module) -> PerExampleLoss:
        """`Answers`, or for f1 its greedy generation, which here never ends early."""
        answers = Answers(self.max_new_tokens, (), 0)
        if not self.by_generation:
            return answers
        return lambda model, batch: answers.predict(model, batch)[:, 0].float()

    def traced(self, model: nn.Module) -> PerExampleLoss:
        """Losses of the answer's tokens; what generation keeps is counted apart."""
        scored = 1 if self.by_generation else self._scored
        return lambda model, batch: _answer_losses(model, batch["input_ids"], scored)

    @property
    def _scored(self) -> int:
        return max(1, min(self.max_new_tokens, self.length - 2))


def _answer_losses(model: nn.Module, ids: Tensor, scored: int) -> Tensor:
    """Mean cross entropy `[R]` of each row's last `scored` tokens, a row at a time as `token_losses`."""
    places = torch.arange(ids.shape[1] - scored - 1, ids.shape[1] - 1, device=ids.device)
    logits = selected_logits(model, {"input_ids": ids}, places.expand(len(ids), -1))
    pairs = zip(logits, ids[:, -scored:], strict=True)
    return torch.stack([F.cross_entropy(row.float(), targets) for row, targets in pairs])


def pass_of(blueprint: Blueprint, length: int, data: Any, several: bool | None = None) -> Pass:
    """The objective that a recipe asks for.

    Args:
      data: the recipe's DataArguments.
      several: whether some label's words are several tokens; None if no tokenizer has said, and a
        space in one tells.
    """
    if blueprint.head == "sequence_classification":
        return Classification(blueprint, length)
    if blueprint.num_labels == 0:
        return FreeText(blueprint, length, data.max_new_tokens, data.objective == "f1")
    if several is None:
        spaced = any(" " in word.strip() for word in label_words(data))
        several = blueprint.head == "causal_lm" and spaced
    return SeveralWords(blueprint, length) if several else SingleWords(blueprint, length)


def label_words(data: Any) -> tuple[str, ...]:
    """The words that stand for the labels: the recipe's, or the task's."""
    from hf_dpzero.experiments.memory.row_counts import description_of

    if data.label_words is not None:
        return tuple(data.label_words)
    prompts = getattr(description_of(data.task), "prompts", {})
    return tuple(prompts[data.prompt].label_words) if data.prompt in prompts else ()


def several_tokens(task: Any, arguments: Any) -> bool | None:
    """Whether a label's words are several tokens; None if the rows or the tokenizer are not here."""
    from hf_dpzero.experiments.memory.row_counts import offline
    from hf_dpzero.recipes.checkpoints import load_tokenizer
    from hf_dpzero.reporting.provenance import resolve_path

    if not hasattr(task, "words"):
        return None
    try:
        with offline():
            tokenizer = load_tokenizer(resolve_path(arguments.model_name_or_path), arguments)
    except (OSError, ImportError):
        return None
    return any(len(ids) > 1 for ids in task.words(tokenizer))
