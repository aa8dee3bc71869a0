"""Everything that is checked before step 0, in order. Nothing of it is released."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_dpzero.estimators.arrivals import arriving_bytes
from hf_dpzero.estimators.finite_differences import batch_size, evaluation_mode
from hf_dpzero.estimators.row_traces import Traced
from hf_dpzero.objectives.heads import select_objective, smoothed
from hf_dpzero.objectives.losses import PerExampleLoss, base_model, check_per_example, single_pass
from hf_dpzero.objectives.prompted import PromptObjective
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.privacy.group_losses import group_warning
from hf_dpzero.training import data_checks, distributed, public_rows, validation
from hf_dpzero.training.defaults import rate_hint
from hf_dpzero.training.fixed_shapes import (
    FixedShapes,
    context_length,
    decoder_length,
    is_unmasked_sound,
    kind_of,
    masked_shape,
)
from hf_dpzero.training.independence_check import (
    check_independence,
    check_widths,
    long_and_short,
    rope_types,
)
from hf_dpzero.training.offloading import check_offload
from hf_dpzero.training.pass_sizes import one_size, pass_cost, pass_sizes
from hf_dpzero.training.plan_settings import extension_warning
from hf_dpzero.training.precision import (
    check_mixed_precision,
    check_precision,
    compile_,
    couples_values,
    keep_layout_,
    low_precision,
    uncompiled,
)
from hf_dpzero.training.random_state import drawing_from, isolated_randomness
from hf_dpzero.training.row_lengths import check_lengths
from hf_dpzero.training.schedule_settings import judge_schedule
from hf_dpzero.training.shape_choice import ONE_BY_ONE, ShapeChoice
from hf_dpzero.training.sharded_runs import agreed
from hf_dpzero.training.split import split_shapes

logger = logging.get_logger(__name__)

UNMASKED = (
    "waveforms without an attention_mask cannot be padded: every example is evaluated by itself. If the "
    "model takes masks, return_attention_mask=True of the feature extractor lets several run at once."
)


def check_before_training(trainer: Any) -> None:
    """Refuses a run of a `DPZeroTrainer` that cannot be accounted or would break the guarantee.

    Also chooses what is trained, and the objective where none was given, and compiles the model if
    that is asked for.

    Raises:
      ValueError: says what to change.
    """
    model, args = trainer.model, trainer.args
    distributed.check_world(args)
    trainer.refuse_private(trainer.eval_dataset)  # given after __init__, perhaps
    keep_layout_(model)
    data_checks.num_examples(trainer.train_dataset)
    select_trainable(model, args.trainable)
    validation.check_adapters(model)
    validation.check_model(model)
    check_offload(trainer)
    if trainer.per_example_loss is None:
        with _first_row("collated"):
            first = trainer.training_rows().collate_rows([0])  # a collator may add labels
        if not set(first) & {*data_checks.LABEL_COLUMNS, *trainer.label_names}:
            data_checks.check_labels(trainer.train_dataset, trainer.label_names)
        objective = select_objective(model)
        trainer.per_example_loss = smoothed(objective, args.label_smoothing_factor)
    trainer.shard_()
    distributed.check_same_rows(trainer.train_dataset)
    check_mixed_precision(args, args.device.type)
    if trainer.plan.mechanism.private:
        if args.first_order:
            check_precision(model, args)
        check_widths(model, args.physical_batch_size, fixed=not args.first_order)
        known = trainer.rows_are_examples or isinstance(trainer.per_example_loss, PromptObjective)
        if args.rows_are is None and not known:
            rows = trainer.training_rows()
            data_checks.check_unit(model, rows.collate_rows, len(trainer.train_dataset))
    if trainer.is_world_process_zero():
        judge_schedule(trainer.plan, trainer.delta)
        target = args.target_epsilon
        for warning in (
            group_warning(trainer.plan),
            extension_warning(trainer.plan, target, trainer.delta),
        ):
            if warning:
                logger.warning(warning)
    if hint := rate_hint(args, trainer.plan):
        logger.warning(hint)
    check_lengths(trainer)
    trainer.shapes, trainer.split = split_shapes(trainer, _run_shapes(trainer), _pass_cost(trainer))
    compile_(model, args, trainer.shapes is not None, trainer.compiling)
    _try_objective(trainer)
    public_rows.check_finite(trainer)


@contextlib.contextmanager
def _first_row(done: str) -> Iterator[None]:
    """Says of an error that nothing else has words for that row 0 cannot be trained on, and why.

    The error's own words may quote a private row; they are in the traceback.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"row 0 of train_dataset cannot be {done} ({type(error).__name__}): look whether rows are "
            "{column: value}, token ids lie within the model's vocabulary, texts within its length and "
            "labels are what its head takes; and at data_collator and compute_per_example_loss, if "
            "these are yours."
        ) from error


