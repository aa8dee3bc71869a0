r"""Clip, sum, noise, release: the private part of one step.

A mechanism owns its own numbers (clip C, noise multiplier sigma, public expected batch size B)
and states its own sensitivity; nobody else computes either.

`ScalarMechanism` is DPZero (Zhang et al. 2024, arXiv:2310.09639, Algorithm 2) with K directions:
the K finite differences of one example form one vector, clipped as one vector.
`AveragedScalarMechanism` clips means of groups instead (AClip of Algorithm 1 in "averaged clipping",
one group; with k groups this project's generalisation): `gradient.py` has the proof that the sum of k
clipped means has sensitivity 2C under every relation. It is the same proof for K-vectors.

All arithmetic before a scalar release is on integers; `discretization.py` proves why the epsilon
printed for a Gaussian holds for the discrete noise that is drawn.

What every mechanism states is in `base.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from hf_dpzero.privacy.described import check_count
from hf_dpzero.privacy.discretization import (
    GRID_BITS,
    finite_rows,
    float32s,
    noised_on_grid,
    on_grid,
)
from hf_dpzero.privacy.mechanisms.base import (
    AVERAGED_CAVEAT,
    AlongDirections,
    DenseNoise,
    KeyedGroups,
    NoisedSum,
    NotNoised,
)
from hf_dpzero.privacy.noise import NoiseSource

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ScalarMechanism(AlongDirections, NoisedSum):
    """DPZero's scalar mechanism for K directions (Algorithm 2, line 3, K = 1 in the paper).

    Guarantee: one example moves `clip_sum` by at most `sensitivity(relation)` in L2 norm (L1 for
    `distribution="laplace"`), whatever its finite differences are, NaN and infinity included: its
    integers are within `radius`, and 2^-8 of that, in the same norm, is left for a displaced row.

    Attributes:
      clip: C, in loss units per unit of smoothing; the norm of one example's K-vector is bounded by
        `radius`.
      noise_multiplier: sigma. Gaussian: the noise on the sum has standard deviation sigma * C in
        each coordinate. Laplace: its scale parameter b is sigma * C (deviation sqrt(2) b).
        0 releases without noise and is not private.
      expected_batch_size: B, public; the divisor of every release, whatever was sampled.
      distribution: "gaussian", or "laplace" for a pure epsilon.

    >>> m = ScalarMechanism(clip=3.0, noise_multiplier=1.0, expected_batch_size=8)
    >>> m.sensitivity("add_or_remove_one"), m.sensitivity("replace_one")
    (3.0, 6.0)
    """

    distribution: Literal["gaussian", "laplace"] = "gaussian"

    name: ClassVar[str] = "dpzero"
    replayable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distribution not in ("gaussian", "laplace"):
            raise ValueError(
                f"distribution={self.distribution!r} is unknown; use 'gaussian' or 'laplace'."
            )

    @property
    def granularity(self) -> float:
        """Returns the grid spacing gamma = C * 2^-30, exact in binary."""
        return math.ldexp(self.clip, -GRID_BITS)

    @property
    def values_per_release(self) -> int:
        return self.num_directions

    @property
    def noise_draws(self) -> int:
        return self.num_directions

    def clip_sum(self, x: Tensor) -> list[int]:
        """Clips each row to norm `radius`, truncates it to the grid and sums, exactly.

        Guarantee: every row contributes an integer vector of norm at most 2^30 / (1 + 2^-8), checked in
        integer arithmetic, so floating-point error cannot exceed the bound. Partial sums from
        several processes add up to the total without rounding.

        Args:
          x: [B, K] finite differences, any dtype and device. B = 0 gives zeros. A row that holds
            NaN or infinity counts as zero.

        Returns:
          K integers, in units of `granularity`.

        >>> import torch
        >>> m = ScalarMechanism(clip=4.015625, noise_multiplier=1.0, expected_batch_size=2)
        >>> m.radius, [round(n * m.granularity, 6) for n in m.clip_sum(torch.tensor([[3.0], [-9.0]]))]
        (4.0, [-1.0])
        """
        rows, _ = finite_rows(x, self.num_directions)
        order = 2 if self.distribution == "gaussian" else 1
        return [int(n) for n in on_grid(rows, self.radius, self.granularity, order).sum(axis=0)]

    def release(self, total: Sequence[int], step: int, noise: NoiseSource) -> tuple[float, ...]:
        """Adds one draw of noise to the integer total and divides by the public batch size.

        Args:
          total: K integers, summed over all processes and microbatches of the step.
          step: passed to the noise source; only insecure sources use it.
          noise: where the noise comes from.

        Returns:
          K floats that float32 represents exactly: the only private quantity that may leave.
        """
        self._check_total(total, self.num_directions)
        k = self.num_directions
        noised: list[float] = [int(n) for n in total]
        if self.private and noise.correlated:
            # Sums of many draws are no integers: Gaussian noise on the grid of `discretization`.
            deviation = math.ldexp(self.noise_multiplier, GRID_BITS) * noise.base_deviation
            sums, dither = np.array(total, dtype=np.float64), noise.dither(k, step, 0)
            noised = noised_on_grid(sums, noise.normals(k, step, 0), deviation, dither).tolist()
        elif self.private:
            scale = math.ldexp(self.noise_multiplier, GRID_BITS)
            draw = noise.gaussian if self.distribution == "gaussian" else noise.laplace
            noised = [int(n) + z for n, z in zip(total, draw(scale, k, step), strict=True)]
        return float32s(n * self.granularity / self.divisor for n in noised)


@dataclass(frozen=True, kw_only=True)
class AveragedScalarMechanism(ScalarMechanism, KeyedGroups):
    """DPZero with averaged clipping: the K-vectors of a group are averaged, and the mean is clipped.

    Guarantee: one example moves `clip_sum` by at most 2 C in L2 norm, whatever its finite differences
    are and whatever those of its group: the clipped mean of its group has norm at most `radius` before
    and after, and a displaced row moves the mean of its own group by 2^-8 radii at most (`gradient.py`).
    There is no gain from the size of a group. An ablation: `clipping: fixed` is better in all
    that this project measured.

    Those of `ScalarMechanism`, Gaussian, and:

    Attributes:
      clip_groups: k; the release is the noised sum of the clipped means over k.
    """

    clip_groups: int = 1

    name: ClassVar[str] = "dpzero-averaged"
    clipping: ClassVar[str] = "averaged"
    sensitivity_add_remove: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("clip_groups", self.clip_groups)
        if self.distribution != "gaussian":
            raise ValueError(
                f"distribution={self.distribution!r} with averaged clipping: use 'gaussian'."
            )

    @property
    def divisor(self) -> float:
        return float(self.clip_groups)

    @property
    def caveats(self) -> tuple[str, ...]:
        return (*super().caveats, AVERAGED_CAVEAT)

    def clip_sum(self, x: Tensor, groups: Sequence[int] = ()) -> list[int]:
        """Averages the rows of each group, clips each mean to norm `radius` and sums, exactly.

        Args:
          x: [B, K] finite differences. B = 0 gives zeros. A row that holds NaN or infinity is left
            out.
          groups: of each row, B of them; all examples of a group must be here.

        Returns:
          K integers, in units of `granularity`.

        Raises:
          ValueError: not one group for each row.

        >>> import torch
        >>> m = AveragedScalarMechanism(clip=4.0, noise_multiplier=1.0, expected_batch_size=3)
        >>> [n * m.granularity for n in m.clip_sum(torch.tensor([[6.0], [-9.0], [6.0]]), [0, 0, 0])]
        [1.0]
        """
        rows, finite = finite_rows(x, self.num_directions)
        if len(groups) != len(rows):
            raise ValueError(f"{len(groups)} groups for {len(rows)} rows: give one for each row.")
        rows, of = rows[finite], np.asarray(groups)[finite]
        if not len(rows):
            return [0] * self.num_directions
        parts = [rows[of == group] for group in np.unique(of)]
        # Correctly rounded sums: in one of float64 additions the order of a group's rows, which follows
        # from who else was drawn, would decide what is left of large differences that cancel.
        means = np.array([[math.fsum(column) for column in (part / len(part)).T] for part in parts])
        return [int(n) for n in on_grid(means, self.radius, self.granularity, 2).sum(axis=0)]


@dataclass(frozen=True, kw_only=True)
class NonPrivateMean(AlongDirections, NotNoised):
    """Plain MeZO (Malladi et al. 2023): the mean finite difference. No clip, no noise, no privacy.

    A row that holds NaN or infinity counts as zero, as in the private mechanisms.
    """

    name: ClassVar[str] = "mezo"
    private_counterpart: ClassVar[str] = "dpzero"
    replayable: ClassVar[bool] = True

    @property
    def granularity(self) -> float:
        """Returns 1.0: totals are floats in the units of the finite differences."""
        return 1.0

    @property
    def values_per_release(self) -> int:
        return self.num_directions

    def clip_sum(self, x: Tensor) -> list[float]:
        """Returns column sums of x [B, K] in float64, correctly rounded; B = 0 gives zeros.

        >>> import torch
        >>> NonPrivateMean(expected_batch_size=2).clip_sum(torch.tensor([[3.0], [-9.0]]))
        [-6.0]
        """
        rows, _ = finite_rows(x, self.num_directions)
        return [math.fsum(column) for column in rows.T.tolist()]

    def release(self, total: Sequence[float], step: int, noise: NoiseSource) -> tuple[float, ...]:
        """Returns the total [K] over `expected_batch_size`, rounded once to float32."""
        self._check_total(total, self.num_directions)
        return float32s(float(t) / self.expected_batch_size for t in total)


@dataclass(frozen=True, kw_only=True)
class VectorMechanism(AlongDirections, DenseNoise):
    """DPGD-0th (DPZero paper, Algorithm 1): the clipped d-vector with d-dimensional noise.

    An example's vector is v_i = sum_k s_ik u_k along the step's K shared directions (K = 1 in the
    paper), so its norm is sqrt(s_i^T G s_i) with the Gram matrix G_kl = <u_k, u_l>, and clipping the
    d-vector to norm `radius` is scaling the K numbers: per-example d-vectors never exist. Two data sets
    differ by a vector in the span of the directions of norm at most `sensitivity` (what a displaced row
    adds moves by 2^-8 radii as a d-vector), and each of the d coordinates of the sum receives
    independent Gaussian noise of standard deviation sigma * C: one Gaussian event, whatever K and d are.
    """

    name: ClassVar[str] = "dpgd-0th"

    def clip_sum(self, x: Tensor, gram: Tensor | np.ndarray) -> tuple[float, ...]:
        """Returns K coefficients c with sum_k c_k u_k = the sum over examples of their clipped vectors.

        Guarantee: every example contributes a vector of norm at most `radius`, for entries of G accurate
        to 2^-37 of sqrt(G_kk G_ll). Each coefficient is a multiple, by an integer of limited size, of
        one power of two, so float64 adds the terms, and the partial sums of several processes,
        exactly (for up to 2^20 / K examples).

        Args:
          x: [B, K] finite differences. B = 0 gives zeros; a row with NaN or infinity counts as zero.
          gram: [K, K] float64, positive semi-definite with a positive diagonal. For K = 1 the
            squared norm of u, rounded up where it is not exact.

        Returns:
          K floats, in loss units per unit of smoothing.

        >>> import torch
        >>> m = VectorMechanism(clip=4.015625, noise_multiplier=1.0, expected_batch_size=2)
        >>> (c,) = m.clip_sum(torch.tensor([[1.0], [-9.0]]), gram=torch.tensor([[4.0]]))
        >>> round(c, 6)
        -1.0
        """
        rows, _ = finite_rows(x, self.num_directions)
        matrix = _checked_gram(np.asarray(gram, dtype=np.float64), self.num_directions)
        if self.num_directions > 1:
            return _sum_along_many(rows, matrix, self.radius)
        bound = self.radius * (1 - 2.0**-40) / math.sqrt(matrix[0, 0])  # room for rounding c u
        grid = math.ldexp(1.0, math.frexp(bound)[1] - 1 - GRID_BITS)  # about 2^-30 of the bound
        integers = np.trunc(np.clip(rows[:, 0], -bound, bound) / grid).astype(np.int64)
        return (float(int(integers.sum()) * grid),)


GRAM_SLACK = 2.0**-36
"""Relative room for errors in the Gram matrix and in the norms computed from it."""

VECTOR_MARGIN = 1.0 - 2.0**-20
"""Several directions are clipped to this share of the radius: room for truncation, which shortens the
coefficients but perhaps not the vector, and for the float64 rounding of sum_k c_k u_k."""


def _checked_gram(gram: np.ndarray, num_directions: int) -> np.ndarray:
    """Returns the matrix itself, and refuses one that is no Gram matrix of K directions."""
    k = num_directions
    if gram.shape != (k, k):
        raise ValueError(
            f"gram of shape {gram.shape} for num_directions={k}; pass the [{k}, {k}] inner products "
            "of the step's directions."
        )
    norms = np.sqrt(np.maximum(np.diag(gram), 0.0))
    if not (np.isfinite(gram).all() and (norms > 0).all()):
        raise ValueError(f"gram={gram.tolist()} must be finite with a positive diagonal.")
    cosines = gram / np.outer(norms, norms)
    if not np.allclose(cosines, cosines.T, rtol=0, atol=GRAM_SLACK) or (
        np.linalg.eigvalsh(cosines)[0] < -k * GRAM_SLACK
    ):
        raise ValueError(
            f"gram={gram.tolist()} is not symmetric and positive semi-definite, so it is not the "
            "Gram matrix of any directions; use <u_k, u_l>."
        )
    return gram


def _sum_along_many(rows: np.ndarray, gram: np.ndarray, radius: float) -> tuple[float, ...]:
    """Returns column sums of rows [B, K] scaled to norm sqrt(s^T G s) <= r and truncated to a grid."""
    lengths = np.sqrt(np.diag(gram))
    # Truncation moves a vector by at most grid * sum_k ||u_k|| <= 2^-30 r, inside `VECTOR_MARGIN`.
    grid = math.ldexp(1.0, math.frexp(radius / lengths.sum())[1] - 1 - GRID_BITS)
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    unit = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)
    # s^T G s, plus what it may lack for the errors of G and of this evaluation
    squares = ((unit @ gram) * unit).sum(axis=1, keepdims=True)
    room = GRAM_SLACK * (np.abs(unit) @ lengths[:, None]) ** 2
    norms = np.sqrt(np.maximum(squares, 0.0) + room)
    # Nearly dependent directions could have huge coefficients that cancel. For sums to stay exact none
    # may exceed 2^33 K grid units, four times what orthogonal directions of like norms need; a row that
    # does is scaled down as a whole.
    allowed = np.divide(
        radius * VECTOR_MARGIN, norms, out=np.zeros_like(norms), where=norms > 0
    ).clip(max=math.ldexp(grid, GRID_BITS + 2 + len(lengths).bit_length()))
    integers = np.trunc(unit * np.minimum(largest, allowed) / grid).astype(np.int64)
    return tuple(float(int(n) * grid) for n in integers.sum(axis=0))
