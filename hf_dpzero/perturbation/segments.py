"""Runs of trainable tensors: how they are perturbed, restored and updated exactly.

A segment is one flat tensor that holds one large trainable tensor, or a run of small ones that were
moved next to each other so that their number does not matter to the cost. Element e of a segment has
index `offset + e` in the directions' index space. float32 tensors are in a `GridSegment`, lower
precisions in a `RoundedSegment`; those that stay where they are in `parts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation import grids
from hf_dpzero.perturbation.directions import (
    DirectionStream,
    Words,
    draw_words_together,
)
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.kernels.torch_reference import (
    Decay,
    Members,
    Part,
    Parts,
    Pieces,
    Sweep,
    half_precision,
    stochastically_rounded,
)
from hf_dpzero.perturbation.trainable import gathered

CHUNK = 1 << 19  # coordinates worked on at a time by torch operations
_SLACK = 1.0 - 2.0**-10  # of a grid's range: room for the rounding of perturbations


class Change(NamedTuple):
    """What happens along one direction: its coefficient goes old -> new, theta gains `update`.

    `age` is how many steps ago the direction was released: each update along it rounds anew.
    """

    stream: DirectionStream
    old: float
    new: float
    update: float
    age: int = 0


class WeightDecay(NamedTuple):
    """theta <- (1 - rate) theta for some tensors, before any update, rounded stochastically.

    Attributes:
      rate: in [0, 1].
      stream: its tensor words start the dithers.
      decayed: bool, which of the space's tensors.
    """

    rate: float
    stream: DirectionStream
    decayed: NDArray[np.bool_]

    @property
    def alone(self) -> list[Change]:
        """What to add where a sweep has nothing else to: 0."""
        return [Change(self.stream, 0.0, 0.0, 0.0)]


class GridState(TypedDict):
    """What `GridSegment.load_` needs of a tensor, JSON-safe."""

    exponent: int
    bound: float


class Stacked(NamedTuple):
    """Copies of a segment's tensors.

    Attributes:
      flats: [copies, n] of what lies together.
      tensors: [copies, n] of each tensor, in the flats' memory.
    """

    flats: list[Tensor]
    tensors: list[Tensor]


class Segment:
    """What all segments share.

    Args:
      flat: the values, one row.
      offset: index of its first element, a multiple of 32.
      sizes: elements of each tensor in it.
      starts: first element of each, ascending multiples of 32 from 0.
      numbers: each tensor's place among the space's tensors.

    Attributes:
      agree: a number of these tensors -> the largest of all processes' numbers.
    """

    agree: Callable[[float], float] = staticmethod(float)

    def __init__(
        self,
        flat: Tensor,
        offset: int,
        sizes: Sequence[int],
        starts: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        self.flat, self.offset, self.sizes, self.starts = flat, offset, sizes, list(starts)
        self.places = [offset + start for start in starts]
        self.numbers = np.array(numbers, np.uint64)
        self.members = Members.at(self.starts, flat.numel()) if len(starts) > 1 else None

    def member(self, m: int) -> Tensor:
        """Returns the values of the segment's m-th tensor, one row."""
        return self.flat[self.starts[m] : self.starts[m] + self.sizes[m]]

    def follow_(self, tensors: Sequence[Tensor]) -> None:
        """Works on other memory, of tensors that hold the same values, from now on."""
        self.flat = gathered(tensors, self.starts)

    def parts(
        self,
        outs: Sequence[Tensor],
        sources: Sequence[Tensor],
        members: Sequence[int] | None = None,
    ) -> Parts:
        """Describes what a sweep writes and reads.

        Args:
          outs, sources: of some tensors, flat.
          members: which of them; None for all.
        """
        chosen = range(len(self.places)) if members is None else members
        held = [n for n, out in enumerate(outs) if out.numel()]
        outs, sources = [outs[n] for n in held], [sources[n] for n in held]
        columns = [chosen[n] for n in held]
        return Parts(outs, sources, [self.places[m] for m in columns], columns)

    def sweep(self, changes: Sequence[Change]) -> Sweep:
        """Returns what the changes, without updates, add to every tensor."""
        raise NotImplementedError

    def write_(self, m: int, added: Sweep, source: Tensor, out: Tensor, pieces: Pieces) -> None:
        """Makes out = source + the changes.

        Args:
          m: which tensor.
          added: of `sweep`.
          source: the tensor's values, or the pieces of it.
          out: as source.
          pieces: None, or first elements (see `dispatch`).
        """
        dispatch.sweep(added.of(m), out, source, self.places[m], None, pieces)

    def _shifted(self, words: Words) -> Words:
        """The dithers of the first elements here, from those of the tensors' first elements."""
        return words

    def _part_of(self, m: int, start: int, stop: int) -> Part:
        """The elements start .. stop of one tensor."""
        return Part(start, stop, start, None, self.flat.device)

    def _decay(
        self, decay: WeightDecay, after: int = 0, spacing: NDArray[np.float64] | None = None
    ) -> Decay:
        """The decay as a part of a sweep, after some of its terms, on grids if there are any."""
        rates = np.where(decay.decayed[self.numbers.astype(np.int64)], decay.rate, 0.0)
        words, rates = decay.stream.tensor_words(self.numbers)[3], rates.astype(np.float32)
        steps = np.ones(len(rates)) if spacing is None else spacing
        rates = rates if spacing is None else (-rates / spacing).astype(np.float32)
        return Decay(after, rates, steps.astype(np.float32), self._shifted(words))


