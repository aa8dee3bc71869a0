"""Noise of the online federated paper: what is added to the messages, and the epsilon that it buys.

A factorisation A = BC of the prefix sums (A: lower triangular ones) releases A G + B xi. What it costs
is the largest column norm of C, in units of the sensitivity of one row of G. Where B has as many rows as
columns and is invertible, C = B^{-1} A: nothing that is not released is paid for.

`calibrated` and `true_epsilon` use the exact Gaussian mechanism (Balle and Wang 2018). Lemma IV.8's
formula goes through zCDP; it is `paper_deviation`, and Eq. (8)'s bound on the columns
`paper_column_bound`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Noise:
    """One factorisation.

    Attributes:
      name: key of `NOISES`.
      rounds: R.
      width: W, rows of xi.
      column_norm: max_r ||c_col^r||; 0 for no noise.
      increments: xi [W, ...] -> (b^{r+1} - b^r) xi, [R, ...], with b^0 = 0.
    """

    name: str
    rounds: int
    width: int
    column_norm: float
    increments: Callable[[Array], Array]

    def matrix(self) -> Array:
        """B, [R, W]."""
        return np.asarray(np.cumsum(self.increments(np.eye(self.width)), axis=0))

    def energy(self) -> float:
        """max ||c_col||^2 ||B||_F^2 / R: mean noise variance of a prefix sum, in V^2 of one release."""
        return self.column_norm**2 * float((self.matrix() ** 2).sum()) / self.rounds


def noiseless(rounds: int) -> Noise:
    """No noise; nothing is private."""
    return Noise(
        "noiseless", rounds, 1, 0.0, lambda xi: np.zeros((rounds, *xi.shape[1:]), xi.dtype)
    )


def independent(rounds: int) -> Noise:
    """C = I, B = A: fresh noise on each message."""
    return Noise("independent", rounds, rounds, 1.0, lambda xi: xi)


def tree(rounds: int) -> Noise:
    """(i) The binary tree as in the paper: prefix r sums the log2(R) nodes or fewer that make it up.

    xi holds only the nodes that some prefix reads, one for each round, so R need not be a power of two
    and a root above R rounds is not paid for; the paper's 2R - 1 nodes count it.
    """
    depth = math.floor(math.log2(rounds)) + 1
    return Noise("tree", rounds, rounds, math.sqrt(depth), functools.partial(_tree_increments))


def _tree_increments(xi: Array) -> Array:
    """The prefix of r + 1 rounds is that without its lowest bit, plus the node that ends there."""
    prefixes = np.zeros((len(xi) + 1, *xi.shape[1:]), xi.dtype)
    for r in range(1, len(prefixes)):
        prefixes[r] = prefixes[r & (r - 1)] + xi[r - 1]
    return np.diff(prefixes, axis=0)


def best_tree(rounds: int) -> Noise:
    """The whole tree with B = A C^+, the least noise that its nodes allow (Honaker 2015).

    Prefix r reads nodes that end after r. Their noise is drawn beforehand, so it is to be had; what is
    released is the law of a causal factorisation with the same column norms.
    """
    leaves = 1 << (rounds - 1).bit_length()
    levels = leaves.bit_length()
    nodes = [np.kron(np.eye(leaves >> k), np.ones(1 << k))[:, :rounds] for k in range(levels)]
    c = np.concatenate(nodes)
    c = c[c.any(axis=1)]
    decoder = np.linalg.solve(c.T @ c, c.T)  # C^+; its rows are the increments of A C^+
    return Noise("tree, B = A C^+", rounds, len(c), math.sqrt(levels), _times(decoder))


def toeplitz(rounds: int) -> Noise:
    """(iii) B = C = the square root of A (Henzinger, Upadhyay and Upadhyay 2023)."""
    root, inverse = np.ones(rounds), np.ones(rounds)
    for r in range(1, rounds):
        root[r] = (1 - 1 / (2 * r)) * root[r - 1]
        inverse[r] = (1 - 3 / (2 * r)) * inverse[r - 1]
    norm = math.sqrt((root**2).sum())
    return Noise("toeplitz", rounds, rounds, norm, functools.partial(_convolved, inverse))


def _convolved(kernel: Array, xi: Array) -> Array:
    """sum_k kernel(k) xi_{r-k}, by FFT."""
    from scipy.signal import oaconvolve

    wide = kernel.reshape(-1, *[1] * (xi.ndim - 1)).astype(xi.dtype)
    return np.asarray(oaconvolve(xi, wide, axes=0)[: len(xi)])


def optimised(rounds: int, gap: float = 1e-4) -> Noise:
    """(ii) The least ||A C^{-1}||_F^2 with columns of norm 1 (Denisov et al. 2022, Theorem 3.2).

    Args:
      rounds: R; an eigendecomposition of R x R for each iteration.
      gap: iterations stop when the bound of the dual is nearer than this to the value, relatively.
    """
    return Noise(
        "optimised", rounds, rounds, 1.0, _times(np.linalg.inv(optimal_encoder(rounds, gap)))
    )


@functools.lru_cache(maxsize=8)
def optimal_encoder(rounds: int, gap: float) -> Array:
    """C of `optimised`: lower triangular, [R, R], columns of norm 1 or less.

    Its noise is at most 1 + `gap` times the least possible.
    """
    ones = np.tril(np.ones((rounds, rounds)))
    gram = ones.T @ ones
    v = np.sqrt(np.diag(gram))
    for _ in range(500):
        scale = np.sqrt(v)
        values, vectors = np.linalg.eigh(scale[:, None] * gram * scale)
        half = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        diagonal = np.diag(half)
        # primal: columns scaled to at most 1; dual: 2 tr(half) - sum(v)
        primal = np.sqrt(np.maximum(values, 0)).sum() * (diagonal / v).max()
        if primal <= (1 + gap) * (2 * np.trace(half) - v.sum()):
            break
        v = diagonal.copy()
    x = half / scale[:, None] / scale
    c = np.linalg.cholesky(x[::-1, ::-1])[::-1, ::-1].T
    return np.asarray(c / np.sqrt(np.diag(x).max()))


def _times(matrix: Array) -> Callable[[Array], Array]:
    """xi [W, ...] -> matrix @ xi."""
    return lambda xi: np.tensordot(matrix.astype(xi.dtype), xi, axes=1)


NOISES: dict[str, Callable[[int], Noise]] = {
    "noiseless": noiseless,
    "independent": independent,
    "tree": tree,
    "best tree": best_tree,
    "optimised": optimised,
    "toeplitz": toeplitz,
}
"""Name -> R -> noise."""


def calibrated(epsilon: float, delta: float, sensitivity: float) -> float:
    """The least deviation V with which one Gaussian release is (epsilon, delta)-DP.

    Args:
      epsilon, delta: the target.
      sensitivity: L2, of the release: that of one g_i times the largest column norm; 0 gives 0.

    Returns:
      V.
    """
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    return sensitivity * float(get_sigma_gaussian(epsilon, delta)) * (1 + 1e-9)


def true_epsilon(deviation: float, delta: float, sensitivity: float) -> float:
    """Epsilon of one Gaussian release; infinite without noise.

    Args:
      deviation: V.
      delta: the delta.
      sensitivity: L2, of the release.
    """
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    if deviation == 0:
        return math.inf
    return float(get_epsilon_gaussian(deviation / sensitivity, delta)) * (1 + 1e-9)


def zcdp(epsilon: float, delta: float) -> float:
    """rho of Eq. (14)."""
    log = math.log(1 / delta)
    return (math.sqrt(epsilon + log) - math.sqrt(log)) ** 2


def paper_deviation(epsilon: float, delta: float, sensitivity: float) -> float:
    """V of Lemma IV.8: sensitivity / sqrt(2 rho), with the paper's sensitivity 2 B_g max ||c_col||."""
    return sensitivity / math.sqrt(2 * zcdp(epsilon, delta))


def paper_column_bound(rounds: int) -> float:
    """sqrt(1 + ln(4R/5) / pi), Eq. (8)'s bound on ||c_col|| of (iii), which is above it."""
    return math.sqrt(max(0.0, 1 + math.log(0.8 * rounds) / math.pi))
