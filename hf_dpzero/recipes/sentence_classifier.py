"""A sentence encoder with a linear head: `logits = logit_scale * (W e(x) + b)`.

e(x) is the encoder's pooled and, by default, normalised state. W can start from the embeddings of
label descriptions, which classifies before any training, and is small (classes x width):
zeroth-order fine-tuning moves few, well-scaled parameters best. Because e(x) does not depend on W,
it may be computed once and passed as `sentence_embedding`; the encoder is then skipped. For a pair
of texts that are encoded apart, e(x) is `compare` of the two. It may join states of several layers, of
which a fixed affine map then keeps principal components (`recipes.public_features`).

Importing this module registers the classes with AutoConfig and AutoModelForSequenceClassification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.modeling_utils import PreTrainedModel

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
from hf_dpzero.checks.precision import couples_values
from hf_dpzero.ledger.digests import digest_tensors
from hf_dpzero.objectives.losses import classification_losses, right_padded
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.recipes.arguments import ModelArguments

if TYPE_CHECKING:
    import datasets
    import numpy as np
    from transformers import PreTrainedTokenizerBase

_TRIED = "_hf_dpzero_encodes_together"
_MAP_BATCH, _ENCODED = 2048, 32  # rows handed over at once; rows in a pass, so that few fill it up


class SentenceClassifierConfig(PreTrainedConfig):
    """Configuration of `SentenceClassifier`.

    Args:
      encoder: the encoder's configuration, or its `to_dict()`; None is a default BERT.
      pooling: "mean" over the attended tokens, or "cls" or "last", the first or last of them.
      normalize: scale the vector to Euclidean length 1.
      features: "last", "all_layers" or numbers with commas: the hidden states that are joined.
      components: how many numbers `public_features`, a fixed affine map, makes of them; None has none.
      logit_scale: fixed factor on the head's output, > 0.
      pair_features: "joint" (one text, or a pair as one sequence) or "siamese" (`compare` of two
        texts that are encoded apart).
      settings: `num_labels`, `id2label` and the rest of `PreTrainedConfig`.
    """

    model_type = "sentence_classifier"
    sub_configs = {"encoder": AutoConfig}  # noqa: RUF012 (transformers' own way to declare it)

    def __init__(
        self,
        encoder: PreTrainedConfig | dict[str, Any] | None = None,
        pooling: str = "mean",
        normalize: bool = True,
        logit_scale: float = 1.0,
        pair_features: str = "joint",
        features: str = "last",
        components: int | None = None,
        **settings: Any,
    ) -> None:
        # The recipe's own checks, for settings that come from a file or from Python.
        ModelArguments(
            model_name_or_path="",
            pooling=pooling,  # type: ignore[arg-type]
            pair_features=pair_features,  # type: ignore[arg-type]
            logit_scale=logit_scale,
            features=features,
        )
        if not isinstance(encoder, PreTrainedConfig):
            encoder = AutoConfig.for_model(**{"model_type": "bert", **(encoder or {})})
        self.encoder, self.pair_features = encoder, pair_features
        self.features, self.components = features, components
        self.pooling, self.normalize, self.logit_scale = pooling, normalize, logit_scale
        super().__init__(**settings)

    @property
    def hidden_size(self) -> int:
        """The width H of one text's embedding."""
        return self.components or self.pooled_size

    @property
    def layers(self) -> tuple[int, ...]:
        """The hidden states that are joined; 0 is the embeddings."""
        depth = int(self.encoder.num_hidden_layers)
        if self.features in ("last", "all_layers"):
            return tuple(range(depth + 1))[-1 if self.features == "last" else 0 :]
        layers = tuple(map(int, self.features.split(",")))
        if max(layers) > depth or len(set(layers)) < len(layers):
            raise ValueError(
                f"features={self.features!r}: the encoder has the layers 0 to {depth}; name each once."
            )
        return layers

    @property
    def pooled_size(self) -> int:
        """The width of the joined hidden states."""
        return int(self.encoder.hidden_size) * len(self.layers)

    @property
    def feature_size(self) -> int:
        """The width of what the head sees: H, or 4 H of a pair that is encoded apart."""
        return self.hidden_size * (4 if self.pair_features == "siamese" else 1)


