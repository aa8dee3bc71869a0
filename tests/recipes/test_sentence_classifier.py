"""The sentence classifier: its equation, pairs of texts encoded apart, padding, stored features."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from row_files import row_files
from tiny_language_models import save_encoder
from torch import nn
from transformers import AutoModelForSequenceClassification

from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.per_example_gradients import PerExampleGradients
from hf_dpzero.objectives import heads
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.models import load_model
from hf_dpzero.recipes.sentence_classifier import (
    SentenceClassifier,
    SentenceClassifierConfig,
    label_text_weights,
    pool,
    precompute_features,
)
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.classification import Task
from hf_dpzero.tasks.description import DataArguments

WIDTH = 16
BOTH = pytest.mark.parametrize("pairing", ["joint", "siamese"])
ROWS = [
    {"premise": "it was a very very good film", "hypothesis": "it was good", "label": 0},
    {"premise": "bad film", "hypothesis": "it was a very great film", "label": 1},
    {"premise": "great", "hypothesis": "great", "label": 0},
    {"premise": "a film", "hypothesis": "bad", "label": 1},
] * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return build_task(DataArguments(task="rte", **row_files(tmp_path, ROWS, ROWS)))


def settings(checkpoint: Path, pairing: str = "siamese", **changes: Any) -> ModelArguments:
    usual = {"architecture": "sentence_classifier", "logit_scale": 10.0, "init_seed": 3}
    given = {**usual, "pair_features": pairing, **changes}
    return ModelArguments(model_name_or_path=str(checkpoint), **given)


def built(checkpoint: Path, task: Task, pairing: str = "siamese", **changes: Any) -> Any:
    """The model with a head that has something to say, and its tokenizer."""
    model, tokenizer = load_model(settings(checkpoint, pairing, **changes), task)
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    return model, tokenizer


def batch_of(
    task: Task, tokenizer: Any, indices: Any, pairing: str = "siamese"
) -> dict[str, torch.Tensor]:
    rows = task.tokenize(tokenizer, pairing)["train"]
    return task.collator(tokenizer)([rows[i] for i in indices])


def test_the_two_texts_are_tokenised_padded_and_cut_apart(checkpoint, task):
    _, tokenizer = built(checkpoint, task)
    rows = task.tokenize(tokenizer, "siamese")["train"]
    assert tokenizer.decode(rows["input_ids"][1]) == "bad film"
    assert tokenizer.decode(rows["input_ids_pair"][1]) == "it was a very great film"
    batch = task.collator(tokenizer)([rows[1], rows[3]])
    assert batch["attention_mask"].sum(dim=1).tolist() == [2, 2]
    assert batch["attention_mask_pair"].sum(dim=1).tolist() == [6, 1]
    assert batch["input_ids"].shape == batch["input_ids_pair"].shape == (2, 8)
    assert batch["labels"].tolist() == [1, 1]
    joint = task.tokenize(tokenizer)["train"]
    assert tokenizer.decode(joint["input_ids"][1]) == "bad film it was a very great film"
    assert not [name for name in joint.column_names if name.endswith("_pair")]
    short = dataclasses.replace(task, max_seq_length=3)
    apart = short.tokenize(tokenizer, "siamese")["train"]
    assert (len(apart["input_ids"][0]), len(apart["input_ids_pair"][0])) == (3, 3)
    assert len(short.tokenize(tokenizer)["train"]["input_ids"][0]) == 3  # of both together


@BOTH
@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("mean", False), ("cls", True)])
@torch.no_grad()
def test_forward_is_its_equation(checkpoint, task, pairing, pooling, normalize):
    model, tokenizer = built(checkpoint, task, pairing, pooling=pooling, normalize=normalize)
    width = WIDTH * (4 if pairing == "siamese" else 1)
    assert model.classifier.in_features == model.config.feature_size == width
    batch = batch_of(task, tokenizer, range(4), pairing)

    def embedded(*columns: str) -> torch.Tensor:
        vectors = []
        for row in ROWS[:4]:
            ids = tokenizer(*[row[column] for column in columns], return_tensors="pt")["input_ids"]
            states = model.encoder(ids).last_hidden_state[0]
            vectors.append(states[0] if pooling == "cls" else states.mean(dim=0))
        features = torch.stack(vectors)
        return features / features.norm(dim=1, keepdim=True) if normalize else features

    if pairing == "joint":
        features = embedded("premise", "hypothesis")
    else:
        a, b = embedded("premise"), embedded("hypothesis")
        scale = WIDTH**0.5 if normalize else 1.0
        features = torch.cat([a, b, (a - b).abs(), scale * a * b], dim=1)
        if normalize:
            features = features / features.norm(dim=1, keepdim=True)
    expected = 10.0 * (features @ model.classifier.weight.T + model.classifier.bias)
    labels, close = batch.pop("labels"), {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(model.embed(**batch), features, **close)
    loss, logits = model(**batch, labels=labels, return_dict=False)
    torch.testing.assert_close(logits, expected, **close)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(expected, labels))
    losses = heads.select_objective(model)(model, {**batch, "labels": labels})
    torch.testing.assert_close(losses.mean(), loss)
    assert expected.std() > 0.1
    model.encoder.forward = None  # an embedding that is given skips the encoder
    assert torch.equal(model(sentence_embedding=features).logits, expected)
    with pytest.raises(ValueError, match="give input_ids, or sentence_embedding"):
        model()


@BOTH
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_does_not_couple(checkpoint, task, pairing, side):
    model, tokenizer = built(checkpoint, task, pairing)
    objective = heads.select_objective(model)
    single = [objective(model, batch_of(task, tokenizer, [i], pairing)) for i in range(4)]
    alone = torch.cat(single)
    tokenizer.padding_side = side
    together = objective(model, batch_of(task, tokenizer, range(4), pairing))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert alone.max() - alone.min() > 0.1


def test_pooling_finds_the_first_attended_token():
    states, mask = torch.arange(12.0).reshape(1, 4, 3), torch.tensor([[0, 1, 1, 0]])
    assert pool(states, mask, "cls").tolist() == [[3.0, 4.0, 5.0]]
    assert pool(states, mask, "mean").tolist() == [[4.5, 5.5, 6.5]]
    assert pool(states, torch.zeros_like(mask), "mean").tolist() == [[0.0, 0.0, 0.0]]


@BOTH
@torch.no_grad()
def test_round_trip(checkpoint, task, pairing, tmp_path):
    """Through the auto classes, and through `load_model`: head_init applies to new heads only."""
    model, tokenizer = built(checkpoint, task, pairing)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert isinstance(loaded, SentenceClassifier)
    assert loaded.config.id2label == dict(enumerate(task.label_names))
    assert (loaded.config.logit_scale, loaded.config.pair_features) == (10.0, pairing)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in loaded.named_parameters()] == names
    assert not [name for name in names if "pooler" in name]
    batch = batch_of(task, tokenizer, range(3), pairing)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    again, _ = load_model(settings(tmp_path / "saved", pairing, head_init="zero"), task)
    assert torch.equal(again.classifier.weight, model.classifier.weight)
    other = "siamese" if pairing == "joint" else "joint"
    with pytest.raises(ValueError, match=f"='{pairing}', the recipe says '{other}'; set"):
        load_model(settings(tmp_path / "saved", other), task)


def test_hugging_faces_trainer_keeps_the_second_text(checkpoint, task, tmp_path):
    """It drops the columns that the model's forward does not name."""
    model, tokenizer = built(checkpoint, task)
    out = {"output_dir": str(tmp_path / "out"), "report_to": "none", "disable_tqdm": True}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**out, use_cpu=True),
        eval_dataset=task.tokenize(tokenizer, "siamese")["validation"],
        processing_class=tokenizer,
        data_collator=task.collator(tokenizer),
        compute_metrics=task.metrics(tokenizer),
    )
    with torch.no_grad():
        batch = batch_of(task, tokenizer, range(len(ROWS)))
        expected = heads.select_objective(model)(model, batch).mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


