"""What releases with correlated noise hold beyond the noise that earlier releases foretell.

The noise of steps has the covariance S^2 W W^T, W = C^{-1}, which is public, and so is all that is
computed here: post-processing of releases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from hf_dpzero.privacy.correlated_noise.matrices import Factorization

HISTORY = 32
"""Releases that the noise of the next is foretold from."""


class Innovations:
    """Takes off each release the best linear prediction of its noise from the releases before it.

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
        """What a release holds beyond its predicted noise; remembers it.

        Args:
          step: its number; after a step that is not smaller nothing is remembered.
          values: numbers that have noise of their own each, of one length in all steps, float [n].

        Returns:
          float64 [n], and the variance of the noise in each, in squared noise scales of a mechanism.
        """
        if self._seen and self._seen[-1][0] >= step:
            self._seen.clear()
        factors, variance = self._prediction([seen for seen, _ in self._seen], step)
        rest = np.array(values, dtype=np.float64)
        for factor, (_, earlier) in zip(factors.tolist(), self._seen, strict=True):
            rest -= factor * earlier
        self._seen.append((step, np.array(values)))
        return rest, variance * self.deviation**2

    def _prediction(self, earlier: Sequence[int], step: int) -> tuple[np.ndarray, float]:
        """Factors of the noise of earlier steps, and the variance that they leave, for S = 1."""
        rows = [self.factorization.noise_row(s) for s in (*earlier, step)]
        first = min(int(row.draws[0]) for row in rows)
        weights = np.zeros((len(rows), step + 1 - first))
        for place, row in zip(weights, rows, strict=True):
            place[row.draws - first] = row.weights
        covariance = weights @ weights.T
        shared = covariance[:-1, -1]
        factors = np.linalg.solve(covariance[:-1, :-1], shared)
        return factors, float(covariance[-1, -1] - shared @ factors)
