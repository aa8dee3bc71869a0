"""Saved weights: their files, their tensors, and the digest that ties a privacy report to them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.ledger.digests import digest_tensors

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a saved model or adapter in `folder`, shards included, sorted."""
    patterns = (*WEIGHTS, SHARDS)
    return sorted(path for pattern in patterns for path in Path(folder).glob(pattern))


@contextlib.contextmanager
def open_weights(folder: str | os.PathLike[str]) -> Iterator[Mapping[str, Any]]:
    """Opens a saved model's files: tensor name -> file, whose `get_tensor(name)` reads it.

    Raises:
      ValueError: two of the files hold a tensor of one name.
    """
    files: dict[str, Any] = {}
    with open_each(folder) as opened:
        for tensors in opened:
            if twice := sorted(tensors.keys() & files.keys()):
                raise ValueError(
                    f"{folder} holds {twice[0]} in two files, so it is unclear which weights are meant: "
                    f"of {', '.join(path.name for path in weight_files(folder))} remove the older ones."
                )
            files.update(tensors)
        yield files


@contextlib.contextmanager
def open_each(folder: str | os.PathLike[str]) -> Iterator[list[Mapping[str, Any]]]:
    """Opens a saved model's files one by one: for each, tensor name -> the file."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files: list[Any] = [
            stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(folder)
        ]
        yield [dict.fromkeys(file.keys(), file) for file in files]


def read_weights(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a saved model or adapter, by name.

    Raises:
      FileNotFoundError: there are none.
      ValueError: see `open_weights`.
    """
    with open_weights(folder) as files:
        if not files:
            raise FileNotFoundError(f"{folder} has none of {', '.join(WEIGHTS)}, and no shards.")
        return {name: file.get_tensor(name) for name, file in files.items()}


def digest_weights(folder: str | os.PathLike[str]) -> str | None:
    """SHA-256 (hex) over names, dtypes, shapes and bytes of all saved tensors; None without any.

    It does not depend on how they are split into files.

    Raises:
      ValueError: see `open_weights`.
    """
    with open_weights(folder) as files:
        if not files:
            return None
        return digest_tensors((name, files[name].get_tensor(name)) for name in sorted(files))


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by the names that saving gives them, as a plain model and as an adapter."""
    state = model.state_dict()
    # Under both names: an adapter's base was saved without the parts that PEFT puts into them.
    named = {plain_name(name): tensor for name, tensor in state.items()} | state
    renamed = names_on_disk(model)
    named |= {
        other: t for name, t in state.items() if (other := renamed.get(plain_name(name), JOINED))
    }
    if isinstance(getattr(model, "peft_config", None), Mapping):
        from peft import get_peft_model_state_dict

        adapter = get_peft_model_state_dict(model)
        # transformers' own add_adapter leaves this out, and its save_pretrained puts it in
        named |= {f"base_model.model.{name}": tensor for name, tensor in adapter.items()} | adapter
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


JOINED = ""
"""In place of the name of a tensor that saving joins with others, or splits, as Mixtral's experts."""


def names_on_disk(model: nn.Module) -> dict[str, str]:
    """`plain_name` of a tensor -> the name that saving gives it, where transformers keeps an older one.

    It does of ViT, GPT-NeoX and more, whose modules have other names than their checkpoints. Of tensors
    that saving joins or splits the name is `JOINED`.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    wrapped: Any = model
    inner = wrapped.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        return {}
    # In place of the tensors, of which saving may make others.
    state = {
        name: torch.empty(tensor.shape, device="meta")
        for name, tensor in inner.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    saved = {id(tensor): name for name, tensor in revert_weight_conversion(inner, state).items()}
    names = ((plain_name(name), plain_name(saved.get(id(t), JOINED))) for name, t in state.items())
    return {name: other for name, other in names if name != other}


def plain_name(name: str) -> str:
    """A parameter's name without what PEFT puts into it."""
    name = re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)", "", name)
    return name.removeprefix("base_model.model.")
