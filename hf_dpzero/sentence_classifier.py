"""A sentence encoder with a linear head: `logits = logit_scale * (W e(x) + b)`.

e(x) is the encoder's pooled and, by default, normalised state. W can start from the embeddings of
label descriptions, which classifies before any training, and is small (classes x width):
zeroth-order fine-tuning moves few, well-scaled parameters best. Because e(x) does not depend on W,
it may be computed once and passed as `sentence_embedding`; the encoder is then skipped.

Importing this module registers the classes with AutoConfig and AutoModelForSequenceClassification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.modeling_utils import PreTrainedModel

from hf_dpzero.objectives import classification_losses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POOLINGS = ("mean", "cls")
PHRASING_SEPARATOR = "|"


class SentenceClassifierConfig(PreTrainedConfig):
    """Configuration of `SentenceClassifier`.

    Args:
      encoder: the encoder's configuration, or its `to_dict()`; None is a default BERT.
      pooling: "mean" over the attended tokens, or "cls", the first attended token.
      normalize: scale the pooled vector to Euclidean length 1.
      logit_scale: fixed factor on the head's output, > 0.
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
        **settings: Any,
    ) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is not one of {', '.join(POOLINGS)}.")
        if not logit_scale > 0:
            raise ValueError(f"logit_scale={logit_scale} must be above 0.")
        if not isinstance(encoder, PreTrainedConfig):
            encoder = AutoConfig.for_model(**{"model_type": "bert", **(encoder or {})})
        self.encoder = encoder
        self.pooling, self.normalize, self.logit_scale = pooling, normalize, logit_scale
        super().__init__(**settings)

    @property
    def hidden_size(self) -> int:
        """The width H of a sentence embedding."""
        return int(self.encoder.hidden_size)


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
        self.encoder = _without_pooler(AutoModel.from_config(config.encoder))
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @classmethod
    def from_encoder(cls, encoder: PreTrainedModel, **settings: Any) -> SentenceClassifier:
        """Puts a head of zeros, float32, on a loaded encoder, which is used and not copied.

        Args:
          encoder: a model whose output has `last_hidden_state` [B, T, H].
          settings: `num_labels`, `pooling`, ... of `SentenceClassifierConfig`.
        """
        with torch.device("meta"):
            model = cls(SentenceClassifierConfig(encoder=encoder.config, **settings))
        model.encoder = _without_pooler(encoder)
        model.classifier = nn.Linear(model.config.hidden_size, model.num_labels)
        nn.init.zeros_(model.classifier.weight)
        nn.init.zeros_(model.classifier.bias)
        return model.eval()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_embedding: Tensor | None = None,
        return_dict: bool | None = None,
        **settings: Any,
    ) -> SequenceClassifierOutput | tuple[Tensor, ...]:
        """Logits `[B, L]` and, with labels, the mean loss.

        Args:
          input_ids, attention_mask, token_type_ids: `[B, T]`.
          labels: as for `objectives.classification_losses`.
          sentence_embedding: `[B, H]`, what `embed` returned for these rows; skips the encoder.
          return_dict: False gives a tuple, (loss if there are labels, logits).
        Raises:
          ValueError: neither input_ids nor sentence_embedding is given.
        """
        if sentence_embedding is None:
            if input_ids is None:
                raise ValueError("give input_ids, or sentence_embedding from an earlier embed().")
            sentence_embedding = self.embed(input_ids, attention_mask, token_type_ids, **settings)
        weight = self.classifier.weight
        logits = self.classifier(sentence_embedding.to(weight.dtype)) * self.config.logit_scale
        loss = None
        if labels is not None:
            loss = classification_losses(logits, labels, self.config.problem_type).mean()
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

    def embed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:
        """Embeddings `[B, H]` float32 of token rows `[B, T]`; each from its own row alone."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is not None:
            settings["token_type_ids"] = token_type_ids
        output = self.encoder(input_ids, attention_mask=attention_mask, **settings)
        pooled = pool(output.last_hidden_state.float(), attention_mask, self.config.pooling)
        return F.normalize(pooled, dim=-1) if self.config.normalize else pooled


def pool(states: Tensor, attention_mask: Tensor, pooling: str) -> Tensor:
    """One vector a row: the mean over attended tokens, or the first attended token.

    Args:
      states: `[B, T, H]`.
      attention_mask: `[B, T]`, 1 at tokens; a row without tokens gives zeros ("mean").

    >>> states = torch.tensor([[[1., 2.], [3., 4.], [9., 9.]]])
    >>> pool(states, torch.tensor([[1, 1, 0]]), "mean")
    tensor([[2., 3.]])
    """
    if pooling == "cls":
        first = attention_mask.ne(0).int().argmax(dim=1)
        return states[torch.arange(len(states), device=states.device), first]
    weight = attention_mask.to(states.dtype).unsqueeze(-1)
    return (states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1.0)


@torch.no_grad()
def embed_texts(
    model: SentenceClassifier, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> Tensor:
    """Embeddings `[N, H]` float32 of a few texts, in one batch."""
    encoded = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    device = model.classifier.weight.device
    return model.embed(**{key: value.to(device) for key, value in encoded.items()})


def label_text_weights(
    model: SentenceClassifier, tokenizer: PreTrainedTokenizerBase, label_texts: Sequence[str]
) -> Tensor:
    """Head weights `[L, H]` from descriptions of the labels: a zero-shot classifier.

    Row c is the direction of the mean of the unit embeddings of label c's phrasings (separated by
    "|"), less the mean of all rows, so that what the descriptions share does not count.
    """
    rows = []
    for description in label_texts:
        phrasings = [part.strip() for part in description.split(PHRASING_SEPARATOR)]
        embeddings = F.normalize(embed_texts(model, tokenizer, phrasings), dim=-1)
        rows.append(F.normalize(embeddings.mean(dim=0), dim=-1))
    weights = torch.stack(rows)
    return weights - weights.mean(dim=0)


def _without_pooler(encoder: Any) -> Any:
    """Drops BERT's pooler, whose output is not used, so that it is neither saved nor perturbed."""
    if isinstance(getattr(encoder, "pooler", None), nn.Module):
        encoder.pooler = None
    return encoder


AutoConfig.register(SentenceClassifierConfig.model_type, SentenceClassifierConfig, exist_ok=True)
AutoModelForSequenceClassification.register(
    SentenceClassifierConfig, SentenceClassifier, exist_ok=True
)
