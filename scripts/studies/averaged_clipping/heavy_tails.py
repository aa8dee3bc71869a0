"""Linear and logistic regression with heavy-tailed noise: synthetic data of the averaged-clipping paper.

xi ~ N(0, I), y = <x*, xi> + e (linear), y = -sign(<x*, xi> + e) (logistic), e of mean zero. The paper
leaves x* and the law of xi open; here d = 10 and x* = sqrt(2/d) (1, ..., 1), so that the best possible
loss over the loss at 0 is 1/2 for Laplace and chi-squared noise. Student-t noise with 2 degrees of
freedom has no variance: the paper's own assumption of one fails there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from scripts.studies.averaged_clipping.algorithm import LINEAR, LOGISTIC, Array, Data, Objective
from scripts.studies.harness import pcg64

DIMENSION = 10
RADIUS = math.sqrt(2)
"""||x*||, the distance R from the start 0 in linear regression."""

NOISES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "student-t": lambda generator, n: generator.standard_t(2, size=n),
    "laplace": lambda generator, n: generator.laplace(0.0, 1.0, size=n),
    "chi2": lambda generator, n: generator.chisquare(1, size=n) - 1.0,
}
"""Name -> centred draws: t with 2 degrees of freedom, Laplace(1, 1) - 1, chi-squared with 1, less 1."""

OBJECTIVES = {objective.name: objective for objective in (LINEAR, LOGISTIC)}


def optimum() -> Array:
    """x* of the data, float64 [d]; the linear loss is least there, the logistic loss is not."""
    return np.full(DIMENSION, RADIUS / math.sqrt(DIMENSION))


def draw(
    objective: Objective, noise: str, num_examples: int, generator: np.random.Generator
) -> Data:
    """Draws examples.

    Args:
      objective: decides what y is.
      noise: a key of `NOISES`.
      num_examples: n.
      generator: the source of randomness.

    Returns:
      n examples.

    Raises:
      ValueError: an unknown noise.
    """
    if noise not in NOISES:
        raise ValueError(f"noise={noise!r} is not one of {', '.join(NOISES)}.")
    features = generator.standard_normal((num_examples, DIMENSION))
    targets = features @ optimum() + NOISES[noise](generator, num_examples)
    return Data(features, targets if objective is LINEAR else -np.sign(targets))


@dataclass(frozen=True)
class Yardstick:
    """Excess risk f(x) - min f of a problem.

    Attributes:
      objective: linear: exactly ||x - x*||^2, whatever the noise.
      data: logistic: the examples in the place of the population, and the minimum over them.
      best: the point of that minimum, [d].
    """

    objective: Objective
    data: Data
    best: Array

    @classmethod
    def of(cls, objective: Objective, noise: str, num_examples: int, seed: int) -> Yardstick:
        """Draws the examples and minimizes, by Newton's method.

        Args:
          objective: linear or logistic.
          noise: a key of `NOISES`.
          num_examples: in the place of the population.
          seed: of the draw.
        """
        data = draw(objective, noise, num_examples, pcg64(seed, 7))
        return cls(objective, data, optimum() if objective is LINEAR else _newton(data))

    def excess(self, x: Array, num_examples: int | None = None) -> Array:
        """f(x) - min f.

        Args:
          x: points, [P, d].
          num_examples: that many of the examples only; quick, for comparisons.

        Returns:
          [P], infinite where x is not finite.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if self.objective is LINEAR:
                found = ((x - self.best) ** 2).sum(axis=1)
            else:
                part = Data(*(column[:num_examples] for column in self.data))
                least = self.objective.mean_loss(self.best[None], part)
                found = self.objective.mean_loss(x, part) - least
        return np.nan_to_num(found, nan=np.inf, posinf=np.inf)


def _newton(data: Data) -> Array:
    """Minimum of the mean logistic loss, [d]."""
    x = np.zeros(data.features.shape[1])
    for _ in range(25):
        s = expit(data.targets * (data.features @ x))
        gradient = data.features.T @ (data.targets * s)
        hessian = (data.features * (s * (1 - s))[:, None]).T @ data.features
        x = x - np.linalg.solve(hessian, gradient)
    return x
