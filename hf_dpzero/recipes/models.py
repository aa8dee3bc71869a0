"""Builds a recipe's model: checkpoint, head and adapters; stores features of a frozen encoder."""

from __future__ import annotations

import functools
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

from hf_dpzero.batches.placement import bucket
from hf_dpzero.batches.shapes import (
    blank_like,
    context_length,
    shape_of,
    stacked,
    unmasked,
    widened,
    width_of,
)
from hf_dpzero.ledger.digests import digest_model
from hf_dpzero.objectives.losses import base_model, right_padded
from hf_dpzero.parallel.offloading import settle_offloaded
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.recipes.adapters import HEAD_NAMES, trained_adapter, with_adapters
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.checkpoints import (
    dtype_settings,
    fetched,
    load_tokenizer,
    placement_settings,
    settle_quantised_,
)
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier, label_text_weights
from hf_dpzero.reporting.provenance import resolve_path
from hf_dpzero.training.precision import couples_values

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from hf_dpzero.tasks.classification import Task
    from hf_dpzero.tasks.prompted import PromptTask

CLASSIFICATION = "sequence_classification"
LANGUAGE_MODELS: dict[str, Any] = {
    "masked_lm": AutoModelForMaskedLM,
    "causal_lm": AutoModelForCausalLM,
}

_MAP_BATCH, _ENCODED = 2048, 32  # rows handed over at once; rows in a pass, so that few fill it up


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
        if head == "masked_lm" and tokenizer.mask_token is None:
            raise ValueError(
                f"the tokenizer of {path} has no mask token, which a masked_lm prompt asks at: load "
                "the model's own tokenizer (tokenizer.mask_token must be set)."
            )
    else:
        model, fresh = _load_classifier(path, config, arguments, task)
    model.config._name_or_path = arguments.model_name_or_path
    settle_quantised_(model)
    settle_offloaded(model)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("the tokenizer has neither a padding token nor an end token: set one.")
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if fresh:
        _init_fresh_(model, tokenizer, fresh, arguments, head)
    if adapter is not None:
        return trained_adapter(model, adapter, head).eval(), tokenizer
    return with_adapters(model, arguments, head).eval(), tokenizer


def _check(arguments: ModelArguments, task: Task | PromptTask, head: str) -> None:
    """Refuses settings of another head or architecture than the task's and the recipe's."""
    plain = ModelArguments(model_name_or_path="")
    for_vectors = ("logit_scale", "precompute_features", "pair_features")
    names: tuple[str, ...] = ()
    if head in LANGUAGE_MODELS:
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
    for name in names:
        value = getattr(arguments, name)
        if value == getattr(plain, name):
            continue
        if head not in LANGUAGE_MODELS:
            raise ValueError(f"{name}={value!r} needs architecture: sentence_classifier.")
        raise ValueError(
            f"{name}={value!r} is about a classification head, and with prompt: {head} the "
            f"language model answers in words: leave {name} out, or set prompt to null."
        )
    texts = arguments.label_texts or []
    if arguments.head_init == "label_text" and len(texts) != task.num_labels:
        raise ValueError(
            f"label_texts has {len(texts)} descriptions for {task.num_labels} labels "
            f"({', '.join(task.label_names)}); give one each, in this order."
        )


