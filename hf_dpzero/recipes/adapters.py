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
from torch import nn

from hf_dpzero.checks.model import check_adapters
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier

if TYPE_CHECKING:
    from peft import PeftModel, PrefixTuningConfig
    from transformers import PreTrainedModel

ADAPTER_FILE = "adapter_config.json"
HEAD_NAMES = ("classifier", "score", "classification_head", "qa_outputs")
_CLASSIFICATION = "sequence_classification"
_TASK_TYPES = {_CLASSIFICATION: "SEQ_CLS", "causal_lm": "CAUSAL_LM", "masked_lm": None}
# PEFT has no class for masked language models; this one runs any model with a prefix in front.
_PREFIX_TASK_TYPES = {**_TASK_TYPES, "masked_lm": "FEATURE_EXTRACTION"}


def with_adapters(
    model: PreTrainedModel, arguments: ModelArguments, head: str = _CLASSIFICATION
) -> PreTrainedModel | PeftModel:
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
        return _only_biases_(model, head)
    # PEFT draws from the global generator: what it draws is drawn again, from another stream than
    # that of a fresh head, which `init_seed` itself starts.
    generator = torch.Generator().manual_seed(arguments.init_seed + 1)
    if arguments.peft_method == "prefix":
        adapted = _with_prefix(model, arguments, head, generator)
    else:
        adapted = _with_lora(model, arguments, head)
    if arguments.peft_method == "lora" or head == _CLASSIFICATION:
        _draw_adapters_(adapted, generator)
    check_adapters(adapted)
    return adapted


def trained_adapter(model: PreTrainedModel, folder: str, head: str = _CLASSIFICATION) -> PeftModel:
    """Loads a saved adapter onto its base model, frozen, for evaluation.

    Raises:
      ValueError: the adapter was trained on another kind of model.
    """
    import peft

    # PEFT would put weights of the same shapes onto any head.
    saved = json.loads((Path(folder) / ADAPTER_FILE).read_text(encoding="utf-8"))
    kinds = _PREFIX_TASK_TYPES if saved.get("peft_type") == "PREFIX_TUNING" else _TASK_TYPES
    if saved.get("task_type") != kinds[head]:
        trained = next((k for k, v in kinds.items() if v == saved.get("task_type")), "different")
        raise ValueError(
            f"{folder} holds an adapter of a {trained} model, and the task needs a {head} model: "
            "give the recipe that it was trained with (its `prompt`)."
        )
    return peft.PeftModel.from_pretrained(model, folder)


def _only_biases_(model: PreTrainedModel, head: str) -> PreTrainedModel:
    """BitFit (Ben Zaken et al. 2022): trains the biases, and a classification head."""
    names = [name for name, _ in model.named_parameters()]
    # A fresh head is trained whole; a pretrained one is part of the model, whose biases alone move.
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


def _with_lora(model: PreTrainedModel, arguments: ModelArguments, head: str) -> PeftModel:
    """LoRA on the modules that the recipe names, or on PEFT's choice for the model or its encoder."""
    import peft
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    targets = arguments.lora_target_modules or None
    # PEFT knows modules by the type of a model, and ours is not among them: its encoder is.
    if targets is None and isinstance(model, SentenceClassifier):
        kind = model.config.encoder.model_type
        if kind not in KNOWN:
            raise ValueError(f"no LoRA targets are known for {kind!r}; set lora_target_modules.")
        targets = list(KNOWN[kind])
    config = peft.LoraConfig(
        task_type=_TASK_TYPES[head],
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,  # both losses of a difference must see the same model
        target_modules=targets,
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        # By their last names, as lora_target_modules takes them; Conv1D is GPT-2's linear layer.
        kinds = {
            name.rsplit(".", 1)[-1]: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        }
        output = model.get_output_embeddings()
        body = sorted(n for n, m in kinds.items() if n not in HEAD_NAMES and m is not output)
        fate = "is trained anyway" if head == _CLASSIFICATION else "is not trained"
        named = sorted(config.target_modules) if config.target_modules else None
        raise ValueError(
            f"peft_method=lora has nothing to train with lora_target_modules={named}: name linear "
            f"layers of the body, of {', '.join(body)} (the head {fate}). PEFT says: "
            f"{str(error).splitlines()[0]}"
        ) from error


def prefix_config(num_virtual_tokens: int, head: str) -> PrefixTuningConfig:
    """Returns PEFT's configuration of a prefix.

    Args:
      num_virtual_tokens: its length, >= 1.
      head: "sequence_classification", "masked_lm" or "causal_lm".
    """
    import peft

    kind = _PREFIX_TASK_TYPES[head]
    return peft.PrefixTuningConfig(task_type=kind, num_virtual_tokens=num_virtual_tokens)


@torch.no_grad()
def _with_prefix(
    model: PreTrainedModel, arguments: ModelArguments, head: str, generator: torch.Generator
) -> PeftModel:
    """A prefix that on a language model starts as the keys and values of random tokens."""
    import peft
    from transformers import DynamicCache

    refusal = (
        f"peft_method=prefix puts keys and values in front of every attention layer's own, and "
        f"{type(model).__name__} takes none of one shape from outside; use peft_method: lora or "
        "bitfit."
    )
    count, start = arguments.num_virtual_tokens, None
    # Real activations are a far better start than N(0, 1) (Li & Liang 2021, arXiv:2101.00190, section
    # 7.4), and MeZO's prefixes start so (Malladi et al. 2023, arXiv:2305.17333, appendix). A causal
    # model then does at first what it does with these tokens in front of the text.
    if head != _CLASSIFICATION:
        table: Any = model.get_input_embeddings()
        tokens = torch.randint(table.weight.shape[0], (1, count), generator=generator)
        tokens, cache = tokens.to(table.weight.device), DynamicCache()
        mask = torch.ones_like(tokens)
        model.eval()(input_ids=tokens, attention_mask=mask, past_key_values=cache)
        cached: list[Any] = cache.layers
        filled = [layer for layer in cached if layer.get_seq_length()]
        layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in filled]
        if not layers or len({layer.shape for layer in layers}) > 1:
            raise ValueError(refusal)
        start = torch.cat(layers).permute(2, 0, 1, 3).reshape(count, -1)
    config = prefix_config(count, head)
    try:
        adapted: Any = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"{refusal} PEFT says: {str(error).splitlines()[0]}") from error
    if start is not None:
        weight = adapted.prompt_encoder[adapted.active_adapter].embedding.weight
        if weight.shape != start.shape:
            raise ValueError(refusal)
        weight.copy_(start)
    return adapted


@torch.no_grad()
def _draw_adapters_(model: nn.Module, generator: torch.Generator) -> None:
    """PEFT's initialisation, from `generator`; drawn on the CPU, wherever the model is.

    LoRA's A is Kaiming uniform and B zero; of an embedding A is zero and B N(0, 1); a prefix on a
    classifier is N(0, 1).
    """
    # The order of the draws is part of what replay rebuilds.
    for name, parameter in sorted(model.named_parameters()):
        if not any(part in name for part in ("lora_A", "prompt_encoder", "lora_embedding_B")):
            continue
        drawn = torch.empty_like(parameter, device="cpu")
        if "lora_A" in name:
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        else:
            drawn.normal_(0.0, 1.0, generator=generator)
        parameter.copy_(drawn)
