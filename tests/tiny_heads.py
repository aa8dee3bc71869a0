"""A tiny model of each head that transformers has a Trainer for, with unpadded rows that fit it.

`HEADS` maps a name to the class and its settings, `build` makes the model, `rows` its examples as
batches of one, and `padded` one batch of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY, PAD = 40, 1
LENGTHS = (3, 9, 6, 5)
FILL = {"input_ids": PAD, "labels": -100}
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
ENCODER = {
    **TEXT,
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 32},
}
DISTILBERT = {**TEXT, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
GPT2 = {**TEXT, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
DECODER = {
    f"{part}_{what}": number
    for part in ("encoder", "decoder")
    for what, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))
} | {"d_model": 16, "decoder_start_token_id": 2}
BART = {**TEXT, **DECODER, "max_position_embeddings": 32}
T5 = {
    **{**TEXT, "decoder_start_token_id": PAD},
    **{"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
}
VISION = {
    **{"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3},
}
WAV2VEC2 = {
    **TEXT,
    **{
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    },
    **{
        "conv_dim": (8, 8),
        "conv_stride": (4, 2),
        "conv_kernel": (8, 3),
        "num_feat_extract_layers": 2,
    },
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 3},
    **{"classifier_proj_size": 8, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
}
WHISPER = {
    **{**DECODER, "vocab_size": VOCABULARY, "pad_token_id": PAD, "num_mel_bins": 4},
    **{"max_source_positions": 6, "max_target_positions": 12, "num_labels": 3},
    **{"bos_token_id": 0, "eos_token_id": 2, "classifier_proj_size": 8},
}
SEGFORMER = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [1, 1], "hidden_sizes": [8, 16]},
    **{
        "num_attention_heads": [1, 2],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "mlp_ratios": [2, 2],
    },
    **{"decoder_hidden_size": 8, "num_labels": 3},
}

OPT = {**ENCODER, "ffn_dim": 24, "word_embed_proj_dim": 16}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "classes-bert": ("BertForSequenceClassification", {**ENCODER, "num_labels": 3}),
    "classes-roberta": ("RobertaForSequenceClassification", {**ENCODER, "num_labels": 3}),
    "classes-gpt2": ("GPT2ForSequenceClassification", {**GPT2, "num_labels": 3}),
    "masked-bert": ("BertForMaskedLM", ENCODER),
    "masked-roberta": ("RobertaForMaskedLM", ENCODER),
    "causal-gpt2": ("GPT2LMHeadModel", GPT2),
    "causal-opt": ("OPTForCausalLM", OPT),
    "causal-llama": ("LlamaForCausalLM", {**ENCODER, "num_key_value_heads": 2}),
    "summary-bart": ("BartForConditionalGeneration", BART),
    "span-bert": ("BertForQuestionAnswering", ENCODER),
    "span-roberta": ("RobertaForQuestionAnswering", ENCODER),
    "span-gpt2": ("GPT2ForQuestionAnswering", GPT2),
    "span-bart": ("BartForQuestionAnswering", BART),
    "tokens-bert": ("BertForTokenClassification", {**ENCODER, "num_labels": 3}),
    "tokens-distilbert": ("DistilBertForTokenClassification", {**DISTILBERT, "num_labels": 3}),
    "tokens-gpt2": ("GPT2ForTokenClassification", {**GPT2, "num_labels": 3}),
    "choice-bert": ("BertForMultipleChoice", ENCODER),
    "choice-roberta": ("RobertaForMultipleChoice", ENCODER),
    "next-bert": ("BertForNextSentencePrediction", ENCODER),
    "next-ernie": ("ErnieForNextSentencePrediction", ENCODER),
    "regression-bert": ("BertForSequenceClassification", {**ENCODER, "num_labels": 1}),
    "regression-distilbert": ("DistilBertForSequenceClassification", {**DISTILBERT, "num_labels": 1}),
    "multilabel-bert": ("BertForSequenceClassification", {**ENCODER, "num_labels": 6}),
    "multilabel-gpt2": ("GPT2ForSequenceClassification", {**GPT2, "num_labels": 6}),
    "image-vit": ("ViTForImageClassification", VISION),
    "image-convnext": (
        "ConvNextForImageClassification",
        {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "patch_size": 4, "num_labels": 3},
    ),
    "video-videomae": (
        "VideoMAEForVideoClassification",
        {**VISION, "num_frames": 2, "tubelet_size": 2},
    ),
    "sound-wav2vec2": ("Wav2Vec2ForSequenceClassification", WAV2VEC2),
    "sound-hubert": ("HubertForSequenceClassification", WAV2VEC2),
    "spectrogram-ast": (
        "ASTForAudioClassification",
        {**VISION, "max_length": 12, "num_mel_bins": 4, "frequency_stride": 4, "time_stride": 4},
    ),
    "features-whisper": ("WhisperForAudioClassification", WHISPER),
    "summary-marian": ("MarianMTModel", BART),
    "summary-mbart": ("MBartForConditionalGeneration", BART),
    "summary-t5": ("T5ForConditionalGeneration", T5),
    "speech-whisper": ("WhisperForConditionalGeneration", WHISPER),
    "frames-speech2text": (
        "Speech2TextForConditionalGeneration",
        {**WHISPER, "input_feat_per_channel": 4, "conv_channels": 8, "max_source_positions": 32},
    ),
    "ctc-wav2vec2": ("Wav2Vec2ForCTC", WAV2VEC2),
    "ctc-hubert": ("HubertForCTC", WAV2VEC2),
    "segments-segformer": ("SegformerForSemanticSegmentation", SEGFORMER),
    "boxes-yolos": (
        "YolosForObjectDetection",
        {**VISION, "image_size": [8, 8], "num_detection_tokens": 2},
    ),
}  # fmt: skip
TEXTS = (
    "classes",
    "masked",
    "causal",
    "span",
    "tokens",
    "choice",
    "next",
    "regression",
    "multilabel",
    "summary",
)


def build(name: str, **settings: Any) -> nn.Module:
    """In eval mode, with weights large enough for losses to differ."""
    kind, own = HEADS[name]
    model_class = getattr(transformers, kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = model_class(model_class.config_class(**{**own, **settings})).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.3)
    if name.startswith("segments"):  # the decoder's batch normalisation: statistics of one pass
        model.decode_head.batch_norm.running_var.fill_(2.0)
    return model


def rows(name: str, count: int = 4, seed: int = 11) -> list[dict[str, Any]]:
    """Examples as batches of one, of several lengths where the head takes them."""
    generator = torch.Generator().manual_seed(seed)
    return [_row(name.split("-")[0], LENGTHS[i % len(LENGTHS)], i, generator) for i in range(count)]


def _row(head: str, length: int, number: int, generator: torch.Generator) -> dict[str, Any]:
    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, VOCABULARY, shape, generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator)

    label = torch.tensor([number % 3])
    if head in ("image", "video"):
        frames = (2,) if head == "video" else ()
        return {"pixel_values": noise(*frames, 3, 8, 8), "labels": label}
    if head == "segments":
        labels = tokens(1, 8, 8) % 3
        labels[0, number % 8] = 255
        return {"pixel_values": noise(3, 8, 8), "labels": labels}
    if head == "boxes":
        target = {
            "class_labels": label,
            "boxes": torch.tensor([[0.5, 0.4, 0.2, 0.1 + number / 10]]),
        }
        return {"pixel_values": noise(3, 8, 8), "labels": [target]}
    if head == "spectrogram":
        return {"input_values": noise(12, 4), "labels": label}
    if head in ("sound", "ctc"):
        values = noise(30 * length)
        labels = tokens(1, 1 + length // 3) if head == "ctc" else label
        return {
            "input_values": values,
            "attention_mask": torch.ones_like(values).long(),
            "labels": labels,
        }
    if head == "features":
        return {"input_features": noise(4, 12), "labels": label}
    if head == "speech":
        return {"input_features": noise(4, 12), "labels": tokens(1, length)}
    if head == "frames":
        frames = noise(4 * length, 4)
        mask = torch.ones(1, 4 * length, dtype=torch.int64)
        return {"input_features": frames, "attention_mask": mask, "labels": tokens(1, length)}
    shape = (1, 2, length) if head == "choice" else (1, length)
    row = {"input_ids": tokens(*shape), "attention_mask": torch.ones(shape, dtype=torch.int64)}
    if head == "span":  # the last row's answer was cut off
        ends = (length - 1, length + 4)[number % 4 == 3]
        return {**row, "start_positions": torch.tensor([1]), "end_positions": torch.tensor([ends])}
    if head in ("masked", "causal"):
        row["labels"] = row["input_ids"].clone()
        row["labels"][0, : length // 2] = -100
    elif head == "tokens":
        row["labels"] = row["input_ids"] % 3
        row["labels"][0, 0] = -100
    elif head == "summary":
        row["labels"] = tokens(1, 1 + length // 2)
    elif head == "regression":
        row["labels"] = noise()
    elif head == "multilabel":
        row["labels"] = (noise(6) > 0).float()
    else:
        row["labels"] = label % 2
    return row


def padded(batches: list[dict[str, Any]], side: str = "right") -> dict[str, Any]:
    """One batch of them; a decoder's labels are padded on the right, positions move with the tokens."""
    whole: dict[str, Any] = {}
    width = (
        max(b["attention_mask"].shape[-1] for b in batches) if "attention_mask" in batches[0] else 0
    )
    for name, first in batches[0].items():
        values = [b[name] for b in batches]
        if not isinstance(first, Tensor):
            whole[name] = [item for value in values for item in value]
            continue
        if name in ("start_positions", "end_positions") and side == "left":
            gaps = [width - b["input_ids"].shape[-1] for b in batches]
            values = [v + gap for v, gap in zip(values, gaps)]
        if first.dim() > 1 and len({v.shape for v in values}) > 1:
            own = first.shape == batches[0].get("attention_mask", first).shape
            values = _padded(
                values, FILL.get(name, 0), "left" if own and side == "left" else "right"
            )
        whole[name] = torch.cat(values)
    return whole


def _padded(values: list[Tensor], fill: float, side: str) -> list[Tensor]:
    along = 1 if values[0].is_floating_point() else -1  # [1, T, features] or [..., T]
    gaps = [max(v.shape[along] for v in values) - v.shape[along] for v in values]
    ends = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
    behind = (0, 0) * (values[0].dim() - 2 if along == 1 else 0)
    return [F.pad(v, (*behind, *end), value=fill) for v, end in zip(values, ends)]


class Examples(torch.utils.data.Dataset):
    """Rows that `padded` collates."""

    def __init__(self, name: str, count: int, seed: int) -> None:
        self.rows = rows(name, count, seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]
