"""DROP's scores of one answer: exact match and number-focused F1, the best over the annotators.

An answer is a list of spans. Source: Dua, Wang, Dasigi, Stanovsky, Singh, Gardner, "DROP: A Reading
Comprehension Benchmark Requiring Discrete Reasoning Over Paragraphs" (2019), section 5.1, and the
evaluation script that its authors publish (`drop_eval` of AllenNLP), whose numbers these are.
Pure functions of strings; the metric over a data set is `answer_scores.Drop`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from hf_dpzero.tasks.metrics.answer_text import gold_answers, without_articles, without_punctuation

Answer: TypeAlias = str | Sequence[str]
"""One answer: its spans, or a string if it is one span."""


def drop_normalized(span: str) -> str:
    """Lower-case words between spaces and hyphens; numbers as floats, no articles.

    A word keeps its punctuation only if it is a number as it stands: "3.5" is 3.5 but "$3.5" is 35.

    >>> drop_normalized("The 12-yard TD-pass, 1e1 of $3.5")
    '12.0 yard td pass 10.0 of 35.0'
    """
    words = (_normalized_word(word) for word in re.split("[ -]", span.lower()))
    return " ".join(word for word in words if word)


def _normalized_word(word: str) -> str:
    bare = word if _is_number(word) else without_punctuation(word)
    return without_articles(str(float(bare)) if _is_number(bare) else bare)


def _is_number(word: str) -> bool:
    """Whether `float` reads it, so "1e3", "nan" and "infinity" are numbers, "ten" is not."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def drop_exact_match(prediction: Answer, golds: Sequence[Answer]) -> float:
    """1.0 if the prediction has as many spans as some gold answer, and the same ones, else 0.0.

    Order does not matter; of repeated spans only the total number counts.

    Args:
      prediction: a string, or a list of spans, perhaps empty.
      golds: one right answer an annotator, each a string or a list of spans; at least one. An
        answer whose first span is blank, or that has none, cannot be matched.
    Raises:
      ValueError: golds is a string or empty.

    >>> drop_exact_match(["Bears", "the Jets"], [["Jets"], ["Jets", "Bears"]])
    1.0
    """
    said = [drop_normalized(span) for span in _spans(prediction)]
    return float(any(_same(said, gold) for gold in _answered(golds)))


def _same(said: Sequence[str], gold: Sequence[str]) -> bool:
    return len(said) == len(gold) and set(said) == {drop_normalized(span) for span in gold}


def drop_f1(prediction: Answer, golds: Sequence[Answer]) -> float:
    """The largest F1 of the prediction with a gold answer, rounded to two decimals, in [0, 1].

    The F1 of two answers: their spans' sets of words are aligned one to one such that the sum of
    the F1 of the pairs is largest; that sum is divided by the larger number of spans.

    Args:
      prediction: a string, or a list of spans, perhaps empty.
      golds: as in `drop_exact_match`.
    Raises:
      ValueError: golds is a string or empty.

    >>> drop_f1("78", [["78-yard"]])  # precision 1, recall 1/2
    0.67
    >>> drop_f1(["Bears"], [["Jets", "Bears"]])
    0.5
    """
    said = _bags(_spans(prediction))
    return max((_aligned_f1(said, _bags(gold)) for gold in _answered(golds)), default=0.0)


def _spans(answer: Answer) -> Sequence[str]:
    return [answer] if isinstance(answer, str) else answer


def _answered(golds: Sequence[Answer]) -> list[Sequence[str]]:
    """The spans of the gold answers that are not blank."""
    spans = [_spans(gold) for gold in gold_answers(golds)]
    return [gold for gold in spans if len(gold) and gold[0].strip()]


def _bags(spans: Sequence[str]) -> list[frozenset[str]]:
    return [frozenset(drop_normalized(span).split()) for span in spans]


def _aligned_f1(said: Sequence[frozenset[str]], gold: Sequence[frozenset[str]]) -> float:
    """The mean F1 of the best one-to-one alignment; a bag that is left over counts with 0."""
    from scipy.optimize import linear_sum_assignment

    pairs = np.array([[_bag_f1(one, other) for other in said] for one in gold])
    pairs = pairs.reshape(len(gold), len(said))
    scores = np.zeros(max(pairs.shape))
    rows, columns = linear_sum_assignment(pairs, maximize=True)
    scores[rows] = pairs[rows, columns]
    return float(np.round(np.mean(scores), 2))


def _bag_f1(gold: frozenset[str], said: frozenset[str]) -> float:
    """The harmonic mean of precision and recall; 0 where gold has numbers and said none of them."""
    numbers = {word for word in gold if _is_number(word)}
    if numbers and not numbers & said:
        return 0.0
    precision = len(gold & said) / len(said) if said else 1.0
    recall = len(gold & said) / len(gold) if gold else 1.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
