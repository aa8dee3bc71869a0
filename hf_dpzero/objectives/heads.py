"""One objective for each head of transformers, and the table that finds it by the model's class.

Every loss is the model's own for a batch of that example alone without padding. `register_objective`
adds heads; `own_loss_objective` fits any head whose forward returns a loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dpzero.objectives.host import on_host
from hf_dpzero.objectives.losses import (
    IGNORE_INDEX,
    TOKEN_KEYS,
    Inputs,
    PerExampleLoss,
    base_model,
    batch_size,
    classification_losses,
    flattened_rows,
    labels_of,
    last_predictors,
    model_logits,
    model_outputs,
    right_padded,
    takes,
    token_losses,
    without_labels,
)


def sequence_classification_objective(
    model: nn.Module, inputs: Inputs, label_smoothing: float = 0.0
) -> Tensor:
    """Losses of any classifier of whole examples: texts, pairs, images, sounds, videos.

    Args:
      model, inputs: the classifier, also under PEFT; what its forward takes, with `labels` (see
        `classification_losses`).
      label_smoothing: see `smoothed`.

    Returns:
      `[B]` float32.
    """
    batch = right_padded(inputs)
    logits = model_logits(model, without_labels(batch))
    problem_type = getattr(getattr(base_model(model), "config", None), "problem_type", None)
    return classification_losses(logits, labels_of(inputs), problem_type, label_smoothing)


def multiple_choice_objective(
    model: nn.Module, inputs: Inputs, label_smoothing: float = 0.0
) -> Tensor:
    """Cross entropy of the right one of an example's C choices, `[B]` float32.

    Args:
      model, inputs: `...ForMultipleChoice`, also under PEFT; `input_ids` `[B, C, T]` and the like,
        padded on either side, with `labels` `[B]`.
      label_smoothing: see `smoothed`.
    """
    labels, shape = labels_of(inputs), inputs["input_ids"].shape
    rows = right_padded(flattened_rows(without_labels(inputs), shape))
    batch = {
        name: value.unflatten(0, shape[:2]) if inputs[name].dim() > 2 else value
        for name, value in rows.items()
    }
    logits = model_logits(model, batch)
    return classification_losses(logits, labels, "single_label_classification", label_smoothing)


def span_losses(
    start_logits: Tensor,
    end_logits: Tensor,
    start_positions: Tensor,
    end_positions: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Per-example mean of the cross entropies of a span's first and last token (Devlin et al. 2019).

    As transformers' `ForQuestionAnsweringLoss`, with a softmax over the example's own tokens: padding
    takes no part, so that it does not matter how wide a row is padded. Positions below 0 count as 0;
    those at T or beyond, or on padding, are ignored and contribute 0.

    Args:
      start_logits, end_logits: `[B, T]`, any floating dtype; computed in float32.
      start_positions, end_positions: `[B]` or `[B, 1]` integers, columns of the logits.
      mask: `[B, T]`, 0 on padding; None where there is none.

    Returns:
      `[B]` float32.

    >>> logits = torch.zeros(2, 4)
    >>> span_losses(logits, logits, torch.tensor([0, 1]), torch.tensor([3, 9]))
    tensor([1.3863, 0.6931])
    """
    width = start_logits.shape[1]
    own = torch.ones_like(start_logits, dtype=torch.bool) if mask is None else mask.ne(0)

    def losses(logits: Tensor, positions: Tensor) -> Tensor:
        positions = positions.reshape(-1).clamp(0, width)
        column = positions.clamp(max=width - 1)
        counts = (positions < width) & own.gather(1, column.unsqueeze(1)).squeeze(1)
        return F.cross_entropy(
            logits.float().masked_fill(~own, -torch.inf),
            column.masked_fill(~counts, IGNORE_INDEX),
            reduction="none",
        )

    return (losses(start_logits, start_positions) + losses(end_logits, end_positions)) / 2


