"""What the base of a model lacks: a fresh head or adapter, kept beside the ledger as a small file.

It is public. Base, file and ledger give the trained weights, where a replay would else need the script's
own random numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dpzero.perturbation.sharding import own_class, whole
from hf_dpzero.reporting.hub import INITIAL_VALUES_FILE
from hf_dpzero.reporting.provenance import base_names, resolve_path
from hf_dpzero.run_folder.base_model import Comparison

LARGEST = 64 << 20
"""Bytes of initial values, at most; a run with more of them promises no replay."""


def write_initial_values(
    folder: str | Path, model: nn.Module, compared: Comparison | None, base_digest: str
) -> None:
    """Writes what `load_initial_model` needs beside the base, or nothing where that cannot work.

    It cannot where the base was not found, the model is no plain transformers model with at most one
    adapter, its configuration does not make the same parameters again, or the file would be large.

    Args:
      folder: of the run; an older file is removed.
      model: before training.
      compared: with the named base.
      base_digest: `digest_model` of the model; it ties the file to its run.
    """
    from safetensors.torch import save_file

    path = Path(folder) / INITIAL_VALUES_FILE
    path.unlink(missing_ok=True)
    if compared is None or compared.differing:
        return
    named = dict(model.named_parameters())
    kept = [*compared.fresh, *compared.residual]
    values = {name: whole(named[name]).detach().cpu().contiguous().clone() for name in kept}
    dtypes = {p.dtype for name, p in named.items() if name not in values}
    description = _description(model)
    size = sum(value.numel() * value.element_size() for value in values.values())
    if description is None or len(dtypes) != 1 or size > LARGEST:
        return
    description["dtype"] = str(dtypes.pop()).removeprefix("torch.")
    try:
        with torch.device("meta"):  # names and shapes are compared; no memory is taken
            again = dict(_built(description).named_parameters())
    except Exception:  # whatever another library says: then there is no promise
        return
    if {n: p.shape for n, p in again.items()} != {n: p.shape for n, p in named.items()}:
        return
    name = base_names(model)[0]
    metadata = {
        "model": json.dumps(description),
        "base_model": Path(name).name if Path(resolve_path(name)).is_dir() else name,
        "base_model_digest": base_digest,
    }
    draft = path.with_name(f".{path.name}")
    save_file(values, draft, metadata=metadata)
    draft.replace(path)  # there whole or not at all


def copy_initial_values(run: str | Path, folder: str | Path) -> None:
    """Copies the run's file, if there is one, to where weights are saved too."""
    source, target = Path(run) / INITIAL_VALUES_FILE, Path(folder) / INITIAL_VALUES_FILE
    if source.is_file() and source.resolve() != target.resolve():
        shutil.copyfile(source, target)


def load_initial_model(path: str | Path, base: str) -> nn.Module:
    """Returns the model that the run started with.

    Returns:
      The model in eval mode; `replay` compares its digest.

    Raises:
      ValueError: the file is not of this kind, or does not fit what it describes.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("model")
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if text is None:
        raise ValueError(f"{path} has no description of its model: it was not written by a run.")
    # a name in it would be another base, which a stranger chose
    described = json.loads(text, object_hook=lambda d: {k: d[k] for k in d if k not in _NAMES})
    model = _built(described, resolve_path(base))
    named = dict(model.named_parameters())
    for name, value in values.items():
        if name not in named or named[name].shape != value.shape:
            raise ValueError(
                f"{path} holds {name}, which the model that it describes does not have."
            )
        named[name].data = value
    return model.eval()


def _description(model: Any) -> dict[str, Any] | None:
    """Class and settings from which the model's parameters come about, without local names."""
    import transformers

    adapters = getattr(model, "peft_config", None) or {}
    base = model.get_base_model() if adapters and hasattr(model, "get_base_model") else model
    kind = own_class(base).__name__
    if getattr(transformers, kind, None) is not own_class(base) or set(adapters) - {"default"}:
        return None
    config = _public(base.config.to_diff_dict())
    config["num_labels"] = getattr(base.config, "num_labels", 2)  # the names are not needed
    adapter = _public(adapters["default"].to_dict()) if adapters else None
    return {"class": kind, "config": config, "adapter": adapter}


# Paths name the user's machine, and labels may name what is in private rows.
_NAMES = ("_name_or_path", "base_model_name_or_path")
_LOCAL = (*_NAMES, "id2label", "label2id", "num_labels")


def _public(value: Any) -> Any:
    """JSON-safe, and without paths and names of labels."""
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items() if key not in _LOCAL}
    if isinstance(value, set):
        value = sorted(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_public(item) for item in value]
    return getattr(value, "value", value)


def _built(description: Mapping[str, Any], path: str | None = None) -> Any:
    """The described model, with weights from `path`, or with none that matter."""
    import transformers

    kind = getattr(transformers, description["class"])
    config = kind.config_class.from_dict(dict(description["config"]))
    if path is None:
        model = kind(config)
    else:
        dtype = getattr(torch, description["dtype"])
        model = kind.from_pretrained(path, config=config, dtype=dtype, ignore_mismatched_sizes=True)
    if description["adapter"] is None:
        return model
    import peft

    return peft.get_peft_model(model, peft.get_peft_config(dict(description["adapter"])))
