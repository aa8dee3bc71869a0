"""Model outputs -> per-example losses `[B]` float32, and what every objective needs (`heads` has them).

An objective is a function `objective(model, inputs) -> Tensor[B]`. The trainer perturbs the model
and calls the objective twice per direction; each entry is one example's f(x; xi) in DPZero's finite
difference (Zhang et al. 2024, arXiv:2310.09639, Eq. 2), so it must depend on that example alone.

Guarantee of everything here: no example's loss depends on another example of the batch, and padding
moves it by float32 rounding only. Rows padded on the left are rolled to the right first, so
position ids start at zero whatever the architecture. Losses are computed in float32 from half
precision logits, one example at a time for language models: the float32 copy is `[T, V]`, never
`[B, T, V]`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dpzero.objectives.host import changed, on_host, sent

Inputs = Mapping[str, Tensor]
PerExampleLoss = Callable[[nn.Module, Inputs], Tensor]

IGNORE_INDEX = -100
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
TOKEN_KEYS = ("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask", "bbox")


def classification_losses(
    logits: Tensor,
    labels: Tensor,
    problem_type: str | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Per-example loss of a sequence classifier, `[B]` float32.

    Args:
      logits: `[B, L]`, any floating dtype; computed in float32.
      labels: `[B]` integers (cross entropy), `[B]` or `[B, L]` floats (squared error, or binary
        cross entropy), averaged over an example's own labels.
      problem_type: Hugging Face's `config.problem_type`; None infers it as transformers does: one
        logit is regression, integer labels are classes, float labels are multi-label.
      label_smoothing: share of the target that is spread evenly over the classes, in [0, 1).

    Raises:
      ValueError: a label out of range, an unknown `problem_type`, or label smoothing of one without
        classes.

    >>> classification_losses(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor([1.3863, 1.3863])
    >>> classification_losses(torch.tensor([[1.], [2.]]), torch.tensor([0., 4.]))
    tensor([1., 4.])
    """
    logits = logits.float()
    if problem_type and problem_type not in _PROBLEMS:
        raise ValueError(
            f"problem_type={problem_type!r} is unknown; use one of {', '.join(_PROBLEMS)}."
        )
    kind, (rows, outputs) = problem_type, logits.shape
    whole = labels.dim() < 2 and not labels.is_floating_point()
    # Without a problem_type, B integers for one logit are regression, and for more they are classes.
    numbers = labels.numel() == rows * outputs and (kind or not whole or outputs == 1)
    classes = labels.numel() == rows and (kind == _PROBLEMS[1] or (whole and not kind))
    if not numbers and not classes:
        raise ValueError(
            f"labels of shape {list(labels.shape)} and {labels.dtype} for {outputs} logits: one integer "
            f"a row is a class, {outputs} numbers a row are several labels, and one number a row needs "
            "a model with num_labels=1."
        )
    if not kind:
        several = labels.is_floating_point() or labels.dim() == 2
        kind = "multi_label_classification" if several else "single_label_classification"
        kind = "regression" if logits.shape[1] == 1 else kind
    if kind == "single_label_classification":
        check_labels_in_range(labels, outputs)
        targets = labels.reshape(-1).long()
        return F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    if label_smoothing:
        raise ValueError(
            f"label_smoothing_factor={label_smoothing} with problem_type={kind!r}, whose labels are not "
            "one class each: leave it at 0."
        )
    targets = labels.to(logits.dtype).reshape(logits.shape)
    if kind == "regression":
        return (logits - targets).square().mean(dim=1)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)


