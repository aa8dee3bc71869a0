"""Which forward passes a run makes: one row each, or several, in sizes that fit and pass the trials.

Nothing here is released. What is tried are invented rows, and row 0 for the form that rows have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_dpzero.batches import placement as placing
from hf_dpzero.batches import shapes as forms
from hf_dpzero.batches.logical_batch import RowsJoined
from hf_dpzero.batches.placement import Placement
from hf_dpzero.batches.shapes import PassShapes, Row
from hf_dpzero.checks.data import of_first_row
from hf_dpzero.checks.invented_rows import InventedRows, at_nonzero_weights
from hf_dpzero.checks.model import parameters_left_alone
from hf_dpzero.checks.overrides import kept_by
from hf_dpzero.checks.precision import couples_values, low_precision
from hf_dpzero.checks.public_rows import NOT_TAKEN, evaluation_rows, is_ours
from hf_dpzero.checks.smoke_test import COUPLED, ROOM, CoupledLosses, SmokeTest
from hf_dpzero.estimators.arithmetic import uncompiled
from hf_dpzero.estimators.offload import arriving_bytes
from hf_dpzero.estimators.per_example_gradients import per_example_gradients, rounds_products
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.losses import (
    PerExampleLoss,
    base_model,
    batch_size,
    check_per_example,
    comparison_loss,
    evaluation_mode,
    is_compiled,
    single_pass,
)
from hf_dpzero.parallel import collectives
from hf_dpzero.parallel.fsdp import assert_same_losses
from hf_dpzero.parallel.mesh import place_on_mesh
from hf_dpzero.privacy.mechanisms import VectorMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.run import Run
from hf_dpzero.settings.schedules import smoothing_of_steps

logger = logging.get_logger(__name__)

_LOOKED_AT = 256
"""Evaluation rows whose widths tell which widths are frequent."""

ONE_BY_ONE = (
    "every example is evaluated by itself, which is slower. microbatch_size=1 says the same."
)

UNMASKED = (
    "waveforms without an attention_mask cannot be padded: every example is evaluated by itself. If the "
    "model takes masks, return_attention_mask=True of the feature extractor lets several run at once."
)


def shapes_of(run: Run) -> PassShapes | None:
    """Returns how a private run collates rows, its sizes of passes untried yet; None for others."""
    if not run.plan.mechanism.private:
        return None
    model, tokenizer, rows = run.model, run.tokenizer, run.rows
    config = getattr(base_model(model), "config", None)
    pad = getattr(tokenizer, "pad_token_id", None)
    decoder = getattr(config, "is_encoder_decoder", False)  # its labels may have the texts' shape
    shapes = PassShapes(
        rows.collate_each,
        Placement(run.expected_rows, (1,), {0: 1.0}, 0.0),
        context_length=forms.context_length(model),
        padding_side="right" if decoder else getattr(tokenizer, "padding_side", "right"),
        pad_token_id=getattr(config, "pad_token_id", None) if pad is None else pad,
        collate_blocks=rows.collate_blocks,
        decoder_length=forms.decoder_length(model),
        max_length=run.longest_row,
    )
    if run.objective is None or not single_pass(run.objective):
        return shapes  # each example runs by itself: nothing to fill up
    with of_first_row("collated"):
        first = shapes.collate_each([0])[0]
    shapes = dataclasses.replace(shapes, row_signature=forms.kind_of(first))
    if run.args.physical_batch_size == 1:
        return shapes  # nothing stands beside a row, so sizes need not be known
    if forms.masked_shape(first) is None and _form(run, first) is first:
        shapes = dataclasses.replace(shapes, row_sizes=forms.sizes_of(first))
        if run.args.per_device_train_batch_size == 1:
            logger.warning(f"per_device_train_batch_size=1, and rows without a mask: {ONE_BY_ONE}")
            return shapes  # in which they may have any size
    reason = couples_values(model, run.args.mixed_precision == "fp16")
    if forms.is_unmasked_sound(first) or reason:
        logger.warning(UNMASKED if forms.is_unmasked_sound(first) else f"{reason}: {ONE_BY_ONE}")
        return shapes
    sizes = placing.sizes_up_to(run.args.physical_batch_size)
    return dataclasses.replace(shapes, placement=dataclasses.replace(shapes.placement, sizes=sizes))


def _form(run: Run, first: Row) -> Row:
    """The row whose form invented rows have: row 0, of which the length along its mask is not read.

    Where no mask tells what its length is, an evaluation row's sizes are; without one, row 0's, and then
    all rows must have them (`PassShapes.row_sizes`).
    """
    public = evaluation_rows(run, 1) if forms.masked_shape(first) is None else []
    return public[0] if public and forms.kind_of(public[0]) == forms.kind_of(first) else first


def invented_rows(run: Run, shapes: PassShapes) -> InventedRows:
    """Returns what makes rows in the form of the run's."""
    return InventedRows(_form(run, shapes.collate_each([0])[0]), run.model, shapes)


