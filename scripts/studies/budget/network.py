"""Data and network of the experiment of Hong, Wang and Zhou 2022 (Section 5, Figure 1), offline.

Many runs of a network of one hidden layer go through the same data at once, each with its own weights,
noise and schedule. Norms of per-example gradients need no per-example gradients: a layer's is
||delta|| sqrt(||a||^2 + 1) for its input a and the loss's derivative delta after it.

This simulates the algorithm from seeded generators: nothing here is a private release.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.studies.budget.algorithm import affordable_steps, momentum_average
from scripts.studies.harness import philox

Floats = NDArray[Any]

MAX_NORM = 10.0
COMPONENTS = 30
"""Principal components; the paper keeps 60 of 784, the small digits have 64 pixels in all."""


@dataclass(frozen=True)
class Labelled:
    """Rows and labels.

    Attributes:
      x: float32 [n, d].
      y: +1 or -1, float32 [n].
    """

    x: Floats
    y: Floats

    def first(self, n: int) -> Labelled:
        """The first n rows."""
        return Labelled(self.x[:n], self.y[:n])


@dataclass(frozen=True)
class Split:
    """What is trained on and what is tested on."""

    train: Labelled
    test: Labelled


def digits(train: int, seed: int) -> Split:
    """Digits 3 against 5 of scikit-learn's 8x8 `load_digits`, 365 in all; the rest is for the test.

    Args:
      train: number of training rows, below 365.
      seed: of the order.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    chosen = np.flatnonzero((labels == 3) | (labels == 5))
    chosen = philox(seed, 1).permutation(chosen)
    if not 0 < train < len(chosen):
        raise ValueError(
            f"train={train} must be from 1 to {len(chosen) - 1}: there are 365 digits."
        )
    return _scaled(pixels[chosen], np.where(labels[chosen] == 3, 1.0, -1.0), train)


def gaussians(train: int, seed: int, *, test: int = 2000) -> Split:
    """Two classes N(+-m, I) with |m| = 1.5 along a random direction, so that 93 % can be told apart.

    Args:
      train: number of training rows.
      seed: of means and rows.
      test: number of test rows.
    """
    generator = philox(seed, 2)
    direction = generator.standard_normal(COMPONENTS)
    y = generator.choice([1.0, -1.0], size=train + test)
    x = generator.standard_normal((train + test, COMPONENTS))
    x += 1.5 * y[:, None] * direction / np.linalg.norm(direction)
    return _scaled(x, y, train)


def auxiliary(train: int, seed: int) -> Split:
    """Public stand-in: x ~ N(0, I), labelled by the sign of a random direction's product plus noise.

    Args:
      train: number of training rows, as many as of the private data.
      seed: of rows and direction.
    """
    generator = philox(seed, 3)
    x = generator.standard_normal((2 * train, COMPONENTS))
    direction = generator.standard_normal(COMPONENTS)
    direction /= np.linalg.norm(direction)
    y = np.where(x @ direction + 0.5 * generator.standard_normal(2 * train) > 0, 1.0, -1.0)
    return _scaled(x, y, train)


SOURCES: dict[str, Callable[[int, int], Split]] = {
    "digits": digits,
    "gaussians": gaussians,
    "auxiliary": auxiliary,
}


def _scaled(rows: Floats, labels: Floats, train: int) -> Split:
    """Principal components, centred, of deviation 1, scaled to a largest norm of 10, as the paper does.

    All fitted to the training rows. The paper does not account for that; nor is it done here.
    """
    mean = rows[:train].mean(axis=0)
    _, _, axes = np.linalg.svd(rows[:train] - mean, full_matrices=False)
    x = (rows - mean) @ axes[:COMPONENTS].T
    x = x / np.maximum(x[:train].std(axis=0), 1e-9)
    x = x * (MAX_NORM / np.linalg.norm(x[:train], axis=1).max())
    data = Labelled(x.astype(np.float32), labels.astype(np.float32))
    return Split(data.first(train), Labelled(data.x[train:], data.y[train:]))


