"""Models that Accelerate offloads to CPU memory or disk (`device_map`, `cpu_offload`, `disk_offload`).

Accelerate leaves tensors without values in an offloaded module and sets new ones for every forward
pass. Here each such tensor gets one place to live, where it is perturbed from, updated, digested and
saved like any other, and a `Prefetched` brings it to the execution device (see `estimators.offload`):

- offloaded to the CPU: the tensor that Accelerate kept;
- offloaded to disk and frozen: the file, mapped into memory, so that reading takes pages of it and no
  write reaches it;
- offloaded to disk and trained: a file of this run's own, mapped for writing and without a name. No
  checkpoint in the Hub's cache and no offload folder is ever written to, and what a crash leaves half
  written is gone with the process. A run goes on from a checkpoint, or from the base and the ledger.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook
from accelerate.utils import OffloadedWeightsLoader
from accelerate.utils.modeling import named_module_tensors
from accelerate.utils.offload import PrefixedDataset
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_dpzero.estimators.offload import (
    Prefetched,
    Prefetcher,
    living_elsewhere,
    prefetched_of,
    prefetcher_of,
)
from hf_dpzero.objectives.losses import is_compiled
from hf_dpzero.perturbation.trainable import quantised_kind

if TYPE_CHECKING:
    from hf_dpzero.settings.config import DPZeroConfig


logger = logging.get_logger(__name__)

Kept: TypeAlias = Mapping[str, Tensor] | PrefixedDataset | OffloadedWeightsLoader
"""Accelerate's maps of offloaded weights."""

SHARD = "5GB"
"""Of a saved model whose weights live on disk; transformers' own limit may exceed the memory."""
_CHUNK = 1 << 22  # elements on their way into a file
_FOLDER = "_hf_dpzero_folder"  # attribute of a tensor that is a mapped file: where others may lie


