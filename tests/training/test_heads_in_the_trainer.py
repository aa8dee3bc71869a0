"""Private runs of two steps for each head, and what is refused or evaluated one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_heads
import torch
from datasets import Dataset
from tiny_language_models import word_tokenizer
from tiny_runs import build
from tiny_texts import passes_of
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    DataCollatorForMultipleChoice,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)

from hf_dpzero.batches.shapes import PassShapes, decoder_length, widened
from hf_dpzero.objectives import heads, register_objective
from hf_dpzero.training.preparation import prepare


def metrics(prediction: Any) -> dict[str, float]:
    """How many rows were predicted, and whether all of what was predicted is finite."""
    parts = prediction.predictions
    parts = parts if isinstance(parts, tuple) else (parts,)
    numbers = [p for p in parts if isinstance(p, np.ndarray)]
    return {"rows": len(numbers[0]), "finite": float(all(np.isfinite(p).all() for p in numbers))}


def trainer_of(tmp_path: Any, name: str, model: nn.Module | None = None, **settings: Any) -> Any:
    """Its model and 40 rows; 6 others for the evaluation."""
    trainer = build(
        tmp_path, model or tiny_heads.build(name), data=tiny_heads.Examples(name, 40, seed=1),
        trainer_settings={
            "eval_dataset": tiny_heads.Examples(name, 6, seed=2), "compute_metrics": metrics,
        },
        **{"max_steps": 2, "microbatch_size": 4, "expected_batch_size": 16, **settings},
    )  # fmt: skip
    trainer.data_collator = tiny_heads.padded
    return trainer


def check_run(trainer: Any) -> None:
    trainer.train()
    assert trainer.trajectory.releases and trainer.trajectory.next_step == 2
    evaluation = trainer.evaluate()
    assert np.isfinite(evaluation["eval_loss"]) and evaluation["eval_finite"] == 1
    assert evaluation["eval_rows"] == 6


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("span-bert", 4),  # texts, of one width here
        ("tokens-distilbert", 4),
        ("choice-roberta", 4),
        ("next-bert", 4),
        ("multilabel-bert", 4),  # six labels, and rows of six tokens
        ("summary-marian", 4),
        ("sound-wav2vec2", 4),
        ("image-vit", 4),  # one shape: as many as microbatch_size allows
        ("spectrogram-ast", 4),
        ("speech-whisper", 4),
        ("ctc-wav2vec2", 1),  # the model's own loss, one by one
        ("segments-segformer", 1),
    ],
)
def test_a_private_run_of_dpzero(tmp_path, name: str, slots: int):
    trainer = trainer_of(tmp_path, name)
    check_run(trainer)
    assert trainer.run.shapes.placement.largest == slots


def test_boxes_are_labels_too(tmp_path):
    """Their labels are a list of dictionaries, of which Trainer makes no array of rows."""
    trainer = trainer_of(tmp_path, "boxes-yolos")
    trainer.train()
    assert trainer.run.shapes.one_by_one and np.isfinite(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize(
    ("name", "trainable"),
    [
        ("span-bert", None),
        ("tokens-bert", None),
        ("choice-bert", None),  # two rows for each example, one lookup of positions for all
        ("choice-roberta", None),
        ("video-videomae", None),
        ("image-vit", "projection|layer|classifier"),  # patches are convolutions
        ("image-convnext", "downsampling_layer.1|dwconv|classifier"),  # of permuted inputs
        ("sound-wav2vec2", r"layers\.1|classifier"),
    ],
)
def test_a_private_run_of_dp_sgd(tmp_path, name: str, trainable: str | None):
    check_run(trainer_of(tmp_path, name, method="dp-sgd", trainable=trainable, learning_rate=0.1))


@pytest.mark.parametrize(
    ("name", "trainable", "words"),
    [
        (
            "image-vit",
            None,
            "vit.embeddings .ViTEmbeddings. owns trainable parameters.*freeze them",
        ),
        (
            "sound-wav2vec2",
            "projector|classifier",
            "in place.*the projector.*Freeze it, or use dpzero",
        ),
    ],
)
def test_dp_sgd_refuses_what_it_cannot_attribute(tmp_path, name: str, trainable: Any, words: str):
    with pytest.raises(ValueError, match=words):
        trainer_of(tmp_path, name, method="dp-sgd", trainable=trainable).train()


@pytest.mark.parametrize("clipping", ["fixed", "averaged"])
def test_gradients_of_the_models_own_loss_are_taken_row_by_row(tmp_path, clipping: str):
    check_run(trainer_of(tmp_path, "ctc-wav2vec2", method="dp-sgd", clipping=clipping))


def without_masks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = tiny_heads.padded(rows)
    del batch["attention_mask"]
    return batch


@pytest.mark.parametrize("method", ["dpzero", "dp-sgd"])
def test_sounds_without_masks_run_alone(tmp_path, method: str):
    """Group normalisation sees padding, so a batch of several lengths is none of the examples' own."""
    model = tiny_heads.build("sound-hubert", feat_extract_norm="group", do_stable_layer_norm=False)
    trainer = trainer_of(tmp_path, "sound-hubert", model, method=method, trainable="classifier")
    trainer.data_collator = without_masks
    prepare(trainer.run)
    assert trainer.run.shapes.one_by_one


