"""Builds a recipe's model: finds the checkpoint, loads it, gives it a head and adapters."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from hf_dpzero.checks.precision import keep_layout_
from hf_dpzero.parallel.offload import settle_offloaded
from hf_dpzero.recipes.adapters import ADAPTER_FILE, HEAD_NAMES, trained_adapter, with_adapters
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier, label_text_weights
from hf_dpzero.reporting.provenance import resolve_path

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from hf_dpzero.tasks import AnyTask
    from hf_dpzero.tasks.classification import Task

LANGUAGE_MODELS: dict[str, Any] = {
    "masked_lm": AutoModelForMaskedLM,
    "causal_lm": AutoModelForCausalLM,
}
_COMPONENTS = ("public_features.weight", "public_features.bias")
Loaded = TypeVar("Loaded")


def load_model(
    arguments: ModelArguments, task: AnyTask, adapter: str | None = None, fitted: Path | None = None
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Loads the model that a recipe describes, and its tokenizer.

    On the CPU; a quantised base goes to the accelerator at once where there is one.

    Guarantee: a pure function of the checkpoint and the arguments; weights that the checkpoint does
    not have are drawn from a generator seeded with `init_seed`, never from the global one.

    Args:
      arguments: the recipe's.
      task: `task.head` says which kind of model: "sequence_classification" (the number and names of
        its labels are the task's), "masked_lm" or "causal_lm".
      adapter: folder of a trained adapter, used in place of a fresh one.
      fitted: folder of weights whose `public_features` are taken; None fits them to `public_file`.

    Returns:
      Model in eval mode, and tokenizer.

    Raises:
      ImportError: the package of a `package:` path, or bitsandbytes, is not installed; names the
        pip command.
      OSError: the checkpoint is neither local, cached nor reachable; says how to get it.
      ValueError: settings, checkpoint, tokenizer and task that do not fit together.
    """
    head = task.head
    _check_head(arguments, task)
    path = resolve_path(arguments.model_name_or_path)
    config = fetched(AutoConfig.from_pretrained, path, arguments)
    tokenizer = load_tokenizer(path, arguments)
    if head in LANGUAGE_MODELS:
        model, fresh = _load_language_model(path, config, arguments, head)
        if head == "masked_lm" and tokenizer.mask_token is None:
            raise ValueError(
                f"the tokenizer of {path} has no mask token, which a masked_lm prompt asks at: load "
                "the model's own tokenizer (tokenizer.mask_token must be set)."
            )
    else:
        model, fresh = _load_classifier(path, config, arguments, task)
    # `path` may be a folder of this machine, and config.json is published.
    model.config._name_or_path = arguments.model_name_or_path
    settle_quantised_(model)
    settle_offloaded(model)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("the tokenizer has neither a padding token nor an end token: set one.")
        # Most decoders' have none; the mask hides what fills a row up, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    _init_fresh_(model, fresh, arguments.init_seed)
    if isinstance(model, SentenceClassifier) and _COMPONENTS[0] in fresh:
        from hf_dpzero.recipes.public_features import fit_public_features_, take_public_features_

        if fitted is None:
            fit_public_features_(model, tokenizer, cast("Task", task), str(arguments.public_file))
        else:
            take_public_features_(model, fitted)
    if fresh and head not in LANGUAGE_MODELS and arguments.head_init != "random":
        _init_head_(model, tokenizer, arguments)
    if adapter is not None:
        return trained_adapter(model, adapter, head).eval(), tokenizer
    return with_adapters(model, arguments, head).eval(), tokenizer


