"""Pairs of texts encoded apart: their features, their losses, alone and in a padded batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.per_example_gradients import PerExampleGradients
from hf_dpzero.objectives import losses as objectives
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.models import load_model, precompute_features
from hf_dpzero.recipes.sentence_classifier import (
    SentenceClassifier,
    SentenceClassifierConfig,
    compare,
)
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.tasks.task import Task

WIDTH = 16
WORDS = ("[PAD]", "[UNK]", "good", "bad", "great", "film", "it", "was", "a", "very")
ROWS = [
    {"premise": "it was a very very good film", "hypothesis": "it was good", "label": 0},
    {"premise": "bad film", "hypothesis": "it was a very great film", "label": 1},
    {"premise": "great", "hypothesis": "great", "label": 0},
    {"premise": "a film", "hypothesis": "bad", "label": 1},
] * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny bare BERT with weights that tell words and positions apart, and its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=24,
    )
    model, generator = transformers.BertModel(config), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    backend = Tokenizer(words)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    files = {"train_file": tmp_path / "t.jsonl", "validation_file": tmp_path / "v.jsonl"}
    for path in files.values():
        path.write_text(lines + "\n" * (path.stem == "v"), encoding="utf-8")
    return build_task(DataArguments(task="rte", **{key: str(f) for key, f in files.items()}))


def settings(checkpoint: str, **changes: Any) -> ModelArguments:
    usual: dict[str, Any] = {
        "architecture": "sentence_classifier",
        "pair_features": "siamese",
        "logit_scale": 10.0,
        "init_seed": 3,
    }
    return ModelArguments(model_name_or_path=checkpoint, **{**usual, **changes})


def siamese(checkpoint: str, task: Task, **changes: Any) -> tuple[nn.Module, Any]:
    """The model with a head that has something to say, and its tokenizer."""
    model, tokenizer = load_model(settings(checkpoint, **changes), task)
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    return model, tokenizer


def batch_of(task: Task, tokenizer: Any, indices: list[int]) -> dict[str, torch.Tensor]:
    rows = task.tokenize(tokenizer, "siamese")["train"]
    return task.collator(tokenizer)([rows[i] for i in indices])


def test_the_two_texts_are_tokenised_and_padded_apart(checkpoint, task):
    _, tokenizer = siamese(checkpoint, task)
    rows = task.tokenize(tokenizer, "siamese")["train"]
    assert tokenizer.decode(rows["input_ids"][1]) == "bad film"
    assert tokenizer.decode(rows["input_ids_pair"][1]) == "it was a very great film"
    batch = task.collator(tokenizer)([rows[1], rows[3]])
    assert batch["attention_mask"].sum(dim=1).tolist() == [2, 2]
    assert batch["attention_mask_pair"].sum(dim=1).tolist() == [6, 1]
    assert batch["input_ids"].shape == batch["input_ids_pair"].shape == (2, 8)
    assert batch["labels"].tolist() == [1, 1]


def test_each_text_is_cut_by_itself(checkpoint, task, tmp_path):
    _, tokenizer = siamese(checkpoint, task)
    short = Task(
        name="short",
        label_names=("a", "b"),
        text_columns=("premise", "hypothesis"),
        max_seq_length=3,
        splits=task.splits,
    )
    apart = short.tokenize(tokenizer, "siamese")["train"]
    assert (len(apart["input_ids"][0]), len(apart["input_ids_pair"][0])) == (3, 3)
    assert len(short.tokenize(tokenizer)["train"]["input_ids"][0]) == 3  # of both together


def test_a_joint_pair_is_one_sequence(checkpoint, task):
    _, tokenizer = siamese(checkpoint, task)
    rows = task.tokenize(tokenizer)["train"]
    assert tokenizer.decode(rows["input_ids"][1]) == "bad film it was a very great film"
    assert not [name for name in rows.column_names if name.endswith("_pair")]


def test_compare_is_its_equation():
    a, b = torch.tensor([[0.6, 0.8], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    by_hand = torch.tensor(
        [[0.6, 0.8, 1.0, 0.0, 0.4, 0.8, 0.6, 0.0], [1.0, 0.0, 0.0, -1.0, 1.0, 1.0, 0.0, 0.0]]
    )
    torch.testing.assert_close(compare(a, b, normalize=False), by_hand)
    by_hand[:, 6:] *= 2**0.5  # sqrt(H), H = 2
    expected = by_hand / by_hand.norm(dim=1, keepdim=True)
    torch.testing.assert_close(compare(a, b, normalize=True), expected)


def test_normalised_blocks_have_the_same_scale():
    """What sqrt(H) is for: without it the product of unit vectors is sqrt(H) times smaller."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        nn.functional.normalize(torch.randn(100, 384, generator=generator), dim=-1)
        for _ in range(2)
    )
    first, second, difference, product = compare(a, b, normalize=True).chunk(4, dim=1)
    norms = torch.stack([block.norm(dim=1).mean() for block in (first, second, product)])
    assert norms.max() / norms.min() < 1.1
    assert 1.2 < difference.norm(dim=1).mean() / norms[0] < 1.6  # sqrt(2): random a, b


