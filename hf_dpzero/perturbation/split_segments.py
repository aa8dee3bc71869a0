"""Parts of float32 tensors that lie on several processes, together in one segment.

Parts stay where FSDP gathers them from, so they cannot be moved next to each other as small tensors are.
What is computed for each tensor (its grid, amounts, dithers) is computed for all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation.directions import DITHER_STEP, DirectionStream, dither
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.kernels.torch_reference import stochastically_rounded
from hf_dpzero.perturbation.segments import Change, GridSegment


class GridParts(GridSegment):
    """One part of each of several float32 tensors.

    Args:
      parts: of each tensor, what lies here; maybe empty.
      offsets: index of each tensor's first element, in the directions' index space.
      firsts: index of each part's first element in its tensor.
      numbers: each tensor's place among the space's tensors.
      agree: a number of this process -> the largest of all.
    """

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
        """The part of the m-th tensor, one row."""
        return self.flats[m]

    def follow_(self, tensors: Sequence[Tensor]) -> None:
        """Works on other memory, which holds the same parts."""
        self.flats = [tensor.detach().view(-1) for tensor in tensors]
        self.flat = self.flats[0]

    def _shifted(self, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return words + (self.firsts * np.uint64(DITHER_STEP)).astype(np.uint32)

    def apply_(self, changes: Sequence[Change]) -> int:
        """Makes the changes in place; returns the bytes of parameters read and written."""
        keys = np.stack([change.stream.key for change in changes])
        if changes[0].stream.distribution == "rademacher":
            amounts = self._amounts(changes).astype(np.float32)
            for m, (flat, place) in enumerate(zip(self.flats, self.places, strict=True)):
                if flat.numel():
                    dispatch.add_signs(flat, flat, place, keys, amounts[:, m : m + 1])
        else:
            rates, spacing, dithers = self._in_grid_steps(changes, slice(None))
            for m, (flat, place) in enumerate(zip(self.flats, self.places, strict=True)):
                if flat.numel():
                    one = slice(m, m + 1)
                    new, old, update = (rate[:, one] for rate in rates)
                    dispatch.add_normals(
                        flat, flat, place, keys, new, old, update, spacing[one], dithers[:, one]
                    )
        return sum(2 * flat.nbytes for flat in self.flats)

    def decay_(self, decay: float, stream: DirectionStream, decayed: NDArray[np.bool_]) -> None:
        """`GridSegment.decay_`.

        Args:
          decay, stream, decayed: as there.
        """
        words = self._shifted(stream.tensor_words(self.numbers)[3])
        rate = torch.tensor([-decay], device=self.flat.device)
        for m in np.flatnonzero(decayed).tolist():
            spacing = torch.tensor([self.spacing[m]], dtype=torch.float32, device=rate.device)
            for start, stop in self._chunks(self.sizes[m]):
                values = self.flats[m][start:stop]
                index = torch.arange(start, stop, device=rate.device)
                steps = stochastically_rounded(
                    values * rate / spacing, dither(int(words[m]), index)
                )
                values += steps * spacing
