"""Every field of Hugging Face's training arguments is classed, and does what its class says."""

from __future__ import annotations

import dataclasses
import operator
import re
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import build, config, same, weights
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.utils import logging

from hf_dpzero import DPZeroConfig, DPZeroSeq2SeqConfig
from hf_dpzero.objectives.heads import masked_lm_objective, own_loss_objective, smoothed
from hf_dpzero.objectives.losses import classification_losses, token_losses
from hf_dpzero.settings import hf_arguments as fields
from hf_dpzero.settings.fields import OwnFields
from hf_dpzero.settings.hf_arguments import FIELDS, NAMES, OTHER, REFUSED, UNUSED, WORKS, use_of
from hf_dpzero.settings.nested import METHODS, NESTED, NOT_PRIVATE
from hf_dpzero.settings.setting import settings_of
from scripts.training_arguments import PAGE, page

ONLY_OLDER = {"warmup_ratio", "logging_dir"}
"""Fields that 5.3 has and 5.16 has not."""
ONLY_NEWER = {
    *("trackio_static_space_id", "ddp_static_graph", "trackio_bucket_id"),
    *("dataloader_in_order", "dataloader_multiprocessing_context"),
    *("activation_checkpointing", "activation_checkpointing_kwargs"),
}
"""Fields that 5.3 has not."""

CHANGED = {
    **dict.fromkeys(("optim_args", "length_column_name", "hub_revision"), "x"),
    **{"optim": "adafactor", "optim_target_modules": "all-linear", "label_names": ["y"]},
    **{"accelerator_config": {"split_batches": True}, "debug": "underflow_overflow"},
    **{"train_sampling_strategy": "sequential", "hub_strategy": "every_save"},
    **{"adam_beta1": 0.5, "adam_beta2": 0.5, "adam_epsilon": 0.1, "max_grad_norm": 1.0},
    **{"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"},
    **{"dataloader_prefetch_factor": 2, "dataloader_multiprocessing_context": "spawn"},
    **{"fsdp": "full_shard", "fsdp_config": {"min_num_params": 3}, "data_seed": 3},
    **{"liger_kernel_config": {"rope": True}, "torch_empty_cache_steps": 3, "ddp_bucket_cap_mb": 9},
    **{"activation_checkpointing_kwargs": {"a": 1}, "gradient_checkpointing_kwargs": {"a": 1}},
    **{"neftune_noise_alpha": 5.0, "per_device_train_batch_size": 3, "deepspeed": "zero.json"},
    "parallelism_config": SimpleNamespace(),
}
"""A value that is not the default; for fields that are not here the other boolean."""
WITH = {
    "load_best_model_at_end": {"eval_strategy": "steps", "save_strategy": "steps"},
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
}
NOT_THERE = set(FIELDS) - set(NAMES)


def one_changed(name: str, method: str) -> dict:
    """A configuration's settings with one field changed."""
    noise = {"noise_multiplier": None, "target_delta": None} if method in NOT_PRIVATE else {}
    value = CHANGED.get(name, not fields._DEFAULTS.get(name))
    grad = {} if name == "max_grad_norm" else {"max_grad_norm": 0.0}
    return {"method": method, **noise, **grad, **WITH.get(name, {}), name: value}


def of_kind(kind: str) -> list[tuple[str, str]]:
    """(field, method) of the installed version, where nothing else must be set."""
    return [
        (name, method)
        for name in NAMES
        for method in METHODS
        if use_of(name, SimpleNamespace(method=method, push_to_hub=False, fsdp=None)).kind == kind
    ]


def test_every_field_is_classed_and_no_other():
    installed = {
        f.name for c in (TrainingArguments, Seq2SeqTrainingArguments) for f in dataclasses.fields(c)
    }
    assert len(installed) > 100 and installed - FIELDS.keys() == set()
    assert NOT_THERE <= ONLY_OLDER | ONLY_NEWER
    own = {f.name for f in dataclasses.fields(DPZeroConfig)} - installed
    assert len(own) > 25 and not own & FIELDS.keys()
    kinds = (DPZeroConfig, *NESTED.values())
    needs = {described.needs for kind in kinds for _, described in settings_of(kind)} - {None}
    made = config("unused")
    assert len(needs) > 8
    assert all(isinstance(operator.attrgetter(setting)(made), str) for setting, _ in needs)


def test_what_the_tables_say_is_complete():
    for name, uses in FIELDS.items():
        assert {u.kind for u in uses} <= {WORKS, OTHER, UNUSED, REFUSED}
        assert set().union(*(u.methods for u in uses if not u.where)) | {
            m for u in uses for m in u.methods
        } == set(METHODS), name
        assert all(u.text for u in uses if u.kind != WORKS), name


