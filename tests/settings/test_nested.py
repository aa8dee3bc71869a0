"""Nested settings as a dataclass, a mapping or JSON, in Python, on a command line and in a recipe."""

from __future__ import annotations

import json

import pytest
from tiny_runs import config
from transformers import HfArgumentParser

from hf_dpzero import DPZeroConfig
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.settings.nested import NESTED, ClippingConfig

ASKED = {"quantile": 0.7, "groups": 3}
WANTED = ClippingConfig(quantile=0.7, groups=3)
TRAINING = {"output_dir": "out", "target_epsilon": 2.0, "use_cpu": True}


@pytest.mark.parametrize("given", [ASKED, json.dumps(ASKED), WANTED])
def test_a_nested_setting_is_a_mapping_its_json_or_the_dataclass(tmp_path, given):
    made = config(tmp_path, clipping_config=given)
    assert made.clipping_config == WANTED and made.clipping_config is not given


def test_what_is_left_out_has_its_defaults(tmp_path):
    made = config(tmp_path, testing=None)
    for name, kind in NESTED.items():
        assert getattr(made, name) == kind(), name


def test_a_config_is_made_again_from_its_dict(tmp_path):
    made = config(tmp_path, schedules={"noise": "exp(gamma=0.9)"}, clipping_config=ASKED)
    fields = {name: v for name, v in made.to_dict().items() if not name.startswith("_")}
    again = DPZeroConfig(**fields)
    assert all(getattr(again, name) == getattr(made, name) for name in NESTED)
    assert json.loads(made.to_json_string())["clipping_config"]["quantile"] == 0.7


def test_hf_argument_parser_takes_json_and_yaml(tmp_path):
    parser = HfArgumentParser(DPZeroConfig)
    words = ["--output_dir", "out", "--target_epsilon", "2", "--use_cpu"]
    (made,) = parser.parse_args_into_dataclasses([*words, "--clipping_config", json.dumps(ASKED)])
    path = tmp_path / "args.json"
    path.write_text(json.dumps({**TRAINING, "clipping_config": ASKED}))
    (read,) = parser.parse_json_file(str(path))
    assert made.clipping_config == read.clipping_config == WANTED
    assert "a number in [0, 1e6]" in " ".join(parser.format_help().split())


@pytest.mark.parametrize(
    "words",
    [
        ["--clipping_config", json.dumps(ASKED)],
        ["--clipping_config.quantile", "0.7", "--clipping_config.groups=3"],
        ["--clipping_config", "{quantile: 0.1, groups: 3}", "--clipping_config.quantile", "7e-1"],
    ],
)
def test_recipes_and_their_overrides_take_single_keys(tmp_path, words):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model_name_or_path: m\ntask: sst2\ntarget_epsilon: 2\noutput_dir: out\nuse_cpu: true\n"
        "clipping_config:\n  stability: 0.5\n  groups: 9\n"
    )
    made = load_recipe(path, words)
    assert made.training.clipping_config == ClippingConfig(quantile=0.7, groups=3, stability=0.5)
    (tmp_path / "again.yaml").write_text(made.to_yaml())
    assert load_recipe(tmp_path / "again.yaml").values == made.values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantil": 0.5}, "clipping_config has no 'quantil'; did you mean 'quantile'"),
        ({"zzz": 0.5}, "clipping_config has no 'zzz'; it has quantile, learning_rate"),
        ("{quantile", "clipping_config='{quantile' is no JSON"),
        (0.5, "clipping_config=0.5 must be a ClippingConfig, a mapping"),
        ([0.5], r"clipping_config=\[0.5\] must be a ClippingConfig, a mapping"),
        ({"quantile": 1.5}, r"clipping_config.quantile=1.5 must be a number in \(0, 1\)"),
        (ClippingConfig(groups=0), "clipping_config.groups=0 must be an integer of at least 1"),
    ],
)
def test_what_is_no_such_setting_is_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, clipping_config=given)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--clip_quantile", "unknown key 'clip_quantile'; did you mean 'clipping_config.quantile'"),
        ("--sampler_key", "unknown key 'sampler_key'; did you mean 'testing.sampler_key'"),
        ("--testing.sampler_ky", "unknown key 'sampler_ky'; did you mean 'sampler_key'"),
        ("--testing", "testing: '0.5' is no mapping; write {name: value}, or testing.NAME"),
    ],
)
def test_a_recipes_unknown_key_names_the_nearest(tmp_path, word, message):
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: m\ntask: sst2\ntarget_epsilon: 2\noutput_dir: out\n")
    with pytest.raises(ValueError, match=message):
        load_recipe(path, [word, "0.5"])
