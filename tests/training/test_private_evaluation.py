"""`evaluate_privately`: what is counted, that a row moves it by one, the record, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from tiny_runs import build, tiny_data
from torch.utils.data import Subset

from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.reporting.private_evaluations import EVALUATIONS_FILE, evaluations_in, together
from hf_dpzero.reporting.wording import round_up


class NoNoise(SecureNoise):
    """Shows the count itself."""

    def laplace(self, scale: float, size: int, step: int) -> list[int]:
        return [0] * size


def accuracy(prediction: Any) -> dict[str, float]:
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "balance": 0.5}


def evaluator(folder: Path, noise: Any = None, **settings: Any) -> Any:
    given = {"compute_metrics": accuracy, "noise": noise or NoNoise()}
    return build(folder, trainer_settings={**given, **settings})


def rows(count: int = 30, seed: int = 5) -> Dataset:
    return tiny_data(count, seed=seed)


def right(model: Any, dataset: Dataset) -> np.ndarray:
    """Which rows the model answers right, from one pass over all of them."""
    with torch.no_grad():
        logits = model.eval()(
            input_ids=torch.tensor(dataset["input_ids"][:]),
            attention_mask=torch.tensor(dataset["attention_mask"][:]),
        ).logits
    return (logits.argmax(-1) == torch.tensor(dataset["labels"][:])).numpy()


def test_right_answers_are_counted(tmp_path):
    trainer, data = evaluator(tmp_path), rows()
    wanted = int(right(trainer.model, data).sum())
    made = trainer.evaluate_privately(data, 0.5, rows="ward")
    assert 0 < wanted < 30 and made.released == wanted and made.value == wanted / 30
    assert (made.metric, made.rows, made.epsilon) == ("accuracy", "ward", 0.5)
    low, high = made.interval_of_noise
    assert low * 30 == pytest.approx(max(0, wanted - 5)) and high * 30 == pytest.approx(wanted + 6)
    least, most = made.interval_of_noise_and_sampling
    assert least < low and high < most
    assert f"{100 * made.value:.1f} % on 30 private rows (ward)" in str(made)


def test_one_row_more_moves_the_count_by_that_row_alone(tmp_path):
    """Also one that is longer than all others."""
    trainer, data = evaluator(tmp_path), rows(10)
    base = trainer.evaluate_privately(data, 1.0).released
    wide = {"input_ids": [7] * 16, "attention_mask": [1] * 16, "labels": 1}
    for extra in (*rows(4, seed=9), wide):
        more = concatenate_datasets([data, Dataset.from_list([extra])])
        found = trainer.evaluate_privately(more, 1.0).released - base
        assert found == int(right(trainer.model, Dataset.from_list([extra]))[0])


def test_each_row_has_a_pass_and_a_score_of_its_own(tmp_path):
    passes, scored = [], []

    def watched(prediction: Any) -> dict[str, float]:
        scored.append(len(prediction.label_ids))
        return accuracy(prediction)

    trainer = evaluator(tmp_path, compute_metrics=watched)
    trainer.model.register_forward_pre_hook(
        lambda module, args, inputs: passes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    trainer.evaluate_privately(rows(6), 1.0)
    assert passes == [1] * 6 and scored == [1] * 7  # the first one is scored again


def test_the_record_is_on_disk_before_the_value_is_known(tmp_path, monkeypatch):
    trainer, file = evaluator(tmp_path, SecureNoise()), tmp_path / EVALUATIONS_FILE

    def full(*arguments: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr("hf_dpzero.reporting.private_evaluations.append_whole", full)
        with pytest.raises(OSError, match="no space"):
            trainer.evaluate_privately(rows(), 0.5)
    assert file.read_text() == ""
    made = trainer.evaluate_privately(rows(), 0.5)
    assert json.loads(file.read_text())["released"] == made.released
    assert evaluations_in(tmp_path) == [made]
    again = trainer.evaluate_privately(rows(), 0.25)
    assert evaluations_in(tmp_path) == [made, again]
    assert "2 private evaluations" in (said := together(None, [made, again]))
    assert "epsilon = 0.75, delta = 0" in said
    file.write_text(file.read_text()[:-9])
    with pytest.raises(ValueError, match="what was spent stays spent"):
        trainer.evaluate_privately(rows(), 0.5)


def test_seeded_noise_is_not_private(tmp_path):
    trainer = build(
        tmp_path, trainer_settings={"compute_metrics": accuracy}
    )  # which has testing.insecure_noise_seed
    made = trainer.evaluate_privately(rows(), 0.5)
    assert str(made).startswith("NOT PRIVATE") and together(None, [made]).startswith("NOT PRIVATE")


def test_disjoint_rows_take_the_larger_epsilon_and_shared_rows_the_sum(tmp_path):
    trainer = build(
        tmp_path,
        **{"testing.sampler_key": None, "testing.insecure_noise_seed": None, "max_steps": 2},
        noise_multiplier=0.6,
        trainer_settings={"compute_metrics": accuracy},
    )
    trainer.train()
    report = trainer.privacy_report()
    assert report.private and 0.2 < report.epsilon < 5
    small, large = (trainer.evaluate_privately(rows(), e) for e in (0.125, 7.0))
    assert small.step == 2
    assert f"With the training: epsilon = {round_up(report.epsilon)}" in together(report, [small])
    assert "With the training: epsilon = 7.125, delta = 0.001" in together(report, [small, large])
    shared = trainer.evaluate_privately(trainer.train_dataset, 0.125, trained_on=True)
    of_units = dataclasses.replace(report, privacy_unit="who with all its rows")
    assert "for another unit" in together(of_units, [small])
    people = dataclasses.replace(small, privacy_unit="who with all its rows")
    assert "for each who with all its rows that was" in together(of_units, [people])
    assert "for each evaluated row, added up" in together(of_units, [small, people])
    whole = float(together(report, [shared]).split("too: epsilon = ")[1].split(",")[0])
    assert report.epsilon + 0.125 <= whole < report.epsilon + 0.127


def test_rows_of_the_other_kind_are_refused(tmp_path):
    trainer, data = evaluator(tmp_path), rows()
    with pytest.raises(ValueError, match="trained_on=True"):
        trainer.evaluate_privately(trainer.train_dataset.select(range(20)), 0.5)
    with pytest.raises(ValueError, match="published without noise"):
        trainer.evaluate_privately(trainer.eval_dataset, 0.5)
    one_of_many = concatenate_datasets([data, trainer.train_dataset.select([7])])
    with pytest.raises(ValueError, match="trained_on=True"):  # a single row, too
        trainer.evaluate_privately(one_of_many, 0.5)
    public = trainer.eval_dataset
    trainer.eval_dataset = concatenate_datasets([public, data.select([3])])
    with pytest.raises(ValueError, match="published without noise"):
        trainer.evaluate_privately(data, 0.5)
    trainer.eval_dataset = public
    assert not (tmp_path / EVALUATIONS_FILE).exists()
    trainer.evaluate_privately(data, 0.5)
    for public in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="were evaluated privately"):
            public(data.select(range(9)))
    trainer.eval_dataset = data
    with pytest.raises(ValueError, match="were evaluated privately"):
        trainer.train()


def of_people(folder: Path, name: str = "someone else") -> Any:
    """An evaluator whose training rows are all one person's."""
    named = tiny_data().add_column("who", [name] * len(tiny_data()))
    given = {"compute_metrics": accuracy, "noise": NoNoise()}
    trainer = build(folder, data=named, trainer_settings=given)
    trainer.args.unit_column = "who"
    return trainer


