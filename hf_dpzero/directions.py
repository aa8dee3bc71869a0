"""Public random directions: u(key, step, query)[i], counter-based and random-access.

Any coordinate of any direction can be computed alone, so the same numbers come out whatever the
chunking, the thread count, the device or the order in which parameters are visited, and a release
can be replayed elsewhere. Directions are public: they carry no secret and pay no privacy.

The bit source is Philox4x64-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3")
with the counter (call, step, query, domain); `numpy.random.Philox` computes it. All arithmetic
after it is exact (sign bits, integer-valued tables), so no result depends on a maths library.
"""

from __future__ import annotations

import functools
import math
import secrets
import statistics
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

Distribution = Literal["rademacher", "gaussian", "sphere"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)

ALIGNMENT = 256
"""Coordinates served by one Philox call under `rademacher`; tensors start at multiples of it."""

_WORDS_PER_CALL = 4
_CACHED_WORDS = 1 << 16  # 512 KiB of random bits held at a time
_PAIRS_TABLE_BITS = 16
_TABLE_SCALE = 2.0**-20  # Gaussian values are integers times this
_SURE_DIMENSION = 149  # above it, a sphere's sqrt(d)/||z|| lies in [1/2, 2] whatever happens
_DOMAIN_DIRECTION, _DOMAIN_ROUNDING, _DOMAIN_TENSOR, _DOMAIN_DECAY = 0, 1, 2, 3


class Direction(NamedTuple):
    """Names one direction u in R^d. All of it is public.

    Attributes:
      key: 128-bit integer, one for a run.
      step: training step, from 0.
      query: which of the step's K directions, from 0.
    """

    key: int
    step: int
    query: int = 0


def new_key() -> int:
    """A fresh 128-bit direction key from the operating system's entropy."""
    return secrets.randbits(128)


def check_distribution(name: str) -> None:
    """Raises ValueError unless `name` is one of `DISTRIBUTIONS`."""
    if name not in DISTRIBUTIONS:
        raise ValueError(
            f"direction={name!r} is not known; choose one of {', '.join(DISTRIBUTIONS)}."
        )


def random_words(direction: Direction, start: int, count: int, domain: int = 0) -> np.ndarray:
    """Words start .. start+count of the direction's bit stream, uint64 [count].

    Word w is word w % 4 of the Philox call with counter (w // 4 + 1, step, query, domain).
    """
    call, lead = divmod(start, _WORDS_PER_CALL)
    counter = [call, direction.step, direction.query, domain]
    generator = np.random.Philox(key=direction.key, counter=counter)
    return generator.random_raw(lead + count)[lead:]


class _BitCache:
    """Serves slices of one bit stream, holding the words of one block (512 KiB at most).

    Args:
      direction, domain: which stream.
      length: words that will be wanted; the last block ends there. More may be asked for.
    """

    def __init__(self, direction: Direction, domain: int, length: int) -> None:
        self.direction, self.domain, self.length = direction, domain, length
        self.block, self.words = -1, np.empty(0, np.uint64)

    def _load(self, block: int, start: int, stop: int) -> np.ndarray:
        if block != self.block:
            self.words = random_words(self.direction, start, stop - start, self.domain)
            self.block = block
        return self.words

    def get(self, start: int, count: int) -> np.ndarray:
        """Words start .. start+count, uint64 [count]."""
        block, lead = divmod(start, _CACHED_WORDS)
        first = start - lead
        stop = min(first + _CACHED_WORDS, self.length)
        if start + count <= stop:
            return self._load(block, first, stop)[lead : lead + count]
        return random_words(self.direction, start, count, self.domain)


def _as_indices(words: np.ndarray, dtype: type, device: torch.device) -> Tensor:
    """The words' bytes (or 16-bit parts), least significant first, as int32 indices on `device`."""
    return torch.from_numpy(words.view(dtype)).to(device).to(torch.int32)


