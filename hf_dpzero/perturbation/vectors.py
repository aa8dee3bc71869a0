"""Sums and inner products of directions over a run of coordinates, on a device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dpzero.perturbation.directions import LANES, DirectionStream
from hf_dpzero.perturbation.kernels import dispatch

_CHUNK = 1 << 19  # coordinates of all directions together, at a time


def combination(
    streams: Sequence[DirectionStream],
    coefficients: Sequence[float],
    start: int,
    count: int,
    device: torch.device,
) -> Tensor:
    """Coordinates start .. start+count of sum_k c_k u_k (k = 1 at least), float32 [count]."""
    terms = (
        raw(stream, start, count, device).mul_(c * stream.scale)
        for stream, c in zip(streams, coefficients, strict=True)
    )
    return functools.reduce(Tensor.add_, terms)


def raw(stream: DirectionStream, start: int, count: int, device: torch.device) -> Tensor:
    """Coordinates start .. start+count before the stream's scale, float32 [count], exact."""
    gaussian = stream.distribution != "rademacher"
    return dispatch.coordinates(stream.key, gaussian, start, count, device)


def inner_products(
    streams: Sequence[DirectionStream], offset: int, size: int, device: torch.device
) -> Tensor:
    """<u_k, u_l> of the raw coordinates offset .. offset+size, float64 [K, K] on the CPU.

    A few MB at a time. Exact for signs: sums of fewer than 2^24 of them are, in float32.
    """
    total = torch.zeros(len(streams), len(streams), dtype=torch.float64, device=device)
    width = max(_CHUNK // len(streams) // LANES, 1) * LANES
    for start in range(0, size, width):
        count = min(width, size - start)
        u = torch.stack([raw(stream, offset + start, count, device) for stream in streams])
        if streams[0].distribution != "rademacher":
            u = u.double()
        total += u @ u.T
    return total.cpu()