@torch.no_grad()
def check_memory(run: Run) -> None:
    """Refuses losses, of rows evaluated one by one, that follow from rows before.

    Of passes of several rows the smoke test asks as much.

    Raises:
      ValueError: names what the loss keeps; it is no number, or moves, or is not finite.
    """
    shapes, model = run.shapes, run.model
    if shapes is None or not shapes.one_by_one or run.objective is None:
        return
    rows, words = shapes.collate_each([0, len(run.dataset) - 1]), of_first_row("evaluated")
    before = kept_by(run.objective)
    with parameters_left_alone(model), evaluation_mode(model), words, uncompiled(model):
        first, last, again = (_losses(run, run.evaluate, row) for row in (*rows, rows[0]))
    after = kept_by(run.objective)
    if changed := [name for name in after if after[name] != before.get(name)]:
        raise ValueError(
            f"the loss wrote to {changed[0]}: what it keeps of a private row gets into later losses or "
            "logs without noise. Compute it from its inputs alone, and set up all else before training."
        )
    if not torch.allclose(first, again, rtol=0, atol=0, equal_nan=True):
        raise CoupledLosses(COUPLED.format("before and after another example was seen"))
    if not torch.cat([first, last]).isfinite().any():
        raise ValueError(
            "the loss of single rows is NaN or infinite (a statistic over a batch of one, say): such "
            "rows count as zero in training, so compute each row's loss from that row."
        )


@torch.no_grad()
def check_first_row(run: Run) -> None:
    """Refuses a run that cannot evaluate row 0, or writes to parameters doing so.

    Raises:
      ValueError: says what to look at; the loss is discarded.
    """
    model, words = run.model, of_first_row("evaluated")
    with parameters_left_alone(model), evaluation_mode(model), words, uncompiled(model):
        _losses(run, run.evaluate, run.rows.collate_rows([0]))


def check_collator(run: Run) -> None:
    """Refuses a collator that joins rows.

    One that cannot pad passes: rows are collated one by one.

    Raises:
      RowsJoined: says what to change.
    """
    try:
        run.rows.collate_rows([0, len(run.dataset) - 1])
    except RowsJoined:
        raise
    except Exception as error:
        said = f"the collator cannot put two rows into one batch ({type(error).__name__})"
        if run.shapes is not None:  # collates row by row, and widens rows to their shape
            logger.info(said)
        else:
            logger.warning(f"{said}: {ONE_BY_ONE} DataCollatorWithPadding(tokenizer) pads texts.")


@torch.no_grad()
def choose_passes(run: Run) -> None:
    """Refuses losses that other rows move; sizes of passes whose places move them are left out.

    Tries passes of invented rows, and sets placement and mesh of the run; losses are discarded.

    Raises:
      CoupledLosses: an example's loss depends on others by more than rounding.
      ValueError: `direction_parallel_size` does not fit.
    """
    args, model, shapes = run.args, run.model, run.shapes
    sizes: tuple[int, ...] = (args.physical_batch_size,) if shapes is None else (1,)
    tokens = None
    if shapes is not None and not shapes.one_by_one:
        with at_nonzero_weights(model), parameters_left_alone(model), evaluation_mode(model):
            sizes, tokens = _tried_sizes(run, shapes)
    if shapes is None or sizes == (1,):
        placement = Placement(run.expected_rows, sizes, {0: 1.0}, 0.0)
    else:
        placement = _placement(run, shapes, sizes, tokens)
    placement, run.mesh = place_on_mesh(args, model, placement, run.sharded)
    if shapes is not None:
        run.shapes = dataclasses.replace(shapes, placement=placement)


