"""Fixed groups of examples, drawn by a secret key, and the averaged clipping of finite differences.

Averaged clipping (AClip of Algorithm 1 in "averaged clipping", one group; with k groups this project's
generalisation) clips means of groups instead of examples. `gradient.py` has the proof that the sum of k
clipped means has sensitivity 2C under every relation, and why groups follow from a keyed hash of an
example's index. It is the same proof for vectors of K finite differences.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hf_dpzero.privacy.described import check_count
from hf_dpzero.privacy.discretization import finite_rows, on_grid
from hf_dpzero.privacy.mechanisms.scalar import ScalarMechanism

if TYPE_CHECKING:
    from torch import Tensor

KEY_BYTES = 32

AVERAGED_CAVEAT = (
    "clipping='averaged' moves a group's mean by up to 2C, so the accounting uses half of the stated "
    "noise multiplier"
)
"""What the noise multiplier of averaged clipping means; for the report."""


class KeyedGroups:
    """Gives each example one of `clip_groups` groups.

    Attributes:
      clip_groups: k >= 1.
    """

    clip_groups: int = 1

    def group_of(self, indices: Sequence[int] | np.ndarray, key: bytes) -> np.ndarray:
        """Returns the group of each example, in 0..k-1: a function of its index and the key.

        Args:
          indices: positions in the data set, [B].
          key: secret (the run's sampler key); see the module's docstring.

        Returns:
          int64 [B].

        Raises:
          ValueError: a key that is not 32 bytes long.

        >>> KeyedGroups().group_of([3, 5], key=bytes(32)).tolist()
        [0, 0]
        """
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"group key of {len(key)} bytes given; use the run's sampler key, {KEY_BYTES} bytes."
            )
        label = b"hf_dpzero.gradient_groups." + key
        digests = (
            hashlib.shake_256(label + int(i).to_bytes(8, "little")).digest(8) for i in indices
        )
        words = [int.from_bytes(digest, "little") for digest in digests]
        return np.array([word % self.clip_groups for word in words], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class AveragedScalarMechanism(ScalarMechanism, KeyedGroups):
    """DPZero with averaged clipping: the K-vectors of a group are averaged, and the mean is clipped.

    Guarantee: one example moves `clip_sum` by at most 2 C in L2 norm, whatever its finite differences
    are and whatever those of its group: the clipped mean of its group has norm at most `radius` before
    and after, and a displaced row moves the mean of its own group by 2^-8 radii at most (`gradient.py`).
    There is no gain from the size of a group. An ablation: `clipping: fixed` is better in all
    that this project measured.

    Those of `ScalarMechanism`, Gaussian, and:

    Attributes:
      clip_groups: k; the release is the noised sum of the clipped means over k.
    """

    clip_groups: int = 1

    name: ClassVar[str] = "dpzero-averaged"
    clipping: ClassVar[str] = "averaged"
    sensitivity_add_remove: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("clip_groups", self.clip_groups)
        if self.distribution != "gaussian":
            raise ValueError(
                f"distribution={self.distribution!r} with averaged clipping: use 'gaussian'."
            )

    @property
    def divisor(self) -> float:
        return float(self.clip_groups)

    @property
    def caveats(self) -> tuple[str, ...]:
        return (*super().caveats, AVERAGED_CAVEAT)

    def clip_sum(self, x: Tensor, groups: Sequence[int] = ()) -> list[int]:
        """Averages the rows of each group, clips each mean to norm `radius` and sums, exactly.

        Args:
          x: [B, K] finite differences. B = 0 gives zeros. A row that holds NaN or infinity is left
            out.
          groups: of each row, B of them; all examples of a group must be here.

        Returns:
          K integers, in units of `granularity`.

        Raises:
          ValueError: not one group for each row.

        >>> import torch
        >>> m = AveragedScalarMechanism(clip=4.0, noise_multiplier=1.0, expected_batch_size=3)
        >>> [n * m.granularity for n in m.clip_sum(torch.tensor([[6.0], [-9.0], [6.0]]), [0, 0, 0])]
        [1.0]
        """
        rows, finite = finite_rows(x, self.num_directions)
        if len(groups) != len(rows):
            raise ValueError(f"{len(groups)} groups for {len(rows)} rows: give one for each row.")
        rows, of = rows[finite], np.asarray(groups)[finite]
        if not len(rows):
            return [0] * self.num_directions
        parts = [rows[of == group] for group in np.unique(of)]
        # Correctly rounded sums: in one of float64 additions the order of a group's rows, which follows
        # from who else was drawn, would decide what is left of large differences that cancel.
        means = np.array([[math.fsum(column) for column in (part / len(part)).T] for part in parts])
        return [int(n) for n in on_grid(means, self.radius, self.granularity, 2).sum(axis=0)]
