"""Builds a recipe's model: checkpoint, head and adapters; stores features of a frozen encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.objectives.losses import base_model, right_padded
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.recipes.adapters import HEAD_NAMES, trained_adapter, with_adapters
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.checkpoints import dtype_settings, fetched, load_tokenizer, settle_quantised_
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier, label_text_weights
from hf_dpzero.reporting.provenance import resolve_path

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from hf_dpzero.tasks.prompted import PromptTask
    from hf_dpzero.tasks.task import Task

__all__ = ["load_model", "output_layer", "precompute_features", "resolve_path"]

CLASSIFICATION = "sequence_classification"
LANGUAGE_MODELS: dict[str, Any] = {
    "masked_lm": AutoModelForMaskedLM,
    "causal_lm": AutoModelForCausalLM,
}

_MAP_BATCH = 2048


def load_model(
    arguments: ModelArguments, task: Task | PromptTask, adapter: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the model that a recipe describes, and its tokenizer.

    On the CPU; a quantised base goes to the accelerator at once where there is one.

    Guarantee: a pure function of the checkpoint and the arguments; weights that the checkpoint does
    not have are drawn from a generator seeded with `init_seed`, never from the global one.

    Args:
      arguments: the recipe's.
      task: `task.head` says which kind of model: "sequence_classification" (the number and names of
        its labels are the task's), "masked_lm" or "causal_lm".
      adapter: folder of a trained adapter, used in place of a fresh one.

    Returns:
      Model in eval mode, and tokenizer.

    Raises:
      ImportError: the package of a `package:` path, or bitsandbytes, is not installed; names the
        pip command.
      OSError: the checkpoint is neither local, cached nor reachable; says how to get it.
      ValueError: settings, checkpoint, tokenizer and task that do not fit together.
    """
    head = getattr(task, "head", CLASSIFICATION)
    _check(arguments, task, head)
    path = resolve_path(arguments.model_name_or_path)
    config = fetched(AutoConfig.from_pretrained, path, arguments)
    tokenizer = load_tokenizer(path, arguments)
    if head in LANGUAGE_MODELS:
        model, fresh = _load_language_model(path, config, arguments, head)
        _check_mask_token(tokenizer, head, path)
    else:
        model, fresh = _load(path, config, arguments, task)
    model.config._name_or_path = arguments.model_name_or_path
    settle_quantised_(model)
    _share_padding(model, tokenizer)
    if fresh:
        _init_fresh_(model, tokenizer, fresh, arguments, head)
    if adapter is not None:
        return trained_adapter(model, adapter, head).eval(), tokenizer
    return with_adapters(model, arguments, head).eval(), tokenizer


def _check(arguments: ModelArguments, task: Task | PromptTask, head: str) -> None:
    if head in LANGUAGE_MODELS:
        _check_no_classifier(arguments, head)
    elif arguments.architecture == "auto":
        _check_whole_checkpoint(arguments)
    else:
        _check_sentence_classifier(arguments)
    if arguments.head_init == "label_text":
        _check_label_texts(arguments.label_texts or [], task)


def _check_no_classifier(arguments: ModelArguments, head: str) -> None:
    """Refuses what is said about a classification head, where words are the labels."""
    plain = ModelArguments(model_name_or_path="")
    names = ("architecture", "head_init", "label_texts", "pair_features", "logit_scale")
    for name in (*names, "precompute_features", "pooling", "normalize"):
        value = getattr(arguments, name)
        if value != getattr(plain, name):
            raise ValueError(
                f"{name}={value!r} is about a classification head, and with prompt: {head} the "
                f"language model answers in words: leave {name} out, or set prompt to null."
            )


def _check_whole_checkpoint(arguments: ModelArguments) -> None:
    defaults = {"logit_scale": 1.0, "precompute_features": False, "pair_features": "joint"}
    for name, default in defaults.items():
        if getattr(arguments, name) != default:
            raise ValueError(
                f"{name}={getattr(arguments, name)} needs architecture: sentence_classifier."
            )
    if arguments.head_init == "label_text":
        raise ValueError(
            "head_init=label_text needs architecture: sentence_classifier (the head must act "
            "on the same vectors that the descriptions are embedded to)."
        )


