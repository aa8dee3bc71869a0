"""`DPZeroTrainer`, and the same for encoder-decoder models whose evaluation generates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_dpzero.objectives.losses import PerExampleLoss
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.training.trainer import DPZeroMixin


class DPZeroTrainer(DPZeroMixin):
    """Fine-tunes a model with differentially private zeroth-order steps (DPZero, Algorithm 2).

    A drop-in for `transformers.Trainer`: `train`, `evaluate`, `predict`, callbacks, `report_to`,
    checkpoints, `resume_from_checkpoint`, `save_model` and `push_to_hub` work as there. Arguments as in
    `DPZeroMixin`, and:

    Args:
      model: also the name of one, which is loaded by the class that its configuration names.
      args: `max_length` is for rows of text.
      data_collator: default pads what was tokenised here, else Hugging Face's.
      train_dataset: rows for the model; for a causal language model also prompts, chats or texts, which
        are tokenised (see `conversations`).
      eval_dataset: the same, or a dictionary of data sets.
      processing_class: the tokenizer; of a model given by name, that one's.
      compute_per_example_loss: as in `DPZeroMixin`.
      peft_config: a `peft.PeftConfig`; only its adapter is trained.
      formatting_func: row -> its text, one row at a time; the text is tokenised, with loss everywhere.
      settings: of `DPZeroMixin` and `Trainer`.

    Raises:
      ValueError: see `DPZeroMixin`; rows that this model cannot be trained on.
    """

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: DPZeroConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        compute_per_example_loss: PerExampleLoss | None = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
        **settings: Any,
    ) -> None:
        given = {
            "data_collator": data_collator,
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "processing_class": processing_class,
            "peft_config": peft_config,
            "formatting_func": formatting_func,
        }
        super().__init__(
            model,
            args,
            compute_per_example_loss=compute_per_example_loss,
            **{name: value for name, value in given.items() if value is not None},
            **settings,
        )


@dataclass
class DPZeroSeq2SeqConfig(DPZeroConfig, Seq2SeqTrainingArguments):
    """`DPZeroConfig` with the settings of generation: `predict_with_generate`, `generation_*`."""


class DPZeroSeq2SeqTrainer(DPZeroMixin, Seq2SeqTrainer):  # type: ignore[misc] # its step returns floats
    """A drop-in for `Seq2SeqTrainer`; evaluation generates where `predict_with_generate` is set.

    Arguments as in `DPZeroMixin`, with a `DPZeroSeq2SeqConfig`.
    """
