r"""First-order mechanisms: weights of per-example gradients, noise on their sum, sensitivity.

DP-SGD (Abadi et al. 2016, arXiv:1607.00133) releases

    (sum_i w(||g_i||) g_i + N(0, sigma^2 C^2 I)) / B,        w(||g||) ||g|| <= r = C / (1 + 2^-8)

and the optimizer behind it is post-processing: `dp-sgd` and `dp-adamw` are one mechanism under two
names. "Automatic" clipping is w = r / (||g|| + gamma) (AUTO-S of Bu et al. 2023, arXiv:2206.07136,
times r). In both, the sensitivity is C under add-or-remove and 2C under replacement: a displaced row
(`batches.placement`) moves by 2^-8 r. Fixed clipping is a projection, so it moves no further than the
gradient does; automatic clipping has the Lipschitz constant r / gamma, so there the gradient itself may
move by 2^-8 gamma only.

Averaged clipping
-----------------
Every example has a fixed group out of k. The gradients sampled in a group are averaged and the mean
is clipped once; the SUM of the k clipped means receives the noise, and the release divides by k.

Sensitivity is 2C, under every relation. One example has one group. The term of its group is a vector in
the ball of radius r before and another one after: they differ by at most 2r, whether the example was
added, removed or replaced. The other k - 1 terms stay, but for one where a displaced row stands in
another group (two of a replacement): its gradient moves by at most 2^-8 r, so does the mean, and the
clip does not lengthen that. Together 2r + 2 * 2^-8 r = 2C. Less cannot be claimed: where the others'
mean is -v with ||v|| > r, one example with a gradient large enough makes it +v, and the term goes from
-r to +r. In particular averaging over m examples gains no factor 1/m.

The accounting therefore uses the bound R = 2C: multiplier sigma / 2. `events.py` assumes of a step
that, given the rest of the batch, the sum with an example lies within R of the sum without it,
whatever the example is; R = 2C satisfies this, so every row of its table holds. Where an example
takes another one's place in the batch (fixed size, truncated Poisson) two groups may change, by at
most 4C = 2R together, as assumed there. Under replace_one a full batch moves by 2C = R rather than
2R, which the accounting uses; with sampling it does not, and stays on the safe side.

Groups come from a keyed hash of the example's index in the data set, never from its place in the
batch. The key must be secret: for add_or_remove_one neighbours whose rows shift when one is deleted
the indices of all others change, and only the distribution of the assignment, independent and
identical for all examples, stays the same. Couple the two runs so that every common example keeps
its group: given the groups each step's sums differ in one group's term, and the divergence of two
mixtures of runs is at most the largest between their parts (joint convexity).

Floating point
--------------
Weights are a relative 2^-16 below the bound, so that the rounding of norms, weights and products does
not lift a contribution over r. The norms must be accurate to 2^-17 for that, which one float32 sum
over millions of coordinates is not (it may miss a tenth of a percent); `row_norms` is. Weighted
gradients are added in float64, where the rounding of the sum stays far inside the same margin, and
the noised sum is rounded to a grid (`discretization.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from hf_dpzero.privacy.described import check_count
from hf_dpzero.privacy.mechanisms.base import AVERAGED_CAVEAT, DenseNoise, KeyedGroups, NotNoised
from hf_dpzero.privacy.noise import NoiseSource

Clipping = Literal["fixed", "automatic", "averaged"]
CLIPPINGS: tuple[Clipping, ...] = ("fixed", "automatic", "averaged")

NORM_PIECE = 1 << 14
"""Coordinates of a row that are held in float64 at a time."""

CLIP_MARGIN = 1.0 - 2.0**-16
"""Weights aim at this share of the bound: room for the rounding of norms, weights and products."""

SMALLEST_FACTOR = 2.0**-100
"""Smaller factors are 0: float32 numbers below 2^-126 have fewer bits than the margin needs."""


def row_norms(rows: Tensor) -> Tensor:
    """Returns the L2 norms of rows [B, n], accurate to a relative 1e-6 whatever n is: float64 [B].

    Taken in pieces: on a CPU, torch's float32 norm of 4e7 numbers at once is 0.3 % too small, and a
    clip by it that much too loose. The rows may have any float dtype; a row with NaN or infinity (or a
    norm beyond float32) has no finite norm.

    >>> row_norms(torch.tensor([[3.0, 4.0], [0.0, float("inf")]])).tolist()
    [5.0, inf]
    """
    pieces = [p.double().norm(dim=1) for p in rows.detach().split(NORM_PIECE, dim=1)]
    return torch.stack(pieces).norm(dim=0)


def clip_factors(norms: Tensor, clip: float) -> Tensor:
    """Returns min(1, C / norm), a little less where it binds.

    Guarantee: factor * norm <= C; 0 where the norm is not finite, and where the factor is below
    2^-100: subnormal factors, or products with them, round by more than the margin.

    Args:
      norms: L2 norms of any shape, float dtype and device.
      clip: C > 0.

    Returns:
      float32, of the shape and device of `norms`.

    >>> clip_factors(torch.tensor([0.5, 4.0, float("nan")]), clip=1.0).round(decimals=4).tolist()
    [1.0, 0.25, 0.0]
    """
    wide = norms.detach().double()
    return _usable((clip * CLIP_MARGIN / wide).clamp(max=1.0), wide)


def _usable(factors: Tensor, norms: Tensor) -> Tensor:
    """Rounds factors [B] to float32; 0 where they, or the norms, have no use."""
    usable = norms.isfinite() & (factors >= SMALLEST_FACTOR)
    return torch.where(usable, factors, 0.0).float()


@dataclass(frozen=True, kw_only=True)
class GradientMechanism(DenseNoise, KeyedGroups):
    """Base of DP-SGD and DP-AdamW: weigh, sum, noise, divide.

    Guarantee: the weighted sum of gradients has L2 sensitivity `sensitivity(relation)` over all
    parameters, a displaced row's move of 2^-8 radii included (see the module's docstring), provided that
    the caller takes `weights` of the gradients' norms, and leaves out gradients that are not finite
    (0 * NaN is NaN). Source: Abadi et al. 2016, Algorithm 1.

    Attributes:
      clip: C, in units of the gradient's norm.
      noise_multiplier: sigma; every coordinate of the sum receives deviation sigma * C. 0 releases
        without noise and is not private.
      clipping: "fixed": min(1, r / norm); "automatic": r / (norm + gamma), r the `radius`; "averaged":
        the mean of each group is clipped (see the module's docstring).
      clip_stability: gamma > 0 of automatic clipping, in units of the gradient's norm.
      clip_groups: k >= 1 of averaged clipping.
    """

    clipping: Clipping = "fixed"
    clip_stability: float = 0.01
    clip_groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._as_floats("clip_stability")
        check_count("clip_groups", self.clip_groups)
        if self.clipping not in CLIPPINGS:
            raise ValueError(f"clipping={self.clipping!r} is unknown; use one of {CLIPPINGS}.")
        if self.clip_groups != 1 and self.clipping != "averaged":
            raise ValueError(
                f"clip_groups={self.clip_groups} has no meaning with clipping={self.clipping!r}; leave "
                "it at 1, or use clipping='averaged'."
            )
        if not 2.0**-40 <= self.clip_stability <= 2.0**40:
            raise ValueError(
                f"clip_stability={self.clip_stability} must be positive (between 2^-40 and 2^40); "
                "0.01 is the paper's choice."
            )

    @property
    def caveats(self) -> tuple[str, ...]:
        return (
            (*super().caveats, AVERAGED_CAVEAT) if self.clipping == "averaged" else super().caveats
        )

    @property
    def divisor(self) -> float:
        # averaged clipping sums over k groups
        return float(self.clip_groups) if self.clipping == "averaged" else self.expected_batch_size

    @property
    def sensitivity_add_remove(self) -> int:  # type: ignore[override]
        return 2 if self.clipping == "averaged" else 1

    def weights(self, norms: Tensor) -> Tensor:
        """Returns factors of the gradients (averaged clipping: of the groups' mean gradients).

        Guarantee: factor * norm <= radius; 0 where the norm is NaN or infinite, or the factor below
        2^-100 (see `clip_factors`).

        Args:
          norms: L2 norms over all parameters, [B] (averaged: [k]), any float dtype and device.

        Returns:
          float32, on the same device.

        >>> m = DPSGD(clip=2.0, noise_multiplier=1.0, expected_batch_size=8, clipping="automatic")
        >>> bool((m.weights(torch.tensor([0.0, 1.0, 1e9])) * torch.tensor([0.0, 1.0, 1e9]) < 2).all())
        True
        """
        if self.clipping == "automatic":
            wide = norms.detach().double()
            return _usable(self.radius * CLIP_MARGIN / (wide + self.clip_stability), wide)
        return clip_factors(norms, self.radius)


@dataclass(frozen=True, kw_only=True)
class DPSGD(GradientMechanism):
    """DP-SGD: what an SGD step is made of (Abadi et al. 2016, Algorithm 1)."""

    name: ClassVar[str] = "dp-sgd"


@dataclass(frozen=True, kw_only=True)
class DPAdamW(GradientMechanism):
    """DP-AdamW: the same release, given to AdamW (Li et al. 2022, arXiv:2110.05679)."""

    name: ClassVar[str] = "dp-adamw"


@dataclass(frozen=True, kw_only=True)
class NonPrivateGradient(NotNoised):
    """Base of plain SGD and AdamW: the sum of gradients over B. No clip, no noise, no privacy.

    A gradient that is not finite counts as zero, as in the private mechanisms.
    """

    replayable: ClassVar[bool] = False
    clipping: ClassVar[str] = "none"

    def weights(self, norms: Tensor) -> Tensor:
        """Returns 1 for every finite norm, else 0; float32, of the shape of `norms`."""
        return norms.detach().isfinite().float()

    def release_part(
        self, total: np.ndarray, noise: NoiseSource, step: int, part: int
    ) -> np.ndarray:
        """Returns the plain mean total / B, float64 [n], as `DenseNoise.release_part` without noise."""
        return total / self.divisor


@dataclass(frozen=True, kw_only=True)
class PlainSGD(NonPrivateGradient):
    """SGD on the examples' gradients; not private."""

    name: ClassVar[str] = "sgd"
    private_counterpart: ClassVar[str] = "dp-sgd"


@dataclass(frozen=True, kw_only=True)
class PlainAdamW(NonPrivateGradient):
    """AdamW on the examples' gradients; not private."""

    name: ClassVar[str] = "adamw"
    private_counterpart: ClassVar[str] = "dp-adamw"
