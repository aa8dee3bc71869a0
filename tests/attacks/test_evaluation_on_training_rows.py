"""Attack: publish un-noised metrics of private rows, by evaluating on them under another name."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import datasets
import numpy as np
import pytest
import torch
from row_files import row_files
from tiny_runs import build, config, tiny_data, tiny_model
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from transformers import default_data_collator

from hf_dpzero import DPZeroTrainer
from hf_dpzero.checks import evaluation_rows as evaluation_data
from hf_dpzero.checks.evaluation_rows import PrivateRows
from hf_dpzero.recipes.build import refuse_training_texts
from hf_dpzero.tasks import build_task
from hf_dpzero.tasks.description import DataArguments

PRIVATE, PUBLIC = tiny_data(120), tiny_data(200, seed=2)


class Wrapped(Dataset):
    """A user's own map-style data set around another one."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int):
        return self.inner[index]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows) -> None:
        self.rows = rows

    def __iter__(self):
        yield from self.rows


def copy(dataset: datasets.Dataset, rows) -> datasets.Dataset:
    """Rows of equal content in memory of their own."""
    return datasets.Dataset.from_list([dataset[int(i)] for i in rows])


def named(name: str, dataset: datasets.Dataset, rows) -> datasets.Dataset:
    """A copy with a column of names that differ in rows that are the same."""
    copied = copy(dataset, rows)
    return copied.add_column("uid", [f"{name}-{i}" for i in range(len(copied))])


def tensors(dataset: datasets.Dataset) -> TensorDataset:
    return TensorDataset(*(torch.tensor(dataset[n][:]) for n in ("input_ids", "labels")))