@pytest.mark.parametrize("normalize", [True, False])
@torch.no_grad()
def test_forward_is_its_equation(checkpoint, task, normalize):
    model, tokenizer = siamese(checkpoint, task, normalize=normalize)
    assert model.classifier.in_features == model.config.feature_size == 4 * WIDTH
    batch = batch_of(task, tokenizer, [0, 1, 2, 3])

    def embedded(column: str) -> torch.Tensor:
        vectors = []
        for row in ROWS[:4]:
            ids = tokenizer(row[column], return_tensors="pt")["input_ids"]
            vectors.append(model.encoder(ids).last_hidden_state[0].mean(dim=0))
        found = torch.stack(vectors)
        return found / found.norm(dim=1, keepdim=True) if normalize else found

    a, b = embedded("premise"), embedded("hypothesis")
    scale = WIDTH**0.5 if normalize else 1.0
    features = torch.cat([a, b, (a - b).abs(), scale * a * b], dim=1)
    if normalize:
        features = features / features.norm(dim=1, keepdim=True)
    expected = 10.0 * (features @ model.classifier.weight.T + model.classifier.bias)
    labels = batch.pop("labels")
    torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    loss = model(**batch, labels=labels).loss
    torch.testing.assert_close(loss, nn.functional.cross_entropy(expected, labels))
    assert expected.std() > 0.1


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_does_not_couple(checkpoint, task, side):
    model, tokenizer = siamese(checkpoint, task)
    objective = objectives.select_objective(model)
    alone = torch.cat([objective(model, batch_of(task, tokenizer, [i])) for i in range(4)])
    tokenizer.padding_side = side
    together = objective(model, batch_of(task, tokenizer, [0, 1, 2, 3]))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert alone.max() - alone.min() > 0.1


@torch.no_grad()
def test_the_second_text_matters_and_its_order_too(checkpoint, task):
    model, tokenizer = siamese(checkpoint, task)
    batch = batch_of(task, tokenizer, [0, 1])
    swapped = {
        key: batch[key.removesuffix("_pair") if key.endswith("_pair") else f"{key}_pair"]
        for key in batch
        if key != "labels"
    }
    first, second = model.embed(**swapped), model.embed(**{k: batch[k] for k in swapped})
    a, b, both, product = second.chunk(4, dim=1)
    torch.testing.assert_close(first, torch.cat([b, a, both, product], dim=1))
    assert (a - b).abs().max() > 0.05


@torch.no_grad()
def test_round_trip_through_auto_classes(checkpoint, task, tmp_path):
    model, tokenizer = siamese(checkpoint, task)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert isinstance(loaded, SentenceClassifier)
    assert loaded.config.pair_features == "siamese"
    batch = batch_of(task, tokenizer, [0, 1, 2])
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    again, _ = load_model(settings(str(tmp_path / "saved")), task)
    assert torch.equal(again.classifier.weight, model.classifier.weight)
    with pytest.raises(ValueError, match=r"pair_features='siamese', the recipe says 'joint'; set"):
        load_model(settings(str(tmp_path / "saved"), pair_features="joint"), task)


def test_hugging_faces_trainer_keeps_the_second_text(checkpoint, task, tmp_path):
    """It drops the columns that the model's forward does not name."""
    model, tokenizer = siamese(checkpoint, task)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        eval_dataset=task.tokenize(tokenizer, "siamese")["validation"],
        processing_class=tokenizer,
        data_collator=task.collator(tokenizer),
        compute_metrics=task.compute_metrics,
    )
    with torch.no_grad():
        batch = batch_of(task, tokenizer, list(range(len(ROWS))))
        expected = objectives.select_objective(model)(model, batch).mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


