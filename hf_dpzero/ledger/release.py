"""What one step makes public."""

from __future__ import annotations

from typing import NamedTuple


class Release(NamedTuple):
    """What one step made public.

    Attributes:
      step: from 0.
      values: the K noised means, each a float32 number, and what else the step released (the share of
        unclipped examples that an adaptive clip follows); no means for a mechanism that cannot be
        replayed (DPGD-0th releases a d-vector, which only the weights hold).
      learning_rate: of this step.
    """

    step: int
    values: tuple[float, ...]
    learning_rate: float