@dataclass(frozen=True)
class Network:
    """x -> v . relu(W x + b) + c, logistic loss. Parameters of P runs are one array [P, D].

    Attributes:
      inputs: d.
      hidden: H.
    """

    inputs: int
    hidden: int

    @property
    def size(self) -> int:
        """D = (d + 2) H + 1."""
        return (self.inputs + 2) * self.hidden + 1

    def initial(self, generator: np.random.Generator) -> Floats:
        """One run's start, float32 [D]: uniform in +-1/sqrt(inputs of the layer), as torch.nn.Linear."""
        first, d, h = (self.inputs + 1) * self.hidden, self.inputs, self.hidden
        bounds = np.where(np.arange(self.size) < first, d**-0.5, h**-0.5)
        return (bounds * generator.uniform(-1, 1, self.size)).astype(np.float32)

    def _parts(self, theta: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """W [P, d, H], b [P, 1, H], v [P, H, 1], c [P, 1]."""
        runs, d, h = len(theta), self.inputs, self.hidden
        w, b, v, c = np.split(theta, [d * h, (d + 1) * h, (d + 2) * h], axis=1)
        return w.reshape(runs, d, h), b.reshape(runs, 1, h), v.reshape(runs, h, 1), c

    def logits(self, theta: Floats, x: Floats) -> Floats:
        """float32 [P, n]."""
        w, b, v, c = self._parts(theta)
        return np.asarray((np.maximum(x @ w + b, 0) @ v)[..., 0] + c)

    def loss(self, theta: Floats, data: Labelled) -> Floats:
        """Mean logistic loss of each run, float64 [P]."""
        margins = data.y * self.logits(theta, data.x)
        return np.asarray(np.logaddexp(0, -margins).mean(axis=1, dtype=np.float64))

    def accuracy(self, theta: Floats, data: Labelled) -> Floats:
        """Share of rows on the right side, float64 [P]."""
        return np.asarray((data.y * self.logits(theta, data.x) > 0).mean(axis=1))

    def clipped_mean(self, theta: Floats, data: Labelled, clip: float) -> Floats:
        """Mean of per-example gradients, each scaled to norm at most `clip`.

        Args:
          theta: float32 [P, D].
          data: n rows.
          clip: G.

        Returns:
          float32 [P, D].
        """
        w, b, v, c = self._parts(theta)
        before = data.x @ w + b  # [P, n, H]
        on = (before > 0).astype(np.float32)
        after = before * on
        margins = data.y * ((after @ v)[..., 0] + c)
        delta = -data.y / (1 + np.exp(np.minimum(margins, 80.0)))  # [P, n]
        inner = (on @ (v * v))[..., 0] * (1 + (data.x**2).sum(axis=1))
        norms = np.abs(delta) * np.sqrt(1 + np.einsum("pnh,pnh->pn", after, after) + inner)
        delta = (delta * np.minimum(1, clip / np.maximum(norms, 1e-30)) / len(data.x))[..., None]
        back = on * (delta * v[:, None, :, 0])
        parts = (data.x.T @ back, back.sum(axis=1), (after * delta).sum(axis=1), delta.sum(axis=1))
        return np.concatenate([part.reshape(len(theta), -1) for part in parts], axis=1)


def train(
    network: Network,
    data: Labelled,
    start: Floats,
    multipliers: Floats,
    noise: Callable[[int], Floats],
    *,
    rate: float,
    clip: float,
    budget: float = math.inf,
    beta: float = 0.0,
) -> Floats:
    """Algorithm 1 on P runs side by side; `budget.private_gradient_descent` for each.

    Args:
      network: what is trained.
      data: N rows.
      start: float32 [P, D].
      multipliers: sigma_t of each run, [P, T].
      noise: t (from 0) -> nu_t of each run, float32 [P, D].
      rate: eta.
      clip: G.
      budget: R of each run; infinity does not count.
      beta: of momentum; 0 is gradient descent.

    Returns:
      Last iterates, float32 [P, D].
    """
    done = np.array([affordable_steps(row, budget) for row in multipliers])
    theta, average = start, np.zeros_like(start)
    spread = (clip / len(data.x) * np.asarray(multipliers)).astype(np.float32)
    for t in range(int(done.max())):
        gradient = network.clipped_mean(theta, data, clip) + spread[:, t, None] * noise(t)
        average = momentum_average(average, gradient, t + 1, beta)
        theta = np.where(done[:, None] > t, theta - np.float32(rate) * average, theta)
    return theta
