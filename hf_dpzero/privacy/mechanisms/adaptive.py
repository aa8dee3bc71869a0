r"""A clip that follows a quantile of the examples' norms, privately (Andrew, Thakkar, McMahan,
Ramaswamy 2021, "Differentially private learning with adaptive clipping", arXiv:1905.03871).

Step t clips at C_t and releases two things about the same batch: the clipped sum, and a noisy count
of the examples whose norm is below C_t. The clip follows from earlier releases alone (their
Section 2.1, the geometric update):

    C_t = C_0 exp(-eta sum_{s<t} (fraction_s - gamma)),      C_0 2^-10 <= C_t <= C_0 2^20

so it costs nothing beyond the counts, and a run that resumes finds it in its ledger.

One Gaussian of multiplier z, given the past
--------------------------------------------
Fix the earlier releases, hence C. Example i contributes the vector p_i of two parts,

    p_i = ( v_i / (z_d C),  (b_i - 1/2) / ((1 + 2^-6) sigma_b) ),      ||v_i|| <= C / (1 + 2^-8),

to a total that receives standard normal noise in every coordinate; the release is that total with
its two parts multiplied by the public z_d C and (1 + 2^-6) sigma_b. An example whose norm is not finite
contributes nothing to either part. b_i is 1 for norms up to 3C/4, 0 from 5C/4, linear between.

One example more also puts one other in another place (`batches.placement`), which moves that one's v by
at most 2^-8 C / (1 + 2^-8) and its norm by at most 2^-8 C, hence its b by 2^-7, as b falls by 2 per C.
(A bit, [norm <= C], would flip by a rounding: a move of 1.) The first parts of the totals then differ by
at most 1 / z_d and the second ones by (1/2 + 2^-7) / ((1 + 2^-6) sigma_b) = 1 / (2 sigma_b). With
z_d = (z^-2 - (2 sigma_b)^-2)^(-1/2) the square of both together is at most

    z_d^-2 + (2 sigma_b)^-2 = z^-2     for every example.

*add_or_remove_one*: the totals differ by a vector of norm at most 1/z. With unit noise that is the
Gaussian mechanism with multiplier z.
*replace_special*: the special example contributes nothing to either part, as an absent one does (a
row that is not finite is one such); the totals differ by at most 1/z again. A row of zeros is not
special: it counts as unclipped.
*replace_one*: the totals differ by at most 2/z; and, which sampled accounting needs, both lie in the
ball of radius 1/z around the total without the example.

Nothing is lost: an example of norm 5C/4 or more, with a displaced one that moves as far as it may,
attains 1/z. A fixed bound of 1/2 on the count, rather than 1 for b_i itself, is what makes it cheap
(their Section 2.2). T steps compose adaptively, each with multiplier z whatever its clip.

The condition 2 sigma_b > z is what leaves something for the sum: at 2 sigma_b = z the count alone
would spend the step. sigma_b = B / 20 (their choice) costs little where B is well above 10 z;
sigma_b = z makes the noise on the sum 15 % larger.

The scalar parts live on integer grids of their own, C 2^-30 and 2^-31, where each receives an exact
discrete Gaussian of scale (multiplier) 2^30; `discretization.py` covers scales that differ. Both
multipliers are at least z, so the slack at z for all K + 1 draws is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
from torch import Tensor

from hf_dpzero.privacy.discretization import GRID_BITS, finite_rows, float32s
from hf_dpzero.privacy.mechanisms.base import (
    DISPLACEMENT,
    MAX_CLIP,
    MAX_NOISE_MULTIPLIER,
    AlongDirections,
    DenseNoise,
    NoisedSum,
    check_multiplier,
)
from hf_dpzero.privacy.mechanisms.gradient import clip_factors
from hf_dpzero.privacy.mechanisms.scalar import ScalarMechanism
from hf_dpzero.privacy.noise import NoiseSource

MIN_CLIP_CHANGE, MAX_CLIP_CHANGE = 2.0**-10, 2.0**20
"""C_t / C_0 stays between these; the smallest bounds what places may move (`checks.smoke_test`)."""

COUNT_DISPLACEMENT = 4 * DISPLACEMENT
"""Largest move of a displaced row's b over the 1/2 that a row adds: b falls by 2 per C."""

COUNT_STREAM = 1 << 62
"""Added to the step for the count's noise, so that insecure sources give it a draw of its own."""

