r"""Schedules: how noise, clip and smoothing change over a run, fixed before it starts.

A schedule depends on nothing but public numbers, so it costs no privacy beside what its noise spends,
and the accounting composes the steps as they are.

*Noise.* Hong, Wang and Zhou 2022 ("Dynamic privacy budget allocation improves data efficiency of
differentially private gradient descent", FAccT) bound the excess loss after T steps by a sum in which
the noise of step t counts with an influence q_t: sum_t q_t sigma_t^2. Under a full batch the budget
is R = sum_t sigma_t^-2, and the best multipliers are sigma_t^2 = sum_i sqrt(q_i / q_t) / R (their
Lemma 4.4), that is sigma_t ~ q_t^(-1/4). With a sampling probability p well below 1 a step costs
about p^2 (e^(1/sigma^2) - 1) or more, which calls for flatter schedules (`Subsampled`). Which q_t is
right depends on the loss: they assume a smooth one with the Polyak-Lojasiewicz inequality, of
condition number kappa.

A schedule turns one scale s, the run's `noise_multiplier`, into the multipliers of all steps. Where it
only has a shape, s is the multiplier of a constant run with the same sum of sigma_t^-2.

*Influence of a learning rate that decays*: eta_t^2 prod_{i > t} (1 - 2 mu eta_i (1 - M eta_i / 2)), for
small steps proportional to r_t^2 prod_{i > t} (1 - (1 - gamma) r_i) with r_t = eta_t / eta_max.

*Influence on a quadratic* is exact (`quadratic_influence`): f(theta) = (1/2) sum_j h_j theta_j^2 and
theta_(t+1) = theta_t - eta m_(t+1), m the average of the gradients with momentum beta and bias
correction (their Eq. 3).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.described import Described, read
from hf_dpzero.privacy.mechanisms.adaptive import AdaptiveClipping
from hf_dpzero.privacy.mechanisms.base import MechanismBase

Floats = NDArray[np.float64]
M = TypeVar("M", bound=MechanismBase)

MAX_SPAN = 2.0**20
"""A schedule's largest noise multiplier is at most so many times its smallest."""

LEARNING_RATES = ("constant", "constant_with_warmup", "linear", "cosine")
"""Learning-rate schedules whose influence is known here."""


class _Schedule(Described):
    def __str__(self) -> str:
        values = ", ".join(f"{k}={v}" for k, v in self.to_dict().items() if k != "name")
        return f"{self.name}({values})"


@dataclass(frozen=True, kw_only=True)
class NoiseSchedule(_Schedule):
    """Base: the noise multiplier of each step. Immutable, and independent of any data.

    Attributes:
      weighs_clips: whether a scheduled clip changes what is best; not where all levels are given.
    """

    weighs_clips: ClassVar[bool] = True

    def log_influence(self, steps: int) -> np.ndarray:
        """Returns log q_t of the steps 0..T-1, up to a constant, float64 [T]."""
        raise NotImplementedError

    def multipliers(self, scale: float, log_influence: np.ndarray) -> np.ndarray:
        """Returns sigma_t of all steps.

        Args:
          scale: s > 0, the run's noise multiplier.
          log_influence: [T], of this schedule, perhaps weighed with the clip of each step.

        Returns:
          float64 [T]; rising with s in every step.
        """
        return scale * shape(log_influence)


def shape(log_influence: np.ndarray) -> np.ndarray:
    """Returns q_t^(-1/4), such that the mean of shape^-2 is 1 (Lemma 4.4), float64 [T].

    >>> shape(np.log([1.0, 16.0])).round(4)
    array([1.5811, 0.7906])
    """
    from scipy.special import logsumexp

    half = log_influence / 2
    with np.errstate(over="ignore"):  # `check_span` refuses infinity
        return np.asarray(np.exp((logsumexp(half) - math.log(len(half)) - half) / 2))


