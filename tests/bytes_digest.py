"""What golden files name weights by, whatever the package does."""

from __future__ import annotations

import hashlib

import torch


def bytes_digest(model: torch.nn.Module) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every parameter, in order."""
    digest = hashlib.sha256()
    for name, tensor in model.named_parameters():
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
