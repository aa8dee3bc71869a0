"""Passes over a flat CUDA tensor in Triton: generate the directions and add them, in one sweep.

The same numbers as every other backend, to the last bit: integer arithmetic, and float32 products
and sums that are each rounded on their own (contraction is switched off at each launch). A pass
reads a coordinate once, writes it once, allocates nothing of parameter size and does not wait for
the device. What varies between launches travels as arguments where there is one term and one
tensor, else as one small pinned table.

Triton is imported by the first pass, not by this module. Under TRITON_INTERPRET=1 the same code
runs, slowly, on CPU tensors.

Common arguments of the passes:
  out, source: contiguous tensors of one shape, dtype and device; `out` may be `source` itself.
  offset: index of element 0 in the directions' index space, a multiple of 32; element e is
    coordinate offset + e.
  keys: uint32 [T, 4], the stream key of each of T >= 1 terms. Like all small arguments below, a
    numpy array or a tensor, best on the CPU.
  members: None for one tensor (M = 1), or (rows, starts) for M tensors laid out in one, each from a
    multiple of 32 elements on: int32 [ceil(n / 32)], the member of each row of 32 elements, and
    int64 [M], the first element of each member; best kept on the device.
  pieces: None, or int64 [P]: `out` and `source` hold P equal parts of one tensor (rows of an
    embedding), which begin at these of its elements, multiples of 32; `offset` is then the
    tensor's. One launch does them all. Not together with members.

Every pass raises ValueError for an argument that does not fit this, before anything is written.
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

Numbers = Any
"""A numpy array or a tensor of few elements."""
Members = tuple[Tensor, Tensor]


class _Pass(NamedTuple):
    """Which of the kernel's variants: see `triton_kernels.walk`."""

    gaussian: bool
    grid: bool = False
    update: bool = False
    rounded: bool = False


# ---------------------------------------------------------------- the passes


def available(device: torch.device | str) -> bool:
    """Whether the passes run on tensors of `device`: CUDA and Triton, or Triton's interpreter."""
    device = torch.device(device)
    if not _triton_is_installed():
        return False
    if _interpreted():
        return device.type in ("cpu", "cuda")
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY


def signs(out: Tensor, offset: int, key: Numbers) -> None:
    """Writes u, +-1, into the float32 tensor `out`; key: uint32 [4]."""
    _write(out, offset, key, gaussian=False)


def normals(out: Tensor, offset: int, key: Numbers) -> None:
    """Writes z (before a sphere's scale) into the float32 tensor `out`; key: uint32 [4]."""
    _write(out, offset, key, gaussian=True)


def add_signs(
    out: Tensor,
    source: Tensor,
    offset: int,
    keys: Numbers,
    amounts: Numbers,
    members: Members | None = None,
    pieces: Numbers | None = None,
) -> None:
    """out = source + sum_t (+-amounts[t, m]), float32, the terms added in order.

    Args:
      amounts: float32 [T, M].
    """
    _check_dtype(out, torch.float32)
    _launch(_Pass(gaussian=False), out, source, offset, keys, [amounts], members, pieces)


def add_normals(
    out: Tensor,
    source: Tensor,
    offset: int,
    keys: Numbers,
    new: Numbers,
    old: Numbers,
    update: Numbers,
    spacing: Numbers,
    dither: Numbers,
    members: Members | None = None,
    pieces: Numbers | None = None,
) -> None:
    """out = source + sum_t spacing (rint(z new) - rint(z old) + stochastic rounding of z update).

    Args:
      new, old, update: float32 [T, M], in steps of the member's grid.
      spacing: float32 [M], the steps.
      dither: uint32 [T, M], where the dither of each term and member starts.
    """
    _check_dtype(out, torch.float32)
    kind = _Pass(gaussian=True, grid=True, update=_any_nonzero(update))
    fields = [new, old, update, spacing, dither]
    _launch(kind, out, source, offset, keys, fields, members, pieces)