# ---------------------------------------------------------------- transformers' collators


def texts(name: str, side: str) -> tuple[Any, Any]:
    """Token lists as a tokenizer leaves them, and the collator that transformers has for them."""
    rows = [{k: v[0].tolist() for k, v in row.items()} for row in tiny_heads.rows(name, 40)]
    kinds = {
        "tokens": DataCollatorForTokenClassification,
        "choice": DataCollatorForMultipleChoice,
        "span": DataCollatorWithPadding,
    }
    return Dataset.from_list(rows), kinds[name.split("-")[0]](word_tokenizer(side))


@pytest.mark.parametrize("name", ["tokens-bert", "choice-bert", "span-bert"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_transformers_collators_pad_on_either_side(tmp_path, name: str, side: str):
    data, collator = texts(name, side)
    trainer = build(
        tmp_path, tiny_heads.build(name), data=data, expected_batch_size=16,
        trainer_settings={"processing_class": collator.tokenizer, "eval_dataset": None},
    )  # fmt: skip
    trainer.data_collator = collator
    prepare(trainer.run)
    assert not trainer.run.shapes.one_by_one


# ---------------------------------------------------------------- shapes


def test_positions_are_widened_on_the_right_and_numbers_not_at_all():
    row = tiny_heads.rows("span-bert", 1)[0]
    wide = widened(row, "left", 2)
    assert wide is not None and wide["attention_mask"].tolist() == [[1, 1, 1, 0, 0]]
    assert torch.equal(wide["start_positions"], row["start_positions"])
    scores = {**tiny_heads.rows("tokens-bert", 1)[0], "labels": torch.rand(1, 3)}
    found = PassShapes(lambda _: [scores], passes_of(2)).microbatches([0])[0]
    assert found["input_ids"].shape == (2, 8) and found["labels"].shape == (2, 3)


def test_sounds_are_widened_with_silence_and_labels_up_to_the_decoders_end():
    sound, frames = tiny_heads.rows("sound-hubert", 1)[0], tiny_heads.rows("frames-x", 2)[1]
    wide, most = widened(sound, "right", 6), 12
    assert wide is not None and wide["input_values"].shape == wide["attention_mask"].shape == (
        1,
        96,
    )
    assert not wide["input_values"][0, 90:].any() and wide["labels"].shape == (1,)
    (found,) = PassShapes(lambda _: [frames], passes_of(2), decoder_length=most).microbatches([0])
    assert found["input_features"].shape == (2, 40, 4) and found["labels"].shape == (2, 12)
    assert decoder_length(tiny_heads.build("speech-whisper")) == most


# ---------------------------------------------------------------- at construction


class TinyForReranking(BertModel):
    """A head that nobody knows."""


@pytest.fixture
def reranker(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(heads, "_REGISTERED", {})
    return TinyForReranking(BertConfig(**tiny_heads.ENCODER))


def test_an_unknown_head_is_refused_before_anything_is_read(tmp_path, reranker):
    with pytest.raises(ValueError, match="known for TinyForReranking.*compute_per_example_loss"):
        build(tmp_path, reranker)
    trainer = build(
        tmp_path, reranker, trainer_settings={"compute_per_example_loss": lambda model, inputs: 0}
    )
    assert trainer.per_example_loss is not None
    register_objective("ForReranking", heads.own_loss_objective)
    build(tmp_path, reranker)
