"""Values and arguments of another kind, and settings without effect: refused or named, never silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from datasets import Dataset
from tiny_runs import KEY, build, config, tiny_data, tiny_model
from transformers import BertForSequenceClassification, TrainingArguments
from transformers.utils import logging

from hf_dpzero import DPZeroTrainer

OF_ANOTHER_KIND = [
    *[(name, "false") for name in ("testing.log_private_diagnostics", "base_is_public")],
    *[
        (name, value)
        for name in ("performance.reuse_frozen_prefix", "performance.defer_updates")
        for value in ("no", None)
    ],
    *[("seed", value) for value in ("a", 1.5, None, -1, 1 << 32, True)],
    *[("testing.direction_key", value) for value in ("a", 1.5, -1, 1 << 128)],
    *[("testing.insecure_noise_seed", value) for value in ("x", -1)],
    *[("trainable", value) for value in (["classifier"], 3, "")],
    *[("extends_run", value) for value in (3, "")],
    ("output_dir", 5),
    *[("accountant", value) for value in ("gdp", None)],
    ("neighboring_relation", "add_remove"),
    ("noise_distribution", "cauchy"),
    *[(name, None) for name in ("smoothing", "max_steps", "weight_decay")],
    *[("num_directions", value) for value in (10**8, "many")],
    ("include_for_metrics", ["nosuch"]),
    ("lr_scheduler_kwargs", ["power"]),
]


@pytest.mark.parametrize(("name", "value"), OF_ANOTHER_KIND)
def test_values_of_another_kind_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"^{name}=") as refusal:
        config(tmp_path, **{name: value})
    assert str(refusal.value).count("\n") == 0


@pytest.mark.parametrize("key", ["zz", KEY[1:], 5])
def test_a_sampler_key_is_refused_and_not_shown(tmp_path, key):
    with pytest.raises(ValueError, match="sampler_key must be 64 hex digits") as refusal:
        config(tmp_path, testing={"sampler_key": key})
    assert str(key) not in str(refusal.value).replace("64", "")


def test_whole_floats_are_counts(tmp_path):
    made = config(tmp_path, num_directions=2.0, microbatch_size=4.0)
    assert (made.num_directions, made.microbatch_size) == (2, 4)
    assert isinstance(made.num_directions, int)


def test_scheduler_settings_that_it_does_not_take_are_refused(tmp_path):
    settings = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 2}}
    with pytest.raises(ValueError, match="'powr'.*'polynomial' takes lr_end, power"):
        config(tmp_path, **settings)
    for given in ({"power": 2}, '{"power": 2}'):
        made = config(tmp_path, **{**settings, "lr_scheduler_kwargs": given})
        assert made.lr_scheduler_kwargs == {"power": 2}
    with pytest.raises(
        ValueError, match="^2 settings .*\n.*\n- lr_scheduler_type='x': .*'linear'"
    ) as refusal:
        config(tmp_path, lr_scheduler_type="x", seed=-1)
    assert "seed=-1" in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({"eval_steps": 5}, {"eval_strategy": "steps"}),
        ({"eval_strategy": "steps", "max_steps": 6, "eval_steps": 9}, {"max_steps": 20}),
        ({"eval_delay": 5}, {"eval_strategy": "steps", "eval_steps": 2}),
        ({"metric_for_best_model": "loss"}, {"eval_strategy": "steps", "eval_steps": 2}),
        (
            {"load_best_model_at_end": True},
            {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
        ),
        ({"save_steps": 5}, {"save_strategy": "steps"}),
        ({"save_total_limit": 2}, {"save_strategy": "steps"}),
        ({"logging_strategy": "no", "logging_steps": 3}, {"logging_strategy": "steps"}),
        ({"num_train_epochs": 5}, {"max_steps": -1}),
        ({"sampling": "full_batch", "expected_batch_size": 12}, {"sampling": "poisson"}),
        (
            {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"power": 2}},
            {"lr_scheduler_type": "polynomial"},
        ),
    ],
)
def test_settings_whose_strategy_is_off_are_named(tmp_path, caplog, monkeypatch, settings, used):
    monkeypatch.setattr(logging.logging.getLogger("transformers"), "propagate", True)
    logging.logging.Logger.warning_once.cache_clear()
    name, value = list(settings.items())[-1]
    config(tmp_path, **settings)
    assert "no effect" in caplog.text and f"{name}={value!r}" in caplog.text
    caplog.clear()
    config(tmp_path, **{**settings, **used})
    assert f"{name}={value!r}" not in caplog.text


def test_a_clip_that_clips_nothing_is_named(tmp_path, caplog, monkeypatch):
    """2 C lambda is the largest change of a loss between the two ends that is not clipped."""
    monkeypatch.setattr(logging.logging.getLogger("transformers"), "propagate", True)
    config(tmp_path, clip=1e4, smoothing=1e-3)
    assert "clips no example" not in caplog.text
    config(tmp_path, clip=1e12, smoothing=1e-3)
    assert "changes by less than 2e+09" in caplog.text and "default is 50" in caplog.text


def test_a_rate_of_zero_is_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.logging.getLogger("transformers"), "propagate", True)
    config(tmp_path, learning_rate=0.0)
    assert "learning_rate=0: no step moves the weights" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_multiplier": None}, r"give exactly one of them .* is not private\)\.$"),
        (
            {"correlated_noise": {"kind": "tree"}, "sampling": "fixed_batches"},
            r"nearly orthogonal to those of other steps.*out\.$",
        ),
    ],
)
def test_a_refusal_is_one_sentence_to_its_end(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


def test_all_that_the_arguments_alone_decide_is_said_at_once(tmp_path):
    """Values out of range first, since the others compare them."""
    wrong = {"seed": -1, "clip": 0.0, "accountant": "gdp", "testing": {"direction_key": -1}}
    with pytest.raises(ValueError, match=r"^5 settings are refused:\n") as refusal:
        config(tmp_path, debug="x", **wrong)
    names = [line.partition("=")[0] for line in str(refusal.value).split("\n- ")[1:]]
    assert sorted(names) == ["accountant", "clip", "debug", "seed", "testing.direction_key"]
    clashing = {
        "noise_multiplier": None,
        "clipping": "automatic",
        "max_batch_size": 9,
        "debug": "x",
    }
    with pytest.raises(ValueError, match=r"^6 settings are refused:\n") as refusal:
        config(tmp_path, fp16_full_eval=True, trainable="(", **clashing)
    named = ("give exactly one", "clipping='automatic'", "max_batch_size=9", "debug='x'",
             "fp16_full_eval=True", "trainable='('")  # fmt: skip
    assert all(name in str(refusal.value) for name in named)


@pytest.mark.parametrize("settings", ["zero.json", {"zero_optimization": {"stage": 3}}, None])
def test_deepspeed_is_refused_before_its_package_is_asked_for(tmp_path, monkeypatch, settings):
    """In the arguments or by `accelerate launch`: transformers alone tells to install the package."""
    if settings is None:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"DEEPSPEED wraps|^deepspeed=.* wraps") as refusal:
        config(tmp_path, deepspeed=settings)
    assert "--multi_gpu" in str(refusal.value) and "fsdp2.yaml" in str(refusal.value)


# ---------------------------------------------------------------- what a trainer is given


@pytest.mark.parametrize("args", [None, TrainingArguments("unused", report_to="none")])
def test_a_trainer_without_a_budget_says_what_to_give(args):
    with pytest.raises(ValueError, match=r"args is a \w+: .*DPZeroConfig\(target_epsilon=2\)"):
        DPZeroTrainer(tiny_model(), args, train_dataset=tiny_data())


def given(tmp_path: Path, **arguments: Any) -> DPZeroTrainer:
    settings = {"model": tiny_model(), "train_dataset": tiny_data(), **arguments}
    return DPZeroTrainer(args=config(tmp_path, max_steps=1), **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": BertForSequenceClassification}, "model is BertForSequenceClassification: pass"),
        ({"model": {"a": 1}}, "model is a dict"),
        ({"train_dataset": "rows.csv"}, "train_dataset is a str"),
        ({"train_dataset": pandas.DataFrame({"a": [1]})}, "from_pandas"),
        ({"eval_dataset": "rows.csv"}, "eval_dataset='rows.csv'.*load_dataset"),
        ({"processing_class": "bert"}, "processing_class='bert'.*from_pretrained"),
        ({"tokenizer": "bert"}, "tokenizer= is called processing_class="),
        ({"data_collator": "pad"}, "data_collator is a str"),
        ({"compute_metrics": "accuracy"}, "compute_metrics is a str"),
        ({"compute_per_example_loss": "ce"}, "compute_per_example_loss is a str"),
        ({"preprocess_logits_for_metrics": 3}, "preprocess_logits_for_metrics is a int"),
        ({"noise": 3}, "noise is a int"),
        ({"callbacks": "early"}, "callbacks='early' is no list"),
        ({"eval_dataset": False}, "eval_dataset=False is no eval_dataset"),
    ],
)
def test_arguments_of_another_kind_are_refused_at_construction(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        given(tmp_path, **arguments)


def rows_with(**columns: Any) -> Dataset:
    rows = [{**row, **{n: f(i) for n, f in columns.items()}} for i, row in enumerate(tiny_data())]
    return Dataset.from_list(rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda: rows_with(labels=lambda i: float(i % 2)), "labels of shape.*num_labels=1"),
        (lambda: rows_with(labels=lambda i: [0, 1, 1]), "labels of shape.*for 2 logits"),
        (lambda: rows_with(input_ids=lambda i: [99] * 8), "row 0 of train_dataset.*IndexError"),
        (lambda: rows_with(input_ids=lambda i: [1.5] * 8), "row 0 of train_dataset"),
        (
            lambda: rows_with(input_ids=lambda i: [7] * 30, attention_mask=lambda i: [1] * 30),
            "more tokens than the model's .* positions",
        ),
        (lambda: [(1, 2)] * 20, "row 0 of train_dataset cannot be collated"),
        (lambda: torch.utils.data.TensorDataset(torch.zeros(20, 3)), "row 0 of train_dataset"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_before_step_0(tmp_path, rows, message):
    trainer = given(tmp_path, train_dataset=rows())
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert not (tmp_path / "trajectory.ledger").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_label_that_is_no_number_is_refused_by_its_row(tmp_path, bad):
    """Its loss would be NaN, which counts as zero: trained on in silence."""
    rows = rows_with(labels=lambda i: bad if i == 5 else 0.25 * i)
    trainer = given(tmp_path, model=tiny_model(num_labels=1), train_dataset=rows)
    with pytest.raises(
        ValueError, match="^row 5 of train_dataset has no finite number as its labels"
    ):
        trainer.train()
    assert not (tmp_path / "trajectory.ledger").exists()


def test_what_fails_in_a_loss_of_the_users_own_is_said(tmp_path):
    trainer = given(tmp_path, compute_per_example_loss=lambda model, inputs: inputs["nosuch"])
    with pytest.raises(ValueError, match="KeyError.*compute_per_example_loss") as refusal:
        trainer.train()
    assert isinstance(refusal.value.__cause__, KeyError)


def test_a_checkpoint_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="valid checkpoint at nowhere: resume_from_checkpoint is a"
    ):
        build(tmp_path).train(resume_from_checkpoint="nowhere")


def test_a_best_metric_that_is_not_measured_is_refused(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best"}
    trainer = build(tmp_path, metric_for_best_model="nosuch", **settings)
    with pytest.raises(ValueError, match="metric_for_best_model='nosuch'.*eval_loss"):
        trainer.train()
