"""Evaluation of objectives that predict more than a model's own head does: label words, answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import Inputs, classification_losses
from hf_dpzero.objectives.prompted import PromptObjective
from hf_dpzero.parallel.sharded_runs import ShardedTrainer
from hf_dpzero.training.group_metrics import by_group, groups_of_rows


class PredictingTrainer(ShardedTrainer):
    """A Trainer whose evaluation asks the objective, if that is one that predicts.

    Attributes:
      per_example_loss: a `PromptObjective`, whose predictions `compute_metrics` gets; or anything
        else, and evaluation is Hugging Face's.
    """

    per_example_loss: Any = None
    _evaluated: tuple[Any, Any] = (None, None)  # a loader, its rows with the columns of no model
    _losses: list[Tensor] | None = (
        None  # of the evaluated rows, where their groups are to be measured
    )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As in Trainer; notes the rows, for metrics of their groups."""
        chosen: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[chosen] if isinstance(chosen, str) else chosen  # type: ignore[index]
        self._evaluated = super().get_eval_dataloader(eval_dataset), rows
        return self._evaluated[0]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As in Trainer; notes the rows, for metrics of their groups."""
        self._evaluated = super().get_test_dataloader(test_dataset), test_dataset
        return self._evaluated[0]

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **settings: Any) -> Any:
        """As in Trainer, with metrics of each group where `group_robust.column` is set.

        Without `compute_metrics` these are the groups' losses, which take a forward pass of their own.
        """
        compute = self.compute_metrics
        known, rows = self._evaluated
        groups = groups_of_rows(self.args, rows) if dataloader is known else None
        self.compute_metrics = by_group(compute, groups, self.args)
        self._losses = [] if groups is not None and compute is None else None
        try:
            output = super().evaluation_loop(dataloader, *args, **settings)
            if groups is not None and self._losses:
                prefix = args[3] if len(args) > 3 else settings.get("metric_key_prefix", "eval")
                found = groups.losses(torch.cat(self._losses).numpy())
                (output.metrics or {}).update(
                    {f"{prefix}_{name}": loss for name, loss in found.items()}
                )
            return output
        finally:
            self.compute_metrics, self._losses = compute, None

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps the columns that only the objective or the collator reads."""
        super()._set_signature_columns_if_needed()
        read = {
            name
            for reader in (self.per_example_loss, self.data_collator)
            for name in getattr(reader, "columns", ())
        }
        known: list[str] = self._signature_columns or []
        self._signature_columns = [*known, *sorted(read - set(known))]  # type: ignore[assignment]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **settings: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """As in Trainer, with the objective's predictions.

        Args:
          model: evaluated without gradients.
          inputs: a batch with labels.
          prediction_loss_only: leave out predictions and targets.
          ignore_keys: of model outputs; unused with a `PromptObjective`.
          settings: of generation, for `Seq2SeqTrainer`; likewise.

        Returns:
          Mean loss, predictions, and what they are compared with: labels, or row numbers.
        """
        objective = self.per_example_loss
        if not isinstance(objective, PromptObjective):
            with own_mean(self.args):
                found = super().prediction_step(
                    model, inputs, prediction_loss_only, ignore_keys, **settings
                )
            if self._losses is not None and found[0] is not None:
                batch = self._prepare_inputs(dict(inputs))
                with torch.no_grad(), self.compute_loss_context_manager():
                    losses_of = objective or select_objective(model)
                    self._remember(losses_of(model, batch))
            return found
        batch = self._prepare_inputs(dict(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            predictions = None if prediction_loss_only else objective.predict(model, batch)
            losses = evaluation_losses(objective, model, batch, predictions)
            self._remember(losses)
        targets = None if prediction_loss_only else batch.get("references", batch["labels"])
        return losses.mean(), predictions, targets

    def _remember(self, losses: Tensor) -> None:
        """Keeps the losses [B] of all processes for metrics of groups, where these are wanted."""
        if self._losses is not None:
            every = self.accelerator.gather_for_metrics(losses.detach())
            self._losses.append(every.double().cpu())


@contextlib.contextmanager
def own_mean(args: Any) -> Iterator[None]:
    """Inside, transformers takes a batch's loss as the mean over that batch, on every process.

    It would multiply the loss by the number of processes otherwise, for models that divide by the
    labels of all processes. Most that take `**kwargs` do not (classification, spans), and their
    `eval_loss` would be 2 times that of one process with two. Processes evaluate the batches that one
    would, so a mean for each batch is also what one process reports.

    Args:
      args: `TrainingArguments`; changed while inside.
    """
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


def evaluation_losses(
    objective: PromptObjective, model: nn.Module, inputs: Inputs, predictions: Tensor | None
) -> Tensor:
    """Cross-entropy losses, also where the objective itself is not smooth (accuracy, F1).

    Args:
      objective: of the run.
      model: evaluated.
      inputs: a batch with labels.
      predictions: class scores [B, classes], if known, are not computed a second time.

    Returns:
      Losses [B], float32.
    """
    if predictions is not None and predictions.is_floating_point():
        return classification_losses(predictions, inputs["labels"], "single_label_classification")
    smooth = getattr(objective, "objective", objective)
    return smooth(model, inputs)