@pytest.mark.parametrize(("name", "method"), of_kind(REFUSED))
def test_refused_fields_are_refused(tmp_path, name, method):
    with pytest.raises(ValueError, match=f"^{name}="):
        config(tmp_path, **one_changed(name, method))


@pytest.mark.parametrize("name", ["hub_strategy", "auto_find_batch_size"])
def test_fields_that_are_kept_from_trainer_are_put_back(tmp_path, name):
    """Set later, where nobody puts them back, they are refused."""
    changed = CHANGED.get(name, True)
    made = config(tmp_path, push_to_hub=True, **{name: changed})
    assert getattr(made, name) == fields._PUT_BACK[name][0]
    setattr(made, name, changed)
    (said,) = fields.refused_fields(made)
    assert said.startswith(f"{name}={changed!r} would ")


@pytest.mark.parametrize("kind", [UNUSED, OTHER])
def test_fields_without_effect_are_named(kind):
    """All of a method at once, in one message; what was not changed is not there."""
    listed = of_kind(kind)
    assert len(listed) > 50
    defaults = {f.name: f.default for f in dataclasses.fields(DPZeroConfig)}
    nested = {name: kind() for name, kind in NESTED.items()}
    for method in METHODS:
        names = [name for name, m in listed if m == method]
        changed = {name: CHANGED.get(name, not fields._DEFAULTS.get(name)) for name in names}
        values = {**defaults, **nested, **fields._DEFAULTS, **changed, "method": method}
        text = fields.warning(_config_of(values))
        assert all(f"{name}={value!r}" in text for name, value in changed.items()), text
        assert text.count(f"no effect in a {method} run") == (kind == UNUSED)
        assert sorted(set(re.findall(r"(\w+)=", text)) & set(NAMES)) == sorted(names)


def _config_of(values: dict) -> DPZeroConfig:
    made = object.__new__(DPZeroConfig)
    vars(made).update(values)
    return made


def test_the_warning_is_one_line_of_the_log(tmp_path, caplog):
    logging.logging.Logger.warning_once.cache_clear()
    config(
        tmp_path, optim="adafactor", dataloader_drop_last=True, clipping_config={"quantile": 0.3}
    )
    said = [record.getMessage() for record in caplog.records if record.name.startswith("hf_dpzero")]
    assert said == [
        "no effect in a dpzero run: optim='adafactor' (update_rule says what is made of the released "
        "numbers), clipping_config.quantile=0.3 (it is for clipping='adaptive'); another meaning: "
        "dataloader_drop_last=True (in evaluation only: training has a data loader of its own)"
    ]


@pytest.mark.parametrize("method", METHODS)
def test_defaults_and_copies_of_a_configuration_warn_of_nothing(tmp_path, method):
    noise = {"noise_multiplier": None, "target_delta": None} if method in NOT_PRIVATE else {}
    made = config(tmp_path, method=method, include_num_input_tokens_seen=False, **noise)
    assert fields.warning(made) == ""
    assert fields.warning(dataclasses.replace(made)) == ""
    made.fsdp_config = {"min_num_params": 0, "xla": False}  # of older releases' own making
    assert fields.warning(made) == ""


def test_a_field_of_a_later_version_is_named(tmp_path, monkeypatch):
    made = config(tmp_path)
    monkeypatch.setattr(fields, "NAMES", (*NAMES, "later_token", "later"))
    monkeypatch.setattr(fields, "_DEFAULTS", {**fields._DEFAULTS, "later_token": None, "later": 3})
    assert fields.warning(made) == ""
    made.later, made.later_token = 4, "secret"
    assert fields.warning(made) == (
        "no effect in a dpzero run: later_token=<hidden>, later=4 (this version of hf_dpzero does not "
        "know it)"
    )
    assert not list(fields.refused_fields(made))


def test_generation_fields_work_in_their_own_class(tmp_path):
    made = DPZeroSeq2SeqConfig(
        output_dir=str(tmp_path), noise_multiplier=1.0, predict_with_generate=True, use_cpu=True
    )
    assert made.predict_with_generate and fields.warning(made) == ""


def test_fields_set_later_are_refused_by_the_trainer(tmp_path):
    """accelerate's configuration sets gradient_accumulation_steps while the trainer is made."""
    split = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2 would split"):
        build(tmp_path, accelerator_config=split)


