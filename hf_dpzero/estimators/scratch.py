"""Memory for perturbed copies of the parameters of the modules that are running."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes; a copy is aligned as a fresh tensor is, so that kernels choose alike


class Scratch:
    """Tensors like those of a set, valid while a block runs; the memory is used again afterwards.

    Blocks nest: a level of nesting has one buffer for each device, as large as the largest set that
    has run at that level. Nothing is given back before the object goes.
    """

    def __init__(self) -> None:
        self._levels: dict[torch.device, list[_Level]] = {}
        self._depth: dict[torch.device, int] = {}

    @contextlib.contextmanager
    def like(self, tensors: Mapping[int, Tensor]) -> Iterator[dict[int, Tensor]]:
        """Key -> uninitialised tensor with the shape and dtype of that one of `tensors`.

        Args:
          tensors: at least one, all on one device; the same mapping object finds the same views.
        """
        device = next(iter(tensors.values())).device
        depth = self._depth.get(device, 0)
        self._depth[device] = depth + 1
        try:
            yield self._level(device, depth, tensors).views_for(tensors)
        finally:
            self._depth[device] = depth

    def _level(self, device: torch.device, depth: int, tensors: Mapping[int, Tensor]) -> _Level:
        levels = self._levels.setdefault(device, [])
        if depth < len(levels) and levels[depth].fits(tensors):
            return levels[depth]
        del levels[depth:]  # first, so that the old and the new buffer never coexist
        levels.append(_Level(padded_bytes(tensors), device))
        return levels[depth]

    @property
    def bytes(self) -> int:
        """What is held now."""
        return sum(level.buffer.numel() for levels in self._levels.values() for level in levels)


class _Level:
    """One buffer, and its views for every set of tensors that has used it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._views: dict[int, tuple[Mapping[int, Tensor], dict[int, Tensor]]] = {}

    def fits(self, tensors: Mapping[int, Tensor]) -> bool:
        return id(tensors) in self._views or padded_bytes(tensors) <= self.buffer.numel()

    def views_for(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        if id(tensors) not in self._views:
            self._views[id(tensors)] = tensors, self._carve(tensors)
        return self._views[id(tensors)][1]

    def _carve(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        views, start = {}, 0
        for key, tensor in tensors.items():
            part = self.buffer[start : start + tensor.numel() * tensor.element_size()]
            views[key] = part.view(tensor.dtype).view(tensor.shape)
            start += _padded(tensor)
        return views


def padded_bytes(tensors: Mapping[int, Tensor]) -> int:
    """What the copies of `tensors` take."""
    return sum(map(_padded, tensors.values()))


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