def token_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Per-example mean cross entropy over the example's own labelled tokens.

    Args:
      logits: `[B, T, V]`, any floating dtype; only an example's labelled rows are cast to float32.
      labels: `[B, T]` integers, -100 where a position carries no label; best on the host.
      label_smoothing: share of each target that is spread evenly over the vocabulary, in [0, 1).
    Returns:
      `[B]` float32; an example without any label token has loss 0.
    """
    check_labels_in_range(labels, logits.shape[-1])
    labels = on_host(labels)
    labelled = labels != IGNORE_INDEX
    counts, device = labelled.sum(dim=1), logits.device
    places, targets = labelled.nonzero()[:, 1], labels[labelled].long()
    own = (sent(part, device).split(counts.tolist()) for part in (places, targets))
    losses = []
    # Row by row: the float32 copy of all logits would be [B, T, V].
    for row, place, target in zip(logits, *own, strict=True):
        tokens = row.index_select(0, place).float(), target
        losses.append(F.cross_entropy(*tokens, reduction="sum", label_smoothing=label_smoothing))
    if not losses:
        return logits.new_zeros(0, dtype=torch.float32)
    return torch.stack(losses) / sent(counts.clamp(min=1), device)


def last_predictors(labels: Tensor) -> int:
    """Positions from the batch's first label's predictor on, of rows padded on the right.

    Rounded up to a power of two: `batches.shapes` puts rows together that agree on it, so that
    logits have one shape whatever stands beside a row.

    >>> last_predictors(torch.tensor([[-100, -100, -100, -100, -100, 7, 8, 9]]))
    4
    """
    predicted = on_host(labels).ne(IGNORE_INDEX)[:, 1:].any(dim=0)
    first = int(predicted.int().argmax()) if bool(predicted.any()) else labels.shape[1] - 1
    return power_of_two(labels.shape[1] - first, labels.shape[1])


def power_of_two(count: int, most: int) -> int:
    """Rounds `count` up to a power of two, at most `most`."""
    return min(most, 1 << max(count - 1, 0).bit_length())


def single_pass(objective: PerExampleLoss) -> bool:
    """Whether an evaluation runs the model once, on the batch as a whole: `objective.single_pass`.

    True unless it says otherwise. Passes over parts of a batch cannot share a frozen prefix, be
    doubled for both signs, or stand for all copies of a stack.
    """
    return bool(getattr(objective, "single_pass", True))


def differentiable(objective: PerExampleLoss) -> bool:
    """Whether the losses have useful gradients: `objective.differentiable`, True if it has none."""
    return bool(getattr(objective, "differentiable", True))


def check_differentiable(objective: PerExampleLoss) -> None:
    """Raises ValueError for an objective without useful gradients (see `differentiable`)."""
    if not differentiable(objective):
        raise ValueError(
            "this objective counts right answers, which has no gradient: train on the loss "
            "(objective: loss), or use a zeroth-order method such as dpzero."
        )


def comparison_loss(objective: PerExampleLoss) -> PerExampleLoss:
    """Returns what stands for the objective where two ways of evaluating it are compared.

    `objective.comparison_loss`, per-example numbers that every bit of its forward passes has a share in,
    for losses that do not move with them, such as 0/1 losses. The objective itself if it has none.
    """
    own: PerExampleLoss = getattr(objective, "comparison_loss", objective)
    return own


class WrappedObjective:
    """An objective that is evaluated in another way: on some device, in some precision, weighted.

    Attributes:
      objective: whose losses these are.
      evaluate: (objective, model, inputs) -> losses `[B]`; calls the objective once.
      single_pass, differentiable: what the objective says of itself.
    """

    def __init__(
        self,
        objective: PerExampleLoss,
        evaluate: Callable[[PerExampleLoss, nn.Module, Inputs], Tensor],
    ) -> None:
        self.objective, self.evaluate = objective, evaluate
        self.single_pass, self.differentiable = single_pass(objective), differentiable(objective)

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Returns per-example losses `[B]`."""
        return self.evaluate(self.objective, model, inputs)

    def comparison_loss(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Returns the numbers `[B]` of the objective's own `comparison_loss`, evaluated alike."""
        return self.evaluate(comparison_loss(self.objective), model, inputs)


def check_per_example(losses: Any, batch_size: int) -> Tensor:
    """Returns `losses` as float32 if it is a floating tensor `[batch_size]`; refuses it if not.

    A mean over the batch, or one loss per token, cannot be clipped per example: the sensitivity of
    the released sum would be unbounded.

    Raises:
      TypeError: no tensor.
      ValueError: another shape, or no floating dtype.
    """
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"the per-example loss is a {type(losses).__name__}; return a torch.Tensor of shape "
            f"[{batch_size}]."
        )
    if losses.shape != (batch_size,):
        raise ValueError(
            f"the per-example loss has shape {list(losses.shape)} where [{batch_size}] is needed: "
            "return one loss per example (reduction='none', then a mean over the example's own "
            "tokens), never a mean over the batch."
        )
    if not losses.is_floating_point():
        raise ValueError(
            f"the per-example loss has dtype {losses.dtype}; return a floating point tensor."
        )
    return losses.float()


