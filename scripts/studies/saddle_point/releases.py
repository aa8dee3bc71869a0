"""Plain releases of a histogram or of answers, to hold Algorithm 5 against."""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.gaussian_mechanism import get_sigma_gaussian
from numpy.typing import NDArray

from hf_dpzero.privacy.noise import NoiseSource

Array = NDArray[np.float64]


def noised_histogram(
    shares: Array, num_examples: int, noise: NoiseSource, epsilon: float, delta: float = 0.0
) -> Array:
    """The histogram with discrete noise on the counts, replace-one.

    Laplace noise of scale 2 / eps where delta is 0; else Gaussian: one example moves the counts by
    sqrt 2 in L2.

    Args:
      shares: of `histogram`.
      num_examples: n.
      noise: the source.
      epsilon, delta: > 0; in [0, 1).

    Returns:
      Shares [|Z|], perhaps negative; projected on the simplex.
    """
    if delta:
        drawn = noise.gaussian(math.sqrt(2) * get_sigma_gaussian(epsilon, delta), len(shares), 0)
    else:
        drawn = noise.laplace(2 / epsilon, len(shares), 0)
    return on_simplex(shares + np.array(drawn, dtype=float) / num_examples)


def gaussian_answers(
    queries: Array,
    shares: Array,
    num_examples: int,
    epsilon: float,
    delta: float,
    noise: NoiseSource,
) -> Array:
    """The answers of integer-valued queries with discrete Gaussian noise, without negations.

    Args:
      queries: [m, |Z|], values -1, 0 or 1.
      shares, num_examples, epsilon, delta, noise: as in `noised_histogram`.

    Returns:
      Answers [m].
    """
    norms = np.sum(queries**2, axis=0)
    # 512 columns at a time: all pairs of cells would not fit into memory.
    farthest = 0.0
    for start in range(0, queries.shape[1], 512):
        part = slice(start, start + 512)
        squares = norms[part, None] + norms[None] - 2 * queries[:, part].T @ queries
        farthest = max(farthest, float(squares.max()))
    sigma = math.sqrt(farthest) * float(get_sigma_gaussian(epsilon, delta))
    z = np.array(noise.gaussian(sigma, len(queries), 1), dtype=float)
    return queries @ shares + z / num_examples


def on_simplex(values: Array) -> Array:
    """The nearest point of the simplex in L2.

    >>> on_simplex(np.array([0.9, 0.3, -0.5])).round(6).tolist()
    [0.8, 0.2, 0.0]
    """
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(values) + 1)
    threshold = excess[np.flatnonzero(ordered > excess)[-1]]
    return np.maximum(values - threshold, 0)
