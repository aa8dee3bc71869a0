"""Where the task file of a recipe is looked for, and what its label words may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hf_dpzero.recipes.recipe import load_recipe
from hf_dpzero.tasks import build_task, description_of

TASK = """fields: text
labels: [{0}]
prompts:
  masked_lm: {{template: '{{text}} {{mask}}', label_words: {1}}}
"""
START = "model_name_or_path: x\ntarget_epsilon: 2\nclip: 1\nexpected_batch_size: 1\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def labels(recipe: Path, *overrides: str) -> tuple[str, ...]:
    description = description_of(load_recipe(recipe, list(overrides)).data.task)
    assert description is not None
    return description.label_names


def test_a_task_file_beside_the_recipe_goes_before_one_in_the_current_folder(folder):
    recipe = write(folder / "sub" / "r.yaml", f"{START}task: mine.yaml\n")
    write(folder / "mine.yaml", TASK.format("here, there", "[a, b]"))
    assert labels(recipe) == ("here", "there")
    write(folder / "sub" / "mine.yaml", TASK.format("in, out", "[a, b]"))
    assert labels(recipe) == ("in", "out")
    assert labels(recipe, "--task", "mine.yaml") == ("here", "there")  # a word of the command line
    kept = load_recipe(Path("sub/r.yaml"))
    assert kept.values["task"] == "sub/mine.yaml"  # as what a run writes down finds it
    assert labels(write(folder / "out" / "recipe.yaml", kept.to_yaml())) == ("in", "out")


def test_a_base_recipe_names_task_files_beside_itself(folder):
    write(folder / "base" / "_b.yaml", f"{START}task: mine.yaml\n")
    write(folder / "base" / "mine.yaml", TASK.format("in, out", "[a, b]"))
    assert labels(write(folder / "sub" / "r.yaml", "extends: ../base/_b.yaml\n")) == ("in", "out")


def test_a_shipped_task_file_is_found_from_any_folder(folder):
    recipe = write(folder / "r.yaml", f"{START}task: configs/tasks/messages.yaml\n")
    assert labels(recipe) == ("routine", "urgent")
    with pytest.raises(FileNotFoundError, match=r"no\.yaml"):
        labels(recipe, "--task", "no.yaml")


def test_label_words_with_braces_are_refused(folder):
    """A row's own choices, as COPA's, are no label words."""
    task = write(folder / "t.yaml", TASK.format("first, second", "['{choice1}', '{choice2}']"))
    rows = "text,label\na,first\nb,second\n"
    values = {
        "task": task.name, "prompt": "masked_lm",
        "train_file": str(write(folder / "train.csv", rows)),
        "validation_file": str(write(folder / "public.csv", rows.replace("a,", "c,"))),
    }  # fmt: skip
    recipe = write(folder / "r.yaml", START + yaml.safe_dump(values))
    with pytest.raises(ValueError, match=r"'\{choice1\}' of first holds a brace.*multiple_choice"):
        build_task(load_recipe(recipe).data)
