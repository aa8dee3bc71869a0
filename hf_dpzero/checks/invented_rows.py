"""Rows that nobody wrote, in the form of row 0, for what is tried before a run.

Of row 0 names, dtypes and sizes that are not its length are read: what all rows have in common, or the
run is refused. No value of it, and not its length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.batches.shapes import Row, is_along, masked_shape
from hf_dpzero.objectives.losses import IGNORE_INDEX, base_model

_IDS = ("input_ids", "decoder_input_ids")
_MASKS = ("attention_mask", "decoder_attention_mask")
_DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask")
_DECODER_WIDTH = 8
_OTHER_WIDTHS = {"input_values": (3200, 6400), "input_features": (64, 128)}  # samples, frames


class InventedRows:
    """Makes rows in the form of row 0; the same in every run.

    Args:
      form: row 0, collated alone.
      model: its vocabulary and number of labels bound what is drawn.
      side: of the padding.
    """

    def __init__(self, form: Row, model: nn.Module, side: str) -> None:
        self.form, self.side = form, side
        self._shape = masked_shape(form)
        self._tokens, self._end = _vocabulary(model)
        name = type(base_model(model)).__name__
        self._of_tokens = "ForTokenClassification" in name
        classes = getattr(getattr(base_model(model), "config", None), "num_labels", None)
        self._classes = classes if isinstance(classes, int) and classes > 0 else 2

    def width(self, wide: bool, least: int, widest: int) -> int:
        """Columns of a narrow or a wide row: tokens as given, sounds as long as convolutions need."""
        for name, widths in _OTHER_WIDTHS.items():
            if name in self.form:
                return widths[wide]
        return max(least, widest) if wide else least

    def narrow(self, seed: int, least: int) -> dict[str, Tensor]:
        """A padded row as narrow as rows are, `least` tokens."""
        width = self.width(False, least, least)
        return self.row(seed, width, max(1, width - 2))

    def row(
        self, seed: int, width: int = 0, length: int = 0, scale: float = 1.0
    ) -> dict[str, Tensor]:
        """A batch of one.

        Args:
          seed: rows of other seeds have other values.
          width: columns of its mask, where it has one.
          length: how many of them are attended.
          scale: of numbers that are no tokens.
        """
        generator = torch.Generator().manual_seed(seed)
        row = {n: self._value(n, v, width, scale, generator) for n, v in self.form.items()}
        labels = row.get("labels")
        if self._shape is None:
            return row
        here = self._columns(width, length)
        for name, value in row.items():
            if is_along(name, value, torch.Size((*self._shape[:-1], width))):
                value.masked_fill_(_like(~here, value), IGNORE_INDEX if name == "labels" else 0)
        ids = row.get("input_ids")
        if labels is None or ids is None or labels.shape != ids.shape or self._of_tokens:
            return row
        if not labels.is_floating_point():  # of a language model: the tokens themselves
            row["labels"] = torch.where(labels == IGNORE_INDEX, labels, ids)
        return row

    def _columns(self, width: int, length: int) -> Tensor:
        """bool [width]: which columns are attended."""
        columns = torch.arange(width)
        return columns >= width - length if self.side == "left" else columns < length

    def _value(
        self, name: str, like: Tensor, width: int, scale: float, generator: torch.Generator
    ) -> Tensor:
        size = list(like.shape)
        along = self._shape is not None and is_along(name, like, self._shape)
        decoder = (
            name in _DECODER and like.dim() == 2 and not like.is_floating_point() and not along
        )
        if self._shape is not None and along:
            size[len(self._shape) - 1] = width
        elif decoder:
            size[1] = _DECODER_WIDTH
        if name in _IDS or (name == "labels" and decoder):
            return self._ids(size, like.dtype, generator)
        if like.is_floating_point():
            if name == "labels":
                return torch.randint(2, size, generator=generator).to(like.dtype)
            return (torch.randn(size, generator=generator) * scale).to(like.dtype)
        if name in _MASKS or name == "answer_lengths":
            return torch.ones(size, dtype=like.dtype)
        if name == "position_ids":
            return torch.arange(size[-1]).expand(size).to(like.dtype).clone()
        if name in ("start_positions", "end_positions"):
            return torch.ones(size, dtype=like.dtype)
        if name == "labels":
            return torch.randint(self._classes, size, generator=generator).to(like.dtype)
        return torch.zeros(size, dtype=like.dtype)

    def _ids(self, size: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        ids = self._tokens[torch.randint(len(self._tokens), size, generator=generator)]
        if self._end is not None:  # some classifiers read the last end of sequence
            ids[..., -1] = self._end
        return ids.to(dtype)


def _vocabulary(model: nn.Module) -> tuple[Tensor, int | None]:
    """Ids of ordinary tokens, and the end of a sequence or None; of small vocabularies all."""
    base: Any = base_model(model)
    try:
        count = base.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        count = min(
            (m.num_embeddings for m in base.modules() if isinstance(m, nn.Embedding)), default=2
        )
    config = getattr(base, "config", None)
    text: Any = getattr(config, "get_text_config", lambda: config)()
    named = text.to_dict() if hasattr(text, "to_dict") else {}
    listed = {
        k: v if isinstance(v, list) else [v] for k, v in named.items() if k.endswith("_token_id")
    }
    special = {token for tokens in listed.values() for token in tokens if token is not None}
    ordinary = [token for token in range(count) if token not in special] or [0]
    ends = [
        token for token in listed.get("eos_token_id", []) if token is not None and token < count
    ]
    return torch.tensor(ordinary), ends[0] if ends else None


def _like(columns: Tensor, value: Tensor) -> Tensor:
    """bool [T] over the dimension of a value that is along the mask."""
    at = next(i for i in range(value.dim() - 1, -1, -1) if value.shape[i] == len(columns))
    return columns.view(*[1] * at, -1, *[1] * (value.dim() - at - 1)).expand_as(value)


def nonzero_weights(model: nn.Module) -> Callable[[], None]:
    """Gives trained tensors that are all zero public random values; what is called puts zeros back.

    Fresh heads and LoRA's B hide at zero whatever comes before them.
    """
    filled = []
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            plain = type(parameter.data) is Tensor and not parameter.is_meta
            trained = parameter.requires_grad and parameter.is_floating_point()
            if not (plain and trained) or parameter.any():
                continue
            generator = torch.Generator().manual_seed(number)
            values = torch.randn(parameter.shape, generator=generator) * 0.02
            filled.append((parameter, parameter.detach().clone()))
            parameter.data.copy_(values)

    def restore() -> None:
        for parameter, zeros in filled:
            parameter.data.copy_(zeros)

    return restore