def question_answering_objective(model: nn.Module, inputs: Inputs) -> Tensor:
    """Losses of an extractive question answering head (see `span_losses`), `[B]` float32.

    Args:
      model, inputs: `...ForQuestionAnswering` with `start_logits` and `end_logits`, also under PEFT;
        `input_ids` `[B, T]` and the like, padded on either side, with `start_positions` and
        `end_positions` `[B]`, columns of `input_ids`.
    """
    starts, ends = (labels_of(inputs, name) for name in ("start_positions", "end_positions"))
    batch, width = right_padded(inputs), inputs["input_ids"].shape[1]
    mask = batch.get("attention_mask")
    if mask is not None and batch is not inputs:  # positions move along with the tokens
        first = inputs["attention_mask"].ne(0).int().argmax(dim=1)
        inside = (p.reshape(-1).clamp(0, width) for p in (starts, ends))
        # Positions outside of the row stay outside.
        starts, ends = (torch.where(p < width, (p - first) % width, width) for p in inside)
    labelled = ("labels", "start_positions", "end_positions")
    outputs = model_outputs(model, without_labels(batch, *labelled))
    names = (0, 1) if isinstance(outputs, tuple) else ("start_logits", "end_logits")
    # Prompt tuning puts virtual tokens in front: the last T positions are the text's.
    start_logits, end_logits = (outputs[name][:, -width:] for name in names)
    return span_losses(start_logits, end_logits, starts, ends, mask)


def token_classification_objective(
    model: nn.Module, inputs: Inputs, label_smoothing: float = 0.0
) -> Tensor:
    """Mean cross entropy over an example's own labelled tokens, 0 without any, `[B]` float32.

    Args:
      model, inputs: `...ForTokenClassification`, also under PEFT; what its forward takes, with `labels`
        `[B, T]`, -100 where a token carries none; padded on either side.
      label_smoothing: see `smoothed`.
    """
    labels_of(inputs)
    batch = right_padded(inputs, token_keys=(*TOKEN_KEYS, "labels"))
    labels = batch["labels"]
    logits = model_logits(model, without_labels(batch))
    return token_losses(logits[:, -labels.shape[1] :], labels, label_smoothing)


def masked_lm_objective(model: nn.Module, inputs: Inputs, label_smoothing: float = 0.0) -> Tensor:
    """Losses of a masked language model over the labels != -100, `[B]` float32.

    Args:
      model, inputs: the encoder, also under PEFT; what its forward takes, with `labels` `[B, T]`.
      label_smoothing: see `smoothed`.
    """
    return token_classification_objective(model, inputs, label_smoothing)


def causal_lm_objective(model: nn.Module, inputs: Inputs, label_smoothing: float = 0.0) -> Tensor:
    """Next-token losses of a decoder: the logits at position t answer for label t + 1.

    Label 0 of a row has no predictor and is ignored. Where the model takes `logits_to_keep`, logits
    before the batch's first label are not computed.

    Args:
      model, inputs: the decoder, also under PEFT; what its forward takes, with `labels` `[B, T]`.
      label_smoothing: see `smoothed`.

    Returns:
      `[B]` float32.
    """
    labels = labels_of(inputs)
    batch = right_padded(inputs, token_keys=(*TOKEN_KEYS, "labels"))
    labels = on_host(batch["labels"])
    kept: dict[str, Any] = {}
    if takes(model, "logits_to_keep"):  # the last ones, which answer for all labels; at least 1
        kept = {"logits_to_keep": last_predictors(labels)}
    logits = model_logits(model, {**without_labels(batch), **kept})
    # Prompt tuning puts virtual tokens in front: only the last T positions answer for the labels.
    logits = logits[:, -labels.shape[1] :]
    return token_losses(
        logits[:, :-1], labels[:, labels.shape[1] - logits.shape[1] + 1 :], label_smoothing
    )


def seq2seq_objective(model: nn.Module, inputs: Inputs, label_smoothing: float = 0.0) -> Tensor:
    """Losses of an encoder-decoder; decoder inputs are the labels shifted right, if none are given.

    Args:
      model, inputs: also under PEFT; of texts, sounds or images, with `labels` `[B, T]`, padded on the
        right by -100.
      label_smoothing: see `smoothed`.

    Returns:
      `[B]` float32.
    """
    labels = labels_of(inputs)
    batch = dict(without_labels(right_padded(inputs)))
    if "decoder_input_ids" not in batch:
        batch["decoder_input_ids"] = _decoder_inputs(base_model(model), labels)
    return token_losses(model_logits(model, batch)[:, -labels.shape[1] :], labels, label_smoothing)


