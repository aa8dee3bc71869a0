"""Public rows that a run is tried on: a few of eval_dataset, or random tokens. Never private ones."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_dpzero.batches.shapes import PassShapes, width_of
from hf_dpzero.estimators import precision_diagnostics
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.losses import evaluation_mode, num_examples, trial
from hf_dpzero.perturbation.directions import Direction

logger = logging.get_logger(__name__)

NOT_TAKEN = (RuntimeError, ValueError, LookupError, TypeError)
"""What an objective raises for rows that are not of its form."""

_LOOKED_AT = 256
_ULPS = 4.0  # differences below so many units in the last place of the loss are mostly rounding


def public_microbatches(trainer: Any) -> list[Mapping[str, Tensor]]:
    """A few rows of eval_dataset, or random tokens, in passes of the run; those with most rows first."""
    if trainer.shapes is not None:
        shapes = public_shapes(trainer, precision_diagnostics.ROWS)
        parts = [] if shapes is None else shapes[0].microbatches(range(shapes[1]))
        return sorted(parts, key=num_examples, reverse=True)
    evaluation, size = evaluation_rows(trainer), trainer.args.physical_batch_size
    if evaluation is not None:
        rows, count = trainer.rows_of(evaluation), min(precision_diagnostics.ROWS, len(evaluation))
        return [
            rows.collate_rows(list(range(i, min(i + size, count)))) for i in range(0, count, size)
        ]
    batch = precision_diagnostics.random_tokens(trainer.probe(), trainer.model) or {}
    return [
        {name: value[i : i + size] for name, value in batch.items()}
        for i in range(0, precision_diagnostics.ROWS if batch else 0, size)
    ]


def public_shapes(trainer: Any, most: int = sys.maxsize) -> tuple[PassShapes, int] | None:
    """The run's fixed shapes over public rows: those of eval_dataset, or random tokens.

    Args:
      trainer: of a run that has fixed shapes.
      most: rows.

    Returns:
      The shapes and the number of rows; None where no public row can be made.
    """
    of_run = dataclasses.replace(trainer.shapes, collate_stacked=None, row_signature=None)
    evaluation = evaluation_rows(trainer)
    if evaluation is not None:
        each = trainer.rows_of(evaluation).collate_each
        return dataclasses.replace(of_run, collate_each=each), min(most, len(evaluation))
    batch = precision_diagnostics.random_tokens(trainer.probe(), trainer.model)
    if batch is None:
        return None
    rows = _cut(batch)[:most]
    return dataclasses.replace(of_run, collate_each=lambda chosen: [rows[i] for i in chosen]), len(
        rows
    )


def widths(trainer: Any) -> list[int]:
    """Columns of the masks of up to 256 evaluation rows, evenly spread; [] where there are none."""
    evaluation = evaluation_rows(trainer)
    if evaluation is None:
        return []
    count = min(len(evaluation), _LOOKED_AT)
    chosen = [i * len(evaluation) // count for i in range(count)]
    try:
        each = trainer.rows_of(evaluation).collate_each(chosen)
        return [width_of(row) for row in each]
    except NOT_TAKEN as error:
        logger.info(f"widths of public rows were not looked at: {error}")
        return []


def first_row(trainer: Any) -> Mapping[str, Tensor] | None:
    """The first evaluation row, collated alone; None where there is none that can be."""
    evaluation = evaluation_rows(trainer)
    if evaluation is None:
        return None
    try:
        row: Mapping[str, Tensor] = trainer.rows_of(evaluation).collate_each([0])[0]
    except NOT_TAKEN as error:
        logger.info(f"evaluation rows were not collated: {error}")
        return None
    return row


def evaluation_rows(trainer: Any) -> Any:
    """The evaluation rows, which are public; None where there are none."""
    evaluation = trainer.eval_dataset
    if isinstance(evaluation, Mapping):
        evaluation = next(iter(evaluation.values()), None)
    if not hasattr(evaluation, "__getitem__") or not getattr(evaluation, "__len__", int)():
        return None
    trainer.refuse_private(evaluation)
    return evaluation


def _cut(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The rows of a batch of tokens, every second one cut to the latter half of its tokens."""
    shape = batch["input_ids"].shape
    half = shape[1] - shape[1] // 2 + 1
    rows = []
    for i in range(shape[0]):
        start = shape[1] - half if i % 2 and "start_positions" not in batch else 0
        along = {
            n: v[i : i + 1, start:] if v.shape == shape else v[i : i + 1] for n, v in batch.items()
        }
        rows.append(along)
    return rows