def _load_classifier(
    path: str, config: PreTrainedConfig, arguments: ModelArguments, task: Any
) -> tuple[PreTrainedModel, list[str]]:
    """The classifier, and the names of the parameters that the checkpoint did not have."""
    names = dict(enumerate(task.label_names))
    labels = {
        "num_labels": task.num_labels,
        "id2label": names,
        "label2id": {name: index for index, name in names.items()},
    }
    settings = dtype_settings(arguments, config, kept=HEAD_NAMES)
    trained = config.model_type == "sentence_classifier"
    if arguments.architecture != "auto" and not trained:
        encoder = fetched(AutoModel.from_pretrained, path, arguments, **settings)
        encoder.config._name_or_path = arguments.model_name_or_path
        shape = ("pooling", "normalize", "logit_scale", "pair_features")
        labels |= {name: getattr(arguments, name) for name in shape}
        model = SentenceClassifier.from_encoder(encoder, **labels)
        return model, ["classifier.weight", "classifier.bias"]
    load, head = AutoModelForSequenceClassification.from_pretrained, {} if trained else labels
    settings |= placement_settings(arguments) | head
    model, info = fetched(load, path, arguments, output_loading_info=True, **settings)
    if model.config.num_labels != task.num_labels:
        raise ValueError(
            f"the checkpoint has a head for {model.config.num_labels} labels, task {task.name!r} "
            f"has {task.num_labels}; start from another model or task."
        )
    pairing = getattr(model.config, "pair_features", arguments.pair_features)
    if pairing != arguments.pair_features:
        raise ValueError(
            f"the checkpoint was made with pair_features={pairing!r}, the recipe says "
            f"{arguments.pair_features!r}; set pair_features: {pairing}."
        )
    return model, sorted(info["missing_keys"])


def _load_language_model(
    path: str, config: PreTrainedConfig, arguments: ModelArguments, head: str
) -> tuple[PreTrainedModel, list[str]]:
    """The pretrained language model, and the names of the parameters that its checkpoint lacks.

    Refuses an encoder as causal_lm, which would see the answer, a decoder as masked_lm, and a
    language-model head that would be drawn at random. A head tied to the embeddings is not in the
    checkpoint, and not among the missing parameters either.
    """
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
    load, settings = LANGUAGE_MODELS[head].from_pretrained, dtype_settings(arguments, config)
    settings |= placement_settings(arguments)
    model, info = fetched(load, path, arguments, output_loading_info=True, **settings)
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
def _init_fresh_(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fresh: list[str],
    arguments: ModelArguments,
    kind: str,
) -> None:
    """Draws the parameters that the checkpoint did not bring, on the CPU wherever the model is.

    Matrices are N(0, initializer_range^2), biases 0, other vectors (norm scales) 1. Weights of
    quantised layers, which would not be quantised, are refused.
    """
    config: Any = getattr(model.config, "encoder", model.config)
    std = getattr(config, "initializer_range", None) or getattr(config, "init_std", None) or 0.02
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(arguments.init_seed)
    for name in sorted(fresh):
        layer = model.get_submodule(name.rpartition(".")[0])
        if type(layer).__module__.startswith("bitsandbytes"):
            raise ValueError(
                f"the checkpoint has no {name}, and weights of a quantised layer are not drawn at "
                "random: drop load_in_4bit and load_in_8bit, or start from a checkpoint that has it."
            )
        parameter = parameters.get(name)
        if parameter is not None and parameter.dim() > 1:
            drawn = torch.empty_like(parameter, device="cpu")
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))
        elif parameter is not None:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    if kind in LANGUAGE_MODELS or arguments.head_init == "random":
        return
    head = output_layer(model)
    head.weight.zero_()
    if head.bias is not None:
        head.bias.zero_()
    if arguments.head_init == "label_text" and isinstance(model, SentenceClassifier):
        head.weight.copy_(label_text_weights(model, tokenizer, arguments.label_texts or []))


def output_layer(model: nn.Module) -> nn.Linear:
    """The last linear layer with one output for each label."""
    config: Any = base_model(model).config
    labels = config.num_labels
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == labels]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer with {labels} outputs.")
    return layers[-1]


def _embedded(classifier: SentenceClassifier, tokens: Mapping[str, Tensor]) -> Tensor:
    place = classifier.classifier.weight.device
    return classifier.embed(**{key: value.to(place) for key, value in tokens.items()}).cpu()


