"""Sensitivity where one record takes part in several rounds of correlated noise.

A record that contributes g_i in rounds i of a pattern moves C G by sum_i c_i g_i^T. With ||g_i|| <= 1,

    || sum_i c_i g_i^T ||_F^2 = sum_ij <c_i, c_j> <g_i, g_j>  <=  sum_ij |<c_i, c_j>|,

whatever the signs (Choquette-Choo, McMahan, Rush and Thakurta 2023, arXiv:2211.06530). Where no inner
product is negative, as in every factorisation of `factorization.py` but perhaps the dense ones, equal
vectors attain it. Gaussian noise on C G is accounted at this bound also when vectors are chosen after
seeing earlier rounds.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from hf_dpzero.privacy.correlated_noise.factorization import Factorization

ROUNDED_UP = 1.0 + 1e-9
"""More than float64 loses in the sums of up to 10^6 products."""


@lru_cache(maxsize=256)
def epoch_sensitivity(
    factorization: Factorization, rounds_per_epoch: int, count: int | None = None
) -> float:
    """Sensitivity of C G where a record takes part once an epoch, always in the same round of it.

    The largest over the places in an epoch of the bound in the module's docstring.

    Args:
      factorization: of R rounds.
      rounds_per_epoch: E >= 1; E >= R means once.
      count: only the first `count` rounds are released; default R.

    Returns:
      In units of the norm bound of one contribution; at count = 0 zero. Under replacement it doubles.

    >>> from hf_dpzero.privacy.correlated_noise.factorization import independent
    >>> round(epoch_sensitivity(independent(12), 4) ** 2, 6)
    3.0
    """
    released = factorization.rounds if count is None else count
    if rounds_per_epoch < 1 or not 0 <= released <= factorization.rounds:
        raise ValueError(
            f"rounds_per_epoch={rounds_per_epoch} must be at least 1, and count={count} in "
            f"0..{factorization.rounds}."
        )
    squared = (
        pattern_bound(factorization, np.arange(place, released, rounds_per_epoch), released)
        for place in range(min(rounds_per_epoch, released))
    )
    if rounds_per_epoch >= released == factorization.rounds:
        squared = iter(factorization.squared_column_norms.tolist())
    return math.sqrt(max(squared, default=0.0)) * ROUNDED_UP


def pattern_bound(factorization: Factorization, rounds: np.ndarray, count: int) -> float:
    """sum_ij |<c_i, c_j>| over the rounds of one pattern, with C's first `count` rows."""
    return float(np.abs(factorization.gram(rounds, count)).sum())