def public_microbatch(trainer: Any) -> Mapping[str, Tensor] | None:
    """The first of `public_microbatches`; None where none can be made, or the loss does not take it."""
    try:
        first = next(iter(public_microbatches(trainer)), None)
        if first is not None:
            with torch.no_grad(), evaluation_mode(trainer.model):
                trainer.evaluated_objective()(trainer.model, first)
        return first
    except ParameterChanged:
        raise
    except NOT_TAKEN as error:
        logger.info(f"the strategy is not tried on public rows: {error}")
        return None


@torch.no_grad()
def check_finite(trainer: Any) -> None:
    """Refuses a model whose loss is NaN or infinite on every public row.

    Rows that the loss does not take are not judged.

    Raises:
      ValueError: says what to look at.
    """
    try:
        with isolated_randomness(), evaluation_mode(trainer.model):
            losses = [
                trainer.evaluated_objective()(trainer.model, part)[: num_examples(part)]
                for part in public_microbatches(trainer)[:2]
            ]
    except ParameterChanged:
        raise
    except NOT_TAKEN as error:
        logger.info(f"losses of public rows were not looked at: {error}")
        return
    if losses and not torch.cat(losses).isfinite().any():
        raise ValueError(
            "the loss is NaN or infinite on every public row (the first of eval_dataset, or random "
            "tokens), and such rows count as zero in training: look for NaN in the weights, use float32 "
            "or bf16 in place of fp16, or check compute_per_example_loss."
        )


def check_differences(trainer: Any, differences: FiniteDifferences) -> None:
    """Refuses a run in which no public row's loss differs between theta + lambda u and theta - lambda u.

    A loss that counts right answers is judged by its trial, which every forward pass moves. Rows that
    the loss does not take are not judged.

    Args:
      trainer: has the public rows.
      differences: of the run, with theta settled, before and after.

    Raises:
      ValueError: names smoothing and trainable.
    """
    try:
        with isolated_randomness():
            pair = _losses_at_both_signs(differences, public_microbatches(trainer)[:1])
    except ParameterChanged:
        raise
    except NOT_TAKEN as error:
        logger.info(f"differences of public rows were not looked at: {error}")
        return
    if pair is not None:
        judge_differences(*pair, differences.smoothing)


def _losses_at_both_signs(
    differences: FiniteDifferences, public: Sequence[Mapping[str, Tensor]]
) -> tuple[Tensor, Tensor] | None:
    if not public:
        return None
    objective = differences.objective
    differences.objective = trial(objective)
    try:
        return differences.losses(public, [Direction(0, 0, 0)])
    finally:
        differences.objective = objective
        differences.space.settle_()


def judge_differences(plus: Tensor, minus: Tensor, smoothing: float) -> None:
    """Refuses losses that do not change, and warns of changes that are mostly rounding.

    Args:
      plus, minus: float32 losses at theta + lambda u and theta - lambda u, of one shape.
      smoothing: lambda.

    Raises:
      ValueError: no finite loss is left, or none changes.
    """
    finite = plus.isfinite() & minus.isfinite()
    if not finite.any():
        raise ValueError(
            f"smoothing={smoothing} makes the loss NaN or infinite on every public row: lower it."
        )
    plus, minus = plus[finite].double(), minus[finite].double()
    moved, size = (plus - minus).abs(), torch.maximum(plus.abs(), minus.abs())
    if not size.any():
        logger.warning(
            "the loss of every public row is 0: without labels (all -100, or cut off by max_length) "
            "nothing can be learned."
        )
    elif not moved.any():
        raise ValueError(
            f"smoothing={smoothing} does not change the loss of any public row (the first of "
            "eval_dataset, or random tokens), so a run would release noise alone. Either the change is "
            "below the rounding of the loss: raise smoothing, e.g. to 1e-3. Or the loss does not depend "
            "on what is trained: look at trainable (and requires_grad) and compute_per_example_loss."
        )
    elif float((moved / size.clamp(min=1e-30)).quantile(0.5)) < _ULPS * 2.0**-23:
        logger.warning(
            f"smoothing={smoothing} changes the loss of public rows by {float(moved.quantile(0.5)):.2g} "
            "(median), which is mostly float32 rounding: raise smoothing, e.g. to 1e-3."
        )
