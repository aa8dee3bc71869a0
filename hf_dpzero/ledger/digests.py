"""Digests of tensors: what names a model in public, and what notices that bytes were changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.perturbation.sharding import is_sharded, whole
from hf_dpzero.perturbation.trainable import has_plain_storage

_CHUNK = 1 << 24  # bytes on their way to the CPU, for each thread
_THREADS = 4


@torch.no_grad()
def digest_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every tensor, in order."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        _add_bytes(digest, tensor)
    return digest.hexdigest()


def _add_bytes(digest: hashlib._Hash, tensor: Tensor) -> None:
    content = whole(tensor).detach().contiguous().view(-1).view(torch.uint8)
    # In chunks: a tensor on an accelerator is never on the CPU as a whole.
    for start in range(0, content.numel(), _CHUNK):
        digest.update(content[start : start + _CHUNK].cpu().numpy().data)


def digest_model(model: nn.Module) -> str:
    """SHA-256 (hex) over every parameter of `model`, frozen ones included, tied ones once.

    Quantised layers also count with what else makes their weights: the scales of bitsandbytes, and
    buffers (GPTQ, AWQ and BitNet keep even their integers there). Two bases may differ in these alone.
    Models that are not quantised are named by their parameters alone.
    """
    scales, buffers = _quantisation_scales(model), _quantised_buffers(model)
    return digest_tensors([*model.named_parameters(), *scales, *buffers])


def _quantisation_scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What turns the integers of `Params4bit` and `Int8Params` into weights, by name."""
    for name, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        if type(weight).__name__ not in ("Params4bit", "Int8Params"):
            continue
        state, rows = getattr(weight, "quant_state", None), getattr(weight, "SCB", None)
        if rows is None:
            rows = getattr(getattr(module, "state", None), "SCB", None)
        scales = {
            "absmax": getattr(state, "absmax", None),
            "offset": getattr(state, "offset", None),
            "nested_absmax": getattr(getattr(state, "state2", None), "absmax", None),
            "rows": rows,
        }
        yield from ((f"{name}.{key}", t) for key, t in scales.items() if isinstance(t, Tensor))


def _quantised_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of layers that hold packed weights; not vectors that are scratch, never saved."""
    for name, module in model.named_modules():
        own = {key: t for key, t in module._buffers.items() if t is not None}
        if any(map(is_packed, (*module.parameters(recurse=False), *own.values()))):
            for key, tensor in own.items():
                if tensor.dim() > 1 or key not in module._non_persistent_buffers_set:
                    yield f"{name}.{key}", tensor


def is_packed(tensor: Tensor) -> bool:
    """True for what looks like quantised weights: a matrix of narrow integers or float8.

    Index tables (int64) and masks (bool) do not.
    """
    if tensor.dim() < 2 or tensor.is_complex() or tensor.dtype in (torch.int64, torch.bool):
        return False
    return not tensor.is_floating_point() or tensor.element_size() == 1


def checksums(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """SHA-256 (hex) of every tensor's bytes, by name; a few tensors at a time, in chunks of 16 MiB.

    Tensors without plain storage (see `perturbation.trainable.has_plain_storage`) are left out. Those
    that are split over processes are gathered one by one, on all processes.
    """
    every = dict(named_tensors)
    plain = {name: tensor for name, tensor in every.items() if has_plain_storage(tensor)}
    split = {name: _checksum(tensor) for name, tensor in every.items() if is_sharded(tensor)}
    with ThreadPoolExecutor(_THREADS) as pool:  # hashlib works outside the interpreter's lock
        return split | dict(zip(plain, pool.map(_checksum, plain.values()), strict=True))


def _checksum(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    _add_bytes(digest, tensor)
    return digest.hexdigest()


def state_digest(model: nn.Module) -> str:
    """SHA-256 (hex) over parameters and buffers: what a run may have changed."""
    return digest_tensors([*model.named_parameters(), *model.named_buffers()])
