"""The page of settings has every setting with its cost, and is what the script writes."""

from __future__ import annotations

import dataclasses
import types
import typing

import pytest

from hf_dpzero import DPZeroConfig, DPZeroSeq2SeqConfig
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.reporting.hub import OWN_SETTINGS
from hf_dpzero.settings.hf_arguments import FIELDS
from hf_dpzero.settings.ranges import RANGES
from hf_dpzero.tasks.arguments import DataArguments
from scripts.setting_costs import COSTS, INHERITED
from scripts.settings_reference import (
    CHOICES,
    CLASSES,
    LOWEST,
    PAGE,
    own_fields,
    page,
    what_they_do,
)

EVERY = [
    (kind, name) for kind, groups in COSTS.items() for costs in groups.values() for name in costs
]
FREE_TEXT = {
    *("trainable", "extends_run", "sampler_key", "model_name_or_path", "model_revision", "task"),
    *("dataset_name", "dataset_config_name", "train_file", "validation_file", "text_column"),
    *("text_pair_column", "label_column", "template"),
    *("noise_schedule", "clip_schedule", "smoothing_schedule"),
    *("group_column", "group_shares", "keep_column"),
    *("device_map", "offload_folder", "max_memory"),
}


def test_the_page_of_settings_is_up_to_date():
    """`python -m scripts.settings_reference` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("kind", list(CLASSES))
def test_every_setting_has_a_cost_and_a_purpose(kind):
    fields = own_fields(CLASSES[kind])
    assert len(fields) > 15
    assert sorted(name for k, name in EVERY if k == kind) == sorted(fields)
    purposes = what_they_do(CLASSES[kind])
    assert all(purposes[name] for name in fields), [n for n in fields if not purposes[n]]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_cost_says_something(kind, name):
    cost = next(costs[name] for costs in COSTS[kind].values() if name in costs)
    assert cost.privacy and cost.time
    default = own_fields(CLASSES[kind])[name].default
    assert bool(cost.none) == (default is None), "None is explained where it is the default"


def test_what_a_recipe_may_set_is_there():
    assert {name for _, name in EVERY} >= OWN_SETTINGS - {"extends"}
    assert not own_fields(DPZeroSeq2SeqConfig), "the page says that it adds none"
    assert INHERITED.keys() <= FIELDS.keys() and len(INHERITED) > 5


def test_every_number_has_a_range_and_every_word_its_choices():
    seen = 0
    for kind, name in EVERY:
        hint = typing.get_type_hints(CLASSES[kind])[name]
        members = set(typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
        if members & {int, float}:
            free = {"insecure_noise_seed", "init_seed", "subset_seed"}
            assert name in RANGES or name in LOWEST or name in free, name
            seen += 1
        elif str in members:
            assert (name in CHOICES) != (name in FREE_TEXT), name
            seen += 1
    assert seen > 50


@pytest.mark.parametrize("name", [n for n, words in LOWEST.items() if words.startswith("a")])
def test_ranges_of_recipes_hold(name):
    """One below the lowest is refused, the lowest is not."""
    if name not in {f.name for c in (ModelArguments, DataArguments) for f in dataclasses.fields(c)}:
        return
    kind = ModelArguments if name in own_fields(ModelArguments) else DataArguments
    fixed = {"model_name_or_path": "m"} if kind is ModelArguments else {"prompt": "causal_lm"}
    lowest = {"above 0": 0.1, "at least 0": 0, "at least 1": 1, "at least 2": 2}[LOWEST[name]]
    kind(**fixed, **{name: lowest})
    with pytest.raises(ValueError, match=name):
        kind(**fixed, **{name: lowest - 1})


@pytest.mark.parametrize("name", list(CHOICES))
def test_choices_are_those_that_are_accepted(name, tmp_path):
    """Every other word is refused, by the configuration or, at the latest, by its plan."""
    with pytest.raises(ValueError, match=r"nonsense"):
        if name == "torch_dtype":
            ModelArguments(model_name_or_path="m", torch_dtype="nonsense")
        else:
            settings = {"output_dir": str(tmp_path), "target_epsilon": 2.0, name: "nonsense"}
            DPZeroConfig(**settings, use_cpu=True).plan(1000)