A = TypeVar("A", bound="AdaptiveClipping")


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping(NoisedSum):
    """Base: the count of unclipped examples, its noise, and the clip that follows from it.

    Guarantee: sum and count together are one Gaussian mechanism of multiplier z, a displaced row's move
    in both included; see the module's docstring.

    Attributes:
      clip: C_0 of the whole run; in what `after_fractions` returns, the C_t of one step.
      noise_multiplier: z of sum and count together; 0 releases both without noise.
      expected_batch_size: B, public.
      clip_quantile: gamma in (0, 1), the share of examples to leave unclipped.
      clip_learning_rate: eta >= 0 of the geometric update; 0 keeps C_0.
      clip_count_noise: sigma_b, standard deviation of the noise on sum_i (b_i - 1/2) / (1 + 2^-6);
        2 sigma_b > z.
    """

    clip_quantile: float = 0.5
    clip_learning_rate: float = 0.2
    clip_count_noise: float

    distribution: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._as_floats("clip_quantile", "clip_learning_rate", "clip_count_noise")
        if not 0 < self.clip_quantile < 1:
            raise ValueError(
                f"clip_quantile={self.clip_quantile} is outside (0, 1): it is the share of examples to "
                "leave unclipped, e.g. 0.5."
            )
        if not 0 <= self.clip_learning_rate <= 10:
            raise ValueError(
                f"clip_learning_rate={self.clip_learning_rate} is outside [0, 10]; 0.2 is the paper's."
            )
        if not (math.isfinite(self.clip_count_noise) and self.clip_count_noise > 0):
            raise ValueError(
                f"clip_count_noise={self.clip_count_noise} must be finite and positive: it is the "
                "deviation of the noise on the count of unclipped examples, e.g. B / 20."
            )
        if not self.sum_multiplier <= MAX_NOISE_MULTIPLIER:
            sigma = self.noise_multiplier
            raise ValueError(
                f"clip_count_noise={self.clip_count_noise} must be above half of the noise multiplier "
                f"{sigma:.6g}, or the count alone costs more than the whole step; raise "
                f"clip_count_noise, e.g. to {sigma:.3g} (15 % more noise on the sum)."
            )
        check_multiplier("2 * clip_count_noise", 2 * self.clip_count_noise)

    @property
    def count_multiplier(self) -> float:
        """Returns 2 sigma_b: noise on the count over the 1/2 by which an example moves it."""
        return 2.0 * self.clip_count_noise if self.private else 0.0

    @property
    def sum_multiplier(self) -> float:
        """Returns z_d = (z^-2 - (2 sigma_b)^-2)^(-1/2), rounded up: noise on the sum over C.

        >>> m = AdaptiveScalarMechanism(
        ...     clip=1.0, noise_multiplier=3.0, expected_batch_size=100, clip_count_noise=2.5
        ... )
        >>> round(m.sum_multiplier, 9)  # 1/9 - 1/25 = (4/15)^2
        3.75
        """
        if not self.private:
            return 0.0
        # a little less precision than is left, so that rounding never spends more than z
        left = self.noise_multiplier**-2 * (1 - 2.0**-45) - self.count_multiplier**-2
        return left**-0.5 if left > 0 else math.inf

    @property
    def noise_scale(self) -> float:
        """Returns the standard deviation of the noise on the sum, z_d * C."""
        return self.sum_multiplier * self.clip

    def after_fractions(self: A, total: float, steps: int) -> A:
        """Returns the mechanism of the step after earlier releases; call it on the run's mechanism.

        Args:
          total: sum of their fractions, correctly rounded, so that the order of additions is no matter.
          steps: their number.
        """
        exponent = -self.clip_learning_rate * (total - steps * self.clip_quantile)
        least, most = math.log(MIN_CLIP_CHANGE), math.log(MAX_CLIP_CHANGE)
        moved = self.clip * math.exp(min(max(exponent, least), most))
        return replace(self, clip=min(max(moved, 1 / MAX_CLIP), MAX_CLIP))

    @property
    def _count_divisor(self) -> float:
        # (1/2 + m 2^-7) / (1 + m 2^-6) = 1/2
        return 1 + self.rows_per_unit * COUNT_DISPLACEMENT

    def _count_of(self, norms: np.ndarray, finite: np.ndarray) -> int:
        """Sums (b_i - 1/2) / (1 + m 2^-6) over finite examples, in units of 2^-31, each truncated."""
        shares = np.minimum(norms[finite], 2 * self.clip) / self.clip
        half = np.clip(2 * (1 - shares), -0.5, 0.5)
        integers = np.trunc(np.ldexp(half / self._count_divisor, GRID_BITS + 1))
        return int(integers.astype(np.int64).sum())

    def _fraction(self, count: int, step: int, noise: NoiseSource) -> float:
        """Returns the noised share of unclipped examples; float32, may be outside [0, 1]."""
        drawn = 0
        if self.private:
            scale = math.ldexp(self.count_multiplier, GRID_BITS)
            (drawn,) = noise.gaussian(scale, 1, step + COUNT_STREAM)
        noised = math.ldexp(int(count) + drawn, -GRID_BITS - 1) * self._count_divisor
        return float32s([noised / self.expected_batch_size + 0.5])[0]


