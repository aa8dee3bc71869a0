"""Parameter-efficient fine-tuning of a recipe's model: LoRA, a prefix, or the biases (BitFit).

PEFT trains a copy of the classification head beside its adapters: parameters under
`modules_to_save` are used, those under `original_module` are idle. A language model's
head is pretrained and stays frozen.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.checkpoints import ADAPTER_FILE
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier
from hf_dpzero.training.validation import check_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_NAMES = ("classifier", "score", "classification_head", "qa_outputs")
_CLASSIFICATION = "sequence_classification"
_TASK_TYPES = {_CLASSIFICATION: "SEQ_CLS", "causal_lm": "CAUSAL_LM", "masked_lm": None}
# PEFT has no class for masked language models; this one runs any model with a prefix in front.
_PREFIX_TASK_TYPES = {**_TASK_TYPES, "masked_lm": "FEATURE_EXTRACTION"}


def with_adapters(
    model: PreTrainedModel, arguments: ModelArguments, head: str = _CLASSIFICATION
) -> Any:
    """Adds what `peft_method` asks for and freezes everything else.

    A classification head stays trainable, a language model's head does not.

    Guarantee: fresh adapter weights depend on `init_seed` (and, of a prefix on a language model, on
    the model) alone. They are float32, whatever the model is.

    Args:
      model: not changed but for `requires_grad` and the modules that PEFT puts in.
      arguments: the recipe's.
      head: "sequence_classification", "masked_lm" or "causal_lm".

    Returns:
      The PEFT model; `model` itself for bitfit, or without a peft_method.

    Raises:
      ValueError: lora_target_modules that name nothing that LoRA can be put on; bitfit of a model
        without biases; a prefix where attention takes none.
    """
    if arguments.peft_method is None:
        return model
    if arguments.peft_method == "bitfit":
        return _only_biases(model, head)
    generator = torch.Generator().manual_seed(arguments.init_seed + 1)
    if arguments.peft_method == "prefix" and head != _CLASSIFICATION:
        adapted = _with_real_prefix(model, arguments, head, generator)
    else:
        adapted = _adapted(model, _peft_config(model, arguments, head))
        _draw_adapters_(adapted, generator)
    check_adapters(adapted)
    return adapted


def trained_adapter(model: PreTrainedModel, folder: str, head: str = _CLASSIFICATION) -> Any:
    """Loads a saved adapter onto its base model, frozen, for evaluation.

    Args:
      model: the base model.
      folder: what `save_pretrained` of the adapter wrote.
      head: "sequence_classification", "masked_lm" or "causal_lm".

    Returns:
      The PEFT model.

    Raises:
      ValueError: the adapter was trained on another kind of model.
    """
    import peft

    saved = json.loads((Path(folder) / ADAPTER_FILE).read_text(encoding="utf-8"))
    kinds = _PREFIX_TASK_TYPES if saved.get("peft_type") == "PREFIX_TUNING" else _TASK_TYPES
    if saved.get("task_type") != kinds[head]:
        trained = next((k for k, v in kinds.items() if v == saved.get("task_type")), "different")
        raise ValueError(
            f"{folder} holds an adapter of a {trained} model, and the task needs a {head} model: "
            "give the recipe that it was trained with (its `prompt`)."
        )
    return peft.PeftModel.from_pretrained(model, folder)


def _adapted(model: PreTrainedModel, config: Any) -> Any:
    import peft

    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(_nothing_to_train(model, config, error)) from error


def _only_biases(model: PreTrainedModel, head: str) -> PreTrainedModel:
    """BitFit (Ben Zaken et al. 2022): trains the biases, and a classification head."""
    names = [name for name, _ in model.named_parameters()]
    of_head = {n for n in names if head == _CLASSIFICATION and n.split(".")[0] in HEAD_NAMES}
    biases = {name for name in names if name.endswith("bias")}
    if not biases - of_head:
        raise ValueError(
            f"peft_method=bitfit trains biases, and {type(model).__name__} has none below its head; "
            "use peft_method: lora."
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in biases | of_head)
    return model


def _peft_config(model: PreTrainedModel, arguments: ModelArguments, head: str) -> Any:
    import peft

    if arguments.peft_method == "prefix":
        return peft.PrefixTuningConfig(
            task_type=_PREFIX_TASK_TYPES[head], num_virtual_tokens=arguments.num_virtual_tokens
        )
    return peft.LoraConfig(
        task_type=_TASK_TYPES[head],
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


def _nothing_to_train(model: PreTrainedModel, config: Any, error: ValueError) -> str:
    said = f"PEFT says: {str(error).splitlines()[0]}"
    if not hasattr(config, "target_modules"):
        return f"{_no_prefix(model)} {said}"
    kinds = {n.rsplit(".", 1)[-1]: m for n, m in model.named_modules() if _takes_lora(m)}
    output = model.get_output_embeddings()
    body = sorted(n for n, m in kinds.items() if n not in HEAD_NAMES and m is not output)
    fate = "is trained anyway" if config.task_type == "SEQ_CLS" else "is not trained"
    targets = config.target_modules
    return (
        f"peft_method=lora has nothing to train with "
        f"lora_target_modules={sorted(targets) if targets else None}: name linear layers of the "
        f"body, of {', '.join(body)} (the head {fate}). {said}"
    )


def _takes_lora(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _no_prefix(model: nn.Module) -> str:
    return (
        f"peft_method=prefix puts keys and values in front of every attention layer's own, and "
        f"{type(model).__name__} takes none of one shape from outside; use peft_method: lora or "
        "bitfit."
    )


# ---------------------------------------------------------------- fresh weights


@torch.no_grad()
def _with_real_prefix(
    model: PreTrainedModel, arguments: ModelArguments, head: str, generator: torch.Generator
) -> Any:
    """A prefix that starts as the keys and values of random tokens of the vocabulary.

    Real activations are a far better start than N(0, 1) (Li & Liang 2021, arXiv:2101.00190, section
    7.4), and MeZO's prefixes start so (Malladi et al. 2023, arXiv:2305.17333, appendix). A causal
    model then does at first what it does with these tokens in front of the text.

    Raises:
      ValueError: the model's attention takes no keys and values from outside.
    """
    count = arguments.num_virtual_tokens
    embeddings: Any = model.get_input_embeddings()
    tokens = torch.randint(embeddings.weight.shape[0], (1, count), generator=generator)
    layers = _keys_and_values(model.eval(), tokens)
    if not layers or len({layer.shape for layer in layers}) > 1:
        raise ValueError(_no_prefix(model))
    adapted = _adapted(model, _peft_config(model, arguments, head))
    weight = adapted.prompt_encoder[adapted.active_adapter].embedding.weight
    start = torch.cat(layers).permute(2, 0, 1, 3).reshape(count, -1)
    if weight.shape != start.shape:
        raise ValueError(_no_prefix(model))
    weight.copy_(start)
    return adapted


def _keys_and_values(model: Any, tokens: Tensor) -> list[Tensor]:
    """Of each layer, `[2, heads, T, head_dim]` for tokens `[1, T]`: what a forward pass caches."""
    from transformers import DynamicCache

    tokens = tokens.to(model.get_input_embeddings().weight.device)
    cache: Any = DynamicCache()
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache)
    filled = [layer for layer in cache.layers if layer.get_seq_length()]
    return [torch.stack([layer.keys[0], layer.values[0]]) for layer in filled]


@torch.no_grad()
def _draw_adapters_(model: nn.Module, generator: torch.Generator) -> None:
    """PEFT's initialisation, from `generator`; drawn on the CPU, wherever the model is.

    LoRA's A is Kaiming uniform and B zero; of an embedding A is zero and B N(0, 1); a prefix on a
    classifier is N(0, 1).
    """
    for name, parameter in sorted(model.named_parameters()):
        if not _is_drawn(name):
            continue
        drawn = torch.empty_like(parameter, device="cpu")
        if "lora_A" in name:
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        else:
            drawn.normal_(0.0, 1.0, generator=generator)
        parameter.copy_(drawn)


def _is_drawn(name: str) -> bool:
    return any(part in name for part in ("lora_A", "prompt_encoder", "lora_embedding_B"))
