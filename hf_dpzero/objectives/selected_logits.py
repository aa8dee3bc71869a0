"""Logits at a few positions of each row, whatever the architecture.

The output matrix of a language model is its largest: all logits of a batch, `[B, T, V]`, cost more
memory than everything before them. A prompted example needs them at one position, or at those of its
answer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_dpzero.objectives.losses import (
    Inputs,
    base_model,
    is_compiled,
    model_logits,
    right_padded,
    take_columns,
)


def selected_logits(model: nn.Module, inputs: Inputs, positions: Tensor) -> Tensor:
    """Logits at P positions of each row.

    Equal to the full logits at these positions (up to the rounding of a smaller matrix product): the
    hidden states are gathered as they enter the output embedding. Where that is not to be done (a
    compiled model, or one without an output embedding that takes `[B, T, h]`), all logits are
    computed and then gathered.

    Args:
      model: a language model, also under PEFT.
      inputs: what its forward takes, `[B, T]`; padded on either side.
      positions: `[B, P]` int64, counted from each row's first attended token.

    Returns:
      `[B, P, V]` in the model's dtype.
    """
    batch = right_padded(inputs)
    gathering = _Gathering(positions + _starts(batch), batch["input_ids"].shape[1])
    head = None if is_compiled(model) else _output_embedding(model)
    if head is None:
        return gathering.of(model_logits(model, batch))
    handle = head.register_forward_pre_hook(gathering.before)
    try:
        logits = model_logits(model, batch)
    finally:
        handle.remove()
    return logits if gathering.done else gathering.of(logits)


class _Gathering:
    """Takes rows of `[B, T, ...]` states at positions `[B, P]`, of the last `length` if T is larger."""

    def __init__(self, positions: Tensor, length: int) -> None:
        self.positions, self.length = positions, length
        self.done = False

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A forward pre-hook of the output embedding."""
        if len(args) != 1 or not self._fits(args[0]):
            return None
        self.done = True
        return (self.of(args[0]),)

    def _fits(self, states: Any) -> bool:
        known = isinstance(states, Tensor) and states.dim() == 3
        return known and len(states) == len(self.positions) and states.shape[1] >= self.length

    def of(self, states: Tensor) -> Tensor:
        """`[B, P, ...]`; virtual tokens of prompt tuning stand in front and are not counted."""
        virtual = states.shape[1] - self.length
        return take_columns(states, (self.positions + virtual).to(states.device))


def _output_embedding(model: nn.Module) -> nn.Module | None:
    """What turns hidden states into logits; None if the model does not say."""
    get: Any = getattr(base_model(model), "get_output_embeddings", None)
    head = get() if get is not None else None
    return head if isinstance(head, nn.Module) else None


def _starts(batch: Inputs) -> Tensor | int:
    """Where each row's tokens begin, `[B, 1]`: 0 but for rows that `right_padded` left alone."""
    mask = batch.get("attention_mask")
    if mask is None or "position_ids" not in batch:
        return 0
    return mask.ne(0).int().argmax(dim=1, keepdim=True)
