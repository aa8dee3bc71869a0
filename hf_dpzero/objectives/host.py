"""Batches on a device beside what they were sent from: a loss asks about its masks and labels there.

A question to a GPU ("is anything padded?", "which tokens are labelled?") makes the host wait for all
that was launched before. Batches come from the host, so that is where they are asked.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

_LARGE = 1 << 24  # bytes of a tensor (images, sounds) that a device does not keep for the next pass
# A copy does not keep what it was sent from, which keeps the copy.
_host: MutableMapping[Tensor, Callable[[], Tensor | None]] = WeakTensorKeyDictionary()
_kept: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the host on a device, without waiting; the same copy while `tensor` lives."""
    if tensor.device == device or tensor.device.type != "cpu":
        return tensor.to(device)
    copy = _kept.get(tensor)
    if copy is None or copy.device != device or _written(copy):
        pinned = tensor.pin_memory() if device.type == "cuda" else tensor
        copy = pinned.to(device, non_blocking=True)
        _host[copy] = TensorWeakRef(tensor)
        if tensor.nbytes <= _LARGE:
            _kept[tensor] = copy
    return copy


def on_host(tensor: Tensor) -> Tensor:
    """Returns what a tensor was sent from, or the tensor itself where that is unknown or changed."""
    host = _host[tensor]() if tensor in _host and not _written(tensor) else None
    return tensor if host is None else host


def _written(copy: Tensor) -> bool:
    """Whether somebody, a script's own loss say, changed it in place."""
    return not copy.is_inference() and copy._version > 0


def changed(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns change(tensor), which `on_host` knows wherever it knows the tensor."""
    new, host = change(tensor), on_host(tensor)
    if host is not tensor:
        own = change(host)
        _host[new] = lambda: own
    return new