def base_model(model: nn.Module) -> nn.Module:
    """Unwraps a model from PEFT, `torch.compile` and data-parallel wrappers."""
    base: Any = model
    while True:
        if hasattr(base, "get_base_model"):
            base = base.get_base_model()
        elif isinstance(getattr(base, "_orig_mod", None), nn.Module):
            base = base._orig_mod
        elif type(base).__name__ in ("DistributedDataParallel", "DataParallel"):
            base = base.module
        else:
            return base


def ordinary_tokens(model: nn.Module) -> tuple[Tensor, int | None]:
    """Ids of a model's tokens but the special ones, and the end of a sequence or None.

    Without token embeddings those of its smallest table; 0 where all are special.
    """
    base: Any = base_model(model)
    try:
        table = base.get_input_embeddings()
        count = int(getattr(table, "num_embeddings", None) or len(table.weight))
    except (AttributeError, NotImplementedError):
        tables = (m.num_embeddings for m in base.modules() if isinstance(m, nn.Embedding))
        count = min(tables, default=2)
    config = getattr(base, "config", None)
    text: Any = getattr(config, "get_text_config", lambda: config)()
    named = text.to_dict() if hasattr(text, "to_dict") else {}
    special: dict[str, list[int]] = {
        name: [token for token in np.atleast_1d(value).tolist() if token is not None]
        for name, value in named.items()
        if name.endswith("_token_id")
    }
    known = set(itertools.chain.from_iterable(special.values()))
    ordinary = [token for token in range(count) if token not in known] or [0]
    ends = [token for token in special.get("eos_token_id", []) if token < count]
    return torch.tensor(ordinary), ends[0] if ends else None


def right_padded(inputs: Inputs, token_keys: tuple[str, ...] = TOKEN_KEYS) -> Inputs:
    """Rolls rows that are padded on the left so that every row starts with its first token.

    Positions are then counted from the first real token in every architecture, so that an example
    padded on the left has the loss that it has alone. Rows padded on the right are left alone, and
    so are inputs with explicit `position_ids`, without an `attention_mask`, or without `input_ids`.

    Args:
      inputs: tensors of one batch; those named in `token_keys` are `[B, T, ...]`.
    Returns:
      the same mapping, or a new one with the rolled tensors; nothing is changed in place.
    """
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    if mask is None or mask.dim() != 2 or mask.numel() == 0 or "position_ids" in inputs:
        return inputs
    # Without ids (sounds, embeddings) what the mask is over is not known.
    mask = on_host(mask)
    if ids is None or bool(mask[:, 0].all()):
        return inputs
    start = mask.ne(0).int().argmax(dim=1, keepdim=True)
    length = mask.shape[1]
    index = (torch.arange(length, device=mask.device) + start) % length
    present = (key for key in token_keys if inputs.get(key) is not None)

    def rolled(values: Tensor) -> Tensor:
        return take_columns(values, sent(index, values.device))

    return {**inputs, **{key: changed(inputs[key], rolled) for key in present}}


def batch_size(microbatch: Inputs) -> int:
    """Counts the rows of a collated microbatch by the first tensor's leading dimension.

    Raises:
      ValueError: no tensor has a dimension.
    """
    for value in microbatch.values():
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    raise ValueError(f"the microbatch {sorted(microbatch)} holds no tensor with a batch dimension.")


class PaddedMicrobatch(dict[str, Tensor]):
    """A microbatch whose rows after the first ones only fill up its shape; their losses are dropped.

    Args:
      batch: tensors with one leading dimension.
      examples: how many rows count.
      places: of each example, its place in the list that was asked for; None for all in order.
    """

    def __init__(self, batch: Inputs, examples: int, places: Sequence[int] | None = None) -> None:
        super().__init__(batch)
        self.examples, self.places = examples, places


