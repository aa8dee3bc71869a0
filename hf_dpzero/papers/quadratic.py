"""The quadratic study of the DPZero paper (Section 5, Figures 1 and 2, Table 6).

F(x) = (1/2n) sum_i (x - x_i)^T A (x - x_i),   A = diag(a),   coordinates of x_i ~ N(1, 1)

DPZero (Algorithm 2), DPGD-0th (Algorithm 1) and DP-GD are run from 0 over a grid of steps T, step sizes
alpha and clips C, and the best gradient norm and loss over the grid are kept, as the paper does. On a
quadratic the central difference equals the directional derivative whatever the smoothing:
s_i = u^T A (x - x_i). All cells of a grid share the directions and the noise vectors of a step, so
that a step needs one projection of the data; each cell by itself is a run of its algorithm.

This simulates the algorithms from seeded generators: nothing here is a private release.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.accounting import lemma_noise_multiplier

Floats = NDArray[np.float32]

EPSILON, DELTA = 2.0, 1e-6
BLOCK = 16  # directions that are projected at a time


class Cell(NamedTuple):
    """One run of a grid: T, alpha, C."""

    steps: int
    rate: float
    clip: float


@dataclass(frozen=True)
class Quadratic:
    """Data and Hessian.

    Attributes:
      spectrum: the diagonal a of A, float32 [d].
      train, test: x_i, float32 [n, d].
    """

    spectrum: Floats
    train: Floats
    test: Floats

    @classmethod
    def draw(cls, spectrum: Floats, num_examples: int, seed: int) -> Quadratic:
        """Train and test data, coordinates N(1, 1), from a generator of their own.

        Args:
          spectrum: the diagonal of A, float32 [d].
          num_examples: n, of each.
          seed: of the generator.

        Returns:
          The problem.
        """
        generator = _generator(seed, 0)
        shape = (2, num_examples, len(spectrum))
        train, test = generator.standard_normal(shape, dtype=np.float32) + np.float32(1.0)
        return cls(spectrum, train, test)

    def measure(self, x: Floats) -> NDArray[np.float64]:
        """[P, 4]: train and test gradient norm, train and test loss at the points x [P, d]."""
        a, norms, losses = self.spectrum.astype(np.float64), [], []
        with np.errstate(over="ignore", invalid="ignore"):
            for data in (self.train, self.test):
                # ||A (x - mean)||, and F(x) = (||x - mean||_A^2 + mean_i ||x_i - mean||_A^2) / 2
                away = x.astype(np.float64) - data.mean(axis=0, dtype=np.float64)
                spread = float(a @ data.var(axis=0, dtype=np.float64))
                norms.append(np.linalg.norm(a * away, axis=1))
                losses.append(((away**2) @ a + spread) / 2)
        return np.stack([*norms, *losses], axis=1)


def noise_std(clip: float, steps: int, num_examples: int) -> float:
    """Deviation of the noise on the clipped mean: 4 C sqrt(2 T log(e + eps/delta)) / (n eps).

    The paper's calibration (Lemma 2.2): replace-one neighbours, full batch.

    Args:
      clip: C.
      steps: T.
      num_examples: n.

    Returns:
      The standard deviation, in the units of C.
    """
    return clip * lemma_noise_multiplier(EPSILON, steps, DELTA) / num_examples


def zeroth_order(
    problem: Quadratic, cells: Sequence[Cell], *, vector_noise: bool, seed: int
) -> Floats:
    """Last iterates [P, d] of Algorithm 2, or with `vector_noise` of Algorithm 1, from 0.

    Directions are uniform on the sphere of radius sqrt(d). Algorithm 1 clips |s_i| at C / ||u||.

    Args:
      problem: data and Hessian.
      cells: P runs.
      vector_noise: Algorithm 1 in place of 2.
      seed: of directions and noise.

    Returns:
      float32 [P, d].
    """
    d, n = len(problem.spectrum), len(problem.train)
    x = np.zeros((len(cells), d), np.float32)
    rates, clips, noises = _columns(cells, n)
    bounds = clips / math.sqrt(d) if vector_noise else clips
    ends = np.array([cell.steps for cell in cells])
    noise = _generator(seed, 2)
    for step, (u, projected) in enumerate(_projections(problem, int(ends.max()), seed)):
        on = np.flatnonzero(ends > step)
        at = x[on] @ (problem.spectrum * u)
        mean = clipped_mean(at.astype(np.float64), projected, bounds[on])
        z = noise.standard_normal(d if vector_noise else 1, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            amounts, spread = rates[on] * mean, rates[on] * noises[on]
            if not vector_noise:
                amounts += spread * float(z[0])
            x[on] -= amounts.astype(np.float32)[:, None] * u
            if vector_noise:
                x[on] -= spread.astype(np.float32)[:, None] * z
    return x


def _projections(
    problem: Quadratic, steps: int, seed: int
) -> Iterator[tuple[Floats, NDArray[np.float64]]]:
    """(u [d], the sorted u^T A x_i [n]) of each step, computed for a block of steps at a time."""
    d, generator = len(problem.spectrum), _generator(seed, 1)
    for start in range(0, steps, BLOCK):
        drawn = generator.standard_normal((min(BLOCK, steps - start), d), dtype=np.float32)
        block = drawn * (math.sqrt(d) / np.linalg.norm(drawn, axis=1, keepdims=True))
        block = block.astype(np.float32)
        projected = np.sort((problem.train @ (problem.spectrum * block).T).T.astype(np.float64))
        yield from zip(block, projected, strict=True)


def clipped_mean(
    at: NDArray[np.float64], projected: NDArray[np.float64], bounds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """mean_i clip(at - projected_i, +-bound) for each cell, float64 [P].

    Args:
      at: u^T A x of each cell, [P].
      projected: u^T A x_i in ascending order, [n].
      bounds: [P], > 0.

    Returns:
      float64 [P]; NaN where `at` is not finite.

    >>> clipped_mean(np.array([1.0]), np.array([-9.0, 0.0, 3.0]), np.array([4.0]))
    array([1.])
    """
    # sorted once, a cell costs two searches, not a pass over all n terms
    sums = np.concatenate([[0.0], np.cumsum(projected)])
    n = len(projected)
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.searchsorted(projected, at - bounds)  # before it: clipped to +bound
        high = np.searchsorted(projected, at + bounds)  # from it on: clipped to -bound
        inside = at * (high - low) - (sums[high] - sums[low])
        means = (inside + bounds * low - bounds * (n - high)) / n
    return np.where(np.isfinite(at), means, np.nan)


def gradient_descent(problem: Quadratic, cells: Sequence[Cell], *, seed: int) -> Floats:
    """Last iterates of DP-GD: per-example gradients A (x - x_i) clipped to norm C, from 0.

    Args:
      problem: data and Hessian.
      cells: P runs.
      seed: of the noise.

    Returns:
      float32 [P, d].
    """
    a, n = problem.spectrum, len(problem.train)
    x = np.zeros((len(cells), len(a)), np.float32)
    rates, clips, noises = _columns(cells, n)
    ends = np.array([cell.steps for cell in cells])
    squares = (problem.train**2) @ a**2
    noise = _generator(seed, 3)
    for step in range(int(ends.max())):
        on = np.flatnonzero(ends > step)
        z = noise.standard_normal(len(a), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = _clipped_gradients(problem, x[on], clips[on].astype(np.float32), squares)
            spread = (rates[on] * noises[on]).astype(np.float32)
            x[on] -= rates[on].astype(np.float32)[:, None] * mean + spread[:, None] * z
    return x


def _clipped_gradients(problem: Quadratic, x: Floats, clips: Floats, squares: Floats) -> Floats:
    """mean_i min(1, C / ||g_i||) g_i with g_i = A (x - x_i), float32 [P, d]."""
    a, data = problem.spectrum, problem.train
    norms = squares[:, None] - 2 * (data @ (a**2 * x).T) + ((a * x) ** 2).sum(axis=1)
    weights = np.minimum(1.0, clips / np.sqrt(np.maximum(norms, 1e-12)))
    return np.asarray(a * (x * weights.sum(axis=0)[:, None] - weights.T @ data) / len(data))


def _columns(cells: Sequence[Cell], n: int) -> tuple[NDArray[np.float64], ...]:
    """(alpha, C, noise deviation) of the cells, float64 [P] each."""
    rows = [(cell.rate, cell.clip, noise_std(cell.clip, cell.steps, n)) for cell in cells]
    rates, clips, noises = np.array(rows, dtype=np.float64).T
    return rates, clips, noises


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream])))
