"""`DPZeroTrainer`: the private step over `Trainer`, which also takes what TRL's SFTTrainer takes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from hf_dpzero.objectives.losses import PerExampleLoss
from hf_dpzero.training import data_checks
from hf_dpzero.training.config import DPZeroConfig
from hf_dpzero.training.loading import load_named, load_processing, with_adapter
from hf_dpzero.training.text_rows import TextRows
from hf_dpzero.training.trainer import DPZeroMixin, checked_config


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
        **settings: Any,
    ) -> None:
        args = checked_config(args)
        data_checks.check_rows(train_dataset)
        if isinstance(model, str):
            processing_class = processing_class or load_processing(model)
            model = load_named(model, args.seed, compute_per_example_loss is not None)
        if peft_config is not None:
            model = with_adapter(model, peft_config, args.seed)
        self._texts = TextRows(model, args, processing_class, data_collator)
        train_dataset = self._texts.train(train_dataset)
        eval_dataset = self._texts.evaluated(eval_dataset)
        super().__init__(
            model,
            args,
            data_collator=self._texts.collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_per_example_loss=compute_per_example_loss,
            **settings,
        )
        self.rows_are_examples = self._texts.examples

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As in `DPZeroMixin`; texts are tokenised."""
        return super().get_eval_dataloader(self._texts.evaluated(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As in `DPZeroMixin`; texts are tokenised."""
        return super().get_test_dataloader(self._texts.evaluated(test_dataset))