def _check_head(arguments: ModelArguments, task: AnyTask) -> None:
    """Refuses settings of another head or architecture than the task's and the recipe's."""
    prompted = task.head in LANGUAGE_MODELS
    for_vectors = ("logit_scale", "precompute_features", "pair_features", "features", "components")
    names: tuple[str, ...] = ()
    if prompted:
        names = ("architecture", "head_init", "label_texts", *for_vectors, "pooling", "normalize")
    elif arguments.architecture == "auto":
        names = for_vectors
        if arguments.head_init == "label_text":
            raise ValueError(
                "head_init=label_text needs architecture: sentence_classifier (the head must act "
                "on the same vectors that the descriptions are embedded to)."
            )
    elif arguments.peft_method == "prefix":
        raise ValueError("peft_method=prefix needs architecture: auto; use lora or bitfit here.")
    elif arguments.quantised:
        raise ValueError(
            f"load_in_{arguments.quantised}bit=True needs architecture: auto; a "
            "sentence_classifier's encoder is loaded in float32, bfloat16 or float16."
        )
    usual = ModelArguments(model_name_or_path="")
    for name in names:
        value = getattr(arguments, name)
        if value == getattr(usual, name):
            continue
        if not prompted:
            raise ValueError(f"{name}={value!r} needs architecture: sentence_classifier.")
        raise ValueError(
            f"{name}={value!r} is about a classification head, and with prompt: {task.head} the "
            f"language model answers in words: leave {name} out, or set prompt to null."
        )
    texts = arguments.label_texts or []
    if arguments.head_init == "label_text" and len(texts) != task.num_labels:
        raise ValueError(
            f"label_texts has {len(texts)} descriptions for {task.num_labels} labels "
            f"({', '.join(task.label_names)}); give one each, in this order."
        )


def _load_classifier(
    path: str, config: PreTrainedConfig, arguments: ModelArguments, task: AnyTask
) -> tuple[PreTrainedModel, list[str]]:
    """The classifier, and the names of the parameters that the checkpoint did not have."""
    labels = {
        "num_labels": task.num_labels,
        "id2label": dict(enumerate(task.label_names)),
        "label2id": {name: index for index, name in enumerate(task.label_names)},
    }
    settings = loading_settings(arguments, config, kept=HEAD_NAMES)
    trained = config.model_type == "sentence_classifier"
    if arguments.architecture != "auto" and not trained:
        encoder = fetched(AutoModel.from_pretrained, path, arguments, **settings)
        encoder.config._name_or_path = arguments.model_name_or_path
        model = SentenceClassifier.from_encoder(encoder, **labels, **arguments.vector_settings)
        fitted = _COMPONENTS if arguments.components is not None else ()
        return model, ["classifier.weight", "classifier.bias", *fitted]
    # A trained classifier has labels of its own, which are compared and not overwritten.
    settings |= {} if trained else labels
    load = AutoModelForSequenceClassification.from_pretrained
    model, info = fetched(load, path, arguments, output_loading_info=True, **settings)
    if model.config.num_labels != task.num_labels:
        raise ValueError(
            f"the checkpoint has a head for {model.config.num_labels} labels, task {task.name!r} "
            f"has {task.num_labels}; start from another model or task."
        )
    for name in ("pair_features", "features", "components"):
        wanted = getattr(arguments, name)
        made = getattr(model.config, name, wanted)
        if made != wanted:
            raise ValueError(
                f"the checkpoint was made with {name}={made!r}, the recipe says {wanted!r}; set "
                f"{name}: {'null' if made is None else made}."
            )
    return model, sorted(info["missing_keys"])


def _load_language_model(
    path: str, config: PreTrainedConfig, arguments: ModelArguments, head: str
) -> tuple[PreTrainedModel, list[str]]:
    """The pretrained language model, and the names of the parameters that its checkpoint lacks."""
    # As causal_lm an encoder would see the answer; as masked_lm a decoder has no mask.
    known = {kind for kind, auto in LANGUAGE_MODELS.items() if type(config) in auto._model_mapping}
    decoder = getattr(config, "is_decoder", False)
    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decoder
    if not (encoder if head == "masked_lm" else not encoder and head in known):
        other = "masked_lm" if encoder else "causal_lm"
        instead = f"set prompt: {other}, or load" if other in known else "load"
        raise ValueError(
            f"{path} has the type {config.model_type}, which does not serve as a {head}: {instead} a "
            f"{'BERT or RoBERTa' if head == 'masked_lm' else 'GPT-2, OPT, Llama or Qwen'}, say."
        )
    load, settings = LANGUAGE_MODELS[head].from_pretrained, loading_settings(arguments, config)
    model, info = fetched(load, path, arguments, output_loading_info=True, **settings)
    # A head that is tied to the embeddings is not in the checkpoint, and is not missing either.
    fresh = sorted(info["missing_keys"])
    absent = [name for name in fresh if not name.startswith(f"{model.base_model_prefix}.")]
    if absent:
        saved = ", ".join(getattr(model.config, "architectures", None) or ["a bare model"])
        raise ValueError(
            f"{path} has no language-model head ({absent[0]} and {len(absent) - 1} more are not in "
            f"it; it was saved as {saved}), and prompts are answered by the pretrained one: load a "
            f"checkpoint of {type(model).__name__}, or set prompt to null to train a classification "
            "head."
        )
    return model, fresh


