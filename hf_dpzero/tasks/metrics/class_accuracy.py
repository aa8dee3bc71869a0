"""Accuracy: the share of rows whose predicted class is the true one."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np

from hf_dpzero.tasks.metrics.class_labels import class_labels


class Accuracy(evaluate.Metric):
    """The share of predictions that equal their reference.

    >>> Accuracy().compute(predictions=[0, 1, 1], references=[0, 1, 0])["accuracy"] == 2 / 3
    True
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The share of predictions that equal their reference.",
            citation="",
            inputs_description="predictions and references: integer class labels.",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, *, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def accuracy(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """{"accuracy": share of equal entries} of two `[N]` integer arrays.

    Raises:
      ValueError: no integers, different lengths, or no rows.
    """
    said, true = class_labels(predictions, references)
    return Accuracy(keep_in_memory=True).compute(predictions=said, references=true)