def add_rounded(
    out: Tensor,
    source: Tensor,
    offset: int,
    keys: Numbers,
    gaussian: bool,
    coefficients: Numbers,
    dither: Numbers,
    members: Members | None = None,
    pieces: Numbers | None = None,
) -> None:
    """out = source + sum_t coefficients[t] u_t in float32, rounded stochastically once at the end.

    Args:
      out, source: bfloat16 or float16; float16 saturates at +-65504.
      gaussian: whether u is normal rather than +-1.
      coefficients: float32 [T].
      dither: uint32 [M], where the dither of each member starts.
    """
    _check_dtype(out, torch.bfloat16, torch.float16)
    kind = _Pass(gaussian=bool(gaussian), rounded=True)
    each = _bits(coefficients).view(-1, 1)
    _launch(kind, out, source, offset, keys, [each, dither], members, pieces)


def _write(out: Tensor, offset: int, key: Numbers, *, gaussian: bool) -> None:
    _check_dtype(out, torch.float32)
    one = np.ones((1, 1), np.float32)
    _launch(_Pass(gaussian=gaussian), out, None, offset, key, [one])


# ---------------------------------------------------------------- refusals


def _check_dtype(out: Tensor, *allowed: torch.dtype) -> None:
    if out.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"out has dtype {out.dtype}; this pass needs {names}.")


