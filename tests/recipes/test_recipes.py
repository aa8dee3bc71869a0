"""The prompted recipes: what their headers promise, the paper's settings, and two steps of each.

Every one is built and trained as `hf-dpzero train` does, on a tiny model of its architecture with a
tokenizer of its kind (`tiny_language_models`) and rows in the columns of its data set. The recipes that
train a classification head are in test_cli.py, those with SmolLM2 in test_smollm2_recipes.py.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_language_models
import yaml

from hf_dpzero.cli import main
from hf_dpzero.privacy.mechanisms import mechanism_from_dict
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.catalogue import method_of
from hf_dpzero.recipes.recipe import load_recipe, read_recipe
from scripts import recipe_table
from scripts.benchmarks.shapes import build_config

ROOT = Path(__file__).resolve().parents[2]
FOLDER, DATA = ROOT / "recipes", ROOT / "tests" / "data"
NUMBERS = recipe_table.read_reported(FOLDER)

ROBERTA_TASKS = ("sst2", "sst5", "snli", "mnli", "rte", "trec")
ROBERTA_METHODS = ("dpzero", "dp-adamw", "dp-lora", "mezo", "adamw", "lora")
OPT_TASKS = ("sst2", "boolq", "squad", "drop")
OPT_SIZES = ("1.3b", "2.7b", "6.7b", "13b")
GENERATED = ("squad", "drop")
AGGREGATED = {  # K = 64: c, eta, B of Bao et al. 2025 (their README, opt/examples/dpaggzo.sh)
    "sst2/roberta-large-dpzero-k64.yaml": (5, 8e-5, 64),  # those of MNLI: not searched
    "mnli/roberta-large-dpzero-k64.yaml": (5, 8e-5, 64),
    "trec/roberta-large-dpzero-k64.yaml": (5, 8e-5, 64),  # those of MNLI: not searched
    "sst2/opt-1.3b-dpzero-k64.yaml": (25, 5e-6, 64),
    "squad/opt-1.3b-dpzero-k64.yaml": (2, 6e-5, 64),
}
PROMPTED = {
    *AGGREGATED,
    *(f"{t}/roberta-large-{method}.yaml" for t in ROBERTA_TASKS for method in ROBERTA_METHODS),
    *(
        f"{task}/opt-{size}-{method}.yaml"
        for task in OPT_TASKS
        for size in OPT_SIZES
        for method in ("dpzero", "mezo")
    ),
}
TRAINED = {  # one for each architecture, method, precision and kind of answer
    "sst2/roberta-large-dpzero.yaml",
    "sst5/roberta-large-mezo.yaml",
    "snli/roberta-large-dp-adamw.yaml",
    "mnli/roberta-large-dp-lora.yaml",
    "mnli/roberta-large-dpzero-k64.yaml",
    "rte/roberta-large-adamw.yaml",
    "trec/roberta-large-lora.yaml",
    "sst2/opt-1.3b-dpzero.yaml",
    "boolq/opt-6.7b-dpzero.yaml",
    "sst2/opt-13b-mezo.yaml",
    "boolq/opt-2.7b-mezo.yaml",
    "squad/opt-2.7b-dpzero.yaml",
    "drop/opt-13b-dpzero.yaml",
    "squad/opt-6.7b-mezo.yaml",
    "drop/opt-1.3b-mezo.yaml",
}


@cache
def values(name: str) -> dict[str, Any]:
    """A recipe's settings, those of what it extends included."""
    return read_recipe(FOLDER / name)


