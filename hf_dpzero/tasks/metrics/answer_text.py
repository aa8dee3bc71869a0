"""What the scores of free-text answers share: which text does not matter, which golds there are."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def without_punctuation(text: str) -> str:
    """The text less the 32 punctuation characters of ASCII; others, such as “ or –, stay.

    >>> without_punctuation("U.S.-led (1990)")
    'USled 1990'
    """
    return text.translate(_PUNCTUATION)


def without_articles(text: str) -> str:
    """A lower-case text less the words a, an, the, and with single spaces between words.

    >>> without_articles("the  cat in   a theatre")
    'cat in theatre'
    """
    return " ".join(_ARTICLES.sub(" ", text).split())


def gold_answers(golds: Sequence[T]) -> Sequence[T]:
    """`golds` if it is a list of at least one right answer.

    Raises:
      ValueError: one string, which would be read as a list of its characters, or an empty list.
    """
    if isinstance(golds, str) or not len(golds):
        raise ValueError(
            f"golds={golds!r} is no list of right answers; give at least one, as in ['Paris']."
        )
    return golds
