"""An epsilon is of one run: a model that was trained before may not start as if it were the base."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tiny_runs import build, tiny_data, tiny_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from hf_dpzero.ledger.log_file import LedgerError
from hf_dpzero.reporting.hub import build_hub_folder
from hf_dpzero.reporting.privacy_report import PrivacyReport

pytestmark = pytest.mark.slow

SECRET: dict[str, Any] = {
    "testing.sampler_key": None,
    "testing.insecure_noise_seed": None,
    "max_steps": 2,
}


def lora(model: Any, **settings: Any) -> Any:
    import peft

    given = {"task_type": "SEQ_CLS", "r": 2, "target_modules": ["query", "value"], **settings}
    return peft.get_peft_model(model, peft.LoraConfig(**given))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path)


def save_base(tmp_path: Path) -> Path:
    """A pretrained masked language model in a folder."""
    torch.manual_seed(4)
    shape = tiny_model().config.to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
             "intermediate_size", "max_position_embeddings")  # fmt: skip
    BertForMaskedLM(BertConfig(**{name: shape[name] for name in names})).save_pretrained(
        tmp_path / "base"
    )
    return tmp_path / "base"


def loaded(base: Path, **settings: Any) -> Any:
    return BertForSequenceClassification.from_pretrained(base, **settings)


def plain_training(model: Any, folder: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no", learning_rate=1e-3,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=tiny_data()).train()


def report_of(trainer: Any, folder: Path) -> PrivacyReport:
    trainer.save_model()
    return PrivacyReport.load(build_hub_folder(trainer.output_dir, folder))


# ---- trained by this package before


@pytest.mark.parametrize("way", ["same", "copied", "wrapped", "unwrapped", "a_part"])
def test_a_second_trainer_on_a_trained_model_is_refused(tmp_path: Path, way: str) -> None:
    first = lora(tiny_model()) if way == "unwrapped" else tiny_model()
    build(tmp_path / "first", first, **SECRET).train()
    if way == "a_part":
        second = tiny_model(seed=1)
        second.bert = first.bert
    else:
        change = {
            "same": lambda model: model,
            "copied": copy.deepcopy,
            "wrapped": lora,
            "unwrapped": lambda model: model.merge_and_unload().requires_grad_(True),
        }
        second = change[way](first)
    trainer = build(tmp_path / "second", second, **SECRET)
    with pytest.raises(ValueError, match=r"trained on the private data already.*base_is_public"):
        trainer.train()
    assert not (tmp_path / "second" / "trajectory.ledger").exists()


def test_a_trained_model_that_is_declared_public_says_so(tmp_path: Path) -> None:
    model = tiny_model()
    build(tmp_path / "first", model, **SECRET).train()
    trainer = build(tmp_path / "second", model, base_is_public=True, **SECRET)
    trainer.train()
    report = report_of(trainer, tmp_path / "hub")
    assert report.private and report.base_weights == "declared_public"
    assert any("base_is_public" in caveat for caveat in report.caveats)


def test_a_model_that_was_put_back_is_the_base_again(tmp_path: Path) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    build(tmp_path / "first", model, **SECRET).train()
    model.load_state_dict(before)
    build(tmp_path / "second", model, **SECRET).train()


def test_a_run_that_never_stepped_leaves_no_mark(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="500"):
        build(tmp_path / "first", model, expected_batch_size=500, **SECRET).train()
    build(tmp_path / "second", model, **SECRET).train()


# ---- trained by something else before


@pytest.mark.parametrize("kind", ["model", "adapter", "adapter_of_a_trained_base"])
def test_a_model_that_a_plain_trainer_changed_is_refused(
    base: Path, tmp_path: Path, kind: str
) -> None:
    model = lora(loaded(base)) if kind == "adapter" else loaded(base)
    plain_training(model, tmp_path / "plain")
    model = lora(model) if kind == "adapter_of_a_trained_base" else model
    with pytest.raises(ValueError, match=r"the model was changed after.*base_is_public"):
        build(tmp_path / "run", model, **SECRET).train()
    trainer = build(tmp_path / "run", model, base_is_public=True, **SECRET)
    trainer.train()
    assert report_of(trainer, tmp_path / "hub").base_weights == "declared_public"


@pytest.mark.parametrize("kind", ["model", "adapter", "bfloat16", "encoder_alone", "sharded"])
def test_a_fresh_model_equals_the_base_that_it_names(base: Path, tmp_path: Path, kind: str) -> None:
    """Head and adapter are new; the dtype and the names of its tensors may differ."""
    settings = dict(SECRET)
    if kind == "encoder_alone":
        loaded(base).bert.save_pretrained(base)
    if kind == "sharded":
        whole = loaded(base)
        (base / "model.safetensors").unlink()
        whole.save_pretrained(base, max_shard_size="8KB")
    model = loaded(base)
    if kind == "bfloat16":
        model = loaded(base, dtype=torch.bfloat16)
        settings |= {"microbatch_size": 1, "smoothing": 0.05}
    trainer = build(tmp_path / "run", lora(model) if kind == "adapter" else model, **settings)
    trainer.train()
    report = report_of(trainer, tmp_path / "hub")
    new = kind != "sharded"  # a head or an adapter that could have been trained before
    assert report.base_weights == "equal_to_named" + "_but_new_parts" * new and report.private
    assert any("freshly initialised" in caveat for caveat in report.caveats) == new
    assert not any("compared" in caveat for caveat in report.caveats)


@pytest.mark.parametrize("trained", [False, True])
def test_a_hub_model_is_compared_with_the_cache(
    base: Path, tmp_path: Path, monkeypatch: Any, trained: bool
) -> None:
    cache = tmp_path / "cache" / "models--someone--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    shutil.copytree(base, cache / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model = loaded(base)
    model.config._name_or_path = "someone/tiny"
    if trained:
        plain_training(model, tmp_path / "plain")
        with pytest.raises(ValueError, match="base model someone/tiny has: the model was changed"):
            build(tmp_path / "run", model, **SECRET).train()
    else:
        trainer = build(tmp_path / "run", model, **SECRET)
        trainer.train()
        assert report_of(trainer, tmp_path / "hub").base_weights == "equal_to_named_but_new_parts"
        assert "replay --base someone/tiny" in (tmp_path / "hub" / "README.md").read_text()


def test_what_cannot_be_compared_is_a_caveat(tmp_path: Path) -> None:
    model = tiny_model()
    model.config._name_or_path = "someone/not-on-this-machine"
    trainer = build(tmp_path / "run", model, **SECRET)
    trainer.train()
    report = report_of(trainer, tmp_path / "hub")
    assert report.base_weights == "not_compared"
    assert any("were not compared" in caveat for caveat in report.caveats)


@pytest.mark.parametrize("way", ["changed", "another_folder"])
def test_a_resume_on_another_base_is_refused(base: Path, tmp_path: Path, way: str) -> None:
    """A checkpoint of an adapter does not bring the frozen weights along."""
    settings = {**SECRET, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    loaded(base).save_pretrained(base)  # with a pooler, which is frozen too
    build(tmp_path / "run", lora(loaded(base)), **settings).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    other = loaded(base)
    plain_training(other, tmp_path / "plain")
    if way == "another_folder":
        other.save_pretrained(tmp_path / "other")
        other = loaded(tmp_path / "other")
    trainer = build(tmp_path / "run", lora(other), **settings)
    with pytest.raises(LedgerError, match="frozen parameters are not those"):
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere" / "privacy_report.json").exists()
    build(tmp_path / "run", lora(loaded(base)), **settings).train(resume_from_checkpoint=checkpoint)


def test_a_resume_keeps_what_was_known_of_the_base(base: Path, tmp_path: Path) -> None:
    """Its folder may have been overwritten since, by the run itself."""
    leaky = {**SECRET, "method": "mezo", "noise_multiplier": None}
    first = build(tmp_path / "leaky", loaded(base), **leaky)
    first.train()
    first.save_model()
    settings = {**SECRET, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    build(tmp_path / "run", loaded(tmp_path / "leaky"), **settings).train()
    (tmp_path / "leaky" / "privacy_report.json").unlink()
    second = build(tmp_path / "run", loaded(tmp_path / "leaky"), **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert [run["private"] for run in second.privacy_report().earlier_runs] == [False]


def test_buffers_that_saw_rows_are_no_base(base: Path, tmp_path: Path) -> None:
    """Put-back parameters alone do not undo what forward passes left elsewhere."""
    model = tiny_model()
    model.register_buffer("seen", torch.zeros(1))
    before = copy.deepcopy(model.state_dict())
    build(tmp_path / "first", model, **SECRET).train()
    model.seen += 1.0
    model.load_state_dict({k: v for k, v in before.items() if k != "seen"}, strict=False)
    with pytest.raises(ValueError, match="trained on the private data already"):
        build(tmp_path / "second", model, **SECRET).train()
    named = loaded(base)
    named.register_buffer("seen", torch.zeros(1))
    named.save_pretrained(base)
    named.seen += 1.0
    with pytest.raises(ValueError, match="^seen and 0 more tensors are not"):
        build(tmp_path / "third", named, **SECRET).train()


def test_embeddings_that_were_resized_are_compared_in_what_both_have(
    base: Path, tmp_path: Path
) -> None:
    """They counted as new: embeddings trained on private rows were shipped with 0.002 for one step."""
    untouched = loaded(base)
    untouched.resize_token_embeddings(51)
    build(tmp_path / "fresh", untouched, max_steps=1).train()
    trained = loaded(base)
    with torch.no_grad():
        trained.bert.embeddings.word_embeddings.weight[7].add_(1.0)
    trained.resize_token_embeddings(51)
    with pytest.raises(ValueError, match=r"word_embeddings.weight and 0 more"):
        build(tmp_path / "trained", trained, max_steps=1).train()
