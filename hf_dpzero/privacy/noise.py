"""Secret noise: where the randomness that pays for privacy comes from.

Two sources share one interface, `NoiseSource`. `SecureNoise` draws exact samples from
operating-system entropy and is what training uses. `InsecureSeededNoise` is reproducible and exists
for tests; a report made with it says NOT PRIVATE.

Exact means: a draw is an integer, produced from random bits by rejection with rational
arithmetic, so the output follows the stated distribution without floating-point error. Floating-point
Gaussian noise has gaps in its range that reveal the noised value (Mironov 2012, "On significance
of the least significant bits for differential privacy").
"""

from __future__ import annotations

import math
import os
import secrets
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

Distribution = Literal["gaussian", "laplace"]

MAX_SCALE = 2.0**55
"""Largest integer scale. OpenDP clamps draws to 64-bit integers: at 2^55 that is 256 deviations."""


class NoiseSource(ABC):
    """What a mechanism asks for. All draws are independent of each other and of every key.

    Attributes:
      name: identifier for the privacy report, e.g. `os_entropy_exact`.
      secure: False if anybody who knows a seed can subtract the noise.
      correlated: whether the noise of a step depends on that of others; discrete noise never does.
      base_deviation: of independent draws behind `normals`, where these are sums of several
        (`correlated`): what they are multiplied by, in noise scales of a mechanism.
    """

    name: ClassVar[str]
    secure: ClassVar[bool]
    base_deviation: float = 1.0
    correlated: ClassVar[bool] = False

    @property
    def stated_name(self) -> str:
        """Returns `name` as ledgers give it: one of no secure source says so (`is_seeded`)."""
        return self.name if self.secure or is_seeded(self.name) else f"insecure_{self.name}"

    def gaussian(self, scale: float, size: int, step: int) -> list[int]:
        """Draws discrete Gaussians: P(z) proportional to exp(-z^2 / (2 scale^2)) on the integers.

        Args:
          scale: sigma in integer units, 0 < scale <= 2^55; standard deviation to within 1e-7
            relative once scale >= 2.
          size: number of independent draws; 0 gives [].
          step: matters to insecure sources only.

        >>> len(SecureNoise().gaussian(2.0**30, size=3, step=0))
        3
        """
        _check(scale, size)
        return self._integers("gaussian", float(scale), size, step)

    def laplace(self, scale: float, size: int, step: int) -> list[int]:
        """Draws discrete Laplace numbers: P(z) proportional to exp(-|z| / scale) on the integers.

        Args:
          scale: b in integer units, 0 < b <= 2^55; the standard deviation is about sqrt(2) b.
          size: number of independent draws; 0 gives [].
          step: matters to insecure sources only.
        """
        _check(scale, size)
        return self._integers("laplace", float(scale), size, step)

    def vertices(self, scores: np.ndarray, size: int, step: int, part: int) -> np.ndarray:
        """Draws indices j with P(j) proportional to exp(scores_j): draws of the exponential mechanism.

        Args:
          scores: finite float64 [d], d >= 1; adding a constant to all changes nothing.
          size: number of independent draws; 0 gives [].
          step: matters to insecure sources only.
          part: tells apart the calls of a step; matters to insecure sources only.

        Returns:
          int64 [size], in 0 .. d - 1.

        Raises:
          ValueError: no scores, or one that is not finite.
        """
        scores = np.asarray(scores, dtype=np.float64)
        if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
            raise ValueError(
                f"scores of shape {scores.shape} must be a vector of at least one finite number; bound "
                "what is added to them."
            )
        if size < 0:
            raise ValueError(f"size={size} is negative; ask for 0 or more draws.")
        if len(scores) == 1 or size == 0:
            return np.zeros(size, dtype=np.int64)
        return self._vertices(scores, size, step, part)

    def uniform(self, below: int, size: int, step: int) -> np.ndarray:
        """Draws uniform integers in 0 .. below - 1, int64 [size]; `step` is for insecure sources."""
        raise ValueError(f"the noise source {self.name!r} draws no integers: use SecureNoise.")

    def _vertices(self, scores: np.ndarray, size: int, step: int, part: int) -> np.ndarray:
        # sources of noise alone have none
        raise ValueError(f"the noise source {self.name!r} draws no vertices: use SecureNoise.")

    def laplaces(self, size: int, step: int, part: int) -> np.ndarray:
        """Draws standard Laplace numbers, of density exp(-|x|) / 2, float64 [size].

        Never the same ones twice, each within 2^-51 + |x| 2^-50 of an exact one. The arguments are those
        of `normals`.
        """
        raise ValueError(f"the noise source {self.name!r} has no such draws: use SecureNoise.")

    def dither(self, size: int, step: int, part: int) -> np.ndarray | None:
        """Draws what hides how sums of earlier draws were rounded; None where there are no sums.

        It is for `discretization.noised_on_grid`. The arguments are those of `normals`.
        """
        return None

    @abstractmethod
    def normals(self, size: int, step: int, part: int) -> np.ndarray:
        """Draws standard normal numbers, float64 [size], each within 2^-46 of an exact one.

        Not to be added to private numbers as they are: `discretization.noised_on_grid` hides what
        floating-point numbers reveal.

        Args:
          size: number of independent draws.
          step: matters to insecure sources only.
          part: of a long vector; matters to insecure sources only.
        """

    def _integers(
        self, distribution: Distribution, scale: float, size: int, step: int
    ) -> list[int]:
        # Draws that can be made again are summed over steps, and sums of many are no integers.
        raise ValueError(f"the noise source {self.name!r} draws no integers: use SecureNoise.")


