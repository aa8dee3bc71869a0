"""Scripts that others wrote for Trainer, in their three-line form: a tiny model, rows made here.

Each entry has facts of a script in https://github.com/huggingface/notebooks, .../peft or .../trl: the
head, the collator, its arguments as they are written. `python tests/outside_scripts.py` writes the list
into docs/outside_scripts.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import tiny_heads
import torch
import transformers
from datasets import Dataset
from tiny_language_models import roberta_tokenizer, seeded
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

from hf_dpzero import DPZeroConfig, DPZeroSeq2SeqConfig, DPZeroSeq2SeqTrainer, DPZeroTrainer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "outside_scripts.md"
HEAD = "| script | in its three-line form |"
HERE = {
    **{"target_epsilon": 8.0, "max_steps": 2, "num_directions": 2, "use_cpu": True},
    **{"disable_tqdm": True, "report_to": "none", "push_to_hub": False, "logging_steps": 1},
}
"""The budget, and what is cut or depends on the machine, in place of what a script says."""


Rows = Callable[[int, int], Any]


class Outside(NamedTuple):
    """A script.

    Attributes:
      name: its path, without the repository's and its ending.
      model: makes a tiny one; into its folder goes what an adapter is put on.
      rows: how many, and a seed -> examples for it.
      arguments: of TrainingArguments, in the names of transformers 5.
      collator: of `COLLATORS`; "": Trainer's.
      fourth: what it needs beside its own arguments and the budget.
      refused: what its refusal says; "" where it trains.
    """

    name: str
    model: Callable[[Path], nn.Module]
    rows: Rows
    arguments: dict[str, Any]
    collator: str = ""
    fourth: dict[str, Any] = {}
    refused: str = ""


def head(name: str, **settings: Any) -> Callable[[Path], Any]:
    return lambda _: tiny_heads.build(name, **settings)


def tiny(kind: str, **settings: Any) -> Callable[[Path], Any]:
    """A model of transformers that `tiny_heads` has not."""
    model = getattr(transformers, kind)
    return lambda _: seeded(lambda: model(model.config_class(**settings)), 7)


def adapted(model: Callable[[Path], Any], config: peft.PeftConfig) -> Callable[[Path], Any]:
    """An adapter on a model that is loaded from a folder."""

    def make(folder: Path) -> nn.Module:
        base = model(folder)
        base.save_pretrained(folder / "base")
        loaded = type(base).from_pretrained(folder / "base")
        return seeded(lambda: peft.get_peft_model(loaded, config), 7)

    return make


def lists(name: str) -> Rows:
    """Rows as a tokenizer leaves them: lists of several lengths."""
    return lambda count, seed: Dataset.from_list(
        [{k: v[0].tolist() for k, v in row.items()} for row in tiny_heads.rows(name, count, seed)]
    )


def equal(name: str) -> Rows:
    """Rows that the script itself pads to one length."""

    def make(count: int, seed: int) -> Dataset:
        whole = tiny_heads.padded(tiny_heads.rows(name, count, seed))
        return Dataset.from_dict({k: v.tolist() for k, v in whole.items()})

    return make


def tensors(name: str) -> Rows:
    """Rows that `tiny_heads.padded` collates, in the place of a processor's features."""
    return lambda count, seed: tiny_heads.Examples(name, count, seed)


Draw = Callable[[torch.Generator], torch.Tensor]


