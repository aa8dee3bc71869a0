"""Linear and logistic regression: the objectives of the averaged-clipping paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Data(NamedTuple):
    """Examples: xi, float64 [n, d], and y, float64 [n]."""

    features: Array
    targets: Array


@dataclass(frozen=True)
class Objective:
    """f(x, (xi, y)) = loss(<x, xi>, y); the gradient of an example is slope(<x, xi>, y) xi.

    Attributes:
      name: "linear" or "logistic".
      smoothness: L of the population loss with xi ~ N(0, I).
      loss: of predictions and targets, elementwise.
      slope: its derivative by the prediction.
    """

    name: str
    smoothness: float
    loss: Callable[[Array, Array], Array]
    slope: Callable[[Array, Array], Array]

    def slopes(self, x: Array, data: Data) -> Array:
        """Factors of xi in the per-example gradients at the points x [P, d]: [n, P]."""
        return self.slope(data.features @ x.T, data.targets[:, None])

    def mean_loss(self, x: Array, data: Data) -> Array:
        """Mean loss at the points x [P, d]: [P]."""
        return np.asarray(self.loss(data.features @ x.T, data.targets[:, None]).mean(axis=0))


def _sigmoid(u: Array) -> Array:
    from scipy.special import expit

    return np.asarray(expit(u), dtype=np.float64)


LINEAR = Objective("linear", 2.0, lambda p, y: (p - y) ** 2, lambda p, y: 2 * (p - y))
LOGISTIC = Objective(
    "logistic", 0.25, lambda p, y: np.logaddexp(0.0, y * p), lambda p, y: y * _sigmoid(y * p)
)
"""log(1 + exp(y <x, xi>)) with the paper's labels; it prints 1 + y <x, xi> in the exponent."""