@torch.no_grad()
def compile_passes(run: Run) -> None:
    """Runs a compiled model once in each shape that its passes are likely to have, on invented rows.

    Others compile when they first come: shapes that are unlikely, that follow from more than width and
    rows (answers of several lengths), or that no row can be invented in.
    """
    shapes, model = run.shapes, run.model
    if shapes is None or shapes.one_by_one or run.args.first_order or not is_compiled(model):
        return
    made, start = invented_rows(run, shapes), time.monotonic()
    wanted = shapes.placement.shapes_of(run.plan.steps)
    quiet = run.args.disable_tqdm or not collectives.is_main()
    with parameters_left_alone(model), evaluation_mode(model):
        for width, rows in tqdm(wanted, "shapes compiled", disable=quiet):
            row = made.row(0, width, max(1, width - 2))
            with contextlib.suppress(*NOT_TAKEN):  # sounds shorter than a convolution, say
                _losses(run, run.evaluate, forms.stacked([row] * rows))
    logger.warning(
        f"compiled passes of {len(wanted)} shapes in {time.monotonic() - start:.0f} s, before step 0."
    )


def _placement(
    run: Run, shapes: PassShapes, sizes: tuple[int, ...], tokens: int | None
) -> Placement:
    """The passes of a run with these sizes, from public numbers."""
    model, expected = run.model, run.expected_rows
    first = shapes.collate_each([0])[0]
    coarse = bool(low_precision(model, run.args))
    count = sum(p.numel() for p in model.parameters())
    cost = placing.pass_cost(run.args.device.type, count, coarse, arriving_bytes(model))
    if forms.masked_shape(first) is None:
        return Placement(expected, sizes, {0: 1.0}, cost, tokens)
    found = [forms.width_of(row) for row in evaluation_rows(run, _LOOKED_AT)]
    text = "input_ids" in first  # else sounds, whose widths are not tokens
    most, cut = (shapes.context_length, shapes.max_length) if text else (None, None)
    return placing.cheapest(
        found, text, most, cut, expected=expected, sizes=sizes, cost=cost, tokens=tokens
    )


def _losses(
    run: Run, evaluate: PerExampleLoss, batch: Mapping[str, Tensor], seed: int = 0
) -> Tensor:
    with isolated_randomness(seed):
        found = check_per_example(evaluate(run.model, batch), batch_size(batch)).cpu()
        return assert_same_losses(found) if run.sharded else found


def _tried_sizes(run: Run, shapes: PassShapes) -> tuple[tuple[int, ...], int | None]:
    """The sizes of passes that fit and pass the smoke test, and the tokens of one that fit."""
    args, model, free = run.args, run.model, placing.free_bytes(run.args.device)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sizes, tokens = shapes.placement.sizes, None
    if args.microbatch_size is None:
        dense = args.performance.per_example_gradients == "dense" or rounds_products()
        dense = args.first_order and (dense or args.mixed_precision != "no")
        # each process sees other free memory, and all must have the same passes
        cap = placing.rows_that_fit(free, trained, dense)
        sizes = placing.sizes_up_to(collectives.shared(cap))

    def losses(batch: Mapping[str, Tensor], seed: int = 0) -> Tensor:
        return _losses(run, run.evaluate.comparison_loss, batch, seed)

    coarse = bool(low_precision(model, args))
    smoke = SmokeTest(invented_rows(run, shapes), losses, model, coarse)
    try:
        reason = smoke.run(sizes)
    except NOT_TAKEN as error:
        if isinstance(error, CoupledLosses) or is_ours(error):
            raise
        logger.warning(
            f"the loss does not take rows invented in the form of row 0 ({type(error).__name__}), on "
            f"which passes of several rows are tried: {ONE_BY_ONE}"
        )
        return (1,), None
    if reason:
        logger.warning(f"{reason}, even in a batch of the same shape: {ONE_BY_ONE}")
        return (1,), None
    if args.microbatch_size is None:
        seen = smoke.bytes, smoke.tokens
        fitting = placing.tokens_that_fit(*seen, free, trained, args.first_order)
        # a power of two: what is free differs a little at each start, and passes should not
        tokens = collectives.shared(1 << (max(fitting, 1).bit_length() - 1))
    found = sizes
    if args.first_order and args.clipping != "averaged":
        # averaged clipping: a row's passes are its group's alone, whose clip bounds whatever it moves
        found = _gradient_sizes(run, smoke, sizes)
    found = _sizes_within(run, smoke, found, tokens)
    if lost := sorted(set(sizes) - set(found)):
        logger.info(f"passes of {lost} rows are not used: a loss moves by its place in them.")
    return found, tokens


