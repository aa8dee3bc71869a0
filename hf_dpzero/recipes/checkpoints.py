"""Loads checkpoints, and says what is missing."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoTokenizer

from hf_dpzero.checks.precision import keep_layout_
from hf_dpzero.recipes.arguments import ModelArguments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

ADAPTER_FILE = "adapter_config.json"
_INT8_CAST = "MatMul8bitLt: inputs will be cast from"


def check_folder(path: str) -> None:
    """Refuses a path to no folder, and a folder without a model; a Hub id passes.

    A Hub id has at most one slash and starts with a letter, digit or underscore.

    Raises:
      FileNotFoundError: says what is at the path instead.
    """
    place = Path(path)
    adapter = (place / ADAPTER_FILE).is_file()
    if place.is_dir() and not (place / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} holds an adapter and no model: set model_name_or_path to the model that the "
            "adapter was trained on."
            if adapter
            else f"{path} has no config.json, so it is no saved model: give the folder that "
            "save_pretrained wrote to."
        )
    if place.is_file():
        raise FileNotFoundError(
            f"model_name_or_path={path!r} is a file; give the folder that holds config.json."
        )
    outside = path.startswith((".", "/", "~", "\\")) or path.count("/") > 1 or "\\" in path
    if outside and not place.is_dir():
        home = " (~ is not expanded: write the whole path)" if path.startswith("~") else ""
        raise FileNotFoundError(
            f"model_name_or_path={path!r}: no such folder{home}; relative paths are taken from "
            f"{Path.cwd()}."
        )


def fetched(load: Callable[..., Any], path: str, arguments: ModelArguments, **settings: Any) -> Any:
    """Calls load(path) at the recipe's revision; failures say how to get the checkpoint.

    Args:
      load: a `from_pretrained`.
      path: folder or Hub id.
      arguments: the recipe's; `model_revision` is used.
      settings: passed on to `load`.

    Returns:
      What `load` returns.

    Raises:
      FileNotFoundError: see `check_folder`.
      OSError: damaged weights; the Hub has no such model or revision, asks for a login, or cannot be
        reached.
    """
    from safetensors import SafetensorError

    check_folder(path)
    try:
        return load(path, revision=arguments.model_revision or "main", **settings)
    except SafetensorError as error:
        raise OSError(f"{path}: its weights are damaged ({error}); copy them again.") from error
    except OSError as error:
        if Path(path).is_dir():
            raise
        raise OSError(_how_to_get(path, arguments.model_revision, error)) from error


def _how_to_get(path: str, revision: str | None, error: BaseException | None) -> str:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    kinds, kind = set(), type(error).__name__
    while error is not None:
        kinds.add(type(error).__name__)
        error = error.__cause__ or error.__context__
    parent = Path(path).parent
    if "/" in path and parent.is_dir():
        return (
            f"{path} does not exist: {parent} is a folder here and has no {Path(path).name}, and the "
            f"Hub gave no model of that name either ({kind})."
        )
    command = f"`hf download {path}{f' --revision {revision}' if revision else ''}`"
    if "GatedRepoError" in kinds:
        return (
            f"model {path!r} is gated: accept its terms at https://huggingface.co/{path}, log in "
            f"with `hf auth login`, then fetch it with {command}."
        )
    if "RepositoryNotFoundError" in kinds:
        return (
            f"model {path!r} is no local folder, and the Hub has no model of that name that you may "
            "see: check the name, or log in with `hf auth login` if it is private."
        )
    if "RevisionNotFoundError" in kinds:
        return f"model {path!r} has no revision {revision!r}; check model_revision."
    offline = " with HF_HUB_OFFLINE unset" if HF_HUB_OFFLINE else ""
    return (
        f"model {path!r} is no local folder, and neither cached nor reachable ({kind}); fetch it once "
        f"with {command}{offline}, or set model_name_or_path to a local folder."
    )


def load_tokenizer(path: str, arguments: ModelArguments) -> PreTrainedTokenizerBase:
    """Loads the checkpoint's tokenizer.

    Where its files are missing transformers makes up a tokenizer without words, which is refused.

    Args:
      path: folder or Hub id.
      arguments: the recipe's; `model_revision` is used.

    Returns:
      The tokenizer.

    Raises:
      ValueError: the checkpoint has no tokenizer.
      OSError: see `fetched`.
    """
    advice = (
        "save the model's own tokenizer into its folder (tokenizer.save_pretrained), or start from "
        "a checkpoint that has one."
    )
    try:
        tokenizer = fetched(AutoTokenizer.from_pretrained, path, arguments)
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, OSError) and not Path(path).is_dir():
            raise
        said = (str(error).splitlines() or ["nothing"])[0]
        raise ValueError(f"{path} has no tokenizer that loads ({said}): {advice}") from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError(f"{path} has no tokenizer: {advice}")
    return tokenizer


def dtype_settings(
    arguments: ModelArguments, config: PreTrainedConfig, kept: Sequence[str] = ()
) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` for dtype and quantisation.

    Args:
      arguments: the recipe's.
      config: the checkpoint's, whose dtype "auto" takes.
      kept: modules that are not quantised; by default transformers leaves out the output layer.

    Returns:
      `dtype`, and with load_in_4bit or load_in_8bit `quantization_config`.

    Raises:
      ImportError: bitsandbytes is needed and not installed; names the pip command.
    """
    auto = arguments.torch_dtype == "auto"
    dtype = "auto" if auto else getattr(torch, arguments.torch_dtype)
    if not arguments.quantised:
        return {"dtype": dtype}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            f"load_in_{arguments.quantised}bit needs bitsandbytes, which is not installed; run "
            "pip install 'hf-dpzero[quantization]'"
        )
    from transformers import BitsAndBytesConfig

    skipped = list(kept) or None
    if arguments.load_in_8bit:  # LLM.int8(), Dettmers et al. 2022, arXiv:2208.07339
        quantisation = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    else:  # NormalFloat (QLoRA), Dettmers et al. 2023, arXiv:2305.14314
        compute = getattr(config, "dtype", None) or torch.float32 if auto else dtype
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=compute,
            llm_int8_skip_modules=skipped,
        )
    return {"dtype": dtype, "quantization_config": quantisation}


def placement_settings(arguments: ModelArguments) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` for where the weights go; none without a device_map."""
    if arguments.device_map is None:
        return {}
    names = ("device_map", "offload_folder", "max_memory")
    if arguments.offload_folder is not None:
        Path(arguments.offload_folder).mkdir(parents=True, exist_ok=True)
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def settle_quantised_(model: nn.Module) -> None:
    """Keeps bitsandbytes from rewriting 4-bit weights, and from a log line for each 8-bit product.

    On some CPUs the first forward pass packs 4-bit weights anew for bfloat16 arithmetic: the model
    would have another digest there, and a weight that changes in a forward pass is refused.
    Nothing else has to be prepared, as for backpropagation: there is no backward pass.
    """
    keep_layout_(model)
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_not_the_int8_cast)


def _not_the_int8_cast(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_INT8_CAST)
