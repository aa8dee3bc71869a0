"""Attack: names of private labels reach config.json through the class labels of a training file."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.description import DataArguments

NAME = "HIV positive, Jane Roe"
PUBLIC = ["a", "b", "c"] * 2


def task_of(folder, train: Any, validation: Any, **settings: Any) -> Any:
    for split, rows in (("train", train), ("validation", validation)):
        rows.to_parquet(folder / f"{split}.parquet")
    files = {f"{split}_file": str(folder / f"{split}.parquet") for split in ("train", "validation")}
    return build_task(DataArguments(**files, **settings))


def rows(labels: list, encoded: bool | list[str], name: str = "t") -> datasets.Dataset:
    made = datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(len(labels))]})
    made = made.add_column("label", labels)
    if isinstance(encoded, list):
        return made.cast_column("label", datasets.ClassLabel(names=encoded))
    return made.class_encode_column("label") if encoded else made


@pytest.mark.parametrize("encoded", [False, True], ids=["text", "class labels"])
def test_names_of_a_training_file_are_not_published(tmp_path, encoded):
    train, validation = rows([*PUBLIC, NAME], True), rows(PUBLIC, encoded, "v")
    with pytest.raises(ValueError, match="that no validation row has") as refusal:
        task_of(tmp_path, train, validation)
    assert NAME not in str(refusal.value)
    with pytest.raises(ValueError, match="none of the 3 classes") as refusal:
        task_of(tmp_path, train, validation, class_names=["a", "b", "c"])
    assert NAME not in str(refusal.value)
    named = rows(PUBLIC, [NAME, "c", "b", "a"])  # no row has the private name
    assert task_of(tmp_path, named, validation).label_names == ("a", "b", "c")


@pytest.mark.parametrize("names", [None, ["a", "b", "c"]])
def test_class_labels_are_read_by_their_own_names(tmp_path, names):
    """The two files may number them differently."""
    train, validation = rows(PUBLIC, ["c", "b", "a"]), rows(["b", "a"], ["b", "a"], "v")
    settings = {} if names is None else {"class_names": names}
    if names is None:  # "c" is none of the validation rows
        train = rows(["a", "b"] * 3, ["c", "b", "a"])
    task = task_of(tmp_path, train, validation, **settings)
    assert task.label_names == (("b", "a") if names is None else ("a", "b", "c"))
    said = {s: [task.label_names[i] for i in task.splits[s]["label"]] for s in task.splits}
    assert said == {"train": ["a", "b"] * 3 if names is None else PUBLIC, "validation": ["b", "a"]}


def test_class_labels_beside_text_and_integers(tmp_path):
    task = task_of(tmp_path, rows(["b", "a"] * 3, False), rows(["a", "b"], ["b", "a"], "v"))
    assert task.label_names == ("b", "a") and task.splits["train"]["label"][:2] == [0, 1]
    task = task_of(tmp_path, rows(["b", "a"] * 3, True), rows([0, 1], False, "v"))
    assert task.label_names == ("0", "1") and task.splits["train"]["label"][:2] == [1, 0]


def test_other_words_for_class_labels_need_one_numbering(tmp_path):
    words = {"class_names": ["good", "bad"]}
    train, same, other = (
        rows(["p", "q"] * 2, names, str(number))
        for number, names in enumerate((["p", "q"], ["p", "q"], ["q", "p"]))
    )
    assert task_of(tmp_path, train, same, **words).splits["train"]["label"][:2] == [0, 1]
    with pytest.raises(ValueError, match="other class labels in the train"):
        task_of(tmp_path, train, other, **words)