def write_others_(flat: Tensor, copies: Tensor, forward: bool) -> None:
    """Writes what follows the copies theta + change k: theta, or theta - change k of each."""
    if forward:
        copies[-1].copy_(flat)
    else:
        plus, minus = copies.chunk(2)
        torch.sub(flat, plus, out=minus).add_(flat)  # exact on the grid


class GridSegment(Segment):
    """float32 tensors on their grids: changes are added to them, exactly.

    Attributes:
      exponents, spacing: of each member's grid, int64 and float64 [M].
      bounds: upper bounds on the members' magnitudes computed from public numbers alone, float64 [M].
    """

    # When the next update could pass a grid's range, that tensor is measured and, if need be, moved to
    # a coarser grid. Both depend only on theta and the updates, so a replay does the same at that step.

    @functools.cached_property
    def exponents(self) -> NDArray[np.int64]:
        return np.zeros(len(self.sizes), np.int64)

    @functools.cached_property
    def bounds(self) -> NDArray[np.float64]:
        return np.zeros(len(self.sizes))

    @property
    def spacing(self) -> NDArray[np.float64]:
        return grids.quantum(self.exponents)

    def snap_(self, reach: float) -> None:
        """Puts every member on its grid."""
        for m in range(len(self.sizes)):
            self.bounds[m] = self.agree(grids.largest_magnitude(self.member(m)))
            self._regrid_(m, grids.exponent_for(self.bounds[m] + reach))

    def _regrid_(self, m: int, exponent: int) -> None:
        self.exponents[m] = exponent
        grids.snap_(self.member(m), float(self.spacing[m]))
        self.bounds[m] += self.spacing[m]

    def state(self, m: int) -> GridState:
        """Returns what `load_` needs of a member."""
        return {"exponent": int(self.exponents[m]), "bound": float(self.bounds[m])}

    def load_(self, m: int, state: GridState) -> None:
        """Restores a member's saved state.

        Raises:
          ValueError: the member's values are not on that grid.
        """
        self.exponents[m], self.bounds[m] = state["exponent"], state["bound"]
        values, spacing = self.member(m), float(self.spacing[m])
        on_grid = (
            torch.equal(grids.snap_(part.clone(), spacing), part) for part in values.split(CHUNK)
        )
        wrong = not all(on_grid) or grids.largest_magnitude(values) > self.bounds[m]
        if self.agree(float(wrong)):
            raise ValueError(
                "holds values that are not on the grid of the saved state: load the very weights that "
                "were saved with it, in float32."
            )

    def make_room_(
        self, growth: float, reach: float, roundings: int, settle: Callable[[], None]
    ) -> None:
        """Ensures that theta may grow and be perturbed within range.

        Args:
          growth: sum of the |c_k u_k[i]| that the update may add to a coordinate.
          reach: what perturbations may add beyond that, at any moment.
          roundings: terms of the update, each of which may round by up to one grid step.
          settle: called before a member is measured, to take perturbations off.
        """
        short = self._short(growth, reach, roundings)
        if short.any():
            settle()
            for m in np.flatnonzero(short).tolist():
                self._measure_(m, growth + reach)
        self.bounds += growth + roundings * self.spacing

    def _short(self, growth: float, reach: float, roundings: int) -> NDArray[np.bool_]:
        # which members could pass their grid's range after growing and on a perturbation
        grown = self.bounds + (growth + roundings * self.spacing)
        return grown + reach > np.ldexp(1.0, self.exponents) * _SLACK

    def _measure_(self, m: int, more: float) -> None:
        self.bounds[m] = self.agree(grids.largest_magnitude(self.member(m)))
        needed = grids.exponent_for(self.bounds[m] + more)
        if needed > self.exponents[m]:
            self._regrid_(m, needed)

    def apply_(self, changes: Sequence[Change], decay: WeightDecay | None = None) -> int:
        """Makes the changes in place; returns the bytes of parameters read and written."""
        dispatch.sweep(self.sweep(changes, decay), self.flat, self.flat, self.offset, self.members)
        return 2 * self.flat.nbytes

    def new_stack(self, copies: int) -> Stacked:
        """Returns memory for that many copies of every tensor, uninitialised."""
        flat = self.flat.new_empty(copies, self.flat.numel())
        places = zip(self.starts, self.sizes, strict=True)
        return Stacked([flat], [flat.narrow(1, start, size) for start, size in places])

    def write_stack_(
        self, changes: Sequence[Change], stacked: Stacked, forward: bool = False
    ) -> None:
        """Writes perturbed copies of all tensors.

        Args:
          changes: the K of them.
          stacked: of 2 K copies; the k-th becomes theta + change k, the (K + k)-th theta - change k.
          forward: of K + 1 copies, the last of which becomes theta.
        """
        [copies] = stacked.flats
        for k, change in enumerate(changes):
            dispatch.sweep(self.sweep([change]), copies[k], self.flat, self.offset, self.members)
        write_others_(self.flat, copies, forward)

    def sweep(self, changes: Sequence[Change], decay: WeightDecay | None = None) -> Sweep:
        """Returns what the changes add to every tensor."""
        spacing, within = self.spacing, None
        if decay is not None:  # of theta alone: what stands there is taken off first
            standing = [Change(c.stream, c.old, 0.0, 0.0) for c in changes if c.old]
            rest = [c._replace(old=0.0) for c in changes if c.new or c.update] or decay.alone
            changes, within = [*standing, *rest], self._decay(decay, len(standing), spacing)
        keys = np.stack([change.stream.key for change in changes])
        of_changes = np.array([change[1:4] for change in changes])
        if changes[0].stream.distribution == "rademacher":
            # All of a coordinate's change is +-amount.
            old, new, update = of_changes.T[:, :, None]
            amounts = grids.snapped(new, spacing) - grids.snapped(old, spacing)
            updated = np.flatnonzero(update)
            if updated.size:
                moved = [changes[t] for t in updated.tolist()]
                draw_words_together([change.stream for change in moved])
                uniforms = np.stack(
                    [c.stream.coefficient_uniforms(self.numbers, c.age) for c in moved]
                )
                # One stochastic rounding of the coefficient for the whole tensor: as unbiased for a
                # coordinate (E[update] = c u) as one of its own, and free.
                amounts[updated] += grids.snapped_stochastically(update[updated], spacing, uniforms)
            return Sweep(
                "add_signs", keys, [np.ascontiguousarray(amounts, np.float32)], decay=within
            )
        scales = np.array([change.stream.scale for change in changes])
        # Rounded to float32, then in grid steps, which is exact.
        rates = (of_changes * scales[:, None]).astype(np.float32)
        old, new, update = np.ascontiguousarray(rates.T[:, :, None] / spacing, np.float32)
        dithers = [self._shifted(c.stream.update_dither(self.numbers, c.age)) for c in changes]
        steps = [new, old, update, spacing.astype(np.float32), np.stack(dithers)]
        return Sweep("add_normals", keys, steps, decay=within)

    def add_dense_(
        self, m: int, start: int, values: Tensor, stream: DirectionStream, reach: float
    ) -> None:
        """Adds dense values to a member, rounded stochastically.

        Args:
          m: which member.
          start: its first element that gains something.
          values: float32 [n].
          stream: its tensor words start the dithers.
          reach: what perturbations may add beyond that, at any moment.
        """
        growth = self.agree(grids.largest_magnitude(values))
        if self._short(growth, reach, 1)[m]:
            self._measure_(m, growth + reach)
        spacing = float(self.spacing[m])
        self.bounds[m] += growth + spacing
        words, stop = stream.tensor_words(self.numbers[m : m + 1])[2], start + values.numel()
        dithers = self._part_of(m, start, stop).dither(words)
        rounded = stochastically_rounded(values / spacing, dithers)
        self.member(m)[start:stop] += rounded * spacing


