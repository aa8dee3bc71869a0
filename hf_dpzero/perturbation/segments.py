"""Runs of trainable tensors: how they are perturbed, restored and updated exactly.

A segment is one flat tensor that holds one large trainable tensor, or a run of small ones that were
moved next to each other so that their number does not matter to the cost. Element e of a segment has
index `offset + e` in the directions' index space. float32 tensors are in a `GridSegment`, parts of them
that FSDP2 keeps on several processes in `GridParts`, lower precisions in a `RoundedSegment`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation import grids
from hf_dpzero.perturbation.directions import (
    DITHER_STEP,
    DirectionStream,
    Words,
    draw_words_together,
)
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.kernels.torch_reference import (
    Members,
    Part,
    Pieces,
    Terms,
    half_precision,
    stochastically_rounded,
)
from hf_dpzero.perturbation.trainable import gathered

CHUNK = 1 << 19  # coordinates worked on at a time by torch operations
_SLICE = 1 << 16  # the same, where a dozen temporaries of that size are made
_SLACK = 1.0 - 2.0**-10  # of a grid's range: room for the rounding of perturbations
Kernel = Callable[..., None]
Numbers = Sequence[NDArray[np.generic]]


class Change(NamedTuple):
    """What happens along one direction: its coefficient goes old -> new, theta gains `update`.

    `age` is how many steps ago the direction was released: each update along it rounds anew.
    """

    stream: DirectionStream
    old: float
    new: float
    update: float
    age: int = 0


class GridState(TypedDict):
    """What `GridSegment.load_` needs of a tensor, JSON-safe."""

    exponent: int
    bound: float


class Chunk(NamedTuple):
    """Some elements of a segment: their values, where they lie, which members they may be of."""

    values: Tensor
    part: Part
    own: slice


class Segment:
    """What all segments share.

    Args:
      flat: the values, one row.
      offset: index of its first element, a multiple of 32.
      sizes: elements of each tensor in it.
      starts: first element of each, ascending multiples of 32 from 0.
      numbers: each tensor's place among the space's tensors.

    Attributes:
      first: index, in its tensor, of the first element; other than 0 where processes hold a tensor in
        parts (see `is_part`).
      agree: a number of this part -> the largest of all parts' numbers.
    """

    first: int = 0
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
        self.numbers = np.array(numbers, np.uint64)
        self.members = Members.at(self.starts, flat.numel()) if len(starts) > 1 else None

    def is_part(self, first: int, agree: Callable[[float], float]) -> None:
        """Makes this the part of one tensor that begins at element `first`; others hold the rest.

        Args:
          first: any.
          agree: called by all holders of the tensor at the same time.
        """
        assert self.members is None, "a part is of one tensor"
        self.first, self.agree, self.offset = first, agree, self.offset + first

    def member(self, m: int) -> Tensor:
        """Returns the values of the segment's m-th tensor, one row."""
        return self.flat[self.starts[m] : self.starts[m] + self.sizes[m]]

    def follow_(self, tensors: Sequence[Tensor]) -> None:
        """Works on other memory, of tensors that hold the same values, from now on."""
        self.flat = gathered(tensors, self.starts)

    def _shifted(self, words: Words) -> Words:
        # the dithers of the first elements here, from those of the tensors' first elements
        return words + np.uint32(self.first * DITHER_STEP % 2**32) if self.first else words

    def _part(self, start: int, stop: int) -> Part:
        # numbers of members, spread over the elements start .. stop
        return Part(start, stop, self.first + start, self.members, self.flat.device)

    def _chunks(self) -> Iterator[Chunk]:
        """All elements, a slice at a time."""
        size = self.flat.numel()
        for start in range(0, size, _SLICE):
            stop = min(start + _SLICE, size)
            yield Chunk(self.flat[start:stop], self._part(start, stop), slice(None))


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

    def apply_(self, changes: Sequence[Change]) -> int:
        """Makes the changes in place; returns the bytes of parameters read and written."""
        kernel, numbers = self._kernel(changes)
        keys = np.stack([change.stream.key for change in changes])
        kernel(self.flat, self.flat, self.offset, keys, *numbers, self.members)
        return 2 * self.flat.nbytes

    def write_(
        self, m: int, changes: Sequence[Change], source: Tensor, out: Tensor, pieces: Pieces
    ) -> None:
        """Makes out = source + the changes.

        Args:
          m: which member.
          changes: their old coefficients and updates are 0.
          source: the member's values, or the pieces of it.
          out: as source.
          pieces: None, or first elements (see `dispatch`).
        """
        kernel, numbers = self._kernel(changes)
        keys = np.stack([change.stream.key for change in changes])
        offset = self.offset + self.starts[m]
        kernel(out, source, offset, keys, *_of_member(numbers, m), None, pieces)

    def write_stack_(self, changes: Sequence[Change], plus: Tensor, minus: Tensor) -> None:
        """Writes perturbed copies of all members.

        Args:
          changes: the K of them.
          plus: [K, n], becomes theta + change k.
          minus: [K, n], becomes theta - change k.
        """
        kernel, numbers = self._kernel(changes)
        for k, change in enumerate(changes):
            own = (part[k : k + 1] if part.ndim == 2 else part for part in numbers)
            kernel(plus[k], self.flat, self.offset, change.stream.key[None], *own, self.members)
        torch.sub(self.flat, plus, out=minus).add_(self.flat)  # exact on the grid

    def _kernel(self, changes: Sequence[Change]) -> tuple[Kernel, Numbers]:
        """What makes the changes, and what it takes of each: [T, M], but for the spacing [M]."""
        spacing, of_changes = self.spacing, np.array([change[1:4] for change in changes])
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
            return dispatch.add_signs, [np.ascontiguousarray(amounts, np.float32)]
        scales = np.array([change.stream.scale for change in changes])
        # Rounded to float32, then in grid steps, which is exact.
        rates = (of_changes * scales[:, None]).astype(np.float32)
        old, new, update = np.ascontiguousarray(rates.T[:, :, None] / spacing, np.float32)
        dithers = [self._shifted(c.stream.update_dither(self.numbers, c.age)) for c in changes]
        steps: Numbers = [new, old, update, spacing.astype(np.float32), np.stack(dithers)]
        return dispatch.add_normals, steps

    def decay_(self, decay: float, stream: DirectionStream, decayed: NDArray[np.bool_]) -> None:
        """Makes theta <- (1 - decay) theta for some members, rounded stochastically.

        Args:
          decay: in [0, 1].
          stream: its tensor words start the dithers.
          decayed: bool [M], which members.
        """
        rates = np.where(decayed, -decay, 0.0).astype(np.float32)
        spacings, words = self.spacing.astype(np.float32), stream.tensor_words(self.numbers)[3]
        for values, part, own in self._chunks():
            spacing, dithers = part.of(spacings[own]), part.dither(words[own])
            steps = values * part.of(rates[own]) / spacing
            values += stochastically_rounded(steps, dithers) * spacing

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
        place = slice(self.starts[m] + start, self.starts[m] + start + values.numel())
        words = stream.tensor_words(self.numbers)[2]
        dithers = self._part(place.start, place.stop).dither(words)
        self.flat[place] += stochastically_rounded(values / spacing, dithers) * spacing


