"""Recipes: what loads, what is refused, and that the words of the refusal help."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from pathlib import Path

import pytest

from hf_dpzero.estimators.ghost_clipping import opacus_rules
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.catalogue import catalogue
from hf_dpzero.recipes.recipe import coerce_fields, load_recipe, read_recipe, unused_settings
from hf_dpzero.settings.nested import InsecureTesting
from hf_dpzero.tasks.description import DataArguments
from hf_dpzero.values import parse_yaml

MINIMAL = """
model_name_or_path: some/model
task: sst2
target_epsilon: 2
target_delta: 1e-5
learning_rate: 1e-6
max_steps: 7
use_cpu: true
"""


@pytest.fixture
def write(tmp_path: Path):
    def to(text: str, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(f"output_dir: {tmp_path / 'out'}\n{text}", encoding="utf-8")
        return path

    return to


def test_values_reach_the_dataclass_that_owns_them(write):
    recipe = load_recipe(write(MINIMAL + "label_texts: [bad, good]\nmax_seq_length: 32\n"))
    plain = load_recipe(write(MINIMAL))
    assert plain.model == ModelArguments(model_name_or_path="some/model")
    assert plain.data == dataclasses.replace(DataArguments(), task="sst2")
    assert recipe.model.model_name_or_path == "some/model"
    assert recipe.model.label_texts == ["bad", "good"]
    assert (recipe.data.task, recipe.data.max_seq_length) == ("sst2", 32)
    assert recipe.training.target_epsilon == 2.0
    assert type(recipe.training.target_epsilon) is float
    assert recipe.training.learning_rate == 1e-6  # PyYAML alone reads `1e-6` as text
    assert recipe.training.max_steps == 7


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--max_steps", "9", "--max-steps", "1e1", "--clip=3"], {"max_steps": 10, "clip": 3.0}),
        (
            ["--testing.log-private-diagnostics", "--clip", "2"],
            {"testing": InsecureTesting(log_private_diagnostics=True)},
        ),
        (["--lora_target_modules", "query", "value"], {"lora_target_modules": ["query", "value"]}),
        ({"max_steps": 4, "peft_method": "lora"}, {"max_steps": 4, "peft_method": "lora"}),
        (["--max_train_samples", "null"], {"max_train_samples": None}),
        ([], {"max_train_samples": 5, "eval_strategy": "no"}),  # YAML 1.1 would read false
    ],
)
def test_overrides(write, overrides, expected):
    """The last one wins, a bare flag is true, dashes are underscores, several words are a list."""
    path = write(MINIMAL + "max_train_samples: 5\neval_strategy: no\nclip: 7\n")
    recipe = load_recipe(path, overrides)
    owners = (recipe.model, recipe.data, recipe.training)
    for name, value in expected.items():
        (found,) = (getattr(owner, name) for owner in owners if hasattr(owner, name))
        assert found == value and isinstance(found, type(value))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_step", "3"], r"command line: unknown key 'max_step'.*'max_steps'"),
        (["--extends", "other.yaml"], "command line: unknown key 'extends'"),
        (["5", "--max_steps", "5"], "'5' belongs to no setting"),
    ],
)
def test_refused_overrides(write, words, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(write(MINIMAL), words)


def test_to_yaml_round_trips_and_keeps_no_secret(write):
    path = write(MINIMAL + "label_texts: ['it''s: bad', good]\nclip: .5\n")
    secret = {"hub_token": "hf_secret", "testing.sampler_key": "ab" * 32}
    recipe = load_recipe(path, secret)
    text = recipe.to_yaml()
    assert "hf_secret" not in text
    assert "abab" not in text
    again = path.with_name("again.yaml")
    again.write_text(text, encoding="utf-8")
    expected = {k: v for k, v in recipe.values.items() if k not in ("hub_token", "testing")}
    assert expected
    assert load_recipe(again).values == expected


def test_a_recipe_lays_its_keys_over_those_it_extends(tmp_path, write):
    (tmp_path / "bases").mkdir()
    for name, text in {
        "bases/_model.yaml": "model_name_or_path: some/model\nclip: 5\nmax_seq_length: 32\n",
        "bases/_task.yaml": "extends: _model.yaml\ntask: sst2\nclip: 4\nmax_seq_length: 64\n",
        "_arm.yaml": "max_seq_length: 16\nclip: 2.0\ntarget_delta: 1e-4\nmax_train_samples: 9\n",
    }.items():
        (tmp_path / name).write_text(text)
    own = "target_epsilon: 2\ntarget_delta: 1e-5\nclip: 3\nmax_train_samples: null\nmax_steps: 7\n"
    path = write(f"extends: [_arm.yaml, bases/_task.yaml]\n{own}use_cpu: true\n")
    recipe = load_recipe(path, {"max_steps": 6})
    assert recipe.model.model_name_or_path == "some/model"
    assert (recipe.data.task, recipe.data.max_seq_length) == ("sst2", 64)  # the later file wins
    assert (recipe.training.clip, recipe.training.max_steps) == (3.0, 6)
    assert recipe.data.max_train_samples is None


def test_what_is_written_down_stands_alone(tmp_path, write):
    (tmp_path / "_base.yaml").write_text(MINIMAL)
    path = write("extends: _base.yaml\nclip: 3\n")
    recipe = load_recipe(path)
    assert "extends" not in recipe.values
    alone = tmp_path / "elsewhere" / "recipe.yaml"
    alone.parent.mkdir()
    alone.write_text(recipe.to_yaml(), encoding="utf-8")
    again = load_recipe(alone)
    assert again.values == recipe.values
    assert (again.training.clip, again.model) == (3.0, recipe.model)
    assert read_recipe(path) == {**parse_yaml(MINIMAL), **read_recipe(alone)}


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        (
            {"a.yaml": "b.yaml", "b.yaml": "./a.yaml"},
            ValueError,
            r"circle: \S*a\.yaml -> \S*b\.yaml -> ",
        ),
        ({"a.yaml": "a.yaml"}, ValueError, r"in a circle: \S*a\.yaml -> \S*a\.yaml"),
        ({"a.yaml": "../_b.yaml"}, FileNotFoundError, r"a\.yaml: extends: '../_b.yaml' not found"),
        *(
            ({"a.yaml": base}, ValueError, r"a\.yaml: extends: .* is not the path of one recipe")
            for base in ("[]", "[_a.yaml, 3]", "null", "''", "3")
        ),
    ],
)
def test_what_a_recipe_cannot_extend(tmp_path, files, error, message):
    for name, base in files.items():
        (tmp_path / name).write_text(f"extends: {base}\n")
    with pytest.raises(error, match=message):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("lerning_rate: 1", "learning_rate"),
        ("target_eps: 2", "target_epsilon"),
        ("evaluation_strategy: no", "eval_strategy"),
        ("label_text: [a]", "label_texts"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_the_file_it_stands_in(tmp_path, write, line, near):
    base, key = tmp_path / "_base.yaml", line.split(":")[0]
    base.write_text(MINIMAL + line + "\n")
    said = f"^{re.escape(str(base))}: unknown key '{key}'.*did you mean '{near}'"
    with pytest.raises(ValueError, match=said):
        load_recipe(write("extends: _base.yaml\n"))


def test_what_is_missing_is_named(tmp_path, write):
    with pytest.raises(ValueError, match="model_name_or_path is missing"):
        load_recipe(write("task: sst2\ntarget_epsilon: 1\n"))
    with pytest.raises(FileNotFoundError, match=r"recipe '.*none\.yaml' not found"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("clip: high", "clip: invalid float value: 'high'"),
        ("clip: .nan", "clip: invalid float value: '.nan'"),
        ("num_directions: 1.5", "num_directions: invalid int value: '1.5'"),
        ("num_directions: true", "num_directions: invalid int value: 'True'"),
        ("normalize: maybe", "normalize: Truthy value expected"),
        ("model_revision: 1234567", "model_revision: 1234567 is not text; put it in quotes"),
        ("pooling: max", "pooling: invalid choice: 'max'"),
        ("peft_method: lore", "did you mean 'lora'"),
        ("lr_scheduler_type: linearr", "did you mean 'linear'"),
        ("label_texts: {a: 1}", "label_texts: {'a': 1} is not a single value"),
        ("max_seq_length: null", "max_seq_length: null is no value of this field"),
        ("head_init: label_text", "needs label_texts"),
        ("max_seq_length: 1", "leaves no room for text"),
        ("max_train_samples: 0", "max_train_samples=0 must be positive"),
        ("model: {name: x}", "unknown key 'model'"),
        ("zzzz: 1", "unknown key 'zzzz'; no field of ModelArguments, DataArguments"),
        ("max_steps: 8", "'max_steps' appears more than once"),
    ],
)
def test_bad_values_name_the_key_and_the_value(write, line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_recipe(write(MINIMAL + line + "\n"))


@pytest.mark.parametrize(
    "text",
    [
        *(b"- a\n- b\n", b"", b"just words", b"a: [1\n", b"a: b: c\n", b"\xff\xfe\x00a: 1"),
        b"output_dir: !!python/object/apply:os.getcwd []\n",
    ],
)
def test_what_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"recipe\.yaml"):
        load_recipe(path)


def test_every_argument_is_documented():
    for owner in (ModelArguments, DataArguments):
        names = [field.name for field in dataclasses.fields(owner)]
        assert names
        for name in names:
            assert f"\n  {name}: " in (inspect.getdoc(owner) or ""), name


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("learning_rate", "1e-6", 1e-6),
        ("clip", 3, 3.0),
        ("clip", "inf", math.inf),
        ("max_steps", "1e4", 10_000),
        ("max_steps", 1e4, 10_000),
        ("testing.direction_key", str(2**127 + 1), 2**127 + 1),  # 128 bits; a float has 53
        ("testing.direction_key", "0xff", 255),
        ("max_steps", "-3", -3),
        ("normalize", "yes", True),
        ("microbatch_size", "null", None),
        ("trainable", None, None),
        *((name, "null", None) for name in ("learning_rate", "clip", "clipping", "num_directions")),
        ("target_epsilon", "", None),
        ("label_texts", "a, b", ["a", "b"]),
        ("label_texts", ["-good", "--bad"], ["-good", "--bad"]),
        ("label_texts", '["a, b", c]', ["a, b", "c"]),
        ("report_to", "[a, b]", ["a", "b"]),
        ("report_to", "tensorboard", "tensorboard"),
        ("report_to", "none", "none"),  # Hugging Face's word for nowhere
        ("lr_scheduler_kwargs", "{min_lr: 1e-7}", {"min_lr": 1e-7}),
        ("eval_strategy", "no", "no"),
        ("peft_method", "lora", "lora"),
        ("template", "- {text}", "- {text}"),
        ("debug", [], []),
    ],
)
def test_values_take_the_type_of_their_field(key, value, expected):
    converted = coerce_fields({key: value}, "a.yaml")[key]
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip", "nan"),
        ("clip", float("nan")),
        ("learning_rate", "-nan"),
        ("learning_rate", " +NaN "),
        ("clip", True),
        ("max_steps", "abc"),
        ("max_steps", 0.5),
        ("max_steps", "inf"),
        ("max_steps", True),
        ("max_steps", None),
        ("bf16", "maybe"),
        ("trainable", False),
        ("method", ["dpzero"]),
        ("learning_rate", [1]),
        ("label_texts", 3),
        ("label_texts", ["a", None]),
        ("prompt", "blue"),
    ],
)
def test_values_of_another_type_are_refused(key, value):
    with pytest.raises(ValueError, match=rf"^a\.yaml: {key}: .+"):
        coerce_fields({key: value}, "a.yaml")


SCALARS = {
    "1e-6": 1e-6, "1E5": 1e5, "-2.5e+3": -2500.0, ".5": 0.5, "3.": 3.0, "1_000.0": 1000.0,
    ".inf": math.inf, "12": 12, "1.2.3": "1.2.3", "e5": "e5", "no": "no", "on": "on", "True": True,
    "~": None,
}  # fmt: skip


def test_yaml_scalars():
    found = {text: parse_yaml(text) for text in SCALARS}
    assert found == SCALARS
    assert [type(value) for value in found.values()] == list(map(type, SCALARS.values()))


def test_a_missing_opacus_is_said_before_any_data_is_read(monkeypatch, write):
    recipe = load_recipe(write(MINIMAL + "method: dp-sgd\n"))
    monkeypatch.setitem(sys.modules, "opacus.grad_sample.grad_sample_module", None)
    monkeypatch.setattr("hf_dpzero.tasks.build_task", lambda data: pytest.fail("data was read"))
    opacus_rules.cache_clear()
    with pytest.raises(ImportError, match="pip install opacus"):
        build_trainer(recipe)


FILES = {"train_file": "a.csv", "validation_file": "b.csv"}


def told(tmp_path, **settings) -> str:
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
