"""A direction as one vector, for small problems."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dpzero.perturbation.directions import Direction, DirectionStream


def direction_vector(
    direction: Direction,
    distribution: str,
    layout: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[d], scaled."""
    stream = DirectionStream(direction, distribution, layout)
    parts = [stream.raw(offset, size) for offset, size in layout]
    return torch.cat(parts).to(dtype) * stream.scale