@torch.no_grad()
def test_label_text_head(checkpoint, task):
    """The weights' own equation, with one phrasing and with two."""
    texts = ["bad|terrible film", "good"]
    arguments = settings(checkpoint, "joint", head_init="label_text", label_texts=texts)
    model, tokenizer = load_model(arguments, task)
    words = ["bad", "terrible film", "good"]
    embeddings = model.embed(**tokenizer(words, padding=True, return_tensors="pt"))
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(3))
    first = (embeddings[0] + embeddings[1]) / (embeddings[0] + embeddings[1]).norm()
    rows = torch.stack([first, embeddings[2]])
    weight = model.classifier.weight.data
    torch.testing.assert_close(weight, rows - rows.mean(0))
    torch.testing.assert_close(label_text_weights(model, tokenizer, texts), weight)
    assert model.classifier.bias.abs().max() == 0


@BOTH
@torch.no_grad()
def test_stored_features_give_the_same_losses(checkpoint, task, pairing):
    model, tokenizer = built(checkpoint, task, pairing)
    tokenizer.padding_side = "left"
    rows, collate = task.tokenize(tokenizer, pairing)["train"], task.collator(tokenizer)
    stored = precompute_features(model, rows, collate, trainable="^classifier", batch_size=3)
    assert sorted(stored.column_names) == ["labels", "sentence_embedding"]
    assert stored["sentence_embedding"][:].shape == (len(ROWS), model.config.feature_size)
    objective, everything = heads.select_objective(model), list(range(len(rows)))
    expected = objective(model, collate([rows[i] for i in everything]))
    actual = objective(model, collate(stored.__getitems__(everything)))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_encoding_says_how_far_it_is_within_what_it_was_handed(checkpoint, task, monkeypatch):
    counted = list[int]()

    class Bar(contextlib.nullcontext):  # `with` gives the bar itself
        def __init__(self, total: int, **_: Any) -> None:
            super().__init__(self)
            counted.append(-total)
            self.update = counted.append

    monkeypatch.setattr("datasets.utils.tqdm", Bar)
    model, tokenizer = built(checkpoint, task, "siamese")
    rows, collate = task.tokenize(tokenizer, "siamese")["train"], task.collator(tokenizer)
    precompute_features(model, rows, collate, trainable="^classifier", batch_size=2)
    assert counted[0] == -len(ROWS)
    assert sum(counted) == 0
    assert max(counted) <= 2


