r"""Factorisations A = B C of prefix sums: how the noise of a round reuses the noise of earlier rounds.

A is lower triangular with ones. The vectors g_0 .. g_{R-1} of R rounds are released with the noise of
one Gaussian mechanism on C G:

    A G + B Z = B (C G + Z),        round r:   g_r + (b_{r+1} - b_r) Z = g_r + (C^{-1} Z)_r

Z has R rows of independent noise. All C here are square and lower triangular with a positive diagonal,
so that round r needs no later data, and the accounting of the Gaussian mechanism holds for vectors
that are chosen after seeing earlier rounds (Denisov, McMahan, Rush, Smith and Thakurta 2022,
arXiv:2202.08312, Theorem 2.1). If one record takes part in one round, with a vector of norm at most 1,
the sensitivity is the largest column norm of C.

*Several rounds.* A record that contributes g_i in rounds i of a pattern moves C G by sum_i c_i g_i^T.
With ||g_i|| <= 1,

    || sum_i c_i g_i^T ||_F^2 = sum_ij <c_i, c_j> <g_i, g_j>  <=  sum_ij |<c_i, c_j>|,

whatever the signs (Choquette-Choo, McMahan, Rush and Thakurta 2023, arXiv:2211.06530). Where no inner
product is negative, as in every factorisation here but perhaps the dense ones, equal vectors attain it.
Gaussian noise on C G is accounted at this bound also when vectors follow from earlier rounds.

| name | C | rows of C^{-1} | source |
|---|---|---|---|
| independent | identity | one draw | |
| tree | nodes of a binary tree that prefixes use | 1 + log2 R draws at most | Dwork et al. 2010 |
| tree, least squares | all nodes, B = A C^+ | dense | Honaker 2015 |
| optimized | least error for the largest column norm | dense | Denisov et al. 2022 |
| toeplitz | square root of A | all earlier draws | Fichtenberger et al. 2023, arXiv:2202.11205 |
| banded | C^{-1} of `toeplitz`, cut off after b | b draws | |
| banded strategy | C of `toeplitz`, cut off after b | all earlier draws | arXiv:2306.08153 |

Own code, as dp-accounting has no matrix factorisations and jax-privacy's run on JAX.

The figure of merit is the mean squared error of a prefix sum for noise of deviation 1 over the
sensitivity, max_r ||c_r||^2 * ||B||_F^2 / R.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache

import numpy as np

from hf_dpzero.privacy.correlated.matrices import MAX_DENSE_ROUNDS as MAX_DENSE_ROUNDS
from hf_dpzero.privacy.correlated.matrices import Dense as Dense
from hf_dpzero.privacy.correlated.matrices import Factorization as Factorization
from hf_dpzero.privacy.correlated.matrices import NoiseRow as NoiseRow
from hf_dpzero.privacy.correlated.matrices import Restarted as Restarted
from hf_dpzero.privacy.correlated.matrices import Toeplitz as Toeplitz
from hf_dpzero.privacy.correlated.matrices import Tree, check_dense_rounds
from hf_dpzero.privacy.described import check_count

ROUNDED_UP = 1.0 + 1e-9
"""More than float64 loses in the sums of up to 10^6 products."""

HISTORY = 32
"""Releases that the noise of the next is foretold from."""


def independent(rounds: int) -> Factorization:
    """Makes C = I: the noise of DP-SGD."""
    return Toeplitz(rounds, np.ones(1), np.ones(1), "independent")


def toeplitz(rounds: int) -> Factorization:
    """Makes C = B = the square root of A: 1, 1/2, 3/8, 5/16, ..; the inverse 1, -1/2, -1/8, -1/16, ..

    The published bound 1 + ln(4R/5)/pi of its squared column norm is too small; this is the exact sum.

    >>> round(float(toeplitz(1000).squared_column_norms[0]), 3)
    3.265
    """
    return Toeplitz(rounds, square_root(rounds), inverse_square_root(rounds), "toeplitz")


def banded(rounds: int, bands: int) -> Factorization:
    """Takes `bands` diagonals of the C^{-1} of `toeplitz`; C is the inverse of that.

    A round's noise needs the last `bands` draws only. C is not banded, and its column norms are computed
    from it, not taken from `toeplitz`.

    Args:
      rounds: R.
      bands: b >= 1; b >= R gives `toeplitz`, and 1 independent noise.
    """
    check_count("bands", bands)
    inverse = inverse_square_root(min(bands, rounds))
    return Toeplitz(rounds, reciprocal(inverse, rounds), inverse, "banded")


def tree(rounds: int) -> Factorization:
    """Makes the binary tree with B picking nodes; any number of rounds."""
    return Tree(rounds)


def tree_least_squares(rounds: int) -> Factorization:
    """Makes all nodes of the binary tree, with the least-squares B = A C^+ (Honaker 2015).

    C of 2P - 1 rows (P the next power of two) is replaced by the lower-triangular matrix of the same
    Gram matrix: B Z then has the same distribution, and the same sensitivity.
    """
    check_dense_rounds(rounds, "tree_least_squares")
    size = 1 << (rounds - 1).bit_length()
    levels = [np.kron(np.eye(size >> j), np.ones(1 << j)) for j in range(size.bit_length())]
    nodes = np.concatenate(levels)[:, :rounds]
    return Dense(_lower_factor(nodes.T @ nodes), "tree_least_squares")


@lru_cache(maxsize=8)
def optimized(rounds: int, tolerance: float = 1e-6) -> Factorization:
    """Minimises ||A C^{-1}||_F for columns of norm at most 1, by Denisov et al.'s fixed point.

    v <- diag((D A^T A D)^{1/2}) with D = diag(v)^{1/2}; at its fixed point the Gram matrix of C is
    X = D^{-1} (D A^T A D)^{1/2} D^{-1}, with ones on its diagonal (their Section 4).

    Args:
      rounds: R <= `MAX_DENSE_ROUNDS`; about a minute at 1,000.
      tolerance: how far a squared column norm may be from 1 when the iteration ends. The norms that are
        accounted are those of the C that comes out.
    """
    check_dense_rounds(rounds, "optimized")
    rounds_left = rounds - np.arange(rounds, dtype=np.float64)
    workload = np.minimum.outer(rounds_left, rounds_left)  # A^T A
    v = np.sqrt(np.diag(workload))
    for _ in range(500):
        scale = np.sqrt(v)
        values, vectors = np.linalg.eigh(scale[:, None] * workload * scale)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
        diagonal = np.diag(root)
        if np.abs(diagonal / v - 1).max() <= tolerance:
            break
        v = diagonal.copy()
    return Dense(_lower_factor(root / np.outer(scale, scale)), "optimized")


def square_root(count: int) -> np.ndarray:
    """Returns h: coefficients of (1 - x)^{-1/2}; h_0 = 1, h_r = (1 - 1/(2r)) h_{r-1}; [count]."""
    return np.cumprod(np.append(1.0, 1.0 - 0.5 / np.arange(1, count)))


def inverse_square_root(count: int) -> np.ndarray:
    """Returns the coefficients of (1 - x)^{1/2}: 1, then the factors 1 - 3/(2r); float64 [count]."""
    return np.cumprod(np.append(1.0, 1.0 - 1.5 / np.arange(1, count)))


def reciprocal(series: np.ndarray, count: int) -> np.ndarray:
    """Returns the first `count` coefficients of 1 / series, float64; the series begins with 1."""
    result = np.zeros(count)
    result[0] = 1.0
    for n in range(1, count):
        terms = min(n, len(series) - 1)
        result[n] = -(series[1 : terms + 1] @ result[n - terms : n][::-1])
    return result


def _lower_factor(gram: np.ndarray) -> np.ndarray:
    """Returns the lower-triangular C with C^T C = gram."""
    # Cholesky with rows and columns in reverse
    return np.linalg.cholesky(gram[::-1, ::-1]).T[::-1, ::-1]


@lru_cache(maxsize=256)
def epoch_sensitivity(
    factorization: Factorization, rounds_per_epoch: int, count: int | None = None
) -> float:
    """Returns the sensitivity of C G where a record takes part once an epoch, at a fixed place in it.

    The largest over the places in an epoch of the bound in the module's docstring.

    Args:
      factorization: of R rounds.
      rounds_per_epoch: E >= 1; E >= R means once.
      count: only the first `count` rounds are released; default R.

    Returns:
      In units of the norm bound of one contribution; at count = 0 zero. Under replacement it doubles.

    >>> round(epoch_sensitivity(independent(12), 4) ** 2, 6)
    3.0
    """
    released = factorization.rounds if count is None else count
    if rounds_per_epoch < 1 or not 0 <= released <= factorization.rounds:
        raise ValueError(
            f"rounds_per_epoch={rounds_per_epoch} must be at least 1, and count={count} in "
            f"0..{factorization.rounds}."
        )
    if rounds_per_epoch >= released:
        squared = factorization.largest_squared_norm(released) if released else 0.0
    else:
        places = 1 if factorization.first_is_worst else rounds_per_epoch
        squared = max(
            pattern_bound(factorization, np.arange(place, released, rounds_per_epoch), released)
            for place in range(places)
        )
    return math.sqrt(squared) * ROUNDED_UP


def pattern_bound(factorization: Factorization, rounds: np.ndarray, count: int) -> float:
    """Returns sum_ij |<c_i, c_j>| over the rounds of one pattern, with C's first `count` rows."""
    return float(np.abs(factorization.gram(rounds, count)).sum())