def settle_offloaded(model: nn.Module) -> None:
    """Gives every offloaded tensor of a model a place to live, and lets it come for forward passes.

    Models without offload stay as they are. Afterwards the model's parameters are ordinary ones on the
    CPU; `state_dict`, saving, evaluation and generation work. Adapters that were put on since go to the
    device of the layers that they adapt, and `model.to` moves nothing.

    Args:
      model: with Accelerate's hooks, perhaps; changed in place.

    Raises:
      ValueError: a quantised weight is offloaded, or there is no execution device.
    """
    offloaded = [
        (name, module, hook)
        for name, module in model.named_modules()
        for hook in accelerate_hooks(getattr(module, "_hf_hook", None))
        if isinstance(hook, AlignDevicesHook) and hook.offload
    ]
    prefetcher, homes = prefetcher_of(model) or Prefetcher(), _Homes(_tied_names(model))
    for name, module, hook in offloaded:
        if hook.execution_device in (None, "meta", torch.device("meta")):
            raise ValueError(f"{name} is offloaded without an execution device: load it anew.")
        tensors = named_module_tensors(
            module, hook.offload_buffers, hook.place_submodules, remove_non_persistent=True
        )
        places = []
        for inner, tensor in list(tensors):
            path, _, leaf = inner.rpartition(".")
            owner = module.get_submodule(path)
            home = homes.of(f"{name}.{inner}".lstrip("."), tensor, hook.weights_map, inner)
            (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = home
            places.append((owner, leaf))
        device = torch.device(hook.execution_device)
        module._old_forward = Prefetched(module, places, device, prefetcher, module._old_forward)
        _replace_hook(module, hook)
    if prefetcher_of(model) is None:
        return
    for name, module in model.named_modules():
        prefetched = prefetched_of(getattr(module, "base_layer", module))
        if prefetched is not None and prefetched.module is not module:
            # PEFT makes adapters where the weights of the layer beneath live: not where it computes
            of_base = set(map(id, prefetched.module.parameters()))
            for parameter in module.parameters():
                if id(parameter) not in of_base and not parameter.is_meta:
                    parameter.data = parameter.data.to(prefetched.device)
        elif prefetched is not None and ".modules_to_save." in name:
            prefetched.stay_()
    model.to = _staying(model)  # type: ignore[method-assign]
    in_files = any(_FOLDER in vars(tensor) for tensor in living_elsewhere(model).values())
    if in_files and isinstance(model, PreTrainedModel):  # a shard is written from memory
        save: Any = model.save_pretrained
        model.save_pretrained = functools.partial(save, max_shard_size=SHARD)  # type: ignore[method-assign]


def accelerate_hooks(hook: ModelHook | None) -> Iterator[ModelHook]:
    """A hook and the hooks inside it (`SequentialHook`)."""
    if hook is not None:
        yield hook
    for inner in hook.hooks if isinstance(hook, SequentialHook) else ():
        yield from accelerate_hooks(inner)


def _replace_hook(module: nn.Module, hook: AlignDevicesHook) -> None:
    """Another of its kind (PEFT copies hooks by name) moves inputs and outputs, and never weights."""
    ours = AlignDevicesHook(
        execution_device=hook.execution_device,
        io_same_device=hook.io_same_device,
        skip_keys=hook.skip_keys,
    )
    ours.init_hook = lambda module: module  # it would move weights to the device
    if module._hf_hook is hook:
        module._hf_hook = ours
    for sequence in accelerate_hooks(module._hf_hook):
        if isinstance(sequence, SequentialHook):
            sequence.hooks = tuple(ours if inner is hook else inner for inner in sequence.hooks)


def _staying(model: nn.Module) -> Callable[..., nn.Module]:
    """`model.to` that leaves an offloaded model's weights where they live."""

    def to(*args: Any, **kwargs: Any) -> nn.Module:
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        if dtype is not None and any(p.dtype != dtype for p in model.parameters()):
            raise ValueError(
                f"the model is offloaded, and its weights are not converted to {dtype} in place: load "
                "it in that dtype (dtype=... of from_pretrained)."
            )
        return model

    return to


class _Homes:
    """Where offloaded tensors live; tied ones share a place.

    Args:
      tied: name of a tensor -> name of the one that it is tied to.
    """

    def __init__(self, tied: Mapping[str, str]) -> None:
        self._tied = tied
        self._known: dict[object, Tensor] = {}

    def of(self, name: str, tensor: Tensor, weights: Kept, key: str) -> Tensor:
        """The parameter or buffer that takes the place of `tensor`.

        Args:
          name: in the model.
          tensor: what the module has now: without values, or in place already.
          weights: Accelerate's map that holds the values.
          key: of the values there.
        """
        if tensor.device.type != "meta":
            return tensor
        marks: list[object] = [id(tensor), self._tied.get(name, name)]
        found = next((self._known[mark] for mark in marks if mark in self._known), None)
        if found is None:
            values, folder = _values(weights, key)
            kind = quantised_kind(values)
            if kind is not None and isinstance(tensor, nn.Parameter):
                raise ValueError(
                    f"{name} is quantised ({kind}) and offloaded: let a device_map keep quantised "
                    "layers on the GPU and offload others, which are in float then "
                    "(BitsAndBytesConfig with llm_int8_enable_fp32_cpu_offload=True), or load without "
                    "quantization."
                )
            # Accelerate may keep one tensor under the names of two that are tied
            address = values.data_ptr() if folder is None and values.numel() else None
            found = self._known.get(address) if address else None
            if found is None:
                found = values
                if isinstance(tensor, nn.Parameter):
                    found = nn.Parameter(values, requires_grad=tensor.requires_grad)
                if folder is not None:
                    vars(found)[_FOLDER] = folder
            marks += [address] if address else []
        self._known.update(dict.fromkeys(marks, found))
        self._known[id(found), "kept"] = tensor  # alive, so that no other tensor gets its id
        return found


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Name of a weight -> name of that it is tied to, as models of transformers declare them."""
    tied: dict[str, str] = {}
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        declared = getattr(module, "all_tied_weights_keys", None) or {}
        for target, source in declared.items() if isinstance(declared, Mapping) else ():
            tied.setdefault(before + target, before + source)
    return tied


def _values(weights: Kept, key: str) -> tuple[Tensor, str | None]:
    """The values of an offloaded tensor on the CPU, and, if they are a mapped file, its folder."""
    while isinstance(weights, PrefixedDataset):
        weights, key = weights.dataset, weights.prefix + key
    if isinstance(weights, OffloadedWeightsLoader):
        if key not in weights.state_dict:
            return _mapped(weights, key)
        weights = weights.state_dict
    return weights[key].detach().cpu(), None


def _mapped(loader: OffloadedWeightsLoader, key: str) -> tuple[Tensor, str]:
    """A tensor of the disk, mapped so that pages are read when needed and writes stay in memory."""
    from safetensors import safe_open

    information: Any = loader.index[key]
    file, named = information.get("safetensors_file"), information.get("dtype")
    dtype: torch.dtype | None = None if named is None else getattr(torch, named)
    folder = str(loader.save_folder or tempfile.gettempdir())
    if file is not None:
        with safe_open(file, framework="pt", device="cpu") as opened:
            values = opened.get_tensor(information.get("weight_name", key))
        if dtype not in (None, values.dtype):  # it was loaded in another dtype than it is stored in
            values = in_own_file(values, folder, dtype)
        return values, folder
    shape = torch.Size(information["shape"])
    if not shape.numel():  # no file of no bytes can be mapped
        return torch.empty(shape, dtype=dtype), folder
    path = str(Path(folder, f"{key}.dat"))
    return torch.from_file(path, shared=False, size=shape.numel(), dtype=dtype).view(shape), folder


def own_trained_files(model: nn.Module) -> None:
    """Gives every trained tensor that lives in a file a file of this run's own.

    Raises:
      OSError: the disk has no room for them.
    """
    for tensor in living_elsewhere(model).values():
        folder = vars(tensor).get(_FOLDER)
        if folder is not None and tensor.requires_grad:
            tensor.data = in_own_file(tensor.data, folder)
            del vars(tensor)[_FOLDER]


@torch.no_grad()
def in_own_file(values: Tensor, folder: str, dtype: torch.dtype | None = None) -> Tensor:
    """A copy that lives in a new file, mapped for writing.

    Where the system allows it the file has no name from here on, so nobody can read what a crash leaves
    half written, and its room is free again once the process has ended.

    Args:
      values: on the CPU.
      folder: with room for them.
      dtype: of the copy.

    Returns:
      Contiguous, of the shape of `values`.

    Raises:
      OSError: the disk has no room.
    """
    dtype = dtype or values.dtype
    if not values.numel():
        return torch.empty_like(values, dtype=dtype)
    file, path = tempfile.mkstemp(".weights", "hf_dpzero-", folder)
    try:
        size = values.numel() * torch.empty(0, dtype=dtype).element_size()
        if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and a crash later
            os.posix_fallocate(file, 0, size)
        copy = torch.from_file(path, shared=True, size=values.numel(), dtype=dtype)
    finally:
        os.close(file)
        try:
            os.unlink(path)
        except PermissionError:  # Windows keeps the names of files in use
            atexit.register(_remove, path)
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        copy[start : start + _CHUNK].copy_(flat[start : start + _CHUNK])
    return copy.view(values.shape)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def check_offload(model: nn.Module, args: DPZeroConfig) -> None:
    """Refuses methods that cannot follow offloaded weights.

    Gives trained ones on disk files of their own.

    Raises:
      ValueError: several processes, a first-order method, compiled code, or a strategy that moves all
        weights.
    """
    if prefetcher_of(model) is None:
        return
    if args.world_size > 1:
        raise ValueError(
            f"the model is offloaded, and {args.world_size} processes train it: offload works in one. "
            "Start one, or load the model without offload and cut it over the processes by FSDP2: "
            "accelerate launch --config_file configs/accelerate/fsdp2.yaml."
        )
    if args.first_order:
        raise ValueError(
            f"method={args.method!r} on an offloaded model: its weights are there for a forward pass "
            "and not for a backward pass. Use a zeroth-order method (method='dpzero'), or load the "
            "model without offload, in a smaller dtype."
        )
    if is_compiled(model) or args.torch_compile:
        raise ValueError(
            "torch_compile on an offloaded model: compiled code does not follow weights that come for "
            "each layer. Turn torch_compile off, or load the model without offload."
        )
    own_trained_files(model)
