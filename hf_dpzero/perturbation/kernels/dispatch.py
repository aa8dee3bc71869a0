"""Adds multiples of directions to a flat tensor, by the fastest kernels for its device.

A `Sweep` says what is added, by one of three functions. It reads an element once, adds its coordinates
of T directions and writes it once, in place or to another tensor. On a CPU they run in `numba_kernels`,
on CUDA in `triton_kernels`, elsewhere in `torch_reference`; the numbers are the same to the last bit.

Common arguments:
  out, source: flat tensors of one shape, dtype and device; may be the same tensor, else disjoint.
  offset: index of element 0 in the directions' index space, a multiple of 32; any number for one tensor
    (M = 1) without pieces, such as a part of a tensor whose rows lie on several processes.
  members: None if the flat tensor is one tensor (M = 1), or where its M small ones lie.
  pieces: None, or int64 [P]: `out` and `source` hold P equal parts of one tensor (rows of an
    embedding), of which these are the first elements, multiples of 32; `offset` is the tensor's. An
    array, or on CUDA a tensor that is there already.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from hf_dpzero.perturbation import directions
from hf_dpzero.perturbation.directions import DITHER_STEP, LANES, NORMAL_UNIT, Places
from hf_dpzero.perturbation.kernels import torch_reference
from hf_dpzero.perturbation.kernels.torch_reference import (
    Members,
    Parts,
    Pieces,
    Sweep,
    Unsigned,
)

_OLDEST_CAPABILITY = (7, 0)  # what Triton's NVIDIA backend has been made to compile for


def sweep(
    added: Sweep, out: Tensor, source: Tensor, offset: int,
    members: Members | None = None, pieces: Pieces = None,
) -> None:  # fmt: skip
    """Makes out = source + what a sweep adds to its M tensors, by the function that it names."""
    function = getattr(kernels_for(out.device), added.name)
    for there, given, at, shift in _whole_rows(out, source, offset):
        function(added.shifted(shift), there, given, at, members, pieces)


def perturb_rounded(
    out: Tensor, settled: Tensor, offset: int, new: Sweep, update: Sweep | None = None,
    members: Members | None = None,
) -> int:  # fmt: skip
    """Makes settled += the update, if any; then out = settled + the new terms, by `add_rounded`.

    Args:
      out, settled: bfloat16 or float16, disjoint; else as above.
      offset, members: see above.
      new, update: what is added, both of one kind; weight decay is in the update only.

    Returns:
      Bytes of `out` and `settled` that are read and written.
    """
    compiled = _cpu_kernels() if out.device.type == "cpu" else None
    if compiled is not None and offset % LANES == 0:
        # One sweep over memory, which writes a large `out` past the caches: what reads it comes after
        # more than they hold.
        compiled.perturb_rounded(out, settled, offset, new, update, members)
        return (2 if update is None else 3) * out.nbytes
    if update is not None:
        sweep(update, settled, settled, offset, members)
    sweep(new, out, settled, offset, members)
    return (2 if update is None else 4) * out.nbytes


def sweep_each(added: Sweep, parts: Parts) -> None:
    """Makes each out = source + what the sweep adds to its tensor; on CUDA all in one launch."""
    device = parts.outs[0].device if parts.outs else torch.device("cpu")
    compiled = _cuda_kernels(device) if device.type == "cuda" else None
    if compiled is not None and not any(offset % LANES for offset in parts.offsets):
        return compiled.add_each(added, parts)
    for out, source, offset, m in zip(
        parts.outs, parts.sources, parts.offsets, parts.columns, strict=True
    ):
        sweep(added.of(m), out, source, offset)


def together_on(device: torch.device) -> bool:
    """Whether many tensors of a device, wherever they lie, are changed in one launch."""
    return device.type == "cuda" and _cuda_kernels(device) is not None


def together() -> contextlib.AbstractContextManager[None]:
    """On a CPU, `perturb_rounded` inside may be done at its end, by threads that start once for all.

    Each call must write to other memory than the others read and write, and its result must not be read
    before the end.
    """
    compiled = _cpu_kernels()
    return contextlib.nullcontext() if compiled is None else compiled.together()


def _whole_rows(
    out: Tensor, source: Tensor, offset: int
) -> Iterator[tuple[Tensor, Tensor, int, np.uint32]]:
    """(out, source, offset, what dithers gain); two of them where element 0 begins no row of 32."""
    lead = offset % LANES
    if lead == 0:
        yield out, source, offset, np.uint32(0)
        return
    # Kernels take whole rows. The few elements before the first one are worked on in a row of their own.
    head = min(LANES - lead, out.numel())
    row = source.new_zeros(LANES)
    row[lead : lead + head] = source[:head]
    rest = source[head:]
    yield row, row, offset - lead, np.uint32(-lead * DITHER_STEP % 2**32)
    out[:head] = row[lead : lead + head]
    yield out[head:], rest, offset + head, np.uint32(head * DITHER_STEP % 2**32)


def coordinates(
    key: Unsigned, gaussian: bool, start: int, count: int, device: torch.device
) -> Tensor:
    """Returns raw coordinates of a stream, exact, float32 [count].

    Args:
      key: uint32 [4].
      gaussian: normals; False for signs.
      start: first index, any.
      count: how many.
      device: where they are made and left.
    """
    lead = start % LANES
    out = torch.zeros(lead + count, device=device)
    one, zero, unit = (
        np.ones((1, 1), np.float32),
        np.zeros((1, 1), np.float32),
        np.float32(NORMAL_UNIT),
    )
    normals = [one / unit, zero, zero, unit * one[0], np.zeros((1, 1), np.uint32)]
    added = Sweep(
        "add_normals" if gaussian else "add_signs", key[None], normals if gaussian else [one]
    )
    sweep(added, out, out, start - lead)
    return out[lead:]


def sum_of_squared_normals(key: Unsigned, places: Places, device: torch.device) -> int:
    """Computes `directions.sum_of_squared_normals` on a device: exact, in units of 2^-42."""
    compiled = _cuda_kernels(device) if device.type == "cuda" else None
    if compiled is not None:
        return int(compiled.sum_of_squared_normals(key, places, device))
    compiled = _cpu_kernels() or directions
    return int(compiled.sum_of_squared_normals(key, places))


def kernels_for(device: torch.device) -> ModuleType:
    """Returns the fastest module that runs on a device."""
    if device.type == "cpu":
        return _cpu_kernels() or torch_reference
    return _cuda_kernels(device) or torch_reference if device.type == "cuda" else torch_reference


# numba and Triton are imported by the first call, not by `import hf_dpzero`: they take a second.


@functools.cache
def _cpu_kernels() -> ModuleType | None:
    try:
        from hf_dpzero.perturbation.kernels import numba_kernels
    except ImportError:
        return None
    return numba_kernels


@functools.cache
def _cuda_kernels(device: torch.device) -> ModuleType | None:
    if not triton_runs_on(device):
        return None
    from hf_dpzero.perturbation.kernels import triton_kernels

    return triton_kernels


def triton_runs_on(device: torch.device | str) -> bool:
    """Whether Triton runs on tensors of a device: on CUDA, and everywhere in its interpreter."""
    device = torch.device(device)
    if importlib.util.find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"):
        return device.type in ("cpu", "cuda")
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY
