"""Private training of encoder-decoder models whose evaluation generates, as in `Seq2SeqTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.training.trainer import DPZeroMixin


@dataclass
class DPZeroSeq2SeqConfig(DPZeroConfig, Seq2SeqTrainingArguments):
    """`DPZeroConfig` with the settings of generation: `predict_with_generate`, `generation_*`."""


class DPZeroSeq2SeqTrainer(DPZeroMixin, Seq2SeqTrainer):  # type: ignore[misc] # its step returns floats
    """A drop-in for `Seq2SeqTrainer`; evaluation generates where `predict_with_generate` is set.

    Arguments as in `DPZeroMixin`, with a `DPZeroSeq2SeqConfig`.
    """