def people(model: Any, count: int = 40) -> tuple[Dataset, int]:
    """Rows of people whom the model always answers right, or always wrong, and how many it does."""
    data = rows(count)
    names = [f"{'rw'[1 - hit]}{i % 5}" for i, hit in enumerate(right(model, data).astype(int))]
    return data.add_column("who", names), len({name for name in names if name[0] == "r"})


def test_a_person_moves_the_count_by_one_however_many_rows_it_has(tmp_path):
    trainer = of_people(tmp_path)
    data, wanted = people(trainer.model)
    made = trainer.evaluate_privately(data, 0.5)
    assert (made.released, made.num_rows) == (wanted, len(set(data["who"]))) and wanted > 1
    assert made.privacy_unit == "who with all its rows" and "one of each unit" in str(made)
    assert "replacing one who with all its rows" in str(made)
    hits = data.filter(lambda row: row["who"][0] == "r").remove_columns("who")
    crowd = hits.add_column("who", ["crowd"] * len(hits))  # first, so that all others' numbers move
    more = trainer.evaluate_privately(concatenate_datasets([crowd, data]), 0.5)
    assert more.released == wanted + 1 and more.num_rows == made.num_rows + 1
    with pytest.raises(ValueError, match="were evaluated privately"):  # drawn or not
        trainer.evaluate(data.select(range(3)))