def drawn(**columns: Draw) -> Rows:
    """Rows of columns that are drawn one by one."""

    def make(count: int, seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [{k: draw(generator) for k, draw in columns.items()} for _ in range(count)]

    return make


def noise(*shape: int) -> Draw:
    return lambda generator: torch.randn(shape, generator=generator)


def tokens(*shape: int, below: int = tiny_heads.VOCABULARY) -> Draw:
    return lambda generator: torch.randint(3, below, shape, generator=generator)


def boxes(generator: torch.Generator) -> torch.Tensor:
    """Where nine words stand: left, top, right and bottom."""
    return tokens(9, 4, below=30)(generator).sort(-1).values


def blocks(count: int, seed: int) -> Dataset:
    """Texts put together and cut into pieces of one length, as `group_texts` does."""
    ids = tokens(count, 66)(torch.Generator().manual_seed(seed)).tolist()
    return Dataset.from_dict(
        {"input_ids": ids, "attention_mask": [[1] * 66] * count, "labels": ids}
    )


def texts(count: int, seed: int) -> Dataset:
    """Tokenised texts of several lengths without labels, which a collator makes."""
    return lists("causal")(count, seed).remove_columns("labels")


def preferences(count: int, seed: int) -> list[dict[str, str]]:
    return [{"prompt": f"{seed} {i}:", "chosen": " good", "rejected": " bad"} for i in range(count)]


class HeadOnEncoder(nn.Module):
    """A script's own module, whose forward returns a tuple with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.classifier = tiny_heads.build("masked-bert").bert, nn.Linear(16, 2)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        states = self.model(input_ids, attention_mask).last_hidden_state
        logits = self.classifier(states[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return logits if loss is None else (loss, logits)


COLLATORS: dict[str, Callable[[Any, Any], Any]] = {
    "features": lambda tokenizer, model: tiny_heads.padded,
    "default": lambda tokenizer, model: default_data_collator,
    "padding": lambda tokenizer, model: DataCollatorWithPadding(tokenizer),
    "tokens": lambda tokenizer, model: DataCollatorForTokenClassification(tokenizer),
    "choices": lambda tokenizer, model: DataCollatorForMultipleChoice(tokenizer),
    "masked": lambda tokenizer, model: DataCollatorForLanguageModeling(tokenizer),
    "causal": lambda tokenizer, model: DataCollatorForLanguageModeling(tokenizer, mlm=False),
    "pairs": lambda tokenizer, model: DataCollatorForSeq2Seq(tokenizer, model=model),
}
"""What a script collates with; `features` stands for what it writes for images and sounds."""


BLOCKS = {"rows_are": "blocks"}
EPOCHS = {"eval_strategy": "epoch", "weight_decay": 0.01}
BATCH = {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 16}
BEST = {"save_strategy": "epoch", "load_best_model_at_end": True}
ACCURACY = {**BEST, "metric_for_best_model": "accuracy"}
IMAGES = {
    **{**BATCH, **ACCURACY, "remove_unused_columns": False, "eval_strategy": "epoch"},
    **{"gradient_accumulation_steps": 4, "num_train_epochs": 3, "warmup_steps": 0.1},
}
GENERATES = {"predict_with_generate": True, "save_total_limit": 3, "fp16": True}
SPEECH = {
    **{"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 32},
    **{"eval_strategy": "steps", "fp16": True, "gradient_checkpointing": True, "save_steps": 500},
    **{"eval_steps": 500, "weight_decay": 0.005, "warmup_steps": 1000, "save_total_limit": 2},
}
DOCUMENTS = {
    **{"per_device_train_batch_size": 4, "num_train_epochs": 20, "save_steps": 200},
    **{"learning_rate": 5e-5, "save_total_limit": 2, "remove_unused_columns": False},
}
INSTRUCTIONS = {
    **{"per_device_train_batch_size": 4, "warmup_steps": 100, "num_train_epochs": 3},
    **{"learning_rate": 3e-4, "optim": "adamw_torch", "eval_strategy": "steps", "eval_steps": 200},
    **{"save_strategy": "steps", "save_steps": 200, "save_total_limit": 3},
    **{"load_best_model_at_end": True},
}
LORA = {
    **{"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "warmup_steps": 100},
    **{"weight_decay": 0.01, "save_steps": 500, "save_total_limit": 2, "fp16": True},
    **{"gradient_accumulation_steps": 16, "learning_rate": 1e-4, "hub_token": "hf_..."},
}
SWIN = {
    **{"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]},
    **{"window_size": 2, "num_labels": 3},
}
ESM = {**tiny_heads.ENCODER, "mask_token_id": 3, "num_labels": 2, "emb_layer_norm_before": False}
FORECAST = {
    **{"num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4},
    **{"d_model": 8, "num_hidden_layers": 1, "num_layers": 1, "patch_stride": 4},
}
FORECASTS = {
    **{**BEST, "num_train_epochs": 100, "do_eval": True, "eval_strategy": "epoch"},
    **{"save_total_limit": 3, "metric_for_best_model": "eval_loss", "greater_is_better": False},
    "label_names": ["future_values"],
}
SPEECH_T5 = {
    **{"vocab_size": tiny_heads.VOCABULARY, "hidden_size": 16, "num_mel_bins": 4},
    **{f"{part}_layers": 1 for part in ("encoder", "decoder", "speech_decoder_prenet")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")},
    **{"speech_decoder_prenet_units": 8, "speech_decoder_postnet_units": 8, "reduction_factor": 1},
    **{"speech_decoder_postnet_layers": 2, "speaker_embedding_dim": 6},
}
QUERIES = ["query", "value", "q_proj", "v_proj"]  # releases of transformers name them differently
LLAMA_LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


SCRIPTS = (
    Outside(
        "examples/text_classification", head("regression-distilbert", num_labels=2), lists("classes"),
        {**EPOCHS, **BATCH, **ACCURACY, "learning_rate": 2e-5, "num_train_epochs": 5},
    ),
    Outside(
        "examples/text_classification (stsb)", head("regression-distilbert"), lists("regression"),
        {**EPOCHS, **BATCH, **BEST, "learning_rate": 2e-5, "metric_for_best_model": "pearson"},
    ),
    Outside(
        "examples/token_classification", head("tokens-distilbert"), lists("tokens"),
        {**EPOCHS, **BATCH, "learning_rate": 2e-5, "num_train_epochs": 3},
        "tokens",
    ),
    Outside(
        "examples/question_answering", tiny("DistilBertForQuestionAnswering", **tiny_heads.DISTILBERT),
        equal("span"), {**EPOCHS, **BATCH, "learning_rate": 2e-5, "num_train_epochs": 3}, "default",
    ),
    Outside(
        "examples/multiple_choice", head("choice-bert"), lists("choice"),
        {**EPOCHS, **BATCH, "learning_rate": 5e-5, "num_train_epochs": 3},
        "choices",
    ),
    Outside(
        "examples/summarization", head("summary-t5"), lists("summary"),
        {**EPOCHS, **BATCH, **GENERATES, "learning_rate": 2e-5}, "pairs",
    ),
    Outside(
        "examples/translation", head("summary-marian"), lists("summary"),
        {**EPOCHS, **BATCH, **GENERATES, "learning_rate": 2e-5}, "pairs",
    ),
    Outside(
        "examples/language_modeling (causal)", head("causal-gpt2", n_positions=128), blocks,
        {**EPOCHS, "learning_rate": 2e-5}, fourth=BLOCKS,
    ),
    Outside(
        "examples/language_modeling (masked)",
        head("masked-roberta", vocab_size=700, max_position_embeddings=128), blocks,
        {**EPOCHS, "learning_rate": 2e-5}, "masked", BLOCKS,
    ),
    Outside(
        "examples/image_classification", tiny("SwinForImageClassification", **SWIN), tensors("image"),
        {**IMAGES, "learning_rate": 5e-5}, "features",
    ),
    Outside(
        "examples/audio_classification", head("sound-wav2vec2"), tensors("sound"),
        {**BATCH, **ACCURACY, "eval_strategy": "epoch", "learning_rate": 3e-5, "num_train_epochs": 5,
         "gradient_accumulation_steps": 4, "warmup_steps": 0.1}, "features",
    ),
    Outside(
        "examples/video_classification", head("video-videomae"), tensors("video"),
        {**BATCH, **ACCURACY, "remove_unused_columns": False, "eval_strategy": "epoch",
         "learning_rate": 5e-5, "warmup_steps": 0.1}, "features",
    ),
    Outside(
        "examples/semantic_segmentation", head("segments-segformer"), tensors("segments"),
        {"learning_rate": 6e-5, "num_train_epochs": 50, "per_device_train_batch_size": 2,
         "per_device_eval_batch_size": 2, "save_total_limit": 3, "eval_strategy": "steps",
         "save_strategy": "steps", "save_steps": 20, "eval_steps": 20, "eval_accumulation_steps": 5,
         "load_best_model_at_end": True, "hub_strategy": "end"}, "features",
    ),
    Outside(
        "examples/speech_recognition", head("ctc-wav2vec2"), tensors("ctc"),
        {**SPEECH, "learning_rate": 1e-4}, "features",
    ),
    Outside(
        "examples/protein_language_modeling", tiny("EsmForSequenceClassification", **ESM),
        lists("classes"), {**EPOCHS, **BATCH, **ACCURACY, "learning_rate": 2e-5, "num_train_epochs": 3},
    ),
    *(
        Outside(
            f"examples/{name}", tiny(kind, **FORECAST),
            drawn(past_values=noise(16, 2), future_values=noise(4, 2)), FORECASTS, "default",
        )
        for name, kind in (
            ("patch_tst", "PatchTSTForPrediction"), ("patch_tsmixer", "PatchTSMixerForPrediction"),
        )
    ),
    Outside(
        "examples/idefics/idefics_zero3_finetuning", head("causal-opt"), texts,
        {"per_device_train_batch_size": 1, "bf16": True, "deepspeed": "zero3.json"},
        refused="wraps the model in an engine whose parameters the perturbation does not follow",
    ),
    Outside(
        "transformers_doc/en/object_detection", head("boxes-yolos"), tensors("boxes"),
        {**BEST, "num_train_epochs": 5, "bf16": True, "per_device_train_batch_size": 8,
         "learning_rate": 5e-5, "lr_scheduler_type": "cosine", "weight_decay": 1e-4,
         "max_grad_norm": 0.01, "metric_for_best_model": "eval_map", "greater_is_better": True,
         "eval_strategy": "epoch", "save_total_limit": 2, "remove_unused_columns": False,
         "run_name": "mobile-ui-detection", "eval_do_concat_batches": False}, "features",
    ),
    Outside(
        "transformers_doc/en/document_question_answering",
        tiny("LayoutLMForQuestionAnswering", **tiny_heads.ENCODER, max_2d_position_embeddings=32),
        drawn(input_ids=tokens(9), bbox=boxes, start_positions=tokens(below=5),
              end_positions=tokens(below=8)),
        {**DOCUMENTS, "eval_strategy": "steps"}, "default",
    ),
    Outside(
        "transformers_doc/en/visual_question_answering",
        tiny("ViltForQuestionAnswering", **tiny_heads.ENCODER, image_size=8, patch_size=4, num_labels=5),
        drawn(input_ids=tokens(6), pixel_values=noise(3, 8, 8), labels=noise(5)), DOCUMENTS, "default",
    ),
    Outside(
        "transformers_doc/en/image_captioning",
        tiny("GitForCausalLM", **tiny_heads.ENCODER, vision_config={**tiny_heads.VISION}),
        drawn(input_ids=tokens(6), pixel_values=noise(3, 8, 8), labels=tokens(6)),
        {"learning_rate": 5e-5, "num_train_epochs": 50, "fp16": True, "per_device_train_batch_size": 32,
         "per_device_eval_batch_size": 32, "gradient_accumulation_steps": 2, "save_total_limit": 3,
         "eval_strategy": "steps", "eval_steps": 50, "save_strategy": "steps", "save_steps": 50,
         "remove_unused_columns": False, "label_names": ["labels"], "load_best_model_at_end": True},
        "default",
    ),
    Outside(
        "transformers_doc/en/asr", head("ctc-wav2vec2"), tensors("ctc"),
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-5,
         "warmup_steps": 500, "gradient_checkpointing": True, "fp16": True,
         "train_sampling_strategy": "group_by_length", "eval_strategy": "steps",
         "per_device_eval_batch_size": 8, "save_steps": 1000, "eval_steps": 1000,
         "load_best_model_at_end": True, "metric_for_best_model": "wer", "greater_is_better": False},
        "features",
    ),
    Outside(
        "transformers_doc/en/text-to-speech", tiny("SpeechT5ForTextToSpeech", **SPEECH_T5),
        drawn(input_ids=tokens(6), attention_mask=lambda _: torch.ones(6, dtype=torch.int64),
              labels=noise(8, 4), speaker_embeddings=noise(6)),
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "learning_rate": 1e-5,
         "warmup_steps": 500, "gradient_checkpointing": True, "fp16": True, "eval_strategy": "steps",
         "per_device_eval_batch_size": 2, "save_steps": 1000, "eval_steps": 1000,
         "load_best_model_at_end": True, "greater_is_better": False, "label_names": ["labels"]},
        "default",
    ),
    Outside(
        "course/en/chapter3/section3", head("classes-bert", num_labels=2), lists("classes"),
        {"eval_strategy": "epoch"}, "padding",
    ),
    Outside(
        "course/en/chapter3/section7",
        tiny("ModernBertForSequenceClassification", **tiny_heads.ENCODER, num_labels=2),
        lists("classes"),
        {**BEST, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
         "gradient_accumulation_steps": 16, "learning_rate": 5e-5, "num_train_epochs": 5, "bf16": True,
         "optim": "adamw_torch_fused", "logging_strategy": "steps", "eval_strategy": "epoch",
         "save_total_limit": 2, "metric_for_best_model": "f1", "hub_strategy": "every_save",
         "hub_token": "hf_..."},
    ),
    Outside(
        "course/en/chapter7/section3_pt",
        tiny("DistilBertForMaskedLM", **{**tiny_heads.DISTILBERT, "vocab_size": 700}),
        blocks, {**EPOCHS, "learning_rate": 2e-5, "per_device_train_batch_size": 64, "fp16": True,
                 "per_device_eval_batch_size": 64}, "masked", BLOCKS,
    ),
    Outside(
        "course/en/chapter7/section5_pt", tiny("MT5ForConditionalGeneration", **tiny_heads.T5),
        lists("summary"),
        {**EPOCHS, "learning_rate": 5.6e-5, "per_device_train_batch_size": 8, "save_total_limit": 3,
         "per_device_eval_batch_size": 8, "num_train_epochs": 8, "predict_with_generate": True}, "pairs",
    ),
    Outside(
        "course/en/chapter7/section6_pt", head("causal-gpt2"), texts,
        {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 32, "eval_strategy": "steps",
         "eval_steps": 5000, "gradient_accumulation_steps": 8, "num_train_epochs": 1,
         "weight_decay": 0.1, "warmup_steps": 1000, "lr_scheduler_type": "cosine",
         "learning_rate": 5e-4, "save_steps": 5000, "fp16": True}, "causal",
    ),
    Outside(
        "sagemaker/09_image_classification_vision_transformer", head("image-vit"), tensors("image"),
        {"num_train_epochs": 3, "per_device_train_batch_size": 10, "per_device_eval_batch_size": 4,
         "warmup_steps": 500, "weight_decay": 0.01, "eval_strategy": "epoch", "learning_rate": 2e-5,
         "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}, "features",
        refused="load_best_model_at_end requires the save and eval strategy to match",
    ),
    Outside(
        "peft/dna_language_models/dna_lm", lambda _: seeded(HeadOnEncoder, 7), lists("classes"),
        {**EPOCHS, **BATCH, "learning_rate": 2e-5, "num_train_epochs": 5, "eval_steps": 1}, "padding",
    ),
    Outside(
        "peft/token_classification/peft_lora_ner",
        adapted(head("tokens-bert"), peft.LoraConfig(task_type="TOKEN_CLS", r=2, lora_alpha=16)),
        lists("tokens"),
        {**EPOCHS, **ACCURACY, "per_device_train_batch_size": 32, "per_device_eval_batch_size": 64,
         "learning_rate": 2e-3, "num_train_epochs": 5, "do_eval": True, "do_predict": True,
         "label_names": ["labels"]}, "tokens",
    ),
    Outside(
        "peft/image_classification/image_classification_peft_lora",
        adapted(head("image-vit"), peft.LoraConfig(
            r=2, lora_alpha=16, target_modules=QUERIES, lora_dropout=0.1, bias="none",
            modules_to_save=["classifier"])),
        tensors("image"),
        {**IMAGES, "learning_rate": 5e-3, "fp16": True, "label_names": ["labels"], "warmup_steps": 0},
        "features",
    ),
    Outside(
        "peft/semantic_segmentation/semantic_segmentation_peft_lora",
        adapted(head("segments-segformer"), peft.LoraConfig(
            r=2, lora_alpha=32, target_modules=QUERIES, lora_dropout=0.1, bias="lora_only",
            modules_to_save=["decode_head"])),
        tensors("segments"),
        {"learning_rate": 5e-4, "num_train_epochs": 50, "per_device_train_batch_size": 4,
         "per_device_eval_batch_size": 2, "save_total_limit": 3, "eval_strategy": "epoch",
         "save_strategy": "epoch", "remove_unused_columns": False, "label_names": ["labels"]},
        "features",
    ),
    Outside(
        "peft/conditional_generation/peft_prompt_tuning_seq2seq_with_generate",
        adapted(head("summary-t5"), peft.PromptTuningConfig(
            task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, prompt_tuning_init="RANDOM")),
        equal("summary"),
        {"per_device_train_batch_size": 8, "learning_rate": 1e-3, "num_train_epochs": 5,
         "eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "no",
         "predict_with_generate": True,
         "generation_config": transformers.GenerationConfig(max_length=6)}, "default",
    ),
    Outside(
        "peft/conditional_generation/peft_ia3_seq2seq",
        adapted(head("summary-t5"), peft.IA3Config(task_type="SEQ_2_SEQ_LM", inference_mode=False)),
        equal("summary"), {}, "default",
    ),
    Outside(
        "peft/olora_finetuning/olora_finetuning",
        adapted(head("causal-llama"), peft.LoraConfig(**LLAMA_LORA, init_lora_weights="olora")),
        lists("causal"), INSTRUCTIONS, "pairs",
    ),
    Outside(
        "peft/dora_finetuning/dora_finetuning",
        adapted(head("causal-llama"), peft.LoraConfig(**LLAMA_LORA, use_dora=True)), texts, LORA,
        "causal",
    ),
    Outside(
        "peft/randlora_finetuning/randlora_finetuning",
        adapted(head("causal-llama"), peft.RandLoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")),
        texts, {**LORA, "fp16": False, "label_names": ["labels"]}, "causal",
    ),
    Outside(
        "peft/shira_finetuning/shira_finetuning",
        adapted(head("causal-llama"), peft.ShiraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")),
        lists("causal"), INSTRUCTIONS, "pairs",
    ),
    Outside(
        "trl/scripts/dpo", head("causal-opt", vocab_size=700), preferences, {"learning_rate": 5e-7},
        refused="has text in columns ['chosen', 'prompt', 'rejected'], which OPTForCausalLM",
    ),
)  # fmt: skip


def scores(prediction: Any) -> dict[str, float]:
    """Stands for what a script measures, under the names that it chooses the best by."""
    first = prediction.predictions
    while isinstance(first, (tuple, list, dict)):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    value = float(np.nan_to_num(np.asarray(first, dtype=float)).mean())
    return dict.fromkeys(("accuracy", "f1", "map", "pearson", "wer"), value)


def made(script: Outside, folder: Path, fourth: dict[str, Any]) -> Any:
    """The script's trainer, its three lines changed; intervals are cut to the run's two steps."""
    sequences = "predict_with_generate" in script.arguments
    given = {**script.arguments, **HERE, **fourth}
    given |= {n: 1 for n in ("eval_steps", "save_steps") if n in given}
    args = (DPZeroSeq2SeqConfig if sequences else DPZeroConfig)(
        output_dir=str(folder / "out"), **given
    )
    model, tokenizer = script.model(folder), roberta_tokenizer()
    collator = script.collator and COLLATORS[script.collator](tokenizer, model)
    sounds = getattr(model, "main_input_name", "") == "input_values"
    return (DPZeroSeq2SeqTrainer if sequences else DPZeroTrainer)(
        model=model,
        args=args,
        train_dataset=script.rows(24, 1),
        eval_dataset=script.rows(6, 2),
        **({"data_collator": collator} if collator else {}),
        processing_class=transformers.Wav2Vec2FeatureExtractor() if sounds else tokenizer,
        compute_metrics=scores,
    )


def page() -> str:
    """The page with this list in place of the one that it has."""
    lines = [f"| `{script.name}` | {outcome(script)} |" for script in SCRIPTS]
    kept = PAGE.read_text(encoding="utf-8").partition(HEAD)[0]
    return kept + "\n".join([HEAD, "|---|---|", *lines]) + "\n"


def outcome(script: Outside) -> str:
    """What the page says of a script."""
    if script.refused:
        return f"refused: ... {script.refused} ..."
    needs = ", ".join(f"`{name}={value!r}`" for name, value in script.fourth.items())
    return f"trains with {needs}" if needs else "trains"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
