"""Per-example losses of prompted language models: label words, candidates, answers.

A prompt turns classification into what a language model does anyway (LM-BFF, Gao et al. 2021,
arXiv:2012.15723; MeZO, Malladi et al. 2023, arXiv:2305.17333), so no head is added and the
pretrained output matrix scores the words that stand for the classes. These are also the losses on
which DPZero (Zhang et al. 2024, arXiv:2310.09639) was measured.

Guarantee: as for everything in `objectives`, no example's loss depends on another example of the
batch but through float rounding; padding may be on either side. Logits are computed at the positions
that are scored and nowhere else: `[B, P, V]` instead of `[B, T, V]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dpzero.objectives.generation import (
    answer_losses,
    greedy,
    left_padded,
    selected_logits,
)
from hf_dpzero.objectives.host import on_host, sent
from hf_dpzero.objectives.losses import (
    IGNORE_INDEX,
    TOKEN_KEYS,
    Inputs,
    classification_losses,
    flattened_rows,
    labels_of,
    power_of_two,
    right_padded,
    take_columns,
    token_losses,
    without_labels,
)


class PromptObjective(ABC):
    """A per-example loss with the predictions that belong to it.

    Attributes:
      columns: keys of a batch that are for the objective alone, not for the model's forward.
      differentiable: whether the losses have useful gradients.
      single_pass: whether an evaluation runs the model once, on the batch as a whole.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    differentiable: ClassVar[bool] = True
    single_pass: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Per-example losses `[B]` float32."""

    @abstractmethod
    def predict(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """What the model, in eval mode and without gradients, answers to a batch, labelled or not.

        Returns:
          `[B, L]` float32 scores of the classes, or `[B, N]` int64 tokens padded with -100.
        """

    def evaluate(self, model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Smooth losses `[B]` float32 and predictions of a labelled batch, as `predict`."""
        return self(model, inputs), self.predict(model, inputs)

    def _for_model(self, inputs: Inputs) -> dict[str, Tensor]:
        return {k: v for k, v in without_labels(inputs).items() if k not in self.columns}


class ClassScores(PromptObjective):
    """Cross entropy over the scores of the classes."""

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Losses `[B]` float32."""
        return self.evaluate(model, inputs)[0]

    def evaluate(self, model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Losses `[B]` and the scores that they are of."""
        labels, scores = labels_of(inputs), self.predict(model, inputs)
        return classification_losses(scores, labels, "single_label_classification"), scores


