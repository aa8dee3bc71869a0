"""Tries every shape of microbatches that a step has, on that step's own rows, before it is taken.

The trial before training (`independence_check`) sees the shapes of a few rows, at the base weights and
in plain forward passes. Others come later: a length that no sampled row had, perturbed copies in one
pass (`stacked`), weights that have moved. So the first microbatch of each shape is evaluated as the step
will evaluate it, its rows turned through the slots, beside each other and beside blanks; again when rows
first meet in a shape that was tried on one, and when ten times as many steps are taken. A bit that
moves, in a loss or in what a layer returns (`estimators.row_traces`), stops the run: no private row
chooses how others are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.row_traces import Traced
from hf_dpzero.objectives.losses import Filled, batch_size, num_examples
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.training.fixed_shapes import FixedShapes, Row
from hf_dpzero.training.random_state import isolated_randomness

Lockstep = Callable[[list[Filled]], Sequence[Row]]
Places = list[int | None]

AGAIN = 10
"""A shape is tried again when the steps taken are so many times those at its last trial."""

_ROLLED = ("input_ids", "decoder_input_ids", "input_values", "input_features", "pixel_values")
_NOT_TAKEN = (RuntimeError, ValueError, LookupError, TypeError, AssertionError)


class ShapeTrials:
    """Remembers which shapes were tried, and when.

    Guarantee: before a step's losses are evaluated, the shape of each of its microbatches was tried.

    Args:
      shapes: of the run, with more than one slot.
      differences: of the run: its strategy, objective, prefix and weights.
      num_directions: K of a step.
      lockstep: adds microbatches of no examples, so that every process makes as many passes; None where
        processes need not.
      thorough: try all K directions in any case: a product that rounds by slots moves the bits of few
        losses, of one in some hundreds.
    """

    def __init__(
        self,
        shapes: FixedShapes,
        differences: FiniteDifferences,
        num_directions: int,
        lockstep: Lockstep | None = None,
        thorough: bool = False,
    ) -> None:
        self.shapes, self.differences, self.lockstep = shapes, differences, lockstep
        # Copies of all directions share a pass under `stacked`; else each has passes of its own.
        count = num_directions if differences.stack is not None or thorough else 1
        self._directions = [Direction(0, 0, k) for k in range(count)]
        self._tried: dict[tuple[Any, ...], tuple[int, int]] = {}  # when, and of how many rows

    def check(self, step: int, microbatches: Sequence[Row]) -> None:
        """Tries the shapes that are new, or were tried long ago.

        Args:
          step: its number t, from 0.
          microbatches: of the step; those of one row are as they are.

        Raises:
          ValueError: a row's losses have other bits in another slot or beside other rows.
        """
        due: dict[tuple[Any, ...], Row] = {}
        for part in microbatches:
            group = self.shapes.group_of(_row(part, 0))
            last, met = self._tried.get(group, (-1, 0))
            again = last < 0 or step + 1 >= AGAIN * (last + 1)
            if batch_size(part) > 1 and (again or met == 1 < num_examples(part)):
                due.setdefault(group, part)
        if self.lockstep is not None:
            holds = self._hold_together([_rows(part) for part in due.values()], self.lockstep)
        else:
            holds = all(map(self.holds, due.values()))
        if not holds:
            raise ValueError(
                "an example's loss has other bits beside other examples, in a shape or at weights "
                "that the trial before training did not see: this step was not released. Set "
                "microbatch_size=1 and resume (resume_from_checkpoint=True): then every example is "
                "evaluated by itself."
            )
        self._tried.update({group: (step, num_examples(part)) for group, part in due.items()})

    def holds(self, part: Row) -> bool:
        """Whether the losses of a microbatch's rows keep all bits wherever they stand.

        Args:
          part: a microbatch, filled up.

        Returns:
          False if a bit differs. Theta is settled afterwards.
        """
        rows = _rows(part)
        try:
            return self._hold_together([[*rows, *_others(rows, batch_size(part) - len(rows))]])
        except _NOT_TAKEN:
            if len(rows) == batch_size(part):
                raise
            return self._hold_together([rows])  # invented rows may not be of the model's form

    def _hold_together(self, groups: Sequence[Sequence[Row]], lockstep: Lockstep = list) -> bool:
        placed = [list(self._placed(rows)) for rows in groups]
        batches = lockstep([batch for each in placed for batch, _ in each])
        if not batches:
            return True
        with isolated_randomness():
            found = self._losses(batches)
        counts = [sum(len(places) for _, places in each) for each in placed]
        return all(map(_consistent, placed, found.split(counts)))

    def _placed(self, rows: Sequence[Row]) -> Iterator[tuple[Filled, Places]]:
        """Microbatches of these rows, and which row stands in each slot; None for what fills up."""
        slots, shapes = self.shapes.slots_of(rows[0]), self.shapes
        filler = shapes.blank(rows[0]) if shapes.blanks else rows[0]
        here: Places = list(range(len(rows)))
        if len(rows) == slots and not shapes.may_fill(rows):
            here.pop()
        here += [None] * (slots - len(here))
        alone: Places = [0, *[None] * (slots - 1)]
        turns = sorted({0, 1, slots // 2, slots - 1})
        for places in [*[here[by:] + here[:by] for by in turns], alone, alone[::-1]]:
            batch = [filler if i is None else rows[i] for i in places]
            yield Filled(shapes.filled(batch), slots), places

    def _losses(self, microbatches: Sequence[Row]) -> Tensor:
        """Digests at both signs along all directions of every row, float32 [rows, 2 K]."""
        differences, objective = self.differences, self.differences.objective
        differences.objective = Traced(objective)
        try:
            pair = differences.losses(microbatches, self._directions)
        finally:
            differences.objective = objective
            differences.space.settle_()
        return torch.cat(pair, dim=1)


def _consistent(placed: Sequence[tuple[Filled, Places]], found: Tensor) -> bool:
    """Whether every row has the same losses wherever it stood."""
    known: dict[int, Tensor] = {}
    standing = [row for _, places in placed for row in places]
    return all(
        row is None or _equal(known.setdefault(row, losses), losses)
        for row, losses in zip(standing, found, strict=True)
    )


def _rows(part: Row) -> list[Row]:
    return [_row(part, i) for i in range(num_examples(part))]


def _row(part: Row, number: int) -> dict[str, Tensor]:
    return {name: value[number : number + 1] for name, value in part.items()}


def _others(rows: Sequence[Row], count: int) -> list[Row]:
    """Further rows of the same masks and labels: what is read is moved on by some columns."""
    made: list[Row] = []
    for number in range(count):
        row, by = rows[number % len(rows)], 1 + number
        made.append({n: v.roll(by, -1) if n in _ROLLED else v for n, v in row.items()})
    return made


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN being equal to NaN."""
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(one[~nan], other[~nan])


NARROW = (
    "public rows' losses have other bits beside other rows: the matrix products of narrow layers (a "
    "head of a few classes on up to some hundred units, say) round by the place of a row here. Nothing "
    "was released by this start. Set microbatch_size=1: then every example is evaluated by itself."
)
"""What is wrong where `stacked` and `whole_model` both fail on public rows, and what to do."""


def keep_strategy(differences: FiniteDifferences, holds: bool) -> str:
    """Goes back from `stacked` to `whole_model` where public rows' bits follow their neighbours.

    Args:
      differences: of the run; changed in place where its strategy was chosen automatically.
      holds: whether public microbatches keep all bits.

    Returns:
      What was turned off and why, for a log; "" if nothing was.

    Raises:
      ValueError: `stacked` was asked for by name.
    """
    if holds or differences.stack is None:
        return ""
    reason = "rounds an example by its slot in a microbatch or by its neighbours"
    if not differences.chosen_automatically:
        raise ValueError(
            f"strategy='stacked' {reason}: use 'whole_model', or set microbatch_size=1."
        )
    differences.use("whole_model")
    return f"the strategy is whole_model: stacked {reason}."
