"""Runs of bfloat16 and float16 tensors: rounded stochastically where they move, restored exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation import exact_grid
from hf_dpzero.perturbation.directions import DirectionStream
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.kernels.dispatch import Pieces, Terms
from hf_dpzero.perturbation.kernels.torch_reference import half_precision
from hf_dpzero.perturbation.segments import Change, Segment


class RoundedSegment(Segment):
    """bfloat16 or float16 tensors: perturbed out of place, restored from what was put aside.

    These grids are too coarse to perturb on, so theta + sum a_k u_k is computed in float32 from the
    settled values and rounded stochastically, with public dithers: small perturbations and updates
    are not lost but right on average. While a perturbation stands in the tensors themselves, a copy
    of the settled values is held; `write_` needs none.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.settled: Tensor | None = None

    def snap_(self, reach: float) -> None:
        """Nothing to put on a grid; refuses weights that are not finite."""
        exact_grid.exponent_for(self.agree(exact_grid.largest_magnitude(self.flat)))
        self.snapped = True

    def apply_(self, changes: Sequence[Change]) -> int:
        """Update, then perturb anew from the settled values; returns the bytes read and written."""
        updates, standing = [c for c in changes if c.update], [c for c in changes if c.new]
        a_pass = 2 * self.flat.nbytes
        update = self._update(updates) if updates else None
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
        """`GridSegment.write_`.

        Args:
          m, changes, source, out, pieces: as there.
        """
        words = changes[0].stream.perturbation_dither(self.numbers[m : m + 1])
        offset, terms = self.offset + self.starts[m], self._terms(changes, "new", words)
        dispatch.add_rounded(out, source, offset, *terms, None, pieces)

    def _update(self, changes: Sequence[Change]) -> Terms:
        words = changes[0].stream.update_dither(self.numbers, changes[0].age)
        return self._terms(changes, "update", words)

    def _terms(self, changes: Sequence[Change], part: str, words: NDArray[np.uint32]) -> Terms:
        """What one part of the changes adds, rounded with dithers that start at the tensors' words."""
        keys = np.array([change.stream.key for change in changes])
        coefficients = [getattr(change, part) * change.stream.scale for change in changes]
        gaussian = changes[0].stream.distribution != "rademacher"
        return Terms(keys, gaussian, np.array(coefficients, np.float32), self._shifted(words))

    def decay_(self, decay: float, stream: DirectionStream, decayed: NDArray[np.bool_]) -> None:
        """`GridSegment.decay_`.

        Args:
          decay, stream, decayed: as there.
        """
        words = stream.tensor_words(self.numbers)[3]
        for start, stop in self._chunks():
            values = self.flat[start:stop].float()
            rate = self._by_element(np.where(decayed, decay, 0.0).astype(np.float32), start, stop)
            smaller = values - values * rate
            rounded = half_precision(smaller, self._dithers(words, start, stop), self.flat.dtype)
            self.flat[start:stop] = rounded

    def add_dense_(
        self, m: int, start: int, values: Tensor, stream: DirectionStream, reach: float
    ) -> None:
        """`GridSegment.add_dense_`.

        Args:
          m, start, values, stream: as there.
          reach: not used.
        """
        place = slice(self.starts[m] + start, self.starts[m] + start + values.numel())
        dithers = self._dithers(stream.tensor_words(self.numbers)[2], place.start, place.stop)
        summed = self.flat[place].float() + values
        self.flat[place] = half_precision(summed, dithers, self.flat.dtype)