def test_stored_features_are_named_after_model_and_rows(checkpoint, task):
    def fingerprint(pairing: str = "siamese", scale: float = 1.0, **changes: Any) -> str:
        model, tokenizer = built(checkpoint, task, pairing, **changes)
        with torch.no_grad():
            model.encoder.embeddings.word_embeddings.weight.mul_(scale)
        rows = datasets.Dataset.from_dict(task.tokenize(tokenizer, pairing)["train"][:])
        rows._fingerprint = "same"
        collate = task.collator(tokenizer)
        return precompute_features(model, rows, collate, trainable="^classifier")._fingerprint

    assert fingerprint() == fingerprint()
    others = [fingerprint("joint"), fingerprint(scale=2.0), fingerprint(normalize=False)]
    assert len({fingerprint(), fingerprint(pooling="cls"), *others}) == 5


def test_features_refuse_a_trained_encoder_or_another_model(checkpoint, task):
    model, tokenizer = built(checkpoint, task)
    rows, collate = task.tokenize(tokenizer)["train"], task.collator(tokenizer)
    with pytest.raises(ValueError, match=r"needs a frozen encoder.*trainable: classifier"):
        precompute_features(model, rows, collate)
    whole, _ = load_model(ModelArguments(model_name_or_path=str(checkpoint)), task)
    with pytest.raises(ValueError, match=r"this is a BertForSequenceClassification"):
        precompute_features(whole, rows, collate)


