"""Test problems for the saddle point algorithms, with their exact duality gap or excess risk.

Examples are drawn where they are asked for: an oracle is asked for each example once, and the entries of
an example are independent. A problem is a function of its seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scripts.studies.harness import pcg64
from scripts.studies.saddle_point.releases import on_simplex

Array = NDArray[np.float64]


@dataclass
class Bilinear:
    """f(x, y; z) = x^T A_z y with A_z of +-1 entries and mean A ~ U[-1, 1]: L0 = L1 = 1, L2 = 0.

    Where x and y are averages of few vertices only the rows and columns in use are drawn; the entries in
    both a row and a column are drawn twice, which changes no mean.

    Attributes:
      num_examples: n.
      dimensions: (d_x, d_y).
      seed: of A and the examples.
    """

    num_examples: int
    dimensions: tuple[int, int]
    seed: int = 0
    mean: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.mean = pcg64(self.seed, 0).uniform(-1, 1, self.dimensions)
        self._generator = pcg64(self.seed, 1)

    def gradients(self, x: Array, y: Array, examples: NDArray[np.int64]) -> tuple[Array, Array]:
        """A_z y and A_z^T x, [b, d_x] and [b, d_y]."""
        return (self._products(y, self.mean, examples), self._products(x, self.mean.T, examples))

    def _products(self, weights: Array, mean: Array, examples: NDArray[np.int64]) -> Array:
        total = np.zeros((len(examples), len(mean)))
        for j in np.flatnonzero(weights):
            uniform = self._generator.random(total.shape, dtype=np.float32)
            total += weights[j] * np.where(uniform < (1 + mean[:, j]) / 2, 1.0, -1.0)
        return total

    def gap(self, x: Array, y: Array) -> float:
        """max over w of F(x, w) minus min over v of F(v, y), exact; >= 0."""
        return float(np.max(self.mean.T @ x) - np.min(self.mean @ y))


@dataclass
class SmoothGame:
    """f(x, y; z) = x^T A y + c (|x - p|^4_4 - |y - r|^4_4) / 4 + noise: not quadratic.

    The noise is a random +-s in each gradient coordinate. Convex-concave; by coordinates |gradient| <=
    1 + c + s, so L0 = 1 + c + s, L1 <= 1 + 3 c, L2 <= 6 c.

    Attributes:
      num_examples: n.
      dimensions: (d_x, d_y).
      curvature: c.
      spread: s.
      seed: of everything.
    """

    num_examples: int
    dimensions: tuple[int, int]
    curvature: float = 1.0
    spread: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        draw = pcg64(self.seed, 2)
        self.mean = draw.uniform(-1, 1, self.dimensions)
        self.targets = tuple(draw.dirichlet(np.full(d, 0.2)) for d in self.dimensions)
        self._generator = pcg64(self.seed, 3)

    @property
    def lipschitz(self) -> float:
        """L0."""
        return 1 + self.curvature + self.spread

    def population(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Gradients of F, [d_x] and [d_y]."""
        p, r = self.targets
        c = self.curvature
        return self.mean @ y + c * (x - p) ** 3, self.mean.T @ x - c * (y - r) ** 3

    def gradients(self, x: Array, y: Array, examples: NDArray[np.int64]) -> tuple[Array, Array]:
        """[b, d_x] and [b, d_y]."""
        gx, gy = (
            g + self.spread * self._generator.choice([-1.0, 1.0], (len(examples), len(g)))
            for g in self.population(x, y)
        )
        return gx, gy

    def gap(self, x: Array, y: Array) -> float:
        """The duality gap, to 1e-6, by minimizing two convex separable functions on simplices."""
        p, r = self.targets
        c = self.curvature

        def best(linear: Array, target: Array) -> float:
            """min <linear, v> + c |v - target|^4 / 4; v_j = target_j + cbrt((level - linear_j) / c)."""
            low, high = linear.min() - c, linear.max() + c
            for _ in range(80):
                level = (low + high) / 2
                v = np.maximum(0, target + np.cbrt((level - linear) / c))
                low, high = (level, high) if v.sum() < 1 else (low, level)
            v = v / v.sum()
            return float(linear @ v + c * np.sum((v - target) ** 4) / 4)

        own_x, own_y = c * np.sum((x - p) ** 4) / 4, c * np.sum((y - r) ** 4) / 4
        upper = own_x - best(-(self.mean.T @ x), r)
        lower = -own_y + best(self.mean @ y, p)
        return float(upper - lower)


@dataclass
class LeastSquares:
    """f(x; z) = (<a, x> - b)^2 / 2, a of +-1 entries, b = <a, x*> with a flipped sign at times.

    x* has three vertices. L0 = 2, L1 = 1, L2 = 0.

    Attributes:
      num_examples: n.
      dimension: d >= 3.
      flips: probability of a wrong sign of b.
      seed: of everything.
    """

    num_examples: int
    dimension: int
    flips: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        self.dimensions = (self.dimension, 1)
        self.best = np.zeros(self.dimension)
        self.best[:3] = (0.5, 0.3, 0.2)
        self._generator = pcg64(self.seed, 4)

    def gradients(self, x: Array, y: Array, examples: NDArray[np.int64]) -> tuple[Array, Array]:
        """(<a, x> - b) a and zeros, [b, d] and [b, 1]."""
        shape = (len(examples), self.dimension)
        a = 2.0 * self._generator.integers(0, 2, shape, dtype=np.int8) - 1
        wrong = self._generator.random(len(examples)) < self.flips
        residual = a @ x - np.where(wrong, -1, 1) * (a @ self.best)
        return residual[:, None] * a, np.zeros((len(examples), 1))

    def excess(self, x: Array) -> float:
        """F(x) minus its minimum over the simplex, exact.

        F(x) is |x|^2 / 2 - (1 - 2 flips) <x, x*> and a constant, so the minimum is the projection of
        (1 - 2 flips) x* on the simplex.
        """
        target = (1 - 2 * self.flips) * self.best
        projected = on_simplex(target)
        return float(np.sum((x - target) ** 2) / 2 - np.sum((projected - target) ** 2) / 2)
