"""Where trainable tensors lie: in memory, next to each other, and in the directions' index space."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dpzero.perturbation.directions import LANES

_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
Named = Sequence[tuple[str, Tensor]]


@torch.no_grad()
def gathered(tensors: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """One flat tensor that the tensors are views of from now on."""
    if len(tensors) == 1:
        if not tensors[0].is_contiguous():
            tensors[0].data = tensors[0].data.contiguous()
        return tensors[0].detach().view(-1)
    flat = tensors[0].new_zeros(starts[-1] + tensors[-1].numel(), requires_grad=False)
    for start, tensor in zip(starts, tensors, strict=True):
        place = flat[start : start + tensor.numel()]
        place.copy_(tensor.detach().reshape(-1))
        tensor.data = place.view(tensor.shape)
    return flat


def aligned_offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor starts in the index space: multiples of LANES, in order."""
    offsets, position = [], 0
    for tensor in tensors:
        offsets.append(position)
        position += -(-tensor.numel() // LANES) * LANES
    return offsets


def check_trainable(named: Named) -> None:
    """Raises ValueError for what cannot be perturbed.

    Nothing trainable, an unsupported dtype, meta tensors, memory shared without being tied.
    """
    if not named:
        raise ValueError("no parameter is trainable: set requires_grad or loosen `trainable`.")
    for name, tensor in named:
        _check_supported(name, tensor)
    _refuse_shared_memory(named)


def _check_supported(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: load its weights before training.")
    if tensor.dtype not in _SUPPORTED:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}, which cannot be perturbed exactly: load the model "
            "in float32, bfloat16 or float16, or train float32 adapters on top of it."
        )


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to past its last, whatever its strides."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _refuse_shared_memory(named: Named) -> None:
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + _extent(t), name) for name, t in named if t.numel()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(
                f"{first} and {second} share memory without being one tied parameter: "
                "freeze one of them or clone it."
            )


def has_plain_storage(tensor: Any) -> bool:
    """Whether `tensor` is an ordinary strided tensor whose memory can be looked at."""
    return (
        type(tensor.data) is Tensor
        and tensor.device.type != "meta"
        and tensor.layout == torch.strided
    )
