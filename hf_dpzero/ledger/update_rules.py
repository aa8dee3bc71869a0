r"""Optimisers on the released scalars: what an update is made of, given all that is public so far.

Step t releases K noised scalars v_{t,k} along public directions u_{t,k}, and v_{t,k} u_{t,k} summed
over k is its estimate g_t of the gradient (Zhang et al. 2024, arXiv:2310.09639, Algorithm 2). A rule
turns the releases of steps 0 .. t into the update

    theta <- theta + sum_{s, k} c_{s,k} u_{s,k},        c_{s,k} = -lr_t w_{t,s} v_{s,k},   s <= t,

so momentum needs no d-vector: the directions of the last W steps are generated again, which costs
W K instead of K directions in the pass that makes the update.

Privacy: post-processing. A rule reads released values, the learning rate and public numbers of the
header (K, the variance of the noise), and nothing else: not the batch, not a loss, not a weight.
It costs nothing, whatever it computes.

Replay and resume: an update is a pure function of the releases up to its step. Scalar summaries of
them (a rule's `State`) are folded from step 0 on, in order, so that the same floats come out
whoever asks for whichever step; `UpdateTerms` remembers them and nothing depends on that. On other
machines, too: the arithmetic is +, -, *, /, square roots and exactly rounded sums, for which all
agree to the last bit (they do not for powers, exponentials and Python's own `sum`).
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from hf_dpzero.ledger.trajectory import Release

State = tuple[float, ...]
"""What a rule keeps of the releases up to a step: a few floats."""
NoiseVariance = Callable[[int], float]
"""Step -> variance of the noise on each of its K values, from public numbers."""

NEGLIGIBLE = 1e-2
"""A release's weight, relative to its first, from which on the default window leaves it out."""


class Term(NamedTuple):
    """c_{s,k}: by how much the update follows the direction of `step` and `query`."""

    step: int
    query: int
    coefficient: float