@torch.no_grad()
def test_stored_features_give_the_same_losses(checkpoint, task):
    model, tokenizer = siamese(checkpoint, task)
    tokenizer.padding_side = "left"
    rows, collate = task.tokenize(tokenizer, "siamese")["train"], task.collator(tokenizer)
    stored = precompute_features(model, rows, collate, trainable="^classifier", batch_size=3)
    assert sorted(stored.column_names) == ["labels", "sentence_embedding"]
    assert stored["sentence_embedding"][:].shape == (len(ROWS), 4 * WIDTH)
    objective, everything = objectives.select_objective(model), list(range(len(rows)))
    expected = objective(model, collate([rows[i] for i in everything]))
    actual = objective(model, collate(stored.__getitems__(everything)))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_stored_features_are_named_after_the_pairing(checkpoint, task):
    def fingerprint(pairing: str) -> str:
        model, tokenizer = load_model(settings(checkpoint, pair_features=pairing), task)
        rows = datasets.Dataset.from_dict(task.tokenize(tokenizer, pairing)["train"][:])
        rows._fingerprint = "same"
        collate = task.collator(tokenizer)
        return precompute_features(model, rows, collate, trainable="^classifier")._fingerprint

    assert fingerprint("siamese") == fingerprint("siamese") != fingerprint("joint")


def differences(
    model: nn.Module, batch: dict[str, torch.Tensor], trainable: str | None, **how: Any
) -> torch.Tensor:
    select_trainable(model, trainable)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    space = ParameterSpace(trained, smoothing=1e-2)
    objective = objectives.select_objective(model)
    evaluate = FiniteDifferences(model, space, objective, smoothing=1e-2, **how)
    return evaluate([batch], [Direction(7, 0), Direction(7, 0, 1)])


@pytest.mark.parametrize("strategy", ["whole_model", "layerwise"])
@pytest.mark.parametrize("trainable", ["^classifier", r"layer\.1\.|^classifier", None])
def test_every_strategy_gives_the_differences_of_full_passes(checkpoint, task, strategy, trainable):
    """The encoder runs twice in a forward pass; strategies must perturb it both times alike."""
    model, tokenizer = siamese(checkpoint, task)
    batch = batch_of(task, tokenizer, [0, 1, 2, 3])
    full = {"strategy": "whole_model", "reuse_frozen_prefix": False}
    expected = differences(model, batch, trainable, **full)
    again, _ = siamese(checkpoint, task)
    found = differences(again, batch, trainable, strategy=strategy)
    assert found.shape == (4, 2)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("trainable", ["^classifier", r"layer\.1\.|^classifier", None])
def test_per_example_gradients_add_up_over_both_texts(checkpoint, task, trainable):
    """One example's gradient is that of both passes together, before it is clipped."""
    model, tokenizer = siamese(checkpoint, task)
    select_trainable(model, trainable)
    batch, objective = batch_of(task, tokenizer, [0, 1, 2, 3]), objectives.select_objective(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = PerExampleGradients(model, objective).per_example(batch)
    assert len(found) == len(parameters)
    for row in range(4):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        expected = torch.autograd.grad(objective(model, one).sum(), parameters, allow_unused=True)
        pairs = zip(found, expected, parameters, strict=True)
        for gradient, alone, parameter in pairs:
            alone = torch.zeros_like(parameter) if alone is None else alone
            mine = torch.zeros_like(alone) if gradient is None else gradient[row]
            torch.testing.assert_close(mine, alone, atol=2e-5, rtol=1e-4)


def test_settings_that_do_not_fit(checkpoint, task):
    with pytest.raises(ValueError, match=r"pair_features='cross' is not one of joint, siamese"):
        settings(checkpoint, pair_features="cross")
    with pytest.raises(ValueError, match=r"label_text' describes one text.*zero or random"):
        settings(checkpoint, head_init="label_text", label_texts=["a", "b"])
    with pytest.raises(ValueError, match=r"pair_features=siamese needs architecture: sentence"):
        load_model(settings(checkpoint, architecture="auto", logit_scale=1.0), task)
    with pytest.raises(ValueError, match="pair_features='cross' is not one of"):
        SentenceClassifierConfig(pair_features="cross")


def test_a_single_text_has_nothing_to_compare(checkpoint, task, tmp_path):
    _, tokenizer = siamese(checkpoint, task)
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path, name in zip(files, "ab", strict=True):
        path.write_text(f'{{"text": "{name}", "label": 0}}\n{{"text": "c", "label": 1}}\n')
    train, validation = map(str, files)
    single = build_task(DataArguments(train_file=train, validation_file=validation))
    with pytest.raises(ValueError, match=r"siamese compares two texts.*columns text; use .*joint"):
        single.tokenize(tokenizer, "siamese")


def test_tokens_of_the_other_pairing_are_refused(checkpoint, task):
    model, tokenizer = siamese(checkpoint, task)
    joint, _ = load_model(settings(checkpoint, pair_features="joint"), task)
    batch = batch_of(task, tokenizer, [0])
    with pytest.raises(ValueError, match=r"pair_features='joint', but input_ids_pair is given"):
        joint(**batch)
    first = {key: value for key, value in batch.items() if not key.endswith("_pair")}
    with pytest.raises(ValueError, match=r"pair_features='siamese', but input_ids_pair is missing"):
        model(**first)
