r"""Clip, sum, noise, release: the private part of one step.

A mechanism owns its own numbers (clip C, noise multiplier sigma, public expected batch size B)
and states its own sensitivity; nobody else computes either.

`ScalarMechanism` is DPZero (Zhang et al. 2024, arXiv:2310.09639, Algorithm 2) with K directions:
the K finite differences of one example form one vector, clipped as one vector.

Why the printed epsilon, computed for a Gaussian, holds for the discrete noise that is drawn
-------------------------------------------------------------------------------------------
All arithmetic before the release is on integers. The grid is gamma = C * 2^-30, so one example
moves the integer total by a vector of norm at most R = 2^30, exactly, and the noise is a discrete
Gaussian with parameter s = sigma * 2^30 per coordinate (Canonne, Kamath, Steinke 2020,
arXiv:2004.00010; their Theorem 4 gives it the zCDP of the continuous Gaussian, which is what an
RDP accountant needs). For accountants that need the whole privacy-loss distribution, compare the
discrete Gaussian Y with X = the continuous N(0, s^2) rounded to the nearest integer:

1. X + k, for an integer vector k, is a rounding of (noise + k), hence a post-processing of the
   continuous mechanism. The continuous accounting applies to X without any loss.
2. For |y| <= t s, P[X = y] is the integral of the Gaussian density over [y - 1/2, y + 1/2], so
   |log(P[Y = y] / P[X = y])| <= (t^2 + 3) / (24 s^2) + 1e-16 <= (t^2 + 2) / (12 s^2) for s >= 2^20
   and t >= 1 (log(sinh(a)/a) <= a^2/6 for the tilt, 1/(8 s^2) for the curvature, Poisson summation
   for the normalising constants).
3. Both laws put at most 2 exp(-(t - 1)^2 / 2) outside that range.

Over T steps of K coordinates the two runs are therefore (h, d0)-close, h = T K (t^2 + 2)/(12 s^2)
and d0 = 2 T K exp(-(t - 1)^2 / 2), and if the continuous run is (eps, delta)-DP then the discrete
one is (eps + 2 h, e^h delta + (1 + e^(eps + h)) d0)-DP. With t = 40, d0 is below 1e-320 for every
run of fewer than 10^9 draws, and stays negligible beside any delta for eps up to 600.
`discretisation_slack` returns h: 1.2e-16 / sigma^2 per draw, 2e-11 for T = 10^4, K = 16, sigma = 1.
The plan evaluates its accountant at e^-h delta and adds 2 h to the epsilon that it reports. A noise
multiplier below 2^-10 (integer scale 2^20) is refused, which keeps h small in every accepted plan.

For Laplace noise the discrete law has exactly the pure epsilon of the continuous one, and its
(eps, delta) curve interpolates the continuous curve between integers. The curve of a continuous
shift longer by 1/(4 b) grid units lies above that interpolation, so the accounting shrinks b by a
relative 1e-12, many times what is needed. K coordinates with total L1 shift S are dominated by one
coordinate shifted by S (lemma and proof in `accounting.py`; a test checks it).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np

from hf_dpzero.noise import NoiseSource

if TYPE_CHECKING:
    from torch import Tensor

Relation = Literal["add_or_remove_one", "replace_one", "replace_special"]
RELATIONS: tuple[Relation, ...] = ("add_or_remove_one", "replace_one", "replace_special")

GRID_BITS = 30
GRID_RADIUS = 2**GRID_BITS
"""C in units of the grid: one example moves the integer total by at most this norm."""

MIN_NOISE_MULTIPLIER = 2.0**-10
MAX_NOISE_MULTIPLIER = 2.0**25
MAX_CLIP = 2.0**64

M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class ScalarMechanism:
    """DPZero's scalar mechanism for K directions (Algorithm 2, line 3, K = 1 in the paper).

    Guarantee: one example moves `clip_sum` by at most `sensitivity(relation)` in L2 norm (L1 for
    `distribution="laplace"`), whatever its finite differences are, NaN and infinity included.

    Attributes:
      clip: C, in loss units per unit of smoothing; bounds the norm of one example's K-vector.
      noise_multiplier: sigma. Gaussian: the noise on the sum has standard deviation sigma * C in
        each coordinate. Laplace: its scale parameter b is sigma * C (deviation sqrt(2) b).
        0 releases without noise and is not private.
      expected_batch_size: B, public; the divisor of every release, whatever was sampled.
      num_directions: K.
      distribution: "gaussian", or "laplace" for a pure epsilon.
    """

    clip: float
    noise_multiplier: float
    expected_batch_size: float
    num_directions: int = 1
    distribution: Literal["gaussian", "laplace"] = "gaussian"

    name: ClassVar[str] = "dpzero"
    replayable: ClassVar[bool] = True
    caveats: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _as_floats(self, "clip", "noise_multiplier", "expected_batch_size")
        _check_clip(self.clip)
        _check_noise_multiplier(self.noise_multiplier)
        _check_batch(self.expected_batch_size)
        _check_directions(self.num_directions)
        if self.distribution not in ("gaussian", "laplace"):
            raise ValueError(
                f"distribution={self.distribution!r} is unknown; use 'gaussian' or 'laplace'."
            )

    @property
    def private(self) -> bool:
        """True if noise is added at all."""
        return self.noise_multiplier > 0

    @property
    def granularity(self) -> float:
        """The grid spacing gamma = C * 2^-30, exact in binary."""
        return math.ldexp(self.clip, -GRID_BITS)

    @property
    def noise_scale(self) -> float:
        """Noise scale on the sum, sigma * C, in the units of `clip`."""
        return self.noise_multiplier * self.clip

    def sensitivity(self, relation: Relation) -> float:
        """Largest move of the sum over neighbouring data sets: C, or 2C for `replace_one`.

        >>> m = ScalarMechanism(clip=3.0, noise_multiplier=1.0, expected_batch_size=8)
        >>> m.sensitivity("add_or_remove_one"), m.sensitivity("replace_one")
        (3.0, 6.0)
        """
        return self.clip * sensitivity_factor(relation)

    def clip_sum(self, x: Tensor) -> list[int]:
        """Clips each row to norm C, truncates it to the grid and sums, exactly.

        Guarantee: every row contributes an integer vector of norm at most 2^30, checked in
        integer arithmetic, so floating-point error cannot exceed the bound. Partial sums from
        several processes add up to the total without rounding.

        Args:
          x: [B, K] finite differences, any dtype and device. B = 0 gives zeros. A row that holds
            NaN or infinity counts as zero.

        Returns:
          K integers, in units of `granularity`.

        >>> import torch
        >>> m = ScalarMechanism(clip=4.0, noise_multiplier=1.0, expected_batch_size=2)
        >>> [n * m.granularity for n in m.clip_sum(torch.tensor([[3.0], [-9.0]]))]
        [-1.0]
        """
        rows = _rows(x, self.num_directions)
        order = 2 if self.distribution == "gaussian" else 1
        return [int(n) for n in _on_grid(rows, self.clip, order).sum(axis=0)]

    def release(self, total: Sequence[int], step: int, noise: NoiseSource) -> tuple[float, ...]:
        """Adds one draw of noise to the integer total and divides by the public batch size.

        Args:
          total: K integers, summed over all processes and microbatches of the step.
          step: passed to the noise source; only insecure sources use it.
          noise: where the noise comes from.

        Returns:
          K floats that float32 represents exactly: the only private quantity that may leave.
        """
        if len(total) != self.num_directions:
            raise ValueError(
                f"total has {len(total)} entries for num_directions={self.num_directions}; "
                "pass the summed result of clip_sum."
            )
        noised = [int(n) + z for n, z in zip(total, self._draw(step, noise), strict=True)]
        return _float32(n * self.granularity / self.expected_batch_size for n in noised)

    def _draw(self, step: int, noise: NoiseSource) -> list[int]:
        if not self.private:
            return [0] * self.num_directions
        scale = math.ldexp(self.noise_multiplier, GRID_BITS)
        draw = noise.gaussian if self.distribution == "gaussian" else noise.laplace
        return draw(scale, self.num_directions, step)

    def to_dict(self) -> dict[str, Any]:
        """Fields and name, JSON-safe; `mechanism_from_dict` reads it back."""
        return _to_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScalarMechanism:
        """Inverse of `to_dict`; unknown keys are errors."""
        return _from_dict(cls, values)


@dataclass(frozen=True, kw_only=True)
class NonPrivateMean:
    """Plain MeZO (Malladi et al. 2023): the mean finite difference. No clip, no noise, no privacy.

    A row that holds NaN or infinity counts as zero, as in the private mechanisms.
    """

    expected_batch_size: float
    num_directions: int = 1

    name: ClassVar[str] = "mezo"
    private: ClassVar[bool] = False
    replayable: ClassVar[bool] = True
    clip: ClassVar[float] = math.inf
    noise_multiplier: ClassVar[float] = 0.0
    distribution: ClassVar[str] = "none"
    caveats: ClassVar[tuple[str, ...]] = ("method mezo is not private",)

    def __post_init__(self) -> None:
        _as_floats(self, "expected_batch_size")
        _check_batch(self.expected_batch_size)
        _check_directions(self.num_directions)

    @property
    def granularity(self) -> float:
        """1.0: totals are floats in the units of the finite differences."""
        return 1.0

    @property
    def noise_scale(self) -> float:
        """0.0: nothing is added."""
        return 0.0

    def sensitivity(self, relation: Relation) -> float:
        """Infinite: nothing bounds what one example does."""
        return math.inf * sensitivity_factor(relation)

    def clip_sum(self, x: Tensor) -> list[float]:
        """Column sums of x [B, K] in float64, correctly rounded; B = 0 gives zeros.

        >>> import torch
        >>> NonPrivateMean(expected_batch_size=2).clip_sum(torch.tensor([[3.0], [-9.0]]))
        [-6.0]
        """
        rows = _rows(x, self.num_directions)
        return [math.fsum(column) for column in rows.T.tolist()]

    def release(self, total: Sequence[float], step: int, noise: NoiseSource) -> tuple[float, ...]:
        """The total over `expected_batch_size`, rounded once to float32; `noise` is not used."""
        if len(total) != self.num_directions:
            raise ValueError(
                f"total has {len(total)} entries for num_directions={self.num_directions}; "
                "pass the summed result of clip_sum."
            )
        return _float32(float(t) / self.expected_batch_size for t in total)

    def to_dict(self) -> dict[str, Any]:
        """Fields and name, JSON-safe; `mechanism_from_dict` reads it back."""
        return _to_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NonPrivateMean:
        """Inverse of `to_dict`; unknown keys are errors."""
        return _from_dict(cls, values)


@dataclass(frozen=True, kw_only=True)
class VectorMechanism:
    """DPGD-0th (DPZero paper, Algorithm 1): the clipped d-vector with d-dimensional noise.

    An example's vector is s_i u with one scalar s_i and the shared direction u, so clipping the
    vector to norm C is clipping |s_i| at C / ||u||; per-example d-vectors never exist. Two data
    sets differ by a vector along u of norm at most `sensitivity`, and each coordinate of the sum
    receives independent Gaussian noise of standard deviation sigma * C: one Gaussian event.

    The noise is d-dimensional, is not logged, and so the run cannot be replayed from its releases.
    """

    clip: float
    noise_multiplier: float
    expected_batch_size: float

    name: ClassVar[str] = "dpgd-0th"
    replayable: ClassVar[bool] = False
    num_directions: ClassVar[int] = 1
    distribution: ClassVar[str] = "gaussian"
    caveats: ClassVar[tuple[str, ...]] = (
        "dpgd-0th adds floating-point Gaussian noise, which the accounting treats as real-valued; "
        "attacks on floating-point noise (Mironov 2012) are not excluded",
    )

    def __post_init__(self) -> None:
        _as_floats(self, "clip", "noise_multiplier", "expected_batch_size")
        _check_clip(self.clip)
        _check_noise_multiplier(self.noise_multiplier)
        _check_batch(self.expected_batch_size)

    @property
    def private(self) -> bool:
        """True if noise is added at all."""
        return self.noise_multiplier > 0

    @property
    def granularity(self) -> float:
        """2^-30 of the largest power of two <= C; see `clip_sum` for the grid in use."""
        return math.ldexp(1.0, math.frexp(self.clip)[1] - 1 - GRID_BITS)

    @property
    def noise_scale(self) -> float:
        """Standard deviation per coordinate of the noise on the sum, sigma * C."""
        return self.noise_multiplier * self.clip

    def sensitivity(self, relation: Relation) -> float:
        """Largest L2 move of the d-dimensional sum: C, or 2C for `replace_one`."""
        return self.clip * sensitivity_factor(relation)

    def clip_sum(self, x: Tensor, direction_norm: float) -> float:
        """Sum over examples of s_i clipped to |s_i| <= C / ||u||; multiply by u for the vector.

        Each term is truncated toward zero to a multiple of a power of two, about 2^-30 of the
        bound, so float64 adds the terms, and the partial sums of several processes, exactly.

        Args:
          x: [B, 1] finite differences s_i. B = 0 gives 0.0; NaN and infinity count as zero.
          direction_norm: ||u|| > 0, e.g. sqrt(d) for Rademacher and sphere directions. Pass an
            upper bound where it is not exact.

        Returns:
          The sum, in loss units per unit of smoothing.

        >>> import torch
        >>> m = VectorMechanism(clip=4.0, noise_multiplier=1.0, expected_batch_size=2)
        >>> m.clip_sum(torch.tensor([[1.0], [-9.0]]), direction_norm=2.0)
        -1.0
        """
        if not (math.isfinite(direction_norm) and direction_norm > 0):
            raise ValueError(f"direction_norm={direction_norm} must be finite and positive.")
        bound = self.clip / direction_norm
        grid = math.ldexp(1.0, math.frexp(bound)[1] - 1 - GRID_BITS)
        s = np.clip(_rows(x, 1)[:, 0], -bound, bound)
        return float(int(np.trunc(s / grid).astype(np.int64).sum()) * grid)

    def noise_part(self, noise: NoiseSource, size: int, step: int, part: int) -> np.ndarray:
        """Noise for `size` coordinates of the MEAN: float32, deviation sigma * C / B.

        Args:
          noise: the source.
          size: number of coordinates in this chunk.
          step, part: the step and the chunk's index; only insecure sources use them.
        """
        if not self.private:
            return np.zeros(size, dtype=np.float32)
        return noise.dense_gaussian(self.noise_scale / self.expected_batch_size, size, step, part)

    def to_dict(self) -> dict[str, Any]:
        """Fields and name, JSON-safe; `mechanism_from_dict` reads it back."""
        return _to_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VectorMechanism:
        """Inverse of `to_dict`; unknown keys are errors."""
        return _from_dict(cls, values)


Mechanism = ScalarMechanism | NonPrivateMean | VectorMechanism

MECHANISMS: dict[str, type[ScalarMechanism] | type[NonPrivateMean] | type[VectorMechanism]] = {
    ScalarMechanism.name: ScalarMechanism,
    NonPrivateMean.name: NonPrivateMean,
    VectorMechanism.name: VectorMechanism,
}
"""Every mechanism by name. A new one is a dataclass, a row here and a row in the contract tests."""


def mechanism_from_dict(values: Mapping[str, Any]) -> Mechanism:
    """The mechanism that `to_dict` described; `values["name"]` picks the class.

    >>> mechanism_from_dict({"name": "mezo", "expected_batch_size": 4.0}).private
    False
    """
    name = values.get("name")
    if name not in MECHANISMS:
        raise ValueError(f"mechanism name {name!r} is unknown; use one of {sorted(MECHANISMS)}.")
    return MECHANISMS[name].from_dict(values)


def sensitivity_factor(relation: Relation) -> int:
    """Sensitivity over C: 1 when one clipped row appears or vanishes, 2 when one is exchanged."""
    if relation not in RELATIONS:
        raise ValueError(f"relation={relation!r} is unknown; use one of {RELATIONS}.")
    return 2 if relation == "replace_one" else 1


def discretisation_slack(noise_multiplier: float, draws: int) -> float:
    """h: the log-likelihood distance between a run with discrete and one with rounded noise.

    (eps, delta) of the continuous Gaussian becomes (eps + 2h, e^h delta); see the proof in this
    module's docstring, steps 1 to 3, with t = 40.

    Args:
      noise_multiplier: sigma > 0; the integer scale is sigma * 2^30.
      draws: number of coordinates that receive noise in the whole run, T * K.

    >>> discretisation_slack(1.0, 10_000 * 16) < 1e-10
    True
    """
    scale = math.ldexp(noise_multiplier, GRID_BITS)
    return draws * (40.0**2 + 2.0) / (12.0 * scale**2)


def _rows(x: Tensor, num_directions: int) -> np.ndarray:
    """x as a float64 array [B, K] in which rows that hold NaN or infinity are zero."""
    if x.ndim != 2 or x.shape[1] != num_directions:
        raise ValueError(
            f"finite differences of shape {tuple(x.shape)} given; expected [B, {num_directions}], "
            "one row per example and one column per direction."
        )
    rows = x.detach().cpu().double().numpy()
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    return np.where(finite, rows, 0.0)


def _on_grid(rows: np.ndarray, clip: float, order: int) -> np.ndarray:
    """Integer rows v with ||v||_order <= 2^30 exactly: rows * min(1, C/||row||) / gamma, truncated.

    The floating-point scaling is wrong by a few units in the last place, a relative 1e-15 K or
    less, so a row whose norm is at the bound may land just above it. The integers of such a row
    are pulled one unit toward zero until the exact integer check holds: the bound is verified, not
    estimated. No int64 overflow: before the check the norm is at most 2^30 (1 + 1e-12), so the sum
    of squares is below 2^61.

    Dividing by the largest entry first keeps 1e300 and 1e-300 from overflowing or vanishing.
    """
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    unit = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)
    norm = np.linalg.norm(unit, ord=order, axis=1, keepdims=True)
    inside = largest <= np.divide(clip, norm, out=np.full_like(norm, np.inf), where=norm > 0)
    direction = np.divide(unit, norm, out=np.zeros_like(unit), where=norm > 0)
    kept = np.divide(rows, clip, out=np.zeros_like(rows), where=inside)
    integers = np.trunc(np.where(inside, kept, direction) * GRID_RADIUS).astype(np.int64)
    while (over := _exceeds(integers, order)).any():
        integers[over] -= np.sign(integers[over])
    return integers


def _exceeds(integers: np.ndarray, order: int) -> np.ndarray:
    """Which integer rows have norm above 2^30, decided in integer arithmetic."""
    if order == 1:
        return np.abs(integers).sum(axis=1) > GRID_RADIUS
    return (integers * integers).sum(axis=1) > GRID_RADIUS**2


def _float32(values: Any) -> tuple[float, ...]:
    return tuple(float(np.float32(v)) for v in values)


def _to_dict(mechanism: Any) -> dict[str, Any]:
    return {"name": mechanism.name, **dataclasses.asdict(mechanism)}


def _from_dict(cls: type[M], values: Mapping[str, Any]) -> M:
    given = {k: v for k, v in values.items() if k != "name"}
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{cls.__name__} has no fields {unknown}; it has {sorted(known)}.")
    return cls(**given)


def _as_floats(mechanism: Any, *fields: str) -> None:
    """Stores 64 as 64.0, so that equal mechanisms have equal JSON and equal digests."""
    for field in fields:
        object.__setattr__(mechanism, field, float(getattr(mechanism, field)))


def _check_clip(clip: float) -> None:
    if not (1 / MAX_CLIP <= clip <= MAX_CLIP):
        raise ValueError(
            f"clip={clip} must be finite and positive (between 2^-64 and 2^64); "
            "use method mezo (NonPrivateMean) to train without clipping."
        )


def _check_noise_multiplier(sigma: float) -> None:
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"noise_multiplier={sigma} must be finite and >= 0.")
    if sigma > 0 and not MIN_NOISE_MULTIPLIER <= sigma <= MAX_NOISE_MULTIPLIER:
        raise ValueError(
            f"noise_multiplier={sigma} is outside [2^-10, 2^25], where the discrete noise on the "
            "grid is accounted as Gaussian; use 0 for no noise, or a larger (smaller) multiplier."
        )


def _check_batch(expected_batch_size: float) -> None:
    if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
        raise ValueError(
            f"expected_batch_size={expected_batch_size} must be finite and positive; "
            "it is the public divisor of every release."
        )


def _check_directions(num_directions: int) -> None:
    if isinstance(num_directions, bool) or not isinstance(num_directions, int):
        raise ValueError(f"num_directions={num_directions!r} must be an integer.")
    if num_directions < 1:
        raise ValueError(f"num_directions={num_directions} must be at least 1.")