@dataclass(frozen=True)
class LabelWords(ClassScores):
    """Classes as single words at one position of the prompt (LM-BFF, Gao et al. 2021, Eq. 1).

    p(y | x) = exp(z_{w(y)}) / sum_{y'} exp(z_{w(y')}),   loss = -log p(y | x)

    with z the logits at the position: at the mask of a masked language model, at the prompt's last
    token of a causal one. The softmax is over the label words, not over the vocabulary.

    Batches: `input_ids` and `attention_mask` `[B, T]`; `positions` `[B]`, counted from the row's first
    attended token; `labels` `[B]` (for losses).

    Args:
      token_ids: w(y), one token for each class, in the classes' order; at least two, all different.

    Raises:
      ValueError: other token ids; a position outside of its row.
    """

    token_ids: tuple[int, ...]
    columns: ClassVar[tuple[str, ...]] = ("positions",)

    def __post_init__(self) -> None:
        ids = tuple(self.token_ids)
        if len(ids) < 2 or len(set(ids)) < len(ids):
            raise ValueError(
                f"token_ids={ids}: label words need one token for each of at least two classes, no "
                "two alike; choose words whose first tokens differ."
            )

    def predict(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Logits of the label words, `[B, L]` float32."""
        positions = required(inputs, "positions", self)
        _check_inside(positions, inputs.get("attention_mask"), inputs["input_ids"].shape[1])
        logits = selected_logits(model, self._for_model(inputs), positions.unsqueeze(1))
        words = sent(torch.tensor(self.token_ids), logits.device)
        return logits[:, 0].index_select(1, words).float()


@dataclass(frozen=True)
class Candidates(ClassScores):
    """Classes as continuations of several words (MeZO, Malladi et al. 2023, appendix D).

    s(x, y) = 1/|a_y| sum_t log p(a_{y,t} | x, a_{y,<t}),   loss = -log softmax_y s(x, y)

    The mean over a candidate's |a_y| tokens keeps long words from losing by their length. All L
    candidates of an example run in one pass, as L rows.

    Batches: `input_ids` and `attention_mask` `[B, L, T]`, each candidate after its prompt;
    `answer_lengths` `[B, L]`: how many of a row's last attended tokens are the candidate; `labels`
    `[B]` (for losses).

    Raises:
      ValueError: batches of other shapes; an answer without a token, or without one before it.
    """

    columns: ClassVar[tuple[str, ...]] = ("answer_lengths",)

    def predict(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Mean log-probability of each candidate's tokens, `[B, L]` float32.

        Raises:
          ValueError: tensors of other shapes.
        """
        answers = required(inputs, "answer_lengths", self)
        shape = inputs["input_ids"].shape
        if len(shape) != 3 or answers.shape != shape[:2]:
            raise ValueError(
                f"Candidates needs input_ids [B, L, T] and answer_lengths [B, L], not {list(shape)} "
                f"and {list(answers.shape)}: collate one row of L candidates for each example."
            )
        rows = right_padded(flattened_rows(self._for_model(inputs), shape))
        positions, targets = _answer_targets(rows, on_host(answers).flatten())
        losses = token_losses(selected_logits(model, rows, positions), targets)
        return -losses.reshape(shape[:2])


@dataclass(frozen=True)
class Answers(PromptObjective):
    """Free text after a prompt: trained on the answer's tokens, predicted greedily.

    loss = -1/|a| sum_t log p(a_t | x, a_<t)     (MeZO, Malladi et al. 2023, appendix D)

    The same loss as `heads.causal_lm_objective`, with logits where a token is labelled only.

    Batches: `input_ids`, `attention_mask` and `labels` `[B, T]`, labels -100 on prompt and padding;
    `references` `[B]` are for the caller.

    Args:
      max_new_tokens: N, of a prediction.
      stop_token_ids: where a prediction ends; it begins with none of them, as no right answer is empty.
      pad_token_id: what prompts are padded with.
    """

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    columns: ClassVar[tuple[str, ...]] = ("references",)

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Mean cross entropy of the row's own answer tokens, `[B]` float32; 0 without any."""
        labels_of(inputs)
        batch = right_padded(inputs, token_keys=(*TOKEN_KEYS, "labels"))
        positions, targets = _labelled_targets(on_host(batch["labels"]))
        return token_losses(selected_logits(model, self._for_model(batch), positions), targets)

    def predict(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """What the model goes on with after each row's prompt (see `greedy`).

        The prompt is what stands before the first labelled token, or the whole row if none is.

        Returns:
          `[B, max_new_tokens]` int64.
        """
        return self.decode(model, inputs)[0]

    def decode(
        self, model: nn.Module, inputs: Inputs, cache: object = None
    ) -> tuple[Tensor, Tensor]:
        """`greedy` after each row's prompt, whose cache may be known.

        Returns:
          `[B, max_new_tokens]` int64; the mean logits `[B]` float32.
        """
        return greedy(
            model,
            *_prompts(inputs),
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            pad_token_id=self.pad_token_id,
            cache=cache,
        )

    def evaluate(self, model: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Losses and predictions of a labelled batch; a prompt runs once where its cache can be kept.

        Returns:
          `[B]` float32, as of a call; `[B, max_new_tokens]` int64, as of `predict`; both up to rounding.
        """
        others = self._for_model(inputs).keys() - {"input_ids", "attention_mask"}
        rows = None if others or type(self) is not Answers else _prompts_and_answers(inputs)
        if rows is None or (found := answer_losses(model, *rows)) is None:
            return super().evaluate(model, inputs)
        losses, cache = found
        return losses, self.decode(model, inputs, cache)[0]


# ---------------------------------------------------------------- which positions, which targets


def _answer_targets(rows: Inputs, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Positions and next tokens `[R, P]` of each row's last `answers[r]` tokens; -100 for no token."""
    ids = on_host(rows["input_ids"])
    lengths = _lengths(rows)
    outside = (answers < 1) | (answers >= lengths)
    if bool(outside.any()):
        raise ValueError(
            f"candidate {_first(outside)} of the batch has answer_lengths out of range: it needs a "
            "token of its own and one before it."
        )
    count = power_of_two(int(answers.max()), ids.shape[1])  # as `batches.shapes` groups rows
    offsets = torch.arange(count, device=ids.device)
    places = (lengths - answers).unsqueeze(1) + offsets
    own = offsets < answers.unsqueeze(1)
    places = places.where(own, 1)  # unused ones need a column, and one before it
    return places - 1, take_columns(ids, places).where(own, IGNORE_INDEX)


def _lengths(rows: Inputs) -> Tensor:
    """`[R]`: up to and with each row's last attended token, of rows padded on the right."""
    mask, ids = rows.get("attention_mask"), on_host(rows["input_ids"])
    if mask is None:
        return torch.full_like(ids[:, 0], ids.shape[1])
    return ids.shape[1] - on_host(mask).ne(0).flip(1).int().argmax(dim=1)


def _prompts(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Ids, and the mask of the attended tokens before a row's first labelled one."""
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    mask = torch.ones_like(inputs["input_ids"]) if mask is None else mask
    if labels is not None:
        mask = mask * (labels.ne(IGNORE_INDEX).cumsum(dim=1) == 0)
    return inputs["input_ids"], mask


def _prompts_and_answers(inputs: Inputs) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
    """Prompts padded on the left and the answers behind them; None where rows have more than these."""
    (ids, mask), labels, whole = _prompts(inputs), labels_of(inputs), inputs.get("attention_mask")
    attended = mask.ne(0) | labels.ne(IGNORE_INDEX)
    whole = torch.ones_like(attended) if whole is None else whole.ne(0)
    starts = F.pad(attended.int(), (1, 0)).diff(dim=1).eq(1).sum(dim=1)
    if not torch.equal(attended, whole) or bool((starts > 1).any()):
        return None
    _, answers = _labelled_targets(labels)
    return left_padded(ids, mask), answers[:, : max(1, int(answers.ne(IGNORE_INDEX).sum(1).max()))]


def _labelled_targets(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Positions `[B, P]` whose next token is labelled, and these labels; -100 where a row has fewer."""
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    labelled = following.ne(IGNORE_INDEX)
    count = power_of_two(int(labelled.sum(dim=1).max()), labels.shape[1])
    # Stable, so that the labelled positions come first and in their order.
    first = labelled.int().argsort(dim=1, descending=True, stable=True)[:, :count]
    return first, following.gather(1, first)


def _check_inside(positions: Tensor, mask: Tensor | None, width: int) -> None:
    """Every position must be one of its row's own tokens."""
    lengths: Tensor | int = width
    positions, mask = on_host(positions), None if mask is None else on_host(mask)
    if mask is not None:
        first, last = (m.ne(0).int().argmax(dim=1) for m in (mask, mask.flip(1)))
        lengths = width - first - last
    outside = (positions < 0) | (positions >= lengths)
    if bool(outside.any()):
        raise ValueError(
            f"positions[{_first(outside)}] lies outside of its row: count from the row's first "
            "attended token, and keep the scored token when a prompt is shortened."
        )


def _first(mask: Tensor) -> int:
    """Index of the first True of `[R]`."""
    return int(mask.int().argmax())


def required(inputs: Inputs, name: str, objective: PromptObjective) -> Tensor:
    """A tensor that an objective needs of its batch.

    Raises:
      ValueError: the collator did not make it.
    """
    value = inputs.get(name)
    if value is None:
        raise ValueError(
            f"the batch has no {name!r} (it has {sorted(inputs)}), which "
            f"{type(objective).__name__} needs: use the prompt task's own collator."
        )
    return value
