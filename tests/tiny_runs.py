"""A two-layer BERT, rows that it can learn from, and a `DPZeroTrainer` of both that runs in a second."""

from __future__ import annotations

from typing import Any

import peft
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainerCallback,
    default_data_collator,
)

from hf_dpzero import DPZeroConfig, DPZeroTrainer
from hf_dpzero.recipes.recipe import merged

KEY = "ab" * 32
SECRET: dict[str, Any] = {"testing.sampler_key": None, "testing.insecure_noise_seed": None}
"""Batches and noise are the operating system's, so the run is private."""


class StopAt(TrainerCallback):
    """Ends training after some steps; with an error by raising it before the next one begins."""

    def __init__(self, step: int, error: type[BaseException] | None = None) -> None:
        self.step, self.error = step, error

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if self.error is not None and state.global_step >= self.step:
            raise self.error

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.error is None:
            control.should_training_stop = state.global_step >= self.step


def stopping(step: int, error: type[BaseException] | None = None) -> dict[str, Any]:
    """`trainer_settings` of a run that ends so."""
    return {"callbacks": [StopAt(step, error)]}


def tiny_model(seed: int = 0, **config) -> BertForSequenceClassification:
    defaults = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForSequenceClassification(BertConfig(**{**defaults, **config}))


def tiny_data(rows: int = 120, seed: int = 1) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (rows, 8), generator=generator)
    return Dataset.from_dict(
        {
            "input_ids": ids.tolist(),
            "attention_mask": torch.ones_like(ids).tolist(),
            "labels": (ids[:, 0] > 27).long().tolist(),
        }
    )


def config(tmp_path, **settings) -> DPZeroConfig:
    defaults = {
        "output_dir": str(tmp_path),
        "noise_multiplier": 1.0,
        "target_delta": 1e-3,
        "clip": 5.0,
        "expected_batch_size": 12,
        "microbatch_size": 8,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "testing.direction_key": 7,
        "testing.sampler_key": KEY,
        "testing.insecure_noise_seed": 3,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return DPZeroConfig(**merged(merged({}, defaults), settings))


def build(tmp_path, model=None, *, data=None, trainer_settings=None, **settings) -> DPZeroTrainer:
    return DPZeroTrainer(
        model=model or tiny_model(),
        args=config(tmp_path, **settings),
        train_dataset=data if data is not None else tiny_data(),
        data_collator=default_data_collator,
        **{"eval_dataset": tiny_data(40, seed=2), **(trainer_settings or {})},
    )


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def with_lora(model) -> peft.PeftModel:
    """The model under a new adapter, the same one in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        return peft.get_peft_model(model, settings)


def with_groups(data: Dataset, every: int = 5) -> Dataset:
    """Every fifth row is of the group `few`, the others are of `many`."""
    names = ["few" if i % every == 0 else "many" for i in range(len(data))]
    return data.add_column("where", names)


GROUPS = {"group_robust.column": "where", "group_robust.shares": {"few": 0.2, "many": 0.8}}
