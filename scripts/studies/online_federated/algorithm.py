"""Locally private online federated learning with correlated noise (Zhang, Zhu, Fay and Johansson 2024).

n learners see a stream of clients, one record a local step, each record once. In round r a learner
takes tau local steps from x^r and sends the mean of its gradients plus (b^{r+1} - b^r) xi_i (Algorithm
1); the server subtracts etilde = eta eta_g tau times the mean of the messages. b^r are the rows of B in
a factorisation A = BC of the prefix sums, b^0 = 0, and xi_i is drawn once.

Privacy. The learner adds the noise and every message is public; neighbours differ in one record of one
learner's stream. A record moves one g_i by at most 2 B_g: it may turn its own gradient round, and the
later local steps of its round start from elsewhere, so the 1/tau of the mean is lost. The release is one
Gaussian mechanism with sensitivity 2 B_g max_r ||c_col^r|| (Lemma IV.8); nothing is sampled.

The factorisations are `privacy.correlated`'s: (i) `tree` and, with the least noise that its nodes allow,
`tree_least_squares`; (ii) `optimized`; (iii) `toeplitz`; and `independent`. Their column norms are exact
and count no node of the tree that is never released. `calibrated` and `true_epsilon` use the exact
Gaussian mechanism (Balle and Wang 2018). Lemma IV.8's formula goes through zCDP; it is
`paper_deviation`, and Eq. (8)'s bound `paper_column_bound`.

`local_message` and `learn` follow the algorithm learner by learner. `simulate` runs many cells and seeds
side by side on the mean of the learners' noise, which is all that the server uses of it. Both simulate
from seeded generators: nothing here is a private release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_dpzero.privacy.correlated import factorization as f
from scripts.studies.budget.algorithm import zcdp_rho

Array = NDArray[Any]
Record = TypeVar("Record")
Records = TypeVar("Records", contravariant=True)
Rate = TypeVar("Rate", float, Array)
Gradient = Callable[[Array, Record], Array]
"""(z [d], record) -> gradient [d]."""


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Algorithm 1 without its noise and steps.

    Attributes:
      rounds: R, fixed in advance: the noise is laid out for it.
      local_steps: tau, records of a learner in a round.
      learners: n.
      clip: B_g; every record's gradient is scaled to at most this norm. Infinite: no clipping, so no
        privacy.
      server_rate: eta_g; the local rate is etilde / (eta_g tau).

    Raises:
      ValueError: a count below 1, a clip or a rate that is not positive.
    """

    rounds: int
    local_steps: int
    learners: int
    clip: float = 1.0
    server_rate: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rounds", "local_steps", "learners"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        for name in ("clip", "server_rate"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value} must be positive.")

    def sensitivity(self) -> float:
        """Returns 2 B_g: the largest move of one round's g_i when a record is replaced.

        Raises:
          ValueError: the clip is infinite.
        """
        if math.isinf(self.clip):
            raise ValueError(
                "clip=inf: the gradients have no bound, so no noise is private; set it."
            )
        return 2 * self.clip

    def convex_sensitivity(self, etilde: float, smoothness: float) -> float:
        """Returns 2 B_g / tau, where every record's clipped gradient is that of a convex L-smooth loss.

        A local step is then no expansion for eta <= 2 / L: two paths that differ in one record are never
        further apart than after it, 2 eta B_g. Not in the paper. A logistic loss keeps the property when
        clipped, as its slope is cut off monotonically (Song, Steinke, Thakkar and Thakurta 2021).

        Args:
          etilde: the server's step.
          smoothness: L, for every possible record.

        Raises:
          ValueError: eta > 2 / L, where steps may expand.
        """
        if (rate := self.local_rate(etilde)) * smoothness > 2:
            raise ValueError(
                f"eta={rate:g} is above 2 / L = {2 / smoothness:g}: local steps may expand, and the "
                "sensitivity is 2 clip; use a smaller etilde."
            )
        return self.sensitivity() / self.local_steps

    def local_rate(self, etilde: Rate) -> Rate:
        """Returns eta = etilde / (eta_g tau)."""
        return etilde / (self.server_rate * self.local_steps)


class Stream(Generic[Record]):
    """Hands out the records of a round, in order and once.

    Args:
      rounds: records of round 0, 1, ...; whatever the oracle reads.
    """

    def __init__(self, rounds: Iterable[Record]) -> None:
        self._rounds = iter(rounds)
        self._served = 0

    def take(self, round_: int) -> Record:
        """Returns the records of round `round_`, which must be the next one.

        Raises:
          ValueError: a round that was served before, or one too early; no records left.
        """
        if round_ != self._served:
            raise ValueError(
                f"round {round_} asked for where {self._served} is next: a record is used once, and the "
                "noise pays for one use; start a new run on new records."
            )
        records = next(self._rounds, None)
        if records is None:
            raise ValueError(
                f"the stream ended after {self._served} rounds; give R x tau records a learner or fewer "
                "rounds."
            )
        self._served += 1
        return records


