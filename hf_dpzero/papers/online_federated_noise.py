"""Noise of the online federated paper: what is added to the messages, and the epsilon that it buys.

The factorisations are `privacy.correlated_noise`'s: (i) `tree` and, with the least noise that its nodes
allow, `tree_least_squares`; (ii) `optimized`; (iii) `toeplitz`; and `independent`. Their column norms
are exact and count no node of the tree that is never released.

`calibrated` and `true_epsilon` use the exact Gaussian mechanism (Balle and Wang 2018). Lemma IV.8's
formula goes through zCDP; it is `paper_deviation`, and Eq. (8)'s bound `paper_column_bound`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.correlated_noise import factorization as f

Array = NDArray[Any]

NOISES: dict[str, Callable[[int], f.Factorization] | None] = {
    "noiseless": None,
    "independent": f.independent,
    "tree": f.tree,
    "tree_least_squares": f.tree_least_squares,
    "optimized": f.optimized,
    "toeplitz": f.toeplitz,
}
"""Name -> R -> factorisation."""
DENSE = ("tree_least_squares", "optimized")
"""Those that are only to be had for `factorization.MAX_DENSE_ROUNDS` rounds."""


def increments(factorization: f.Factorization | None, xi: Array) -> Array:
    """(b^{r+1} - b^r) xi = (C^{-1} xi)_r for all rounds, b^0 = 0.

    Args:
      factorization: of R rounds; None for no noise.
      xi: [R, ...]; its precision is kept.

    Returns:
      [R, ...]; their running sum is B xi.
    """
    if factorization is None:
        return np.zeros_like(xi)
    if len(xi) != factorization.rounds:
        raise ValueError(
            f"xi has {len(xi)} rows for {factorization.rounds} rounds; draw one a round."
        )
    if isinstance(factorization, f.Toeplitz):
        return _convolved(factorization.inverse, xi)
    if isinstance(factorization, f.Dense):
        return np.tensordot(factorization.inverse.astype(xi.dtype), xi, axes=1)
    rows = (factorization.noise_row(r) for r in range(factorization.rounds))
    return np.stack([np.tensordot(w.astype(xi.dtype), xi[draws], axes=1) for draws, w in rows])


def _convolved(kernel: Array, xi: Array) -> Array:
    """sum_k kernel(k) xi_{r-k}."""
    from scipy.signal import oaconvolve

    if len(kernel) == 1:
        return kernel[0].astype(xi.dtype) * xi
    wide = kernel.reshape(-1, *[1] * (xi.ndim - 1)).astype(xi.dtype)
    return np.asarray(oaconvolve(xi, wide, axes=0)[: len(xi)])


def decoder(factorization: f.Factorization) -> Array:
    """B, [R, R]."""
    return np.asarray(np.cumsum(increments(factorization, np.eye(factorization.rounds)), axis=0))


def calibrated(epsilon: float, delta: float, sensitivity: float) -> float:
    """The least deviation V with which one Gaussian release is (epsilon, delta)-DP.

    Args:
      epsilon, delta: the target.
      sensitivity: L2, of the release: that of one g_i times the largest column norm.

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
    return math.sqrt(1 + math.log(0.8 * rounds) / math.pi)


def paper_tree_norm(rounds: int) -> float:
    """The root of 1 + ceil(log2 R): all 2R - 1 nodes of the tree padded to a power of two."""
    return math.sqrt((rounds - 1).bit_length() + 1)
