"""Which few parameters of a recipe's model are trained: LoRA, a prefix, or the biases (BitFit).

PEFT keeps the head trainable beside its adapters by training a copy of it: the parameters called
`modules_to_save` run, those called `original_module` lie idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_dpzero.recipe_arguments import ModelArguments
from hf_dpzero.sentence_classifier import SentenceClassifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_NAMES = ("classifier", "score", "classification_head", "qa_outputs")
_IDLE = ".original_module."


def with_adapters(model: PreTrainedModel, arguments: ModelArguments) -> Any:
    """The model with what `peft_method` adds, everything else frozen; the head stays trainable.

    Guarantee: fresh adapter weights depend on `init_seed` alone.

    Raises:
      ValueError: lora_target_modules that name nothing that LoRA can be put on.
    """
    if arguments.peft_method is None:
        return model
    if arguments.peft_method == "bitfit":
        return _only_biases_and_head(model)
    import peft

    config = _peft_config(model, arguments)
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(_no_targets(model, config, error)) from error
    _draw_adapters_(adapted, torch.Generator().manual_seed(arguments.init_seed + 1))
    check_adapters(adapted)
    return adapted


def _only_biases_and_head(model: PreTrainedModel) -> PreTrainedModel:
    """BitFit (Ben Zaken et al. 2022): trains the biases, and the head."""
    for name, parameter in model.named_parameters():
        of_head = name.split(".")[0] in HEAD_NAMES
        parameter.requires_grad_(of_head or name.endswith("bias"))
    return model


def _peft_config(model: PreTrainedModel, arguments: ModelArguments) -> Any:
    import peft

    if arguments.peft_method == "prefix":
        return peft.PrefixTuningConfig(
            task_type="SEQ_CLS", num_virtual_tokens=arguments.num_virtual_tokens
        )
    return peft.LoraConfig(
        task_type="SEQ_CLS",
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=arguments.lora_target_modules or _default_targets(model),
    )


def _default_targets(model: PreTrainedModel) -> list[str] | None:
    """PEFT's LoRA targets for the encoder under a sentence_classifier; None lets PEFT choose."""
    if not isinstance(model, SentenceClassifier):
        return None
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    kind = model.config.encoder.model_type
    if kind not in KNOWN:
        raise ValueError(f"no LoRA targets are known for {kind!r}; set lora_target_modules.")
    return list(KNOWN[kind])


def _no_targets(model: nn.Module, config: Any, error: ValueError) -> str:
    linear = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    targets = getattr(config, "target_modules", None)
    return (
        f"peft_method={str(config.peft_type.value).lower()} has nothing to train with "
        f"lora_target_modules={sorted(targets) if targets else None}: name linear layers of the "
        f"body, of {', '.join(sorted(linear - {*HEAD_NAMES}))} (the head is trained anyway). PEFT "
        f"says: {str(error).splitlines()[0]}"
    )


@torch.no_grad()
def _draw_adapters_(model: nn.Module, generator: torch.Generator) -> None:
    """PEFT's initialisation, from `generator`.

    LoRA's A is Kaiming uniform and B zero; of an embedding A is zero and B N(0, 1); a prefix is
    N(0, 1).
    """
    for name, parameter in sorted(model.named_parameters()):
        if "lora_A" in name:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
        elif "prompt_encoder" in name or "lora_embedding_B" in name:
            parameter.normal_(0.0, 1.0, generator=generator)


def check_adapters(model: nn.Module) -> None:
    """Refuses a PEFT model whose adapter is not trained, or that trains an idle copy of the head.

    Other models pass. To be called after `select_trainable`, whose pattern sees PEFT's names:
    "classifier" finds the idle copy of the head too, and not the adapter.

    Raises:
      ValueError: says which parameters would be trained, and a pattern that fits.
    """
    if not hasattr(model, "peft_config"):
        return
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    idle = [name for name in names if _IDLE in name]
    if idle:
        raise ValueError(
            f"{idle[0]} would be trained, but PEFT runs the copy of it called modules_to_save; "
            f"leave `trainable` at null, which trains the adapter and the head, or set it to "
            f"{_pattern(model)!r}."
        )
    if not _of_adapter(model, names):
        raise ValueError(
            f"no parameter of the adapter would be trained (but {', '.join(names[:3]) or 'none'}); "
            f"leave `trainable` at null or set it to {_pattern(model)!r}. To train the head alone, "
            "drop peft_method."
        )


def _of_adapter(model: nn.Module, names: Iterable[str]) -> list[str]:
    prefix = _prefix(model)
    return [name for name in names if prefix in name]


def _prefix(model: Any) -> str:
    """What the adapter's parameters have in their names: PEFT's "lora_", or "prompt_encoder"."""
    return str(getattr(model.base_model, "prefix", "prompt_encoder"))


def _pattern(model: nn.Module) -> str:
    return f"{_prefix(model)}|modules_to_save"
