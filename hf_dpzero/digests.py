"""Digests of tensors: what names a model in public, and what notices that bytes were changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.guard import has_plain_storage

_PART = 1 << 19  # elements on their way to the CPU
_CHUNK = 1 << 24  # bytes on their way to the CPU, for each thread
_THREADS = 4


@torch.no_grad()
def digest_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every tensor, in order."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().contiguous().view(-1)
        for start in range(0, flat.numel(), _PART):
            part = flat[start : start + _PART].cpu().view(torch.uint8)
            digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def digest_model(model: nn.Module) -> str:
    """SHA-256 (hex) over every parameter of `model`, frozen ones included, tied ones once.

    Of weights that bitsandbytes has quantised, the scales as well: two bases may differ in these alone.
    """
    return digest_tensors([*model.named_parameters(), *_quantisation_scales(model)])


def _quantisation_scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What turns the integers of `Params4bit` and `Int8Params` into weights, by name."""
    for name, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        if type(weight).__name__ not in ("Params4bit", "Int8Params"):
            continue
        state, rows = getattr(weight, "quant_state", None), getattr(weight, "SCB", None)
        if rows is None:
            rows = getattr(getattr(module, "state", None), "SCB", None)
        found = {
            "absmax": getattr(state, "absmax", None),
            "offset": getattr(state, "offset", None),
            "nested_absmax": getattr(getattr(state, "state2", None), "absmax", None),
            "rows": rows,
        }
        yield from ((f"{name}.{key}", t) for key, t in found.items() if isinstance(t, Tensor))


def checksums(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """SHA-256 (hex) of every tensor's bytes in the order of its indices, by name.

    A few tensors at a time, in chunks of 16 MiB. Tensors without plain storage (see
    `guard.has_plain_storage`) are left out.
    """
    named = [(name, tensor) for name, tensor in named_tensors if has_plain_storage(tensor)]
    with ThreadPoolExecutor(_THREADS) as pool:  # hashlib works outside the interpreter's lock
        sums = pool.map(_checksum, (tensor.detach() for _, tensor in named))
        return {name: value for (name, _), value in zip(named, sums, strict=True)}


def _checksum(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    content = tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, content.numel(), _CHUNK):
        digest.update(content[start : start + _CHUNK].cpu().numpy().data)
    return digest.hexdigest()
