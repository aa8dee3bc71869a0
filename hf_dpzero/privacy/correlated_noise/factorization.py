r"""Factorisations A = B C of prefix sums: how the noise of a round reuses the noise of earlier rounds.

A is lower triangular with ones. The vectors g_0 .. g_{R-1} of R rounds are released with the noise of
one Gaussian mechanism on C G:

    A G + B Z = B (C G + Z),        round r:   g_r + (b_{r+1} - b_r) Z = g_r + (C^{-1} Z)_r

Z has R rows of independent noise. All C here are square and lower triangular with a positive diagonal,
so that round r needs no later data, and the accounting of the Gaussian mechanism holds for vectors
that are chosen after seeing earlier rounds (Denisov, McMahan, Rush, Smith and Thakurta 2022,
arXiv:2202.08312, Theorem 2.1). If one record takes part in one round, with a vector of norm at most 1,
the sensitivity is the largest column norm of C; for several rounds see `participation.py`.

| name | C | rows of C^{-1} | source |
|---|---|---|---|
| independent | identity | one draw | |
| tree | nodes of a binary tree that prefixes use | 1 + log2 R draws at most | Dwork et al. 2010 |
| tree, least squares | all nodes, B = A C^+ | dense | Honaker 2015 |
| optimized | least error for the largest column norm | dense | Denisov et al. 2022 |
| toeplitz | square root of A | all earlier draws | Fichtenberger et al. 2023, arXiv:2202.11205 |
| banded | C^{-1} of `toeplitz`, cut off after b | b draws | |
| banded strategy | C of `toeplitz`, cut off after b | all earlier draws | arXiv:2306.08153 |

Own code, as dp-accounting has no matrix factorisations and jax-privacy's run on JAX.

The figure of merit is the mean squared error of a prefix sum for noise of deviation 1 over the
sensitivity, max_r ||c_r||^2 * ||B||_F^2 / R.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property, lru_cache
from typing import ClassVar, NamedTuple

import numpy as np

MAX_DENSE_ROUNDS = 1024
"""Rounds of a factorisation that holds matrices of rounds by rounds and takes a minute to optimise."""


class NoiseRow(NamedTuple):
    """What one round's noise is made of: sum_i weights[i] * Z[draws[i]].

    Attributes:
      draws: rounds whose base noise takes part, increasing, the round itself last; int64 [m].
      weights: their factors, float64 [m].
    """

    draws: np.ndarray
    weights: np.ndarray


class Factorization(ABC):
    """A = B C for R rounds, by rows of C^{-1} and columns of C.

    Attributes:
      rounds: R >= 1, fixed in advance. Stopping earlier is sound; going on is a new factorisation.

    Raises:
      ValueError: fewer than 1 round.
    """

    name: ClassVar[str]

    def __init__(self, rounds: int) -> None:
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"rounds={rounds!r} must be an integer of at least 1.")
        self.rounds = rounds

    @abstractmethod
    def noise_row(self, step: int) -> NoiseRow:
        """Row `step` of C^{-1} without its zeros, 0 <= step < rounds."""

    @property
    @abstractmethod
    def squared_column_norms(self) -> np.ndarray:
        """||c_r||^2 of each round, float64 [R], by exact summation up to float64 rounding."""

    @abstractmethod
    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        """Inner products of columns of C.

        Args:
          rounds: m of them, increasing, int64 [m].
          count: only the first `count` rows of C (and rounds below it); default all.

        Returns:
          float64 [m, m].
        """

    @property
    @abstractmethod
    def prefix_variances(self) -> np.ndarray:
        """||b_{r+1}||^2: the noise variance in the sum of rounds 0..r, float64 [R]."""

    @property
    def sensitivity(self) -> float:
        """Largest column norm: sensitivity where a record takes part in one round with norm 1."""
        return math.sqrt(float(self.squared_column_norms.max()))

    @property
    def lookback(self) -> int:
        """Most rounds that a row of noise reaches back, its own included."""
        return self.rounds

    @property
    def prefix_error(self) -> float:
        """max_r ||c_r||^2 * ||B||_F^2 / R: what the module's docstring calls the figure of merit.

        >>> round(toeplitz(256).prefix_error, 3), independent(256).prefix_error
        (7.122, 128.5)
        """
        return self.sensitivity**2 * float(self.prefix_variances.mean())

    def largest_row(self) -> float:
        """max_r of the sum of |weights| of a row of C^{-1}."""
        return max(float(np.abs(self.noise_row(r).weights).sum()) for r in range(self.rounds))

    def _check_step(self, step: int) -> None:
        if not 0 <= step < self.rounds:
            raise ValueError(
                f"step {step} is outside 0..{self.rounds - 1}: the number of rounds is fixed in advance."
            )


class Toeplitz(Factorization):
    """C lower triangular and constant along diagonals; C^{-1} is too. Nothing is R by R.

    Args:
      rounds: R.
      column: first column of C, float64, at most R numbers; the rest is 0.
      inverse: first column of C^{-1}, likewise; together they multiply to 1.
      name: for reports.
    """

    def __init__(self, rounds: int, column: np.ndarray, inverse: np.ndarray, name: str) -> None:
        super().__init__(rounds)
        self.column, self.inverse = _frozen(column[:rounds]), _frozen(inverse[:rounds])
        self.name = name  # type: ignore[misc]

    @property
    def lookback(self) -> int:
        """Numbers in the first column of C^{-1}."""
        return len(self.inverse)

    def noise_row(self, step: int) -> NoiseRow:
        """As in the base class."""
        self._check_step(step)
        first = max(0, step + 1 - self.lookback)
        return NoiseRow(np.arange(first, step + 1), self.inverse[: step + 1 - first][::-1])

    def largest_row(self) -> float:
        """The last row's."""
        return float(np.abs(self.inverse).sum())

    @cached_property
    def squared_column_norms(self) -> np.ndarray:
        """Column r holds the first R - r numbers of the first column."""
        return np.cumsum(_padded(self.column, self.rounds) ** 2)[::-1]

    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        """As in the base class, by sums of lagged products: O(R) for each different lag."""
        column = _padded(self.column, count or self.rounds)
        first, second = np.minimum.outer(rounds, rounds), np.maximum.outer(rounds, rounds)
        products = np.zeros(first.shape)
        for lag in np.unique(second - first):
            sums = np.cumsum(column[lag:] * column[: len(column) - lag])
            same = second - first == lag
            products[same] = sums[len(column) - 1 - second[same]]
        return products

    @cached_property
    def prefix_variances(self) -> np.ndarray:
        """B is Toeplitz too, with the running sums of C^{-1}'s first column."""
        return np.cumsum(np.cumsum(_padded(self.inverse, self.rounds)) ** 2)


