"""What attacks on runs share: secrets of a run's own, bases, other trainers, runs cut short."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from tiny_runs import build, tiny_data, tiny_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_dpzero import DPZeroTrainer
from hf_dpzero.reporting.hub import build_hub_folder, write_model_card
from hf_dpzero.reporting.privacy_report import PrivacyReport

SECRET: dict[str, Any] = {"testing.sampler_key": None, "testing.insecure_noise_seed": None}
"""Keys and noise from the operating system: a run with given ones claims nothing."""
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, **SECRET}


class Calls(TrainerCallback):
    """Calls `what(state, control, **the rest)` at one event."""

    def __init__(self, event: str, what: Callable[..., Any]) -> None:
        def called(args: Any, state: Any, control: Any, **given: Any) -> None:
            what(state, control, **given)

        setattr(self, event, called)


def finished(folder: Path, model: Any = None, **settings: Any) -> DPZeroTrainer:
    """A run that was trained and saved."""
    trainer = build(folder, model, **{**SECRET, **settings})
    trainer.train()
    trainer.save_model()
    return trainer


def killed(folder: Path, step: int = 5, **settings: Any) -> Path:
    """A run that was killed after `step` steps; its last checkpoint is of an earlier one."""

    def kill(state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= step:
            raise KeyboardInterrupt

    callbacks = {"callbacks": [Calls("on_step_begin", kill)]}
    trainer = build(folder, trainer_settings=callbacks, **{**SAVED, **settings})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return folder


def shipped(trainer: DPZeroTrainer, folder: Path) -> PrivacyReport:
    """The report in the Hub folder of a run that was trained."""
    trainer.save_model()
    return PrivacyReport.load(build_hub_folder(trainer.args.output_dir, folder))


def not_shipped(folder: Path, hub: Path, words: str) -> None:
    """Neither a Hub folder nor a card is made of a run's folder."""
    card = (folder / "README.md").exists()  # of a run that was shipped before it was edited
    for make in (lambda: build_hub_folder(folder, hub), lambda: write_model_card(folder)):
        with pytest.raises(ValueError, match=words):
            make()
    assert not hub.exists() and (folder / "README.md").exists() == card


def plain_training(model: Any, folder: Path) -> Trainer:
    """Hugging Face's own trainer, on the private rows."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no", learning_rate=1e-3,
    )  # fmt: skip
    plain = Trainer(model=model, args=arguments, train_dataset=tiny_data())
    plain.train()
    return plain


def lora(model: Any, **settings: Any) -> Any:
    import peft

    given = {"task_type": "SEQ_CLS", "r": 2, "target_modules": ["query", "value"], **settings}
    return peft.get_peft_model(model, peft.LoraConfig(**given))


def loaded(base: Path, **settings: Any) -> Any:
    return BertForSequenceClassification.from_pretrained(base, **settings)


def pretrained_base(folder: Path) -> Path:
    """A masked language model, saved in a folder of `folder`."""
    torch.manual_seed(4)
    shape = tiny_model().config.to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
             "intermediate_size", "max_position_embeddings")  # fmt: skip
    model = BertForMaskedLM(BertConfig(**{name: shape[name] for name in names}))
    model.save_pretrained(folder / "base")
    return folder / "base"


def hub_cache(cache: Path, name: str, snapshot: Path, patch: Any, ref: str = "main") -> Path:
    """The folder of a copy of `snapshot` in Hugging Face's cache, as the model `name` of the Hub."""
    entry, commit = cache / f"models--{name.replace('/', '--')}", "0" * 40
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / ref).write_text(commit)
    shutil.copytree(snapshot, entry / "snapshots" / commit)
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return entry / "snapshots" / commit


def recipe_of(folder: Path, model: Path, *more: str, **settings: Any) -> Path:
    """The recipe r.yaml on train.jsonl and validation.jsonl, and files of `more` rows beside it."""
    for name in ("train", "validation", *more):
        rows = [{"text": f"{name} film {i}", "label": i % 2} for i in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model_name_or_path": str(model), "train_file": str(folder / "train.jsonl"),
        "validation_file": str(folder / "validation.jsonl"), "max_seq_length": 16,
        "target_epsilon": 4.0, "target_delta": 1e-3, "expected_batch_size": 4, "use_cpu": True,
        "save_strategy": "no", "output_dir": str(folder / "out"), **settings,
    }  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump(values))
    return folder / "r.yaml"