@cache
def header(name: str) -> str:
    """The comment above a recipe's settings, its lines joined by single spaces."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    lines = re.match(r"(#.*\n)+", text).group().splitlines()
    return " ".join(" ".join(line.lstrip("#") for line in lines).split())


def settings_of(name: str) -> tuple[str, str, str, str]:
    """Architecture, method, precision, kind of answer."""
    recipe = values(name)
    family = recipe_table.model_of(recipe).split("-")[0]
    kind = "generation" if recipe["task"] in GENERATED else "label words"
    return family, method_of(recipe), recipe.get("torch_dtype", "float32"), kind


def test_every_method_of_the_papers_tables_has_a_recipe_and_nothing_else_prompts():
    names = {path.relative_to(FOLDER).as_posix() for path in recipe_table.recipes_in(FOLDER)}
    ours = {name for name in names if name.endswith("/smollm2-dpzero.yaml")}  # no paper's
    assert {name for name in names if "prompt" in values(name)} == PROMPTED | ours
    run = {
        (recipe_table.model_of(values(n)), values(n)["task"], recipe_table.arm_of(values(n)))
        for n in PROMPTED
    }
    in_paper = {(n.model, n.task, n.method) for n in NUMBERS if n.method != "zero-shot"}
    assert in_paper <= run
    assert {model for model, _, _ in run - in_paper} == {"opt-13b"}


def test_the_trained_recipes_are_one_of_each():
    assert TRAINED <= PROMPTED
    assert {settings_of(name) for name in TRAINED} == {settings_of(name) for name in PROMPTED}


def test_a_base_is_no_experiment():
    bases = [path for path in FOLDER.glob("*/_*.yaml") if path.parent.name != "methods"]
    prompted = [path for path in bases if "prompt" in read_recipe(path)]
    assert len(prompted) == len(ROBERTA_TASKS) + len(OPT_TASKS)
    for path in prompted:
        words = " ".join(path.read_text(encoding="utf-8").replace("\n#", " ").split())
        assert "Not an experiment by itself" in words
        assert read_recipe(path)["task"] == path.parent.name
        assert not {"method", "target_epsilon", "output_dir"} & set(read_recipe(path))


def test_the_header_has_the_commands():
    for name in sorted(PROMPTED):
        text, recipe = header(name), values(name)
        path = recipe["model_name_or_path"]
        assert f"hf download {path} " in text
        assert f"hf-dpzero train recipes/{name} " in text
        assert f"hf-dpzero evaluate recipes/{name} --zero_shot" in text
        at_six = f"hf-dpzero train recipes/{name} --target_epsilon 6"
        assert (at_six in text) == ("target_epsilon" in recipe)
        assert {"Hardware", "Time"} <= set(re.findall(r"(\w+):", text))
        assert "What differs from the paper" in text


def test_the_header_quotes_the_papers_numbers_and_no_others():
    for name in sorted(PROMPTED):
        sentence = recipe_table.reported(NUMBERS, values(name))
        if "13b" in name:
            assert sentence == ""
            assert "The paper has no result for this size" in header(name)
        else:
            assert f"The paper reports {sentence}" in header(name)
        percents = re.findall(r"([\d.]+)(?: ± [\d.]+)? %", header(name))
        assert percents == re.findall(r"([\d.]+)(?: ± [\d.]+)? %", sentence)


def test_reported_numbers_are_the_papers():
    """Spot checks: Zhang et al. 2024, Tables 2, 4 and 5; the larger budget is never worse by 0.1."""
    assert len(NUMBERS) == 6 * 10 + 3 * 4 * 4 + 2 * len(AGGREGATED)
    of_64 = values("mnli/roberta-large-dpzero-k64.yaml")
    assert recipe_table.reported(NUMBERS, of_64) == (
        "74.1 % at epsilon = 2, 76.4 % at epsilon = 6, 48.8 % zero-shot (Table 1 of Bao et al. 2025)"
    )
    zero_order = values("sst2/roberta-large-dpzero.yaml")
    assert recipe_table.reported(NUMBERS, zero_order) == (
        "91.8 ± 0.1 % at epsilon = 2, 92.2 ± 0.3 % at epsilon = 6, 79.0 % zero-shot (Table 2)"
    )
    adapters = values("rte/roberta-large-lora.yaml")
    assert recipe_table.reported(NUMBERS, adapters) == (
        "84.2 ± 0.4 % without privacy, 51.4 % zero-shot (Table 2)"
    )
    decoder = values("drop/opt-6.7b-dpzero.yaml")
    assert recipe_table.reported(NUMBERS, decoder) == (
        "27.6 ± 0.7 % at epsilon = 2, 28.4 ± 1.3 % at epsilon = 6, 17.8 % zero-shot (Table 5)"
    )
    budgets = {(n.model, n.task, n.method, n.epsilon): float(n.mean) for n in NUMBERS}
    pairs = [key for key in budgets if key[3] == 2]
    assert len(pairs) == 3 * 6 + 3 * 4 + len(AGGREGATED)
    assert all(budgets[key] < budgets[(*key[:3], 6)] for key in pairs)


@cache
def epsilon_of(noise_multiplier: float, num_examples: int, batch: int, steps: int) -> float:
    """What Poisson-sampled steps with this noise cost at delta = 1e-5 (PLD, add/remove)."""
    mechanism = {
        "name": "dpzero",  # a Gaussian of this multiplier on a clipped sum, as in dp-adamw
        "clip": 1.0,
        "noise_multiplier": noise_multiplier,
        "expected_batch_size": batch,
    }
    return PrivacyPlan(
        sampler=PoissonSampler(num_examples=num_examples, expected_batch_size=batch),
        mechanism=mechanism_from_dict(mechanism),
        steps=steps,
    ).epsilon(delta=1e-5)


@pytest.mark.parametrize("task", [*ROBERTA_TASKS, "opt"])
def test_the_stated_noise_costs_the_stated_budget(task):
    settings = [("methods/_opt-dpzero.yaml", 1_000, 8, 20_000)]
    settings += [("methods/_opt-dpzero-k64.yaml", 1_000, 64, 1_000)]
    pattern = "noise of ([\\d.]+) C "
    if task != "opt":
        pattern = "deviation ([\\d.]+) C/B "
        names = [f"{task}/roberta-large-{m}.yaml" for m in ("dpzero", "dp-adamw", "dp-lora")]
        names += {f"{task}/roberta-large-dpzero-k64.yaml"} & AGGREGATED.keys()
        settings = [
            (n, recipe_table.num_examples(values(n)), 64, values(n)["max_steps"]) for n in names
        ]
    for name, *size in settings:
        stated = re.search(pattern + r"at epsilon = 2 and (?:of )?([\d.]+) C", header(name))
        spent = [epsilon_of(float(noise), *size) for noise in stated.groups()]
        assert spent == pytest.approx([2, 6], rel=0.01)


def test_settings_are_the_papers():
    """Zhang et al. 2024, Tables 8 and 10 and Appendix B.2; texts fit the published models."""
    for name in sorted(PROMPTED - AGGREGATED.keys()):
        recipe = values(name)
        opt, first_order = "opt" in name, recipe["method"] in ("adamw", "dp-adamw")
        assert recipe["prompt"] == ("causal_lm" if opt else "masked_lm")
        assert recipe["expected_batch_size"] == (8 if opt else 64)
        assert recipe["max_steps"] == (20_000 if opt else 1_000 if first_order else 10_000)
        assert recipe["subset_seed"] in ((0, 29, 83) if opt else (42, 13, 21))
        assert recipe["max_eval_samples"] == 1_000
        config = build_config(recipe_table.model_of(recipe))
        spent = 2 if config.model_type == "roberta" else 0  # two of 514 positions are for padding
        assert recipe["max_seq_length"] <= config.max_position_embeddings - spent
        if recipe.get("torch_dtype") == "bfloat16":
            assert recipe["microbatch_size"] == (1 if "target_epsilon" in recipe else 8)
        assert recipe["max_train_samples" if opt else "num_examples_per_class"] == (
            1_000 if opt else 512
        )
        rates = (1e-6, 1e-7) if opt else (5e-5, 1e-4, 5e-4, 1e-3) if first_order else (1e-6,)
        assert recipe["learning_rate"] in rates
        if not first_order:
            assert (recipe["smoothing"], recipe["num_directions"]) == (1e-3, 1)
        if "peft_method" in recipe:
            lora = (recipe["peft_method"], recipe["lora_r"], recipe["lora_alpha"])
            assert lora == ("lora", 8, 16)
        if "clip" in recipe:
            clips = (10, 50, 100, 200) if opt else (50, 100, 150, 200, 250, 300, 400)
            assert recipe["clip"] in ((0.1, 0.5, 1, 10) if first_order else clips)
            assert (recipe["target_epsilon"], recipe["target_delta"]) == (2, 1e-5)
        assert ("clip" in recipe) == (recipe["method"] not in ("mezo", "adamw"))


def test_settings_of_many_directions_are_their_papers():
    """C = K c and rate = eta / K: theirs are of the mean of the K differences, ours of their sum."""
    for name, (clip, rate, batch) in AGGREGATED.items():
        recipe = values(name)
        assert (recipe["num_directions"], recipe["differences"]) == (64, "forward")
        assert recipe["clip"] == 64 * clip
        assert recipe["learning_rate"] == pytest.approx(rate / 64, rel=0.01)
        assert (recipe["expected_batch_size"], recipe["max_steps"]) == (batch, 1_000)
        assert (recipe["target_epsilon"], recipe["target_delta"]) == (2, 1e-5)
        of_one = values(name.replace("-k64", ""))
        changed = {key for key in recipe if recipe[key] != of_one.get(key)}
        assert changed <= {
            *("num_directions", "differences", "clip", "learning_rate", "expected_batch_size"),
            *("max_steps", "eval_steps", "save_steps", "output_dir"),
        }


def test_the_table_is_current():
    """`python -m scripts.recipe_table recipes` writes it."""
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == recipe_table.table(FOLDER)


def rows_of(task: str) -> dict[str, str]:
    """train_file and validation_file in the columns of the Hub's data set."""
    return {
        f"{split}_file": str(DATA / task / f"{split}.jsonl") for split in ("train", "validation")
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Architecture -> folder of a tiny checkpoint with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "roberta": tiny_language_models.save_masked_lm(folder / "roberta"),
        "opt": tiny_language_models.save_causal_lm(folder / "opt"),
    }