@dataclass(frozen=True, kw_only=True)
class UpdateRule(ABC):
    """An optimiser on released scalars. A new one is a dataclass and a row in `UPDATE_RULES`."""

    name: ClassVar[str]
    reads_noise_variance: ClassVar[bool] = False

    @property
    def length(self) -> int:
        """W >= 1: how many of the last releases an update is made of."""
        return 1

    def advance(self, state: State | None, values: Sequence[float], variance: float) -> State:
        """The state after a release.

        Args:
          state: after the release before; None for the first.
          values: the K released values.
          variance: of the noise on each; NaN unless `reads_noise_variance`.
        """
        return ()

    @abstractmethod
    def weights(self, states: Sequence[State]) -> list[float]:
        """w_{t,s} for the last min(t + 1, W) steps s, oldest first.

        Args:
          states: those after each of these steps, oldest first.
        """

    @classmethod
    @abstractmethod
    def from_settings(cls, momentum: float, window: int | None) -> UpdateRule:
        """The rule with these settings where it knows them, its defaults elsewhere."""

    def to_dict(self) -> dict[str, Any]:
        """Name and fields, JSON-safe, for the header; `update_rule_from_dict` reads it back."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """w_{t,t} = 1: the update of Algorithm 2, line 3."""

    name: ClassVar[str] = "sgd"

    def weights(self, states: Sequence[State]) -> list[float]:
        """1 for the present release."""
        return [1.0]

    @classmethod
    def from_settings(cls, momentum: float, window: int | None) -> SGD:
        """Neither setting matters."""
        return cls()


@dataclass(frozen=True, kw_only=True)
class _Windowed(UpdateRule):
    """A rule whose memory decays by `momentum` a step and is cut off after `window` steps.

    Attributes:
      momentum: beta in [0, 1).
      window: W >= 1. None takes the smallest W with beta^W <= 1e-2: what is cut off is at most 1 %
        of the weight, and W is 44 for beta = 0.9.
    """

    momentum: float = 0.9
    window: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", float(self.momentum))
        _check_fraction("momentum", self.momentum)
        if self.window is None:
            object.__setattr__(self, "window", default_window(self.momentum))
        _check_window(self.window)

    @property
    def length(self) -> int:
        """W."""
        assert self.window is not None
        return self.window

    @classmethod
    def from_settings(cls, momentum: float, window: int | None) -> UpdateRule:
        """The rule with these two, its defaults elsewhere."""
        return cls(momentum=momentum, window=window)

    def _powers(self, count: int) -> list[float]:
        """beta^(count - 1), ..., beta, 1, each the one after it times beta."""
        powers = [1.0]
        while len(powers) < count:
            powers.append(powers[-1] * self.momentum)
        return powers[::-1]


@dataclass(frozen=True, kw_only=True)
class Momentum(_Windowed):
    """Heavy ball (Polyak, 1964): m_t = beta m_{t-1} + g_t, theta <- theta - lr_t m_t.

    w_{t,s} = beta^(t-s), cut off after W steps. As in `torch.optim.SGD` there is no factor
    1 - beta: with a gradient that lasts, a step is 1/(1 - beta) times as long as sgd's.
    """

    name: ClassVar[str] = "momentum"

    def weights(self, states: Sequence[State]) -> list[float]:
        """beta^(t-s)."""
        return self._powers(len(states))


@dataclass(frozen=True, kw_only=True)
class Adam(_Windowed):
    """Adam (Kingma and Ba, 2015) on g_t = sum_k v_{t,k} u_{t,k}, with one second moment for all.

    For Rademacher directions and K = 1 every coordinate of g_t is +-v_t, so Adam's second moment is
    exactly one scalar, and this is Adam on the dense vector. Elsewhere the square of a coordinate
    is replaced by its mean over the directions, which E[u_i u_j] = 0 makes E[g_i^2] = sum_k v_k^2.

        second_t = b2 second_{t-1} + (1 - b2) sum_k v_{t,k}^2
        w_{t,s}  = (1 - b1) b1^(t-s) / (1 - b1^n) / (sqrt(second_t / (1 - b2^(t+1))) + eps)

    with n = min(t + 1, W): the averages' starts are corrected, and a cut-off window is one. The noise
    that is in every v is not subtracted from the second moment: steps of pure noise are as long
    as lr allows, as in DP-Adam; `Kalman` is the rule that knows the noise. A learning rate is per
    coordinate, as in Adam, and weight decay is apart from it, as in AdamW.

    Attributes:
      momentum: b1.
      second_moment: b2 in [0, 1).
      stability: eps > 0, in the units of v; releases that are all zero give an update of zero.
    """

    second_moment: float = 0.999
    stability: float = 1e-8

    name: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "second_moment", float(self.second_moment))
        object.__setattr__(self, "stability", float(self.stability))
        _check_fraction("second_moment", self.second_moment)
        if not (math.isfinite(self.stability) and self.stability >= 1e-30):
            raise ValueError(
                f"stability={self.stability} divides an update and must be finite and at least "
                "1e-30; Adam's own value is 1e-8."
            )

    def advance(self, state: State | None, values: Sequence[float], variance: float) -> State:
        """(second_t, 1 - b2^(t+1))."""
        second, weight = state or (0.0, 0.0)
        square = math.fsum(value * value for value in values)
        decay = self.second_moment
        return _averaged(second, square, decay), _averaged(weight, 1.0, decay)

    def weights(self, states: Sequence[State]) -> list[float]:
        """See the class."""
        second, weight = states[-1]
        powers = self._powers(len(states))  # of sum (1 - b1^n) / (1 - b1)
        factor = 1.0 / math.fsum(powers) / (math.sqrt(second / weight) + self.stability)
        return [factor * power for power in powers]


@dataclass(frozen=True, kw_only=True)
class Kalman(_Windowed):
    r"""A Kalman filter for the gradient as a hidden state, seen through noise of known variance.

    The model (Kalman, 1960; for zeroth-order scalars cf. BSZO, Bayesian subspace zeroth order):

        g_t     = a g_{t-1} + process noise,  N(0, (q_t / d) I)          a = `momentum`
        v_{t,k} = <g_t, u_{t,k}> + noise of variance R_t                 k = 1 .. K

    R_t is public: it is that of the privacy noise, (sigma C_t / B)^2 for a Gaussian and twice that
    for a Laplace. Directions have ||u||^2 = d and are taken as orthogonal, which random ones are up
    to 1/sqrt(d), also across steps. The prior is isotropic.

    Prediction: m <- a m, P <- a^2 P + (q_t / d) I. Say that before step t, P = (p_t / d) I but for
    directions observed already, where it is smaller. The new u are orthogonal to those, so
    P u = (p_t / d) u, u^T P u = p_t and <m, u> = 0, m being a combination of past directions. The
    K observations are then independent of each other, the gain along u is P u / (p_t + R_t), and

        p_t = a^2 p_{t-1} + q_t                                (variance of <g_t, u> for a fresh u)
        m_t = a m_{t-1} + (1 / d) sum_k gamma_t v_{t,k} u_{t,k},      gamma_t = p_t / (p_t + R_t),

    and along the new u, P shrinks; elsewhere it is (p_t / d) I still, as was said. So m_t is a
    combination of past directions with decaying weights. The update is -lr_t d m_t: the factor d,
    which makes v u unbiased for the gradient in sgd as well, keeps learning rates comparable.
    w_{t,s} = a^(t-s) gamma_s, cut off after W steps: `Momentum` with each release shrunk by how
    much of it is noise, by its own noise where the clip changes from step to step. Without noise
    it is `Momentum`.

    p_t is estimated from the releases. As E[v^2] = p + R, an average of v^2 - R over steps (decay
    `averaging`, its start corrected, clamped at zero) estimates p's stationary value, and
    q_t = (1 - a^2) times that keeps p there. Pure noise therefore gives gamma near zero. R leaves
    out what sampling a batch adds: its variance is a public number only as an upper bound,
    C^2 / (B K), which is far off, and releases along fresh directions cannot tell it from signal.
    The filter takes the noise that was put in back out, and no more.

    Attributes:
      momentum: a, how much of the gradient lasts from a step to the next.
      averaging: decay of the average of v^2 - R, in [0, 1).
    """

    averaging: float = 0.99

    name: ClassVar[str] = "kalman"
    reads_noise_variance: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "averaging", float(self.averaging))
        _check_fraction("averaging", self.averaging)

    def advance(self, state: State | None, values: Sequence[float], variance: float) -> State:
        """(average of v^2 - R, weight of that average, p_t, gamma_t)."""
        excess = math.fsum(value * value - variance for value in values) / len(values)
        average, weight, p, _ = state or (0.0, 0.0, math.nan, 0.0)
        average = _averaged(average, excess, self.averaging)
        weight = _averaged(weight, 1.0, self.averaging)
        signal = max(average / weight, 0.0)
        p = _averaged(p, signal, self.momentum * self.momentum) if state else signal
        return average, weight, p, p / (p + variance) if p > 0.0 else 0.0

    def weights(self, states: Sequence[State]) -> list[float]:
        """a^(t-s) gamma_s."""
        powers = self._powers(len(states))
        return [power * state[3] for power, state in zip(powers, states, strict=True)]


UPDATE_RULES: dict[str, type[UpdateRule]] = {
    rule.name: rule for rule in (SGD, Momentum, Adam, Kalman)
}


def make_update_rule(name: str, momentum: float = 0.9, window: int | None = None) -> UpdateRule:
    """The rule of that name.

    Args:
      name: a key of `UPDATE_RULES`.
      momentum: beta of `momentum`, b1 of `adam`, a of `kalman`.
      window: W; None for the smallest with momentum^W <= 1e-2.

    Raises:
      ValueError: an unknown name, or a setting out of range.

    >>> make_update_rule("momentum").to_dict()
    {'name': 'momentum', 'momentum': 0.9, 'window': 44}
    """
    return _class_of(name).from_settings(momentum, window)


def update_rule_from_dict(values: Mapping[str, Any] | None) -> UpdateRule:
    """Inverse of `to_dict`; None, as in logs older than the rules, is sgd. Unknown keys are errors.

    >>> update_rule_from_dict(None)
    SGD()
    """
    given = {"name": SGD.name} if values is None else dict(values)
    rule = _class_of(given.pop("name", None))
    known = {field.name for field in dataclasses.fields(rule)}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"update_rule {rule.name} has no {unknown}; it has {sorted(known)}.")
    return rule(**given)


def _class_of(name: Any) -> type[UpdateRule]:
    if name not in UPDATE_RULES:
        raise ValueError(f"update_rule={name!r} is unknown; use one of {', '.join(UPDATE_RULES)}.")
    return UPDATE_RULES[name]


def default_window(momentum: float) -> int:
    """The smallest W >= 1 with momentum^W <= 1e-2.

    >>> [default_window(beta) for beta in (0.0, 0.5, 0.9, 0.99)]
    [1, 7, 44, 459]
    """
    if momentum <= NEGLIGIBLE:
        return 1
    return math.ceil(math.log(NEGLIGIBLE) / math.log(momentum))


class UpdateTerms:
    """Any step's update, at the cost of its window: states are folded once and remembered.

    Args:
      rule: the run's.
      num_directions: K; further values of a record, such as a clip's count, are not coefficients.
      noise_variance: asked for each step once, in order, if the rule reads it.
    """

    def __init__(
        self, rule: UpdateRule, num_directions: int, noise_variance: NoiseVariance
    ) -> None:
        self.rule, self.num_directions = rule, num_directions
        self._noise_variance = noise_variance
        self._states: list[State] = []

    def __call__(self, releases: Sequence[Release], step: int) -> list[Term]:
        """The terms of the update of `step`, the newest release first; finite.

        Args:
          releases: those of a run from step 0 on, at least up to `step`; later ones are not read.
            The same ones, perhaps more, in every call.
          step: t, also the release's place in the list.

        Returns:
          All K terms of step t, and those of the W - 1 steps before that are not zero.
        """
        self._fold(releases, step)
        first = max(0, step + 1 - self.rule.length)
        weights = self.rule.weights(self._states[first : step + 1])
        rate, terms = -releases[step].learning_rate, []
        for s, weight in zip(range(step, first - 1, -1), reversed(weights), strict=True):
            for query, value in enumerate(releases[s].values[: self.num_directions]):
                coefficient = rate * (weight * value)
                if coefficient or s == step:
                    terms.append(Term(s, query, coefficient))
        return terms

    def _fold(self, releases: Sequence[Release], step: int) -> None:
        for s in range(len(self._states), step + 1):
            variance = self._noise_variance(s) if self.rule.reads_noise_variance else math.nan
            before = self._states[-1] if self._states else None
            values = releases[s].values[: self.num_directions]
            self._states.append(self.rule.advance(before, values, variance))


def update_terms(
    rule: UpdateRule,
    releases: Sequence[Release],
    num_directions: int,
    noise_variance: NoiseVariance,
) -> list[Term]:
    """The terms of the last release's update: a pure function of the releases, in O(t).

    >>> from hf_dpzero.ledger.trajectory import Release
    >>> releases = [Release(0, (2.0,), 0.5), Release(1, (4.0,), 0.5)]
    >>> for term in update_terms(Momentum(momentum=0.5), releases, 1, lambda step: 0.0):
    ...     print(tuple(term))
    (1, 0, -2.0)
    (0, 0, -0.5)
    """
    return UpdateTerms(rule, num_directions, noise_variance)(releases, len(releases) - 1)


def _averaged(before: float, now: float, decay: float) -> float:
    return decay * before + (1.0 - decay) * now


def _check_fraction(field: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{field}={value} must be at least 0 and below 1.")


def _check_window(window: Any) -> None:
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(
            f"update_window={window!r} must be an integer of at least 1, or None for the smallest "
            "that leaves out weights of at most 1 %."
        )