@functools.cache
def _sign_table(device: torch.device) -> Tensor:
    """float32 [256, 8]: row b holds 2 * bit_j(b) - 1 for j = 0..7."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (2.0 * bits.float() - 1.0).to(device)


@functools.cache
def _normal_table(device: torch.device) -> Tensor:
    """float32 [65536]: normal quantiles at (j + 1/2) / 65536 over sqrt(2), on the grid 2^-20.

    Scaled so that the sum of two independent entries has variance 1 (before the grid's rounding,
    which moves it by less than 1e-8). Every entry and every sum of two is exact in float32.
    """
    half = 1 << (_PAIRS_TABLE_BITS - 1)
    inverse = statistics.NormalDist().inv_cdf
    upper = np.array([inverse((j + 0.5) / (2 * half)) for j in range(half, 2 * half)])
    upper *= math.sqrt(0.5 / np.mean(upper**2))
    grid = np.rint(upper / _TABLE_SCALE) * _TABLE_SCALE
    table = np.concatenate([-grid[::-1], grid]).astype(np.float32)
    return torch.from_numpy(table).to(device)


def largest_coordinate(distribution: str) -> float:
    """An upper bound on |u[i]|: 1 for rademacher, 2 max(table) for gaussian.

    The sphere rescales a Gaussian by sqrt(d)/||z|| and never passes sqrt(d), which is a bound for
    d <= 149. Beyond, a factor 2 covers it but for an event below 2^-64 (a chi-square of d degrees
    under d/4), and `DirectionStream` checks the factor it really uses.
    """
    if distribution == "rademacher":
        return 1.0
    widest = 2.0 * float(_normal_table(torch.device("cpu"))[-1])
    return widest if distribution == "gaussian" else 2.0 * widest


class DirectionStream:
    """Reads the coordinates of one direction, any slice in any order.

    Args:
      direction: which direction.
      distribution: `rademacher` (u[i] = +-1; ||u||^2 = d exactly), `gaussian` (N(0, 1), the sum
        of two 65536-point normal quantiles: |u[i]| <= 6.1), `sphere` (sqrt(d) z / ||z||).
      layout: (offset, size) of every tensor that belongs to the direction; the sphere's norm is
        taken over exactly these coordinates.

    All three satisfy E[u u^T] = I, what DPZero needs of a direction (Zhang et al., Algorithm 2 and
    the remark under Eq. 2).
    """

    def __init__(
        self, direction: Direction, distribution: str, layout: list[tuple[int, int]]
    ) -> None:
        check_distribution(distribution)
        self.direction, self.distribution, self.layout = direction, distribution, layout
        end = max((offset + size for offset, size in layout), default=0)
        self._bits = _BitCache(direction, _DOMAIN_DIRECTION, -(-end // self._per_word))
        self._rounding = _BitCache(direction, _DOMAIN_ROUNDING, -(-end // 4))
        self._decay = _BitCache(direction, _DOMAIN_DECAY, -(-end // 4))
        self._tensors = _BitCache(direction, _DOMAIN_TENSOR, len(layout))

    @functools.cached_property
    def scale(self) -> float:
        """What the raw coordinates are multiplied by: 1, or sqrt(d)/||z|| for the sphere.

        0 if z = 0, which happens to one draw in 65536 at d = 1 and to none that matters beyond.
        """
        if self.distribution != "sphere":
            return 1.0
        dimension, square = sum(size for _, size in self.layout), self.squared_norm()
        scale = math.sqrt(dimension / square) if square else 0.0
        if dimension > _SURE_DIMENSION and not 0.5 <= scale <= 2.0:
            raise ArithmeticError(
                f"sphere: sqrt(d)/||z|| = {scale} cannot happen; broken generator."
            )
        return scale

    @property
    def _per_word(self) -> int:
        """Coordinates in one random word: 64 sign bits, or two sums of two 16-bit quantiles."""
        return 64 if self.distribution == "rademacher" else 2

    def squared_norm(self) -> float:
        """||z||^2, summed in exact integers (multiples of 2^-40), so independent of chunking."""
        total = 0
        for offset, size in self.layout:
            for start in range(0, size, _CACHED_WORDS):
                count = min(_CACHED_WORDS, size - start)
                z = self.raw(offset + start, count, torch.device("cpu"))
                total += _exact_sum_of_squares(z.double() / _TABLE_SCALE)
        return total * _TABLE_SCALE**2

    def raw(self, start: int, count: int, device: torch.device) -> Tensor:
        """Coordinates start .. start+count before `scale`, float32 [count], exact."""
        if self.distribution == "rademacher":
            return self._signs(start, count, device)
        return self._normals(start, count, device)

    def signs_times_(self, out: Tensor, start: int, amount: float) -> Tensor:
        """Writes +-amount into `out` (float32, contiguous); `start` and len(out) multiples of 8."""
        words, lead = self._covering(start, out.numel())
        index = _as_indices(words, np.uint8, out.device)[lead // 8 : (lead + out.numel()) // 8]
        table = _sign_table(out.device) * amount
        return torch.index_select(table, 0, index, out=out.view(-1, 8)).view(-1)

    def _covering(self, start: int, count: int) -> tuple[np.ndarray, int]:
        first, lead = divmod(start, self._per_word)
        return self._bits.get(first, -(-(lead + count) // self._per_word)), lead

    def _signs(self, start: int, count: int, device: torch.device) -> Tensor:
        words, lead = self._covering(start, count)
        signs = _sign_table(device).index_select(0, _as_indices(words, np.uint8, device))
        return signs.view(-1)[lead : lead + count]

    def _normals(self, start: int, count: int, device: torch.device) -> Tensor:
        words, lead = self._covering(start, count)
        table = _normal_table(device)
        halves = table.index_select(0, _as_indices(words, np.uint16, device)).view(-1, 2)
        return (halves[:, 0] + halves[:, 1])[lead : lead + count]

    def uniforms(self, start: int, count: int, device: torch.device) -> Tensor:
        """Public uniforms (j + 1/2) / 65536 for stochastic rounding of updates, float32 [count]."""
        return _uniforms(self._rounding, start, count, device)

    def decay_uniforms(self, start: int, count: int, device: torch.device) -> Tensor:
        """Like `uniforms`, independent of them: for weight decay."""
        return _uniforms(self._decay, start, count, device)

    def tensor_uniform(self, tensor: int) -> float:
        """One public uniform in [0, 1), a multiple of 2^-53, for the tensor of that number."""
        return float(self._tensors.get(tensor, 1)[0] >> np.uint64(11)) * 2.0**-53


def _uniforms(bits: _BitCache, start: int, count: int, device: torch.device) -> Tensor:
    first, lead = divmod(start, 4)
    words = bits.get(first, -(-(lead + count) // 4))
    values = _as_indices(words, np.uint16, device)[lead : lead + count]
    return values.to(torch.float32).add_(0.5).mul_(2.0**-16)


def _exact_sum_of_squares(integers: Tensor) -> int:
    """sum z^2 of float64 integers below 2^23, at most 2^16 of them, without rounding.

    Split as z = 2^12 h + l: every partial sum of the three dot products stays below 2^53.
    """
    high = torch.floor(integers * 2.0**-12)
    low = integers - high * 2.0**12
    parts = (torch.dot(high, high), torch.dot(high, low), torch.dot(low, low))
    hh, hl, ll = (int(part) for part in parts)
    return (hh << 24) + (hl << 13) + ll


def direction_vector(
    direction: Direction,
    distribution: str,
    layout: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The whole direction as one vector [d], for tests, small problems and explanations.

    >>> u = direction_vector(Direction(key=7, step=0), "rademacher", [(0, 6)])
    >>> u.abs().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    stream = DirectionStream(direction, distribution, layout)
    parts = [stream.raw(offset, size, torch.device("cpu")) for offset, size in layout]
    return torch.cat(parts).to(dtype) * stream.scale
