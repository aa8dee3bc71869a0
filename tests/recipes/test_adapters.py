"""Adapters of recipes' models: what is trained, what is saved, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dpzero.checks.model import check_adapters
from hf_dpzero.objectives import heads
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.recipes.adapters import with_adapters
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier

Factory = Callable[..., PreTrainedModel]
ARCHITECTURES = ["auto", "sentence_classifier"]
HEAD = {"auto": 2 * 16 + 2 + 16 * 16 + 16, "sentence_classifier": 2 * 16 + 2}


@pytest.fixture
def model_of(tiny_roberta: Factory) -> Callable[[str], PreTrainedModel]:
    """An architecture -> a RoBERTa of that sort with a random head, 2 layers of width 16."""

    def make(architecture: str) -> PreTrainedModel:
        whole = tiny_roberta()
        if architecture == "auto":
            return whole
        model = SentenceClassifier.from_encoder(whole.roberta, num_labels=2)
        generator = torch.Generator().manual_seed(3)
        nn.init.normal_(model.classifier.weight, generator=generator)
        return model

    return make


def lora(**settings: Any) -> ModelArguments:
    return ModelArguments(model_name_or_path="unused", peft_method="lora", **settings)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[1, 7, 9, 2], [1, 8, 2, 0]])
    labels = torch.tensor([0, 1])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lora_trains_adapters_and_the_head(model_of, architecture):
    """The paper's LoRA arm: r = 8, alpha = 16 on query and value; the head is trained too."""
    model = with_adapters(model_of(architecture), lora())
    adapters = {name: p for name, p in trained(model).items() if "lora_" in name}
    head = {name: p for name, p in trained(model).items() if name not in adapters}
    assert sum(p.numel() for p in adapters.values()) == 2 * 2 * (8 * 16 + 16 * 8)
    assert sum(p.numel() for p in head.values()) == HEAD[architecture]
    assert all("classifier.modules_to_save" in name for name in head)
    scales = {m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")}
    assert scales == {16 / 8}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adapters_and_the_head_react_to_being_moved_in_place(model_of, architecture):
    """PEFT runs its copy of the head: moving the trainable one moves the losses, and comes back."""
    model = with_adapters(model_of(architecture), lora()).eval()
    objective = heads.select_objective(model)
    named = trained(model)
    for part in ("lora_B", "modules_to_save"):
        space = ParameterSpace([(n, p) for n, p in named.items() if part in n])
        with torch.no_grad():
            with space.perturbed(Direction(5, 0), 1e-3):
                pass  # the first time, the weights go onto their grid
            before = objective(model, batch())
            with space.perturbed(Direction(5, 0), 1e-3):
                moved = objective(model, batch())
            assert torch.equal(objective(model, batch()), before)
        assert (moved - before).abs().min() > 1e-7, part


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_trained_head_is_saved_with_the_adapter(model_of, architecture, tmp_path):
    model = with_adapters(model_of(architecture), lora()).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in trained(model).values():
        parameter.add_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(model_of(architecture), str(tmp_path)).eval()
    inputs = {key: value for key, value in batch().items() if key != "labels"}
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    bare = model_of(architecture)(**inputs).logits
    assert (bare - model(**inputs).logits).abs().max() > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bitfit_trains_biases_and_the_head(model_of, architecture):
    arguments = ModelArguments(model_name_or_path="unused", peft_method="bitfit")
    names = set(trained(with_adapters(model_of(architecture), arguments)))
    body = {name for name in names if not name.startswith("classifier")}
    assert body
    assert all(name.endswith("bias") for name in body)
    assert any(name.startswith("classifier") and name.endswith("weight") for name in names)


def test_fresh_adapters_depend_on_the_seed_alone(model_of):
    def fresh(seed: int) -> dict[str, torch.Tensor]:
        arguments = lora(lora_target_modules=["word_embeddings", "query"], init_seed=seed)
        model = with_adapters(model_of("sentence_classifier"), arguments)
        return {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}

    first = fresh(1)
    torch.rand(5)  # the global generator moves on; nothing may change
    again, other = fresh(1), fresh(2)
    moved = [name for name in first if not torch.equal(first[name], other[name])]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any("lora_embedding_B" in name for name in moved)
    assert any("lora_A" in name for name in moved)


@pytest.mark.parametrize("targets", [["nothing"], ["classifier"], ["LayerNorm"]])
def test_targets_that_cannot_be_adapted_are_refused(model_of, targets):
    for architecture in ARCHITECTURES:
        with pytest.raises(ValueError, match=r"peft_method=lora has nothing to train") as error:
            with_adapters(model_of(architecture), lora(lora_target_modules=targets))
        said = str(error.value)
        assert f"lora_target_modules={targets}: name linear layers" in said
        assert "query, value" in said
        assert "classifier" not in said.split("of the body, of ")[1].split(" (the head")[0]


def test_patterns_and_the_adapter(model_of):
    """What `trainable` selects: not the head's idle copy, and some of the adapter."""
    model = with_adapters(model_of("sentence_classifier"), lora())
    for pattern in (None, "lora_|modules_to_save", "lora_B"):
        select_trainable(model, pattern)
        check_adapters(model)
    check_adapters(model_of("auto"))  # no adapter, nothing to check
    for pattern, message in (
        ("classifier", r"original_module\.weight would be trained.*'lora_\|modules_to_save'"),
        ("modules_to_save", r"would be trained, and no parameter of the adapter.*drop peft_method"),
    ):
        select_trainable(model, None)
        select_trainable(model, pattern)
        with pytest.raises(ValueError, match=message):
            check_adapters(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would be trained"):
        check_adapters(model)


def test_a_prefix_is_an_adapter(model_of):
    arguments = ModelArguments(
        model_name_or_path="unused", peft_method="prefix", num_virtual_tokens=3
    )
    model = with_adapters(model_of("auto"), arguments)
    shapes = {tuple(p.shape) for n, p in model.named_parameters() if "prompt_encoder" in n}
    assert shapes == {(3, 2 * 2 * 16)}
    assert heads.select_objective(model)(model, batch()).shape == (2,)
    check_adapters(model)
    select_trainable(model, "modules_to_save")
    with pytest.raises(ValueError, match=r"set it to 'prompt_encoder\|modules_to_save'"):
        check_adapters(model)