@pytest.mark.parametrize(
    ("settings", "processes", "batch", "said"),
    [
        ({}, 1, 64.0, ""),
        ({"gradient_accumulation_steps": 4}, 1, 12.0, "3 x 4 x 1 (processes) = 12 examples"),
        ({"gradient_accumulation_steps": 4}, 2, 24.0, "3 x 4 x 2 (processes) = 24 examples"),
        (
            {"gradient_accumulation_steps": 4, "expected_batch_size": 20},
            1, 20, "has no effect: expected_batch_size is the batch",
        ),
    ],
)  # fmt: skip
def test_accumulation_makes_the_batch_of_a_step(
    tmp_path, caplog, monkeypatch, settings, processes, batch, said
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    logging.warning_once.cache_clear()
    monkeypatch.setattr(DPZeroConfig, "process_index", 0)
    monkeypatch.setattr(DPZeroConfig, "_setup_devices", torch.device("cpu"))
    with caplog.at_level("WARNING", logger="hf_dpzero"):
        made = DPZeroConfig(
            output_dir=str(tmp_path), target_epsilon=2, per_device_train_batch_size=3, use_cpu=True,
            **settings,
        )  # fmt: skip
    assert (made.expected_batch_size, made.gradient_accumulation_steps) == (batch, 1)
    assert ("no effect in" in caplog.text) == (not said or "has no effect" in said)
    assert said in caplog.text and made.plan(1000).sampler.expected_batch_size == batch


# ---- runs


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (
            "dpzero",
            {"optim": "adafactor", "adam_beta1": 0.1, "gradient_checkpointing": True, "seed": 7},
        ),
        ("dpzero", {"dataloader_drop_last": True, "average_tokens_across_devices": False}),
        ("dpzero", {"data_seed": 7, "accelerator_config": {"split_batches": True}}),
        ("dp-sgd", {"optim": "adafactor", "adam_beta1": 0.1, "data_seed": 7, "seed": 7}),
    ],
)
def test_fields_without_effect_leave_the_weights_alone(tmp_path, method, settings):
    plain, changed = (
        build(tmp_path / str(i), method=method, max_steps=2, **s)
        for i, s in enumerate(({}, settings))
    )
    plain.train(), changed.train()
    assert same(weights(plain.model), weights(changed.model))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dpzero", {"weight_decay": 0.5}),
        ("dpzero", {"label_smoothing_factor": 0.3}),
        ("dp-adamw", {"adam_beta1": 0.1, "label_smoothing_factor": 0.3}),
        ("dp-sgd", {"optim_args": "momentum=0.9"}),
        (
            "dpzero",
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "eval_strategy": "steps",
                "eval_steps": 1,
            },
        ),
    ],
)
def test_fields_that_work_move_the_weights(tmp_path, method, settings):
    plain, changed = (
        build(tmp_path / str(i), method=method, max_steps=2, **s)
        for i, s in enumerate(({}, settings))
    )
    plain.train(), changed.train()
    assert not same(weights(plain.model), weights(changed.model))


def test_label_smoothing_is_hugging_faces_within_each_example():
    """Of one example Trainer's LabelSmoother takes the mean over its tokens, as the losses here do."""
    from transformers.trainer_pt_utils import LabelSmoother

    generator = torch.Generator().manual_seed(0)
    logits, labels = (
        torch.randn(3, 5, 7, generator=generator),
        torch.tensor([[1, 2, -100, 4, 6]] * 3),
    )
    ours = token_losses(logits, labels, 0.2)
    smoother = LabelSmoother(epsilon=0.2)
    theirs = [smoother({"logits": logits[i : i + 1]}, labels[i : i + 1].clone()) for i in range(3)]
    torch.testing.assert_close(ours, torch.stack(theirs))
    ours = classification_losses(logits[:, 0], labels[:, 0], label_smoothing=0.2)
    theirs = [smoother({"logits": logits[i, 0]}, labels[i, 0]) for i in range(3)]
    torch.testing.assert_close(ours, torch.stack(theirs))
    with pytest.raises(
        ValueError, match="label_smoothing_factor=0.2 with problem_type='regression'"
    ):
        classification_losses(logits[:, 0, :1], labels[:, 0].float(), label_smoothing=0.2)
    assert smoothed(masked_lm_objective, 0.0) is masked_lm_objective
    assert smoothed(masked_lm_objective, 0.2).keywords == {"label_smoothing": 0.2}
    with pytest.raises(
        ValueError, match="label_smoothing_factor=0.2 has no effect on own_loss_objective"
    ):
        smoothed(own_loss_objective, 0.2)


def test_a_checkpoint_without_a_schedule_is_not_resumed(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    build(tmp_path, save_only_model=True, **settings).train()
    with pytest.raises(ValueError, match="save_only_model=False"):
        build(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# ---- the page


def test_help_describes_every_field():
    for kind, parent in ((DPZeroConfig, OwnFields), *((kind, kind) for kind in NESTED.values())):
        names = [field.name for field, _ in settings_of(parent)]
        assert (
            names and re.findall(r"^  (\w+): ", kind.__doc__.partition("Fields:")[2], re.M) == names
        )


def test_the_page_of_training_arguments_is_up_to_date():
    """`python -m scripts.training_arguments` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()
    assert all(f"`{name}`" in page() for name in FIELDS)
