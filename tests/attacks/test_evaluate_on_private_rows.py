"""Attack: have `hf-dpzero evaluate` state a guarantee for figures that were taken on private rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from attacked_runs import recipe_of

from hf_dpzero.cli import main


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, bert_checkpoint: Path) -> Path:
    """A recipe and its finished run beside it; recipes on other rows, and on rows that are gone."""
    folder = tmp_path_factory.mktemp("evaluate")
    made = recipe_of(folder, bert_checkpoint, "other", max_train_samples=16, max_steps=1)
    train = (folder / "train.jsonl").read_text()
    (folder / "train-edited.jsonl").write_text(train + train.splitlines(keepends=True)[0])
    values = yaml.safe_load(made.read_text())
    for name, files in (
        ("another", {"train_file": "validation", "validation_file": "train-edited"}),
        ("without", {"train_file": "not/here"}),
    ):
        paths = {key: f"{folder / file}.jsonl" for key, file in files.items()}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values | paths))
    assert main.main(["train", str(made)]) == 0
    return made


def evaluate(recipe: Path, name: str = "r", **files: Any) -> int:
    folder = recipe.parent
    words = [w for k, v in files.items() for w in (f"--{k}", str(folder / f"{v}.jsonl"))]
    model = ["--model_name_or_path", str(folder / "out")]
    return main.main(["evaluate", str(folder / f"{name}.yaml"), *model, *words, "--json"])


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("r", {"validation_file": "train", "train_file": "validation"}),
        ("r", {"validation_file": "train-edited", "train_file": "validation"}),
        ("another", {}),
    ],
)
def test_rows_that_the_model_was_trained_on_are_refused(
    recipe: Path, name: str, files: dict[str, str], capsys: Any
) -> None:
    assert evaluate(recipe, name, **files) == 2
    assert "rows of train_dataset" in capsys.readouterr().err


def test_other_rows_are_evaluated(recipe: Path, capsys: Any) -> None:
    assert evaluate(recipe) == 0
    capsys.readouterr()
    files = {"train_file": "validation", "validation_file": "other"}
    assert evaluate(recipe, **files) == 0
    assert "differentially private" in json.loads(capsys.readouterr().out)["privacy"]
    assert evaluate(recipe, "without", **files) == 0  # as published, without its rows


def privately(recipe: Path, file: str, *words: str) -> int:
    folder = recipe.parent
    model = ["--model_name_or_path", str(folder / "out"), "--epsilon", "0.5", *words]
    return main.main(
        ["evaluate", str(recipe), "--private_file", str(folder / f"{file}.jsonl"), *model]
    )


@pytest.mark.parametrize(
    ("file", "said"), [("train-edited", "--trained_on"), ("validation", "published without noise")]
)
def test_rows_are_no_private_evaluation_rows_beside_something_else(
    recipe: Path, file: str, said: str, capsys: Any
) -> None:
    assert privately(recipe, file) == 2
    assert said in capsys.readouterr().err
    assert not (recipe.parent / "out" / "private_evaluations.jsonl").exists()