def small(name: str, checkpoints: dict[str, Path], out: Path) -> dict[str, Any]:
    """Overrides that make a recipe tiny and leave its method, prompt and privacy as they are."""
    few = {"num_examples_per_class": 1} if "num_examples_per_class" in values(name) else {}
    return {
        "model_name_or_path": str(checkpoints[settings_of(name)[0]]),
        "max_eval_samples": 4,
        "expected_batch_size": 2,
        "max_seq_length": 80,
        "max_new_tokens": 4,
        "max_steps": 2,
        "eval_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "output_dir": str(out),
        **rows_of(values(name)["task"]),
        **few,
    }


def run(name: str, overrides: dict[str, Any]) -> None:
    words = [f"--{key}={value}" for key, value in overrides.items()]
    assert main.main(["train", str(FOLDER / name), *words]) == 0


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_a_prompted_recipe_trains_a_tiny_model(name, tmp_path, checkpoints):
    """The report's budget and the metric before and after are there and make sense."""
    out = tmp_path / "out"
    run(name, small(name, checkpoints, out))
    report = json.loads((out / "privacy_report.json").read_text(encoding="utf-8"))
    recipe = values(name)
    assert report["steps"] == 2
    if "target_epsilon" in recipe:
        assert 0 < report["epsilon"] <= recipe["target_epsilon"]
    else:
        assert report["epsilon"] == "inf"
    results = json.loads((out / "all_results.json").read_text(encoding="utf-8"))
    metric = "f1" if recipe["task"] in GENERATED else "accuracy"
    for split in ("zero_shot", "eval"):
        assert 0 <= results[f"{split}_{metric}"] <= 1
        assert results[f"{split}_loss"] > 0


