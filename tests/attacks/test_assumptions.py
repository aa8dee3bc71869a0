"""Attacks on what a claim takes for granted: label names, the constants of the claim, delta in words."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from hf_dpzero.reporting.wording import delta_words
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.description import DataArguments

SECRET = "HIV positive, Jane Roe"


def labelled(folder, train, validation, **settings):
    paths = {}
    for split, labels in (("train", train), ("validation", validation)):
        path = folder / f"{split}.jsonl"
        rows = [json.dumps({"text": f"{split} {i}", "label": v}) for i, v in enumerate(labels)]
        path.write_text("\n".join(rows) + "\n")
        paths[f"{split}_file"] = str(path)
    return build_task(DataArguments(**paths, **settings))


@pytest.mark.parametrize(
    ("train", "validation"),
    [(["a", "b", SECRET], ["a", "b"]), ([0, 1, 7], [0, 1, 1]), ([0, 1, 5000], [0, 1, 1])],
)
def test_a_private_rows_label_name_is_not_published(tmp_path, train, validation, caplog):
    """It went into config.json (id2label) with a warning in the log."""
    with pytest.raises(ValueError, match="set class_names") as refusal:
        labelled(tmp_path, train, validation)
    for said in (str(refusal.value), caplog.text):
        assert SECRET not in said
        assert "7" not in said
        assert "5000" not in said


def test_label_names_are_the_public_rows_or_the_recipes(tmp_path):
    assert labelled(tmp_path, ["b", "a"], ["a", "b", "c"]).label_names == ("a", "b", "c")
    assert labelled(tmp_path, [0, 1], [0, 2]).label_names == ("0", "1", "2")
    assert labelled(tmp_path, [True, True], [False, False]).label_names == ("false", "true")
    names = ["a", "b", "c"]
    task = labelled(tmp_path, ["a", "c"], ["a", "b"], class_names=names)
    assert task.label_names == tuple(names)
    with pytest.raises(ValueError, match="none of the 3 classes") as refusal:
        labelled(tmp_path, ["a", SECRET], ["a", "b"], class_names=names)
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("delta", [1e-5, 0.1 / 67349, 0.1 / 3, 1.0000004e-6, 9.9999999e-8, 0.0])
def test_delta_in_words_is_never_below_delta(delta):
    said = Fraction(delta_words(delta))
    assert said >= Fraction(repr(delta))
    assert said <= Fraction(repr(delta)) * (1 + Fraction(1, 10**5))