@dataclass(frozen=True)
class SecureNoise(NoiseSource):
    """Noise from operating-system entropy; no state, nothing stored, nothing to replay.

    Integer draws come from OpenDP, which implements the exact samplers of Canonne, Kamath and
    Steinke 2020 ("The discrete Gaussian for differential privacy", Algorithms 2 and 3) on the
    bits of OpenSSL's generator. That generator is keyed, and re-keyed after a fork, by the
    operating system. `step` is ignored: two calls never return the same noise.

    Normal draws are quantiles of uniform numbers made of the operating system's cryptographic bits.
    Coordinates whose signal is zero publish their noise as it is, so the bits must be unpredictable
    from each other.
    """

    name: ClassVar[str] = "os_entropy_exact"
    secure: ClassVar[bool] = True

    def _integers(
        self, distribution: Distribution, scale: float, size: int, step: int
    ) -> list[int]:
        return list(_measurement(distribution, scale)([0] * size)) if size else []

    def uniform(self, below: int, size: int, step: int) -> np.ndarray:
        return np.array([secrets.randbelow(below) for _ in range(size)], dtype=np.int64)

    def _vertices(self, scores: np.ndarray, size: int, step: int, part: int) -> np.ndarray:
        # Noisy maximum with exact Gumbel noise: OpenDP compares as many bits as a draw needs.
        measurement, values = _noisy_max(), scores.tolist()
        return np.array([measurement(values) for _ in range(size)], dtype=np.int64)

    def normals(self, size: int, step: int, part: int) -> np.ndarray:
        return normal_quantiles(_random_words(size), _random_words)

    def laplaces(self, size: int, step: int, part: int) -> np.ndarray:
        # of the bits of OpenSSL's generator, in a tenth of the time
        return laplace_quantiles(_openssl_words(size), _openssl_words)


def is_seeded(source: str) -> bool:
    """Says whether a noise source of that name protects nothing, as a ledger or report names it.

    >>> is_seeded(InsecureSeededNoise.name), is_seeded("os_entropy_exact")
    (True, False)
    """
    return source.lower().startswith("insecure")


@dataclass(frozen=True)
class InsecureSeededNoise(NoiseSource):
    """Reproducible noise for tests: deterministic in (seed, step, part). It protects nothing.

    Integer draws are rounded floating-point samples; they follow the discrete distributions closely
    enough for statistical tests once `scale` is large.

    >>> a = InsecureSeededNoise(7).gaussian(100.0, size=2, step=3)
    >>> a == InsecureSeededNoise(7).gaussian(100.0, size=2, step=3)
    True
    """

    seed: int = 0

    name: ClassVar[str] = "INSECURE_SEEDED_NOT_PRIVATE"
    secure: ClassVar[bool] = False

    def _integers(
        self, distribution: Distribution, scale: float, size: int, step: int
    ) -> list[int]:
        generator = self._generator(0 if distribution == "gaussian" else 1, step)
        draw = generator.standard_normal if distribution == "gaussian" else generator.laplace
        return [round(scale * z) for z in draw(size=size).tolist()]

    def uniform(self, below: int, size: int, step: int) -> np.ndarray:
        return self._generator(4, step).integers(below, size=size)

    def _vertices(self, scores: np.ndarray, size: int, step: int, part: int) -> np.ndarray:
        cumulative = np.cumsum(np.exp(scores - scores.max()))
        uniform = self._generator(3, step, part).random(size) * cumulative[-1]
        return np.minimum(np.searchsorted(cumulative, uniform, side="right"), len(scores) - 1)

    def normals(self, size: int, step: int, part: int) -> np.ndarray:
        return self._generator(2, step, part).standard_normal(size)

    def laplaces(self, size: int, step: int, part: int) -> np.ndarray:
        return self._generator(5, step, part).laplace(size=size)

    def _generator(self, domain: int, step: int, part: int = 0) -> np.random.Generator:
        entropy = np.random.SeedSequence([self.seed, domain, step, part])
        return np.random.Generator(np.random.Philox(entropy))