def _rate(name: str, value: float, low: float = 0.0) -> float:
    if not (isinstance(value, int | float) and low < value <= 1):
        raise ValueError(f"{name}={value} must be in ({low:g}, 1]; 1 is a constant schedule.")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class Exponential(NoiseSchedule):
    """q_t = gamma^(T-t): the noise falls by gamma^(1/4) a step (their Theorem 4.5 and *exp*).

    Attributes:
      gamma: in (0, 1]; 1 - 1/kappa for gradient descent with the rate 1/M.
    """

    gamma: float

    name: ClassVar[str] = "exp"

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", _rate("gamma", self.gamma))

    def log_influence(self, steps: int) -> np.ndarray:
        return math.log(self.gamma) * np.arange(steps - 1, -1, -1.0)


@dataclass(frozen=True, kw_only=True)
class Momentum(NoiseSchedule):
    """Exact influence under momentum with bias correction, on a quadratic: see the module.

    Curvatures lie on a geometric grid from the least, whose loss contracts by gamma a step without
    momentum, to 1 over the learning rate. It takes the place of Theorem 4.8 of the paper, whose proof
    counts a factor once too often and which loses against constant noise (docs/papers/budget.md).

    Attributes:
      gamma: 1 - 1/kappa, in (0, 1).
      beta: of the average, in [0, 1).
    """

    gamma: float
    beta: float = 0.9

    name: ClassVar[str] = "momentum"
    curvatures: ClassVar[int] = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", _rate("gamma", self.gamma))
        if not (0 <= self.beta < 1 and self.gamma < 1):
            raise ValueError(
                f"beta={self.beta}, gamma={self.gamma}: the momentum schedule is for 0 <= beta < 1 and "
                "gamma below 1; use 'learning_rate' otherwise."
            )

    def log_influence(self, steps: int) -> np.ndarray:
        # Where q_t is too small for a float it is the least float's.
        least = -math.expm1(math.log(self.gamma) / 2)
        q = quadratic_influence(np.geomspace(least, 1.0, self.curvatures), 1.0, steps, self.beta)
        return np.asarray(np.log(np.maximum(q, np.finfo(np.float64).tiny)))


@dataclass(frozen=True, kw_only=True)
class LearningRateAware(NoiseSchedule):
    """The influence of a run whose learning rate decays, see the module.

    Attributes:
      gamma: contraction of a step at the largest learning rate, in (0, 1].
      learning_rate: one of `LEARNING_RATES`.
      warmup_steps: of it.
    """

    gamma: float
    learning_rate: str = "constant"
    warmup_steps: int = 0

    name: ClassVar[str] = "learning_rate"

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", _rate("gamma", self.gamma))
        if self.learning_rate not in LEARNING_RATES:
            raise ValueError(
                f"lr_scheduler_type={self.learning_rate!r}: its influence is not known here; use one of "
                f"{', '.join(LEARNING_RATES)}, or give the noise of all steps as a list or file."
            )

    def log_influence(self, steps: int) -> np.ndarray:
        # 2 log r_t + sum_{i > t} log(1 - (1 - gamma) r_i); where r_t = 0, as in the step nearest.
        rates = rate_factors(self.learning_rate, self.warmup_steps, steps)
        rates = np.maximum(rates, rates[rates > 0].min())
        decay = np.log1p(-(1 - self.gamma) * rates * (1 - 1e-12))
        return np.asarray(2 * np.log(rates) + np.cumsum(decay[::-1])[::-1] - decay)


@dataclass(frozen=True, kw_only=True)
class Subsampled(LearningRateAware):
    """The same influence, spent as is best where steps see a small part of the data.

    q_t sigma_t^4 e^(-order/sigma_t^2) is constant, which is best if a step costs e^(order/sigma^2) - 1.
    To second order in the sampling probability that holds with order = 1, for Renyi divergences; but
    delta is spent by rare large losses, in which the third moment of the likelihood ratio, with its
    e^(3/sigma^2), counts. s is the multiplier at the mean of log q_t.

    Attributes:
      order: > 0; larger ones are nearer to constant noise.
    """

    order: float = 3.0

    name: ClassVar[str] = "subsampled"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "order", _levels("order", [self.order])[0])

    def multipliers(self, scale: float, log_influence: np.ndarray) -> np.ndarray:
        # With u = sigma^-2: 2 log u + order u = log q_t + const, by Wright's omega function.
        from scipy.special import wrightomega

        centred = log_influence - log_influence.mean()
        target = centred + self.order * scale**-2.0 - 4 * math.log(scale)
        u = 2 / self.order * wrightomega(target / 2 - math.log(2 / self.order))
        return np.asarray(np.maximum(u, 1e-300) ** -0.5)