def _of_member(numbers: Numbers, m: int) -> Numbers:
    # contiguous, for numba compiles anew for other layouts
    return [np.ascontiguousarray(part[..., m : m + 1]) for part in numbers]


class GridParts(GridSegment):
    """One part of each of several float32 tensors that lie on several processes.

    Args:
      parts: of each tensor, what lies here; maybe empty.
      offsets: index of each tensor's first element, in the directions' index space.
      firsts: index of each part's first element in its tensor.
      numbers: each tensor's place among the space's tensors.
      agree: a number of this process -> the largest of all.
    """

    # Parts stay where FSDP gathers them from, so they cannot be moved next to each other as small
    # tensors are. What each tensor needs (grid, amounts, dithers) is computed for all of them at once.

    def __init__(
        self,
        parts: Sequence[Tensor],
        offsets: Sequence[int],
        firsts: Sequence[int],
        numbers: Sequence[int],
        agree: Callable[[float], float],
    ) -> None:
        flats = [part.detach().view(-1) for part in parts]
        super().__init__(flats[0], offsets[0], [part.numel() for part in parts], [0], numbers)
        self.flats, self.firsts, self.agree = flats, np.array(firsts, np.uint64), agree
        self.places = [offset + first for offset, first in zip(offsets, firsts, strict=True)]

    def member(self, m: int) -> Tensor:
        """Returns the part of the m-th tensor, one row."""
        return self.flats[m]

    def follow_(self, tensors: Sequence[Tensor]) -> None:
        """Works on other memory, which holds the same parts."""
        self.flats = [tensor.detach().view(-1) for tensor in tensors]
        self.flat = self.flats[0]

    def _shifted(self, words: Words) -> Words:
        return words + (self.firsts * np.uint64(DITHER_STEP)).astype(np.uint32)

    def _chunks(self) -> Iterator[Chunk]:
        for m, (flat, first) in enumerate(zip(self.flats, self.firsts.tolist(), strict=True)):
            for start in range(0, flat.numel(), _SLICE):
                stop = min(start + _SLICE, flat.numel())
                part = Part(start, stop, first + start, None, flat.device)
                yield Chunk(flat[start:stop], part, slice(m, m + 1))

    def apply_(self, changes: Sequence[Change]) -> int:
        """Makes the changes in place; returns the bytes of parameters read and written."""
        kernel, numbers = self._kernel(changes)
        keys = np.stack([change.stream.key for change in changes])
        for m, (flat, place) in enumerate(zip(self.flats, self.places, strict=True)):
            if flat.numel():
                kernel(flat, flat, place, keys, *_of_member(numbers, m))
        return sum(2 * flat.nbytes for flat in self.flats)


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

    def apply_(self, changes: Sequence[Change]) -> int:
        """Updates, then perturbs anew from the settled values; returns the bytes read and written."""
        updates, standing = [c for c in changes if c.update], [c for c in changes if c.new]
        a_pass = 2 * self.flat.nbytes
        update = None
        if updates:
            words = updates[0].stream.update_dither(self.numbers, updates[0].age)
            update = self._terms(updates, "update", words)
        if standing:
            copied = self.settled is None
            self.settled = self.flat.clone() if self.settled is None else self.settled
            words = standing[0].stream.perturbation_dither(self.numbers)
            moved = dispatch.perturb_rounded(
                self.flat, self.settled, self.offset, self._terms(standing, "new", words), update,
                self.members,
            )  # fmt: skip
            return moved + copied * a_pass
        source, self.settled = self.settled, None
        if update is not None:
            given = self.flat if source is None else source
            dispatch.add_rounded(self.flat, given, self.offset, *update, self.members)
        elif source is not None:
            self.flat.copy_(source)
        else:
            return 0
        return a_pass

    def write_(
        self, m: int, changes: Sequence[Change], source: Tensor, out: Tensor, pieces: Pieces
    ) -> None:
        """Makes out = source + the changes; arguments as of `GridSegment.write_`."""
        words = changes[0].stream.perturbation_dither(self.numbers[m : m + 1])
        offset, terms = self.offset + self.starts[m], self._terms(changes, "new", words)
        dispatch.add_rounded(out, source, offset, *terms, None, pieces)

    def _terms(self, changes: Sequence[Change], part: str, words: Words) -> Terms:
        """What one part of the changes adds, rounded with dithers that start at the tensors' words."""
        keys = np.array([change.stream.key for change in changes])
        coefficients = [getattr(change, part) * change.stream.scale for change in changes]
        gaussian = changes[0].stream.distribution != "rademacher"
        return Terms(keys, gaussian, np.array(coefficients, np.float32), self._shifted(words))

    def decay_(self, decay: float, stream: DirectionStream, decayed: NDArray[np.bool_]) -> None:
        """Makes theta <- (1 - decay) theta for some members, as `GridSegment.decay_`."""
        rates = np.where(decayed, decay, 0.0).astype(np.float32)
        words = stream.tensor_words(self.numbers)[3]
        for held, part, own in self._chunks():
            values = held.float()
            left = values - values * part.of(rates[own])
            held.copy_(half_precision(left, part.dither(words[own]), held.dtype))

    def add_dense_(
        self, m: int, start: int, values: Tensor, stream: DirectionStream, reach: float
    ) -> None:
        """Adds dense values to a member, as `GridSegment.add_dense_`; `reach` is not used."""
        place = slice(self.starts[m] + start, self.starts[m] + start + values.numel())
        words = stream.tensor_words(self.numbers)[2]
        dithers = self._part(place.start, place.stop).dither(words)
        summed = self.flat[place].float() + values
        self.flat[place] = half_precision(summed, dithers, self.flat.dtype)
