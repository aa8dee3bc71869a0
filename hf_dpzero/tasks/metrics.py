"""Scores of the tasks: accuracy, macro-F1, and the official rules of SQuAD v1.1 and DROP.

Pure functions without a network; every number is a fraction in [0, 1] (the official scripts print
percentages). `answer_f1` scores one example, so that it serves as a training objective too.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import evaluate
    from numpy.typing import ArrayLike

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)  # of ASCII; others, such as “ or –, stay

Answer = str | Sequence[str]
"""One answer to a question of DROP: its spans, or a string if it is one span."""


def classification_scores(
    predictions: ArrayLike, references: ArrayLike, metric: str
) -> dict[str, float]:
    """Returns what evaluation of a classification reports.

    Args:
      predictions: `[N]` integers or booleans, N >= 1.
      references: the same.
      metric: "accuracy" or "macro_f1".

    Returns:
      {"accuracy": the share of equal entries}; if it is the metric also {"macro_f1": the mean over the
      classes that occur in either of 2 TP / (2 TP + FP + FN)}, as scikit-learn's `average="macro"`.

    Raises:
      ValueError: no integers, different lengths, or no rows.
    """
    predicted, true = np.asarray(predictions), np.asarray(references)
    for name, classes in (("predictions", predicted), ("references", true)):
        if classes.size and classes.dtype.kind not in "iub":
            raise ValueError(
                f"{name} of dtype {classes.dtype} are not classes; give integers, for logits their "
                "argmax over the classes."
            )
    if predicted.ndim != 1 or predicted.shape != true.shape or not len(predicted):
        raise ValueError(
            f"predictions have shape {predicted.shape}, references {true.shape}; give one class a row, "
            "for at least one row."
        )
    predicted, true = predicted.astype(np.int64), true.astype(np.int64)
    scores = {"accuracy": float(np.mean(predicted == true))}
    if metric == "macro_f1":
        by_class = []
        for label in np.union1d(predicted, true):
            hits = np.sum((predicted == label) & (true == label))
            by_class.append(2 * hits / (np.sum(predicted == label) + np.sum(true == label)))
        scores["macro_f1"] = float(np.mean(by_class))
    return scores


def answer_scores(
    predictions: Sequence[Answer], references: Sequence[Sequence[Answer]], metric: str
) -> dict[str, float]:
    """Returns exact match and F1 of generated answers, means over N >= 1 rows.

    Args:
      predictions: N answers, perhaps empty; for "drop" strings or lists of spans.
      references: N lists of at least one right answer, for "drop" strings or lists of spans. Spans of
        one annotator belong in one inner list, alternatives in several.
      metric: "squad" or "drop".

    Returns:
      {"exact_match": ..., "f1": ...}.

    Raises:
      ValueError: no rows, another number of references, something that is not a string, or a row
        without right answers; names the row.

    >>> answer_scores(["Paris", ""], [["paris", "Paris, France"], ["London"]], "squad")
    {'exact_match': 0.5, 'f1': 0.5}
    >>> answer_scores(["7", ["Jets", "Bears"]], [["7.0"], [["Bears", "Jets"], ["Jets"]]], "drop")
    {'exact_match': 1.0, 'f1': 1.0}
    """
    if len(predictions) != len(references) or not len(predictions):
        raise ValueError(
            f"{len(predictions)} predictions for {len(references)} references; give one each, for "
            "at least one row."
        )
    rows = list(zip(predictions, references, strict=True))
    for row, (prediction, golds) in enumerate(rows):
        if not isinstance(golds, (list, tuple, np.ndarray)) or not len(golds):
            raise ValueError(
                f"row {row} has {golds!r}, not a list of right answers; give at least one, as in "
                "['Paris'], or drop the row."
            )
        for answer in (prediction, *golds):
            listed = metric == "drop" and isinstance(answer, (list, tuple, np.ndarray))
            if not all(isinstance(span, str) for span in (answer if listed else [answer])):
                raise ValueError(f"row {row} has {answer!r}, not a string; decode or str() it.")
    scores = np.mean([_RULES[metric](*row) for row in rows], axis=0)
    return {"exact_match": float(scores[0]), "f1": float(scores[1])}


def answer_f1(prediction: Answer, golds: Sequence[Answer], metric: str) -> float:
    """Returns the F1 of one generated answer in [0, 1], the best over its gold answers.

    Args:
      prediction: a string; for "drop" also a list of spans, perhaps empty.
      golds: at least one right answer. For "drop" one an annotator, each a string or a list of spans;
        an answer whose first span is blank, or that has none, cannot be matched.
      metric: "squad" or "drop".

    Raises:
      ValueError: golds is a string or empty.
    """
    if isinstance(golds, str) or not len(golds):  # a string would be scored letter by letter
        raise ValueError(
            f"golds={golds!r} is not a list of right answers; give at least one, as in ['Paris']."
        )
    return _RULES[metric](prediction, golds)[1]


def evaluate_metric(name: str) -> evaluate.Metric:
    """Makes a task's scores a metric of `evaluate`, which collects batches, without a network.

    >>> metric = evaluate_metric("squad")
    >>> metric.add_batch(predictions=["the cat"], references=[["cat"]])
    >>> metric.add_batch(predictions=["dog"], references=[["cat", "hot dog"]])
    >>> metric.compute()
    {'exact_match': 0.5, 'f1': 0.8333333333333333}
    """
    import evaluate
    from datasets import Features, Sequence, Value

    text, label = Value("string"), Value("int64")
    answers = {"squad": (text, Sequence(text)), "drop": (Sequence(text), Sequence(Sequence(text)))}
    predictions, references = answers.get(name, (label, label))
    scores = answer_scores if name in answers else classification_scores

    class Scores(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            about = {"description": name, "citation": "", "inputs_description": ""}
            features = Features({"predictions": predictions, "references": references})
            return evaluate.MetricInfo(**about, features=features)

        def _compute(self, **columns: list[Answer]) -> dict[str, float]:
            return scores(**columns, metric=name)

    return Scores(keep_in_memory=True)


# SQuAD v1.1: Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1, and the data set's evaluation script.


def squad_normalized(text: str) -> str:
    """Returns lower case without ASCII punctuation, then without articles, with single spaces.

    >>> squad_normalized("The U.S.  Navy's a-b, an A!")
    'us navys ab'
    """
    return _without_articles(text.lower().translate(_PUNCTUATION))


def _squad(prediction: str, golds: Sequence[str]) -> tuple[float, float]:
    """Exact match, and F1: 2 |common| / (|prediction| + |gold|) of the bags of words; the best gold's.

    Words are what white space separates after normalisation, with multiplicity.

    >>> _squad("late October 1973", ["1973", "in October 1973"]) == (0, 2 / 3)
    True
    """
    text = squad_normalized(prediction)
    words, f1 = Counter(text.split()), [0.0]
    normalized = [squad_normalized(gold) for gold in golds]
    for gold in normalized:
        others = Counter(gold.split())
        # No word in common is 0, also where both bags are empty and match: so does the script of v1.1.
        if common := (words & others).total():
            f1.append(2 * common / (words.total() + others.total()))
    return float(text in normalized), max(f1)


# DROP: Dua et al. 2019, arXiv:1903.00161, section 5.1, and the script `drop_eval` of AllenNLP.


def drop_normalized(span: str) -> str:
    """Returns the lower-case words between spaces and hyphens; numbers as floats, no articles.

    A word keeps its punctuation only if it is a number as it stands: "3.5" is 3.5 but "$3.5" is 35.

    >>> drop_normalized("The 12-yard TD-pass, 1e1 of $3.5")
    '12.0 yard td pass 10.0 of 35.0'
    """
    words = []
    for word in re.split("[ -]", span.lower()):
        bare = word if _is_number(word) else word.translate(_PUNCTUATION)
        words.append(_without_articles(str(float(bare)) if _is_number(bare) else bare))
    return " ".join(filter(None, words))


def _drop(prediction: Answer, golds: Sequence[Answer]) -> tuple[float, float]:
    """Exact match, and the F1 of the two answers rounded to two decimals; each the best gold's.

    Answers match if they have as many spans and the same ones. Their F1: the spans' sets of words are
    aligned one to one such that the sum of the F1 of the pairs is largest; that sum is divided by the
    larger number of spans.

    >>> _drop("78", [["78-yard"]])  # precision 1, recall 1/2
    (0.0, 0.67)
    >>> _drop(["Bears"], [["Jets", "Bears"]])
    (0.0, 0.5)
    """
    from scipy.optimize import linear_sum_assignment

    def normalized(answer: Answer) -> list[str]:
        return [drop_normalized(span) for span in _spans(answer)]

    said, exact, best = normalized(prediction), False, 0.0
    predicted = [set(span.split()) for span in said]
    for gold in golds:
        spans = _spans(gold)
        if not len(spans) or not spans[0].strip():  # an annotator who left nothing
            continue
        wanted = normalized(gold)
        # Of repeated spans only the number counts, as in the script.
        exact = exact or (len(said) == len(wanted) and set(said) == set(wanted))
        pairs = np.array([[_set_f1(set(one.split()), o) for o in predicted] for one in wanted])
        pairs = pairs.reshape(len(wanted), len(predicted))
        scores = np.zeros(max(pairs.shape))  # a set that is left over counts with 0
        rows, columns = linear_sum_assignment(pairs, maximize=True)
        scores[rows] = pairs[rows, columns]
        best = max(best, float(np.round(np.mean(scores), 2)))
    return float(exact), best


def _is_number(word: str) -> bool:
    """Whether `float` reads it, so "1e3", "nan" and "infinity" are numbers, "ten" is not."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _spans(answer: Answer) -> Sequence[str]:
    return [answer] if isinstance(answer, str) else answer


def _set_f1(gold: set[str], predicted: set[str]) -> float:
    """The harmonic mean of precision and recall; 0 if gold has numbers and none is predicted."""
    numbers = {word for word in gold if _is_number(word)}
    if numbers and not numbers & predicted:
        return 0.0
    precision = len(gold & predicted) / len(predicted) if predicted else 1.0
    recall = len(gold & predicted) / len(gold) if gold else 1.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _without_articles(text: str) -> str:
    """A lower-case text without the words a, an, the, and with single spaces between words."""
    return " ".join(_ARTICLES.sub(" ", text).split())


_RULES: dict[str, Callable[..., tuple[float, float]]] = {"squad": _squad, "drop": _drop}
"""Metric -> exact match and F1 of one example."""