@dataclass(frozen=True, kw_only=True)
class Given(NoiseSchedule):
    """Relative noise of each step, as a user gives it; only ratios matter.

    Attributes:
      levels: one number > 0 a step.
    """

    levels: tuple[float, ...]

    name: ClassVar[str] = "given"
    weighs_clips: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", _levels("noise_schedule", self.levels))

    def log_influence(self, steps: int) -> np.ndarray:
        # what these levels are best for
        return -4 * np.log(_all_steps("noise_schedule", self.levels, steps))

    def __str__(self) -> str:
        return f"given ({len(self.levels)} levels)"


NOISE_SCHEDULES: dict[str, type[NoiseSchedule]] = {
    cls.name: cls for cls in (Exponential, Momentum, LearningRateAware, Subsampled, Given)
}


def noise_schedule_from_dict(values: Mapping[str, object]) -> NoiseSchedule:
    """Reads what `to_dict` of a noise schedule described; raises as `described.read` does."""
    return read(NOISE_SCHEDULES, "noise_schedule", values)


@dataclass(frozen=True, kw_only=True)
class Factors(_Schedule):
    """Base: by what a setting is multiplied in each step (clip, smoothing)."""

    def factors(self, steps: int) -> np.ndarray:
        """Returns the factor of each step, float64 [T], > 0."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LinearFactors(Factors):
    """From 1 in the first step to `end` in the last, by equal differences."""

    end: float

    name: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "end", _levels(f"{self.name} schedule", [self.end])[0])

    def factors(self, steps: int) -> np.ndarray:
        return np.linspace(1.0, self.end, steps)


@dataclass(frozen=True, kw_only=True)
class ExponentialFactors(LinearFactors):
    """From 1 in the first step to `end` in the last, by equal ratios."""

    name: ClassVar[str] = "exp"

    def factors(self, steps: int) -> np.ndarray:
        return np.geomspace(1.0, self.end, steps)


@dataclass(frozen=True, kw_only=True)
class GivenFactors(Factors):
    """As a user gives them, one a step."""

    levels: tuple[float, ...]

    name: ClassVar[str] = "given"

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", _levels("schedule", self.levels))

    def factors(self, steps: int) -> np.ndarray:
        return _all_steps("schedule", self.levels, steps)

    def __str__(self) -> str:
        return f"given ({len(self.levels)} factors)"


FACTORS: dict[str, type[Factors]] = {
    cls.name: cls for cls in (LinearFactors, ExponentialFactors, GivenFactors)
}


def factors_from_dict(values: Mapping[str, object]) -> Factors:
    """Reads what `to_dict` of factors described; raises as `described.read` does."""
    return read(FACTORS, "schedule", values)


def rate_factors(learning_rate: str, warmup_steps: int, steps: int) -> np.ndarray:
    """Returns the learning rate over its maximum in each step, as transformers' schedules have it.

    Args:
      learning_rate: one of `LEARNING_RATES`.
      warmup_steps: linear from 0; "constant" has none.
      steps: T.

    Returns:
      float64 [T], >= 0, some above 0.
    """
    t = np.arange(steps, dtype=np.float64)
    warmup = 0 if learning_rate == "constant" else warmup_steps
    left = (t - warmup) / max(1, steps - warmup)
    decays = {"linear": 1 - left, "cosine": 0.5 * (1 + np.cos(math.pi * left))}
    after = decays.get(learning_rate, np.ones(steps))
    rates = np.where(t < warmup, t / max(1, warmup), np.clip(after, 0.0, 1.0))
    return rates if rates.any() else np.ones(steps)


def check_span(multipliers: np.ndarray, schedule: NoiseSchedule) -> None:
    """Refuses a schedule whose early or late steps would be nothing but noise.

    Raises:
      ValueError: the largest multiplier is more than `MAX_SPAN` times the smallest.
    """
    span = float(multipliers.max() / multipliers.min())
    if not span <= MAX_SPAN:
        raise ValueError(
            f"noise_schedule={schedule} has noise that differs by a factor of {span:.3g} over "
            f"{len(multipliers)} steps, more than {MAX_SPAN:.3g}: most steps would be noise alone. "
            "Use a gamma nearer to 1 (a larger kappa), or fewer steps."
        )


def _levels(what: str, values: Sequence[float]) -> tuple[float, ...]:
    for i, value in enumerate(values):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{what}: entry {i} is {value!r}; give finite numbers above 0.")
    if not values:
        raise ValueError(f"{what} is empty; give one number for each step.")
    return tuple(float(value) for value in values)


def _all_steps(what: str, levels: Sequence[float], steps: int) -> np.ndarray:
    if len(levels) != steps:
        raise ValueError(
            f"{what} has {len(levels)} levels for {steps} steps; give one for each step (or set "
            f"max_steps={len(levels)})."
        )
    return np.asarray(levels, dtype=np.float64)


def quadratic_responses(
    curvature: Floats, rate: float, steps: int, beta: float = 0.0
) -> tuple[Floats, Floats]:
    """Returns how theta_(T+1) answers to theta_1 and to an error in the gradient of each step.

    Args:
      curvature: h_j, [D].
      rate: eta.
      steps: T >= 1.
      beta: of momentum with bias correction (Eq. 3); 0 is gradient descent.

    Returns:
      theta_(T+1) = a theta_1 - eta sum_t k_t error_t: a, float64 [D], and k, float64 [T, D].
    """
    h = np.asarray(curvature, dtype=np.float64)
    k = np.empty((steps, len(h)))
    to_theta, to_average = np.ones_like(h), np.zeros_like(h)  # of theta_(T+1) by theta_t, by m_t
    for t in range(steps, 0, -1):
        unbias = 1 - beta**t
        by_new = to_average - rate * to_theta  # by m_(t+1), which theta_(t+1) contains
        k[t - 1] = -by_new * (1 - beta) / unbias / rate
        to_average = by_new * beta * (1 - beta ** (t - 1)) / unbias
        to_theta = to_theta + by_new * (1 - beta) / unbias * h
    return to_theta, k


def quadratic_influence(curvature: Floats, rate: float, steps: int, beta: float = 0.0) -> Floats:
    """Returns q_t = (1/2) eta^2 sum_j h_j k_tj^2: E f's share of noise of variance 1 in step t, [T].

    Exact; the arguments are those of `quadratic_responses`.
    """
    _, k = quadratic_responses(curvature, rate, steps, beta)
    return np.asarray(rate**2 / 2 * k**2 @ np.asarray(curvature, dtype=np.float64))


class Released(Protocol):
    """What a step wrote to the ledger."""

    @property
    def values(self) -> Sequence[float]:
        """Returns the step's numbers, the mechanism's own first."""


class MechanismSchedule(Generic[M]):
    """The mechanism of each step of a run: the plan's for that step, its clip adapted to the releases.

    A call costs time in proportion to the releases since the last one.

    Args:
      mechanism: the plan's; one that does not adapt is every step's, but for its schedules.
      at: step -> the mechanism that the plan's schedules give it; None where nothing is scheduled.
    """

    def __init__(self, mechanism: M, at: Callable[[int], M] | None = None) -> None:
        self.mechanism, self.at = mechanism, at
        self._steps, self._total = 0, Fraction(0)

    def after(self, releases: Sequence[Released]) -> M:
        """Returns the mechanism of the step that follows `releases`, a list that only grows.

        Raises:
          ValueError: the list is shorter than it was.
        """
        scheduled = self.mechanism if self.at is None else self.at(len(releases))
        if not isinstance(scheduled, AdaptiveClipping):
            return scheduled
        if len(releases) < self._steps:
            raise ValueError(
                f"{len(releases)} releases after {self._steps} were seen: follow another run with a "
                "new object."
            )
        place = scheduled.values_per_release - 1  # numbers of groups may follow
        # Fractions, so that a resumed run adds up to the same total.
        self._total += sum(Fraction(r.values[place]) for r in releases[self._steps :])
        self._steps = len(releases)
        return scheduled.after_fractions(float(self._total), self._steps)