class Innovations:
    """Takes off each release the best linear prediction of its noise from the releases before it.

    The noise of steps has the covariance S^2 W W^T, W = C^{-1}, which is public, and so is all that is
    computed here: post-processing of releases.

    Noise alone leaves numbers of known variance, without correlation to the releases that the
    prediction used, and hardly any to older ones. A mean that stays is left larger than it was, over its
    noise: correlated noise cancels in sums over steps, and means do not.

    Args:
      factorization: of the run.
      deviation: S, of base draws, in noise scales of a mechanism.
      history: releases that a prediction uses, at most.
    """

    def __init__(
        self, factorization: Factorization, deviation: float, history: int = HISTORY
    ) -> None:
        self.factorization, self.deviation = factorization, deviation
        self._seen: deque[tuple[int, np.ndarray]] = deque(maxlen=history)

    def of(self, step: int, values: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns what a release holds beyond its predicted noise, and remembers it.

        Args:
          step: its number; after a step that is not smaller nothing is remembered.
          values: numbers that have noise of their own each, of one length in all steps, float [n].

        Returns:
          float64 [n], and the variance of the noise in each, in squared noise scales of a mechanism.
        """
        if self._seen and self._seen[-1][0] >= step:
            self._seen.clear()
        rows = [self.factorization.noise_row(s) for s in (*(s for s, _ in self._seen), step)]
        first = min(int(row.draws[0]) for row in rows)
        weights = np.zeros((len(rows), step + 1 - first))
        for place, row in zip(weights, rows, strict=True):
            place[row.draws - first] = row.weights
        covariance = weights @ weights.T
        shared = covariance[:-1, -1]
        factors = np.linalg.solve(covariance[:-1, :-1], shared)
        variance = float(covariance[-1, -1] - shared @ factors)
        rest = np.array(values, dtype=np.float64)
        for factor, (_, earlier) in zip(factors.tolist(), self._seen, strict=True):
            rest -= factor * earlier
        self._seen.append((step, np.array(values)))
        return rest, variance * self.deviation**2