@pytest.mark.false_alarm(2e-12)
def test_each_release_draws_the_row_of_a_person_anew(tmp_path):
    trainer = of_people(tmp_path)
    data, hits = rows(40), right(trainer.model, rows(40))
    both = data.select([int(hits.argmax()), int(hits.argmin())]).add_column("who", ["ann"] * 2)
    found = {trainer.evaluate_privately(both, 0.5).released for _ in range(40)}
    assert found == {0, 1}


def test_people_who_were_trained_on_are_refused(tmp_path):
    trainer = of_people(tmp_path, "r0")
    data, wanted = people(trainer.model)
    with pytest.raises(ValueError, match="of some unit .*trained_on=True"):
        trainer.evaluate_privately(data, 0.5)
    assert trainer.evaluate_privately(data, 0.5, trained_on=True).released == wanted
    unnamed = data.remove_columns("who").add_column("who", [None] * len(data))
    with pytest.raises(ValueError, match="every row needs one name"):
        trainer.evaluate_privately(unnamed, 0.5, trained_on=True)
    numbered = data.map(lambda row: {"who": int(row["who"][1:])})  # as one CSV of two has ids
    with pytest.raises(ValueError, match="other types in the training rows"):
        trainer.evaluate_privately(numbered, 0.5)
    trainer.train_dataset = trainer.train_dataset.remove_columns("who")
    with pytest.raises(ValueError, match="is no column of the training rows"):
        trainer.evaluate_privately(data, 0.5)


def test_ids_in_tensors_are_those_of_people(tmp_path):
    """Tensors hash by identity: each row would be a person."""
    trainer = of_people(tmp_path)
    data, wanted = people(trainer.model)
    number = {name: i for i, name in enumerate(sorted(set(data["who"])))}
    numbered = data.map(lambda row: {"who": number[row["who"]]}).with_format("torch")
    made = trainer.evaluate_privately(Subset(numbered, range(len(data))), 0.5, trained_on=True)
    assert (made.released, made.num_rows) == (wanted, len(number))
    objects = [row | {"who": object()} for row in data]
    with pytest.raises(ValueError, match="lists or objects"):
        trainer.evaluate_privately(objects, 0.5, trained_on=True)


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        ({}, {"epsilon": 0.0}, "a number above 0"),
        (
            {},
            {"metric": "f1"},
            r"metric='f1' is none of what compute_metrics returns \(accuracy, balance\)",
        ),
        ({}, {"dataset": rows().select([])}, "at least one row"),
        ({}, {"dataset": {"a": rows()}}, "give one data set"),
        ({}, {"dataset": rows().to_iterable_dataset()}, "give one data set"),
        ({"batch_eval_metrics": True}, {}, "one row at a time"),
        ({"compute_metrics": None}, {}, "by compute_metrics"),
        ({"unit_column": "person"}, {}, "is no column of the private rows"),
    ],
)
def test_what_cannot_be_counted_is_refused(tmp_path, settings, given, words):
    trainer = evaluator(tmp_path)
    for name, value in settings.items():
        setattr(trainer if name == "compute_metrics" else trainer.args, name, value)
    with pytest.raises(ValueError, match=words):
        trainer.evaluate_privately(**{"dataset": rows(), "epsilon": 0.5, **given})
    assert not (tmp_path / EVALUATIONS_FILE).exists()


class Running:
    """The accuracy of all rows since the start, as metrics without a reset give it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, prediction: Any) -> dict[str, float]:
        self.seen.append(accuracy(prediction)["accuracy"])
        return {"accuracy": float(np.mean(self.seen))}


def test_metrics_that_keep_something_between_rows_are_refused(tmp_path):
    """A wrong row would take the later ones out of the count, so one row would move it by many."""
    trainer = evaluator(tmp_path, compute_metrics=Running())
    assert 0 < right(trainer.model, rows()).sum() < 30
    with pytest.raises(ValueError, match="keeps something between calls.*nothing was released"):
        trainer.evaluate_privately(rows(), 0.5)
    assert not (tmp_path / EVALUATIONS_FILE).exists()


def test_models_whose_answers_depend_on_earlier_rows_are_refused(tmp_path):
    trainer = evaluator(tmp_path)
    trainer.model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match="remembers the longest text"):
        trainer.evaluate_privately(rows(), 0.5)
