"""Exact match and F1 over a data set of free-text answers: means of `squad`'s and `drop`'s scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

from hf_dpzero.tasks.metrics.drop import Answer, drop_exact_match, drop_f1
from hf_dpzero.tasks.metrics.squad import squad_exact_match, squad_f1

_TEXT = datasets.Value("string")
_TEXTS = datasets.Sequence(_TEXT)
_DESCRIPTION = "Means over the rows of exact match and F1, fractions in [0, 1]; each row's best "


class Squad(evaluate.Metric):
    """Means of `squad_exact_match` and `squad_f1`: fractions where the script has percentages.

    >>> Squad().compute(predictions=["the cat", "dog"], references=[["cat"], ["cat", "hot dog"]])
    {'exact_match': 0.5, 'f1': 0.8333333333333333}
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION + "over its right answers (SQuAD v1.1).",
            citation="Rajpurkar et al., 2016, https://arxiv.org/abs/1606.05250",
            inputs_description="predictions: strings; references: lists of right answers.",
            features=datasets.Features({"predictions": _TEXT, "references": _TEXTS}),
        )

    def _compute(self, *, predictions: Any, references: Any) -> dict[str, float]:
        return _means(squad_exact_match, squad_f1, predictions, references)


class Drop(evaluate.Metric):
    """Means of `drop_exact_match` and `drop_f1`; predictions are lists of spans here.

    >>> Drop().compute(predictions=[["12 yards"], ["Jets"]], references=[[["12"]], [["the Jets"]]])
    {'exact_match': 0.5, 'f1': 0.835}
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION + "over its annotators (DROP).",
            citation="Dua et al., 2019, https://arxiv.org/abs/1903.00161",
            inputs_description=(
                "predictions: lists of spans; references: lists, one entry an annotator, of lists "
                "of spans."
            ),
            features=datasets.Features(
                {"predictions": _TEXTS, "references": datasets.Sequence(_TEXTS)}
            ),
        )

    def _compute(self, *, predictions: Any, references: Any) -> dict[str, float]:
        return _means(drop_exact_match, drop_f1, predictions, references)


def _means(
    exact_match: Callable[[Any, Any], float],
    f1: Callable[[Any, Any], float],
    predictions: Sequence[Any],
    references: Sequence[Any],
) -> dict[str, float]:
    rows = list(zip(predictions, references, strict=True))
    return {
        "exact_match": float(np.mean([exact_match(*row) for row in rows])),
        "f1": float(np.mean([f1(*row) for row in rows])),
    }


def squad_scores(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """{"exact_match", "f1"}: SQuAD v1.1's scores, means over N rows, in [0, 1].

    Args:
      predictions: N answers, perhaps empty strings.
      references: N lists of at least one right answer.
    Raises:
      ValueError: no rows, another number of references, something that is no string, or a row
        without right answers; names the row.

    >>> squad_scores(["Paris", ""], [["paris", "Paris, France"], ["London"]])
    {'exact_match': 0.5, 'f1': 0.5}
    """
    _check_rows(predictions, references)
    said = [_text(prediction, row) for row, prediction in enumerate(predictions)]
    golds = [_texts(reference, row) for row, reference in enumerate(references)]
    return Squad(keep_in_memory=True).compute(predictions=said, references=golds)


def drop_scores(
    predictions: Sequence[Answer], references: Sequence[Sequence[Answer]]
) -> dict[str, float]:
    """{"exact_match", "f1"}: DROP's scores, means over N rows, in [0, 1].

    Args:
      predictions: N answers, each a string or a list of spans.
      references: N lists of at least one right answer, each a string or a list of spans. Spans of
        one annotator belong in one inner list, alternatives in several.
    Raises:
      ValueError: no rows, another number of references, something that is no string, or a row
        without right answers; names the row.

    >>> drop_scores(["7", ["Jets", "Bears"]], [["7.0"], [["Bears", "Jets"], ["Jets"]]])
    {'exact_match': 1.0, 'f1': 1.0}
    """
    _check_rows(predictions, references)
    said = [_spans(prediction, row) for row, prediction in enumerate(predictions)]
    golds = [
        [_spans(gold, row) for gold in _listed(reference, row)]
        for row, reference in enumerate(references)
    ]
    return Drop(keep_in_memory=True).compute(predictions=said, references=golds)


# ---------------------------------------------------------------- rows, checked


def _check_rows(predictions: Sequence[Any], references: Sequence[Any]) -> None:
    if len(predictions) != len(references) or not len(predictions):
        raise ValueError(
            f"{len(predictions)} predictions for {len(references)} references; give one each, for "
            "at least one row."
        )


def _text(value: Any, row: int) -> str:
    if not isinstance(value, str):
        raise ValueError(f"row {row} has {value!r} where a string is due; decode or str() it.")
    return str(value)


def _listed(reference: Any, row: int) -> list[Any]:
    """A row's right answers: a list, and not an empty one."""
    if not isinstance(reference, (list, tuple, np.ndarray)) or not len(reference):
        raise ValueError(
            f"row {row} has {reference!r} where a list of right answers is due; give at least one, "
            "as in ['Paris'], or drop the row."
        )
    return list(reference)


def _texts(reference: Any, row: int) -> list[str]:
    return [_text(gold, row) for gold in _listed(reference, row)]


def _spans(answer: Any, row: int) -> list[str]:
    if isinstance(answer, str):
        return [str(answer)]
    if not isinstance(answer, (list, tuple, np.ndarray)):
        raise ValueError(f"row {row} has {answer!r} where a string or a list of spans is due.")
    return [_text(span, row) for span in answer]