@torch.no_grad()
def _init_fresh_(model: PreTrainedModel, fresh: Sequence[str], init_seed: int) -> None:
    """Draws the parameters that the checkpoint did not bring, on the CPU wherever the model is.

    Matrices are N(0, initializer_range^2), biases 0, other vectors (norm scales) 1.
    """
    config: Any = getattr(model.config, "encoder", model.config)
    std = getattr(config, "initializer_range", None) or getattr(config, "init_std", None) or 0.02
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(init_seed)
    for name in sorted(fresh):  # the order of the draws is part of what replay rebuilds
        layer = model.get_submodule(name.rpartition(".")[0])
        if type(layer).__module__.startswith("bitsandbytes"):
            raise ValueError(  # drawn as float32 it would not be quantised
                f"the checkpoint has no {name}, and weights of a quantised layer are not drawn at "
                "random: drop load_in_4bit and load_in_8bit, or start from a checkpoint that has it."
            )
        parameter = parameters.get(name)
        if parameter is not None and parameter.dim() > 1:
            drawn = torch.empty_like(parameter, device="cpu")
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))
        elif parameter is not None:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


@torch.no_grad()
def _init_head_(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: ModelArguments
) -> None:
    """Starts the head, the last linear layer with an output a label, at zero or at label_texts."""
    labels = model.config.num_labels
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == labels]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer with {labels} outputs.")
    head = layers[-1]
    head.weight.zero_()
    if head.bias is not None:
        head.bias.zero_()
    if arguments.head_init == "label_text" and isinstance(model, SentenceClassifier):
        head.weight.copy_(label_text_weights(model, tokenizer, arguments.label_texts or []))


def check_folder(path: str) -> None:
    """Refuses a path to no folder, and a folder without a model; a Hub id passes.

    Raises:
      FileNotFoundError: says what is at the path instead.
    """
    place = Path(path)
    if place.is_dir() and not (place / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} holds an adapter and no model: set model_name_or_path to the model that the "
            "adapter was trained on."
            if (place / ADAPTER_FILE).is_file()
            else f"{path} has no config.json, so it is no saved model: give the folder that "
            "save_pretrained wrote to."
        )
    if place.is_file():
        raise FileNotFoundError(
            f"model_name_or_path={path!r} is a file; give the folder that holds config.json."
        )
    # A Hub id has at most one slash and starts with a letter, digit or underscore.
    outside = path.startswith((".", "/", "~", "\\")) or path.count("/") > 1 or "\\" in path
    if outside and not place.is_dir():
        home = " (~ is not expanded: write the whole path)" if path.startswith("~") else ""
        raise FileNotFoundError(
            f"model_name_or_path={path!r}: no such folder{home}; relative paths are taken from "
            f"{Path.cwd()}."
        )


