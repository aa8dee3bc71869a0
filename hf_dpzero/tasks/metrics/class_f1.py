"""Macro-F1: the mean over classes of each class's F1, every class counting the same."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np

from hf_dpzero.tasks.metrics.class_labels import class_labels


class MacroF1(evaluate.Metric):
    """The unweighted mean of 2 TP / (2 TP + FP + FN) over the classes.

    The classes are those that occur among the references or the predictions, as in scikit-learn's
    `f1_score(average="macro")`: a class that is only ever predicted counts with 0, one that occurs
    in neither does not count.

    >>> MacroF1().compute(predictions=[0, 1, 1], references=[0, 1, 0])["macro_f1"] == 2 / 3
    True
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The unweighted mean over classes of their F1.",
            citation="",
            inputs_description="predictions and references: integer class labels.",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, *, predictions: Any, references: Any) -> dict[str, float]:
        said, true = np.asarray(predictions), np.asarray(references)
        scores = [_f1(said == label, true == label) for label in np.union1d(said, true)]
        return {"macro_f1": float(np.mean(scores))}


def _f1(said: np.ndarray, true: np.ndarray) -> float:
    """2 TP / (2 TP + FP + FN) of two boolean arrays, at least one of which has a True."""
    return 2 * np.sum(said & true) / (np.sum(said) + np.sum(true))


def macro_f1(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """{"macro_f1": mean F1 of the classes} of two `[N]` integer arrays.

    Raises:
      ValueError: no integers, different lengths, or no rows.
    """
    said, true = class_labels(predictions, references)
    return MacroF1(keep_in_memory=True).compute(predictions=said, references=true)