def num_examples(microbatch: Inputs) -> int:
    """Counts the rows that are examples: all but what fills up a `PaddedMicrobatch` microbatch."""
    examples: int | None = getattr(microbatch, "examples", None)
    return batch_size(microbatch) if examples is None else examples


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Sets `model.eval()` inside; on exit every module is back in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    if any(training for _, training in modes):
        model.eval()
    try:
        yield model
    finally:
        for module, training in modes:
            if module.training is not training:  # a module's __setattr__ takes microseconds
                module.training = training


def take_columns(tensor: Tensor, index: Tensor) -> Tensor:
    """Picks columns row by row.

    Args:
      tensor, index: `[B, T, ...]`; int64 `[B, P]`.

    Returns:
      `tensor[b, index[b, p], ...]`, `[B, P, ...]`.
    """
    return tensor[torch.arange(index.shape[0], device=index.device).unsqueeze(1), index]


def flattened_rows(batch: Mapping[str, Tensor], shape: torch.Size) -> dict[str, Tensor]:
    """`[B, C, T]` tensors of a batch as `[B C, T]`.

    Args:
      batch: tensors; those without three dimensions, or of another B and C, are left alone.
      shape: of the tokens, `[B, C, T]`.

    Returns:
      A new batch.
    """
    alike = {k: v for k, v in batch.items() if v.shape[:2] == shape[:2] and v.dim() > 2}
    return {**batch, **{k: changed(v, lambda t: t.flatten(0, 1)) for k, v in alike.items()}}


def labels_of(inputs: Inputs, name: str = "labels") -> Tensor:
    """Returns the tensor `name` of a batch; raises ValueError if there is none."""
    labels = inputs.get(name)
    if labels is None:
        raise ValueError(
            f"the batch has no {name!r} (it has {sorted(inputs)}); add a {name} column to the "
            "data set, or pass your own compute_per_example_loss."
        )
    return labels


def without_labels(inputs: Inputs, *names: str) -> dict[str, Tensor]:
    """Leaves labels out of what goes to the model, which would compute a loss of its own.

    Args:
      inputs: the batch.
      names: of what counts as labels; "labels" where none are given.

    Returns:
      A new batch.
    """
    left_out = names or ("labels",)
    return {k: value for k, value in inputs.items() if k not in left_out and value is not None}


# What a model's forward takes does not change in a run, and is asked in every pass. Weak keys: the
# table keeps no model alive.
_ARGUMENTS: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


def takes(model: nn.Module, argument: str) -> bool:
    """Returns whether the forward of the model under its wrappers names an argument."""
    known = _ARGUMENTS.get(model)
    if known is None:
        forward = type(base_model(model)).forward
        known = _ARGUMENTS[model] = frozenset(inspect.signature(forward).parameters)
    return argument in known


def model_outputs(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Runs the model; no key-value cache is kept where it takes `use_cache`.

    Returns:
      What it returns: a mapping, or a tuple.
    """
    return model(**({"use_cache": False, **inputs} if takes(model, "use_cache") else inputs))


def model_logits(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Runs the model as `model_outputs` does, for its logits; `[B, T, V]` of a language model."""
    outputs = model_outputs(model, inputs)
    return outputs[0] if isinstance(outputs, tuple) else outputs["logits"]


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has traced, or will trace, `model` or one of its modules."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def check_labels_in_range(labels: Tensor, classes: int) -> None:
    """Refuses labels outside 0 .. classes - 1 other than -100, which losses ignore.

    The error names no label, for it may be a private row's.

    Raises:
      ValueError: says which labels the model has, and which setting gives it others.

    >>> import torch
    >>> check_labels_in_range(torch.tensor([0, 1, -100]), classes=2)
    """
    if labels.is_meta:  # a plan's: shapes without values
        return
    labels = on_host(labels)
    outside = (labels >= classes) | ((labels < 0) & (labels != IGNORE_INDEX))
    if bool(outside.any()):
        raise ValueError(
            f"a label is out of range: the model has {classes} logits, so labels are 0 to "
            f"{classes - 1}, or {IGNORE_INDEX} for what is ignored. Number the labels from 0, or load "
            "the model with num_labels of the data (a language model: with embeddings resized to the "
            "tokenizer's vocabulary)."
        )
