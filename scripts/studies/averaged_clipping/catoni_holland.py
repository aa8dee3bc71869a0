"""DP-GD with the robust mean of Catoni and Giulini (2017) and Holland (2019), as in Wang, Xiao, Devadas
and Xu (2020): the full-batch baseline of the averaged-clipping paper.

The mean of x_1 .. x_n is estimated by (s/n) sum_i E phi((x_i + eta x_i) / s), eta ~ N(0, 1/bbar), where
phi(u) = u - u^3/6 on [-sqrt 2, sqrt 2] and +-2 sqrt(2)/3 beyond. One example has an influence of at
most 2 sqrt(2) s / (3n) on a coordinate: replacing one moves d coordinates by at most
4 sqrt(2) s sqrt(d) / (3n) in L2.
"""

from __future__ import annotations

import math

import numpy as np

from hf_dpzero.privacy.mechanisms import DPSGD, Relation
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FullBatchSampler
from scripts.studies.averaged_clipping.algorithm import Array, Cells, Data, Objective

BOUND = 2 * math.sqrt(2) / 3
"""Largest value of phi."""

NODES = 1 << 14
ROWS = 1 << 13  # examples at a time: what stays in a cache
FAILURE = 0.01  # the probability in the choice of s and bbar


def phi(u: Array) -> Array:
    """u - u^3/6 on [-sqrt 2, sqrt 2], +-2 sqrt(2)/3 beyond.

    >>> phi(np.array([0.0, 1.2, -9.0])).round(4).tolist()
    [0.0, 0.912, -0.9428]
    """
    inside = np.clip(u, -math.sqrt(2), math.sqrt(2))
    return np.asarray(inside - inside**3 / 6)


def smoothed_phi(a: Array, b: Array) -> Array:
    """E phi(a + b g), g ~ N(0, 1): closed form (Catoni and Giulini 2017), phi(a) at b = 0.

    Args:
      a: any shape, finite.
      b: >= 0, broadcasts against `a`.

    Returns:
      In [-2 sqrt(2)/3, 2 sqrt(2)/3].

    Raises:
      ValueError: b < 0.

    >>> smoothed_phi(np.array([0.3, 5.0]), np.array([0.2, 2.0])).round(6).tolist()
    [0.2895, 0.926735]
    """
    from scipy.special import ndtr

    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    if np.any(b < 0):
        raise ValueError(f"b={b.min()} must be >= 0: it is a standard deviation.")
    safe = np.maximum(b, 1e-8)
    v_minus, v_plus = (math.sqrt(2) - a) / safe, (math.sqrt(2) + a) / safe
    f_minus, f_plus = ndtr(-v_minus), ndtr(-v_plus)
    with np.errstate(under="ignore"):
        e_minus, e_plus = np.exp(-(v_minus**2) / 2), np.exp(-(v_plus**2) / 2)
    root = math.sqrt(2 * math.pi)
    value = a * (1 - safe**2 / 2) - a**3 / 6 + BOUND * (f_minus - f_plus)
    value = value - (a - a**3 / 6) * (f_minus + f_plus)
    value = value + safe / root * (1 - a**2 / 2) * (e_plus - e_minus)
    tails = f_plus + f_minus + (v_plus * e_plus + v_minus * e_minus) / root
    value = value + a * safe**2 / 2 * tails
    cubes = (2 + v_minus**2) * e_minus - (2 + v_plus**2) * e_plus
    value = value + safe**3 / (6 * root) * cubes
    return np.clip(np.where(b < 1e-8, phi(a), value), -BOUND, BOUND)


