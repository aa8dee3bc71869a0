"""Tensors that stay where they are, as a segment: FSDP2 keeps parts of them, or a GPU holds them all.

Under FSDP2 a parameter's storage is what it is gathered from, so it cannot be moved next to another.
On a GPU it need not be: one launch reaches tensors wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_dpzero.perturbation import grids
from hf_dpzero.perturbation.directions import DITHER_STEP, Words
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.kernels.torch_reference import Part, Parts, Sweep
from hf_dpzero.perturbation.segments import (
    Change,
    GridSegment,
    RoundedSegment,
    Segment,
    Stacked,
    WeightDecay,
    write_others_,
)


class _InPlaces(Segment):
    """Tensors, or parts of them, that are not moved next to each other.

    What each of them needs (grid, amounts, dithers) is computed for all at once, and `dispatch` changes
    all in one launch where it can.

    Args:
      parts: of each tensor, what lies here; maybe empty, maybe all of it.
      offsets: index of each tensor's first element, in the directions' index space.
      firsts: index of each part's first element in its tensor.
      numbers: each tensor's place among the space's tensors.
      agree: a number of this process -> the largest of all that hold parts.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        offsets: Sequence[int],
        firsts: Sequence[int],
        numbers: Sequence[int],
        agree: Callable[[float], float] = float,
    ) -> None:
        flats = [part.detach().view(-1) for part in parts]
        super().__init__(flats[0], offsets[0], [part.numel() for part in parts], [0], numbers)
        self.flats, self.firsts, self.agree = flats, np.array(firsts, np.uint64), agree
        self.places = [offset + first for offset, first in zip(offsets, firsts, strict=True)]
        self._in_place = self.parts(self.flats, self.flats)

    def member(self, m: int) -> Tensor:
        """Returns the part of the m-th tensor, one row."""
        return self.flats[m]

    def follow_(self, tensors: Sequence[Tensor]) -> None:
        """Works on other memory, which holds the same parts."""
        self.flats = [tensor.detach().view(-1) for tensor in tensors]
        self.flat, self._in_place = self.flats[0], self.parts(self.flats, self.flats)

    def _bytes(self) -> int:
        return sum(2 * flat.nbytes for flat in self.flats)

    def _shifted(self, words: Words) -> Words:
        return words + (self.firsts * np.uint64(DITHER_STEP)).astype(np.uint32)

    def _part_of(self, m: int, start: int, stop: int) -> Part:
        return Part(start, stop, int(self.firsts[m]) + start, None, self.flat.device)


class GridParts(_InPlaces, GridSegment):
    """float32 tensors on their grids that are not moved next to each other."""

    def apply_(self, changes: Sequence[Change], decay: WeightDecay | None = None) -> int:
        """Makes the changes in place; returns the bytes of parameters read and written."""
        dispatch.sweep_each(self.sweep(changes, decay), self._in_place)
        return self._bytes()

    def new_stack(self, copies: int) -> Stacked:
        """Returns memory for that many copies of every tensor, uninitialised."""
        made = [flat.new_empty(copies, flat.numel()) for flat in self.flats]
        return Stacked(made, made)

    def write_stack_(
        self, changes: Sequence[Change], stacked: Stacked, forward: bool = False
    ) -> None:
        """Writes perturbed copies of all tensors, as `GridSegment.write_stack_`."""
        for k, change in enumerate(changes):
            outs = [flat[k] for flat in stacked.flats]
            dispatch.sweep_each(self.sweep([change]), self.parts(outs, self.flats))
        for flat, copies in zip(self.flats, stacked.flats, strict=True):
            write_others_(flat, copies, forward)


class RoundedParts(_InPlaces, RoundedSegment):
    """bfloat16 or float16 tensors that are not moved next to each other."""

    # The copies' memory is kept between steps, so that a launch finds it where the last one did.
    _aside: Parts | None = None  # the tensors from their copies
    _copies: Parts | None = None  # the copies in place

    def snap_(self, reach: float) -> None:
        """Refuses weights that are not finite."""
        for flat in self.flats:
            grids.exponent_for(self.agree(grids.largest_magnitude(flat)))

    def follow_(self, tensors: Sequence[Tensor]) -> None:
        """Works on other memory, which holds the same parts."""
        super().follow_(tensors)
        self._aside = self._copies = None

    def _put_aside(self) -> int:
        if self._aside is None:
            sizes = [flat.numel() for flat in self.flats]
            copies = self.flat.new_empty(sum(sizes)).split(sizes)
            self._aside = self.parts(self.flats, copies)
            self._copies = self.parts(copies, copies)
            self._memory = copies[0]
        if self._aside.outs:
            torch._foreach_copy_(list(self._aside.sources), list(self._aside.outs))
        self.settled = self._memory
        return self._bytes()

    def _perturb(self, new: Sweep, update: Sweep | None) -> int:
        assert self._aside is not None and self._copies is not None
        if update is not None:
            dispatch.sweep_each(update, self._copies)
        dispatch.sweep_each(new, self._aside)
        return self._bytes() * (1 if update is None else 2)

    def _update(self, update: Sweep) -> None:
        aside = None if self.settled is None else self._aside
        dispatch.sweep_each(update, self._in_place if aside is None else aside)

    def _take_back(self) -> None:
        if self._aside is not None and self._aside.outs:
            torch._foreach_copy_(list(self._aside.outs), list(self._aside.sources))
