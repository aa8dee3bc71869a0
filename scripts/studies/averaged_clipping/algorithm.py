"""AClipped-dpSGD: clip the averaged gradient once (Jin, Zhou, Han, Cheng and Zeng, "Efficient Private
SCO for Heavy-Tailed Data via Averaged Clipping").

Algorithm 1 takes Poisson batches with probability m/n, divides the sum of the gradients by the fixed m,
clips that mean once to norm lambda (Eq. 2), adds noise, steps, projects, and returns the average of
x^0 .. x^{N-1}. Algorithm 2 restarts it from its last output. DP-SGD (per-example clipping) and the
noiseless baseline differ in a setting.

Sensitivity. The paper takes lambda (proof of Theorem 2): it sets the sum of the other examples to zero,
which loses generality. It is 2 lambda under every relation: where the others' mean is -v with
||v|| > lambda, one example can turn the clipped mean round. The accounting is that of
`privacy.mechanisms.gradient`, which says the same of `clipping="averaged"`: with k groups 2 lambda / k.

All cells (learning rate, clip, noise) of a call share batches and noise vectors; each cell by itself is
a run of its algorithm. This simulates the algorithms from seeded generators: nothing here is a private
release.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.mechanisms import DPSGD
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import PoissonSampler

Array = NDArray[np.float64]
Clipping = Literal["averaged", "per_example"]


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
        """Returns the factors of xi in the per-example gradients at the points x [P, d]: [n, P]."""
        return self.slope(data.features @ x.T, data.targets[:, None])

    def mean_loss(self, x: Array, data: Data) -> Array:
        """Returns the mean loss at the points x [P, d]: [P]."""
        return np.asarray(self.loss(data.features @ x.T, data.targets[:, None]).mean(axis=0))


def _sigmoid(u: Array) -> Array:
    from scipy.special import expit

    return np.asarray(expit(u), dtype=np.float64)


LINEAR = Objective("linear", 2.0, lambda p, y: (p - y) ** 2, lambda p, y: 2 * (p - y))
LOGISTIC = Objective(
    "logistic", 0.25, lambda p, y: np.logaddexp(0.0, y * p), lambda p, y: y * _sigmoid(y * p)
)
"""log(1 + exp(y <x, xi>)) with the paper's labels; it prints 1 + y <x, xi> in the exponent."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """An algorithm, apart from learning rate, clip and noise.

    Attributes:
      clipping: "averaged" (Eq. 2) or "per_example" (DP-SGD).
      steps: N, of each stage.
      batch_size: m, the expected size of a Poisson batch and the fixed divisor.
      stages: tau of Algorithm 2; stage t starts at the average of the one before and clips at
        lambda 2^{-t/2}. 1 is Algorithm 1.
      groups: k; the examples' fixed groups are averaged and clipped each by itself (1: Eq. 2).
      radius: of the ball around the start that iterates are projected onto; infinite for X = R^d.

    Raises:
      ValueError: a count below 1, a radius that is not positive, groups without averaged clipping.
    """

    clipping: Clipping = "averaged"
    steps: int
    batch_size: int
    stages: int = 1
    groups: int = 1
    radius: float = math.inf

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "stages", "groups"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        if not self.radius > 0:
            raise ValueError(f"radius={self.radius} must be positive; use inf for no projection.")
        if self.groups > 1 and self.clipping != "averaged":
            raise ValueError(f"groups={self.groups} needs clipping='averaged'; leave it at 1.")

    def plan(self, num_examples: int, noise_multiplier: float = 1.0) -> PrivacyPlan:
        """Returns one account of all stages' steps: Poisson batches, add-or-remove neighbours.

        Args:
          num_examples: n.
          noise_multiplier: sigma > 0; the noise on the sum of the k clipped means (per_example: on
            the sum of clipped gradients) has deviation sigma * clip.

        Returns:
          A plan with clip 1: epsilon does not depend on the clip.

        Raises:
          ValueError: m > n, or the noise cannot be accounted for.
        """
        check_batch_size(self.batch_size, num_examples)
        sampler = PoissonSampler(num_examples=num_examples, expected_batch_size=self.batch_size)
        mechanism = DPSGD(
            clip=1.0,
            noise_multiplier=noise_multiplier,
            expected_batch_size=self.batch_size,
            clipping="averaged" if self.clipping == "averaged" else "fixed",
            clip_groups=self.groups,
            dimension=64,
        )
        return PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=self.steps * self.stages)

    @property
    def divisor(self) -> int:
        """Returns what the noised sum is divided by: k, or m for per-example clipping."""
        return self.groups if self.clipping == "averaged" else self.batch_size


def calibrated(descent: Descent, num_examples: int, epsilon: float, delta: float) -> float:
    """Returns the smallest noise deviation on the sum, in clips, with which it is (epsilon, delta)-DP.

    It contains the 2 of the sensitivity of averaged clipping.
    """
    sensitivity = descent.plan(num_examples).mechanism.sensitivity_add_remove
    steps = descent.steps * descent.stages
    return sensitivity * _unit_noise(steps, descent.batch_size, num_examples, epsilon, delta)


@functools.cache
def _unit_noise(
    steps: int, batch_size: int, num_examples: int, epsilon: float, delta: float
) -> float:
    # calibration takes a second, and depends on sampling and steps alone: sensitivity is a factor
    plan = Descent(clipping="per_example", steps=steps, batch_size=batch_size).plan(num_examples)
    return float(plan.calibrate(epsilon=epsilon, delta=delta).mechanism.noise_multiplier)


def true_epsilon(
    descent: Descent, num_examples: int, noise_multiplier: float, delta: float
) -> float:
    """Returns epsilon of an algorithm with any noise, by the correct accountant; an upper bound.

    Args:
      descent: the algorithm.
      num_examples: n.
      noise_multiplier: deviation of the noise on the sum over the clip; 0 gives infinity.
      delta: the delta.
    """
    if noise_multiplier == 0:
        return math.inf
    return descent.plan(num_examples, noise_multiplier).epsilon(delta)


def check_batch_size(batch_size: float, num_examples: int) -> None:
    """Refuses m > n."""
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size={batch_size:g} is larger than num_examples={num_examples}: the parameters "
            "ask for more data; use fewer steps or a larger clip."
        )


def clip_vectors(vectors: Array, clips: Array) -> Array:
    """Returns v min(1, lambda / ||v||) over the last axis; a zero vector stays zero.

    Args:
      vectors: [..., d].
      clips: lambda > 0, broadcast against [...].

    >>> clip_vectors(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([1.0, 1.0])).tolist()
    [[0.6000000000000001, 0.8], [0.0, 0.0]]
    """
    return vectors * _factors(np.linalg.norm(vectors, axis=-1), clips)[..., None]


def _factors(norms: Array, clips: Array) -> Array:
    # min(1, clip / norm), 1 where the norm is 0
    return clips / np.maximum(norms, clips)


def averaged_clip(
    slopes: Array, features: Array, clips: Array, batch_size: int, groups: NDArray[np.int64]
) -> Array:
    """Returns the sum over the k groups of the clipped group means (Eq. 2 for k = 1).

    Guarantee: one example more, less or exchanged moves it by at most 2 lambda.

    Args:
      slopes: factors of the per-example gradients, [b, P]; b = 0 gives zeros.
      features: xi, [b, d].
      clips: lambda, [P].
      batch_size: m; a group's sum is divided by m / k.
      groups: [k, b], one row a group: 1 where the example belongs to it.

    Returns:
      [P, d].
    """
    k = len(groups)
    means = [(slopes * one[:, None]).T @ features * (k / batch_size) for one in groups]
    return np.asarray(sum(clip_vectors(mean, clips) for mean in means))


def per_example_clip(slopes: Array, features: Array, clips: Array) -> Array:
    """Returns the sum of the clipped per-example gradients (Abadi et al. 2016, Algorithm 1).

    Guarantee: one example more or less moves it by at most C.

    Args:
      slopes: [b, P].
      features: [b, d].
      clips: C, [P].

    Returns:
      [P, d].
    """
    norms = np.abs(slopes) * np.linalg.norm(features, axis=1)[:, None]
    return np.asarray((slopes * _factors(norms, clips)).T @ features)


def poisson_batch(generator: np.random.Generator, num_examples: int, batch_size: int) -> NDArray:
    """Draws a Poisson batch with probability m/n: distinct indices, int64 [b]; may be empty."""
    # a binomial count, then a subset of that size
    count = generator.binomial(num_examples, batch_size / num_examples)
    return generator.choice(num_examples, count, replace=False, shuffle=False)


class Cells(NamedTuple):
    """P runs: learning rates gamma, clips lambda, noise multipliers (0: none), float64 [P] each."""

    rates: Array
    clips: Array
    noises: Array


def run(
    objective: Objective, data: Data, descent: Descent, cells: Cells, generator: np.random.Generator
) -> Array:
    """Runs an algorithm from 0, for all cells at once.

    Args:
      objective: linear or logistic.
      data: n examples.
      descent: the algorithm.
      cells: P runs.
      generator: of groups, batches and noise.

    Returns:
      The averages of the last stage's iterates, [P, d]; not finite where a run diverged.

    Raises:
      ValueError: m > n, a clip that is not positive, a negative noise multiplier.
    """
    check_batch_size(descent.batch_size, len(data.targets))
    if not (np.all(cells.clips > 0) and np.all(cells.noises >= 0)):
        raise ValueError(f"clips={cells.clips} must be positive, noises={cells.noises} >= 0.")
    n, kinds = len(data.targets), np.arange(descent.groups)[:, None]
    group_of = generator.integers(descent.groups, size=n)
    x = np.zeros((len(cells.clips), data.features.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for stage in range(descent.stages):
            clips, total = cells.clips * 2.0 ** (-stage / 2), np.zeros_like(x)
            for _ in range(descent.steps):  # Algorithm 1 from the average of the stage before
                total += x
                batch = poisson_batch(generator, n, descent.batch_size)
                part = Data(data.features[batch], data.targets[batch])
                slopes = objective.slopes(x, part)
                if descent.clipping == "averaged":
                    of = (group_of[batch] == kinds).astype(np.int64)
                    clipped = averaged_clip(slopes, part.features, clips, descent.batch_size, of)
                else:
                    clipped = per_example_clip(slopes, part.features, clips)
                # an empty batch releases its noise like any other
                z = generator.standard_normal(x.shape[1])
                noised = clipped + (cells.noises * clips)[:, None] * z
                x = x - cells.rates[:, None] * noised / descent.divisor
                if descent.radius < math.inf:
                    x = clip_vectors(x, np.full(len(x), descent.radius))
            x = total / descent.steps
    return x
