"""A recipe's group_robust.column: from its files to the trainer's rows, and to metrics of each group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from row_files import row_files

from hf_dpzero.recipes.build import with_kept_column
from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.tasks import build_task

SHARES = {"north": 0.25, "south": 0.75}


def files(folder: Path, validation_has: bool = True) -> dict[str, str]:
    splits: list[list[dict[str, Any]]] = []
    for split, count in (("train", 40), ("validation", 16)):
        rows: list[dict[str, Any]] = []
        for i in range(count):
            rows.append({"text": f"{split} text {i}", "label": ("bad", "good")[i % 2], "unused": i})
            if split == "train" or validation_has:
                rows[-1]["place"] = "north" if i % 4 == 0 else "south"
        splits.append(rows)
    return row_files(folder, *splits)


def recipe(folder: Path, **settings):
    settings = {
        "task": "text_classification",
        "model_name_or_path": "nothing",
        "target_epsilon": 2,
        "expected_batch_size": 8,
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "group_robust.column": "place",
        "group_robust.shares": SHARES,
        **settings,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(settings))
    return load_recipe(path)


def test_the_column_of_a_file_stays_beside_encoded_rows(tmp_path):
    made = recipe(tmp_path, **files(tmp_path), max_train_samples=30, subset_seed=3)
    assert made.data.keep_column == "place"
    task = build_task(made.data)
    assert task.text_columns == ("text",)
    encoded = {split: rows.select_columns(["label"]) for split, rows in task.splits.items()}
    rows = with_kept_column(encoded, task, made.data.keep_column)
    for split in ("train", "validation"):
        numbers = [int(text.rsplit(" ", 1)[1]) for text in task.splits[split]["text"]]
        places = ["north" if n % 4 == 0 else "south" for n in numbers]
        assert rows[split]["place"][:] == places and "unused" not in task.splits[split].features


def test_the_label_may_be_the_group(tmp_path):
    shares = {"bad": 0.5, "good": 0.5}
    made = recipe(tmp_path, **files(tmp_path), group_robust={"column": "label", "shares": shares})
    task = build_task(made.data)
    encoded = {s: rows.remove_columns(rows.column_names[1:]) for s, rows in task.splits.items()}
    rows = with_kept_column(encoded, task, "label")
    assert rows["train"]["label"][:4] == ["bad", "good", "bad", "good"]


def test_validation_rows_may_have_no_groups_and_training_rows_must(tmp_path):
    made = recipe(tmp_path, **files(tmp_path, validation_has=False))
    task = build_task(made.data)
    encoded = {split: rows.select_columns(["label"]) for split, rows in task.splits.items()}
    rows = with_kept_column(encoded, task, "place")
    assert "place" in rows["train"].features and "place" not in rows["validation"].features
    other = recipe(tmp_path, **files(tmp_path), group_robust={"column": "country"})
    task = build_task(other.data)
    with pytest.raises(ValueError, match="'country' .group_robust.column or unit_column"):
        with_kept_column({"train": task.splits["train"]}, task, "country")


def test_the_plan_of_a_recipe_counts_the_groups(tmp_path):
    made = recipe(tmp_path, **files(tmp_path))
    plan = made.training.plan(40)
    assert plan.groups.shares == (0.25, 0.75) and plan.epsilon(made.training.delta(40)) <= 2
    assert "group_robust:\n  column: place" in made.to_yaml()
    again = tmp_path / "again.yaml"
    again.write_text(made.to_yaml())
    assert load_recipe(again).training.plan(40) == plan