class Tree(Factorization):
    """Binary tree: each round draws noise for the node that it completes.

    Prefix 0..r is the sum of the nodes in the binary expansion of r + 1, so its noise has as many draws
    as r + 1 has one bits. Nodes that no prefix of the R rounds uses are left out of C (of the 2R - 1 in
    the usual description), which costs nothing at a power of two and saves one level elsewhere.
    """

    name = "tree"

    def noise_row(self, step: int) -> NoiseRow:
        """As in the base class: the new node, less the nodes that it replaces."""
        self._check_step(step)
        replaced = step - 2 ** np.arange(_trailing_ones(step))[::-1]
        weights = np.append(np.full(len(replaced), -1.0), 1.0)
        return NoiseRow(np.append(replaced, step).astype(np.int64), weights)

    def largest_row(self) -> float:
        """One more than the levels of the tree."""
        return float(self.rounds.bit_length())

    @property
    def lookback(self) -> int:
        """Half of the largest complete tree, and one."""
        return max(1, 2 ** (self.rounds.bit_length() - 1) // 2 + 1)

    @cached_property
    def squared_column_norms(self) -> np.ndarray:
        """How many nodes in use contain the round."""
        changes = np.zeros(self.rounds + 1)
        ends = np.arange(1, self.rounds + 1)
        np.add.at(changes, ends - (ends & -ends), 1.0)
        np.add.at(changes, ends, -1.0)
        return np.cumsum(changes)[: self.rounds]

    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        """How many nodes in use contain both rounds."""
        ends = np.arange(1, (count or self.rounds) + 1)[:, None]
        inside = ((rounds < ends) & (rounds >= ends - (ends & -ends))).astype(np.float64)
        return inside.T @ inside

    @cached_property
    def prefix_variances(self) -> np.ndarray:
        """One bits of r + 1."""
        return np.array([(r + 1).bit_count() for r in range(self.rounds)], dtype=np.float64)


class Dense(Factorization):
    """Any lower-triangular C with a positive diagonal, as a matrix.

    Args:
      strategy: C, float64 [R, R].
      name: for reports.

    Raises:
      ValueError: not square, not lower triangular, a diagonal that is not positive, or more rounds than
        `MAX_DENSE_ROUNDS`.
    """

    def __init__(self, strategy: np.ndarray, name: str) -> None:
        super().__init__(len(strategy))
        _check_dense_rounds(self.rounds, name)
        square = strategy.shape == (self.rounds, self.rounds)
        if not square or np.triu(strategy, 1).any() or (np.diag(strategy) <= 0).any():
            raise ValueError(
                f"C of shape {strategy.shape} must be square and lower triangular with a positive "
                "diagonal: a round's noise may not wait for later rounds."
            )
        self.strategy, self.name = _frozen(strategy), name  # type: ignore[misc]

    @cached_property
    def inverse(self) -> np.ndarray:
        """C^{-1}, float64 [R, R]."""
        from scipy.linalg import solve_triangular

        return _frozen(np.tril(solve_triangular(self.strategy, np.eye(self.rounds), lower=True)))

    def noise_row(self, step: int) -> NoiseRow:
        """As in the base class."""
        self._check_step(step)
        return NoiseRow(np.arange(step + 1), self.inverse[step, : step + 1])

    @cached_property
    def squared_column_norms(self) -> np.ndarray:
        """As in the base class."""
        return (self.strategy**2).sum(axis=0)

    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        """As in the base class."""
        columns = self.strategy[: count or self.rounds, rounds]
        return columns.T @ columns

    @cached_property
    def prefix_variances(self) -> np.ndarray:
        """As in the base class."""
        return (np.cumsum(self.inverse, axis=0) ** 2).sum(axis=1)


class Restarted(Factorization):
    """A factorisation of `block.rounds` rounds, begun anew with fresh noise after each of them.

    Args:
      block: of each block; the last one may be cut short.
      rounds: R in all.
    """

    def __init__(self, block: Factorization, rounds: int) -> None:
        super().__init__(rounds)
        self.block, self.name = block, f"{block.name}, restarted"  # type: ignore[misc]

    @property
    def lookback(self) -> int:
        """The block's."""
        return min(self.block.lookback, self.rounds)

    def noise_row(self, step: int) -> NoiseRow:
        """As in the base class."""
        self._check_step(step)
        inside = step % self.block.rounds
        row = self.block.noise_row(inside)
        return NoiseRow(row.draws + (step - inside), row.weights)

    def largest_row(self) -> float:
        """The block's."""
        return self.block.largest_row()

    @cached_property
    def squared_column_norms(self) -> np.ndarray:
        """As in the base class; an upper bound in a last block that is cut short."""
        return np.resize(self.block.squared_column_norms, self.rounds)

    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        """As in the base class: columns of different blocks are orthogonal."""
        size = self.block.rounds
        products = np.zeros((len(rounds), len(rounds)))
        for block in np.unique(rounds // size):
            here = np.flatnonzero(rounds // size == block)
            end = min((count or self.rounds) - block * size, size)
            products[np.ix_(here, here)] = self.block.gram(rounds[here] - block * size, int(end))
        return products

    @cached_property
    def prefix_variances(self) -> np.ndarray:
        """Those of the whole blocks before, and of the own."""
        own = self.block.prefix_variances
        return np.resize(own, self.rounds) + np.arange(self.rounds) // len(own) * own[-1]


def independent(rounds: int) -> Factorization:
    """C = I: the noise of DP-SGD."""
    return Toeplitz(rounds, np.ones(1), np.ones(1), "independent")


def toeplitz(rounds: int) -> Factorization:
    """C = B = square root of A: 1, 1/2, 3/8, 5/16, ..; the inverse 1, -1/2, -1/8, -1/16, ..

    The published bound 1 + ln(4R/5)/pi of its squared column norm is too small; this is the exact sum.

    >>> round(float(toeplitz(1000).squared_column_norms[0]), 3)
    3.265
    """
    return Toeplitz(rounds, square_root(rounds), inverse_square_root(rounds), "toeplitz")


def banded(rounds: int, bands: int) -> Factorization:
    """C^{-1} is that of `toeplitz` with `bands` diagonals; C is the inverse of that.

    A round's noise needs the last `bands` draws only. C is not banded, and its column norms are computed
    from it, not taken from `toeplitz`.

    Args:
      rounds: R.
      bands: b >= 1; b >= R gives `toeplitz`.
    """
    inverse = inverse_square_root(_checked_bands(rounds, bands))
    return Toeplitz(rounds, reciprocal(inverse, rounds), inverse, "banded")


def banded_strategy(rounds: int, bands: int) -> Factorization:
    """C is that of `toeplitz` with `bands` diagonals; C^{-1} is the inverse of that.

    Columns at least `bands` rounds apart are orthogonal, so a record that takes part k times at that
    distance has the sensitivity of one round times the root of k.

    Args:
      rounds: R.
      bands: b >= 1; b >= R gives `toeplitz`.
    """
    column = square_root(_checked_bands(rounds, bands))
    return Toeplitz(rounds, column, reciprocal(column, rounds), "banded_strategy")


def tree(rounds: int) -> Factorization:
    """The binary tree with B picking nodes; any number of rounds."""
    return Tree(rounds)


def tree_least_squares(rounds: int) -> Factorization:
    """All nodes of the binary tree, with the least-squares B = A C^+ (Honaker 2015).

    C of 2P - 1 rows (P the next power of two) is replaced by the lower-triangular matrix of the same
    Gram matrix: B Z then has the same distribution, and the same sensitivity.
    """
    _check_dense_rounds(rounds, "tree_least_squares")
    size = 1 << (rounds - 1).bit_length()
    levels = [np.kron(np.eye(size >> j), np.ones(1 << j)) for j in range(size.bit_length())]
    nodes = np.concatenate(levels)[:, :rounds]
    return Dense(_lower_factor(nodes.T @ nodes), "tree_least_squares")


@lru_cache(maxsize=8)
def optimized(rounds: int, tolerance: float = 1e-6) -> Factorization:
    """Least ||A C^{-1}||_F for columns of norm at most 1, by Denisov et al.'s fixed point.

    v <- diag((D A^T A D)^{1/2}) with D = diag(v)^{1/2}; at its fixed point the Gram matrix of C is
    X = D^{-1} (D A^T A D)^{1/2} D^{-1}, with ones on its diagonal (their Section 4).

    Args:
      rounds: R <= `MAX_DENSE_ROUNDS`; about a minute at 1,000.
      tolerance: how far a squared column norm may be from 1 when the iteration ends. The norms that are
        accounted are those of the C that comes out.
    """
    _check_dense_rounds(rounds, "optimized")
    rounds_left = rounds - np.arange(rounds, dtype=np.float64)
    workload = np.minimum.outer(rounds_left, rounds_left)  # A^T A
    v = np.sqrt(np.diag(workload))
    for _ in range(500):
        scale = np.sqrt(v)
        values, vectors = np.linalg.eigh(scale[:, None] * workload * scale)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
        diagonal = np.diag(root)
        if np.abs(diagonal / v - 1).max() <= tolerance:
            break
        v = diagonal.copy()
    return Dense(_lower_factor(root / np.outer(scale, scale)), "optimized")


def square_root(count: int) -> np.ndarray:
    """h: coefficients of (1 - x)^{-1/2}; h_0 = 1, h_r = (1 - 1/(2r)) h_{r-1}; float64 [count]."""
    return np.cumprod(np.append(1.0, 1.0 - 0.5 / np.arange(1, count)))


def inverse_square_root(count: int) -> np.ndarray:
    """Coefficients of (1 - x)^{1/2}: 1, then the factors 1 - 3/(2r); float64 [count]."""
    return np.cumprod(np.append(1.0, 1.0 - 1.5 / np.arange(1, count)))


def reciprocal(series: np.ndarray, count: int) -> np.ndarray:
    """First `count` coefficients of 1 / series, by its recursion.

    Args:
      series: float64, its first coefficient 1.
      count: how many.

    Returns:
      float64 [count].
    """
    result = np.zeros(count)
    result[0] = 1.0
    for n in range(1, count):
        terms = min(n, len(series) - 1)
        result[n] = -(series[1 : terms + 1] @ result[n - terms : n][::-1])
    return result


def _lower_factor(gram: np.ndarray) -> np.ndarray:
    """The lower-triangular C with C^T C = gram: Cholesky with rows and columns in reverse."""
    return np.linalg.cholesky(gram[::-1, ::-1]).T[::-1, ::-1]


def _checked_bands(rounds: int, bands: int) -> int:
    if isinstance(bands, bool) or not isinstance(bands, int) or bands < 1:
        raise ValueError(
            f"bands={bands!r} must be an integer of at least 1 (1 is independent noise)."
        )
    return min(bands, rounds)


def _check_dense_rounds(rounds: int, name: str) -> None:
    if rounds > MAX_DENSE_ROUNDS:
        raise ValueError(
            f"{name} noise for {rounds} rounds needs matrices of rounds by rounds; use at most "
            f"{MAX_DENSE_ROUNDS} rounds, or the toeplitz or banded factorisation."
        )


def _padded(series: np.ndarray, count: int) -> np.ndarray:
    return np.append(series, np.zeros(max(0, count - len(series))))[:count]


def _trailing_ones(step: int) -> int:
    return (~step & (step + 1)).bit_length() - 1


def _frozen(values: np.ndarray) -> np.ndarray:
    frozen = np.array(values, dtype=np.float64)
    frozen.setflags(write=False)
    return frozen
