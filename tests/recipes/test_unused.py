"""Settings of a recipe that have no effect beside its others are named; shipped recipes have none."""

from __future__ import annotations

from typing import Any

import pytest

from hf_dpzero.recipes.catalogue import catalogue
from hf_dpzero.recipes.recipe import load_recipe, unused_settings

FILES = {"train_file": "a.csv", "validation_file": "b.csv"}


def told(tmp_path: Any, **settings: Any) -> str:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model_name_or_path: x\ntarget_epsilon: 2\nuse_cpu: true\n")
    given = {"output_dir": str(tmp_path), **settings}
    return unused_settings(load_recipe(recipe, given))


@pytest.mark.parametrize(
    ("name", "value", "used"),
    [
        ("lora_r", 16, {"peft_method": "lora"}),
        ("lora_alpha", 3.0, {"peft_method": "lora"}),
        ("lora_target_modules", ["query"], {"peft_method": "lora"}),
        ("num_virtual_tokens", 9, {"peft_method": "prefix"}),
        ("pooling", "cls", {"architecture": "sentence_classifier"}),
        ("normalize", False, {"architecture": "sentence_classifier"}),
        (
            "label_texts",
            ["a", "b"],
            {"head_init": "label_text", "architecture": "sentence_classifier"},
        ),
        ("max_new_tokens", 5, {"prompt": "causal_lm"}),
        ("do_train", False, None),
        ("do_eval", False, None),
        ("do_predict", True, None),
        ("dataset_name", "some/data", {}),
        ("dataset_config_name", "plain", {}),
    ],
)
def test_a_setting_without_effect_is_named(tmp_path, name, value, used):
    hub = name.startswith("dataset_")
    assert f"{name}={value!r} (" in told(tmp_path, **{name: value}, **(FILES if hub else {}))
    if used is not None:
        assert told(tmp_path, **{name: value}, **used) == ""


def test_what_happens_anyhow_is_not_named(tmp_path):
    assert told(tmp_path, do_train=True, do_eval=True, do_predict=False) == ""
    assert "model_revision" in told(
        tmp_path, model_name_or_path=str(tmp_path), model_revision="main"
    )


def test_no_shipped_recipe_has_one():
    for entry in catalogue():
        assert unused_settings(load_recipe(entry["recipe"], {"use_cpu": True})) == "", entry
