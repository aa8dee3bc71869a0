"""Lower-triangular C with a positive diagonal: rows of C^{-1}, columns of C, errors of prefix sums.

What they are for, and where each comes from, is in `factorization.py`, whose functions make them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hf_dpzero.privacy.described import check_count

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


def groups_of(count: int) -> list[slice]:
    """Returns places of a row, the newest draw last, that are summed together, in order of summation.

    The newest draw stands alone, then come 3, 28, 96, 384, .. older ones: most rounding is on small
    weights, and few groups are fast.

    >>> [range(40)[group] for group in groups_of(40)]
    [range(0, 8), range(8, 36), range(36, 39), range(39, 40)]
    """
    ages = [0, 1, 4, *(32 << 2 * k for k in range(count.bit_length()))]
    ends = [min(age, count) for age in ages[1:]]
    groups = [slice(count - end, count - age) for age, end in zip(ages, ends, strict=False)]
    return [group for group in reversed(groups) if group.start < group.stop]


def roundings(count: int) -> np.ndarray:
    """Returns how many roundings of 2^-53 the product of each draw meets in a sum by `groups_of`.

    Of m numbers that are multiplied and added in any order each meets m at most, and one more
    whenever a group is added to what is older.

    Args:
      count: draws of a row.

    Returns:
      float64 [count], the newest draw last.

    >>> float(roundings(6)[-1]), float(roundings(6)[0])
    (2.0, 5.0)
    """
    met = np.zeros(count)
    for group in groups_of(count):
        met[group] += group.stop - group.start
        met[: group.stop] += 1
    return met


def error_sizes(weights: np.ndarray) -> np.ndarray:
    """Returns v_tj of `discretization`, |w| (10 + roundings), float64 [n].

    How a draw's error and that of sums enter a row of C^{-1}, in 2^-53 of the draw.
    """
    return np.abs(weights) * (10.0 + roundings(len(weights)))


class Factorization(ABC):
    """A = B C for R rounds, by rows of C^{-1} and columns of C.

    Attributes:
      rounds: R >= 1, fixed in advance. Stopping earlier is sound; going on is a new factorisation.

    Raises:
      ValueError: fewer than 1 round.
    """

    name: str

    def __init__(self, rounds: int) -> None:
        check_count("rounds", rounds)
        self.rounds = rounds

    @abstractmethod
    def noise_row(self, step: int) -> NoiseRow:
        """Returns row `step` of C^{-1} without its zeros, 0 <= step < rounds."""

    @cached_property
    def rounding(self) -> float:
        """Returns V, a root: the largest sums of `error_sizes` over a row and a column of C^{-1}."""
        rows, columns = np.zeros(self.rounds), np.zeros(self.rounds)
        for step in range(self.rounds):
            row = self.noise_row(step)
            sizes = error_sizes(row.weights)
            rows[step] = sizes.sum()
            columns[row.draws] += sizes
        return math.sqrt(rows.max() * columns.max())

    def kept(self, step: int) -> Sequence[int]:
        """Returns the draws up to round `step` that later rounds may use."""
        return range(max(0, step + 2 - self.lookback), step + 1)

    @property
    @abstractmethod
    def squared_column_norms(self) -> np.ndarray:
        """Returns ||c_r||^2 of each round, float64 [R], by exact summation up to float64 rounding."""

    @abstractmethod
    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        """Returns inner products of columns of C, float64 [m, m].

        Args:
          rounds: m of them, increasing, int64 [m].
          count: only the first `count` rows of C (and rounds below it); default all.
        """

    @property
    @abstractmethod
    def prefix_variances(self) -> np.ndarray:
        """Returns ||b_{r+1}||^2: the noise variance in the sum of rounds 0..r, float64 [R]."""

    @abstractmethod
    def largest_squared_norm(self, count: int) -> float:
        """Returns the largest ||c_r||^2 if the first `count` rows of C are released, 1..rounds."""

    @property
    def first_is_worst(self) -> bool:
        """Says whether no pattern of rounds is worse than the same one shifted to begin at round 0."""
        return False

    @property
    def sensitivity(self) -> float:
        """Returns the largest column norm: sensitivity to a record of norm 1 in one round."""
        return math.sqrt(float(self.squared_column_norms.max()))

    @property
    def lookback(self) -> int:
        """Returns the most rounds that a row of noise reaches back, its own included."""
        return self.rounds

    @property
    def prefix_error(self) -> float:
        """Returns max_r ||c_r||^2 * ||B||_F^2 / R: the figure of merit of `factorization.py`.

        >>> identity = Toeplitz(256, np.ones(1), np.ones(1), "independent")
        >>> identity.prefix_error
        128.5
        """
        return self.sensitivity**2 * float(self.prefix_variances.mean())

    def largest_squared_row(self) -> float:
        """Returns the largest sum of squares of a row of C^{-1}: a step's noise over its draws'."""
        rows = (self.noise_row(step).weights for step in range(self.rounds))
        return max(float(row @ row) for row in rows)

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
        self.name = name

    @property
    def lookback(self) -> int:
        return len(self.inverse)

    @cached_property
    def rounding(self) -> float:
        # The last row's: a draw of that age has no larger weight elsewhere, and no more roundings.
        return float(error_sizes(self.inverse[::-1]).sum())

    def noise_row(self, step: int) -> NoiseRow:
        self._check_step(step)
        first = max(0, step + 1 - self.lookback)
        return NoiseRow(np.arange(first, step + 1), self.inverse[: step + 1 - first][::-1])

    def largest_squared_row(self) -> float:
        return float(self.inverse @ self.inverse)

    def largest_squared_norm(self, count: int) -> float:
        return float((self.column[:count] ** 2).sum())

    @property
    def first_is_worst(self) -> bool:
        # Without negative entries later columns are shorter copies of the first.
        return bool((self.column >= 0).all())

    @cached_property
    def squared_column_norms(self) -> np.ndarray:
        # Column r holds the first R - r numbers of the first column.
        return np.cumsum(_padded(self.column, self.rounds) ** 2)[::-1]

    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        # By sums of lagged products: O(R) for each different lag.
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
        # B is Toeplitz too, with the running sums of C^{-1}'s first column.
        return np.cumsum(np.cumsum(_padded(self.inverse, self.rounds)) ** 2)


class Tree(Factorization):
    """Binary tree: each round draws noise for the node that it completes.

    Prefix 0..r is the sum of the nodes in the binary expansion of r + 1, so its noise has as many draws
    as r + 1 has one bits. Nodes that no prefix of the R rounds uses are left out of C (of the 2R - 1 in
    the usual description), which costs nothing at a power of two and saves one level elsewhere.
    """

    name = "tree"

    def noise_row(self, step: int) -> NoiseRow:
        # The new node, less the nodes that it replaces: one for each trailing 1 of the step.
        self._check_step(step)
        trailing_ones = (~step & (step + 1)).bit_length() - 1
        replaced = step - 2 ** np.arange(trailing_ones)[::-1]
        weights = np.append(np.full(len(replaced), -1.0), 1.0)
        return NoiseRow(np.append(replaced, step).astype(np.int64), weights)

    def kept(self, step: int) -> Sequence[int]:
        # the nodes of the prefix that ends there
        ends, left = [], step + 1
        while left:
            ends.append(left - 1)
            left &= left - 1
        return ends[::-1]

    @cached_property
    def rounding(self) -> float:
        # A row has a draw for each level of the tree; a draw is in its own row and one other at most.
        sizes = error_sizes(np.ones(self.rounds.bit_length()))
        return math.sqrt(sizes.sum() * (sizes[-1] + sizes.max()))

    @cached_property
    def squared_column_norms(self) -> np.ndarray:
        # how many nodes in use contain the round
        changes = np.zeros(self.rounds + 1)
        ends = np.arange(1, self.rounds + 1)
        np.add.at(changes, ends - (ends & -ends), 1.0)
        np.add.at(changes, ends, -1.0)
        return np.cumsum(changes)[: self.rounds]

    def largest_squared_norm(self, count: int) -> float:
        return float(count.bit_length())  # round 0 is in a node of every size

    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        # How many nodes in use (left children that end in time) contain both rounds.
        shared = np.zeros((len(rounds), len(rounds)))
        for level in range(self.rounds.bit_length()):
            node = rounds >> level
            used = (node % 2 == 0) & ((node + 1) << level <= (count or self.rounds))
            shared += np.equal.outer(node, node) & used
        return shared

    @cached_property
    def prefix_variances(self) -> np.ndarray:
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
        check_dense_rounds(self.rounds, name)
        square = strategy.shape == (self.rounds, self.rounds)
        if not square or np.triu(strategy, 1).any() or (np.diag(strategy) <= 0).any():
            raise ValueError(
                f"C of shape {strategy.shape} must be square and lower triangular with a positive "
                "diagonal: a round's noise may not wait for later rounds."
            )
        self.strategy, self.name = _frozen(strategy), name

    @cached_property
    def inverse(self) -> np.ndarray:
        """Returns C^{-1}, float64 [R, R]."""
        from scipy.linalg import solve_triangular

        return _frozen(np.tril(solve_triangular(self.strategy, np.eye(self.rounds), lower=True)))

    def noise_row(self, step: int) -> NoiseRow:
        self._check_step(step)
        return NoiseRow(np.arange(step + 1), self.inverse[step, : step + 1])

    @cached_property
    def squared_column_norms(self) -> np.ndarray:
        return (self.strategy**2).sum(axis=0)

    def largest_squared_norm(self, count: int) -> float:
        return float((self.strategy[:count] ** 2).sum(axis=0).max())

    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        columns = self.strategy[: count or self.rounds, rounds]
        return columns.T @ columns

    @cached_property
    def prefix_variances(self) -> np.ndarray:
        return (np.cumsum(self.inverse, axis=0) ** 2).sum(axis=1)


class Restarted(Factorization):
    """A factorisation of `block.rounds` rounds, begun anew with fresh noise after each of them.

    Args:
      block: of each block; the last one may be cut short.
      rounds: R in all.
    """

    def __init__(self, block: Factorization, rounds: int) -> None:
        super().__init__(rounds)
        self.block, self.name = block, f"{block.name}, restarted"

    @cached_property
    def rounding(self) -> float:
        return self.block.rounding

    def noise_row(self, step: int) -> NoiseRow:
        self._check_step(step)
        inside = step % self.block.rounds
        row = self.block.noise_row(inside)
        return NoiseRow(row.draws + (step - inside), row.weights)

    def kept(self, step: int) -> Sequence[int]:
        inside = step % self.block.rounds
        last = inside == self.block.rounds - 1
        return [] if last else [draw + step - inside for draw in self.block.kept(inside)]

    @cached_property
    def squared_column_norms(self) -> np.ndarray:
        # an upper bound in a last block that is cut short
        return np.resize(self.block.squared_column_norms, self.rounds)

    def largest_squared_row(self) -> float:
        return self.block.largest_squared_row()

    def largest_squared_norm(self, count: int) -> float:
        return self.block.largest_squared_norm(min(count, self.block.rounds))

    def gram(self, rounds: np.ndarray, count: int | None = None) -> np.ndarray:
        # Columns of different blocks are orthogonal.
        size = self.block.rounds
        products = np.zeros((len(rounds), len(rounds)))
        for block in np.unique(rounds // size):
            here = np.flatnonzero(rounds // size == block)
            end = min((count or self.rounds) - block * size, size)
            products[np.ix_(here, here)] = self.block.gram(rounds[here] - block * size, int(end))
        return products

    @cached_property
    def prefix_variances(self) -> np.ndarray:
        # those of the whole blocks before, and of the own
        own = self.block.prefix_variances
        return np.resize(own, self.rounds) + np.arange(self.rounds) // len(own) * own[-1]


def check_dense_rounds(rounds: int, name: str) -> None:
    """Refuses more rounds than `MAX_DENSE_ROUNDS`."""
    if rounds > MAX_DENSE_ROUNDS:
        raise ValueError(
            f"{name} noise for {rounds} rounds needs matrices of rounds by rounds; use at most "
            f"{MAX_DENSE_ROUNDS} rounds, or the toeplitz or banded factorisation."
        )


def _padded(series: np.ndarray, count: int) -> np.ndarray:
    return np.append(series, np.zeros(max(0, count - len(series))))[:count]


def _frozen(values: np.ndarray) -> np.ndarray:
    frozen = np.array(values, dtype=np.float64)
    frozen.setflags(write=False)  # results are cached and shared: a write would change another plan
    return frozen
