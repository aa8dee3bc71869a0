"""One count of private rows, released with exact discrete noise, and what it says about the truth.

    released = count + Z,    P(Z = z) = (1 - a) / (1 + a) a^|z|,    a = exp(-epsilon / m),

where one unit more, one less or another in its place moves the count by at most m. Guarantee:
(epsilon, 0). At m = 1 no other noise of a pure epsilon is narrower (Ghosh, Roughgarden and Sundararajan
2009, "Universally utility-maximizing privacy mechanisms", STOC). A discrete Gaussian, which needs a
delta, has the wider interval at the same epsilon until delta is far above 1 / n: 0.004 at 0.2.

With m = 1 each row is right or wrong whatever the other rows are. Where a row of a pass may flip another
one's answer, m is 2 (docs/placement.md): here nobody does, because each row has a pass of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hf_dpzero.privacy.noise import MAX_SCALE, NoiseSource

COVERAGE = 0.95
"""Intervals hold what they are about with at least this probability."""


@dataclass(frozen=True)
class PrivateCount:
    """Releases how many rows have a property: a number between 0 and n, plus discrete Laplace noise.

    Attributes:
      epsilon: of one release; several on the same rows add up.
      sensitivity: m, the most by which one unit moves the count: its number of rows.

    Raises:
      ValueError: no such budget.
    """

    epsilon: float
    sensitivity: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0 and self.scale <= MAX_SCALE):
            raise ValueError(
                f"epsilon={self.epsilon} for a count of private rows; give a number above 0 such as 0.5 "
                "(at 1,000 rows, noise with a deviation of 0.3 points)."
            )

    @property
    def scale(self) -> float:
        """m / epsilon, rounded up."""
        return math.nextafter(self.sensitivity / self.epsilon, math.inf)

    def release(self, count: int, noise: NoiseSource, step: int = 0) -> int:
        """Returns the count with noise, any integer; each call is a release of its own.

        Args:
          count: of the rows that have the property; secret.
          noise: where the noise comes from.
          step: matters to insecure sources only.
        """
        return count + noise.laplace(self.scale, 1, step)[0]

    def beyond(self, z: np.ndarray | int) -> np.ndarray:
        """P(Z >= z) of the noise, float64, for integers z."""
        z, rate = np.asarray(z, dtype=np.float64), 1 / self.scale
        upper = np.exp(-rate * np.maximum(z, 1 - z)) / (1 + math.exp(-rate))
        return np.where(z >= 1, upper, 1 - upper)

    def noise_interval(self) -> tuple[int, int]:
        """The smallest interval of integers in which the noise lies with probability `COVERAGE`.

        P(-k <= Z <= k) = 1 - 2 a^(k+1) / (1 + a), and P(-k <= Z < k) = 1 - a^k: the shorter of the two.
        """
        k = max(0, math.floor(-self.scale * math.log(1 - COVERAGE)) - 2)
        while True:
            for low, high in ((-k, k - 1), (-k, k)):
                if low <= high and self.beyond(low) - self.beyond(high + 1) >= COVERAGE:
                    return low, high
            k += 1

    def count_interval(self, released: int, rows: int) -> tuple[int, int]:
        """Counts within 0 .. rows that hold the true one with probability `COVERAGE`, over the noise."""
        low, high = self.noise_interval()
        least, most = np.clip((released - high, released - low), 0, rows).tolist()
        return least, most

    def share_interval(self, released: int, rows: int) -> tuple[float, float]:
        """An interval for the share in the population of which the rows are independent draws.

        Clopper and Pearson's, of the exact law of binomial count plus noise: shares p at which neither a
        release so large nor one so small has a probability of (1 - `COVERAGE`) / 2 or less.
        """
        return self._least(released, rows), 1 - self._least(rows - released, rows)

    def _least(self, released: int, rows: int) -> float:
        from scipy.optimize import brentq
        from scipy.stats import binom

        # Beyond it lies less than 4 exp(-50), by Hoeffding's inequality.
        spread = 5 * math.sqrt(rows)

        def excess(share: float) -> float:
            low, high = math.floor(rows * share - spread), math.ceil(rows * share + spread)
            counts = np.arange(max(0, low), min(rows, high) + 1)
            tail = binom.pmf(counts, rows, share) @ self.beyond(released - counts)
            return float(tail) - (1 - COVERAGE) / 2

        if excess(0.0) > 0 or excess(1.0) <= 0:  # beyond what any share explains
            return float(excess(0.0) <= 0)
        return max(0.0, brentq(excess, 0.0, 1.0, xtol=1e-9) - 1e-8)