def test_zero_shot_is_what_training_starts_from(tmp_path, checkpoints, capsys):
    name = "trec/roberta-large-dpzero.yaml"
    overrides = small(name, checkpoints, tmp_path / "out")
    run(name, overrides)
    trained = json.loads((tmp_path / "out" / "all_results.json").read_text(encoding="utf-8"))
    tiny = tmp_path / "tiny.yaml"  # --zero_shot takes no other model than the recipe's own
    tiny.write_text(yaml.safe_dump({"extends": str(FOLDER / name), **overrides}), encoding="utf-8")
    capsys.readouterr()
    assert main.main(["evaluate", str(tiny), "--zero_shot", "--json"]) == 0
    untrained = json.loads(capsys.readouterr().out)
    assert untrained["eval_accuracy"] == trained["zero_shot_accuracy"]
    assert untrained["eval_loss"] == pytest.approx(trained["zero_shot_loss"], rel=1e-5)


@pytest.mark.parametrize("method", ["dpzero", "dp-lora"])
def test_what_is_trained(method, tmp_path, checkpoints):
    """All parameters of the language model, or the adapters and nothing else: there is no head."""
    name = f"sst2/roberta-large-{method}.yaml"
    recipe = load_recipe(FOLDER / name, small(name, checkpoints, tmp_path / "out"))
    model = build_trainer(recipe).model
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    if "lora" in method:  # on queries and values of two layers, an A and a B each
        assert len(trained) == 2 * 2 * 2
        assert all("lora_" in name for name in trained)
    else:
        assert trained == {name for name, _ in model.named_parameters()}