def _decoder_inputs(base: Any, labels: Tensor) -> Tensor:
    """The labels shifted right by one, starting with the decoder's start token, -100 as padding."""
    if hasattr(base, "prepare_decoder_input_ids_from_labels"):
        return base.prepare_decoder_input_ids_from_labels(labels=labels)
    shifted = labels.new_full(labels.shape, base.config.decoder_start_token_id)
    ignored = labels[:, :-1] == IGNORE_INDEX
    shifted[:, 1:] = labels[:, :-1].masked_fill(ignored, base.config.pad_token_id)
    return shifted


class OneRowLoss:
    """A loss of batches, asked for one row at a time: so each example's is a function of it alone.

    Slower than an objective that takes a batch at once. The gradients of `dp-sgd` and `dp-adamw` take a
    backward pass a row.

    Args:
      loss: (model, inputs of one row) -> one floating number.
      name: what errors call it.
      holder: whose attributes the loss may write to; None for its own.
    """

    single_pass: ClassVar[bool] = False

    def __init__(
        self,
        loss: Callable[[nn.Module, dict[str, Any]], Any],
        name: str,
        holder: object = None,
    ) -> None:
        self.loss, self.__name__, self.holder = loss, name, holder

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Losses of the examples, each by itself, `[B]` float32.

        Args:
          model, inputs: what the loss takes, labels included; tensors and lists of B examples.

        Raises:
          ValueError: the loss of one row is no floating number.
        """
        count, given = batch_size(inputs), {k: v for k, v in inputs.items() if v is not None}
        rows = [{k: v[i : i + 1] for k, v in given.items()} for i in range(count)]
        losses = [self._number(self.loss(model, row)) for row in (rows if count != 1 else [given])]
        return torch.stack(losses) if losses else torch.zeros(0)

    def _number(self, loss: object) -> Tensor:
        """The loss as float32 `[]`."""
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
            return loss.float().reshape(())
        kind = (
            f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        )
        raise ValueError(
            f"{self.__name__} returned {kind} for one row: return one floating number, such as a mean "
            "over the row's tokens."
        )


def _returned_loss(model: nn.Module, row: Inputs) -> Tensor:
    """The loss that the model's forward returns."""
    outputs = model_outputs(model, row)
    loss = outputs[0] if isinstance(outputs, tuple) else outputs.get("loss")
    if loss is None:
        raise ValueError(
            f"{type(base_model(model)).__name__} returns no loss for {sorted(row)}: give it the "
            "labels that it takes, or pass your own compute_per_example_loss."
        )
    return loss.float().mean()


own_loss_objective = OneRowLoss(_returned_loss, "own_loss_objective")
"""The loss that the model itself returns, for any head whose forward returns one."""