ROWS = list(PRIVATE)
AGES, DOSES = [20 + i % 50 for i in range(60)], [0.1 * i for i in range(60)]
SHUFFLED = PRIVATE.shuffle(seed=1)
ATTACKS = {
    "the same": (PRIVATE, PRIVATE),
    "nested subsets": (PRIVATE, Subset(Subset(PRIVATE, range(50)), [1, 2])),
    "subsets on both sides": (
        Subset(Subset(PRIVATE, range(60)), range(30)),
        Subset(Subset(PRIVATE, range(20, 90)), range(20)),
    ),
    "concatenated training set": (ConcatDataset([PRIVATE, PUBLIC]), PUBLIC.select(range(9))),
    "select": (PRIVATE, PRIVATE.select(range(40, 50))),
    "shuffle": (PRIVATE, SHUFFLED.select(range(3))),
    "both shuffled": (SHUFFLED, PRIVATE.shuffle(seed=2).select(range(30))),
    "split": (PRIVATE, PRIVATE.train_test_split(0.1, seed=0)["test"]),
    "remove_columns": (PRIVATE, PRIVATE.remove_columns("labels")),
    "remove_columns of training": (PRIVATE.remove_columns("labels"), PRIVATE),
    "select_columns": (PRIVATE, PRIVATE.select_columns(["attention_mask", "input_ids"])),
    "removed and selected": (PRIVATE, PRIVATE.remove_columns("labels").select([7])),
    "added column": (PRIVATE, PRIVATE.add_column("source", ["web"] * 120)),
    "to_iterable_dataset": (PRIVATE, PRIVATE.to_iterable_dataset()),
    "mapped iterable": (PRIVATE, PRIVATE.to_iterable_dataset().remove_columns("labels")),
    "torch stream": (PRIVATE, Stream(ROWS[:5])),
    "list slice": (ROWS, ROWS[:5]),
    "list of a data set": (PRIVATE, ROWS[:5]),
    "data set of a list": (ROWS, PRIVATE.select(range(5))),
    "copy": (PRIVATE, copy(PRIVATE, range(20))),
    "names of rows": (named("train", PRIVATE, range(120)), named("eval", PRIVATE, range(20))),
    "oversampled": (copy(PRIVATE, [*range(120)] * 2), copy(PRIVATE, range(20))),
    "partly oversampled": (copy(PRIVATE, [*range(120), *range(72)]), copy(PRIVATE, range(20))),
    "copy among others": (
        PRIVATE,
        datasets.concatenate_datasets([PUBLIC, copy(PRIVATE, range(20))]),
    ),
    "copy of a single row": (PRIVATE, copy(PRIVATE, [0])),
    "copy with other labels": (
        PRIVATE,
        copy(PRIVATE, range(9)).map(lambda row: {"labels": 1 - row["labels"]}),
    ),
    "flattened": (PRIVATE, PRIVATE.shuffle(seed=3).flatten_indices()),
    "formatted": (PRIVATE, PRIVATE.with_format("torch").select(range(4))),
    "transformed": (PRIVATE.with_transform(lambda rows: rows), copy(PRIVATE, range(4))),
    "numbers": (
        datasets.Dataset.from_dict({"age": AGES, "dose": DOSES, "label": [0, 1] * 30}),
        [{"label": 1, "age": AGES[i], "dose": DOSES[i]} for i in range(9)],
    ),
    "tensors": (tensors(PRIVATE), tensors(copy(PRIVATE, range(10)))),
    "own class": (Wrapped(PRIVATE), Wrapped(PRIVATE)),
    "own class of training": (Wrapped(PRIVATE), PRIVATE),
    "concatenation": (PRIVATE, ConcatDataset([PUBLIC, Subset(PRIVATE, range(20))])),
    "in a dictionary": (PRIVATE, {"public": PUBLIC, "seen": ROWS[:5]}),
    "in a DatasetDict": (PRIVATE, datasets.DatasetDict(a=PUBLIC, b=copy(PRIVATE, [1, 2]))),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_private_rows_are_recognised(name):
    train, evaluation = ATTACKS[name]
    with pytest.raises(ValueError, match="rows of train_dataset"):
        PrivateRows(train).refuse(evaluation)


HARMLESS = {
    "public": (PRIVATE, PUBLIC),
    "held out": tuple(PRIVATE.train_test_split(0.1, seed=0).values()),
    "random_split": tuple(random_split(PRIVATE, [100, 20])),
    "slices": (ROWS[:100], ROWS[100:]),
    "stream": (PRIVATE, PUBLIC.to_iterable_dataset()),
    "only labels in common": (
        PRIVATE,
        PRIVATE.select_columns(["labels"]).map(lambda row: {"text": str(row)}),
    ),
    "only a short text in common": (
        datasets.Dataset.from_dict({"a": [str(i) for i in range(40)], "mood": ["good"] * 40}),
        datasets.Dataset.from_dict({"b": [str(i) for i in range(9)], "mood": ["good"] * 9}),
    ),
    "counters of other names": (
        [{"a": i, "x": 0.1 * i} for i in range(60)],
        [{"b": i, "y": 0.1 * i} for i in range(60)],
    ),
    "nothing": (PRIVATE, None),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_other_rows_are_not(name, caplog):
    train, evaluation = HARMLESS[name]
    with caplog.at_level(logging.WARNING):
        PrivateRows(train).refuse(evaluation)
    assert not caplog.records


def mixed(public: int, private: int) -> datasets.Dataset:
    return datasets.concatenate_datasets(
        [PUBLIC.select(range(public)), copy(PRIVATE, range(private))]
    )


REPEATING = datasets.concatenate_datasets([PRIVATE.select(range(110)), copy(PRIVATE, range(10))])


@pytest.mark.parametrize(
    ("train", "evaluation", "refused"),
    [
        (PRIVATE, mixed(192, 8), False),  # 4 % have equal content, as SST-2's splits have
        (PRIVATE, mixed(192, 11), True),
        (PRIVATE, mixed(4, 1), False),  # one chance repetition in a small set
        # short texts: 20 of 120 private rows occur twice, so 15 of 100 public ones may too, 25 not
        (REPEATING, mixed(85, 15), False),
        (REPEATING, mixed(75, 25), True),
    ],
)
def test_some_rows_may_recur(train, evaluation, refused):
    with pytest.raises(ValueError, match="rows of train_dataset") if refused else nullcontext():
        PrivateRows(train).refuse(evaluation)


def test_public_text_that_repeats_itself_is_warned_of_once_without_a_count(caplog):
    logging.getLogger("hf_dpzero").propagate = True
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    rows, some = PrivateRows(PRIVATE), mixed(192, 8)
    with caplog.at_level(logging.WARNING):
        rows.refuse(some)
        rows.refuse(some)
        PrivateRows(PRIVATE).refuse(some)  # as a recipe's texts and then their tokens
    (said,) = [record.getMessage() for record in caplog.records]
    public = "some of the 200 rows of the evaluation data also occur in train_dataset"
    assert public in said and not any(c.isdigit() for c in said.replace(public, ""))


def test_data_sets_that_make_their_rows_are_read_in_part(monkeypatch):
    """A fifth of the private rows is read, so a fifth of the share refuses."""
    monkeypatch.setattr(evaluation_data, "READ", 24)
    with pytest.raises(ValueError, match="rows of train_dataset"):
        PrivateRows(Wrapped(PRIVATE)).refuse(copy(PRIVATE, range(120)))


def test_what_can_be_read_only_once_is_refused():
    with pytest.raises(ValueError, match="can be read only once"):
        PrivateRows(PRIVATE).refuse(iter(ROWS))


def test_a_trainers_evaluation_set_is_compared_whenever_it_is_used(tmp_path):
    trainer = DPZeroTrainer(
        model=tiny_model(),
        args=config(tmp_path),
        train_dataset=PRIVATE,
        eval_dataset={"public": PUBLIC},
        data_collator=default_data_collator,
    )
    assert "eval_public_loss" in trainer.evaluate()
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="rows of train_dataset"):
            call(ROWS[:7])
    trainer.eval_dataset = {"public": copy(PRIVATE, range(9))}  # exchanged after the checks
    with pytest.raises(ValueError, match="rows of train_dataset"):
        trainer.evaluate()
    trainer.eval_dataset = PRIVATE.to_iterable_dataset()
    with pytest.raises(ValueError, match="rows of train_dataset"):
        trainer.evaluate()


def test_reading_rows_leaves_the_global_generators_alone():
    class Noisy(Wrapped):
        def __getitem__(self, index: int):
            return {"input_ids": torch.rand(4)}

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    PrivateRows(Noisy(PRIVATE)).refuse(Noisy(PUBLIC))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    "cells",
    [
        [[1, 2], [3], [], [-4, 5, 6]],
        [[0.5, 2.0], [0.1], [], [float("inf")]],
        [[[1, 2], [3, 4]], [[5]], [[6], [7, 8]], []],
        ["", "a", "é", "a b"],
        [["a", "b"], ["c"], [], ["d"]],
        [{"a": 1, "b": [2]}, {"a": 3, "b": []}, {"a": 4, "b": [5]}, {"a": 6, "b": [7]}],
    ],
    ids=["integers", "floats", "nested", "texts", "lists of text", "structures"],
)
def test_digests_do_not_depend_on_how_rows_are_stored(cells):
    stored = datasets.Dataset.from_dict({"x": cells})
    expected = evaluation_data._digests([{"x": cell} for cell in cells], ("x",))
    assert len(np.unique(expected)) == 4
    forms = {
        "arrow": stored,
        "slice": datasets.concatenate_datasets([stored, stored]).select(range(4, 8)),
        "order": stored.select([3, 2, 1, 0]).select([3, 2, 1, 0]),
        "rows": list(stored),
        "reversed keys": [
            {"x": dict(reversed(c.items())) if isinstance(c, dict) else c} for c in cells
        ],
    }
    if isinstance(cells[0], list) and isinstance(cells[0][0], (int, float)):
        forms["arrays"] = [{"x": np.array(cell)} for cell in cells]
        forms["tensors"] = [
            {"x": torch.tensor(c, dtype=torch.tensor(cells[0]).dtype)} for c in cells
        ]
        forms["tuples"] = [{"x": tuple(cell)} for cell in cells]
    for name, form in forms.items():
        np.testing.assert_array_equal(evaluation_data._digests(form, ("x",)), expected, name)


