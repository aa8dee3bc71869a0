"""SQuAD v1.1's scores of one answer: exact match and token F1, the best over the right answers.

Source: Rajpurkar, Zhang, Lopyrev, Liang, "SQuAD: 100,000+ Questions for Machine Comprehension of
Text" (2016), section 6.1, and the data set's evaluation script, whose numbers these are divided by
100. Pure functions of strings; the metric over a data set is `answer_scores.Squad`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hf_dpzero.tasks.metrics.answer_text import gold_answers, without_articles, without_punctuation


def squad_normalized(text: str) -> str:
    """Lower case, no ASCII punctuation, then no articles, single spaces; in this order.

    >>> squad_normalized("The U.S.  Navy's a-b, an A!")
    'us navys ab'
    """
    return without_articles(without_punctuation(text.lower()))


def squad_exact_match(prediction: str, golds: Sequence[str]) -> float:
    """1.0 if the prediction equals some gold answer after normalisation, else 0.0.

    Args:
      prediction: may be empty; then it equals a gold answer of articles and punctuation only.
      golds: the right answers, at least one.
    Raises:
      ValueError: golds is a string or empty.

    >>> squad_exact_match("the Seine.", ["Rhone", "Seine"])
    1.0
    """
    said = squad_normalized(prediction)
    return float(any(said == squad_normalized(gold) for gold in gold_answers(golds)))


def squad_f1(prediction: str, golds: Sequence[str]) -> float:
    """The largest F1 of the prediction's bag of words with that of a gold answer, in [0, 1].

    Words are what white space separates after normalisation, with multiplicity. No word in common
    is 0, also where both bags are empty and the exact match is 1: so does the script of v1.1.

    Args:
      prediction: may be empty.
      golds: the right answers, at least one.
    Raises:
      ValueError: golds is a string or empty.

    >>> squad_f1("late October 1973", ["1973", "in October 1973"]) == 2 / 3
    True
    """
    said = _words(prediction)
    return max(_bag_f1(said, _words(gold)) for gold in gold_answers(golds))


def _words(text: str) -> Counter[str]:
    return Counter(squad_normalized(text).split())


def _bag_f1(said: Counter[str], gold: Counter[str]) -> float:
    """2 |said & gold| / (|said| + |gold|), the harmonic mean of precision and recall."""
    common = (said & gold).total()
    return 2 * common / (said.total() + gold.total()) if common else 0.0
