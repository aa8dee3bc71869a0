"""Lemma IV.9 of the online federated paper on quadratics, where the expected regret is known exactly.

f_i^{r,t}(x) = (L/2) ||x - theta_i^{r,t}||^2 without clipping: alpha = 1, mu = L, sigma = 0 in the
paper's assumptions, and f^r has its minimum at the mean of the round's theta. All steps are linear, so
the model is a path without noise plus a linear image of xi, whose variance follows from a recursion over
rows of B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.correlated.factorization import Factorization
from scripts.studies.online_federated.algorithm import Federation, increments

Array = NDArray[Any]


class Regret(NamedTuple):
    """Mean expected loss of x^0 .. x^{R-1} over the round's own minimum, Regret_d / (R tau).

    Attributes:
      path: of the path without noise.
      noise: what the noise adds.
      bound: of Lemma IV.9, in all.
      noise_bound: its noise term.
    """

    path: float
    noise: float
    bound: float
    noise_bound: float


@dataclass(frozen=True)
class Quadratics:
    """The stream of a federation.

    Attributes:
      targets: theta, [R, tau, n, d].
      curvature: L.
      start: x^0, [d].
    """

    targets: Array
    curvature: float
    start: Array

    def regret(
        self, federation: Federation, noise: Factorization | None, deviation: float, etilde: float
    ) -> Regret:
        """Expected dynamic regret of Algorithm 1 without clipping, and the lemma's bound on it.

        Args:
          federation: rounds, local steps, learners, server rate; the clip is not used.
          noise: the factorisation; None for none.
          deviation: V_i of each learner.
          etilde: the server's step.

        Returns:
          Both, exact but for rounding. B_g^2 of the bound is the largest expected squared norm of a
          gradient along the run, which is all that the proof asks.

        Raises:
          ValueError: etilde > alpha / (8 L), where the lemma says nothing.
        """
        rounds, tau, learners, d = self.targets.shape
        curvature = self.curvature
        if etilde > 1 / (8 * curvature):
            raise ValueError(f"etilde={etilde} is above 1 / (8 L) = {1 / (8 * curvature):g}.")
        shrink = 1 - federation.local_rate(etilde) * curvature
        weights = curvature * shrink ** np.arange(tau - 1, -1, -1) / tau
        variance = d * deviation**2 / learners
        spread = variance * self._spread(noise, etilde, float(weights.sum()))
        best, x = self.targets.mean(axis=(1, 2)), self.start
        distances, largest = np.zeros(rounds), 0.0
        for r in range(rounds):
            distances[r] = ((x - best[r]) ** 2).sum()
            largest = max(largest, self._gradient(x, r, shrink, spread[r]))
            pull = (weights[:, None] * self.targets[r].mean(axis=1)).sum(axis=0)
            x = x - etilde * (weights.sum() * x - pull)
        centre = best.mean(axis=0)
        decoded = float(noise.prefix_variances.mean()) if noise else 0.0
        noise_bound = 24 * curvature * etilde**2 * decoded * variance
        change = 13 * curvature * ((best - centre) ** 2).sum() / rounds
        drift = (etilde + 1 / (12 * curvature) + 1 / curvature) * 2 * curvature**2
        drift *= (etilde / federation.server_rate) ** 2 * largest
        first = ((self.start - centre) ** 2).sum() / (rounds * etilde)
        return Regret(
            path=float(curvature / 2 * distances.mean()),
            noise=float(curvature / 2 * spread.mean()),
            bound=float(first + drift + noise_bound + change),
            noise_bound=noise_bound,
        )

    def _spread(self, noise: Factorization | None, etilde: float, pull: float) -> Array:
        """E ||x^r - its mean||^2 over d V^2, for r = 0 .. R-1."""
        rounds = len(self.targets)
        fresh = increments(noise, np.eye(rounds))
        row, found = np.zeros(rounds), np.zeros(rounds)
        for r in range(rounds):
            found[r] = (row**2).sum()
            row = (1 - etilde * pull) * row - etilde * fresh[r]
        return found

    def _gradient(self, x: Array, r: int, shrink: float, spread: float) -> float:
        """The largest expected squared gradient norm in the local steps of a round."""
        z, largest = np.repeat(x[None], self.targets.shape[2], axis=0), 0.0
        for t, theta in enumerate(self.targets[r]):
            norms = ((z - theta) ** 2).sum(axis=1) + shrink ** (2 * t) * spread
            largest = max(largest, float(self.curvature**2 * norms.max()))
            z = shrink * z + (1 - shrink) * theta
        return largest


def drifting(federation: Federation, dimension: int, generator: np.random.Generator) -> Quadratics:
    """theta = a centre that turns slowly + the learner's own offset + a client's: L = 1, x^0 = 0.

    Args:
      federation: R, tau and n.
      dimension: d, at least 2.
      generator: the source.
    """
    rounds, tau, n = federation.rounds, federation.local_steps, federation.learners
    angle = np.linspace(0, 0.5, rounds)
    centre = np.zeros((rounds, dimension))
    centre[:, 0], centre[:, 1] = np.cos(angle), np.sin(angle)
    offsets = 0.3 * generator.standard_normal((n, dimension)) / np.sqrt(dimension)
    own = generator.standard_normal((rounds, tau, n, dimension)) / np.sqrt(dimension)
    return Quadratics(centre[:, None, None] + offsets + own, 1.0, np.zeros(dimension))
