"""The page of settings has every setting with its cost, and is what the script writes."""

from __future__ import annotations

import types
import typing

import pytest

from hf_dpzero import DPZeroConfig, DPZeroSeq2SeqConfig
from hf_dpzero.recipes.arguments import ModelArguments
from hf_dpzero.recipes.recipe import merged
from hf_dpzero.reporting.public import NESTED_SETTINGS, OWN_SETTINGS
from hf_dpzero.settings.hf_arguments import FIELDS
from hf_dpzero.settings.nested import NESTED
from hf_dpzero.settings.setting import settings_of
from hf_dpzero.tasks.description import DataArguments
from scripts.setting_costs import COSTS, INHERITED
from scripts.settings_reference import PAGE, WORDS, own_fields, page, what_they_do

RECIPES = {"ModelArguments": ModelArguments, "DataArguments": DataArguments}
EVERY = [
    (kind, name, cost) for kind, groups in COSTS.items() for of in groups.values()
    for name, cost in of.items()
]  # fmt: skip
FREE_TEXT = {
    *("model_name_or_path", "model_revision", "task", "dataset_name", "dataset_config_name"),
    *(
        "train_file",
        "validation_file",
        "public_file",
        "text_column",
        "text_pair_column",
        "label_column",
    ),
    *("template", "keep_column", "device_map", "offload_folder", "max_memory"),
}
DESCRIBED = {
    prefix + field.name: (field, described)
    for prefix, kind in {"": DPZeroConfig, **{f"{n}.": k for n, k in NESTED.items()}}.items()
    for field, described in settings_of(kind)
    if field.name not in NESTED or prefix
}
CHOICES = [name for name, (_, d) in DESCRIBED.items() if isinstance(d.allowed, tuple)]
READ_ELSEWHERE = {
    *("schedules.noise", "schedules.clip", "schedules.smoothing", "group_robust.shares"),
    *("hub_strategy", "hub_private_repo"),
}


def test_the_page_of_settings_is_up_to_date():
    """`python -m scripts.settings_reference` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("kind", list(RECIPES))
def test_every_setting_of_recipes_has_a_cost_and_a_purpose(kind):
    """None is explained where it is the default."""
    fields, purposes = own_fields(RECIPES[kind]), what_they_do(RECIPES[kind])
    own = {name: cost for k, name, cost in EVERY if k == kind}
    assert len(fields) > 15 and own.keys() == fields.keys()
    for name, cost in own.items():
        assert purposes[name] and cost.privacy and cost.time, name
        assert bool(cost.none) == (fields[name].default is None), name


def test_every_setting_describes_itself():
    assert len(DESCRIBED) > 50
    for name, (field, described) in DESCRIBED.items():
        assert described.text and described.privacy and described.time, name
        chosen = {"learning_rate", "clip", "clipping", "num_directions"}
        assert described.none or field.default is not None or name in chosen, name
        assert (described.allowed is None) == (name in READ_ELSEWHERE), name


def test_what_a_recipe_may_set_is_there():
    own = {name for name in DESCRIBED if "." not in name} | NESTED.keys()
    transformers = {"learning_rate", "max_grad_norm", "hub_strategy", "hub_private_repo"}
    assert own - transformers | {name for _, name, _ in EVERY} == OWN_SETTINGS - {"extends"}
    assert {name.partition(".")[2] for name in DESCRIBED if "." in name} == NESTED_SETTINGS
    assert not own_fields(DPZeroSeq2SeqConfig), "the page says that it adds none"
    assert INHERITED.keys() <= FIELDS.keys() and len(INHERITED) > 5


def test_every_number_of_recipes_has_a_range():
    seen = 0
    for kind, name, _ in EVERY:
        hint = typing.get_type_hints(RECIPES[kind])[name]
        members = set(typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
        if members & {int, float}:
            assert name in WORDS or name in {"init_seed", "subset_seed"}, name
            seen += 1
        elif str in members:
            assert (name in WORDS) != (name in FREE_TEXT), name
            seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    "name", [n for n, words in WORDS.items() if words.startswith(("ab", "at"))]
)
def test_ranges_of_recipes_hold(name):
    """One below the lowest is refused, the lowest is not."""
    kind = ModelArguments if name in own_fields(ModelArguments) else DataArguments
    fixed: dict = {"model_name_or_path": "m"} if kind is ModelArguments else {"prompt": "causal_lm"}
    if name == "components":  # which are fitted on a file, to a frozen encoder
        fixed |= {"public_file": "public.jsonl", "precompute_features": True}
    lowest = {"above 0": 0.1, "at least 0": 0, "at least 1": 1, "at least 2": 2}[WORDS[name]]
    kind(**fixed, **{name: lowest})
    with pytest.raises(ValueError, match=name):
        kind(**fixed, **{name: lowest - 1})


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_those_that_are_accepted(name, tmp_path):
    settings = {"output_dir": str(tmp_path), "target_epsilon": 2.0, name: "nonsense"}
    with pytest.raises(ValueError, match=f"{name}='nonsense' is not one of"):
        DPZeroConfig(**merged({}, settings), use_cpu=True)
