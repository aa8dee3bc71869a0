"""Runs of trainable float32 tensors: how they are perturbed, restored and updated exactly.

A segment is one flat tensor that holds one large trainable tensor, or a run of small ones that were
moved next to each other so that their number does not matter to the cost. Element e of a segment has
index `offset + e` in the directions' index space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation import exact_grid
from hf_dpzero.perturbation.directions import (
    DITHER_STEP,
    LANES,
    DirectionStream,
    dither,
    draw_words_together,
)
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.kernels.dispatch import Members, Pieces
from hf_dpzero.perturbation.kernels.torch_reference import stochastically_rounded
from hf_dpzero.perturbation.trainable import gathered

CHUNK = 1 << 19  # coordinates worked on at a time by torch operations
_SLICE = 1 << 16  # the same, where a dozen temporaries of that size are made
_SLACK = 1.0 - 2.0**-10  # of a grid's range: room for the rounding of perturbations
Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]


class Change(NamedTuple):
    """What happens along one direction: its coefficient goes old -> new, theta gains `update`.

    `age` is how many steps ago the direction was released: each update along it rounds anew.
    """

    stream: DirectionStream
    old: float
    new: float
    update: float
    age: int = 0


class Segment:
    """What `GridSegment` and `RoundedSegment` share.

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
        self.snapped = False

    def is_part(self, first: int, agree: Callable[[float], float]) -> None:
        """Makes this the part of one tensor that begins at element `first`; others hold the rest.

        Args:
          first: any.
          agree: called by all holders of the tensor at the same time.
        """
        assert self.members is None, "a part is of one tensor"
        self.first, self.agree, self.offset = first, agree, self.offset + first

    def _shifted(self, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The dithers of the first elements here, from those of the tensors' first elements."""
        return words + np.uint32(self.first * DITHER_STEP % 2**32) if self.first else words

    def member(self, m: int) -> Tensor:
        """The values of the segment's m-th tensor, one row."""
        return self.flat[self.starts[m] : self.starts[m] + self.sizes[m]]

    def _by_element(self, values: NDArray[Any], start: int, stop: int) -> Tensor:
        """values [M], one a member, for each of the elements start .. stop (or [1] if M is 1)."""
        chosen = values
        if self.members is not None:
            rows = self.members.rows[start // LANES : -(-stop // LANES)]
            chosen = np.repeat(values[rows], LANES)[: stop - start]
        return torch.from_numpy(chosen).to(self.flat.device)

    def _dithers(self, word: NDArray[np.uint32], start: int, stop: int) -> Tensor:
        """The dither of the elements start .. stop, int64, from each member's starting word."""
        index = torch.arange(start, stop, device=self.flat.device)
        starts = self._by_element(np.array(self.starts, np.int64), start, stop)
        here = index - starts + self.first
        return dither(self._by_element(word.astype(np.int64), start, stop), here)

    def follow_(self, tensors: Sequence[Tensor]) -> None:
        """Works on other memory, of tensors that hold the same values, from now on."""
        self.flat = gathered(tensors, self.starts)

    def _chunks(self, size: int | None = None) -> list[tuple[int, int]]:
        """(start, stop) of the parts that torch operations work on, of so many elements or of all."""
        size = self.flat.numel() if size is None else size
        return [(start, min(start + _SLICE, size)) for start in range(0, size, _SLICE)]


class GridSegment(Segment):
    """float32 tensors on their grids: changes are added to them, exactly.

    `bounds` are upper bounds on their magnitudes computed from public numbers alone; when the next
    update could pass a grid's range, that tensor is measured and, if need be, moved to a coarser
    grid. Both depend only on theta and the updates, so a replay does the same at the same step.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.exponents = np.zeros(len(self.sizes), np.int64)
        self.bounds = np.zeros(len(self.sizes))

    @property
    def spacing(self) -> Doubles:
        """The grid spacing of each member, float64 [M], powers of two."""
        return exact_grid.quantum(self.exponents)

    def snap_(self, reach: float) -> None:
        """Puts every member on its grid."""
        for m in range(len(self.sizes)):
            self.bounds[m] = self.agree(exact_grid.largest_magnitude(self.member(m)))
            self.exponents[m] = exact_grid.exponent_for(self.bounds[m] + reach)
            self._round_(m)
        self.snapped = True

    def _round_(self, m: int) -> None:
        spacing = float(exact_grid.quantum(self.exponents[m]))
        exact_grid.snap_(self.member(m), spacing)
        self.bounds[m] += spacing

    def state(self, m: int) -> dict[str, Any]:
        """What `load_` needs, JSON-safe."""
        return {"exponent": int(self.exponents[m]), "bound": float(self.bounds[m])}

    def load_(self, m: int, state: dict[str, Any]) -> None:
        """Restores a saved state.

        Args:
          m: which member.
          state: what `state` returned for it.

        Raises:
          ValueError: the member's values are not on that grid.
        """
        self.exponents[m], self.bounds[m] = state["exponent"], state["bound"]
        values, spacing = self.member(m), float(exact_grid.quantum(self.exponents[m]))
        on_grid = (
            torch.equal(exact_grid.snap_(part.clone(), spacing), part)
            for part in values.split(CHUNK)
        )
        wrong = not all(on_grid) or exact_grid.largest_magnitude(values) > self.bounds[m]
        if self.agree(float(wrong)):
            raise ValueError(
                "holds values that are not on the grid of the saved state: load the very weights that "
                "were saved with it, in float32."
            )

    def short(self, growth: float, reach: float, roundings: int) -> NDArray[np.bool_]:
        """Which members could pass their grid's range after growing and on a perturbation.

        Args:
          growth, reach, roundings: as for `make_room_`.

        Returns:
          bool [M].
        """
        grown = self.bounds + self._grown(growth, roundings)
        return grown + reach > np.ldexp(1.0, self.exponents) * _SLACK

    def _grown(self, growth: float, roundings: int) -> Doubles:
        """What an update adds to a coordinate at most, float64 [M]."""
        return growth + roundings * self.spacing

    def make_room_(self, growth: float, reach: float, roundings: int) -> None:
        """Ensures that theta, settled where it is short, may grow and be perturbed within range.

        Args:
          growth: sum of the |c_k u_k[i]| that the update may add to a coordinate.
          reach: what perturbations may add beyond that, at any moment.
          roundings: terms of the update, each of which may round by up to one grid step.
        """
        for m in np.flatnonzero(self.short(growth, reach, roundings)):
            self._regrid_(int(m), growth, reach)
        self.bounds += self._grown(growth, roundings)

    def _regrid_(self, m: int, growth: float, reach: float) -> None:
        self.bounds[m] = self.agree(exact_grid.largest_magnitude(self.member(m)))
        needed = exact_grid.exponent_for(self.bounds[m] + (growth + reach))
        if needed > self.exponents[m]:
            self.exponents[m] = needed
            self._round_(m)

    def apply_(self, changes: Sequence[Change]) -> int:
        """Makes the changes in place; returns the bytes of parameters read and written."""
        self._add(self.flat, self.flat, self.offset, changes, None)
        return 2 * self.flat.numel() * self.flat.element_size()

    def write_(
        self, m: int, changes: Sequence[Change], source: Tensor, out: Tensor, pieces: Pieces
    ) -> None:
        """out = source + the changes.

        Args:
          m: which member.
          changes: their old coefficients and updates are 0.
          source: the member's values, or the pieces of it.
          out: as source.
          pieces: None, or first elements (see `dispatch`).
        """
        self._add(out, source, self.offset + self.starts[m], changes, m, pieces)

    def _add(
        self, out: Tensor, source: Tensor, offset: int, changes: Sequence[Change],
        only: int | None, pieces: Pieces = None,
    ) -> None:  # fmt: skip
        keys = np.stack([change.stream.key for change in changes])
        members = self.members if only is None else None
        which = slice(None) if only is None else slice(only, only + 1)
        if changes[0].stream.distribution == "rademacher":
            amounts = self._amounts(changes)[:, which].astype(np.float32)
            dispatch.add_signs(out, source, offset, keys, amounts, members, pieces)
            return
        (new, old, update), spacing, dithers = self._in_grid_steps(changes, which)
        dispatch.add_normals(
            out, source, offset, keys, new, old, update, spacing, dithers, members, pieces
        )

    def _in_grid_steps(
        self, changes: Sequence[Change], which: slice
    ) -> tuple[list[Floats], Floats, NDArray[np.uint32]]:
        """What `dispatch.add_normals` takes of some members: ([new, old, update], spacing, dithers).

        Coefficients are rounded to float32, then in grid steps, which is exact.
        """
        spacing = self.spacing[which]
        scales = np.array([[c.stream.scale] for c in changes])
        rates = [
            ((np.array([[c[i]] for c in changes]) * scales).astype(np.float32) / spacing).astype(
                np.float32
            )
            for i in (2, 1, 3)
        ]
        numbers = self.numbers[which]
        dithers = [self._shifted(c.stream.update_dither(numbers, c.age)) for c in changes]
        return rates, spacing.astype(np.float32), np.stack(dithers)

    def _amounts(self, changes: Sequence[Change]) -> Doubles:
        """All of a coordinate's change is +-amount, float64 [T, M] on the members' grids.

        A small update's coefficient is rounded stochastically, one rounding for the tensor: as
        unbiased for a coordinate (E[update] = c u) as one of its own, and free.
        """
        spacing = self.spacing
        old, new, update = (np.array([[c[i]] for c in changes]) for i in (1, 2, 3))
        amounts = exact_grid.snapped(new, spacing) - exact_grid.snapped(old, spacing)
        updated = np.flatnonzero(update)
        if updated.size:
            moved = [changes[t] for t in updated.tolist()]
            draw_words_together([change.stream for change in moved])
            uniforms = np.stack([c.stream.coefficient_uniforms(self.numbers, c.age) for c in moved])
            amounts[updated] += exact_grid.snapped_stochastically(
                update[updated], spacing, uniforms
            )
        return amounts

    def write_stack_(self, changes: Sequence[Change], plus: Tensor, minus: Tensor) -> None:
        """Writes perturbed copies of all members.

        Args:
          changes: the K of them.
          plus: [K, n], becomes theta + change k.
          minus: [K, n], becomes theta - change k.
        """
        if changes[0].stream.distribution == "rademacher":
            amounts = self._amounts(changes).astype(np.float32)
            for k, change in enumerate(changes):
                key = change.stream.key[None]
                dispatch.add_signs(
                    plus[k], self.flat, self.offset, key, amounts[k : k + 1], self.members
                )
        else:
            for k, change in enumerate(changes):
                self._add(plus[k], self.flat, self.offset, [change], None)
        torch.sub(self.flat, plus, out=minus).add_(self.flat)  # exact on the grid

    def decay_(self, decay: float, stream: DirectionStream, decayed: NDArray[np.bool_]) -> None:
        """theta <- (1 - decay) theta for some members, rounded stochastically.

        Args:
          decay: in [0, 1].
          stream: its tensor words start the dithers.
          decayed: bool [M], which members.
        """
        words = stream.tensor_words(self.numbers)[3]
        for start, stop in self._chunks():
            values = self.flat[start:stop]
            spacing = self._by_element(self.spacing.astype(np.float32), start, stop)
            rate = self._by_element(np.where(decayed, -decay, 0.0).astype(np.float32), start, stop)
            steps = stochastically_rounded(
                values * rate / spacing, self._dithers(words, start, stop)
            )
            values += steps * spacing

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
        growth = self.agree(exact_grid.largest_magnitude(values))
        if self.short(growth, reach, 1)[m]:
            self._regrid_(m, growth, reach)
        spacing = float(exact_grid.quantum(self.exponents[m]))
        self.bounds[m] += growth + spacing
        place = slice(self.starts[m] + start, self.starts[m] + start + values.numel())
        dithers = self._dithers(stream.tensor_words(self.numbers)[2], place.start, place.stop)
        self.flat[place] += stochastically_rounded(values / spacing, dithers) * spacing
