r"""Factorisations A = B C of prefix sums: how the noise of a round reuses the noise of earlier rounds.

A is lower triangular with ones. The vectors g_0 .. g_{R-1} of R rounds are released with the noise of
one Gaussian mechanism on C G:

    A G + B Z = B (C G + Z),        round r:   g_r + (b_{r+1} - b_r) Z = g_r + (C^{-1} Z)_r

Z has R rows of independent noise. All C here are square and lower triangular with a positive diagonal,
so that round r needs no later data, and the accounting of the Gaussian mechanism holds for vectors
that are chosen after seeing earlier rounds (Denisov, McMahan, Rush, Smith and Thakurta 2022,
arXiv:2202.08312, Theorem 2.1). If one record takes part in one round, with a vector of norm at most 1,
the sensitivity is the largest column norm of C; for several rounds see `participation.py`.

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

from functools import lru_cache

import numpy as np

from hf_dpzero.privacy.correlated_noise.matrices import MAX_DENSE_ROUNDS as MAX_DENSE_ROUNDS
from hf_dpzero.privacy.correlated_noise.matrices import Dense as Dense
from hf_dpzero.privacy.correlated_noise.matrices import Factorization as Factorization
from hf_dpzero.privacy.correlated_noise.matrices import NoiseRow as NoiseRow
from hf_dpzero.privacy.correlated_noise.matrices import Restarted as Restarted
from hf_dpzero.privacy.correlated_noise.matrices import Toeplitz as Toeplitz
from hf_dpzero.privacy.correlated_noise.matrices import Tree, check_dense_rounds


def independent(rounds: int) -> Factorization:
    """C = I: the noise of DP-SGD."""
    return Toeplitz(rounds, np.ones(1), np.ones(1), "independent")


def toeplitz(rounds: int) -> Factorization:
    """C = B = square root of A: 1, 1/2, 3/8, 5/16, ..; the inverse 1, -1/2, -1/8, -1/16, ..

    The published bound 1 + ln(4R/5)/pi of its squared column norm is too small; this is the exact sum.

    >>> round(float(toeplitz(1000).squared_column_norms[0]), 3)
    3.265
    """
    return Toeplitz(rounds, square_root(rounds), inverse_square_root(rounds), "toeplitz")


def banded(rounds: int, bands: int) -> Factorization:
    """C^{-1} is that of `toeplitz` with `bands` diagonals; C is the inverse of that.

    A round's noise needs the last `bands` draws only. C is not banded, and its column norms are computed
    from it, not taken from `toeplitz`.

    Args:
      rounds: R.
      bands: b >= 1; b >= R gives `toeplitz`.
    """
    inverse = inverse_square_root(_checked_bands(rounds, bands))
    return Toeplitz(rounds, reciprocal(inverse, rounds), inverse, "banded")


def tree(rounds: int) -> Factorization:
    """The binary tree with B picking nodes; any number of rounds."""
    return Tree(rounds)


def tree_least_squares(rounds: int) -> Factorization:
    """All nodes of the binary tree, with the least-squares B = A C^+ (Honaker 2015).

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
    """Least ||A C^{-1}||_F for columns of norm at most 1, by Denisov et al.'s fixed point.

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
    """h: coefficients of (1 - x)^{-1/2}; h_0 = 1, h_r = (1 - 1/(2r)) h_{r-1}; float64 [count]."""
    return np.cumprod(np.append(1.0, 1.0 - 0.5 / np.arange(1, count)))


def inverse_square_root(count: int) -> np.ndarray:
    """Coefficients of (1 - x)^{1/2}: 1, then the factors 1 - 3/(2r); float64 [count]."""
    return np.cumprod(np.append(1.0, 1.0 - 1.5 / np.arange(1, count)))


def reciprocal(series: np.ndarray, count: int) -> np.ndarray:
    """First `count` coefficients of 1 / series, by its recursion.

    Args:
      series: float64, its first coefficient 1.
      count: how many.

    Returns:
      float64 [count].
    """
    result = np.zeros(count)
    result[0] = 1.0
    for n in range(1, count):
        terms = min(n, len(series) - 1)
        result[n] = -(series[1 : terms + 1] @ result[n - terms : n][::-1])
    return result


def _lower_factor(gram: np.ndarray) -> np.ndarray:
    """The lower-triangular C with C^T C = gram: Cholesky with rows and columns in reverse."""
    return np.linalg.cholesky(gram[::-1, ::-1]).T[::-1, ::-1]


def _checked_bands(rounds: int, bands: int) -> int:
    if isinstance(bands, bool) or not isinstance(bands, int) or bands < 1:
        raise ValueError(
            f"bands={bands!r} must be an integer of at least 1 (1 is independent noise)."
        )
    return min(bands, rounds)