def differences(
    model: nn.Module, batch: dict[str, torch.Tensor], trainable: str | None, **how: Any
) -> torch.Tensor:
    select_trainable(model, trainable)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    space = ParameterSpace(trained, smoothing=1e-2)
    objective = heads.select_objective(model)
    evaluate = FiniteDifferences(model, space, objective, smoothing=1e-2, **how)
    return evaluate([batch], [Direction(7, 0), Direction(7, 0, 1)])


@pytest.mark.parametrize("strategy", ["whole_model", "layerwise"])
@pytest.mark.parametrize("trainable", ["^classifier", r"layer\.1\.|^classifier", None])
def test_every_strategy_gives_the_differences_of_full_passes(checkpoint, task, strategy, trainable):
    """The encoder runs twice in a forward pass; strategies must perturb it both times alike."""
    model, tokenizer = built(checkpoint, task)
    batch = batch_of(task, tokenizer, [0, 1, 2, 3])
    full = {"strategy": "whole_model", "reuse_frozen_prefix": False}
    expected = differences(model, batch, trainable, **full)
    again, _ = built(checkpoint, task)
    actual = differences(again, batch, trainable, strategy=strategy)
    assert actual.shape == (4, 2)
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("trainable", ["^classifier", r"layer\.1\.|^classifier", None])
def test_per_example_gradients_add_up_over_both_texts(checkpoint, task, trainable):
    """One example's gradient is that of both passes together, before it is clipped."""
    model, tokenizer = built(checkpoint, task)
    select_trainable(model, trainable)
    batch, objective = batch_of(task, tokenizer, [0, 1, 2, 3]), heads.select_objective(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = PerExampleGradients(model, objective)
    assert len(gradients.parameters) == len(parameters)
    for row in range(4):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        expected = torch.autograd.grad(objective(model, one).sum(), parameters, allow_unused=True)
        chosen = torch.zeros(4).index_fill(0, torch.tensor(row), 1.0)
        actual, _ = gradients.weighted_sum([batch], lambda norms, chosen=chosen: chosen)
        for mine, alone, parameter in zip(actual, expected, parameters, strict=True):
            alone = torch.zeros_like(parameter) if alone is None else alone
            torch.testing.assert_close(mine, alone.double(), atol=2e-5, rtol=1e-4)


def test_settings_that_do_not_fit(checkpoint, task):
    label_text = {"head_init": "label_text", "label_texts": ["a", "b"]}
    auto = settings(checkpoint, architecture="auto", logit_scale=1.0)
    for make, message in (
        (lambda: settings(checkpoint, "cross"), r"='cross' is not one of joint, siamese"),
        (lambda: settings(checkpoint, **label_text), r"' describes one text.*zero or random"),
        (lambda: load_model(auto, task), r"pair_features=.siamese. needs architecture: sentence"),
        (lambda: SentenceClassifierConfig(pair_features="cross"), "pair_features='cross' is not"),
        (lambda: SentenceClassifierConfig(pooling="max"), "pooling='max'"),
        (lambda: SentenceClassifierConfig(logit_scale=0), "logit_scale=0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_single_text_has_nothing_to_compare(checkpoint, task, tmp_path):
    _, tokenizer = built(checkpoint, task)
    rows = [{"text": text, "label": label} for text, label in (("a", 0), ("c", 1))]
    single = build_task(DataArguments(**row_files(tmp_path, rows)))
    with pytest.raises(ValueError, match=r"siamese compares two texts.*columns text; use .*joint"):
        single.tokenize(tokenizer, "siamese")


def test_tokens_of_the_other_pairing_are_refused(checkpoint, task):
    model, tokenizer = built(checkpoint, task)
    joint, _ = load_model(settings(checkpoint, "joint"), task)
    batch = batch_of(task, tokenizer, [0])
    with pytest.raises(ValueError, match=r"pair_features='joint', but input_ids_pair is given"):
        joint(**batch)
    first = {key: value for key, value in batch.items() if not key.endswith("_pair")}
    with pytest.raises(ValueError, match=r"pair_features='siamese', but input_ids_pair is missing"):
        model(**first)