def fetched(
    load: Callable[..., Loaded], path: str, arguments: ModelArguments, **settings: Any
) -> Loaded:
    """Calls load(path) at the recipe's revision; failures say how to get the checkpoint.

    Args:
      load: a `from_pretrained`.
      path: folder or Hub id.
      arguments: the recipe's; `model_revision` is used.
      settings: passed on to `load`.

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
    while error is not None:  # transformers raises an OSError of its own from the Hub's answer
        kinds.add(type(error).__name__)
        error = error.__cause__ or error.__context__
    parent = Path(path).parent
    if "/" in path and parent.is_dir():
        return (
            f"{path} does not exist: {parent} is a folder here and has no {Path(path).name}, and the "
            f"Hub gave no model of that name either ({kind})."
        )
    command = f"`hf download {path}{f' --revision {revision}' if revision else ''}`"
    offline = " with HF_HUB_OFFLINE unset" if HF_HUB_OFFLINE else ""
    said = {
        "GatedRepoError": f"is gated: accept its terms at https://huggingface.co/{path}, log in with "
        f"`hf auth login`, then fetch it with {command}.",
        "RepositoryNotFoundError": "is no local folder, and the Hub has no model of that name that "
        "you may see: check the name, or log in with `hf auth login` if it is private.",
        "RevisionNotFoundError": f"has no revision {revision!r}; check model_revision.",
    }
    unreachable = (
        f"is no local folder, and neither cached nor reachable ({kind}); fetch it once with {command}"
        f"{offline}, or set model_name_or_path to a local folder."
    )
    # A gated model is one that is not found, too.
    return f"model {path!r} " + next((said[name] for name in said if name in kinds), unreachable)


def load_tokenizer(path: str, arguments: ModelArguments) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder or Hub id, at the recipe's `model_revision`.

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
    except (OSError, ValueError, ImportError) as error:  # ImportError: say, of sentencepiece
        if isinstance(error, OSError) and not Path(path).is_dir():
            raise
        said = (str(error).splitlines() or ["nothing"])[0]
        raise ValueError(f"{path} has no tokenizer that loads ({said}): {advice}") from error
    # Where its files are missing transformers makes up a tokenizer that knows no word.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError(f"{path} has no tokenizer: {advice}")
    return tokenizer


def loading_settings(
    arguments: ModelArguments, config: PreTrainedConfig, kept: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns keyword arguments of `from_pretrained` for dtype, quantisation and where weights go.

    Args:
      arguments: the recipe's.
      config: the checkpoint's, whose dtype "auto" takes.
      kept: modules that are not quantised; by default transformers leaves out the output layer.

    Returns:
      `dtype`, with load_in_4bit or load_in_8bit `quantization_config`, and what of device_map,
      offload_folder and max_memory is set beside a device_map.

    Raises:
      ImportError: bitsandbytes is needed and not installed; names the pip command.
    """
    auto = arguments.torch_dtype == "auto"
    dtype = "auto" if auto else getattr(torch, arguments.torch_dtype)
    if not arguments.quantised:
        mapped = arguments.device_map is not None
        names = ("device_map", "offload_folder", "max_memory") if mapped else ()
        places = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        if "offload_folder" in places:
            Path(places["offload_folder"]).mkdir(parents=True, exist_ok=True)
        return {"dtype": dtype, **places}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            f"load_in_{arguments.quantised}bit needs bitsandbytes, which is not installed; run "
            "pip install bitsandbytes"
        )
    from transformers import BitsAndBytesConfig

    settings: dict[str, Any] = {"load_in_8bit": True}  # Dettmers et al. 2022, arXiv:2208.07339
    if arguments.load_in_4bit:  # NormalFloat (QLoRA), Dettmers et al. 2023, arXiv:2305.14314
        compute = getattr(config, "dtype", None) or torch.float32 if auto else dtype
        settings = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": compute,
        }
    quantisation = BitsAndBytesConfig(llm_int8_skip_modules=list(kept) or None, **settings)
    return {"dtype": dtype, "quantization_config": quantisation}


def settle_quantised_(model: nn.Module) -> None:
    """Keeps bitsandbytes from rewriting 4-bit weights, and from a log line for each 8-bit product.

    Nothing else has to be prepared, as for backpropagation: there is no backward pass.
    """
    # On some CPUs the first forward pass packs 4-bit weights anew for bfloat16 arithmetic: the model
    # would have another digest there, and a weight that changes in a forward pass is refused.
    keep_layout_(model)
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_not_the_int8_cast)


def _not_the_int8_cast(record: logging.LogRecord) -> bool:
    # A module's own function: a filter that is added again is kept once.
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast from")
