r"""Membership inference: whether losses of a trained model tell rows it was trained on from others.

A row is called a training row where its score, minus its loss or by how much the loss fell from the
base model's (Yeom et al. 2018; Watson et al. 2022), is above a threshold. Of rows that were held out by
chance, (epsilon, delta) bounds the expected shares of both kinds that are called so, whoever asks
(Kairouz, Oh, Viswanath 2015, Theorem 2.1):

    TPR <= min(e^epsilon FPR + delta, 1 - e^-epsilon (1 - delta - FPR)),

and the area under all of them by 1 - (1 - delta)^2 / (1 + e^epsilon). An attack that fails proves
nothing. Where each row was held out by a fair coin of its own, this is an audit in one run: guess the
coins of the highest and the lowest scores, and count (Steinke, Nasr, Jagielski 2023, Algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


def largest_share(fpr: npt.ArrayLike, epsilon: float, delta: float) -> np.ndarray:
    """Returns the TPR that is permitted at an FPR, both of any shape in [0, 1]; epsilon may be inf.

    >>> largest_share([0.25, 0.75], epsilon=math.log(2), delta=0.0).tolist()
    [0.5, 0.875]
    """
    grows, fpr = math.exp(min(epsilon, 700.0)), np.asarray(fpr)
    return np.minimum(np.minimum(grows * fpr + delta, 1 - (1 - delta - fpr) / grows), 1.0)


def largest_area(epsilon: float, delta: float) -> float:
    """Returns the area under `largest_share`.

    >>> largest_area(0.0, 0.0), largest_area(math.log(3), 0.0), largest_area(math.inf, 0.0)
    (0.5, 0.75, 1.0)
    """
    return 1 - (1 - delta) ** 2 / (1 + math.exp(min(epsilon, 700.0)))


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What one score tells.

    Attributes:
      what: the score, in words.
      curve: FPR and TPR at every threshold, ascending, float [2, <= m + n + 1].
      area: under the curve of TPR over FPR; 0.5 is a guess.
      error: one standard deviation of it if the score tells nothing.
      found: TPR above the score of the others' highest hundredth (of one at least).
      false_alarms: the FPR there that is to be expected of more others.
    """

    what: str
    curve: np.ndarray
    area: float
    error: float
    found: float
    false_alarms: float


def attack(what: str, members: np.ndarray, others: np.ndarray) -> Attack:
    """Attacks by one score, larger for rows that seem trained on: float [m], float [n]."""
    from scipy.stats import rankdata

    m, n = len(members), len(others)
    ranks = rankdata(np.concatenate([members, others]))[:m]
    thresholds = np.unique(np.concatenate([[np.inf], members, others]))[::-1]
    shares = [
        1 - np.searchsorted(np.sort(side), thresholds) / len(side) for side in (others, members)
    ]
    alarms = max(1, n // 100)
    threshold = np.sort(others)[::-1][min(alarms, n - 1)]
    return Attack(
        what=what,
        curve=np.array(shares),
        area=float((ranks.sum() - m * (m + 1) / 2) / (m * n)),
        error=math.sqrt((m + n + 1) / (12 * m * n)),
        found=float(np.mean(members > threshold)),
        false_alarms=(alarms + 1) / (n + 1),  # one more row passes by chance, too
    )


def attacks(after: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> list[Attack]:
    """Attacks by both scores, and by the base model's loss, which saw neither: how the rows differ.

    Args:
      after: the trained model's losses of its training rows, float [m], and of other rows, float [n].
      before: the base model's, of the same rows.
    """
    fell = [start - end for start, end in zip(before, after, strict=True)]
    return [
        attack("how far the loss fell", *fell),
        attack("the loss", *(-loss for loss in after)),
        attack("the base model's loss", *(-loss for loss in before)),
    ]


GUESSED = 0.15
"""Share of the coins that are guessed as "in", and as many as "out"."""


def guesses(
    scores: Sequence[np.ndarray], names: Sequence[Sequence[bytes]], units: bool
) -> tuple[int, int, int]:
    """Guesses the coins of the highest scores and the lowest; ties are wrong.

    Args:
      scores: of training rows, float [m], and of rows that were held out, float [n].
      names: of both; rows of one name had one coin.
      units: a unit's rows count together, by their mean. Otherwise a row that occurs twice has no coin
        of its own, and is left out.

    Returns:
      How many guesses are right, how many there are, and of how many coins.
    """
    sides = [_of_coins(*side, units) for side in zip(scores, names, strict=True)]
    score, out = np.concatenate(sides), np.repeat([False, True], [len(side) for side in sides])
    each = int(GUESSED * len(score))
    highest, lowest = np.lexsort((~out, -score))[:each], np.lexsort((out, score))[:each]
    return int((~out[highest]).sum() + out[lowest].sum()), 2 * each, len(score)


def _of_coins(scores: np.ndarray, names: Sequence[bytes], units: bool) -> np.ndarray:
    numbers: dict[bytes, int] = {}
    coin = [numbers.setdefault(name, len(numbers)) for name in names]
    counts = np.bincount(coin)
    means = np.bincount(coin, scores) / counts
    return means if units else means[counts == 1]
