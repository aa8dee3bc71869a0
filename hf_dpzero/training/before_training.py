"""Everything that is checked before step 0, in order. Nothing of it is released."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import RowsJoined
from hf_dpzero.batches.pass_memory import CAPS, free_bytes, rows_that_fit, tokens_that_fit
from hf_dpzero.batches.placement import (
    STEPS,
    WIDEST,
    Placement,
    bucket,
    buckets,
    pass_cost,
    public_shares,
    sizes_up_to,
)
from hf_dpzero.batches.shapes import (
    FixedShapes,
    Row,
    context_length,
    decoder_length,
    is_unmasked_sound,
    kind_of,
    masked_shape,
    sizes_of,
    stacked,
)
from hf_dpzero.checks import data as data_checks
from hf_dpzero.checks import model as validation
from hf_dpzero.checks.row_lengths import check_lengths
from hf_dpzero.estimators.arrivals import arriving_bytes
from hf_dpzero.estimators.finite_differences import batch_size, evaluation_mode
from hf_dpzero.estimators.per_example_gradients import per_example_gradients, rounds_products
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.heads import select_objective, smoothed
from hf_dpzero.objectives.losses import base_model, check_per_example, single_pass, trial
from hf_dpzero.objectives.prompted import PromptObjective
from hf_dpzero.parallel import distributed
from hf_dpzero.parallel.offloading import check_offload
from hf_dpzero.parallel.sharded_runs import agreed
from hf_dpzero.parallel.split import split_placement
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.privacy.mechanisms import VectorMechanism
from hf_dpzero.privacy.words import group_warning
from hf_dpzero.settings.defaults import rate_hint
from hf_dpzero.settings.plan_of import extension_warning
from hf_dpzero.settings.schedules import judge_schedule, smoothing_of_steps
from hf_dpzero.training import public_rows
from hf_dpzero.training.invented_rows import InventedRows, nonzero_weights
from hf_dpzero.training.precision import (
    check_mixed_precision,
    check_precision,
    compile_,
    couples_values,
    keep_layout_,
    low_precision,
    uncompiled,
)
from hf_dpzero.training.smoke_test import ROOM, CoupledLosses, SmokeTest

logger = logging.get_logger(__name__)

ONE_BY_ONE = (
    "every example is evaluated by itself, which is slower. microbatch_size=1 says the same."
)

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
    data_checks.check_same_rows(trainer.train_dataset)
    check_mixed_precision(args, args.device.type)
    if trainer.plan.mechanism.private:
        data_checks.check_draws(trainer.data_collator, trainer.train_dataset)
        if args.first_order:
            check_precision(model, args)
        validation.check_widths(model)
        validation.check_kernels_are_fixed(args.device.type)
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
    trainer.shapes = _run_shapes(trainer)
    compile_(model, args, trainer.shapes is not None, trainer.compiling)
    placement = _try_objective(trainer)
    placement, trainer.split = split_placement(trainer, placement)
    if trainer.shapes is not None:
        trainer.shapes = dataclasses.replace(trainer.shapes, placement=placement)
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


def _run_shapes(trainer: Any) -> FixedShapes | None:
    """How a private run collates rows, with the sizes of passes still to be tried; None for others."""
    if not trainer.plan.mechanism.private:
        return None
    alone = Placement(trainer.plan.sampler.expected_batch_size, (1,), {0: 1.0}, 0.0)
    model, tokenizer = trainer.model, trainer.processing_class
    config = getattr(base_model(model), "config", None)
    pad = getattr(tokenizer, "pad_token_id", None)
    decoder = getattr(config, "is_encoder_decoder", False)  # its labels may have the texts' shape
    private = trainer.training_rows()
    shapes = FixedShapes(
        private.collate_each,
        alone,
        most=context_length(model),
        side="right" if decoder else getattr(tokenizer, "padding_side", "right"),
        pad=getattr(config, "pad_token_id", None) if pad is None else pad,
        collate_stacked=private.collate_rows if private.are_stacked() else None,
        decoder_most=decoder_length(model),
        cut=trainer.longest_row or (trainer.args.max_length if trainer._texts else None),
    )
    if not single_pass(trainer.per_example_loss):
        return shapes  # each example runs by itself: nothing to fill up
    with _first_row("collated"):
        first = shapes.collate_each([0])[0]
    shapes = dataclasses.replace(shapes, kind=kind_of(first))
    if trainer.args.physical_batch_size > 1 and invented_form(trainer, shapes, first) is first:
        free = masked_shape(first) is None and shapes.collate_stacked is None
        shapes = dataclasses.replace(shapes, sizes=sizes_of(first) if free else None)
    reason = couples_values(model)
    if trainer.args.physical_batch_size == 1:
        return shapes
    if is_unmasked_sound(first):
        logger.warning(UNMASKED)
        return shapes
    if reason:
        logger.warning(f"{reason}: {ONE_BY_ONE}")
        return shapes
    sizes = sizes_up_to(trainer.args.physical_batch_size)
    return dataclasses.replace(shapes, placement=dataclasses.replace(alone, sizes=sizes))


def invented_form(trainer: Any, shapes: FixedShapes, first: Row | None = None) -> Row:
    """The row whose form invented rows have: row 0, of which the length along its mask is not read.

    Where no mask tells what its length is, an evaluation row's sizes are; without one, row 0's, and then
    all rows must have them (`FixedShapes.sizes`).
    """
    first = shapes.collate_each([0])[0] if first is None else first
    if masked_shape(first) is not None or shapes.collate_stacked is not None:
        return first
    public = public_rows.first_row(trainer)
    return public if public is not None and kind_of(public) == kind_of(first) else first


def _placement(trainer: Any, sizes: tuple[int, ...], tokens: int | None) -> Placement:
    """The passes of a run with these sizes, from public numbers."""
    model, shapes = trainer.model, trainer.shapes
    expected = trainer.plan.sampler.expected_batch_size
    if shapes is None or shapes.one_by_one:
        return Placement(expected, sizes, {0: 1.0}, 0.0)
    first = shapes.collate_each([0])[0]
    coarse = bool(low_precision(model, trainer.args))
    count = sum(p.numel() for p in model.parameters())
    cost = pass_cost(trainer.args.device.type, count, coarse, arriving_bytes(model))
    if masked_shape(first) is None or shapes.collate_stacked is not None:
        return Placement(expected, sizes, {0: 1.0}, cost, tokens)
    found = public_rows.widths(trainer)
    text = "input_ids" in first  # else sounds, whose widths are not tokens
    most, cut = (shapes.most, shapes.cut) if text else (None, None)
    widest = min([n for n in (most, cut) if n is not None] + [WIDEST])

    def in_steps(step: int) -> Placement:
        of_public = [bucket(width, most, cut, step) for width in found]
        widths = buckets(widest, most, cut, step) if text or not found else []
        shares = public_shares(of_public, widths)
        return Placement(expected, sizes, shares, cost, tokens, step=step)

    return min(map(in_steps, STEPS), key=Placement.expected_tokens)


@torch.no_grad()
def _try_objective(trainer: Any) -> Placement:
    """Tries the objective on row 0, then the run's passes on invented rows; the losses are discarded.

    Returns:
      The placement of one process, with the sizes that passed.
    """
    args, model, shapes = trainer.args, trainer.model, trainer.shapes
    rows, objective = trainer.training_rows(), trainer.evaluated_objective()

    def losses_of(evaluate: Any, batch: Mapping[str, Tensor], seed: int = 0) -> Tensor:
        with isolated_randomness(seed):
            found = check_per_example(evaluate(model, batch), batch_size(batch)).cpu()
            return agreed(found) if trainer.shards else found

    with validation.parameters_left_alone(model), evaluation_mode(model):
        validation.check_evaluation_mode(model)
        with _first_row("evaluated"), uncompiled(model):
            losses_of(objective, first := rows.collate_rows([0]))
        try:  # its count alone is looked at
            rows.collate_rows([0, min(1, len(trainer.train_dataset) - 1)])
        except RowsJoined:
            raise
        except Exception as error:  # a collator that cannot pad: rows are collated one by one
            logger.info(f"two rows were not collated together ({type(error).__name__})")
        if "start_positions" in first:
            count = len(trainer.train_dataset)
            some = sorted({i * count // 64 for i in range(64)})
            data_checks.check_positions(rows.collate_rows, some)
        if shapes is None or shapes.one_by_one:
            alone = 1 if shapes is not None else args.physical_batch_size
            return _placement(trainer, (alone,), None)
    restore = nonzero_weights(model)
    try:
        with validation.parameters_left_alone(model), evaluation_mode(model):
            sizes, tokens = _tried_sizes(
                trainer, lambda batch, seed=0: losses_of(objective.trial, batch, seed)
            )
    finally:
        restore()
    if sizes == (1,):
        return Placement(trainer.plan.sampler.expected_batch_size, sizes, {0: 1.0}, 0.0)
    return _placement(trainer, sizes, tokens)


def _tried_sizes(trainer: Any, losses: Any) -> tuple[tuple[int, ...], int | None]:
    """The sizes of passes that fit and pass the smoke test, and the tokens of one that fit."""
    args, model, shapes = trainer.args, trainer.model, trainer.shapes
    free = free_bytes(args.device)
    invented = InventedRows(invented_form(trainer, shapes), model, shapes.side)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    dense = (
        args.per_example_gradients == "dense" or args.mixed_precision != "no" or rounds_products()
    )
    sizes, tokens = shapes.placement.sizes, None
    try:
        if args.microbatch_size is None:
            cap = rows_that_fit(free, trained, dense and args.first_order)
            sizes = sizes_up_to(distributed.shared(cap))
        coarse = bool(low_precision(model, args))
        smoke = SmokeTest(shapes, invented, losses, model, coarse)
        reason = smoke.run(sizes)
        if args.microbatch_size is None:
            fitting = tokens_that_fit(smoke.bytes, smoke.tokens, free, trained, args.first_order)
            tokens = distributed.shared(1 << (max(fitting, 1).bit_length() - 1))
    except public_rows.NOT_TAKEN as error:
        if isinstance(error, CoupledLosses):
            raise
        logger.warning(
            f"the loss does not take rows invented in the form of row 0 ({type(error).__name__}), on "
            f"which passes of several rows are tried: {ONE_BY_ONE}"
        )
        return (1,), None
    if reason:
        logger.warning(f"{reason}, even in a batch of the same shape: {ONE_BY_ONE}")
        return (1,), None
    groups = trainer.plan.groups
    bound = math.inf if groups is None else ROOM * groups.loss_bound
    if not args.first_order:
        clip, scale = smallest_clip_and_scale(trainer)
        stepwise = trial(trainer.per_example_loss) is not trainer.per_example_loss
        bound = 0.0 if stepwise else min(bound, ROOM * clip / scale)
    sets = smoke.largest_sets(sizes, lambda move: move <= bound)
    if args.first_order and args.clipping != "averaged":
        # averaged clipping: a row's passes are its group's alone, whose clip bounds whatever it moves
        sets = [_gradient_sizes(trainer, smoke, chosen) for chosen in sets]
    if len(sets) > 1:  # the same on all processes, whose invented rows and weights are
        sets.sort(key=lambda chosen: _placement(trainer, chosen, tokens).expected_tokens())
    if lost := sorted(set(sizes) - set(sets[0])):
        logger.info(f"passes of {lost} rows are not used: a loss moves by its place in them.")
    return sets[0], tokens


def smallest_clip_and_scale(trainer: Any) -> tuple[float, float]:
    """The smallest clip of a zeroth-order run, and what the move of a loss is multiplied by."""
    args, plan = trainer.resolved_args, trainer.plan
    at = smoothing_of_steps(args, plan.steps)
    least = args.smoothing if at is None else min(map(at, range(plan.steps)))
    directions = args.num_directions
    norm = directions if plan.mechanism.distribution == "laplace" else math.sqrt(directions)
    if isinstance(plan.mechanism, VectorMechanism):  # it clips x u, and ||u|| is about sqrt(d)
        norm *= math.sqrt(sum(p.numel() for p in trainer.model.parameters() if p.requires_grad))
    return plan.smallest_clip, norm * _largest_weight(plan) / least


def _gradient_sizes(trainer: Any, smoke: SmokeTest, sizes: Any) -> tuple[int, ...]:
    """Those of sizes in whose places an invented row's gradient hardly moves.

    A plain clip is a projection, so a relative move counts; automatic clipping is none.
    """
    args, plan, shapes = trainer.args, trainer.plan, trainer.shapes
    gradients = per_example_gradients(
        trainer.model,
        trainer.evaluated_objective(),
        args.per_example_gradients,
        args.physical_batch_size,
        autocast=args.mixed_precision != "no",
    )
    invented, least = smoke.rows, bucket(1, shapes.most, shapes.cut)

    def summed(rows: Sequence[Row]) -> Tensor:
        totals, _ = gradients.weighted_sum([stacked(rows)], torch.ones_like)
        return torch.cat([total.view(-1) for total in totals])

    def alone(row: Row) -> Tensor:
        return summed([row] * min(sizes)) / min(sizes)

    def moved(kinds: Sequence[Row], each: Sequence[Tensor], size: int) -> float:
        """What places move in the sum over a pass of these rows, of which each gradient is known."""
        rows = [kinds[i % len(kinds)] for i in range(size)]
        apart = summed(rows)
        for i, gradient in enumerate(each):
            apart -= len(rows[i :: len(kinds)]) * gradient
        return float(apart.norm())

    moves = dict.fromkeys(sizes, 0.0)
    with torch.enable_grad(), isolated_randomness(0):
        # a pass of thousands of equal rows would add up their rounding
        kinds = max(CAPS) if max(sizes) > max(CAPS) else 1
        narrow = [invented.narrow(i, least) for i in range(kinds)]
        known = [alone(row) for row in narrow]
        norm = min(float(gradient.norm()) for gradient in known)
        for size in sizes:
            if size == 1:
                continue
            used = kinds if size > max(CAPS) else 1
            moves[size] = moved(narrow[:used], known[:used], size)
            if used == 1:
                wide = smoke.row(size, size, wide=True)[0]
                gradient = alone(wide)
                norm = min(norm, float(gradient.norm()))
                moves[size] = max(moves[size], moved([wide], [gradient], size))
    if args.clipping == "automatic":
        norm = 0.0
    bound = ROOM * max(plan.smallest_clip, norm) / _largest_weight(plan)
    return tuple(size for size in sizes if moves[size] <= bound) or (1,)


def _largest_weight(plan: Any) -> float:
    """What a group-robust run multiplies an example's contribution by, at most; else 1."""
    return 1.0 if plan.groups is None else 1.0 / min(plan.groups.shares)
