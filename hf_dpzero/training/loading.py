"""A model given by name, and adapters put on a model, as TRL's trainers take them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers
from torch import nn

from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.heads import select_objective


def load_named(name: str, seed: int, has_loss: bool = False) -> nn.Module:
    """The model of a folder or Hub id, in float32, of the class that its configuration names.

    Args:
      name: a folder or a Hub id.
      seed: of the weights that the checkpoint lacks, such as a fresh head.
      has_loss: a loss was given, so that any class will do.

    Raises:
      ValueError: transformers does not have that class, or it is a base without a head.
    """
    from safetensors import SafetensorError

    config = transformers.AutoConfig.from_pretrained(name)
    names = getattr(config, "architectures", None) or [None]
    kind = getattr(transformers, str(names[0]), None)
    if kind is None:
        raise ValueError(
            f"model={name!r}: its config has architectures={names}, a class that transformers does not "
            "have: load it yourself (from_pretrained) and pass the model."
        )
    with isolated_randomness(seed):
        try:
            model = kind.from_pretrained(name, dtype=torch.float32)
        except SafetensorError as error:
            raise ValueError(f"model={name!r}: its weights are damaged ({error}).") from error
    if not has_loss:
        _check_head(name, model)
    return model


def _check_head(name: str, model: nn.Module) -> None:
    try:
        select_objective(model)
    except ValueError:
        raise ValueError(
            f"model={name!r} was saved as a {type(model).__name__}, without a head with a loss: load "
            "it with the head to be trained, AutoModelForCausalLM.from_pretrained say, and pass that."
        ) from None


def load_processing(name: str) -> Any:
    """The tokenizer or processor of a folder or Hub id; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return transformers.AutoProcessor.from_pretrained(name)
    return None


def with_adapter(model: Any, peft_config: Any, seed: int) -> nn.Module:
    """The model under a new adapter of PEFT; all else is frozen.

    Args:
      model: a plain model.
      peft_config: a `peft.PeftConfig`.
      seed: of the adapter's weights.

    Raises:
      ValueError: another kind of configuration, or a model that has an adapter.
    """
    import peft

    if not isinstance(peft_config, peft.PeftConfig):
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}: give a peft.PeftConfig, say LoraConfig()."
        )
    if isinstance(model, peft.PeftModel):
        raise ValueError(
            "peft_config was given for a model that has an adapter: leave peft_config out to train that "
            "one, or merge it first with model.merge_and_unload()."
        )
    with isolated_randomness(seed):
        return peft.get_peft_model(model, peft_config)
