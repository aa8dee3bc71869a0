"""Chooses, on public rows, the fixed shapes in which an example has the same bits wherever it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_dpzero.estimators.forward_passes import ParameterChanged
from hf_dpzero.training.fixed_shapes import FixedShapes, shape_of
from hf_dpzero.training.independence_check import (
    CoupledLosses,
    Losses,
    check_fixed_shapes,
    mostly_unmasked,
    takes_blanks,
)
from hf_dpzero.training.pass_sizes import PassSizes, pass_sizes
from hf_dpzero.training.precision import uncompiled
from hf_dpzero.training.public_rows import evaluation_rows, public_shapes

logger = logging.get_logger(__name__)

ONE_BY_ONE = (
    "every example is evaluated by itself, which is slower. microbatch_size=1 does the same without the "
    "trial."
)
OTHER_BITS = (
    "an example's loss, or what a layer returns for it, has other bits beside other examples, even in a "
    "batch of the same shape"
)
BLOCK = 16
"""Rows that matrix products work on together; those that are left over may be rounded otherwise."""


@dataclass(frozen=True)
class ShapeChoice:
    """The trial of a run's shapes.

    Attributes:
      trainer: a `DPZeroTrainer` with `shapes`.
      count: its rows.
      losses: of a batch, float32 [B]; see `independence_check.Losses`.
      traced: digests of all bits of the same forward passes (`estimators.row_traces`), float32 [B].
      coarse: whether something computes in low precision.
    """

    trainer: Any
    count: int
    losses: Losses
    traced: Losses
    coarse: bool

    def make(self, cost: float) -> None:
        """Sets the trainer's shapes to the first that hold on public rows; else to single rows.

        As they are; then in whole blocks of rows, where that is expected to be quicker than single rows.
        Private rows may only stop the run: were they to choose, one row could change all others'
        rounding.

        Args:
          cost: of a pass beside its tokens, in tokens.

        Raises:
          ValueError: a private row's loss has other bits beside other rows, or a public row's another
            value.
        """
        # Rows that the loss does not take decide nothing; what is wrong with it shows on private ones.
        try:
            if not self._found(cost):
                self.trainer.shapes = dataclasses.replace(self.trainer.shapes, slots=1)
                few = self.trainer.args.physical_batch_size < BLOCK
                hint = f" With microbatch_size={BLOCK} or more, passes of {BLOCK} rows are tried."
                logger.warning(f"{OTHER_BITS}: {ONE_BY_ONE}{hint if few else ''}")
                return
        except (CoupledLosses, ParameterChanged, torch.OutOfMemoryError):
            raise
        except (LookupError, TypeError, ValueError, RuntimeError):
            pass
        if not self.holds(self.trainer.shapes, self.count, self.traced):
            raise ValueError(
                f"{OTHER_BITS}: set microbatch_size=1, so that every example is evaluated by itself."
            )

    def _found(self, cost: float) -> bool:
        for number, shapes in enumerate(self._options(cost)):
            self.trainer.shapes = shapes
            if self._holds_on_public_rows():
                if number:
                    logger.info(f"forward passes take multiples of {BLOCK} rows: {OTHER_BITS}.")
                return True
        return False

    def _options(self, cost: float) -> Iterator[FixedShapes]:
        """The shapes as they are; then in blocks, where these should be quicker than single rows."""
        yield (shapes := self.trainer.shapes)
        most, rows = (
            self.trainer.args.physical_batch_size,
            self.trainer.plan.sampler.expected_batch_size,
        )
        widths = {64: shapes.slots} if shapes.sizes is None else shapes.sizes.rows  # 64 is a guess
        blocks = pass_sizes(rows, most, max(widths), cost, multiples_of=BLOCK)
        single = PassSizes(dict.fromkeys(widths, 1))
        if most >= BLOCK and blocks.tokens(rows, cost) < single.tokens(rows, cost):
            slots = max(blocks.rows.values())
            yield dataclasses.replace(shapes, slots=slots, sizes=shapes.sizes and blocks)

    def _holds_on_public_rows(self) -> bool:
        """Whether public rows keep their bits in all places; chooses also what fills up microbatches."""
        trainer = self.trainer
        try:
            shape_of(trainer.shapes.collate_each([0])[0])  # of the kind of all rows
        except ValueError:
            return False  # no row of its own
        trainer.shapes = dataclasses.replace(
            trainer.shapes, blanks=False
        )  # needs nothing of the model
        if (public := public_shapes(trainer)) is None:
            return True
        shapes, count = public
        shapes = dataclasses.replace(shapes, blanks=True)
        shapes = dataclasses.replace(shapes, blanks=takes_blanks(shapes, self.losses))
        trainer.shapes = dataclasses.replace(trainer.shapes, blanks=shapes.blanks)
        if (
            evaluation_rows(trainer) is not None
        ):  # random tokens say nothing of the lengths of texts
            apart = mostly_unmasked(shapes, count)
            shapes = dataclasses.replace(shapes, unmasked_apart=apart)
            trainer.shapes = dataclasses.replace(trainer.shapes, unmasked_apart=apart)
        return self.holds(shapes, count, self.traced)

    def holds(self, shapes: FixedShapes, count: int, traced: Losses) -> bool:
        """`check_fixed_shapes`; False where rows cannot be put into fixed shapes.

        Args:
          shapes, count, traced: as there.

        Returns:
          Whether no bit differs.
        """

        def alone(row: Mapping[str, Tensor]) -> Tensor:
            with uncompiled(self.trainer.model):
                return self.losses(row)

        try:
            shapes.packed(shapes.collate_each([0]))
        except ValueError:
            return False
        return check_fixed_shapes(shapes, count, self.losses, self.coarse, alone, traced)