def normal_quantiles(words: np.ndarray, more: Callable[[int], np.ndarray]) -> np.ndarray:
    """Makes standard normal numbers of uniform bits: a random sign, and a quantile in (0, 1/2).

    Args:
      words: one a number, uint64 [n].
      more: count -> further independent words, for numbers so far out that they need more bits.

    Returns:
      float64 [n], each within 2^-46 of an exactly normal one.
    """
    from scipy.special import ndtri

    uniform = ((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64
    rare = np.flatnonzero(uniform < 2.0**-12)  # needs more bits for a relative 2^-52
    high, low = more(2 * len(rare)).reshape(2, -1).astype(np.float64)
    fraction = (high + low * 2.0**-64) * 2.0**-64
    uniform[rare] = ((words[rare] >> np.uint64(1)).astype(np.float64) + fraction) * 2.0**-64
    # 0 would be an infinite number; below 2^-192 lies 2^-191 of the law, far beyond 16 deviations
    quantile = ndtri(np.maximum(uniform, 2.0**-192))
    return np.where(words & np.uint64(1), -quantile, quantile)


def laplace_quantiles(words: np.ndarray, more: Callable[[int], np.ndarray]) -> np.ndarray:
    """Makes standard Laplace numbers of uniform bits: the logarithm of a uniform number, with its sign.

    Args:
      words: one a number, uint64 [n].
      more: count -> further independent words, for numbers so far out that they need more bits.

    Returns:
      float64 [n], each within 2^-51 + |x| 2^-50 of an exact one.
    """
    signed = words.view(np.int64).astype(np.float64)  # the last bits of large ones are below 2^-52
    signed *= 2.0**-63
    uniform = np.abs(signed)
    rare = np.flatnonzero(uniform < 2.0**-11)
    low = words[rare].view(np.int64)
    whole = np.where(low < 0, -(low + 1), low).astype(np.float64)
    high, deep = more(2 * len(rare)).reshape(2, -1).astype(np.float64)
    uniform[rare] = (whole + (high + deep * 2.0**-64) * 2.0**-64) * 2.0**-63
    np.log(np.clip(uniform, 2.0**-190, 1.0, out=uniform), out=uniform)
    return np.copysign(uniform, signed, out=uniform)


def _random_words(size: int) -> np.ndarray:
    return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)


def _openssl_words(size: int) -> np.ndarray:
    return np.frombuffer(ssl.RAND_bytes(8 * size), dtype=np.uint64)


def _check(scale: float, size: int) -> None:
    if not (math.isfinite(scale) and 0.0 < scale <= MAX_SCALE):
        raise ValueError(
            f"noise scale {scale} is outside (0, 2^55] integer units; "
            "choose a noise_multiplier between 2^-10 and 2^25."
        )
    if size < 0:
        raise ValueError(f"size={size} is negative; ask for 0 or more draws.")


@lru_cache(maxsize=64)
def _measurement(distribution: Distribution, scale: float) -> Callable[[list[int]], list[int]]:
    # OpenDP's integer vector measurement at `scale`; building one costs about 1 ms.
    import opendp.prelude as dp

    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T="i64"))
    if distribution == "gaussian":
        return dp.m.make_gaussian(domain, dp.l2_distance(T="f64"), scale=scale)
    return dp.m.make_laplace(domain, dp.l1_distance(T="f64"), scale=scale)


@lru_cache(maxsize=1)
def _noisy_max() -> Callable[[list[float]], int]:
    # OpenDP's exponential mechanism (Gumbel noise of scale 1, compared exactly)
    import opendp.prelude as dp

    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T="f64", nan=False))
    distance, measure = dp.linf_distance(T="f64"), dp.zero_concentrated_divergence()
    return dp.m.make_noisy_max(domain, distance, measure, scale=1.0)