@torch.no_grad()
def _encodes_together(classifier: SentenceClassifier, size: int, width: int) -> bool:
    """Whether, on random tokens, no bit of a row follows from its place or its neighbours in a pass.

    Args:
      size: rows of the pass.
      width: tokens of each.
    """
    encoder, draw = classifier.encoder, torch.Generator().manual_seed(width)
    place = classifier.classifier.weight.device
    ids = torch.randint(encoder.config.vocab_size, (size, width), generator=draw).to(place)
    lengths = torch.randint(min(2, width), width + 1, (size, 1), generator=draw)
    mask = (torch.arange(width) < lengths).long().to(place)
    together = encoder(input_ids=ids, attention_mask=mask)[0]
    for row in {0, size // 2, size - 1}:
        same = [row] * size
        alone = encoder(input_ids=ids[same], attention_mask=mask[same])[0]
        if not torch.equal(alone, together[same]):
            return False
    return True


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

    No privacy is spent: each embedding is a function of its own row and of public weights, bit for bit
    (rows are padded by themselves and run in microbatches of fixed shapes), and the result is as private
    as the rows. `datasets` caches it beside its source (when that is on disk)
    under a fingerprint of rows, weights and pooling.

    Args:
      model: a `SentenceClassifier`; moved to `device` if given.
      dataset: rows with input_ids and labels, as `Task.tokenize` makes them.
      collate: pads rows into a batch of tensors, as `Task.collator` does.
      trainable: as in `DPZeroConfig`; applied first.
      batch_size: rows in every forward pass, >= 1, and no more than 32 are taken; 1 where the encoder
        rounds a row by what stands beside it even in a batch of one shape, or is quantised so.
      device: where the encoder runs; None leaves the model where it is.

    Returns:
      Rows with `sentence_embedding` `[H]` float32 (`[4 H]` of a pair encoded apart) and `labels`.

    Raises:
      ValueError: another model, or an encoder with parameters that are to be trained.
    """
    import datasets
    from datasets.fingerprint import Hasher

    select_trainable(model, trainable)
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
    config, classifier = model.config, model.eval()
    if device is not None:
        nn.Module.to(classifier, device)
    embedding = datasets.Sequence(datasets.Value("float32"), length=config.feature_size)
    features = {"labels": dataset.features["labels"], "sentence_embedding": embedding}
    size = min(batch_size, _ENCODED)
    alone = bool(couples_values(classifier)) or size == 1
    most = context_length(classifier.encoder)

    @functools.cache
    def rows_of(width: int) -> int:
        """Rows of a pass of a width, by that width alone."""
        return 1 if alone or not _encodes_together(classifier, size, width) else size

    settings = (
        config.pooling,
        config.normalize,
        config.pair_features,
        "alone" if alone else "in passes of fixed widths",
    )

    @torch.no_grad()
    def encode(rows: Mapping[str, list[Any]]) -> dict[str, Any]:
        alike: dict[Any, list[int]] = {}  # rows of one shape run together, always so many
        batches = []
        for i in range(len(rows["input_ids"])):
            batch = right_padded(collate([{name: rows[name][i] for name in rows}]))
            columns = bucket(width_of(batch), most) - width_of(batch)
            batch = widened(batch, "right", columns) or batch
            batches.append({key: value for key, value in batch.items() if key != "labels"})
            alike.setdefault((shape_of(batches[i]), unmasked(batches[i])), []).append(i)
        embeddings = torch.empty(len(batches), config.feature_size)
        for members in alike.values():
            size = rows_of(width_of(batches[members[0]]))
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                blanks = [blank_like(batches[chosen[0]])] * (size - len(chosen))
                filled = stacked([*(batches[i] for i in chosen), *blanks])
                embeddings[chosen] = _embedded(classifier, filled)[: len(chosen)]
        return {"sentence_embedding": embeddings.numpy()}

    return dataset.map(
        encode,
        batched=True,
        batch_size=_MAP_BATCH,
        remove_columns=[name for name in dataset.column_names if name != "labels"],
        features=datasets.Features(features),
        new_fingerprint=Hasher.hash((dataset._fingerprint, digest_model(model.encoder), settings)),
        desc="encoding once",
    ).with_format("torch")