class RoundedSegment(Segment):
    """bfloat16 or float16 tensors: perturbed out of place, restored from what was put aside.

    Attributes:
      settled: a copy of the settled values while a perturbation stands in the tensors themselves.
    """

    # These grids are too coarse to perturb on, so theta + sum a_k u_k is computed in float32 from the
    # settled values and rounded stochastically, with public dithers: small perturbations and updates
    # are not lost but right on average.
    settled: Tensor | None = None

    def snap_(self, reach: float) -> None:
        """Refuses weights that are not finite; there is no grid to put them on."""
        grids.exponent_for(self.agree(grids.largest_magnitude(self.flat)))

    def apply_(self, changes: Sequence[Change], decay: WeightDecay | None = None) -> int:
        """Updates, then perturbs anew from the settled values; returns the bytes read and written."""
        updates, standing = [c for c in changes if c.update], [c for c in changes if c.new]
        updates = updates or ([] if decay is None else decay.alone)
        update = self.sweep(updates, "update", decay) if updates else None
        if standing:
            copied = self._put_aside() if self.settled is None else 0
            return copied + self._perturb(self.sweep(standing), update)
        if update is not None:
            self._update(update)
        elif self.settled is not None:
            self._take_back()
        else:
            return 0
        self.settled = None
        return self._bytes()

    def _bytes(self) -> int:
        return 2 * self.flat.nbytes

    def _put_aside(self) -> int:
        self.settled = self.flat.clone()
        return self._bytes()

    def _perturb(self, new: Sweep, update: Sweep | None) -> int:
        """settled += update, then the tensors = settled + new; the bytes read and written."""
        assert self.settled is not None
        return dispatch.perturb_rounded(
            self.flat, self.settled, self.offset, new, update, self.members
        )

    def _update(self, update: Sweep) -> None:
        """The tensors = settled (or they themselves) + update."""
        given = self.flat if self.settled is None else self.settled
        dispatch.sweep(update, self.flat, given, self.offset, self.members)

    def _take_back(self) -> None:
        assert self.settled is not None
        self.flat.copy_(self.settled)

    def sweep(
        self,
        changes: Sequence[Change],
        part: Literal["new", "update"] = "new",
        decay: WeightDecay | None = None,
    ) -> Sweep:
        """Returns what one part of the changes adds, rounded with dithers that start at words."""
        keys, first = np.array([change.stream.key for change in changes]), changes[0]
        coefficients = [getattr(change, part) * change.stream.scale for change in changes]
        if part == "update":
            words = first.stream.update_dither(self.numbers, first.age)
        else:
            words = first.stream.perturbation_dither(self.numbers)
        shared = first.stream.distribution != "rademacher", np.array(coefficients, np.float32)
        within = None if decay is None else self._decay(decay)
        return Sweep("add_rounded", keys, [self._shifted(words)], shared, within)

    def add_dense_(
        self, m: int, start: int, values: Tensor, stream: DirectionStream, reach: float
    ) -> None:
        """Adds dense values to a member, as `GridSegment.add_dense_`; `reach` is not used."""
        place = slice(start, start + values.numel())
        words = stream.tensor_words(self.numbers[m : m + 1])[2]
        dithers = self._part_of(m, place.start, place.stop).dither(words)
        summed = self.member(m)[place].float() + values
        self.member(m)[place] = half_precision(summed, dithers, self.flat.dtype)