@dataclass(frozen=True, kw_only=True)
class AdaptiveScalarMechanism(AlongDirections, AdaptiveClipping):
    """DPZero with adaptive clipping: K finite differences and the count, as K + 1 exact integers.

    Guarantee: one example moves the first K integers by at most 2^30 in L2 norm and the last by at
    most 2^30, whatever its finite differences are, what a displaced row adds included; see the module's
    docstring for what follows.

    Those of `AdaptiveClipping`, with `clip` in loss units per unit of smoothing, and:

    Attributes:
      num_directions: K.
    """

    name: ClassVar[str] = "dpzero-adaptive"
    replayable: ClassVar[bool] = True

    @property
    def granularity(self) -> float:
        """Returns the grid spacing of the sum, C * 2^-30; the count's is 2^-31."""
        return math.ldexp(self.clip, -GRID_BITS)

    @property
    def values_per_release(self) -> int:
        """Returns K + 1: the sum and the fraction."""
        return self.num_directions + 1

    @property
    def noise_draws(self) -> int:
        return self.num_directions + 1

    @property
    def _sum(self) -> ScalarMechanism:
        return ScalarMechanism(
            clip=self.clip,
            noise_multiplier=self.sum_multiplier,
            expected_batch_size=self.expected_batch_size,
            num_directions=self.num_directions,
            rows_per_unit=self.rows_per_unit,
        )

    def clip_sum(self, x: Tensor) -> list[int]:
        """Returns K integers of the clipped sum in units of `granularity`, then the count's in 2^-31.

        Args:
          x: [B, K] finite differences. B = 0 gives zeros; a row with NaN or infinity moves neither.

        >>> import torch
        >>> m = AdaptiveScalarMechanism(
        ...     clip=4.015625, noise_multiplier=1.0, expected_batch_size=3, clip_count_noise=1.0
        ... )
        >>> *sums, count = m.clip_sum(torch.tensor([[3.0], [-9.0], [1.0]]))
        >>> [round(n * m.granularity, 6) for n in sums], round(count * 2.0**-31 * (1 + 2**-6), 6)
        ([0.0], 0.5)
        """
        rows, finite = finite_rows(x, self.num_directions)
        with np.errstate(over="ignore"):  # infinitely many clips are as good as many
            norms = np.linalg.norm(rows, axis=1)
        return [*self._sum.clip_sum(x), self._count_of(norms, finite)]

    def release(self, total: Sequence[int], step: int, noise: NoiseSource) -> tuple[float, ...]:
        """Returns K noised means and the noised fraction of unclipped examples.

        Args:
          total: K + 1 integers, summed over all processes and microbatches of the step.
          step: passed to the noise source; only insecure sources use it.
          noise: where the noise comes from.

        Returns:
          K + 1 floats that float32 represents exactly.
        """
        self._check_total(total, self.values_per_release)
        *sums, count = total
        means = self._sum.release(sums, step, noise)
        return (*means, self._fraction(count, step, noise))


@dataclass(frozen=True, kw_only=True)
class AdaptiveGradientMechanism(AdaptiveClipping, DenseNoise):
    """Base of DP-SGD and DP-AdamW with adaptive clipping: weigh, count, noise both.

    The noise on the gradient is dense, on a grid; the count's is discrete and exact, and its
    fraction is what a step writes to the ledger.
    """

    noise_draws: ClassVar[int] = 2
    clipping: ClassVar[str] = "adaptive"

    @property
    def values_per_release(self) -> int:
        return 1

    def weights(self, norms: Tensor) -> Tensor:
        """Returns min(1, radius / norm), 0 where the norm is not finite; float32: `clip_factors`."""
        return clip_factors(norms, self.radius)

    def count(self, norms: Tensor) -> list[int]:
        """Returns sum_i (b_i - 1/2) / (1 + 2^-6) in units of 2^-31: add it up over processes.

        Args:
          norms: un-noised L2 norms [B]; one that is not finite moves nothing.
        """
        values = norms.detach().cpu().double().numpy().reshape(-1)
        return [self._count_of(values, np.isfinite(values))]

    def release_count(
        self, total: Sequence[int], step: int, noise: NoiseSource
    ) -> tuple[float, ...]:
        """Noises the count, once a step.

        Args:
          total: the one integer of `count`, summed over all processes and microbatches.
          step: passed to the noise source; only insecure sources use it.
          noise: where the noise comes from.

        Returns:
          (fraction of unclipped examples,), a float that float32 represents.
        """
        (count,) = total
        return (self._fraction(count, step, noise),)


@dataclass(frozen=True, kw_only=True)
class AdaptiveDPSGD(AdaptiveGradientMechanism):
    """DP-SGD with adaptive clipping."""

    name: ClassVar[str] = "dp-sgd-adaptive"


@dataclass(frozen=True, kw_only=True)
class AdaptiveDPAdamW(AdaptiveGradientMechanism):
    """DP-AdamW with adaptive clipping."""

    name: ClassVar[str] = "dp-adamw-adaptive"