_ENDS: dict[PerExampleLoss, tuple[str, ...]] = {
    sequence_classification_objective: (
        "ForSequenceClassification", "SentenceClassifier", "ForNextSentencePrediction",
        "ForImageClassification", "ForVideoClassification", "ForAudioClassification",
    ),
    multiple_choice_objective: ("ForMultipleChoice",),
    question_answering_objective: ("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
    token_classification_objective: ("ForTokenClassification",),
    masked_lm_objective: ("ForMaskedLM",),
    causal_lm_objective: ("ForCausalLM", "LMHeadModel"),
    seq2seq_objective: ("ForConditionalGeneration", "EncoderDecoderModel", "MarianMTModel"),
    own_loss_objective: ("ForCTC", "ForSemanticSegmentation", "ForObjectDetection"),
}  # fmt: skip
_BUILT_IN = {head: objective for objective, heads in _ENDS.items() for head in heads}
_REGISTERED: dict[str, PerExampleLoss] = {}


def register_objective(head: str, objective: PerExampleLoss) -> None:
    """Makes `select_objective` know a head, in this process.

    Args:
      head: what the names of its classes end in, such as "ForMyHead". A longer ending goes before a
        shorter one, and a registered one before the same of this package.
      objective: (model, inputs) -> losses [B] float, each a function of its own example alone.

    Raises:
      ValueError: an empty ending.
      TypeError: an objective that cannot be called.
    """
    if not head:
        raise ValueError("head='' would fit every model: give the end of its class name.")
    if not callable(objective):
        raise TypeError(
            f"the objective of {head} is a {type(objective).__name__}: give a function (model, inputs) "
            "-> Tensor[B]."
        )
    _REGISTERED[head] = objective


def select_objective(model: nn.Module) -> PerExampleLoss:
    """The objective that fits the model's head, read from its class (also under PEFT).

    A subclass counts as its parents. Encoder-decoders get `seq2seq_objective`; decoder-only models that
    transformers calls `...ForConditionalGeneration` get `causal_lm_objective`, and heads called
    `...ForQuestionAnswering` that do not score the tokens of a span `own_loss_objective`, as do unknown
    models whose forward takes labels.

    Raises:
      ValueError: no objective fits; says which heads are known, and what to write.
    """
    known = {**_BUILT_IN, **_REGISTERED}
    if (objective := _fitting(model, known)) is not None:
        return objective
    name = type(base_model(model)).__name__
    if any(takes(model, label) for label in ("labels", "label", "label_ids", "future_values")):
        return own_loss_objective
    raise ValueError(
        f"no per-example loss is known for {name}, whose forward takes no labels. Known are classes "
        f"whose names end in {', '.join(known)}. Pass compute_per_example_loss=objective, a function "
        "(model, inputs) -> Tensor[B] of one loss per example, or call "
        f"register_objective({name!r}, objective). "
        "hf_dpzero.objectives.own_loss_objective takes the loss that the model's own forward returns, "
        "one example at a time."
    )


def smoothed(objective: PerExampleLoss, label_smoothing: float) -> PerExampleLoss:
    """The objective with Hugging Face's label smoothing, which acts within each example.

    Args:
      objective: of `select_objective`.
      label_smoothing: `label_smoothing_factor`, the share of a target that is spread evenly over the
        classes, or over the vocabulary; 0 returns the objective itself.

    Returns:
      (model, inputs) -> losses `[B]`.

    Raises:
      ValueError: an objective that takes no `label_smoothing`, for it has no targets to smooth.
    """
    if not label_smoothing:
        return objective
    if "label_smoothing" not in inspect.signature(objective).parameters:
        name = getattr(objective, "__name__", type(objective).__name__)
        raise ValueError(
            f"label_smoothing_factor={label_smoothing} has no effect on {name}: leave it at 0, or pass "
            "a compute_per_example_loss that smooths."
        )
    takes_smoothing: Callable[..., Tensor] = objective
    return functools.partial(takes_smoothing, label_smoothing=label_smoothing)


def is_language_model(model: nn.Module) -> bool:
    """Whether this package knows the model as a causal or masked language model."""
    return _fitting(model, _BUILT_IN) in (causal_lm_objective, masked_lm_objective)


def is_classifier(model: nn.Module) -> bool:
    """Whether this package knows the model as a classifier of whole examples."""
    return _fitting(model, {**_BUILT_IN, **_REGISTERED}) is sequence_classification_objective


def _fitting(model: nn.Module, known: dict[str, PerExampleLoss]) -> PerExampleLoss | None:
    base = base_model(model)
    for parent in type(base).__mro__:
        ends = [head for head in known if parent.__name__.endswith(head)]
        if not ends:
            continue
        objective = known[max(ends, key=len)]
        config: Any = getattr(base, "config", None)
        # Some decoders are called ...ForConditionalGeneration.
        if objective is seq2seq_objective and not getattr(config, "is_encoder_decoder", False):
            return causal_lm_objective
        # Heads for visual and table questions take `labels`; XLNet and XLM search spans by a beam.
        spans = takes(base, "start_positions") and not takes(base, "p_mask")
        if objective is question_answering_objective and not spans:
            return own_loss_objective
        return objective
    return None
