"""The secret number of trials of private selection: its distribution, and a draw from it.

Papernot and Steinke 2022, "Hyperparameter tuning with Renyi differential privacy", arXiv:2110.03620,
Definition 1. Computed with 60 decimal digits.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

TRIAL_SHAPES = {"geometric": 1.0, "poisson": math.inf, "logarithmic": 0.0}
"""Names of distributions of the number of trials -> `TrialCount.shape`."""

MAX_MEAN = 10_000.0
_BITS = 160  # of the uniform number behind a draw, which is met to 2^-150 in total variation
_CONTEXT = Context(prec=60)


@dataclass(frozen=True, kw_only=True)
class TrialCount:
    """The distribution of the secret number of trials K (Papernot and Steinke 2022, Definition 1).

    Attributes:
      mean: E K, in 1..10^4. The distribution is public; the draw is not.
      shape: eta. 1 is the geometric distribution, 0 the logarithmic, others above 0 the truncated
        negative binomial, all on {1, 2, ...}; infinity is the Poisson distribution, on {0, 1, ...}.
        A smaller shape costs less privacy and has a heavier tail.

    Raises:
      ValueError: mean or shape out of range.

    >>> trials = TrialCount(mean=4.0, shape=1.0)
    >>> [trials.probability(k) for k in (0, 1, 2)]
    [0.0, 0.25, 0.1875]
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MAX_MEAN:
            raise ValueError(
                f"mean_trials={self.mean} must lie in 1..{MAX_MEAN:g}; the theorems need at least 1."
            )
        if math.isnan(self.shape) or self.shape < 0:
            raise ValueError(
                f"shape={self.shape} must be at least 0; infinity is the Poisson distribution."
            )
        if 100 < self.shape < math.inf:
            raise ValueError(f"shape={self.shape} is above 100; use 'poisson', the limit.")

    @property
    def name(self) -> str:
        """The name of the distribution.

        >>> TrialCount(mean=3, shape=0.5).name
        'truncated negative binomial (shape 0.5)'
        """
        known = {shape: name for name, shape in TRIAL_SHAPES.items()}
        return known.get(self.shape, f"truncated negative binomial (shape {self.shape:g})")

    @property
    def gamma(self) -> Decimal:
        """The parameter of TNB(eta, gamma) whose mean is at most `mean`; 1 for the Poisson distribution.

        The rounding is on the safe side: a larger gamma has a smaller mean and costs less.
        """
        return Decimal(1) if math.isinf(self.shape) else _gamma(self.mean, self.shape)

    @property
    def most(self) -> int:
        """A number that K exceeds with probability below 1e-48: 128 / gamma, or for Poisson 128 E K."""
        return math.ceil(128 * (self.mean if math.isinf(self.shape) else 1 / float(self.gamma)))

    def probability(self, count: int) -> float:
        """P[K = count]."""
        number, value = next(p for p in self._probabilities() if p[0] >= count)
        return float(value) if number == count else 0.0

    def draw(self) -> int:
        """K, drawn by inversion from operating-system entropy. Secret: tell nobody."""
        with localcontext(_CONTEXT):
            left = Decimal(secrets.randbits(_BITS)) / Decimal(2**_BITS)
            for number, value in self._probabilities():
                left -= value
                if left < 0 or (number > self.mean and value < Decimal("1e-48")):
                    return number
        raise AssertionError("the probabilities never sum to one")

    def _probabilities(self) -> Iterator[tuple[int, Decimal]]:
        """Yields (k, P[K = k]) from the smallest k upwards, without end, as decimals."""
        with localcontext(_CONTEXT):
            poisson = math.isinf(self.shape)
            eta, mean, gamma = Decimal(self.shape), Decimal(self.mean), self.gamma
            number, value = (0, (-mean).exp()) if poisson else (1, _tnb_first(gamma, eta))
        while True:
            yield number, value
            with localcontext(_CONTEXT):
                ratio = mean if poisson else (1 - gamma) * (number + eta)
                value = value * ratio / (number + 1)
            number += 1


@functools.lru_cache(maxsize=256)
def _gamma(mean: float, shape: float) -> Decimal:
    """The smallest gamma, to 1e-40, with E K <= mean, by bisection."""
    with localcontext(_CONTEXT):
        low, high = Decimal(0), Decimal(1)
        while high - low > high * Decimal("1e-40"):
            middle = (low + high) / 2
            if _tnb_mean(middle, shape) <= Decimal(mean):
                high = middle
            else:
                low = middle
        return high


def _tnb_mean(gamma: Decimal, shape: float) -> Decimal:
    """E K = eta (1/gamma - 1) / (1 - gamma^eta); (1/gamma - 1) / log(1/gamma) for eta = 0."""
    odds, eta = 1 / gamma - 1, Decimal(shape)
    if gamma == 1:
        return Decimal(1)
    return odds / -gamma.ln() if shape == 0 else eta * odds / (1 - gamma**eta)


def _tnb_first(gamma: Decimal, eta: Decimal) -> Decimal:
    """P[K = 1] = eta (1 - gamma) / (gamma^-eta - 1); (1 - gamma) / log(1/gamma) for eta = 0."""
    if gamma == 1:
        return Decimal(1)
    return (1 - gamma) / -gamma.ln() if eta == 0 else eta * (1 - gamma) / (gamma**-eta - 1)