def _check_sentence_classifier(arguments: ModelArguments) -> None:
    if arguments.peft_method == "prefix":
        raise ValueError("peft_method=prefix needs architecture: auto; use lora or bitfit here.")
    if arguments.quantised:
        raise ValueError(
            f"load_in_{arguments.quantised}bit=True needs architecture: auto; a "
            "sentence_classifier's encoder is loaded in float32, bfloat16 or float16."
        )


def _check_label_texts(label_texts: list[str], task: Task | PromptTask) -> None:
    if len(label_texts) != task.num_labels:
        raise ValueError(
            f"label_texts has {len(label_texts)} descriptions for {task.num_labels} labels "
            f"({', '.join(task.label_names)}); give one each, in this order."
        )


# ---------------------------------------------------------------- checkpoint


def _load(
    path: str, config: PreTrainedConfig, arguments: ModelArguments, task: Any
) -> tuple[PreTrainedModel, list[str]]:
    """The classifier, and the names of the parameters that the checkpoint did not have."""
    labels = {
        "num_labels": task.num_labels,
        "id2label": dict(enumerate(task.label_names)),
        "label2id": {name: index for index, name in enumerate(task.label_names)},
    }
    settings = dtype_settings(arguments, config, kept=HEAD_NAMES)
    trained = config.model_type == "sentence_classifier"
    if arguments.architecture == "auto" or trained:
        model, info = fetched(
            AutoModelForSequenceClassification.from_pretrained,
            path,
            arguments,
            output_loading_info=True,
            **settings,
            **({} if trained else labels),
        )
        _check_label_count(model, task)
        _check_pair_features(model, arguments)
        return model, sorted(info["missing_keys"])
    encoder = fetched(AutoModel.from_pretrained, path, arguments, **settings)
    encoder.config._name_or_path = arguments.model_name_or_path
    model = SentenceClassifier.from_encoder(
        encoder,
        pooling=arguments.pooling,
        normalize=arguments.normalize,
        logit_scale=arguments.logit_scale,
        pair_features=arguments.pair_features,
        **labels,
    )
    return model, ["classifier.weight", "classifier.bias"]


def _check_label_count(model: PreTrainedModel, task: Task) -> None:
    if model.config.num_labels != task.num_labels:
        raise ValueError(
            f"the checkpoint has a head for {model.config.num_labels} labels, task {task.name!r} "
            f"has {task.num_labels}; start from another model or task."
        )


def _check_pair_features(model: PreTrainedModel, arguments: ModelArguments) -> None:
    trained = getattr(model.config, "pair_features", arguments.pair_features)
    if trained != arguments.pair_features:
        raise ValueError(
            f"the checkpoint was made with pair_features={trained!r}, the recipe says "
            f"{arguments.pair_features!r}; set pair_features: {trained}."
        )


# ---------------------------------------------------------------- language models


def _load_language_model(
    path: str, config: PreTrainedConfig, arguments: ModelArguments, head: str
) -> tuple[PreTrainedModel, list[str]]:
    """The pretrained language model, and the names of the parameters that its checkpoint lacks."""
    _check_kind(config, head, path)
    model, info = fetched(
        LANGUAGE_MODELS[head].from_pretrained,
        path,
        arguments,
        output_loading_info=True,
        **dtype_settings(arguments, config),
    )
    fresh = sorted(info["missing_keys"])
    _check_pretrained_head(model, fresh, path)
    return model, fresh


