"""Losses in [0, 1] that count right answers: 1 - accuracy and 1 - F1 of one example.

DPZero needs differences of losses, not gradients, so what is reported in the end may be trained on
(MeZO, Malladi et al. 2023, arXiv:2305.17333, section 3.3). Such losses are steps: where two scores
are nearly equal, float rounding decides between 0 and 1. The rounding of a batch depends on its width
and on its number of rows, that is, on who else is in it, and an example that flips for that reason
moves the released sum by another example's presence, which no sensitivity covers.

Guarantee: every example is evaluated alone, without padding, so its loss is a function of that
example and the parameters, to the last bit, whatever else is in the microbatch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dpzero.objectives.losses import IGNORE_INDEX, Inputs, PerExampleLoss, labels_of
from hf_dpzero.objectives.prompted import Answers, ClassScores, PromptObjective, required


@dataclass(frozen=True)
class BoundedObjective(PromptObjective):
    """Losses in [0, 1] of examples that are evaluated one at a time.

    Args:
      objective: whose predictions are scored.
    """

    objective: PromptObjective

    differentiable: ClassVar[bool] = False
    single_pass: ClassVar[bool] = False

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the objective inside."""
        return self.objective.columns

    def predict(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Scores or tokens of the objective inside, of the batch as a whole."""
        return self.objective.predict(model, inputs)

    def evaluate(self, model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Those of the objective inside, whose losses are smooth."""
        return self.objective.evaluate(model, inputs)

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Losses `[B]` float32 in [0, 1]."""
        return _one_by_one(self._loss_alone, model, inputs)

    def comparison_loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Numbers from the same forward passes, in which every logit has a share, `[B]` float32.

        0/1 losses agree where the logits behind them do not, so ways to evaluate a model are compared
        by these (see `losses.comparison_loss`).
        """
        return _one_by_one(self._comparison_alone, model, inputs)

    @abstractmethod
    def _loss_alone(self, model: nn.Module, example: Inputs) -> Tensor:
        """The loss `[1]` of a batch of one."""

    def _comparison_alone(self, model: nn.Module, example: Inputs) -> Tensor:
        """The compared number `[1]` of a batch of one: the smooth loss inside."""
        return self.objective(model, example)


@dataclass(frozen=True)
class ZeroOne(BoundedObjective):
    """loss = 1 - [argmax_y s(x, y) = y*]: its mean is 1 - accuracy.

    The scores s are those of `LabelWords` or `Candidates`. The first class wins a tie; scores that are
    not finite are wrong.
    """

    objective: ClassScores

    def _loss_alone(self, model: nn.Module, example: Inputs) -> Tensor:
        scores = self.objective.predict(model, example)
        right = (scores.argmax(dim=1) == labels_of(example)) & scores.isfinite().all(dim=1)
        return 1.0 - right.float()


@dataclass(frozen=True)
class AnswerF1(BoundedObjective):
    """loss = 1 - score(greedy answer, reference), such as token F1 (MeZO trains SQuAD so).

    Args:
      score: (generated tokens without the stop token, number of the reference) -> [0, 1].

    Raises:
      ValueError: a score outside of [0, 1].
    """

    objective: Answers
    score: Callable[[list[int], int], float]

    def _loss_alone(self, model: nn.Module, example: Inputs) -> Tensor:
        (reference,) = required(example, "references", self).tolist()
        (tokens,) = self.objective.predict(model, example)
        score = float(self.score(tokens[tokens != IGNORE_INDEX].tolist(), int(reference)))
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"score={score} of an answer: it must lie in [0, 1].")
        return torch.tensor([1.0 - score], device=example["input_ids"].device)

    def _comparison_alone(self, model: nn.Module, example: Inputs) -> Tensor:
        # The loss reads the reference's tokens alone, and the decoded ones are the model's own.
        return self.objective(model, example) + self.objective.decode(model, example)[1]


# ---------------------------------------------------------------- one example at a time


def alone(inputs: Inputs) -> Iterator[Inputs]:
    """Every example of a prompted batch as a batch of one, without its padding.

    A row is cut to its own tokens; the L candidates of an example are padded on the right, by zeros
    that are not attended to, to the longest of them. Nothing of another example is left, not even in
    a shape. Works on all three kinds of batches (see `prompt_objectives`).

    Raises:
      ValueError: a row without an attended token.

    >>> batch = {"input_ids": [[5, 6, 0], [0, 0, 7]], "attention_mask": [[1, 1, 0], [0, 0, 1]]}
    >>> [row["input_ids"].tolist() for row in alone({k: torch.tensor(v) for k, v in batch.items()})]
    [[[5, 6]], [[7]]]
    """
    count = len(inputs["input_ids"])
    for row in range(count):
        yield _trimmed({name: value[row : row + 1] for name, value in inputs.items()})


def _trimmed(example: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cuts every tensor of the shape of `input_ids`, `[1, T]` or `[1, L, T]`, to its own tokens."""
    mask = example.get("attention_mask")
    if mask is None:
        return example
    spans = []
    for row in mask.flatten(0, -2):
        attended = row.nonzero().flatten().tolist()
        if not attended:
            raise ValueError("a row of the batch has no attended token: drop empty examples.")
        spans.append((attended[0], attended[-1] + 1))
    width = max(stop - start for start, stop in spans)
    found = dict(example)
    for name, value in example.items():
        if value.shape == mask.shape:
            rows = zip(value.flatten(0, -2), spans, strict=True)
            # Candidates of one example differ in length: zeros that are not attended to fill up.
            own = [F.pad(row[i:j], (0, width - (j - i))) for row, (i, j) in rows]
            found[name] = torch.stack(own).reshape(*value.shape[:-1], width)
    return found


def _one_by_one(evaluate: PerExampleLoss, model: nn.Module, inputs: Inputs) -> Tensor:
    """Results `[B]` of batches of one."""
    results = [evaluate(model, example) for example in alone(inputs)]
    return torch.cat(results) if results else torch.zeros(0, device=inputs["input_ids"].device)
