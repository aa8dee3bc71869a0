"""Digests of tensors: what names a model in public, and what notices that bytes were changed."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.perturbation.sharding import is_sharded, whole
from hf_dpzero.perturbation.trainable import has_plain_storage

_CHUNK = 1 << 24  # bytes on their way to the CPU, for each thread
_THREADS = min(8, os.cpu_count() or 1)
_SMALL = 1 << 20  # bytes that take no longer than handing them to a thread


def digest_tensors(
    named_tensors: Iterable[tuple[str, Tensor]], known: Mapping[str, str] | None = None
) -> str:
    """SHA-256 (hex) over name, dtype, shape and the SHA-256 of the bytes of every tensor, in order.

    Args:
      named_tensors: perhaps read as they are asked for; a few are held at a time.
      known: `checksums` of some of them, which are not read again.
    """
    digest = hashlib.sha256()
    for name, tensor, bytes_ in _each(named_tensors, known or {}):
        name = name.replace("\\", "\\\\").replace(
            "|", "\\|"
        )  # so that none reads as several tensors
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{bytes_}|".encode())
    return digest.hexdigest()


def _each(
    named_tensors: Iterable[tuple[str, Tensor]], known: Mapping[str, str]
) -> Iterator[tuple[str, Tensor, str]]:
    """Tensors with the SHA-256 of their bytes, in order; hashlib works outside Python's lock."""
    found: Callable[[], str]
    waiting: deque[tuple[str, Tensor, Callable[[], str]]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, tensor in named_tensors:
            if name in known:
                found = functools.partial(known.__getitem__, name)
            elif is_sharded(tensor) or tensor.nbytes < _SMALL:  # all processes gather in one order
                found = functools.partial(str, _checksum(tensor))
            else:
                found = pool.submit(_checksum, tensor).result
            waiting.append((name, tensor, found))
            if len(waiting) > 2 * _THREADS:
                name, tensor, found = waiting.popleft()
                yield name, tensor, found()
        for name, tensor, found in waiting:
            yield name, tensor, found()


@torch.no_grad()
def _checksum(tensor: Tensor) -> str:
    """SHA-256 (hex) of the bytes; in chunks: one on an accelerator is never on the CPU as a whole."""
    content, digest = (
        whole(tensor).detach().contiguous().view(-1).view(torch.uint8),
        hashlib.sha256(),
    )
    for start in range(0, content.numel(), _CHUNK):
        digest.update(content[start : start + _CHUNK].cpu().numpy().data)
    return digest.hexdigest()


def digest_model(model: nn.Module, known: Mapping[str, str] | None = None) -> str:
    """SHA-256 (hex) over every parameter of `model`, frozen ones included, tied ones once.

    Quantised layers also count with what else makes their weights: the scales of bitsandbytes, and
    buffers (GPTQ, AWQ and BitNet keep even their integers there). Two bases may differ in these alone.
    Models that are not quantised are named by their parameters alone. For `known` see `digest_tensors`.
    """
    scales, buffers = _quantisation_scales(model), _quantised_buffers(model)
    return digest_tensors([*model.named_parameters(), *scales, *buffers], known)


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
    plain = ((n, t) for n, t in named_tensors if is_sharded(t) or has_plain_storage(t))
    return {name: found for name, _, found in _each(plain, {})}


def state_digest(model: nn.Module, known: Mapping[str, str] | None = None) -> str:
    """SHA-256 (hex) over parameters and buffers: what a run may have changed; see `digest_tensors`."""
    return digest_tensors([*model.named_parameters(), *model.named_buffers()], known)