def _check_kind(config: PreTrainedConfig, head: str, path: str) -> None:
    """Refuses an encoder as causal_lm, which would see the answer, and a decoder as masked_lm."""
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    encoder = masked and not getattr(config, "is_decoder", False)
    fits = encoder if head == "masked_lm" else not encoder and _is_known(config, head)
    if not fits:
        other = "masked_lm" if encoder else "causal_lm"
        instead = f"set prompt: {other}, or load" if _is_known(config, other) else "load"
        raise ValueError(
            f"{path} has the type {config.model_type}, which does not serve as a {head}: {instead} a "
            f"{'BERT or RoBERTa' if head == 'masked_lm' else 'GPT-2, OPT, Llama or Qwen'}, say."
        )


def _is_known(config: PreTrainedConfig, head: str) -> bool:
    return type(config) in LANGUAGE_MODELS[head]._model_mapping


def _check_pretrained_head(model: PreTrainedModel, fresh: list[str], path: str) -> None:
    """Refuses a language-model head that would be drawn at random: its word scores mean nothing.

    A head tied to the embeddings is not in the checkpoint, and not among `fresh` either.
    """
    body = f"{model.base_model_prefix}."
    absent = [name for name in fresh if not name.startswith(body)]
    if absent:
        saved = ", ".join(getattr(model.config, "architectures", None) or ["a bare model"])
        raise ValueError(
            f"{path} has no language-model head ({absent[0]} and {len(absent) - 1} more are not in "
            f"it; it was saved as {saved}), and prompts are answered by the pretrained one: load a "
            f"checkpoint of {type(model).__name__}, or set prompt to null to train a classification "
            "head."
        )


def _check_mask_token(tokenizer: PreTrainedTokenizerBase, head: str, path: str) -> None:
    if head == "masked_lm" and tokenizer.mask_token is None:
        raise ValueError(
            f"the tokenizer of {path} has no mask token, which a masked_lm prompt asks at: load the "
            "model's own tokenizer (tokenizer.mask_token must be set)."
        )


def _share_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives tokenizers without a padding token their end token, and the model the same id."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("the tokenizer has neither a padding token nor an end token: set one.")
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id


# ---------------------------------------------------------------- head


@torch.no_grad()
def _init_fresh_(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fresh: list[str],
    arguments: ModelArguments,
    kind: str,
) -> None:
    """Sets the parameters named in `fresh`, those that the checkpoint did not bring."""
    _check_drawable(model, fresh)
    _draw_(model, fresh, torch.Generator().manual_seed(arguments.init_seed))
    if kind in LANGUAGE_MODELS:
        return
    head = output_layer(model)
    if arguments.head_init == "random":
        return
    head.weight.zero_()
    if head.bias is not None:
        head.bias.zero_()
    if arguments.head_init == "label_text" and isinstance(model, SentenceClassifier):
        head.weight.copy_(label_text_weights(model, tokenizer, arguments.label_texts or []))


def _check_drawable(model: nn.Module, fresh: list[str]) -> None:
    """Refuses to make up weights of quantised layers, which would not be quantised."""
    for name in fresh:
        layer = model.get_submodule(name.rpartition(".")[0])
        if type(layer).__module__.startswith("bitsandbytes"):
            raise ValueError(
                f"the checkpoint has no {name}, and weights of a quantised layer are not drawn at "
                "random: drop load_in_4bit and load_in_8bit, or start from a checkpoint that has it."
            )


def _draw_(model: nn.Module, names: list[str], generator: torch.Generator) -> None:
    """Matrices N(0, initializer_range^2), biases 0, other vectors (norm scales) 1.

    Drawn on the CPU, so that they are the same wherever the model is.
    """
    parameters = dict(model.named_parameters())
    config: Any = model.config
    encoder = getattr(config, "encoder", config)
    std = getattr(encoder, "initializer_range", None) or getattr(encoder, "init_std", None) or 0.02
    for name in sorted(set(names) & set(parameters)):
        parameter = parameters[name]
        if parameter.dim() > 1:
            drawn = torch.empty_like(parameter, device="cpu")
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def output_layer(model: nn.Module) -> nn.Linear:
    """The last linear layer with one output for each label.

    Raises:
      ValueError: the model has none.
    """
    config: Any = base_model(model).config
    labels = config.num_labels
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == labels]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer with {labels} outputs.")
    return layers[-1]


