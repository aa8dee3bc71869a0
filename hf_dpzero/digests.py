"""Digests of tensors: what names a model in public, and what notices that bytes were changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

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
    """SHA-256 (hex) over every parameter of `model`, frozen ones included, tied ones once."""
    return digest_tensors(model.named_parameters())


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