def test_texts_of_a_recipe_are_compared_before_they_are_encoded(tmp_path):
    """Features of one text differ in the last bit, and tokens of two may be equal."""
    rows = [{"text": f"message {i}", "label": i % 2} for i in range(40)]
    public = [{"text": f"public {i}", "label": i % 2} for i in range(20)]
    refuse_training_texts(build_task(DataArguments(**row_files(tmp_path, rows, public))))
    files = row_files(tmp_path, rows, public + rows[:5])
    with pytest.raises(ValueError, match="rows of train_dataset"):
        refuse_training_texts(build_task(DataArguments(**files)))


def test_what_was_trained_on_stays_private_when_the_training_set_is_exchanged(tmp_path):
    private = tiny_data()
    trainer = build(tmp_path, data=private, max_steps=1)
    trainer.train()
    trainer.train_dataset = tiny_data(120, seed=2)
    with pytest.raises(ValueError, match="holds rows of train_dataset"):
        trainer.evaluate(private)


@pytest.mark.parametrize("loader", ["its own", "by hand", "of a part"])
def test_an_evaluation_that_makes_its_own_loader(tmp_path, loader):
    """A subclass' `evaluate` logged the loss of all private rows, without noise."""

    class Own(DPZeroTrainer):
        def evaluate(self, *args, **settings):
            rows = (
                self.train_dataset if loader == "by hand" else self.train_dataset.select(range(50))
            )
            made = torch.utils.data.DataLoader(rows, batch_size=8, collate_fn=self.data_collator)
            made = self.get_train_dataloader() if loader == "its own" else made
            return self.evaluation_loop(made, description="training rows").metrics

    settings = config(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=2)
    own = Own(tiny_model(), settings, default_data_collator, tiny_data(), tiny_data(40, seed=2))
    with pytest.raises(ValueError, match="holds rows of train_dataset"):
        own.train()


