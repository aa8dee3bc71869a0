"""Attack: have `hf-dpzero evaluate` state a guarantee for figures that were taken on private rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_dpzero.cli import main


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, bert_checkpoint: Path) -> Path:
    """A recipe and its finished run beside it."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name in ("train", "validation", "other"):
        rows = [{"text": f"{name} film {i}", "label": i % 2} for i in range(40)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
        (folder / f"{name}-edited.jsonl").write_text(text + json.dumps(rows[0]) + "\n")
    values = {
        "model_name_or_path": str(bert_checkpoint), "train_file": str(folder / "train.jsonl"),
        "validation_file": str(folder / "validation.jsonl"), "max_train_samples": 16,
        "max_seq_length": 16, "target_epsilon": 4.0, "target_delta": 1e-3, "expected_batch_size": 4,
        "max_steps": 1, "use_cpu": True, "save_strategy": "no", "output_dir": str(folder / "out"),
    }  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump(values))
    elsewhere = {name: f"{folder / file}.jsonl" for name, file in
                 (("train_file", "validation"), ("validation_file", "train-edited"))}  # fmt: skip
    (folder / "another.yaml").write_text(yaml.safe_dump({**values, **elsewhere}))
    assert main.main(["train", str(folder / "r.yaml")]) == 0
    return folder / "r.yaml"


def evaluate(recipe: Path, name: str = "r.yaml", **files: Any) -> int:
    folder = recipe.parent
    words = [w for k, v in files.items() for w in (f"--{k}", str(folder / f"{v}.jsonl"))]
    model = ["--model_name_or_path", str(folder / "out")]
    return main.main(["evaluate", str(folder / name), *model, *words, "--json"])


@pytest.mark.parametrize("rows", ["train", "train-edited"])
def test_swapped_files_are_refused(recipe: Path, rows: str, capsys: Any) -> None:
    assert evaluate(recipe, validation_file=rows, train_file="validation") == 2
    assert "rows of train_dataset" in capsys.readouterr().err


def test_another_recipe_on_the_rows_that_the_model_was_trained_on(
    recipe: Path, capsys: Any
) -> None:
    assert evaluate(recipe, "another.yaml") == 2
    assert "rows of train_dataset" in capsys.readouterr().err


def test_other_rows_are_evaluated(recipe: Path, capsys: Any) -> None:
    assert evaluate(recipe) == 0
    capsys.readouterr()
    files = {"train_file": "validation", "validation_file": "other"}
    assert evaluate(recipe, **files) == 0
    assert "differentially private" in json.loads(capsys.readouterr().out)["privacy"]
    without = yaml.safe_load(recipe.read_text()) | {"train_file": "not/here.jsonl"}
    (recipe.parent / "without.yaml").write_text(yaml.safe_dump(without))
    assert evaluate(recipe, "without.yaml", **files) == 0  # as published, without its rows
