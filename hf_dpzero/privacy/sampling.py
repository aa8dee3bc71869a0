"""Which examples a step sees.

The sampler that runs is the sampler that is accounted: each class samples exactly from the
distribution its privacy event assumes, and states its own sampling probability.

`batch(step, key)` is a pure function of (key, step), so that several processes agree without
talking and a resumed run continues where it stopped. The bits come from SHAKE-256 (FIPS 202)
keyed by prefix: SHAKE-256(domain || key || step || attempt). With a secret key of 256 bits of
entropy its output is indistinguishable from independent uniform bits to anybody who does not hold
the key, so the distribution holds in the computational sense in which all cryptographic sampling
holds. The key is secret and must never be published: amplification by sampling assumes that
nobody sees who was sampled. It is unrelated to the public direction key and to the noise.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

import numpy as np

from hf_dpzero.privacy.described import Described, check_count, read

KEY_BYTES = 32


def new_sampler_key() -> bytes:
    """Draws a fresh secret sampler key: 32 bytes of operating-system entropy.

    >>> len(new_sampler_key())
    32
    """
    return os.urandom(KEY_BYTES)


@dataclass(frozen=True, kw_only=True)
class Sampler(Described, ABC):
    """Base of all samplers. A new one is a dataclass, a row in `SAMPLERS` and one in the contract tests.

    Attributes:
      num_examples: n, the public size of the data set.
      expected_batch_size: B, public; 0 < B <= n. Releases divide by it, whatever was sampled.

    Raises:
      ValueError: sizes out of range.
    """

    num_examples: int
    expected_batch_size: float

    def __post_init__(self) -> None:
        # 64 and 64.0 are one sampler, with one description and one digest of its plan.
        object.__setattr__(self, "expected_batch_size", float(self.expected_batch_size))
        check_count("num_examples", self.num_examples)
        size = self.expected_batch_size
        if not (math.isfinite(size) and size > 0):
            raise ValueError(f"expected_batch_size={size} must be finite and positive.")
        if size > self.num_examples:
            raise ValueError(
                f"expected_batch_size={size} is larger than num_examples={self.num_examples}; lower it."
            )

    @property
    def sampling_probability(self) -> float:
        """Returns q = B / n: the probability that a given example is in the batch, before any cap."""
        return self.expected_batch_size / self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """Returns ceil(n / B), as a DataLoader counts. Accounting knows epochs of fixed batches only.

        >>> PoissonSampler(num_examples=1000, expected_batch_size=16).steps_per_epoch
        63
        >>> PoissonSampler(num_examples=15, expected_batch_size=15 / 13).steps_per_epoch  # rounded
        13
        """
        # A quotient that floats round up over a whole number is no further step.
        return math.ceil(self.num_examples / self.expected_batch_size - 1e-9)

    @property
    def period(self) -> int:
        """Returns P: an example that is in a step may next be in the one P later."""
        return 1

    def passes(self, count: int) -> int:
        """Returns E: in how many of the first `count` steps an example may be."""
        return math.ceil(count / self.period)

    def batch(self, step: int, key: bytes) -> np.ndarray:
        """Draws the step's examples, a pure function of the arguments.

        Args:
          step: in [0, 2^64).
          key: secret, 32 bytes; see `new_sampler_key`.

        Returns:
          Indices, int64, increasing, possibly none.

        Raises:
          ValueError: step or key out of range.
        """
        if not 0 <= step < 2**64:
            raise ValueError(f"step={step} is outside [0, 2^64).")
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"sampler key of {len(key)} bytes given; use the {KEY_BYTES} of new_sampler_key()."
            )
        return self._indices(step, key)

    @abstractmethod
    def _indices(self, step: int, key: bytes) -> np.ndarray:
        """Returns what `batch` does; its arguments are checked."""

    def _check_whole(self, batches: str) -> None:
        if self.expected_batch_size != math.floor(self.expected_batch_size):
            raise ValueError(
                f"expected_batch_size={self.expected_batch_size} is not a whole number; {batches} "
                "need one (PoissonSampler takes any size)."
            )


@dataclass(frozen=True, kw_only=True)
class PoissonSampler(Sampler):
    """Each example is in the batch independently with probability q = B / n.

    Batches vary in size and may be empty; an empty batch is a step like any other. The probability is
    p = floor(q 2^64) / 2^64: at most q, and above q - 2^-64. Time and memory are O(B), whatever n is.

    The batch is a uniform set of N rows, N binomial. So a set S of s rows has the probability
    P(N = s) / (n choose s) = p^s (1 - p)^(n - s): each row is in independently with probability p. A
    data set with a row less, sampled with the same p, has the same distribution over the other rows.

    >>> PoissonSampler(num_examples=4, expected_batch_size=4).batch(0, bytes(32)).tolist()
    [0, 1, 2, 3]
    """

    name: ClassVar[str] = "poisson"

    def _indices(self, step: int, key: bytes) -> np.ndarray:
        threshold = inclusion_threshold(self.sampling_probability)
        if threshold >= 2**64:
            return np.arange(self.num_examples, dtype=np.int64)
        count = _binomial(self.num_examples, threshold, step, key)
        return _subset(self.num_examples, count, step, key, b"poisson")


@dataclass(frozen=True, kw_only=True)
class TruncatedPoissonSampler(PoissonSampler):
    """Poisson sampling with a cap that protects memory (Ganesh 2025, arXiv:2508.15089).

    A Poisson sample larger than `max_batch_size` is replaced by a uniformly random subset of it
    of that size, without replacement, drawn with randomness of its own. The accounting uses the
    truncated event; releases still divide by the expected batch size B.

    Attributes:
      max_batch_size: the cap, B <= cap.
    """

    max_batch_size: int

    name: ClassVar[str] = "truncated_poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_batch_size", self.max_batch_size)
        if self.max_batch_size < self.expected_batch_size:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} is below expected_batch_size="
                f"{self.expected_batch_size}; raise the cap (2B costs almost nothing)."
            )

    def _indices(self, step: int, key: bytes) -> np.ndarray:
        sampled = super()._indices(step, key)
        if len(sampled) <= self.max_batch_size:
            return sampled
        return sampled[_subset(len(sampled), self.max_batch_size, step, key, b"truncate")]


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampler(Sampler):
    """A uniformly random set of exactly B examples, fresh at every step, without replacement.

    Its privacy is stated for `replace_one` only: under add-or-remove the size of the data set
    would have to be secret while B / n is not. B must be a whole number.

    >>> FixedSizeSampler(num_examples=9, expected_batch_size=3).batch(0, bytes(32)).shape
    (3,)
    """

    name: ClassVar[str] = "fixed_size_without_replacement"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("fixed-size batches")

    def _indices(self, step: int, key: bytes) -> np.ndarray:
        return _subset(self.num_examples, int(self.expected_batch_size), step, key, b"fixed")


@dataclass(frozen=True, kw_only=True)
class FullBatchSampler(Sampler):
    """Every example at every step: no randomness, no amplification. B must be n."""

    name: ClassVar[str] = "full_batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expected_batch_size != self.num_examples:
            raise ValueError(
                f"expected_batch_size={self.expected_batch_size} with a full batch of "
                f"num_examples={self.num_examples}; set them equal, or use PoissonSampler."
            )

    def _indices(self, step: int, key: bytes) -> np.ndarray:
        return np.arange(self.num_examples, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class FixedBatchesSampler(Sampler):
    """Every example once an epoch, in the same batch of each epoch; no amplification is claimed.

    E = ceil(n / B) batches have B places each; a secret uniformly random order puts the examples into
    places, and leaves any E B - n of them empty. Step t takes batch t mod E. The order is a function of
    the key alone, so the key must stay the same for the whole run.

    The order is secret for the sake of add_or_remove_one: in a data set without one example the others
    have the same distribution over the same E B places, so their places can be taken to be the same
    (given these the runs differ in the batches of one place; divergences of mixtures are at most the
    largest of their parts). Were the last places the empty ones, another example would move into the
    place that is left, and the runs would differ in two batches. E is public, as n is. Under replace_one
    any order would do.

    >>> sampler = FixedBatchesSampler(num_examples=7, expected_batch_size=3)
    >>> sum(len(sampler.batch(step, bytes(32))) for step in range(3))
    7
    """

    name: ClassVar[str] = "fixed_batches"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("fixed batches")

    @property
    def period(self) -> int:
        """Returns the number of batches, the steps of an epoch."""
        return math.ceil(self.num_examples / self.expected_batch_size)

    def _indices(self, step: int, key: bytes) -> np.ndarray:
        size, place = int(self.expected_batch_size), step % self.period
        there = _order(self.period * size, key)[place * size : (place + 1) * size]
        return np.sort(there[there < self.num_examples])


SAMPLERS: dict[str, type[Sampler]] = {
    sampler.name: sampler
    for sampler in (
        PoissonSampler,
        TruncatedPoissonSampler,
        FixedSizeSampler,
        FullBatchSampler,
        FixedBatchesSampler,
    )
}
"""Every sampler by name."""


def sampler_from_dict(values: Mapping[str, object]) -> Sampler:
    """Reads the sampler that `to_dict` described; an unknown name and unknown keys are errors.

    >>> sampler_from_dict({"name": "poisson", "num_examples": 10, "expected_batch_size": 2})
    PoissonSampler(num_examples=10, expected_batch_size=2.0)
    """
    return read(SAMPLERS, "sampler", values)


def inclusion_threshold(probability: float) -> int:
    """Returns floor(q 2^64), exactly: the number of 64-bit words that mean "in".

    >>> inclusion_threshold(0.5) == 2**63, inclusion_threshold(1.0) == 2**64
    (True, True)
    """
    return math.floor(Fraction(probability) * 2**64)


def _binomial(n: int, threshold: int, step: int, key: bytes, bits: int = 128) -> int:
    """Draws how many of n independent events of probability threshold / 2^64 happen, exactly.

    It is the k with F(k - 1) <= U < F(k), for the binomial distribution function F and U uniform in
    [0, 1), whose binary digits are the stream. Where `bits` of U and of F do not decide, more do.
    """
    lowest, sums, lacking = _binomial_sums(n, threshold, bits)
    digits = int.from_bytes(_stream(bits // 8, step, key, b"poisson count"), "big")
    # F(k) is (sum + x) / (all + y) for some x <= y <= lacking: in [sum, sum + lacking] / total.
    total = sums[-1] + lacking
    place = bisect_left(sums, -(-(digits + 1) * total >> bits))
    if place == len(sums) or sums[place - 1] + lacking > digits * total >> bits:
        return _binomial(n, threshold, step, key, 2 * bits)
    return lowest + place - 1


@lru_cache(maxsize=4)
def _binomial_sums(n: int, threshold: int, bits: int) -> tuple[int, list[int], int]:
    """Returns a count, sums of the weights of no, one, two, ... counts from it on, and what they lack.

    A weight is its neighbour's towards the mode times a ratio, at most 1, rounded down: it lacks less
    than n units. So do those that are left out as zero: all but O(sqrt(B)). A sum lacks (n + 1)^2 at
    most, and the mode's weight has `bits` more.
    """
    rest, mode = 2**64 - threshold, (n + 1) * threshold >> 64
    above = [1 << bits + 2 * (n + 1).bit_length()]
    under = above.copy()
    while above[-1]:
        k = mode + len(above)
        above.append(above[-1] * (n - k + 1) * threshold // (k * rest))
    while under[-1] and len(under) <= mode:
        k = mode - len(under)
        under.append(under[-1] * (k + 1) * rest // ((n - k) * threshold))
    weights = [*under[:0:-1], *above]
    return mode - len(under) + 1, list(accumulate(weights, initial=0)), (n + 1) ** 2


def _subset(n: int, size: int, step: int, key: bytes, domain: bytes) -> np.ndarray:
    """Draws a uniform subset of range(n): the first `size` different places of a stream of uniform ones.

    More than half of range(n) is what another such subset leaves, so that few places come twice.
    """
    if size > n // 2:
        inside = np.ones(n, dtype=bool)
        inside[_subset(n, n - size, step, key, domain)] = False
        return np.flatnonzero(inside)
    taken = size + size // 2 + 8  # how much of the stream is read changes nothing but the time
    while True:
        words = _words(taken, step, key, domain)
        # Words from the last whole multiple of n on would favour low places.
        places = words[words <= np.uint64(2**64 // n * n - 1)] % np.uint64(n)
        first = np.sort(np.unique(places, return_index=True)[1])
        if len(first) >= size:
            return np.sort(places[first[:size]]).astype(np.int64)
        taken *= 2


def place_order(count: int, step: int, key: bytes) -> np.ndarray:
    """Draws a uniform order of a step's rows, in which they take their places in forward passes.

    A pure function of the arguments, from words of a domain of their own: independent of which rows are
    sampled. `batches.placement` proves what a secret uniform order is good for.

    Args:
      count: rows of the step.
      step: in [0, 2^64).
      key: secret, 32 bytes: the sampler's.

    Returns:
      A permutation of range(count), int64.

    >>> sorted(place_order(5, step=0, key=bytes(32)).tolist())
    [0, 1, 2, 3, 4]
    """
    return _permutation(count, step, key, b"places")


@lru_cache(maxsize=2)
def _order(n: int, key: bytes) -> np.ndarray:
    return _permutation(n, 0, key, b"order")


def _permutation(n: int, step: int, key: bytes, domain: bytes, attempt: int = 0) -> np.ndarray:
    """Draws a uniform permutation of range(n): the order of its words, again if two are equal."""
    words = _words(n, step, key, domain, attempt)
    order = np.argsort(words)
    if not (np.diff(words[order]) > 0).all():
        return _permutation(n, step, key, domain, attempt + 1)
    return order.astype(np.int64)


def _words(n: int, step: int, key: bytes, domain: bytes, attempt: int = 0) -> np.ndarray:
    """Returns n independent uniform 64-bit words, a pure function of the arguments."""
    return np.frombuffer(_stream(8 * n, step, key, domain, attempt), dtype="<u8")


def _stream(size: int, step: int, key: bytes, domain: bytes, attempt: int = 0) -> bytes:
    """Returns the first bytes of a stream, a pure function of the other arguments."""
    address = step.to_bytes(8, "little") + attempt.to_bytes(8, "little")
    label = b"hf_dpzero.sampling." + domain.ljust(16, b"\0")
    return hashlib.shake_256(label + key + address).digest(size)
