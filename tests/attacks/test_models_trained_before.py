"""An epsilon is of one run: a model that was trained before may not start as if it were the base."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from attacked_runs import (
    SAVED,
    SECRET,
    finished,
    hub_cache,
    loaded,
    lora,
    plain_training,
    pretrained_base,
    shipped,
)
from tiny_runs import build, tiny_model

from hf_dpzero.ledger.log_file import LedgerError

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {**SECRET, "max_steps": 2}


# ---- trained by this package before


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return pretrained_base(tmp_path)


@pytest.mark.parametrize("way", ["same", "copied", "wrapped", "unwrapped", "a_part"])
def test_a_second_trainer_on_a_trained_model_is_refused(tmp_path: Path, way: str) -> None:
    first = lora(tiny_model()) if way == "unwrapped" else tiny_model()
    build(tmp_path / "first", first, **SHORT).train()
    second = tiny_model(seed=1) if way == "a_part" else first
    if way == "a_part":
        second.bert = first.bert
    elif way == "unwrapped":
        second = first.merge_and_unload().requires_grad_(True)
    elif way != "same":
        second = {"copied": copy.deepcopy, "wrapped": lora}[way](first)
    trainer = build(tmp_path / "second", second, **SHORT)
    with pytest.raises(ValueError, match=r"trained on the private data already.*base_is_public"):
        trainer.train()
    assert not (tmp_path / "second" / "trajectory.ledger").exists()


def test_a_run_that_is_not_private_goes_on_and_a_private_one_after_it_does_not(
    tmp_path: Path,
) -> None:
    model, mezo = tiny_model(), {"method": "mezo", "noise_multiplier": None, "max_steps": 2}
    for name in ("first", "second"):
        trainer = build(tmp_path / name, model, **mezo)
        trainer.train()
    assert trainer.privacy_report().base_weights == "trained_before"
    with pytest.raises(ValueError, match=r"trained on the private data already"):
        build(tmp_path / "private", model, **SHORT).train()


def test_what_was_declared_public_or_put_back_or_never_stepped_starts(tmp_path: Path) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="no_such"):
        build(tmp_path / "refused", model, trainable="no_such", **SHORT).train()
    build(tmp_path / "first", model, **SHORT).train()
    public = build(tmp_path / "public", model, base_is_public=True, **SHORT)
    public.train()
    report = shipped(public, tmp_path / "hub")
    assert report.private and report.base_weights == "declared_public"
    assert any("base_is_public" in caveat for caveat in report.caveats)
    model.load_state_dict(before)
    build(tmp_path / "back", model, **SHORT).train()


# ---- trained by something else before


@pytest.mark.parametrize("kind", ["model", "adapter", "adapter_of_a_trained_base"])
def test_a_model_that_a_plain_trainer_changed_is_refused(
    base: Path, tmp_path: Path, kind: str
) -> None:
    model = lora(loaded(base)) if kind == "adapter" else loaded(base)
    plain_training(model, tmp_path / "plain")
    model = lora(model) if kind == "adapter_of_a_trained_base" else model
    with pytest.raises(ValueError, match=r"the model was changed after.*base_is_public"):
        build(tmp_path / "run", model, **SHORT).train()
    trainer = build(tmp_path / "run", model, base_is_public=True, **SHORT)
    trainer.train()
    assert shipped(trainer, tmp_path / "hub").base_weights == "declared_public"


@pytest.mark.parametrize("kind", ["model", "adapter", "bfloat16", "encoder_alone", "sharded"])
def test_a_fresh_model_equals_the_base_that_it_names(base: Path, tmp_path: Path, kind: str) -> None:
    """Head and adapter are new; the dtype and the names of its tensors may differ."""
    settings = dict(SHORT)
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
    report = shipped(trainer, tmp_path / "hub")
    new = kind != "sharded"  # a head or an adapter that could have been trained before
    assert report.base_weights == "equal_to_named" + "_but_new_parts" * new and report.private
    assert any("freshly initialised" in caveat for caveat in report.caveats) == new
    assert not any("compared" in caveat for caveat in report.caveats)


@pytest.mark.parametrize("trained", [False, True])
def test_a_hub_model_is_compared_with_the_cache(
    base: Path, tmp_path: Path, monkeypatch: Any, trained: bool
) -> None:
    hub_cache(tmp_path / "cache", "someone/tiny", base, monkeypatch)
    model = loaded(base)
    model.config._name_or_path = "someone/tiny"
    if trained:
        plain_training(model, tmp_path / "plain")
        with pytest.raises(ValueError, match="base model someone/tiny has: the model was changed"):
            build(tmp_path / "run", model, **SHORT).train()
        return
    trainer = build(tmp_path / "run", model, **SHORT)
    trainer.train()
    assert shipped(trainer, tmp_path / "hub").base_weights == "equal_to_named_but_new_parts"
    assert "replay --base someone/tiny" in (tmp_path / "hub" / "README.md").read_text()


def test_what_cannot_be_compared_is_a_caveat(tmp_path: Path) -> None:
    model = tiny_model()
    model.config._name_or_path = "someone/not-on-this-machine"
    trainer = build(tmp_path / "run", model, **SHORT)
    trainer.train()
    report = shipped(trainer, tmp_path / "hub")
    assert report.base_weights == "not_compared"
    assert any("were not compared" in caveat for caveat in report.caveats)


@pytest.mark.parametrize("way", ["changed", "another_folder"])
def test_a_resume_on_another_base_is_refused(base: Path, tmp_path: Path, way: str) -> None:
    """A checkpoint of an adapter does not bring the frozen weights along."""
    settings = {**SAVED, "max_steps": 4}
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
    leaky = {"method": "mezo", "noise_multiplier": None, "max_steps": 2}
    finished(tmp_path / "leaky", loaded(base), **leaky)
    settings = {**SAVED, "max_steps": 4}
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
    build(tmp_path / "first", model, **SHORT).train()
    model.seen += 1.0
    model.load_state_dict({k: v for k, v in before.items() if k != "seen"}, strict=False)
    with pytest.raises(ValueError, match="trained on the private data already"):
        build(tmp_path / "second", model, **SHORT).train()
    named = loaded(base)
    named.register_buffer("seen", torch.zeros(1))
    named.save_pretrained(base)
    named.seen += 1.0
    with pytest.raises(ValueError, match="^seen and 0 more tensors are not"):
        build(tmp_path / "third", named, **SHORT).train()


def test_embeddings_that_were_resized_are_compared_in_what_both_have(
    base: Path, tmp_path: Path
) -> None:
    """They counted as new: embeddings trained on private rows were shipped with 0.002 for one step."""
    for name, move in (("fresh", 0.0), ("trained", 1.0)):
        model = loaded(base)
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight[7].add_(move)
        model.resize_token_embeddings(51)
        trainer = build(tmp_path / name, model, max_steps=1)
        if not move:
            trainer.train()
            continue
        with pytest.raises(ValueError, match=r"word_embeddings.weight and 0 more"):
            trainer.train()