def _without_unused(encoder: PreTrainedModel, highest: int) -> PreTrainedModel:
    """Takes off the pooler and the layers above `highest`, which nothing reads."""
    # They would be saved, run and perturbed for nothing.
    if isinstance(getattr(encoder, "pooler", None), nn.Module):
        encoder.pooler = None  # type: ignore[assignment]
    config: Any = encoder.config
    depth = config.num_hidden_layers
    for module in encoder.modules():
        if highest < depth and isinstance(module, nn.ModuleList) and len(module) == depth:
            del module[highest:]
            config.num_hidden_layers = highest
            if getattr(config, "layer_types", None) is not None:
                config.layer_types = config.layer_types[:highest]
            break
    return encoder


class SentenceClassifier(PreTrainedModel):
    """Encoder, pooling, linear head; see the module's docstring for the equation."""

    config_class = SentenceClassifierConfig
    config: SentenceClassifierConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: SentenceClassifierConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 2)
        highest = max(config.layers)
        self.encoder = _without_unused(AutoModel.from_config(config.encoder), highest)
        self.public_features = None
        if config.components is not None:
            self.public_features = nn.Linear(config.pooled_size, config.components)
            self.public_features.requires_grad_(False)
        self.classifier = nn.Linear(config.feature_size, self.num_labels)
        self.post_init()

    @classmethod
    def from_encoder(cls, encoder: PreTrainedModel, **settings: Any) -> SentenceClassifier:
        """Puts a head of zeros, float32, on a loaded encoder, which is used and not copied.

        Args:
          encoder: a model whose output has `last_hidden_state` [B, T, H].
          settings: `num_labels`, `pooling`, ... of `SentenceClassifierConfig`.

        Returns:
          The classifier, in eval mode.
        """
        config = SentenceClassifierConfig(encoder=encoder.config, **settings)
        encoder = _without_unused(encoder, max(config.layers))
        # The encoder that is made here is replaced by the loaded one: it takes no memory.
        with torch.device("meta"):
            model = cls(config)
        model.encoder = encoder
        for layer in (model.classifier, model.public_features):
            if layer is not None:
                layer.to_empty(device=torch.get_default_device())
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)
        return model.eval()

    # Hugging Face's Trainer drops the columns of rows that this signature does not name.
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        input_ids_pair: Tensor | None = None,
        attention_mask_pair: Tensor | None = None,
        token_type_ids_pair: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_embedding: Tensor | None = None,
        return_dict: bool | None = None,
        **settings: Any,
    ) -> SequenceClassifierOutput | tuple[Tensor, ...]:
        """Computes logits `[B, L]` and, with labels, the mean loss.

        Args:
          input_ids, ..., token_type_ids_pair, settings: as for `embed`.
          labels: as for `objectives.losses.classification_losses`.
          sentence_embedding: `[B, feature_size]`, what `embed` returned for these rows; skips the
            encoder.
          return_dict: False gives a tuple, (loss if there are labels, logits).

        Returns:
          Logits `[B, L]`, float32 or the head's dtype, and the mean loss or None.

        Raises:
          ValueError: neither input_ids nor sentence_embedding is given.
        """
        if sentence_embedding is None:
            if input_ids is None:
                raise ValueError("give input_ids, or sentence_embedding from an earlier embed().")
            tokens = {
                "attention_mask": attention_mask,
                "token_type_ids": token_type_ids,
                "input_ids_pair": input_ids_pair,
                "attention_mask_pair": attention_mask_pair,
                "token_type_ids_pair": token_type_ids_pair,
            }
            given = {name: value for name, value in tokens.items() if value is not None}
            sentence_embedding = self.embed(input_ids, **given, **settings)
        weight = self.classifier.weight
        logits = self.classifier(sentence_embedding.to(weight.dtype)) * self.config.logit_scale
        loss = None
        if labels is not None:
            loss = classification_losses(logits, labels, self.config.problem_type).mean()
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

    def embed(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Computes the head's input from token rows; row i depends on row i alone.

        Args:
          input_ids: `[B, T]`.
          inputs: attention_mask, token_type_ids `[B, T]`; with pair_features=siamese, and only then, the
            second texts input_ids_pair, attention_mask_pair, token_type_ids_pair `[B, T']`, padded on
            either side; anything else is passed on to the encoder.

        Returns:
          `[B, feature_size]`, float32.

        Raises:
          ValueError: second texts that the configuration does not expect, or none where it does.
        """
        siamese = self.config.pair_features == "siamese"
        pair = {n.removesuffix("_pair"): inputs.pop(n) for n in list(inputs) if n.endswith("_pair")}
        if siamese != ("input_ids" in pair):
            raise ValueError(
                f"pair_features={self.config.pair_features!r}, but input_ids_pair is "
                f"{'missing' if siamese else 'given'}: tokenise with the model's own pair_features "
                "(`Task.tokenize`), or set the recipe's pair_features to it."
            )
        first = self._embed_text(input_ids, **inputs)
        if not siamese:
            return first
        settings = {
            n: v for n, v in inputs.items() if n not in ("attention_mask", "token_type_ids")
        }
        second = self._embed_text(**right_padded(pair), **settings)
        return compare(first, second, self.config.normalize)

    def _embed_text(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any
    ) -> Tensor:
        """Embeddings `[B, H]` float32 of one text a row, `[B, T]`."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if self.config.features != "last":
            inputs["output_hidden_states"] = True
        output = self.encoder(input_ids, attention_mask=mask, **inputs)
        states = [output.last_hidden_state]
        if self.config.features != "last":
            states = [output.hidden_states[layer] for layer in self.config.layers]
        pooled = torch.cat([pool(s.float(), mask, self.config.pooling) for s in states], dim=-1)
        if self.public_features is not None:
            pooled = self.public_features(pooled)
        return F.normalize(pooled, dim=-1) if self.config.normalize else pooled


def compare(first: Tensor, second: Tensor, normalize: bool) -> Tensor:
    """Joins embeddings a, b to [a; b; |a - b|; sqrt(H) a * b] (Conneau et al. 2017), `[B, 4 H]`.

    The factor sqrt(H) gives the entries of the product the size of the others' where a and b have
    length 1 (entries of size 1/sqrt(H)); without normalize, the product is InferSent's own.

    Args:
      first, second: a and b, `[B, H]`.
      normalize: scale each row of the result to Euclidean length 1.

    >>> compare(torch.tensor([[1., 2.]]), torch.tensor([[3., 1.]]), normalize=False)
    tensor([[1., 2., 3., 1., 2., 1., 3., 2.]])
    """
    scale = first.shape[-1] ** 0.5 if normalize else 1.0
    features = torch.cat((first, second, (first - second).abs(), first * second * scale), dim=-1)
    return F.normalize(features, dim=-1) if normalize else features


def pool(states: Tensor, attention_mask: Tensor, pooling: str) -> Tensor:
    """Returns one vector a row: the mean over attended tokens, or the first or last attended token.

    Args:
      states: `[B, T, H]`.
      attention_mask: `[B, T]`, 1 at tokens; a row without tokens gives zeros ("mean").
      pooling: "mean", "cls" or "last".

    Returns:
      `[B, H]`.

    >>> states = torch.tensor([[[1., 2.], [3., 4.], [9., 9.]]])
    >>> pool(states, torch.tensor([[1, 1, 0]]), "mean")
    tensor([[2., 3.]])
    """
    if pooling != "mean":
        attended = attention_mask.ne(0).int()
        place = attended.argmax(dim=1)
        if pooling == "last":
            place = attended.shape[1] - 1 - attended.flip(1).argmax(dim=1)
        return states[torch.arange(len(states), device=states.device), place]
    weight = attention_mask.to(states.dtype).unsqueeze(-1)
    return (states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1.0)


@torch.no_grad()
def label_text_weights(
    model: SentenceClassifier, tokenizer: PreTrainedTokenizerBase, label_texts: Sequence[str]
) -> Tensor:
    """Returns head weights from descriptions of the labels: a zero-shot classifier.

    Row c is the direction of the mean of the unit embeddings of label c's phrasings (separated by
    "|"), less the mean of all rows, so that what the descriptions share does not count.

    Args:
      model: its encoder embeds the descriptions.
      tokenizer: of the encoder; cuts texts to its maximum length.
      label_texts: L descriptions, in label order.

    Returns:
      `[L, H]`, float32.
    """
    rows, device = [], model.classifier.weight.device
    for description in label_texts:
        phrasings = [part.strip() for part in description.split("|")]
        tokens = tokenizer(phrasings, padding=True, truncation=True, return_tensors="pt")
        embeddings = model._embed_text(**{name: value.to(device) for name, value in tokens.items()})
        rows.append(F.normalize(F.normalize(embeddings, dim=-1).mean(dim=0), dim=-1))
    weights = torch.stack(rows)
    return weights - weights.mean(dim=0)


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
    from datasets.utils import tqdm

    select_trainable(model, trainable)
    if not isinstance(model, SentenceClassifier):
        raise ValueError(
            f"precompute_features needs architecture: sentence_classifier, this is a "
            f"{type(model).__name__}."
        )
    behind = set(model.classifier.parameters())
    trained = [n for n, p in model.named_parameters() if p.requires_grad and p not in behind]
    if trained:
        raise ValueError(
            f"precompute_features needs a frozen encoder, but {len(trained)} of its parameters "
            f"would be trained ({trained[0]}, ...); set trainable: classifier, or turn "
            "precompute_features off."
        )
    config, classifier = model.config, model.eval()
    if device is not None:
        nn.Module.to(classifier, device)
    size, longest = min(batch_size, _ENCODED), context_length(classifier.encoder)
    alone = bool(couples_values(classifier)) or size == 1
    place = classifier.classifier.weight.device

    # Kept with the frozen encoder, for other splits are of the same widths.
    tried: dict[tuple[Any, ...], bool] = vars(classifier.encoder).setdefault(_TRIED, {})

    def rows_of(width: int) -> int:
        """Rows of a pass, by its width alone: no private row chooses how others are computed."""
        key = (size, width, config.features, config.pooling, str(place))
        if not alone and key not in tried:
            tried[key] = _encodes_together(classifier, size, width)
        return size if not alone and tried[key] else 1

    @torch.no_grad()
    def encode(rows: Mapping[str, list[Any]]) -> dict[str, np.ndarray]:
        batches: list[dict[str, Tensor]] = []
        # Rows that run together: of one shape, whose masks hide something or all hide nothing.
        alike: dict[tuple[tuple[Any, ...], frozenset[str]], list[int]] = {}
        for i in range(len(rows["input_ids"])):
            batch = right_padded(collate([{name: rows[name][i] for name in rows}]))
            batch = {key: value for key, value in batch.items() if key != "labels"}
            columns = bucket(width_of(batch), longest) - width_of(batch)
            batches.append(widened(batch, "right", columns))
            alike.setdefault((shape_of(batches[i]), unmasked(batches[i])), []).append(i)
        embeddings = torch.empty(len(batches), config.feature_size)
        # `map` itself counts what was handed over, which is minutes of long rows.
        with tqdm(total=len(batches), desc="of these rows", leave=False) as done:
            for members in alike.values():
                count = rows_of(width_of(batches[members[0]]))
                for start in range(0, len(members), count):
                    chosen = members[start : start + count]
                    blanks = [blank_like(batches[chosen[0]])] * (count - len(chosen))
                    filled = stacked([*(batches[i] for i in chosen), *blanks])
                    tokens = {key: value.to(place) for key, value in filled.items()}
                    embeddings[chosen] = classifier.embed(**tokens)[: len(chosen)].cpu()
                    done.update(len(chosen))
        return {"sentence_embedding": embeddings.numpy()}

    how = "alone" if alone else "in passes of fixed widths"
    settings = (config.pooling, config.normalize, config.pair_features, config.features, how)
    # All but the head: encoder and public_features.
    frozen = {n: p for n, p in model.named_parameters() if p not in behind}
    embedding = datasets.Sequence(datasets.Value("float32"), length=config.feature_size)
    features = {"labels": dataset.features["labels"], "sentence_embedding": embedding}
    return dataset.map(
        encode,
        batched=True,
        batch_size=_MAP_BATCH,
        remove_columns=[name for name in dataset.column_names if name != "labels"],
        features=datasets.Features(features),
        new_fingerprint=Hasher.hash(
            (dataset._fingerprint, digest_tensors(frozen.items()), settings)
        ),
        desc="encoding once",
    ).with_format("torch")


@torch.no_grad()
def _encodes_together(classifier: SentenceClassifier, size: int, width: int) -> bool:
    """Whether, on random tokens, no bit of a row follows from its place or its neighbours in a pass.

    The pass has `size` rows of `width` tokens.
    """
    encoder, draw = classifier.encoder, torch.Generator().manual_seed(width)
    place = classifier.classifier.weight.device
    ids = torch.randint(encoder.config.vocab_size, (size, width), generator=draw).to(place)
    lengths = torch.randint(min(2, width), width + 1, (size, 1), generator=draw)
    mask = (torch.arange(width) < lengths).long().to(place)
    for shown, rows in ((mask, {0, size // 2, size - 1}), (torch.ones_like(mask), {0})):
        together = classifier._embed_text(ids, shown)
        for row in rows:
            same = [row] * size
            copies = classifier._embed_text(ids[same], shown[same])
            if not torch.equal(copies, together[same]):
                return False
    return True


AutoConfig.register(SentenceClassifierConfig.model_type, SentenceClassifierConfig, exist_ok=True)
AutoModelForSequenceClassification.register(
    SentenceClassifierConfig, SentenceClassifier, exist_ok=True
)
