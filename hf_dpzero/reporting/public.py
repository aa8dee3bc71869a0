"""What of a run's results and recipe is public: metrics of evaluation, and settings without secrets."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_dpzero.values import parse_yaml

RECIPE_FILE = "recipe.yaml"

# Memory is left out: its peaks tell the sizes of private batches.
_PUBLIC_RESULT = re.compile(r"(eval|test|predict|zero_shot)_(?!(\w*_)?mem_)\w+|epoch|train_samples")
_TIMES = ("runtime", "_per_second", "_per_step", "_time")
# The key of the directions is public: a replay needs it.
_SECRET_SETTING = re.compile(
    r"(?!direction_key$)(.*_)?(token|key|secret|password|credentials?)", re.IGNORECASE
)
_MACHINE_SETTINGS = (
    *("output_dir", "logging_dir", "resume_from_checkpoint", "hub_model_id", "extends_run"),
    "budget_file",
    *("device_map", "offload_folder", "max_memory"),
)
_PATH_SETTINGS = (
    *("train_file", "validation_file", "public_file", "task", "dataset_name", "extends"),
    "model_name_or_path",
    *("deepspeed", "fsdp_config", "accelerator_config"),
    *("noise", "clip", "smoothing"),  # of schedules
)
_TEXT_SETTINGS = ("template", "label_words", "class_names")  # texts of a model: never a path
_NESTED = {
    *("clipping_config", "schedules", "correlated_noise", "group_robust", "performance", "testing")
}
OWN_SETTINGS = frozenset(
    """
    accountant allow_fewer_per_class architecture base_is_public budget_file class_names clip clipping
    clipping_config components correlated_noise dataset_config_name dataset_name device_map differences
    direction expected_batch_size extends extends_run features group_robust head_init holdout init_seed
    keep_column label_column label_texts label_words learning_rate_is_final load_in_4bit
    load_in_8bit logit_scale lora_alpha lora_r lora_target_modules max_batch_size
    max_eval_samples max_length max_memory max_new_tokens max_rows_per_unit max_seq_length
    max_train_samples method microbatch_size model_name_or_path model_revision momentum
    neighboring_relation noise_distribution noise_multiplier normalize num_demonstrations num_directions
    num_examples_per_class num_virtual_tokens objective offload_folder on_no_signal
    pair_features peft_method performance pooling precompute_features prompt public_file rows_are
    sampling schedules smoothing subset_seed target_delta target_epsilon task template testing
    text_column text_pair_column torch_dtype train_file trainable tuning unit_column update_rule
    update_window validation_file whole_units
    """.split()  # noqa: SIM905
)
"""What a recipe may set beside transformers' TrainingArguments; a test keeps it complete."""

NESTED_SETTINGS = frozenset(
    """
    bands budget clip column count_noise defer_updates direction_key direction_parallel_size
    draws groups hold_direction_for insecure_noise_seed kind learning_rate
    log_private_diagnostics loss_bound noise per_example_gradients perturbation_strategy
    quantile rate reuse_frozen_prefix sampler_key shares smoothing stability weights
    """.split()  # noqa: SIM905
)
"""Keys of the settings that are mappings; the same test."""


def public_results(results: Mapping[str, Any]) -> dict[str, float]:
    """Keeps evaluation metrics and public counts: no statistic of training rows, no time or memory.

    >>> public_results({"eval_accuracy": 0.8, "train_loss": 0.3, "epoch": 1.0})
    {'eval_accuracy': 0.8, 'epoch': 1.0}
    """
    return {
        name: value
        for name, value in results.items()
        if _PUBLIC_RESULT.fullmatch(name)
        and not name.endswith(_TIMES)
        and isinstance(value, int | float)
        and math.isfinite(value)
    }


def public_recipe(text: str) -> str:
    """Keeps the known fields of a recipe but for secrets and settings of one machine; no comments.

    Absolute paths keep their last part. Templates and names and words of labels stay as they are, also
    where they start like a path.

    >>> public_recipe("clip: 50.0\\nhub_token: hf_x\\ntrain_file: /home/me/rows.jsonl\\n")
    'clip: 50.0\\ntrain_file: rows.jsonl\\n'
    """
    from transformers import TrainingArguments

    # Unknown keys are dropped, not only those that look secret.
    known = OWN_SETTINGS | {f.name for f in dataclasses.fields(TrainingArguments)}
    public = {
        name: _portable(name, value)
        for name, value in recipe_settings(text).items()
        if name in known and name not in _MACHINE_SETTINGS and not _SECRET_SETTING.fullmatch(name)
    }
    for name in _NESTED & public.keys():
        public[name] = {
            inner: _portable(inner, value)
            for inner, value in (public[name] or {}).items()
            if inner in NESTED_SETTINGS and not _SECRET_SETTING.fullmatch(inner)
        }
    return yaml.safe_dump(public, sort_keys=False, allow_unicode=True) if public else ""


def recipe_settings(text: str) -> dict[str, Any]:
    """Reads a recipe's text; an empty one has no settings."""
    settings = parse_yaml(text) if text.strip() else {}
    if not isinstance(settings, dict):
        raise ValueError(
            f"{RECIPE_FILE} is no mapping of settings to values; restore or delete it."
        )
    return settings


def _portable(name: str, value: Any) -> Any:
    """Cuts a path on this machine to its last part, and leaves anything else as it is.

    Settings that hold paths are taken at their word, and so is text for a model. Elsewhere a path is
    what exists, or has several parts and no white space or braces.
    """
    if isinstance(value, list):
        return [_portable(name, item) for item in value]
    absolute = isinstance(value, str) and (Path(value).is_absolute() or value.startswith("~"))
    if not absolute or name in _TEXT_SETTINGS:
        return value
    several = len(Path(value).parts) > 2 or value.startswith("~/")
    plain = re.search(r"[\s{}]", value) is None
    looks_like_one = several and (plain or os.path.exists(os.path.expanduser(value)))
    return Path(value).name if name in _PATH_SETTINGS or looks_like_one else value