def _run_shapes(trainer: Any) -> Callable[[float], FixedShapes | None]:
    """The fixed shapes that a private zeroth-order run evaluates, for B rows; None for others."""
    args, plan = trainer.args, trainer.plan
    if args.first_order or not plan.mechanism.private:
        return lambda _: None
    shapes = _shapes(trainer, 1)
    if not single_pass(trainer.per_example_loss):
        return lambda _: shapes  # each example runs by itself: nothing to fill up
    first = shapes.collate_each([0])[0]
    shapes = dataclasses.replace(shapes, kind=kind_of(first))
    if is_unmasked_sound(first):
        logger.warning(UNMASKED)
        return lambda _: shapes
    if args.physical_batch_size > 1 and (reason := couples_values(trainer.model)):
        logger.warning(f"{reason}: {ONE_BY_ONE}")
        return lambda _: shapes
    return lambda rows: dataclasses.replace(shapes, **_sizes(trainer, shapes, first, rows))


def _sizes(
    trainer: Any, shapes: FixedShapes, row: Mapping[str, Tensor], expected: float
) -> dict[str, Any]:
    """Rows of a microbatch, by width where rows are texts."""
    most = trainer.args.physical_batch_size
    if masked_shape(row) is None:
        return {"slots": one_size(expected, most)}
    if "input_ids" not in row:  # sounds, whose widths are not tokens
        return {"slots": max(1, min(most, round(math.sqrt(expected))))}
    known = [tokens for tokens in (shapes.cut, shapes.most) if tokens is not None]
    sizes = pass_sizes(expected, most, min(known, default=None), _pass_cost(trainer))
    return {"slots": max(sizes.rows.values()), "sizes": sizes}


def _pass_cost(trainer: Any) -> float:
    count = sum(p.numel() for p in trainer.model.parameters())
    coarse = bool(low_precision(trainer.model, trainer.args))
    return pass_cost(trainer.args.device.type, count, coarse, arriving_bytes(trainer.model))


def _shapes(trainer: Any, rows: int) -> FixedShapes:
    """Fixed shapes of so many rows, padded as the run's tokenizer and model have it."""
    model, tokenizer = trainer.model, trainer.processing_class
    config = getattr(base_model(model), "config", None)
    pad = getattr(tokenizer, "pad_token_id", None)
    decoder = getattr(config, "is_encoder_decoder", False)  # its labels may have the texts' shape
    private = trainer.training_rows()
    return FixedShapes(
        private.collate_each,
        rows,
        most=context_length(model),
        side="right" if decoder else getattr(tokenizer, "padding_side", "right"),
        pad=getattr(config, "pad_token_id", None) if pad is None else pad,
        collate_stacked=private.collate_rows if private.are_stacked() else None,
        decoder_most=decoder_length(model),
        cut=trainer.longest_row or (trainer.args.max_length if trainer._texts else None),
    )


@torch.no_grad()
def _try_objective(trainer: Any) -> None:
    """Checks that the objective returns one loss per example, independent of the other examples.

    The losses are discarded.
    """

    rows, objective = trainer.training_rows(), trainer.evaluated_objective()
    private, size = trainer.plan.mechanism.private, trainer.args.physical_batch_size
    coarse = bool(low_precision(trainer.model, trainer.args))
    by_width = "longrope" in rope_types(getattr(base_model(trainer.model), "config", None))
    count, entropy = len(trainer.train_dataset), distributed.shared(secrets.randbits(100))

    def losses_of(objective: PerExampleLoss, batch: Mapping[str, Tensor], seed: int = 0) -> Tensor:
        with isolated_randomness(entropy + seed):
            found = check_per_example(objective(trainer.model, batch), batch_size(batch)).cpu()
            return agreed(found) if trainer.shards else found

    def tried(batch: Mapping[str, Tensor], seed: int = 0) -> Tensor:
        return losses_of(objective.trial, batch, seed)

    def traced(batch: Mapping[str, Tensor], seed: int = 0) -> Tensor:
        with uncompiled(trainer.model):
            return losses_of(Traced(objective), batch, seed)

    watched = validation.parameters_left_alone(trainer.model)
    with watched, evaluation_mode(trainer.model):
        validation.check_evaluation_mode(trainer.model)
        with _first_row("evaluated"), uncompiled(trainer.model):
            losses_of(objective, first := rows.collate_rows([0]))
        if "start_positions" in first:
            tokens = long_and_short(rows.collate_rows, count)
            data_checks.check_positions(rows.collate_rows, tokens)
        alone = private and (size == 1 or (trainer.shapes and trainer.shapes.slots == 1))
        with uncompiled(trainer.model):  # none of these shapes is one of the run's
            check_independence(
                rows.collate_rows,
                count,
                tried,
                widths=private and size > 1 and not (coarse and alone),
                pad=_shapes(trainer, 1).pad,
                one_by_one=alone,
                coarse=coarse,
                mixed=not (by_width and trainer.shapes),
            )
        if not private or size == 1:
            return
        choice = ShapeChoice(trainer, count, tried, traced, coarse)
        if trainer.args.first_order:
            choice.holds(dataclasses.replace(_shapes(trainer, size), blanks=False), count, tried)
        elif trainer.shapes.slots > 1:
            with drawing_from(entropy):  # what is found of public rows decides, on all processes
                choice.make(_pass_cost(trainer))
