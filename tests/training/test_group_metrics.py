"""Metrics of groups of the evaluation data: which rows are whose, what is worst, what is left out."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_runs import build, tiny_data
from transformers import EvalPrediction

from hf_dpzero.privacy.group_losses import metric_keys, places
from hf_dpzero.settings.row_groups import column_values, row_groups
from hf_dpzero.training.evaluation import RowGroups, by_group, groups_of_rows

SHARES = {"few": 0.2, "many": 0.8}
GROUPS = {"group_robust.column": "where", "group_robust.shares": SHARES}
PLAIN = SimpleNamespace(batch_eval_metrics=False)


def with_groups(data: Dataset, every: int = 5) -> Dataset:
    names = ["few" if i % every == 0 else "many" for i in range(len(data))]
    return data.add_column("where", names)


def made(tmp_path, evaluation=None, compute=None, **settings):
    own = {"eval_dataset": evaluation, "compute_metrics": compute}
    return build(
        tmp_path, data=with_groups(tiny_data()), trainer_settings=own, **{**GROUPS, **settings}
    )


def measured(compute, labels: list[int], rows: dict[str, list[int]]) -> dict[str, float]:
    """The metrics of predictions that are all 0."""
    own = {name: np.asarray(chosen) for name, chosen in rows.items()}
    wrapped = by_group(compute, RowGroups(own, len(labels)), PLAIN)
    scores = np.tile([1.0, 0.0], (len(labels), 1))
    return wrapped(EvalPrediction(predictions=scores, label_ids=np.asarray(labels)))


def accuracy(prediction) -> dict[str, float]:
    chosen = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((chosen == prediction.label_ids).mean())}


def test_columns_of_lists_of_rows_and_of_class_labels():
    from datasets import ClassLabel

    rows = [{"where": "few", "x": 1}, {"where": "many", "x": 2}]
    assert column_values(rows, "where") == ["few", "many"]
    assert column_values(rows, "there") is None
    labelled = Dataset.from_dict({"where": [1, 0, -1, None]}).cast_column(
        "where", ClassLabel(names=["few", "many"])
    )
    assert column_values(labelled, "where") == ["many", "few", None, None]
    from hf_dpzero.privacy.group_losses import PerStepGroups

    groups = PerStepGroups(names=("few", "many"), shares=(0.2, 0.8))
    assert row_groups(groups, "where", labelled.select([0, 1])).tolist() == [1, 0]
    with pytest.raises(ValueError, match="row 2.*class labels by their names.*None"):
        row_groups(groups, "where", [{"where": "few"}, {"where": None}])


def test_columns_of_rows_that_are_made_on_access():
    rows = with_groups(tiny_data(4)).with_transform(lambda batch: {"x": batch["input_ids"]})
    assert column_values(rows, "where") == ["few", "many", "many", "many"]
    assert column_values((row for row in [{"where": "few"}]), "where") is None, "a stream"


def test_metrics_of_each_group_and_of_the_worst(tmp_path):
    evaluation = with_groups(tiny_data(40, seed=2), every=4)
    trainer = made(tmp_path, evaluation, accuracy)
    metrics = trainer.evaluate()
    few, many = metrics["eval_accuracy_of_few"], metrics["eval_accuracy_of_many"]
    assert (10 * few + 30 * many) / 40 == pytest.approx(metrics["eval_accuracy"])
    assert metrics["eval_worst_group_accuracy"] == min(few, many)
    own = trainer.evaluate(evaluation.select(range(0, 40, 4)), metric_key_prefix="few")
    assert own["few_accuracy"] == few and "few_accuracy_of_many" not in own
    assert trainer.compute_metrics is accuracy
    tested = trainer.predict(evaluation).metrics
    assert tested["test_worst_group_accuracy"] == min(few, many)


def test_evaluation_data_without_groups_has_the_usual_metrics(tmp_path, caplog):
    trainer = made(tmp_path, tiny_data(40, seed=2), accuracy)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        metrics = trainer.evaluate()
    assert "eval_accuracy" in metrics and not any("_of_" in name for name in metrics)
    assert "no column 'where'" in caplog.text


def test_losses_of_groups_where_nothing_else_is_measured(tmp_path):
    """Without compute_metrics: the means of the rows' losses, of which eval_loss is the mean too."""
    evaluation = with_groups(tiny_data(40, seed=2), every=4)
    trainer = made(tmp_path, evaluation, per_device_eval_batch_size=7)
    metrics = trainer.evaluate()
    few, many = metrics["eval_loss_of_few"], metrics["eval_loss_of_many"]
    assert (10 * few + 30 * many) / 40 == pytest.approx(metrics["eval_loss"], abs=1e-6)
    assert metrics["eval_worst_group_loss"] == max(few, many) and few != many
    rows = torch.tensor(evaluation["input_ids"][:])[::4], torch.tensor(evaluation["labels"][:])[::4]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(trainer.model(rows[0]).logits, rows[1])
    assert few == pytest.approx(loss.item(), abs=1e-6)
    unlabelled = evaluation.remove_columns("labels")
    assert not any("_of_" in name for name in trainer.predict(unlabelled).metrics)
    assert trainer.predict(evaluation).metrics["test_loss_of_few"] == pytest.approx(few)