def clipped(gradients: Array, clip: float) -> Array:
    """Scales gradients to norm at most `clip` along the last axis; one that is not finite is 0.

    >>> clipped(np.array([[3.0, 4.0], [np.inf, 0.0]]), 1.0).round(3).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    if math.isinf(clip):
        return gradients
    norms = np.linalg.norm(gradients, axis=-1, keepdims=True)
    finite = np.isfinite(norms)
    scale = np.minimum(1.0, clip / np.maximum(norms, np.finfo(gradients.dtype).tiny))
    return np.where(finite, np.where(finite, gradients, 0) * scale, 0)


def local_message(
    gradient: Gradient[Record], x: Array, records: Sequence[Record], rate: float, clip: float
) -> Array:
    """Returns g_i = (x - z^tau) / (eta tau): the mean of the clipped gradients along the local steps.

    Guarantee: replacing one record moves it by at most 2 `clip`.

    Args:
      gradient: of one record.
      x: the server's model, [d].
      records: tau of them, one a step.
      rate: eta.
      clip: B_g.

    Returns:
      [d].

    Raises:
      ValueError: no records.
    """
    if not len(records):
        raise ValueError("a round without records (tau = 0) has no gradient; give at least one.")
    z, total = x, np.zeros_like(x)
    for record in records:
        step = clipped(gradient(z, record), clip)
        z, total = z - rate * step, total + step
    return total / len(records)


def learn(
    federation: Federation,
    gradient: Gradient[Record],
    streams: Sequence[Stream[Sequence[Record]]],
    increments: Sequence[Array],
    *,
    etilde: float,
    start: Array,
) -> Iterator[tuple[Array, Array]]:
    """Runs Algorithm 1, learner by learner.

    Args:
      federation: rounds, local steps, clip.
      gradient: of one record.
      streams: of each learner; a round's records are tau.
      increments: (b^{r+1} - b^r) xi_i of each learner, [R, d].
      etilde: the server's step.
      start: x^0, [d].

    Yields:
      x^{r+1} and the messages of round r, [n, d]; R pairs.

    Raises:
      ValueError: a wrong number of streams, noises, rounds or records.
    """
    if not len(streams) == len(increments) == federation.learners:
        raise ValueError(
            f"{len(streams)} streams and {len(increments)} noises for {federation.learners} learners; "
            "give each its own: the noise is local."
        )
    for noise in increments:
        if noise.shape != (federation.rounds, *start.shape):
            raise ValueError(
                f"noise of shape {noise.shape}; R x d is {federation.rounds} x {start.size}."
            )
    x, rate = start, federation.local_rate(etilde)
    for r in range(federation.rounds):
        messages = []
        for stream, noise in zip(streams, increments, strict=True):
            records = stream.take(r)
            if len(records) != federation.local_steps:
                raise ValueError(
                    f"round {r} has {len(records)} records; local_steps={federation.local_steps}."
                )
            g = local_message(gradient, x, records, rate, federation.clip)
            messages.append(g + noise[r])
        sent = np.stack(messages)
        x = x - etilde * sent.mean(axis=0)
        yield x, sent


class Oracle(Protocol[Records]):
    """Local steps of all cells, seeds and learners at once."""

    def mean_message(self, x: Array, records: Records, rates: Array, clip: float) -> Array:
        """Returns the learners' mean of g_i.

        Args:
          x: models [C, S, d].
          records: of one round for each seed and learner.
          rates: eta, [C].
          clip: B_g.

        Returns:
          [C, S, d].
        """


class Cells(NamedTuple):
    """C runs: server steps etilde [C], rows of `noises` [C], deviations V of the noise xi_i [C]."""

    steps: Array
    kinds: Array
    scales: Array


def simulate(
    federation: Federation,
    oracle: Oracle[Record],
    stream: Stream[Record],
    noises: Array,
    cells: Cells,
    start: Array,
) -> Iterator[Array]:
    """Runs Algorithm 1 for C cells and S seeds at once; the cells of a seed share records and noise.

    Args:
      federation: rounds, local steps, learners, clip.
      oracle: the local steps.
      stream: records of a round of all seeds and learners.
      noises: (b^{r+1} - b^r) xi with xi ~ N(0, I), of each kind: [K, R, S, d]. The mean of n learners'
        noises is V / sqrt(n) times this in law.
      cells: the runs.
      start: x^0 of each seed, [S, d].

    Yields:
      x^{r+1}, [C, S, d]; R times. Not finite where a run diverged.

    Raises:
      ValueError: noises for another number of rounds; the stream is short.
    """
    if noises.shape[1] != federation.rounds:
        raise ValueError(f"noises for {noises.shape[1]} rounds; rounds={federation.rounds}.")
    x = np.repeat(start[None], len(cells.steps), axis=0)
    wide = (slice(None), None, None)
    rates = federation.local_rate(cells.steps).astype(x.dtype)
    steps = cells.steps[wide].astype(x.dtype)
    scales = (cells.scales / math.sqrt(federation.learners))[wide].astype(x.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for r in range(federation.rounds):
            g = oracle.mean_message(x, stream.take(r), rates, federation.clip)
            x = x - steps * (g + scales * noises[cells.kinds, r])
            yield x


# ------------------------------------------------------------------ noise, and the epsilon that it buys

NOISES: dict[str, Callable[[int], f.Factorization] | None] = {
    "noiseless": None,
    "independent": f.independent,
    "tree": f.tree,
    "tree_least_squares": f.tree_least_squares,
    "optimized": f.optimized,
    "toeplitz": f.toeplitz,
}
"""Name -> R -> factorisation."""
DENSE = ("tree_least_squares", "optimized")
"""Those that are only to be had for `factorization.MAX_DENSE_ROUNDS` rounds."""


def increments(factorization: f.Factorization | None, xi: Array) -> Array:
    """Returns (b^{r+1} - b^r) xi = (C^{-1} xi)_r for all rounds, b^0 = 0.

    Args:
      factorization: of R rounds; None for no noise.
      xi: [R, ...]; its precision is kept.

    Returns:
      [R, ...]; their running sum is B xi.
    """
    if factorization is None:
        return np.zeros_like(xi)
    if len(xi) != factorization.rounds:
        raise ValueError(
            f"xi has {len(xi)} rows for {factorization.rounds} rounds; draw one a round."
        )
    if isinstance(factorization, f.Toeplitz):
        kernel = factorization.inverse
        if len(kernel) == 1:
            return kernel[0].astype(xi.dtype) * xi
        from scipy.signal import oaconvolve

        # in O(R log R): R is up to 10^5 here, where a matrix would not fit
        wide = kernel.reshape(-1, *[1] * (xi.ndim - 1)).astype(xi.dtype)
        return np.asarray(oaconvolve(xi, wide, axes=0)[: len(xi)])
    if isinstance(factorization, f.Dense):
        return np.tensordot(factorization.inverse.astype(xi.dtype), xi, axes=1)
    rows = (factorization.noise_row(r) for r in range(factorization.rounds))
    return np.stack([np.tensordot(w.astype(xi.dtype), xi[draws], axes=1) for draws, w in rows])


def decoder(factorization: f.Factorization) -> Array:
    """Returns B, [R, R]."""
    return np.asarray(np.cumsum(increments(factorization, np.eye(factorization.rounds)), axis=0))


def calibrated(epsilon: float, delta: float, sensitivity: float) -> float:
    """Returns the smallest deviation V with which one Gaussian release is (epsilon, delta)-DP.

    Args:
      epsilon, delta: the target.
      sensitivity: L2, of the release: that of one g_i times the largest column norm.
    """
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    return sensitivity * float(get_sigma_gaussian(epsilon, delta)) * (1 + 1e-9)


def true_epsilon(deviation: float, delta: float, sensitivity: float) -> float:
    """Returns epsilon of one Gaussian release of deviation V; infinite without noise."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    if deviation == 0:
        return math.inf
    return float(get_epsilon_gaussian(deviation / sensitivity, delta)) * (1 + 1e-9)


def paper_deviation(epsilon: float, delta: float, sensitivity: float) -> float:
    """Returns V of Lemma IV.8: sensitivity / sqrt(2 rho), with the paper's 2 B_g max ||c_col||."""
    return sensitivity / math.sqrt(2 * zcdp_rho(epsilon, delta))  # Eq. (14)


def paper_column_bound(rounds: int) -> float:
    """Returns sqrt(1 + ln(4R/5) / pi), Eq. (8)'s bound on ||c_col|| of (iii), which is above it."""
    return math.sqrt(1 + math.log(0.8 * rounds) / math.pi)


def paper_tree_norm(rounds: int) -> float:
    """Returns the root of 1 + ceil(log2 R): all 2R - 1 nodes of the tree padded to a power of two."""
    return math.sqrt((rounds - 1).bit_length() + 1)
