"""Logistic regression on FedProx' synthetic(alpha, beta), the first experiment of the online federated
paper.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020 ("Federated optimization in heterogeneous networks"),
Section 5.1: learner k has features a ~ N(v_k, Sigma), Sigma_jj = j^{-1.2}, v_k ~ N(B_k, I), B_k of
deviation beta, and labels argmax(a W_k + c_k) with W_k, c_k ~ N(u_k, 1), u_k of deviation alpha. Here
with two classes, as the paper's labels are +-1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scripts.studies.online_federated.algorithm import clipped

Array = NDArray[Any]


class Records(NamedTuple):
    """Features a, float32 [S, n, m, d], and labels +-1, float32 [S, n, m]; m records a learner."""

    features: Array
    labels: Array


@dataclass(frozen=True)
class Population:
    """Where one seed's clients come from.

    Attributes:
      means: v_k, [n, d].
      normals: W_k of class +1 less that of class -1, [n, d].
      offsets: the same of c_k, [n].
    """

    means: Array
    normals: Array
    offsets: Array

    @classmethod
    def of(
        cls,
        generator: np.random.Generator,
        learners: int,
        dimension: int,
        alpha: float,
        beta: float,
    ) -> Population:
        """Draws a population.

        Args:
          generator: the source.
          learners: n.
          dimension: d.
          alpha: deviation of u_k, the mean of the k-th model.
          beta: deviation of B_k, the mean of v_k.
        """
        u = alpha * generator.standard_normal(learners)
        b = beta * generator.standard_normal(learners)
        means = b[:, None] + generator.standard_normal((learners, dimension))
        weights = u[:, None, None] + generator.standard_normal((learners, dimension + 1, 2))
        model = weights[..., 1] - weights[..., 0]
        return cls(means, model[:, :-1], model[:, -1])

    def draw(self, generator: np.random.Generator, per_learner: int) -> tuple[Array, Array]:
        """Fresh clients: features float32 [n, m, d] and labels [n, m]."""
        n, d = self.means.shape
        deviations = np.arange(1, d + 1) ** -0.6
        z = generator.standard_normal((n, per_learner, d), dtype=np.float32)
        a = self.means[:, None] + deviations * z
        margins = np.einsum("kmd,kd->km", a, self.normals) + self.offsets[:, None]
        return a.astype(np.float32), np.where(margins > 0, 1, -1).astype(np.float32)


def stream(
    populations: list[Population],
    generators: list[np.random.Generator],
    rounds: int,
    local_steps: int,
) -> Iterator[Records]:
    """Fresh clients of all seeds, round by round: each record exists once.

    Args:
      populations: of each seed.
      generators: of each seed.
      rounds: R.
      local_steps: tau.
    """
    for _ in range(rounds):
        yield draw(populations, generators, local_steps)


def draw(
    populations: list[Population], generators: list[np.random.Generator], per_learner: int
) -> Records:
    """m fresh clients of each learner of each seed."""
    found = [p.draw(g, per_learner) for p, g in zip(populations, generators, strict=True)]
    return Records(np.stack([a for a, _ in found]), np.stack([b for _, b in found]))


def gradient(z: Array, record: tuple[Array, float]) -> Array:
    """Gradient of log(1 + exp(-b z.a)) at z [d] for a record (a, b)."""
    a, b = record
    return np.asarray(-b * a / (1 + np.exp(np.minimum(b * (z @ a), 80.0))))


def accuracy(x: Array, records: Records) -> Array:
    """Share of records on the right side, all learners alike: x [C, S, d] -> [C, S]."""
    seeds = len(records.labels)
    a = records.features.reshape(seeds, -1, x.shape[-1])
    margins = x.swapaxes(0, 1) @ a.swapaxes(1, 2) * records.labels.reshape(seeds, 1, -1)
    return np.asarray((margins > 0).mean(axis=-1).T)


class Logistic:
    """The local steps of all cells, seeds and learners, without a model for each.

    A local iterate is x less a combination of the round's features, so its margins follow from those of
    x and the Gram matrix of the features.

    Attributes:
      max_norm: features are scaled to at most this norm first, which bounds the smoothness.
    """

    def __init__(self, max_norm: float = math.inf) -> None:
        self.max_norm = max_norm

    @property
    def smoothness(self) -> float:
        """L = max_norm^2 / 4 of every record's loss, clipped or not."""
        return self.max_norm**2 / 4

    def mean_message(self, x: Array, records: Records, rates: Array, clip: float) -> Array:
        """`Oracle.mean_message`: x [C, S, d] -> [C, S, d]."""
        a, b = records
        if self.max_norm < math.inf:
            a = clipped(a, self.max_norm)
        cells, (seeds, learners, tau, d) = len(x), a.shape
        gram = a @ a.swapaxes(-1, -2)
        norms = np.linalg.norm(a, axis=-1)
        flat = a.reshape(seeds, learners * tau, d)
        margins = (x.swapaxes(0, 1) @ flat.swapaxes(1, 2)).reshape(seeds, cells, learners, tau)
        factors = np.zeros_like(margins)
        for t in range(tau):
            moved = (factors[..., :t] * gram[:, None, :, t, :t]).sum(axis=-1)
            margin = margins[..., t] - rates[:, None] * moved
            label = b[:, None, :, t]
            slope = 1 / (1 + np.exp(np.minimum(label * margin, 80.0)))
            bound = clip / np.maximum(norms[:, None, :, t], 1e-30)
            factors[..., t] = -label * np.minimum(slope, bound)
        total = factors.reshape(seeds, cells, learners * tau) @ flat
        return np.asarray(total.swapaxes(0, 1) / (learners * tau))
