"""Warns when low precision drowns the finite differences, as measured on public data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.utils import logging

from hf_dpzero.estimators import precision_diagnostics
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.parameter_guard import ParameterChanged
from hf_dpzero.training.random_state import isolated_randomness

logger = logging.get_logger(__name__)


def warn_of_rounding(trainer: Any, differences: FiniteDifferences) -> None:
    """Logs signal and rounding of a `DPZeroTrainer` in low precision; nothing in float32."""
    dtype = precision_diagnostics.low_precision(trainer.model, trainer.args)
    if dtype is None:
        return
    try:
        with isolated_randomness():
            public = _public_microbatches(trainer)
            found = precision_diagnostics.measure(differences, public, dtype) if public else None
    except ParameterChanged:
        raise
    except (RuntimeError, ValueError, LookupError, TypeError) as error:
        logger.info(f"signal and rounding were not compared: {error}")
        return
    if found is None:
        logger.info("signal and rounding were not compared: no public batch could be made.")
    elif trainer.is_world_process_zero():
        (logger.info if found.sufficient else logger.warning)(str(found))


def _public_microbatches(trainer: Any) -> list[Mapping[str, Tensor]]:
    """A few rows of eval_dataset, or random tokens, split as the run splits its batches."""
    evaluation = trainer.eval_dataset
    if isinstance(evaluation, dict):
        evaluation = next(iter(evaluation.values()), None)
    size = trainer.args.physical_batch_size
    if hasattr(evaluation, "__len__") and len(evaluation):
        return _rows_of(trainer, evaluation, size)
    batch = precision_diagnostics.random_tokens(trainer.probe(), trainer.model)
    if batch is None:
        return []
    return [
        {name: value[i : i + size] for name, value in batch.items()}
        for i in range(0, precision_diagnostics.ROWS, size)
    ]


def _rows_of(trainer: Any, evaluation: Any, size: int) -> list[Mapping[str, Tensor]]:
    trainer.refuse_private(evaluation)
    rows, count = trainer.rows_of(evaluation), min(precision_diagnostics.ROWS, len(evaluation))
    starts = range(0, count, size)
    return [rows.collate_rows(list(range(i, min(i + size, count)))) for i in starts]