def _sizes_within(
    run: Run, smoke: SmokeTest, sizes: tuple[int, ...], tokens: int | None
) -> tuple[int, ...]:
    """Of the sets of sizes between whose places losses hardly move, the one that costs least."""
    groups = run.plan.groups
    bound = math.inf if groups is None else ROOM * groups.loss_bound
    if not run.args.first_order:
        clip, scale = smallest_clip_and_scale(run)
        stepwise = run.objective is not None and comparison_loss(run.objective) is not run.objective
        bound = 0.0 if stepwise else min(bound, ROOM * clip / scale)
    if smoke.move(sizes) <= bound:
        return sizes
    counts = range(len(sizes) - 1, 0, -1)
    smaller = itertools.chain.from_iterable(itertools.combinations(sizes, n) for n in counts)
    holding = [chosen for chosen in smaller if smoke.move(chosen) <= bound]

    def cost(chosen: tuple[int, ...]) -> float:
        return _placement(run, smoke.rows.shapes, chosen, tokens).expected_tokens()

    return min(holding, key=cost, default=(1,))


def smallest_clip_and_scale(run: Run) -> tuple[float, float]:
    """The smallest clip of a zeroth-order run, and what the move of a loss is multiplied by.

    Each of two losses moves by D, so a central difference by at most D / lambda, a forward one by 2 D /
    lambda: all K of them together, for the loss at theta is in each.
    """
    args, plan = run.args, run.plan
    at = smoothing_of_steps(args, plan.steps)
    least = args.smoothing if at is None else min(map(at, range(plan.steps)))
    directions = args.num_directions
    norm = directions if plan.mechanism.distribution == "laplace" else math.sqrt(directions)
    if isinstance(plan.mechanism, VectorMechanism):  # it clips x u, and ||u|| is about sqrt(d)
        norm *= math.sqrt(sum(p.numel() for p in run.model.parameters() if p.requires_grad))
    if args.differences == "forward":  # a loss' move counts whole, that at theta in all K numbers
        norm *= 2
    return plan.smallest_clip, norm * _largest_weight(plan) / least


def _gradient_sizes(run: Run, smoke: SmokeTest, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of sizes in whose places an invented row's gradient hardly moves.

    A plain clip is a projection, so a relative move counts; automatic clipping is none.
    """
    args, plan = run.args, run.plan
    gradients = per_example_gradients(
        run.model,
        run.evaluate,
        args.performance.per_example_gradients,
        args.physical_batch_size,
        autocast=args.mixed_precision != "no",
    )

    def summed(row: Row, size: int) -> tuple[Tensor, int]:
        """What a row adds in up to so many places of a pass of copies, and how many they are."""
        # thousands of equal gradients would add up their rounding
        places = torch.linspace(0, size - 1, min(size, max(placing.CAPS))).long()

        def weigh(norms: Tensor) -> Tensor:
            return torch.zeros_like(norms).index_fill_(0, places.to(norms.device), 1.0)

        totals, _ = gradients.weighted_sum([forms.stacked([row] * size)], weigh)
        return torch.cat([total.view(-1) for total in totals]), len(places)

    moves, norm = dict.fromkeys(sizes, 0.0), math.inf
    with torch.enable_grad(), isolated_randomness(0):
        for size, wide in itertools.product(sizes, (False, True)):
            if size == 1:
                continue
            row = smoke.rows.wide(size) if wide else smoke.rows.narrow()
            total, count = summed(row, min(sizes))
            alone = total / count
            norm = min(norm, float(alone.norm()))
            total, count = summed(row, size)
            moves[size] = max(moves[size], float((total - count * alone).norm()))
    if args.clipping == "automatic":
        norm = 0.0
    bound = ROOM * max(plan.smallest_clip, norm) / _largest_weight(plan)
    return tuple(size for size in sizes if moves[size] <= bound) or (1,)


def _largest_weight(plan: PrivacyPlan) -> float:
    """What a group-robust run multiplies an example's contribution by, at most; else 1."""
    return 1.0 if plan.groups is None else 1.0 / min(plan.groups.shares)


def blank_microbatch(run: Run) -> Mapping[str, Tensor]:
    """Returns a microbatch of a shape that the run has, for passes whose losses are dropped."""
    shapes = run.shapes
    if shapes is None:
        return run.rows.collate_rows([0])
    row = shapes.collate_each([0])[0]
    if shapes.one_by_one:
        return dict(row)
    row = shapes.in_bucket(row)
    blank = forms.blank_like(row, shapes.padding_side)
    return dict(shapes.filled(blank, shapes.placement.rows_of(forms.width_of(row), 0)))