# ---------------------------------------------------------------- features of a frozen encoder


def precompute_features(
    model: nn.Module,
    dataset: datasets.Dataset,
    collate: Callable[[list[Any]], Mapping[str, Tensor]],
    *,
    trainable: str | None = None,
    batch_size: int = 64,
    device: torch.device | str | None = None,
) -> datasets.Dataset:
    """Runs the frozen encoder once over tokenised rows, so that training costs the head alone.

    No privacy is spent: each embedding is a function of its own row and of public weights, and the
    result is as private as the rows. `datasets` caches it beside its source (when that is on disk)
    under a fingerprint of rows, weights and pooling.

    Args:
      model: a `SentenceClassifier`; moved to `device` if given.
      dataset: rows with input_ids and labels, as `Task.tokenize` makes them.
      collate: pads rows into a batch of tensors, as `Task.collator` does.
      trainable: as in `DPZeroConfig`; applied first.
      batch_size: rows in one forward pass, >= 1.
      device: where the encoder runs; None leaves the model where it is.

    Returns:
      Rows with `sentence_embedding` `[H]` float32 (`[4 H]` of a pair encoded apart) and `labels`.

    Raises:
      ValueError: another model, or an encoder with parameters that are to be trained.
    """
    import datasets

    select_trainable(model, trainable)
    classifier = _check_frozen(model).eval()
    if device is not None:
        nn.Module.to(classifier, device)
    width = classifier.config.feature_size
    embedding = datasets.Sequence(datasets.Value("float32"), length=width)
    features = {"sentence_embedding": embedding, "labels": dataset.features["labels"]}

    def encode(rows: Mapping[str, list[Any]]) -> dict[str, Any]:
        return {"sentence_embedding": _embed_rows(classifier, rows, collate, batch_size)}

    return dataset.map(
        encode,
        batched=True,
        batch_size=_MAP_BATCH,
        remove_columns=[name for name in dataset.column_names if name != "labels"],
        features=datasets.Features({name: features[name] for name in ("labels", *features)}),
        new_fingerprint=_features_fingerprint(classifier, dataset),
        desc="encoding once",
    ).with_format("torch")


def _check_frozen(model: nn.Module) -> SentenceClassifier:
    if not isinstance(model, SentenceClassifier):
        raise ValueError(
            f"precompute_features needs architecture: sentence_classifier, this is a "
            f"{type(model).__name__}."
        )
    trained = [name for name, p in model.encoder.named_parameters() if p.requires_grad]
    if trained:
        raise ValueError(
            f"precompute_features needs a frozen encoder, but {len(trained)} of its parameters "
            f"would be trained (encoder.{trained[0]}, ...); set trainable: classifier, or turn "
            "precompute_features off."
        )
    return model


@torch.no_grad()
def _embed_rows(
    model: SentenceClassifier,
    rows: Mapping[str, list[Any]],
    collate: Callable[[list[Any]], Mapping[str, Tensor]],
    batch_size: int,
) -> Any:
    """What the head sees, float32 `[N, feature_size]` (numpy) in the rows' order.

    Batches hold rows of like length.
    """
    order = sorted(range(len(rows["input_ids"])), key=lambda i: len(rows["input_ids"][i]))
    device = model.classifier.weight.device
    result = torch.empty(len(order), model.config.feature_size)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = right_padded(collate([{name: rows[name][i] for name in rows} for i in chosen]))
        tokens = {key: value.to(device) for key, value in batch.items() if key != "labels"}
        result[chosen] = model.embed(**tokens).cpu()
    return result.numpy()


def _features_fingerprint(model: SentenceClassifier, dataset: datasets.Dataset) -> str:
    from datasets.fingerprint import Hasher

    config = model.config
    settings = (config.pooling, config.normalize, config.pair_features)
    return Hasher.hash((dataset._fingerprint, digest_model(model.encoder), settings))
