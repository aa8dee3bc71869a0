"""Rows held out by a keyed hash: whose side depends on what, that they are found again, refusals."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from hf_dpzero.cli import main
from hf_dpzero.recipes.holdout import _move

KEY = "5c" * 32


def rows(numbers: Any) -> datasets.Dataset:
    made = [{"text": f"film {i}", "label": i % 2, "who": f"person {i // 3}"} for i in numbers]
    return datasets.Dataset.from_list(made)


def sides(data: datasets.Dataset, **settings: Any) -> tuple[list[str], list[str]]:
    """Texts that are trained on, and that are held out."""
    splits = datasets.DatasetDict(train=data)
    _move(splits, **{"key": KEY, "share": 0.3, "unit_column": None, **settings})
    return splits["train"]["text"][:], splits["private"]["text"][:]


def test_a_row_more_changes_its_own_side_alone():
    kept, aside = sides(rows(range(200)))
    assert 30 < len(aside) < 90 and len(kept) + len(aside) == 200
    for missing in (0, 57, 199):
        others = [i for i in range(200) if i != missing]
        text = f"film {missing}"
        found = sides(rows(others))
        assert found == ([t for t in kept if t != text], [t for t in aside if t != text])
        assert sides(rows(reversed(others)))[1] == found[1][::-1]
    again = sides(datasets.concatenate_datasets([rows(range(200)), rows(range(200))]))
    assert again == (kept * 2, aside * 2)  # equal rows stay together
    assert sides(rows(range(200)), key="5d" * 32)[1] != aside


def test_a_larger_share_holds_the_same_rows_out_and_more():
    small, large = (set(sides(rows(range(200)), share=s)[1]) for s in (0.1, 0.4))
    assert 5 < len(small) < 40 and small < large


def test_rows_of_one_unit_never_change_sides():
    kept, aside = sides(rows(range(300)), unit_column="who")
    people = [{int(text.split()[1]) // 3 for text in part} for part in (kept, aside)]
    assert not people[0] & people[1] and len(people[0] | people[1]) == 100
    assert len(aside) == 3 * len(people[1]) > 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, bert_checkpoint: Path) -> Path:
    """A recipe without public rows, half of whose 60 rows were held out; its run lies in out."""
    folder = tmp_path_factory.mktemp("holdout")
    rows(range(60)).to_json(folder / "train.jsonl")
    values: dict[str, Any] = {
        "model_name_or_path": str(bert_checkpoint), "train_file": str(folder / "train.jsonl"),
        "holdout": 0.5, "class_names": ["dull", "fine"], "target_epsilon": 4.0,
        "target_delta": 1e-3, "expected_batch_size": 4, "num_directions": 2, "max_steps": 2,
        "learning_rate": 1e-3, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "output_dir": str(folder / "out"),
    }  # fmt: skip
    (folder / "r.yaml").write_text(yaml.safe_dump(values))
    assert main.main(["train", str(folder / "r.yaml")]) == 0
    return folder


def evaluate(folder: Path, *words: str) -> int:
    recipe, model = str(folder / "r.yaml"), ["--model_name_or_path", str(folder / "out")]
    return main.main(["evaluate", recipe, *model, "--epsilon", "0.5", "--json", *words])


def test_a_run_without_public_rows_is_evaluated_on_what_it_held_out(trained, capsys):
    assert evaluate(trained) == 0
    found = json.loads(capsys.readouterr().out)
    report = json.loads((trained / "out" / "privacy_report.json").read_text())
    assert found["num_rows"] + report["num_examples"] == 60 and 0 < found["num_rows"] < 60
    assert (
        "for each row that was trained on or evaluated and not both, epsilon = "
        in found["together"]
    )
    assert "eval_accuracy" not in json.loads((trained / "out" / "all_results.json").read_text())
    key = trained / "out" / "_private" / "holdout.json"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert main.main(["push", str(trained / "out"), "--repo_id", "me/x", "--dry_run"]) == 0
    shipped = list((trained / "out" / "hub").iterdir())
    assert shipped and not any("holdout" in path.name for path in shipped)
    words = [path.read_text(errors="replace") for path in shipped]
    assert not any(json.loads(key.read_text())["key"] in text for text in words)


def test_held_out_rows_that_are_not_known_again_are_refused(trained, tmp_path, capsys):
    rows(range(1, 61)).to_json(tmp_path / "changed.jsonl")
    assert evaluate(trained, "--train_file", str(tmp_path / "changed.jsonl")) == 2
    assert "or is read otherwise" in capsys.readouterr().err
    key = trained / "out" / "_private" / "holdout.json"
    moved = key.rename(tmp_path / "key.json")
    assert evaluate(trained) == 2
    assert "held no rows out" in capsys.readouterr().err
    moved.rename(key)


def test_people_of_whom_other_rows_were_trained_on_are_refused(trained, capsys):
    assert evaluate(trained, "--unit_column", "who") == 2
    assert "other rows of the same units were trained on" in capsys.readouterr().err


def test_a_run_that_extends_another_holds_the_same_rows_out(trained, tmp_path, capsys):
    words = [str(trained / "r.yaml"), "--extends_run", str(trained / "out")]
    words += ["--model_name_or_path", str(trained / "out"), "--target_epsilon", "8"]
    record = trained / "out" / "private_evaluations.jsonl"
    assert evaluate(trained) == 0
    for target in (tmp_path / "more", trained / "out"):  # what was evaluated is not so anew
        assert main.main(["train", *words, "--output_dir", str(target)]) == 2
        assert "private evaluations on record" in capsys.readouterr().err
    record.rename(tmp_path / "record.jsonl")
    assert main.main(["train", *words, "--output_dir", str(tmp_path / "more")]) == 0
    first, second = (f / "_private" / "holdout.json" for f in (trained / "out", tmp_path / "more"))
    assert second.read_text() == first.read_text()
    first.rename(tmp_path / "key.json")
    assert main.main(["train", *words, "--output_dir", str(tmp_path / "other")]) == 2
    (tmp_path / "key.json").rename(first)
    (tmp_path / "record.jsonl").rename(record)
    assert "held no rows out" in capsys.readouterr().err


def test_what_a_budget_file_paid_for_is_not_evaluated_without_it(trained, tmp_path, capsys):
    folder, file = tmp_path / "paid", str(tmp_path / "paid.budget")
    assert main.main(["budget", file, "--epsilon", "9", "--delta", "1e-3"]) == 0
    words = [str(trained / "r.yaml"), "--budget_file", file]
    assert main.main(["train", *words, "--output_dir", str(folder)]) == 0
    model = ["--model_name_or_path", str(folder), "--epsilon", "0.5"]
    assert main.main(["evaluate", str(trained / "r.yaml"), *model]) == 2
    assert "name the file (--budget_file)" in " ".join(capsys.readouterr().err.split())
    another = str(tmp_path / "another.budget")
    assert main.main(["budget", another, "--epsilon", "9", "--delta", "1e-3"]) == 0
    assert main.main(["evaluate", *words[:2], another, *model]) == 2
    assert "has no entry of the run that made" in " ".join(capsys.readouterr().err.split())
    assert main.main(["evaluate", *words, *model]) == 0


def test_rows_that_a_run_trained_on_are_never_held_out_afterwards(trained, tmp_path, capsys):
    """Another share is refused before it is written down; a run on all rows leaves none to evaluate."""
    folder = tmp_path / "again"
    shutil.copytree(trained / "out", folder)
    (folder / "private_evaluations.jsonl").unlink(missing_ok=True)
    key, again = folder / "_private" / "holdout.json", ["--output_dir", str(folder)]
    before = key.read_text()
    assert main.main(["train", str(trained / "r.yaml"), *again, "--holdout", "0.7"]) == 2
    assert "rows that it trained on would be held out now" in capsys.readouterr().err
    assert key.read_text() == before
    rows(range(60, 70)).to_json(tmp_path / "public.jsonl")
    public = ["--validation_file", str(tmp_path / "public.jsonl"), "--class_names", "null"]
    assert main.main(["train", str(trained / "r.yaml"), *again, "--holdout", "0", *public]) == 0
    capsys.readouterr()
    words = ["--model_name_or_path", str(folder), "--epsilon", "0.5"]
    assert main.main(["evaluate", str(trained / "r.yaml"), *words]) == 2
    assert "is of a run on 60 units of privacy" in capsys.readouterr().err
    for _ in range(2):  # nor does a run begin whose held-out rows could not be evaluated
        assert main.main(["train", str(trained / "r.yaml"), *again]) == 2
        assert "is of a run on 60 units of privacy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--neighboring_relation", "replace_one"), "may change both sides"),
        (("--holdout", "1.5"), "is no share of the rows"),
        (("--holdout", "1e-9"), "leaves none on one side"),
        (("--holdout", "0"), "set holdout: 0.1, and class_names"),
        (("--class_names", "null"), "set class_names to all of them"),
    ],
)
def test_what_cannot_be_held_out_is_refused(trained, tmp_path, words, said, capsys):
    words = ["--output_dir", str(tmp_path / "other"), *words]
    assert main.main(["train", str(trained / "r.yaml"), *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
