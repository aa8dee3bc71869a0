"""Rows that are one unit of privacy together: a person, say.

The sampler draws units (n, q and B count them); each gives at most `most` of its rows to a step, which
the secret key chooses. The mean of what these add is clipped once (`unit_means`), so a unit moves a
step's sum by at most one clip radius, however many rows it has.

Adding a unit adds up to m rows, each of which may put one other row in another place (`placement`). A
row that moves by 2^-8 radii moves the mean of its unit by no more. So the sum moves by at most
1 + m 2^-8 radii, and the radius is C / (1 + m 2^-8).

Which process computes a unit is a keyed hash of its number, like the groups of averaged clipping:
a unit's rows stay together, and no other unit decides where they are. Which rows are drawn need not be
uniform for the guarantee: the clip bounds whatever the mean is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_dpzero.privacy.mechanisms.base import MOST_ROWS as MOST


@dataclass(frozen=True)
class Units:
    """The rows of each unit.

    Attributes:
      rows: all rows, those of one unit beside each other, int64 [rows].
      starts: where each unit's begin, and the end of the last, int64 [n + 1].
      most: m, rows of a unit in a step at most.
    """

    rows: np.ndarray
    starts: np.ndarray
    most: int

    @classmethod
    def of(cls, values: Sequence[Hashable], most: int) -> Units:
        """Makes units of the rows with the same value; numbered in the order in which they appear.

        >>> Units.of(["ann", "bob", "ann"], most=4).rows.tolist()
        [0, 2, 1]
        """
        numbers: dict[Hashable, int] = {}
        unit = np.array([numbers.setdefault(v, len(numbers)) for v in values], dtype=np.int64)
        sizes = np.bincount(unit, minlength=len(numbers))
        return cls(np.argsort(unit, kind="stable"), np.cumsum([0, *sizes]), most)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def drawn(
        self, units: Sequence[int] | np.ndarray, step: int, key: bytes
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws a step's rows of some units, a pure function of the arguments.

        Args:
          units: numbers, [B].
          step: in [0, 2^64).
          key: secret: the sampler's.

        Returns:
          (rows, a code of each), int64: `MOST` times the unit's number, and its place in the unit.
        """
        parts = [self._of_unit(int(unit), step, key) for unit in units]
        codes = [int(unit) * MOST + np.arange(len(p)) for unit, p in zip(units, parts, strict=True)]
        empty = [np.zeros(0, dtype=np.int64)]
        return np.concatenate(parts + empty), np.concatenate(codes + empty)

    def _of_unit(self, unit: int, step: int, key: bytes) -> np.ndarray:
        rows = self.rows[self.starts[unit] : self.starts[unit + 1]]
        if len(rows) <= self.most:
            return rows
        label = _label(b"rows", unit, key) + step.to_bytes(8, "little")
        words = np.frombuffer(hashlib.shake_256(label).digest(8 * len(rows)), dtype="<u8")
        return np.sort(rows[np.argsort(words)[: self.most]])

    def share_of(self, units: np.ndarray, shares: int, key: bytes) -> np.ndarray:
        """Returns which of so many shares computes each unit: a function of its number and the key."""
        if shares == 1:
            return np.zeros(len(units), dtype=np.int64)
        words = {
            unit: int.from_bytes(hashlib.shake_256(_label(b"share", unit, key)).digest(8), "little")
            for unit in set(units.tolist())
        }
        return np.array([words[unit] % shares for unit in units.tolist()], dtype=np.int64)


def _label(domain: bytes, unit: int, key: bytes) -> bytes:
    return b"hf_dpzero.units." + domain + key + unit.to_bytes(8, "little")


def unit_means(x: Tensor, codes: Sequence[int]) -> Tensor:
    """Returns the mean of each unit's rows.

    A function of the unit's own rows: they are added in the order of their places in it.

    Args:
      x: finite differences [R, K]; a row that holds NaN or infinity is left out.
      codes: of each row, as `Units.drawn` makes them, R of them.

    Returns:
      float64 [U, K] on the CPU, by number of unit; none of a unit without a finite row.
    """
    order = np.argsort(codes, kind="stable")
    rows, unit = x.detach().cpu().double().numpy()[order], np.asarray(codes)[order] // MOST
    finite = np.isfinite(rows).all(axis=1)
    rows, unit = rows[finite], unit[finite]
    if not len(rows):
        return x.new_zeros((0, x.shape[1]), dtype=torch.float64, device="cpu")
    _, starts, counts = np.unique(unit, return_index=True, return_counts=True)
    shares = rows / np.repeat(counts, counts)[:, None]
    return torch.from_numpy(np.add.reduceat(shares, starts, axis=0))
