"""Attack: names of private labels reach config.json, by a row or by class labels of a training file."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.description import DataArguments

NAME = "HIV positive, Jane Roe"
PUBLIC = ["a", "b", "c"] * 2


def task_of(folder, train: Any, validation: Any, **settings: Any) -> Any:
    files = {}
    for split, rows in (("train", train), ("validation", validation)):
        rows.to_parquet(folder / f"{split}.parquet")
        files[f"{split}_file"] = str(folder / f"{split}.parquet")
    return build_task(DataArguments(**files, **settings))


def rows(labels: list, encoded: bool | list[str] = False, name: str = "t") -> datasets.Dataset:
    """Rows with these labels, perhaps as class labels, whose names may be others."""
    made = datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(len(labels))]})
    made = made.add_column("label", labels)
    if isinstance(encoded, list):
        return made.cast_column("label", datasets.ClassLabel(names=encoded))
    return made.class_encode_column("label") if encoded else made


@pytest.mark.parametrize(
    ("train", "validation", "secret"),
    [
        (rows([*PUBLIC, NAME]), rows(PUBLIC, name="v"), NAME),
        (rows([*PUBLIC, NAME], True), rows(PUBLIC, name="v"), NAME),
        (rows([*PUBLIC, NAME], True), rows(PUBLIC, True, "v"), NAME),
        (rows([0, 1, 7]), rows([0, 1, 1], name="v"), "7"),
        (rows([0, 1, 5000]), rows([0, 1, 1], name="v"), "5000"),
    ],
)
def test_a_private_rows_label_name_is_not_published(tmp_path, train, validation, secret, caplog):
    """It went into config.json (id2label) with a warning in the log."""
    with pytest.raises(ValueError, match="that no validation row has.*set class_names") as refusal:
        task_of(tmp_path, train, validation)
    assert secret not in str(refusal.value) + caplog.text
    if secret == NAME:
        with pytest.raises(ValueError, match="none of the 3 classes") as refusal:
            task_of(tmp_path, train, validation, class_names=["a", "b", "c"])
        assert secret not in str(refusal.value)


@pytest.mark.parametrize(
    ("train", "validation", "settings", "names", "numbers"),
    [
        # the public rows' names, or the recipe's
        (rows(["b", "a"]), rows(["a", "b", "c"], name="v"), {}, "a b c", [1, 0]),
        (rows([0, 1]), rows([0, 2], name="v"), {}, "0 1 2", [0, 1]),
        (rows([True, True]), rows([False, False], name="v"), {}, "false true", [1, 1]),
        (rows(["a", "c"]), rows(["a", "b"], name="v"), {"class_names": PUBLIC[:3]}, "a b c", [0, 2]),
        # a name that the training file declares and no row has
        (rows(PUBLIC, [NAME, "c", "b", "a"]), rows(PUBLIC, name="v"), {}, "a b c", [0, 1]),
        # class labels are read by their own names: the two files may number them differently
        (rows(["a", "b"], ["c", "b", "a"]), rows(["b", "a"], ["b", "a"], "v"), {}, "b a", [1, 0]),
        (rows(PUBLIC, ["c", "b", "a"]), rows(["b", "a"], ["b", "a"], "v"),
         {"class_names": PUBLIC[:3]}, "a b c", [0, 1]),
        # class labels beside texts and numbers
        (rows(["b", "a"] * 3), rows(["a", "b"], ["b", "a"], "v"), {}, "b a", [0, 1]),
        (rows(["b", "a"] * 3, True), rows([0, 1], name="v"), {}, "0 1", [1, 0]),
        # other words for class labels
        (rows(["p", "q"], ["p", "q"]), rows(["q", "p"], ["p", "q"], "v"),
         {"class_names": ["good", "bad"]}, "good bad", [0, 1]),
    ],
)  # fmt: skip
def test_label_names_are_public(tmp_path, train, validation, settings, names, numbers):
    task = task_of(tmp_path, train, validation, **settings)
    assert task.label_names == tuple(names.split())
    assert task.splits["train"]["label"][:2] == numbers


def test_other_words_for_class_labels_need_one_numbering(tmp_path):
    train, other = rows(["p", "q"] * 2, ["p", "q"]), rows(["p", "q"] * 2, ["q", "p"], "v")
    with pytest.raises(ValueError, match="other class labels in the train"):
        task_of(tmp_path, train, other, class_names=["good", "bad"])