def _check(out: Tensor, source: Tensor | None, offset: int, members: Members | None) -> None:
    for name, tensor in (("out", out), ("source", out if source is None else source)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; pass a contiguous tensor.")
        if (tensor.shape, tensor.dtype, tensor.device) != (out.shape, out.dtype, out.device):
            raise ValueError(
                f"source is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, out is "
                f"{out.dtype} {tuple(out.shape)} on {out.device}; pass two of a kind."
            )
    if offset < 0 or offset % LANES:
        raise ValueError(f"offset={offset} is not a multiple of {LANES}; align tensors to it.")
    if members is not None and members[0].numel() != -(-out.numel() // LANES):
        raise ValueError(
            f"members name {members[0].numel()} rows, out has {-(-out.numel() // LANES)} rows of "
            f"{LANES} elements; name one member for each row."
        )


def _check_pieces(out: Tensor, members: Members | None, pieces: Numbers | None) -> None:
    if pieces is None:
        return
    if members is not None:
        raise ValueError("a pass takes members or pieces, not both; give the pieces of one tensor.")
    if not len(pieces) or out.numel() % len(pieces):
        raise ValueError(
            f"out has {out.numel()} elements, which are not {len(pieces)} equal pieces; pass the "
            "first element of each."
        )


def _refuse_device(device: torch.device) -> None:
    if not available(device):
        raise ValueError(
            f"the Triton passes do not run on {device}: they need a CUDA device and the triton "
            "package, or TRITON_INTERPRET=1. Use the passes for this device."
        )


# ---------------------------------------------------------------- launching


def _launch(
    kind: _Pass,
    out: Tensor,
    source: Tensor | None,
    offset: int,
    keys: Numbers,
    fields: list[Numbers],
    members: Members | None = None,
    pieces: Numbers | None = None,
) -> None:
    _check(out, source, offset, members)
    _check_pieces(out, members, pieces)
    _refuse_device(out.device)
    table, shape = _table(keys, fields, 1 if members is None else members[1].numel())
    if not out.numel():
        return
    single = shape == (1, 1) and members is None and table.device.type == "cpu"
    words = table.tolist() if single else []
    words += [0] * (4 + _FIELDS - len(words))
    sent = None if single else _sent(table, out.device)
    pointers = (sent, *_placed(members, out.device), _placed_pieces(pieces, out.device))
    with _on(out.device):
        _run(kind, out, source, offset, pointers, shape, words)


def _run(
    kind: _Pass,
    out: Tensor,
    source: Tensor | None,
    offset: int,
    pointers: tuple[Tensor | None, ...],
    shape: tuple[int, int],
    words: list[int],
) -> None:
    first_tile, lead = int(offset) // SIGNS_TILE, int(offset) % SIGNS_TILE // LANES
    count, grid = _grid(out, lead, pointers[-1])
    tables = _tables(out.device) if kind.gaussian else None
    _device_code().walk[grid](
        _raw(out), None if source is None else _raw(source), *pointers, tables,
        *shape, count, first_tile, lead, *words,
        GAUSSIAN=kind.gaussian, GRID=kind.grid, UPDATE=kind.update,
        ROUND=_CODES[out.dtype] if kind.rounded else 0, EVEN=count % LANES == 0,
        num_warps=NORMALS_WARPS if kind.gaussian else SIGNS_WARPS, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def _grid(out: Tensor, lead: int, pieces: Tensor | None) -> tuple[int, tuple[int, ...]]:
    """(elements of the tensor or of a piece, programs): a program for every tile that they touch."""
    if pieces is None:
        return out.numel(), (-(-(lead * LANES + out.numel()) // SIGNS_TILE),)
    count = out.numel() // len(pieces)
    return count, (len(pieces), -(-(SIGNS_TILE - LANES + count) // SIGNS_TILE))


def _table(keys: Numbers, fields: list[Numbers], members: int) -> tuple[Tensor, tuple[int, int]]:
    """(keys [T, 4] and fields [T, M] one after another, as int32; (T, M))."""
    rows = _bits(keys).reshape(-1, 4)
    shape = (len(rows), members)
    if not len(rows):
        raise ValueError("keys name no term: a pass needs at least one direction.")
    try:
        parts = [_bits(field).expand(shape).reshape(-1) for field in fields]
    except RuntimeError:
        sizes = [tuple(np.shape(field)) for field in fields]
        raise ValueError(
            f"numbers of shapes {sizes} do not fit {shape[0]} terms and {shape[1]} members: pass "
            "[T, M], or [M] where they do not depend on the term."
        ) from None
    return _joined([rows.reshape(-1), *parts]), shape


def _joined(parts: list[Tensor]) -> Tensor:
    """One tensor, on the CPU unless a part is elsewhere."""
    devices = {part.device for part in parts if part.device.type != "cpu"}
    if devices:
        device = devices.pop()
        parts = [part.to(device, non_blocking=True) for part in parts]
    return torch.cat(parts)


def _bits(numbers: Numbers) -> Tensor:
    """float32, int32 or uint32 numbers as int32 of the same shape, their bits unchanged."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.asarray(numbers))
    if tensor.dtype.itemsize != 4:
        raise ValueError(
            f"a pass takes float32 and uint32 numbers, not {tensor.dtype}; convert them."
        )
    return tensor.contiguous().view(torch.int32)


def _any_nonzero(numbers: Numbers) -> bool:
    """Whether any number is not 0; True where only the device knows."""
    if isinstance(numbers, Tensor) and numbers.device.type != "cpu":
        return True
    return bool(np.any(np.asarray(numbers)))


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without waiting for it: from pinned memory, in order with its stream."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _placed(members: Members | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    if members is None:
        return None, None
    rows, starts = members
    return _sent(rows.to(torch.int32), device), _sent(starts.to(torch.int64), device)


def _placed_pieces(pieces: Numbers | None, device: torch.device) -> Tensor | None:
    return None if pieces is None else _sent(torch.as_tensor(pieces, dtype=torch.int64), device)


def _raw(tensor: Tensor) -> Tensor:
    """bfloat16 as its bits: the kernel shifts them, on every backend alike."""
    return tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()


@functools.cache
def _tables(device: torch.device) -> Tensor:
    """The normals' tables, int64 [766] on `device`: center << 32 | half, so one load has both."""
    center, half = (table.astype(np.int64) for table in normal_tables())
    return _sent(torch.from_numpy(center << 32 | (half & 0xFFFFFFFF)), device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _device_code() -> ModuleType:
    return importlib.import_module(_DEVICE_CODE)


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    """Whether Triton's own switch for its interpreter is on."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
