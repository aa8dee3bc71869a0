"""Rows that nobody wrote, in the form of row 0, for what is tried before a run.

Of row 0 names, dtypes and sizes that are not its length are read: what all rows have in common, or the
run is refused. No value of it, and not its length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_dpzero.batches.placement import bucket
from hf_dpzero.batches.shapes import PassShapes, Row, is_along, masked_shape
from hf_dpzero.objectives.losses import IGNORE_INDEX, base_model, ordinary_tokens

_POSITIONS = ("start_positions", "end_positions")
_IDS = ("input_ids", "decoder_input_ids")
_ONES = ("attention_mask", "decoder_attention_mask", "answer_lengths", *_POSITIONS)
_DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask")
_DECODER_WIDTH = 8
_LEAST, _MOST, _WEIGHED = 512, 1 << 12, 1 << 36
_OTHER_WIDTHS = {"input_values": (3200, 6400), "input_features": (64, 128)}  # samples, frames


def tokens_of_a_pass(parameters: int, device: str) -> int:
    """Tokens of one pass of the smoke test, at most, where it has more than its narrowest rows.

    A start takes seconds on a CPU: a pass of 135 million parameters has 512 tokens there, which is 32
    columns of 16 rows. A GPU takes as many as it needs for widths of ordinary texts.

    >>> tokens_of_a_pass(135_000_000, "cpu"), tokens_of_a_pass(22_700_000, "cpu")
    (512, 3027)
    """
    if device != "cpu":
        return _MOST
    return min(_MOST, max(_LEAST, _WEIGHED // max(parameters, 1)))


class InventedRows:
    """Makes rows in the form of row 0; the same in every run.

    Args:
      form: row 0, collated alone.
      model: its vocabulary and number of labels bound what is drawn.
      shapes: of the run; its widths bound those that are made.
    """

    def __init__(self, form: Row, model: nn.Module, shapes: PassShapes) -> None:
        self.form, self.shapes, self.side = form, shapes, shapes.padding_side
        self._shape = masked_shape(form)
        self._tokens, self._end = ordinary_tokens(model)
        self._of_tokens = "ForTokenClassification" in type(base_model(model)).__name__
        classes = getattr(getattr(base_model(model), "config", None), "num_labels", None)
        self._classes = classes if isinstance(classes, int) and classes > 0 else 2
        parameters = list(model.parameters())
        device = parameters[0].device.type if parameters else "cpu"
        self._tokens_of_a_pass = tokens_of_a_pass(sum(p.numel() for p in parameters), device)
        self._least = bucket(1, shapes.context_length, shapes.max_length)

    def narrow(self, seed: int = 0) -> Row:
        """A padded row as narrow as rows are; sounds are as long as convolutions need."""
        width = next((w for n, (w, _) in _OTHER_WIDTHS.items() if n in self.form), self._least)
        return self.row(seed, width, max(1, width - 2))

    def wide(self, size: int) -> Row:
        """An unmasked row, as wide as a pass of so many may be."""
        limits = (self.shapes.context_length, self.shapes.max_length)
        most = min([self._tokens_of_a_pass // size, *(n for n in limits if n is not None)])
        widest = max(self._least, most)
        width = next((w for n, (_, w) in _OTHER_WIDTHS.items() if n in self.form), widest)
        return self.row(size, width, width)

    def row(self, seed: int, width: int, length: int, scale: float = 1.0) -> dict[str, Tensor]:
        """A batch of one.

        Args:
          seed: rows of other seeds have other values.
          width: columns of its mask, where it has one.
          length: how many of them are attended.
          scale: of numbers that are no tokens.
        """
        generator, shape = torch.Generator().manual_seed(seed), self._shape
        row = {n: self._value(n, v, width, scale, generator) for n, v in self.form.items()}
        if shape is None:
            return row
        columns = torch.arange(width)
        masked = columns < width - length if self.side == "left" else columns >= length
        for name, value in row.items():
            if is_along(name, value, torch.Size((*shape[:-1], width))):
                at = len(shape) - 1
                hidden = masked.view(*[1] * at, -1, *[1] * (value.dim() - at - 1))
                value.masked_fill_(hidden, IGNORE_INDEX if name == "labels" else 0)
        labels, ids = row.get("labels"), row.get("input_ids")
        if labels is None or ids is None or labels.shape != ids.shape or self._of_tokens:
            return row
        if not labels.is_floating_point():  # of a language model: the tokens themselves
            row["labels"] = torch.where(labels == IGNORE_INDEX, labels, ids)
        return row

    def _value(
        self, name: str, like: Tensor, width: int, scale: float, generator: torch.Generator
    ) -> Tensor:
        size, shape, real = list(like.shape), self._shape, like.is_floating_point()
        along = shape is not None and is_along(name, like, shape)
        decoder = name in _DECODER and like.dim() == 2 and not real and not along
        if shape is not None and along:
            size[len(shape) - 1] = width
        elif decoder:
            size[1] = _DECODER_WIDTH
        if name in _IDS or (name == "labels" and decoder):
            value = self._tokens[torch.randint(len(self._tokens), size, generator=generator)]
            if self._end is not None:  # some classifiers read the last end of sequence
                value[..., -1] = self._end
        elif name == "labels":
            value = torch.randint(2 if real else self._classes, size, generator=generator)
        elif real:
            value = torch.randn(size, generator=generator) * scale
        elif name == "position_ids":
            value = torch.arange(size[-1]).expand(size).clone()
        else:
            value = torch.ones(size) if name in _ONES else torch.zeros(size)
        return value.to(like.dtype)


@contextlib.contextmanager
def at_nonzero_weights(model: nn.Module) -> Iterator[None]:
    """Gives trained tensors that are all zero public random values inside; puts the zeros back.

    Fresh heads and LoRA's B hide at zero whatever comes before them.
    """
    filled = []
    for number, parameter in enumerate(model.parameters()):
        plain = type(parameter.data) is Tensor and not parameter.is_meta
        trained = parameter.requires_grad and parameter.is_floating_point()
        if plain and trained and not parameter.any():
            generator = torch.Generator().manual_seed(number)
            # of the size that transformers gives fresh layers
            values = torch.randn(parameter.shape, generator=generator) * 0.02
            filled.append((parameter, parameter.detach().clone()))
            parameter.data.copy_(values)
    try:
        yield
    finally:
        for parameter, zeros in filled:
            parameter.data.copy_(zeros)
