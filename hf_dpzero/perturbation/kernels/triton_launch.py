"""Launches the Triton kernel over a flat CUDA tensor: generates the directions and adds them.

The same numbers as `torch_reference`, to the last bit: integer arithmetic, and float32 products and
sums that are each rounded on their own (contraction is switched off at each launch). A launch reads a
coordinate once, writes it once, allocates nothing of parameter size and does not wait for the device.
What varies between launches travels as arguments where there is one term and one tensor, else as one
small pinned table.

Triton is imported by the first launch, not by this module. Under TRITON_INTERPRET=1 the same code
runs, slowly, on CPU tensors. Arguments are those of `dispatch`, but `members` is (rows, starts), int32
and int64 tensors best kept on the device; numbers are numpy arrays.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation.directions import LANES, SIGNS_TILE, normal_tables

SIGNS_WARPS, NORMALS_WARPS = 4, 8
"""Warps of a program, which owns 4096 coordinates. Every warp of signs computes the same 32 Philox
calls, so fewer warps do less; normals have a call for every 4 coordinates, and with 4 warps more
live values than a thread of compute capability 9.0 has registers (the compiler spills)."""

_OLDEST_CAPABILITY = (7, 0)  # what Triton's NVIDIA backend has been made to compile for
_DEVICE_CODE = "hf_dpzero.perturbation.kernels.triton_kernels"
_FIELDS = 5  # numbers of a term that the kernel takes as arguments
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `ROUND` of the kernel

Numbers = NDArray[Any]
Members = tuple[Tensor, Tensor]


class _Variant(NamedTuple):
    """Which of the kernel's variants: see `triton_kernels.walk`."""

    gaussian: bool
    grid: bool = False
    update: bool = False
    rounded: bool = False


def available(device: torch.device | str) -> bool:
    """Whether the kernel runs on tensors of `device`: CUDA and Triton, or Triton's interpreter."""
    device = torch.device(device)
    if not _triton_is_installed():
        return False
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"):
        return device.type in ("cpu", "cuda")
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY


def add_signs(
    out: Tensor, source: Tensor, offset: int, keys: Numbers, amounts: Numbers,
    members: Members | None = None, pieces: Numbers | None = None,
) -> None:  # fmt: skip
    """`dispatch.add_signs` by Triton.

    Args:
      out, source, offset, keys, amounts, members, pieces: as there, with `members` as above.
    """
    assert out.dtype == torch.float32
    _launch(_Variant(gaussian=False), out, source, offset, keys, [amounts], members, pieces)


def add_normals(
    out: Tensor, source: Tensor, offset: int, keys: Numbers, new: Numbers, old: Numbers,
    update: Numbers, spacing: Numbers, dithers: Numbers,
    members: Members | None = None, pieces: Numbers | None = None,
) -> None:  # fmt: skip
    """`dispatch.add_normals` by Triton.

    Args:
      out, source, offset, keys, new, old, update, spacing, dithers, members, pieces: as there, with
        `members` as above.
    """
    assert out.dtype == torch.float32
    variant = _Variant(gaussian=True, grid=True, update=bool(np.any(update)))
    fields = [new, old, update, spacing, dithers]
    _launch(variant, out, source, offset, keys, fields, members, pieces)


def add_rounded(
    out: Tensor, source: Tensor, offset: int, keys: Numbers, gaussian: bool, coefficients: Numbers,
    dithers: Numbers, members: Members | None = None, pieces: Numbers | None = None,
) -> None:  # fmt: skip
    """`dispatch.add_rounded` by Triton.

    Args:
      out, source, offset, keys, gaussian, coefficients, dithers, members, pieces: as there, with
        `members` as above.
    """
    assert out.dtype in (torch.bfloat16, torch.float16)
    variant = _Variant(gaussian=bool(gaussian), rounded=True)
    fields = [coefficients[:, None], dithers]
    _launch(variant, out, source, offset, keys, fields, members, pieces)


def _launch(
    variant: _Variant, out: Tensor, source: Tensor, offset: int, keys: Numbers,
    fields: list[Numbers], members: Members | None, pieces: Numbers | None,
) -> None:  # fmt: skip
    """Fields: float32 or uint32 [T, M], or what broadcasts to it, in the kernel's order."""
    device, count = out.device, out.numel()
    if not available(device):
        raise ValueError(
            f"the Triton kernel does not run on {device}: it needs a CUDA device and the triton "
            "package, or TRITON_INTERPRET=1."
        )
    assert out.is_contiguous() and source.is_contiguous(), "flat tensors are contiguous"
    assert (source.shape, source.dtype, source.device) == (out.shape, out.dtype, device)
    assert offset >= 0 and offset % LANES == 0, "tensors start at multiples of 32"
    assert members is None or members[0].numel() == -(-count // LANES), "a member for each row"
    assert members is None or pieces is None, "pieces are of one tensor"
    assert pieces is None or (len(pieces) and count % len(pieces) == 0), "equal pieces"
    if not count:
        return
    shape = (len(keys), 1 if members is None else members[1].numel())
    assert len(keys), "at least one term"
    parts = [keys.reshape(-1), *(np.broadcast_to(f, shape).reshape(-1) for f in fields)]
    assert all(part.itemsize == 4 for part in parts), "float32 and uint32 numbers"
    table = torch.from_numpy(np.concatenate([part.view(np.int32) for part in parts]))
    single = shape == (1, 1) and members is None
    words = table.tolist() if single else []
    words += [0] * (4 + _FIELDS - len(words))
    sent = None if single else _sent(table, device)
    rows, starts = (None, None) if members is None else (_sent(part, device) for part in members)
    firsts = None if pieces is None else _sent(torch.from_numpy(pieces), device)
    tables = _tables(device) if variant.gaussian else None
    first_tile, lead = int(offset) // SIGNS_TILE, int(offset) % SIGNS_TILE // LANES
    # A program for every tile that the tensor, or each of its pieces, touches.
    grid: tuple[int, ...] = (-(-(lead * LANES + count) // SIGNS_TILE),)
    if pieces is not None:
        count //= len(pieces)
        grid = len(pieces), -(-(SIGNS_TILE - LANES + count) // SIGNS_TILE)
    cuda = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with cuda:
        _device_code().walk[grid](
            _raw(out), _raw(source), sent, rows, starts, firsts, tables,
            *shape, count, first_tile, lead, *words,
            GAUSSIAN=variant.gaussian, GRID=variant.grid, UPDATE=variant.update,
            ROUND=_CODES[out.dtype] if variant.rounded else 0, EVEN=count % LANES == 0,
            num_warps=NORMALS_WARPS if variant.gaussian else SIGNS_WARPS, num_stages=1,
            enable_fp_fusion=False,
        )  # fmt: skip


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without waiting for it: from pinned memory, in order with its stream."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _raw(tensor: Tensor) -> Tensor:
    """bfloat16 as its bits: the kernel shifts them, on every backend alike."""
    return tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()


@functools.cache
def _tables(device: torch.device) -> Tensor:
    """The normals' tables, int64 [766] on `device`: center << 32 | half, so one load has both."""
    center, half = (table.astype(np.int64) for table in normal_tables())
    return _sent(torch.from_numpy(center << 32 | (half & 0xFFFFFFFF)), device)


def _device_code() -> ModuleType:
    return importlib.import_module(_DEVICE_CODE)


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