def test_a_run_without_privacy_evaluates_what_it_likes(tmp_path):
    """Its report says NOT PRIVATE; the same rows are refused of a private one."""
    settings = {"data": PRIVATE, "trainer_settings": {"eval_dataset": PRIVATE}}
    trainer = build(tmp_path, method="mezo", noise_multiplier=None, **settings)
    assert trainer.evaluate()["eval_loss"] > 0
    assert "NOT PRIVATE" in str(trainer.privacy_report())
    with pytest.raises(ValueError, match="evaluating on the private data"):
        build(tmp_path, **settings)


def test_no_private_row_moves_the_learning_rate(tmp_path):
    """A training row that is a public row too: leaving that out of what is measured would tell of it."""
    rates, public = set(), PUBLIC.select(range(2, 10))
    for i in range(3):
        private = datasets.concatenate_datasets([PRIVATE, PUBLIC.select([i])])
        args = config(
            tmp_path / str(i), learning_rate=None, clip=0.05, trainable="classifier",
            noise_multiplier=0.5, expected_batch_size=60, max_steps=1,
        )  # fmt: skip
        trainer = DPZeroTrainer(
            model=tiny_model(), args=args, train_dataset=private, eval_dataset=public,
            data_collator=default_data_collator,
        )  # fmt: skip
        trainer.train()
        assert trainer.run.landscape is not None and trainer.run.landscape.rows == 8
        rates.add(trainer.trajectory.releases[0].learning_rate)
    assert len(rates) == 1
