"""Public rows that a run is tried on: a few of eval_dataset, or random ones. Never private ones."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.data import default_collate
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import Rows
from hf_dpzero.batches.shapes import Row, masked_shape
from hf_dpzero.checks.invented_rows import InventedRows
from hf_dpzero.estimators import precision_diagnostics
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.losses import comparison_loss, evaluation_mode, num_examples
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.run import Run

logger = logging.get_logger(__name__)

NOT_TAKEN = (RuntimeError, ValueError, LookupError, TypeError)
"""What an objective raises for rows that are not of its form."""

_ULPS = 4.0  # differences below so many units in the last place of the loss are mostly rounding


def is_ours(error: BaseException) -> bool:
    """Whether an error is one of this package: nothing that a user's loss or rows are the cause of."""
    # the innermost frame tells whose call failed
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package = frame.f_globals.get("__name__", "").split(".")[0]
    changed = isinstance(error, ParameterChanged)
    return changed or (isinstance(error, TypeError) and package == "hf_dpzero")


@contextlib.contextmanager
def leaving_out(what: str) -> Iterator[None]:
    """Leaves out what is inside, with a word to the log, where a loss or collator takes no such rows."""
    try:
        yield
    except NOT_TAKEN as error:
        if is_ours(error):
            raise
        logger.info(f"{what} ({type(error).__name__})")  # its words may quote a row


def public_microbatches(
    run: Run, most: int = precision_diagnostics.ROWS, published: bool = False
) -> list[Mapping[str, Tensor]]:
    """A few rows of eval_dataset, or random ones, in passes of the run; those with most rows first.

    Which ones follows from eval_dataset alone, also where one is a private row too: what is made of
    them may be `published`, and leaving one out would tell that it is trained on.
    """
    if run.evaluation is None:
        rows = Rows(_random(run, most, published), default_collate)
    else:
        rows = run.rows_of(run.evaluation)
    chosen = list(range(min(most, len(rows.dataset))))
    if run.shapes is None:
        size = run.args.physical_batch_size
        return [rows.collate_rows(chosen[i : i + size]) for i in chosen[::size]]
    shapes = dataclasses.replace(
        run.shapes,
        collate_blocks=rows.collate_blocks,
        row_signature=None,
        collate_each=rows.collate_each,
    )
    return sorted(shapes.microbatches(chosen), key=num_examples, reverse=True)


def _random(run: Run, most: int, published: bool) -> list[Row]:
    """Random tokens; else, where nothing that is `published` follows from their size, numbers."""
    tokens = precision_diagnostics.random_tokens(run.probe(), run.model)
    if tokens is not None:
        return [dict(zip(tokens, row, strict=True)) for row in zip(*tokens.values(), strict=True)]
    if published or run.shapes is None:
        return []
    form = run.shapes.collate_each([0])[0]
    if masked_shape(form) is None and run.shapes.row_sizes is None:
        return []  # row 0 alone has its sizes
    made = InventedRows(form, run.model, run.shapes)
    return [{name: v[0] for name, v in made.narrow(i).items()} for i in range(most)]


def evaluation_rows(run: Run, most: int) -> list[Row]:
    """Evaluation rows, evenly spread, each collated alone; [] where there are none that can be."""
    with leaving_out("evaluation rows were not looked at"):
        if run.evaluation is not None:
            size = len(run.evaluation)
            count = min(size, most)
            chosen = [i * size // count for i in range(count)]
            return run.rows_of(run.evaluation).collate_each(chosen)
    return []


def public_microbatch(run: Run) -> Mapping[str, Tensor] | None:
    """The first of `public_microbatches`; None where none can be made, or the loss does not take it."""
    with leaving_out("the strategy is not tried on public rows"):
        first = next(iter(public_microbatches(run)), None)
        if first is not None:
            with torch.no_grad(), evaluation_mode(run.model):
                run.evaluate(run.model, first)
        return first
    return None


@torch.no_grad()
def check_finite(run: Run) -> None:
    """Refuses a loss that is NaN or infinite on every public row.

    Rows that the loss does not take are not judged.

    Raises:
      ValueError: says what to look at.
    """
    losses, what = list[Tensor](), "losses of public rows were not looked at"
    with leaving_out(what), isolated_randomness(), evaluation_mode(run.model):
        for part in public_microbatches(run)[:2]:
            losses.append(run.evaluate(run.model, part)[: num_examples(part)])
    if losses and not torch.cat(losses).isfinite().any():
        raise ValueError(
            "the loss is NaN or infinite on every public row (the first of eval_dataset, or random "
            "tokens), and such rows count as zero in training: look for NaN in the weights, use float32 "
            "or bf16 in place of fp16, or check compute_per_example_loss."
        )


def check_differences(run: Run, differences: FiniteDifferences) -> None:
    """Refuses a run in which no public row's loss differs between the ends of a difference.

    A loss that counts right answers is judged by its `comparison_loss`, which every forward pass
    moves. Rows that the loss does not take are not judged.

    Args:
      run: has the public rows.
      differences: of the run, with theta settled, before and after.

    Raises:
      ValueError: names smoothing and trainable.
    """
    pair, objective = None, differences.objective
    with leaving_out("differences of public rows were not looked at"), isolated_randomness():
        if public := public_microbatches(run)[:1]:
            # losses that count right answers hardly ever move
            differences.objective = comparison_loss(objective)
            try:
                pair = differences.losses(public, [Direction(0, 0, 0)])
            finally:
                differences.objective = objective
                differences.space.settle_()
    if pair is not None:
        judge_differences(*pair, differences.smoothing)


def judge_differences(plus: Tensor, minus: Tensor, smoothing: float) -> None:
    """Refuses losses that do not change, and warns of changes that are mostly rounding.

    Args:
      plus, minus: float32 losses at the ends of a difference, of one shape.
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