class Influence:
    """a -> E phi(a + eta a), eta ~ N(0, 1/bbar), interpolated between 2^14 values of the closed form.

    The interpolation is bounded by 2 sqrt(2)/3 as the function is, hence has its sensitivity; it differs
    from it by less than 1e-6.
    """

    def __init__(self, precision: float) -> None:
        """Tabulates over |a| / (1 + |a|), at which the function is smooth up to infinity.

        Args:
          precision: bbar > 0.

        Raises:
          ValueError: bbar <= 0.
        """
        if not precision > 0:
            raise ValueError(f"precision={precision} must be positive: eta has variance 1/bbar.")
        t = np.arange(NODES) / NODES
        a = t / (1 - t)
        # beyond |a| of about 1e3 the cubes in the closed form cancel; there only eta near -1 matters
        far = math.erf(math.sqrt(precision / 2)) * BOUND
        near = a < 1e3
        values = np.full(NODES + 2, far)
        values[:NODES][near] = smoothed_phi(a[near], a[near] / math.sqrt(precision))
        self._values, self._slopes = values, np.append(np.diff(values), 0.0)

    def __call__(self, a: Array) -> Array:
        """Values at `a`, any shape; infinite entries count as the limit, NaN is an error."""
        if np.isnan(a).any():
            raise ValueError("NaN among the values of a robust mean: drop such examples.")
        t = np.abs(a)
        t = NODES * (1 - 1 / (1 + t))
        at = t.astype(np.int64)
        return np.copysign(self._values[at] + (t - at) * self._slopes[at], a)


def robust_mean(values: Array, scale: float, influence: Influence) -> Array:
    """(s/n) sum_i E phi((x_i + eta x_i)/s) of each column.

    Args:
      values: [n, d].
      scale: s > 0.
      influence: of the chosen bbar.

    Returns:
      [d].
    """
    return np.asarray(scale * influence(values / scale).mean(axis=0))


def sensitivity(scale: float, dimension: int, num_examples: int) -> float:
    """Replace-one L2 sensitivity of the robust mean: 4 sqrt(2) s sqrt(d) / (3n).

    Args:
      scale: s.
      dimension: d.
      num_examples: n.

    >>> round(sensitivity(3.0, 4, 100), 6)
    0.113137
    """
    return 2 * BOUND * scale * math.sqrt(dimension) / num_examples


def default_scale(num_examples: int, dimension: int, steps: int) -> float:
    """s = sqrt(n / (2 d ln(T / .01))).

    Args:
      num_examples: n.
      dimension: d.
      steps: T.
    """
    return math.sqrt(num_examples / (2 * dimension * math.log(steps / FAILURE)))


def plan(
    num_examples: int,
    steps: int,
    noise_multiplier: float = 1.0,
    relation: Relation = "replace_one",
) -> PrivacyPlan:
    """The accounting of DP-GD: full batches.

    Under replace-one the sum of the examples' vectors, each at most C = 2 sqrt(2) s sqrt(d) / 3 long,
    moves by 2C, that is n times `sensitivity`. Under add-or-remove it moves by C.

    Args:
      num_examples: n.
      steps: T.
      noise_multiplier: deviation of the noise on that sum over C.
      relation: the paper's is replace_one.

    Returns:
      A plan with C = 1.
    """
    n = float(num_examples)
    return PrivacyPlan(
        sampler=FullBatchSampler(num_examples=num_examples, expected_batch_size=n),
        mechanism=DPSGD(
            clip=1.0, noise_multiplier=noise_multiplier, expected_batch_size=n, dimension=64
        ),
        steps=steps,
        relation=relation,
    )


def run(
    objective: Objective, data: Data, steps: int, cells: Cells, generator: np.random.Generator
) -> Array:
    """DP-GD from 0 for all cells.

    Args:
      objective: linear or logistic.
      data: n examples.
      steps: T.
      cells: learning rates, scales s in the place of clips, and noise multipliers in units of C.
      generator: of the noise, which the cells share.

    Returns:
      The last iterates, [P, d].
    """
    n, d = data.features.shape
    influence = Influence(math.log(steps / FAILURE))
    deviations = cells.noises * cells.clips * BOUND * math.sqrt(d) / n
    x = np.zeros((len(cells.clips), d))
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(steps):
            total = np.zeros_like(x)
            for start in range(0, n, ROWS):
                part = Data(*(column[start : start + ROWS] for column in data))
                slopes = objective.slopes(x, part)
                for p, scale in enumerate(cells.clips):
                    gradients = slopes[:, p, None] * part.features
                    total[p] += len(gradients) * robust_mean(gradients, scale, influence)
            z = generator.standard_normal(d)
            x = x - cells.rates[:, None] * (total / n + deviations[:, None] * z)
    return x
