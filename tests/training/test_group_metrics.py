"""Metrics of groups of the evaluation data: which rows are whose, what is worst, what is left out."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset
from tiny_runs import GROUPS, build, tiny_data, with_groups
from transformers import EvalPrediction

from hf_dpzero.privacy.group_losses import PerStepGroups, metric_keys, places
from hf_dpzero.settings.row_groups import column_values, row_groups
from hf_dpzero.training.evaluation import RowGroups, by_group

PLAIN = SimpleNamespace(batch_eval_metrics=False)


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


def test_columns_of_rows_of_several_kinds():
    rows = [{"where": "few", "x": 1}, {"where": "many", "x": 2}]
    assert column_values(rows, "where") == ["few", "many"]
    assert column_values(rows, "there") is None
    assert column_values(iter(rows), "where") is None, "a stream"
    made_on_access = with_groups(tiny_data(4)).with_transform(
        lambda batch: {"x": batch["input_ids"]}
    )
    assert column_values(made_on_access, "where") == ["few", "many", "many", "many"]
    kind = ClassLabel(names=["few", "many"])
    labelled = Dataset.from_dict({"where": [1, 0, -1, None]}).cast_column("where", kind)
    assert column_values(labelled, "where") == ["many", "few", None, None]
    groups = PerStepGroups(names=("few", "many"), shares=(0.2, 0.8))
    assert row_groups(groups, "where", labelled.select([0, 1])).tolist() == [1, 0]
    with pytest.raises(ValueError, match="row 2.*class labels by their names.*None"):
        row_groups(groups, "where", [{"where": "few"}, {"where": None}])


@pytest.mark.parametrize("rows", ["dataset", "list", "torch"])
def test_metrics_of_each_group_and_of_the_worst(tmp_path, rows):
    evaluation = with_groups(tiny_data(40, seed=2), every=4)
    few_rows = evaluation.select(range(0, 40, 4))
    if rows != "dataset":
        evaluation = evaluation.to_list() if rows == "list" else evaluation.with_format("torch")
    trainer = made(tmp_path, evaluation, accuracy)
    metrics = trainer.evaluate()
    few, many = metrics["eval_accuracy_of_few"], metrics["eval_accuracy_of_many"]
    assert (10 * few + 30 * many) / 40 == pytest.approx(metrics["eval_accuracy"])
    assert metrics["eval_worst_group_accuracy"] == min(few, many)
    own = trainer.evaluate(few_rows, metric_key_prefix="few")
    assert own["few_accuracy"] == few and "few_accuracy_of_many" not in own
    assert trainer.compute_metrics is accuracy
    tested = trainer.predict(evaluation).metrics
    assert tested["test_worst_group_accuracy"] == min(few, many)


def test_rows_without_a_known_group_count_in_the_usual_metrics_alone(tmp_path, caplog):
    """An error here would come after the budget is spent."""
    rows, names = tiny_data(40, seed=2), ["few", "elsewhere", None, "many"] * 10
    given = {"no column": rows, "some": rows.add_column("where", names)}
    given["none"] = rows.add_column("where", ["elsewhere"] * 40)
    single = {"eval_accuracy_of_few", "eval_accuracy_of_many"}
    with caplog.at_level(logging.WARNING, logger="transformers"):
        for kind, evaluation in given.items():
            metrics = made(tmp_path / kind, evaluation, accuracy).evaluate()
            assert "eval_accuracy" in metrics
            found = {name for name in metrics if "_of_" in name}
            assert found == (single if kind == "some" else set())
    assert "no column 'where'" in caplog.text
    assert "row 2 (counted from 1) of the evaluation data" in caplog.text
    assert "elsewhere" not in caplog.text


def test_metrics_that_are_not_one_a_row_have_no_groups(caplog):
    groups = RowGroups({"a": np.array([0])}, 3)
    found = by_group(accuracy, groups, PLAIN)(
        EvalPrediction(predictions=np.eye(2), label_ids=np.arange(2))
    )
    assert found == {"accuracy": 1.0} and groups.losses(np.ones(2)) == {}
    with caplog.at_level(logging.WARNING, logger="transformers"):
        assert by_group(accuracy, groups, SimpleNamespace(batch_eval_metrics=True)) is accuracy
    assert "batch_eval_metrics" in caplog.text
    assert by_group(None, groups, PLAIN) is None and by_group(accuracy, None, PLAIN) is accuracy


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


def test_names_of_metrics_differ_where_the_groups_do():
    assert metric_keys(["<18", "18", ">18"]) == ["_18_1", "18", "_18_3"]
    assert len({*metric_keys(["a b", "a_b", "a_b_1"])}) == 3