@pytest.mark.parametrize("rows", ["list", "torch"])
def test_rows_of_several_kinds_have_groups(tmp_path, rows):
    evaluation = with_groups(tiny_data(20, seed=2), every=4)
    evaluation = evaluation.to_list() if rows == "list" else evaluation.with_format("torch")
    assert "eval_accuracy_of_few" in made(tmp_path, evaluation, accuracy).evaluate()


def test_a_group_that_training_does_not_know_ends_no_run(tmp_path, caplog):
    """Its rows count in the metrics of all rows; an error here would come after the budget is spent."""
    names = ["few", "elsewhere", None, "many"] * 10
    evaluation = tiny_data(40, seed=2).add_column("where", names)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        metrics = made(tmp_path, evaluation, accuracy).evaluate()
    assert "row 2 (counted from 1) of the evaluation data" in caplog.text
    assert "elsewhere" not in caplog.text
    assert {name for name in metrics if "_of_" in name} == {
        "eval_accuracy_of_few",
        "eval_accuracy_of_many",
    }
    of_none = SimpleNamespace(**vars(made(tmp_path / "b").args))
    assert groups_of_rows(of_none, [{"where": "elsewhere"}]) is None


def test_the_worst_is_the_largest_of_what_should_be_small():
    def compute(prediction):
        n = len(prediction.label_ids)
        return {"loss": n, "word_error": n, "MSE": n, "accuracy": n, "closeness": n}

    found = measured(compute, [0] * 5, {"a": [0, 1], "b": [2, 3, 4]})
    worst = {name.removeprefix("worst_group_"): v for name, v in found.items() if "worst" in name}
    assert worst == {"loss": 3, "word_error": 3, "MSE": 3, "accuracy": 2, "closeness": 2}


def test_what_is_no_number_or_not_everywhere_is_left_out(caplog):
    def compute(prediction):
        labels = prediction.label_ids
        if (labels == 1).all():
            raise ValueError("only one class")
        recall = {f"recall_{c}": 1.0 for c in sorted({*labels.tolist()})}
        odd = {"matrix": [[1]], "note": "text", "none": None, "undefined": float("nan")}
        return {**recall, **odd, "found": np.float32(0.5)}

    rows = {"a": [0, 1], "b": [2], "c": [3, 4]}
    with caplog.at_level(logging.WARNING, logger="transformers"):
        found = measured(compute, [0, 1, 0, 1, 1], rows)
    assert "raised ValueError for group 'c'" in caplog.text
    own = {name: v for name, v in found.items() if "_of_" in name or "worst" in name}
    assert own == {
        **{"recall_0_of_a": 1.0, "recall_1_of_a": 1.0, "recall_0_of_b": 1.0},
        **{"found_of_a": 0.5, "found_of_b": 0.5, "worst_group_found": 0.5},
        **{"worst_group_recall_0": 1.0, "worst_group_recall_1": 1.0},
    }
    assert found["note"] == "text" and found["matrix"] == [[1]]


def test_metrics_of_batches_have_no_groups(caplog):
    groups = RowGroups({"a": np.array([0])}, 1)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        assert by_group(accuracy, groups, SimpleNamespace(batch_eval_metrics=True)) is accuracy
    assert "batch_eval_metrics" in caplog.text
    assert by_group(None, groups, PLAIN) is None and by_group(accuracy, None, PLAIN) is accuracy


def test_predictions_that_are_not_one_a_row_have_no_groups():
    wrapped = by_group(accuracy, RowGroups({"a": np.array([0])}, 3), PLAIN)
    found = wrapped(EvalPrediction(predictions=np.eye(2), label_ids=np.arange(2)))
    assert found == {"accuracy": 1.0}
    assert RowGroups({"a": np.array([0])}, 3).losses(np.ones(2)) == {}


@pytest.mark.parametrize(
    ("values", "names", "expected"),
    [
        (["a", "b", "c"], ("b", "a"), [1, 0, -1]),
        ([0, np.int64(1), torch.tensor(1), "1"], ("0", "1"), [0, 1, 1, 1]),
        ([0.0, np.float32(1), 1.5, float("nan")], ("0", "1", "1.5"), [0, 1, 2, -1]),
        ([1.0], ("1", "1.0"), [1]),
        ([True, np.False_], ("true", "false"), [0, 1]),
        ([True, False], ("False", "True"), [1, 0]),
        ([True, False], ("0", "1"), [-1, -1]),
        ([None, "None"], ("None",), [0, 0]),
        ([None, ""], ("a",), [-1, -1]),
    ],
)
def test_values_are_compared_as_text(values, names, expected):
    assert places(values, names).tolist() == expected


def test_truth_values_of_json_are_those_of_a_column(tmp_path):
    data = tiny_data().add_column("where", [i % 5 == 0 for i in range(120)])
    groups = json.dumps({"column": "where", "shares": {"true": 0.2, "false": 0.8}})
    own = {"eval_dataset": None}
    trainer = build(
        tmp_path,
        data=data,
        group_robust=groups,
        trainer_settings=own,
    )
    trainer.train()
    assert {"group_weight_true", "group_weight_false"} <= {
        name for entry in trainer.state.log_history for name in entry
    }


def test_names_of_metrics_differ_where_the_groups_do():
    assert metric_keys(["north-west 2", "<18", "18-65"]) == ["north_west_2", "_18", "18_65"]
    assert metric_keys(["<18", "18", ">18"]) == ["_18_1", "18", "_18_3"]
    clash = metric_keys(["a b", "a_b", "a_b_1"])
    assert len({*clash}) == 3
