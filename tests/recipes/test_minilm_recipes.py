"""Recipes with all-MiniLM-L6-v2: what their headers promise, and two steps of every method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from row_files import row_files
from tiny_language_models import save_encoder

from hf_dpzero.cli import main
from hf_dpzero.recipes.build import build_trainer
from hf_dpzero.recipes.recipe import load_recipe, read_recipe
from hf_dpzero.tasks import description_of

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
TASKS = ("sst2", "sst5", "trec", "rte", "snli")
METHODS = sorted(FOLDER.glob("methods/_minilm-*.yaml"))
RECIPES = [FOLDER / "quickstart.yaml", *sorted(FOLDER.glob("*/minilm-*.yaml"))]
NOT_PRIVATE = ("mezo", "sgd", "adamw")


def test_a_recipe_says_how_to_run_it_and_what_to_expect():
    names = {path.relative_to(FOLDER).as_posix() for path in RECIPES}
    both = {f"{task}/minilm-{few}dpzero.yaml" for task in TASKS for few in ("", "fewshot-")}
    assert names >= both | {"quickstart.yaml"}
    for path in RECIPES:
        text = path.read_text(encoding="utf-8")
        assert f"hf-dpzero train recipes/{path.relative_to(FOLDER).as_posix()}" in text
        assert text.startswith("#") and "xpect" in text, path
        recipe = load_recipe(path, {"use_cpu": True})
        assert (recipe.training.target_epsilon is None) == (recipe.training.method in NOT_PRIVATE)
        few = recipe.data.num_examples_per_class
        assert few == (512 if "fewshot" in path.stem else None)


def test_a_base_is_a_model_and_data_without_a_method():
    for task in TASKS:
        path = FOLDER / task / "_minilm.yaml"
        words = path.read_text(encoding="utf-8").replace("\n# ", " ")
        assert "Not an experiment by itself" in words
        assert not {"method", "target_epsilon", "output_dir"} & set(read_recipe(path))
        assert read_recipe(path)["trainable"] == "^classifier"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def rows_of(task: str, folder: Path) -> dict[str, str]:
    """train_file and validation_file with the columns and all labels of a task."""
    description = description_of(task)
    labels, texts = len(description.label_names), ("it was good", "bad film", "awful it", "great")
    columns = [names[0] for names in description.fields.values()]
    rows = [
        {**{c: texts[(i + k) % 4] for k, c in enumerate(columns)}, "label": i % labels}
        for i in range(24 * labels)
    ]
    return row_files(folder, rows)


def tiny(path: Path, folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Settings that make a recipe small and leave its method and privacy as they are."""
    values = read_recipe(path)
    files = {} if values["task"] == "quickstart" else rows_of(values["task"], folder)
    few = {"num_examples_per_class": 24} if "num_examples_per_class" in values else {}
    settings = {
        "model_name_or_path": str(checkpoint),
        "max_train_samples": 48,
        "max_eval_samples": 8,
        "expected_batch_size": 4,
        "max_seq_length": 16,
        "max_steps": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        "output_dir": str(folder / "out"),
    }
    return settings | files | few


@pytest.mark.parametrize("task", TASKS)
def test_each_task_trains_the_head_alone(task, tmp_path, checkpoint):
    path = FOLDER / task / "minilm-fewshot-dpzero.yaml"
    trainer = build_trainer(load_recipe(path, tiny(path, tmp_path, checkpoint)))
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained == ["classifier.weight", "classifier.bias"]


@pytest.mark.parametrize(
    "method", [path.stem.removeprefix("_minilm-") for path in METHODS] + ["quickstart"]
)
def test_every_method_trains_a_tiny_model(method, tmp_path, checkpoint):
    path = tmp_path / "recipe.yaml"
    bases = [FOLDER / "trec/_minilm.yaml", FOLDER / f"methods/_minilm-{method}.yaml"]
    if method == "quickstart":
        bases = [FOLDER / "quickstart.yaml"]
    path.write_text(f"extends: [{', '.join(map(str, bases))}]\n", encoding="utf-8")
    settings = tiny(path, tmp_path, checkpoint)
    assert main.main(["train", str(path), *(f"--{k}={v}" for k, v in settings.items())]) == 0
    values = read_recipe(path)
    report = json.loads((tmp_path / "out" / "privacy_report.json").read_text(encoding="utf-8"))
    assert report["steps"] == 2
    if values["method"] in NOT_PRIVATE:
        assert report["epsilon"] == "inf"
    else:
        assert 0 < report["epsilon"] <= values["target_epsilon"]
    if "num_directions" in values:
        assert report["num_directions"] == values["num_directions"]
