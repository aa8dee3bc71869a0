"""Tasks: deterministic data, subsets by seed, rows that arrive as they left, clear refusals."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_files import row_files
from tiny_language_models import word_tokenizer
from transformers import EvalPrediction

from hf_dpzero.shipped import shipped_folder
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.description import DataArguments, HubSource
from hf_dpzero.tasks.rows import load_splits, subset
from hf_dpzero.values import parse_yaml

DATA = Path(__file__).resolve().parents[1] / "data"


def files(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> DataArguments:
    """All rows are for training, the first four also public."""
    return DataArguments(**row_files(folder, rows, rows[:4]), **settings)


ROWS = [{"text": "very " * (i % 5) + "good film", "label": i % 3} for i in range(30)]


def test_quickstart_is_the_same_distinct_and_balanced():
    messages = build_task(DataArguments(task="quickstart")).splits
    # The published figures are for exactly these rows.
    digests = {
        split: hashlib.sha256(json.dumps(r[:]).encode()).hexdigest()[:8]
        for split, r in messages.items()
    }
    assert digests == {"train": "8c55ece1", "validation": "bff803a7"}
    assert [len(rows) for rows in messages.values()] == [8192, 1024]
    assert all(np.mean(rows["label"][:]) == 0.5 for rows in messages.values())
    texts = [text for rows in messages.values() for text in rows["text"][:]]
    assert len(set(texts)) == len(texts)
    assert all(text[0].isupper() and text[-1] in ".?" for text in texts)
    assert not any("{" in text or "  " in text for text in texts)
    task = build_task(DataArguments(task="quickstart", prompt="masked_lm", max_train_samples=3))
    row = task.splits["train"][0]
    assert task.example(row) == f"{row['text']} Is this urgent? {('No', 'Yes')[row['label']]}"
    assert task.label_names == ("routine", "urgent")
    with pytest.raises(ValueError, match=r"train_file='x.jsonl'.*text_classification"):
        build_task(DataArguments(task="quickstart", train_file="x.jsonl"))


def test_quickstart_splits_share_no_filling():
    parts = parse_yaml((shipped_folder("configs") / "quickstart_messages.yaml").read_text("utf-8"))
    train, validation = parts["train"], parts["validation"]
    assert set(train) == set(validation) > {"openings", "people"}
    for name in set(train) - {"situations"}:
        assert train[name] and validation[name] and not set(train[name]) & set(validation[name])
    assert (
        train["situations"]
        < validation["situations"]
        == len(parts["urgent"])
        == len(parts["routine"])
    )


def test_csv_pairs_and_named_columns(tmp_path):
    for name, end in (("t.csv", "\n"), ("v.csv", "\n\n")):
        (tmp_path / name).write_text("a,b,gold,extra\ngood,bad,1,7\nbad,film,0,8" + end)
    paths = {"train_file": str(tmp_path / "t.csv"), "validation_file": str(tmp_path / "v.csv")}
    columns = {"text_column": "a", "text_pair_column": "b", "label_column": "gold"}
    task = build_task(DataArguments(**paths, **columns))
    assert task.text_columns == ("a", "b")
    encoded = task.tokenize(word_tokenizer())["train"]
    assert encoded["input_ids"][:] == [[2, 3], [3, 4]]
    assert encoded["labels"][:] == [1, 0]


NAMES = {
    "sst2": ("negative", "positive"),
    "sst5": ("very negative", "negative", "neutral", "positive", "very positive"),
    "trec": ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
    "rte": ("entailment", "not_entailment"),
    "snli": ("entailment", "neutral", "contradiction"),
    "mnli": ("entailment", "neutral", "contradiction"),
}


@pytest.mark.parametrize(
    ("task", "columns", "label"),
    [
        ("sst5", ("text",), "label"),  # as SetFit/sst5 has it
        ("trec", ("text",), "coarse_label"),  # as CogComp/trec has it
        ("rte", ("sentence1", "sentence2"), "label"),  # as GLUE has it
        ("mnli", ("premise", "hypothesis"), "label"),
    ],
)
def test_a_task_knows_its_columns_and_labels(tmp_path, task, columns, label):
    size = len(NAMES[task])
    rows = [
        {**{c: f"{c} {i}" for c in columns}, label: i % size, "fine_label": "x", "idx": i}
        for i in range(2 * size)
    ]
    loaded = build_task(files(tmp_path, rows, task=task))
    assert (loaded.name, loaded.text_columns) == (task, columns)
    assert loaded.splits["train"].column_names == [*columns, "label"]
    assert loaded.splits["train"]["label"][:] == [row[label] for row in rows]
    assert loaded.splits["train"][columns[-1]][1] == f"{columns[-1]} 1"


def test_settings_name_other_columns(tmp_path):
    rows = [{"a": "1", "b": "2", "premise": "no", "hypothesis": "no", "gold": i} for i in (0, 1)]
    given = {"task": "rte", "text_pair_column": "a", "label_column": "gold"}
    named = files(tmp_path, rows, **given, text_column="b")
    assert build_task(named).text_columns == ("b", "a")
    assert build_task(files(tmp_path, rows, **given)).text_columns == ("premise", "a")


@pytest.mark.parametrize("task", NAMES)
def test_rows_in_the_columns_of_the_data_sets(task):
    paths = {f"{s}_file": str(DATA / task / f"{s}.jsonl") for s in ("train", "validation")}
    loaded = build_task(DataArguments(task=task, **paths))
    assert loaded.label_names == NAMES[task]
    for split, rows in loaded.splits.items():
        lines = Path(paths[f"{split}_file"]).read_text(encoding="utf-8").splitlines()
        raw = [row for row in map(json.loads, lines) if row["label"] != -1]
        assert rows["label"][:] == [row["label"] for row in raw]
        names = [loaded.label_names[row["label"]] for row in raw]
        assert [row.get("label_name", name) for row, name in zip(raw, names)] == names
        for column in loaded.text_columns:
            assert rows[column][:] == [row[column] for row in raw]


def test_snli_leaves_out_rows_without_a_label(tmp_path):
    """Other tasks refuse them, see below."""
    rows = [{"premise": f"p{i}", "hypothesis": "h", "label": v} for i, v in enumerate(UNLABELLED)]
    splits = build_task(files(tmp_path, rows, task="snli")).splits
    assert splits["train"]["label"][:] == [0, 1, 2, 0]
    assert splits["train"]["premise"][:] == ["p0", "p2", "p3", "p5"]
    assert splits["validation"]["label"][:] == [0, 1, 2]  # of the first four rows


@pytest.mark.parametrize(
    ("task", "settings", "expected"),
    [
        ("trec", {}, ("CogComp/trec", None, "refs/convert/parquet")),
        ("mnli", {}, ("nyu-mll/glue", "mnli", None)),
        ("rte", {"dataset_config_name": "wnli"}, ("nyu-mll/glue", "wnli", None)),
        ("trec", {"dataset_name": "my/trec"}, ("my/trec", None, None)),
    ],
)
def test_where_rows_come_from_on_the_hub(monkeypatch, task, settings, expected):
    """Offline: the call to `datasets` is recorded, and answered with a small set of rows."""
    calls = []
    column = "sentence" if task.startswith("sst") else "text"
    row = {column: "a", "premise": "a", "hypothesis": "b", "label": 0}
    train = datasets.Dataset.from_list([row] * 3)

    def load_dataset(name: str, config: str | None, revision: str | None) -> datasets.DatasetDict:
        calls.append((name, config, revision))
        held_out = {"trec": "test", "mnli": "validation_matched"}.get(task, "validation")
        return datasets.DatasetDict({"train": train, held_out: train.select([0]), "other": train})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    splits = build_task(DataArguments(task=task, **settings)).splits
    assert calls == [expected]
    assert (len(splits["train"]), len(splits["validation"])) == (3, 1)


def test_subsets_are_drawn_by_seed_and_not_by_position(tmp_path):
    def chosen(seed: int) -> list[str]:
        rows = [{"text": str(i), "label": i % 2} for i in range(100)]
        data = files(tmp_path, rows, max_train_samples=20, subset_seed=seed)
        return build_task(data).splits["train"]["text"][:]

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert chosen(1) != [str(i) for i in range(20)]
    assert len(set(chosen(1))) == 20


ONE_ROW = st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 3))
FEATURES = datasets.Features(
    {
        "text": datasets.Value("string"),
        "label": datasets.Value("int64"),
        "who": datasets.Value("int64"),
    }
)


def drawn(rows: list[tuple[str, int, int]], **settings: Any) -> Counter[tuple[str, int, int]]:
    """The rows that are drawn of (text, label, who), by how often."""
    columns = dict(zip(FEATURES, zip(*rows, strict=True), strict=True))
    train = datasets.Dataset.from_dict(columns, features=FEATURES)
    found = subset(datasets.DatasetDict(train=train), DataArguments(**settings))["train"]
    return Counter(zip(*(found[name][:] for name in FEATURES), strict=True))


def moved(one: Counter[Any], other: Counter[Any]) -> int:
    """Rows that are replaced, or more or less, from one draw to the other."""
    return max((one - other).total(), (other - one).total())


@given(st.lists(ONE_ROW, min_size=2, max_size=14), ONE_ROW, st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_more_or_less_in_the_file_replaces_at_most_one_of_the_draw(rows, new, size, data):
    """Also among equal rows, of which there are many here."""
    place = data.draw(st.integers(0, len(rows) - 1))
    added, removed = [*rows[:place], new, *rows[place:]], [*rows[:place], *rows[place + 1 :]]
    replaced = [*rows[:place], new, *rows[place + 1 :]]
    few = {"num_examples_per_class": size, "allow_fewer_per_class": True}
    two = 1 + (new[1] != rows[place][1])  # a row of another class is two of them
    most = {"max_train_samples": size, "subset_seed": data.draw(st.integers(0, 3))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes with fewer rows
        for how, both in ((most, 1), (few, two), (few | most, two)):
            whole = drawn(rows, **how)
            assert whole == drawn(rows[::-1], **how) and not whole - Counter(rows)
            assert moved(whole, drawn(added, **how)) <= 1
            assert moved(whole, drawn(removed, **how)) <= 1
            assert moved(whole, drawn(replaced, **how)) <= both
        assert drawn(rows, **most).total() == min(size, len(rows))
        of_class = Counter(label for _, label, _ in drawn(rows, **few).elements())
    sizes = Counter(label for _, label, _ in rows)
    assert of_class == {label: min(size, count) for label, count in sizes.items()}


@given(st.lists(ONE_ROW, min_size=2, max_size=20), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_units_are_drawn_whole_and_one_less_replaces_at_most_one(rows, gone, size):
    def people(rows: list[tuple[str, int, int]]) -> Counter[int]:
        draw = drawn(rows, max_train_samples=size, whole_units=True, keep_column="who")
        kept = {who for _, _, who in draw}
        assert draw == Counter(row for row in rows if row[2] in kept)
        assert len(kept) == min(size, len({who for _, _, who in rows}))
        return Counter(kept)

    others = [row for row in rows if row[2] != gone]
    assert not others or moved(people(rows), people(others)) <= 1


def test_copies_of_a_row_are_drawn_apart():
    """Else a text that many rows have is drawn with all of them, or not at all."""
    rows = [("a", 0, 0)] * 50 + [("b", 0, i) for i in range(50)]
    for seed in range(5):  # of 100 without replacement: mean 25, deviation 2.5
        assert 12 < drawn(rows, max_train_samples=50, subset_seed=seed)["a", 0, 0] < 38


def test_few_of_each_class_are_not_drawn_of_units():
    with pytest.raises(
        ValueError, match="num_examples_per_class=2 with unit_column.*max_train_sam"
    ):
        DataArguments(num_examples_per_class=2, whole_units=True)


def test_few_shot(tmp_path):
    rows = [{"text": str(i), "label": name} for i, name in enumerate("abcbbbbbac")]
    two = build_task(files(tmp_path, rows, num_examples_per_class=2, max_eval_samples=3)).splits
    assert np.bincount(two["train"]["label"][:]).tolist() == [2, 2, 2]
    assert len(two["validation"]) == 3
    data = files(tmp_path, rows, num_examples_per_class=3)
    with pytest.raises(
        ValueError,
        match=r"=3, but label a has fewer training rows, label c has fewer .*; lower.*allow_fewer",
    ):
        build_task(data)
    with pytest.warns(
        UserWarning, match=r"=3, but label a has fewer training rows, label c has fewer .*all"
    ):
        train = build_task(dataclasses.replace(data, allow_fewer_per_class=True)).splits["train"]
    assert np.bincount(train["label"][:]).tolist() == [2, 3, 2]  # n = 7 is what is accounted
    assert len(set(train["text"][:])) == 7


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokenize_and_collate(tmp_path, side):
    task = build_task(files(tmp_path, ROWS, max_seq_length=4))
    words = word_tokenizer(side)
    rows = task.tokenize(words)["train"]
    assert set(rows.column_names) >= {"input_ids", "attention_mask", "labels"}
    assert "text" not in rows.column_names
    assert max(map(len, rows["input_ids"][:])) == 4
    batch = task.collator(words)([rows[i] for i in range(3)])
    assert batch["input_ids"].shape == (3, 8)
    assert batch["labels"].tolist() == [0, 1, 2]
    assert batch["attention_mask"].sum(dim=1).tolist() == [2, 3, 4]
    assert batch["attention_mask"][0, 0 if side == "right" else -1] == 1
    stored = [{"sentence_embedding": torch.ones(3) * i, "labels": i} for i in range(2)]
    assert task.collator(words)(stored)["sentence_embedding"].tolist() == [[0.0] * 3, [1.0] * 3]
    logits = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    prediction = EvalPrediction(predictions=logits, label_ids=np.array([0, 1, 1, 0]))
    assert task.metrics(words)(prediction) == {"accuracy": 0.75}


PAIR = {"premise": "a", "hypothesis": "b"}
UNLABELLED = (0, -1, 1, 2, -1, 0)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"text": "a"}], {}, r"no column 'label' \(they have text\); set label_column"),
        ([{"words": "a", "label": 1}], {}, r"no column 'text'.*set text_column"),
        ([{"text": "a", "label": -1}], {}, r"row 1 of the train rows .*negative integer"),
        ([{"text": "a", "label": 0.5}], {}, r"train rows holds float64 values; class labels are"),
        ([{"text": "a", "label": [0]}], {}, r"holds (List|Sequence) values; class labels are"),
        ([{"text": "a", "label": 0}], {}, r"holds 1 classes"),
        ([{"text": "a", "label": 10**15}], {}, r"holds more than 1000 classes"),
        ([{"text": "a", "label": 1}, {"text": "b", "label": None}], {}, r"empty in some rows"),
        ([{"premise": "a", "label": 0}], {"task": "rte"}, r"no column 'hypothesis'.*text_pair_col"),
        (
            [{"sentence": "fine", "label": 0}],
            {"task": "sst2", "text_pair_column": "more"},
            r"no column 'more'.*set text_pair_column",
        ),
        (
            [{**PAIR, "label": label} for label in UNLABELLED],
            {"task": "mnli"},
            "row 2 of the train rows .*a negative integer",
        ),
        (
            [{"sentence": "a", "label": 0}],
            {"task": "sst2", "class_names": ["a", "b"]},
            r"task 'sst2' has labels of its own .*leave class_names",
        ),
    ],
)
def test_refused_rows(tmp_path, rows, settings, message):
    with pytest.raises(ValueError, match=message):
        build_task(files(tmp_path, rows * 4, **settings))


SECRET = "confidential diagnosis"


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        (
            ("negative", "positive", "negative", "positive", "negative", SECRET),
            {"task": "sst2"},
            r"row 6 of the train rows .* a text of 22 characters in column 'label'",
        ),
        (
            ("a", "b", "a", "b", "a", SECRET),
            {"class_names": ["a", "b"]},
            r"row 6 of the train rows .* a text of 22 characters .*set class_names to all labels",
        ),
        ((0, 1, 0, 1, 941_207), {"class_names": ["a", "b"]}, r"row 5 .* an integer in column"),
        ((0, 1, 941_207), {"task": "sst2"}, r"row 3 .* none of the 2 classes \(negative, positive"),
        ((0, 1, 0, 1, 941_207), {}, r"labels that no validation row has.*set class_names"),
        ((0, 1, 0, 1, 941_207), {"task": "snli"}, r"row 5 of the labelled train rows"),
        ((0.0, 1.0, 0.0, 1.0, 0.125), {"task": "sst2"}, r"row 5 .* a float in column 'label'"),
        (
            (SECRET, "b", SECRET, "b"),
            {"prompt": "causal_lm", "template": "{text} {answer}", "label_words": ["x", "y", "z"]},
            r"label_words has 3 words, and column 'label' holds 2 labels; .*set class_names",
        ),
    ],
)
def test_refusals_do_not_quote_rows(tmp_path, labels, settings, message):
    """What is refused is written into tables and logs that may be published."""
    columns = ("text", "sentence", "premise", "hypothesis")
    rows = [{**dict.fromkeys(columns, SECRET), "label": label} for label in labels]
    with pytest.raises(ValueError, match=message) as refused:
        build_task(files(tmp_path, rows, **settings))
    for quoted in (SECRET, SECRET[:8], "941207", "0.125"):
        assert quoted not in str(refused.value)


def labelled(folder: Path, train: list[Any], validation: list[Any], **settings: Any) -> Any:
    """The task of rows with these labels."""
    rows = [[{"text": "x", "label": label} for label in split] for split in (train, validation)]
    return build_task(DataArguments(**row_files(folder, *rows), **settings))


def test_labels_are_integers_whole_floats_or_names(tmp_path):
    task = build_task(files(tmp_path, ROWS))
    assert (task.name, task.label_names) == ("text_classification", ("0", "1", "2"))
    assert task.splits["train"]["label"][:] == [row["label"] for row in ROWS]
    assert len(task.splits["validation"]) == 4
    task = labelled(tmp_path, ["spam", "ham", "spam"], ["spam", "ham"])
    assert (task.label_names, task.splits["train"]["label"][:]) == (("ham", "spam"), [1, 0, 1])
    names = ["spam", "ham", "other"]  # not sorted, and "other" is in no row
    task = labelled(tmp_path, ["ham", "spam", "ham"], ["spam", "ham"], class_names=names)
    assert (task.label_names, task.splits["train"]["label"][:]) == (tuple(names), [1, 0, 1])
    with pytest.raises(ValueError, match=r"'label' holds integers and text"):
        labelled(tmp_path, [0, 1], [SECRET, "b"])
    rows = [{"sentence": "a", "label": label} for label in (0.0, 1.0, 1.0, 0.0)]
    splits = build_task(files(tmp_path, rows, task="sst2")).splits
    assert splits["train"]["label"][:] == [0, 1, 1, 0]
    rows = [{"text": "x", "label": name} for name in reversed(NAMES["trec"])]
    splits = build_task(files(tmp_path, rows, task="trec")).splits
    assert splits["train"]["label"][:] == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("train", "validation", "refused"),
    [
        (["a", "b", "a"], ["a", "b", "c"], False),  # every name is a public row's
        (["a", "b", SECRET], ["a", "b"], True),
        ([0, 1, 1], [0, 1, 2], False),
        ([0, 1, 2], [0, 1, 1], True),
        ([True, True], [False, False], False),  # false and true, whatever is in the rows
    ],
)
def test_names_that_only_private_rows_have_are_refused(tmp_path, train, validation, refused):
    """They would be shipped in config.json; the recipe's class_names make them public."""
    if not refused:
        task = labelled(tmp_path, train, validation)
        if isinstance(train[0], str):
            assert task.label_names == tuple(sorted(set(validation)))
        return
    with pytest.raises(
        ValueError, match=r"become public \(config.json.*set class_names"
    ) as refusal:
        labelled(tmp_path, train, validation)
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("names", [["a"], [], ["a", "a"], ["a", " "]])
def test_refused_class_names(names):
    with pytest.raises(ValueError, match=r"class_names=.* two or more different names"):
        DataArguments(class_names=names)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"validation_file": None}, ValueError, "validation_file is not set"),
        (
            {"train_file": None, "validation_file": None},
            ValueError,
            "set train_file and validation_file",
        ),
        ({"train_file": "absent.jsonl"}, FileNotFoundError, r"absent.jsonl not found"),
        ({"train_file": "rows.txt"}, ValueError, r"rows are read from"),
        (
            {"train_file": None, "validation_file": None, "dataset_name": "nobody/nothing"},
            OSError,
            r"hf download nobody/nothing --repo-type dataset",
        ),
    ],
)
def test_missing_sources_are_refused(tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        build_task(DataArguments(**{**row_files(tmp_path, ROWS), **settings}))


@pytest.mark.parametrize("settings", [{}, {"max_eval_samples": 2}, {"prompt": "causal_lm"}])
@pytest.mark.parametrize("copied", [False, True])
def test_the_training_file_is_not_evaluated_on(tmp_path, copied, settings):
    train = row_files(tmp_path, ROWS)["train_file"]
    other = shutil.copy(train, tmp_path / "v.jsonl") if copied else f"{tmp_path}/./train.jsonl"
    with pytest.raises(ValueError, match="is (a copy of )?the train_file.*without noise"):
        build_task(DataArguments(train_file=train, validation_file=str(other), **settings))


def test_a_train_split_is_no_validation_split(monkeypatch):
    rows = datasets.Dataset.from_list(
        [{"sentence": "a", "label": 0}, {"sentence": "b", "label": 1}]
    )
    there = datasets.DatasetDict(train=rows, test=rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: there)
    for split, words in (("train", "holds the private rows"), ("dev", "'dev'")):
        with pytest.raises(ValueError, match=words):
            load_splits(DataArguments(), HubSource("me/data", validation=split))
    with pytest.raises(ValueError, match=r"has splits \['test', 'train'\].*_matched' \(or"):
        build_task(DataArguments(task="mnli"))
    found = load_splits(DataArguments(), HubSource("me/data"))  # "test" where nothing was named
    assert set(found) == {"train", "validation"}


def test_a_line_that_is_not_json_is_named_and_not_quoted(tmp_path):
    paths = row_files(tmp_path, ROWS)
    Path(paths["train_file"]).write_text('{"text": "a", "label": 0}\nsecret words\n')
    with pytest.raises(ValueError, match="line 2 is not JSON") as found:
        build_task(DataArguments(**paths))
    assert "secret" not in str(found.value)


def test_label_words_that_are_the_labels_in_another_order_are_refused(tmp_path):
    rows = [{"text": "a", "label": "money"}, {"text": "b", "label": "broken"}] * 4
    words = {"prompt": "causal_lm", "template": "{text} is about {answer}"}
    with pytest.raises(ValueError, match="labels in their order are broken, money"):
        build_task(files(tmp_path, rows, label_words=["money", "broken"], **words))
    build_task(files(tmp_path, rows, label_words=["broken", "money"], **words))
    build_task(files(tmp_path, rows, label_words=["bad", "good"], **words))
