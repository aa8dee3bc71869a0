"""Recipes with SmolLM2-135M-Instruct: what their headers promise, and two steps of every method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_ggufs import decoder, save_gguf

from hf_dpzero.cli import main
from hf_dpzero.experiments.memory import find_config
from hf_dpzero.recipes.recipe import load_recipe, read_recipe
from scripts.demo_lm import DEFAULT, convert

ROOT = Path(__file__).resolve().parents[2]
FOLDER, DATA = ROOT / "recipes", ROOT / "tests" / "data"
TASKS = ("sst2", "boolq", "squad", "trec")
METHODS = sorted(
    path.stem.removeprefix("_smollm2-")
    for path in FOLDER.glob("methods/_smollm2-*.yaml")
    if not path.stem.startswith("_smollm2-features")
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that came the way of the published one."""
    pytest.importorskip("gguf", reason="needs the extra demo-lm")
    folder = tmp_path_factory.mktemp("smollm2")
    return convert(save_gguf(folder / "tiny.gguf", decoder()), folder / "model")


def test_a_recipe_says_how_to_run_it_and_what_to_expect(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the model is not here
    assert {path.parent.name for path in FOLDER.glob("*/smollm2-dpzero.yaml")} == set(TASKS)
    for task in TASKS:
        path = FOLDER / task / "smollm2-dpzero.yaml"
        text, recipe = path.read_text(encoding="utf-8"), load_recipe(path, {"use_cpu": True})
        assert f"hf-dpzero train recipes/{task}/smollm2-dpzero.yaml\n" in text
        assert f"hf-dpzero evaluate recipes/{task}/smollm2-dpzero.yaml --zero_shot\n" in text
        assert f"python -m scripts.demo_lm {DEFAULT}" in text and "# What to expect: " in text
        assert recipe.model.model_name_or_path == f"./{DEFAULT}"
        assert (recipe.data.task, recipe.training.learning_rate) == (task, None)
        assert (
            "the published shape of" in find_config(recipe.model)[1]
        )  # so `plan` needs no download


def trained(
    recipe: str, task: str, checkpoint: Path, out: Path, **changes: object
) -> tuple[dict, dict]:
    """The report and the results of two steps on a few rows."""
    small: dict[str, object] = {
        "model_name_or_path": checkpoint, "max_steps": 2, "expected_batch_size": 2,
        "max_eval_samples": 4, "max_seq_length": 80, "max_new_tokens": 4, "use_cpu": True,
        "disable_tqdm": True, "output_dir": out, "train_file": DATA / task / "train.jsonl",
        "validation_file": DATA / task / "validation.jsonl", **changes,
    }  # fmt: skip
    assert main.main(["train", recipe, *(f"--{key}={value}" for key, value in small.items())]) == 0
    read = (out / name for name in ("privacy_report.json", "all_results.json"))
    return tuple(json.loads(path.read_text(encoding="utf-8")) for path in read)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_a_tiny_decoder(method, tmp_path, checkpoint):
    """As `compare recipes/sst2/smollm2-dpzero.yaml --methods METHOD` builds it."""
    recipe = tmp_path / "recipe.yaml"
    bases = [FOLDER / f"methods/_smollm2{end}.yaml" for end in ("", f"-{method}")]
    of_task = read_recipe(FOLDER / "sst2/smollm2-dpzero.yaml")
    task = {key: of_task[key] for key in ("task", "template", "label_words", "output_dir")}
    recipe.write_text(json.dumps({"extends": [str(base) for base in bases], **task}))
    report, results = trained(str(recipe), "sst2", checkpoint, tmp_path / "out")
    values = read_recipe(recipe)
    assert report["steps"] == 2 and 0 <= results["eval_accuracy"] <= 1
    if values["method"] == "mezo":
        assert report["epsilon"] == "inf"
    else:
        assert 0 < report["epsilon"] <= values["target_epsilon"] == 2


@pytest.mark.parametrize("task", ["boolq", "squad"])
def test_a_prompt_of_each_kind_trains_a_tiny_decoder(task, tmp_path, checkpoint):
    """Label words after a passage, and generated answers."""
    recipe = str(FOLDER / task / "smollm2-dpzero.yaml")
    report, results = trained(recipe, task, checkpoint, tmp_path / "out")
    assert report["steps"] == 2 and report["target_epsilon"] == 2
    metric = "f1" if task == "squad" else "accuracy"
    assert {f"zero_shot_{metric}", f"eval_{metric}"} <= set(results)


@pytest.mark.parametrize("method", ["dpzero", "dp-adamw", "dp-sgd", "dpgd-0th", "mezo"])
def test_a_head_on_features_of_a_tiny_decoder_trains(method, tmp_path, checkpoint):
    """As `compare recipes/sst2/smollm2-features-dpzero.yaml --methods METHOD` builds it."""
    path, recipe = FOLDER / "sst2/smollm2-features-dpzero.yaml", tmp_path / "recipe.yaml"
    public = tmp_path / "public.jsonl"
    public.write_text("".join(f'{{"sentence": "{a} {b} show"}}\n' for a in "abcd" for b in "efgh"))
    bases = [FOLDER / f"methods/_smollm2-features{end}.yaml" for end in ("", f"-{method}")]
    task = {key: read_recipe(path)[key] for key in ("task", "template", "output_dir")}
    recipe.write_text(json.dumps({"extends": [str(base) for base in bases], **task}))
    tiny = {"features": "1,2", "components": 4, "public_file": public}
    report, results = trained(str(recipe), "sst2", checkpoint, tmp_path / "out", **tiny)
    target = None if method == "mezo" else 2
    assert report["steps"] == 2 and report["target_epsilon"] == target
    assert target is None or 0 < report["epsilon"] <= target
    assert {"zero_shot_accuracy", "eval_accuracy"} <= set(results)
    text = path.read_text(encoding="utf-8")
    assert "hf-dpzero train recipes/sst2/smollm2-features-dpzero.yaml\n" in text
    assert "# What to expect: " in text and "# Hardware: " in text
