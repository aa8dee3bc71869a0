"""Public random directions: u(key, step, query)[i], counter-based and random-access.

Any coordinate of any direction can be computed alone, so the same numbers come out whatever the
chunking, the thread count, the device or the order in which parameters are visited, and a release
can be replayed elsewhere. Directions are public: they carry no secret and pay no privacy.

The bit source is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a
call turns a 128-bit counter and a 64-bit key into four 32-bit words by integer arithmetic alone.
Everything after it is integers and exact float32 values, so no result depends on a maths library.
"""

from __future__ import annotations

import functools
import hashlib
import math
import secrets
import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint32]
Distribution = Literal["rademacher", "gaussian", "sphere"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

# 32 consecutive coordinates come from 32 consecutive Philox calls: a vector register, or a warp,
# computes its calls side by side and reads and writes memory in order.
LANES = 32
"""Coordinates in a row, one Philox call each; tensors start at multiples of it."""
SIGNS_TILE = 4096
"""Coordinates that 32 calls give as signs: 128 rows, one bit of every call each."""
NORMALS_TILE = 128
"""Coordinates that 32 calls give as normals: 4 rows, one word of every call each."""
DITHER_STEP = 0x9E3779B9
"""Between the 32-bit dithers of neighbouring coordinates: 2^32 over the golden ratio."""

_UNIFORM_STEP = 0x13C6EF372FE950  # 2^53 over the golden ratio
NORMAL_UNIT = 2.0**-21  # normals are integers times this
_CELLS = 3 * 255 + 1  # values of a sum of three bytes
DITHERS = 128
"""Equidistant points in a cell of the normals' table."""
_PART = 1 << 16  # squares below 2^47 that an int64 sum holds
_SURE_DIMENSION = 149  # above it, a sphere's sqrt(d)/||z|| lies in [1/2, 2] whatever happens
_DOMAIN_DIRECTION, _DOMAIN_TENSOR, _DOMAIN_PERTURBATION = 0, 1, 2
Places = Sequence[tuple[int, int]]
"""(first index, number) of some coordinates, ascending."""
SumOfSquares = Callable[[Words, Places], int]


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
    """Draws a 128-bit direction key from the operating system's entropy."""
    return secrets.randbits(128)


def check_distribution(name: str) -> None:
    """Raises ValueError unless `name` is one of `DISTRIBUTIONS`."""
    if name not in DISTRIBUTIONS:
        raise ValueError(
            f"direction={name!r} is not known; choose one of {', '.join(DISTRIBUTIONS)}."
        )


def stream_key(*numbers: int) -> Words:
    """Returns the 128 bits that name a stream, uint32 [4]: a 64-bit Philox key and a 64-bit nonce.

    Args:
      numbers: non-negative integers below 2^128.
    """
    text = b"hf_dpzero stream 2"
    for number in numbers:
        text += number.to_bytes(16, "little")
    # A hash, so that any two streams are unrelated however close their numbers are.
    return np.frombuffer(hashlib.sha256(text).digest()[:16], "<u4").astype(np.uint32)


def philox_words(calls: NDArray[np.uint64], key: Words) -> Words:
    """Returns the four words of each call; the kernels compute the same where they use them.

    Args:
      calls: uint64 [n], the low half of the counter; the nonce is the high half.
      key: uint32 [4] as `stream_key` gives it, or [4, n], one for each call.

    Returns:
      uint32 [4, n].
    """
    wide = key.astype(np.uint64)
    c = [calls & _LOW, calls >> _HALF, np.full_like(calls, wide[2]), np.full_like(calls, wide[3])]
    for turn in range(ROUNDS):
        low = (wide[0] + np.uint64(turn * WEYL[0])) & _LOW
        high = (wide[1] + np.uint64(turn * WEYL[1])) & _LOW
        first, second = np.uint64(MULTIPLIERS[0]) * c[0], np.uint64(MULTIPLIERS[1]) * c[2]
        c = [
            (second >> _HALF) ^ c[1] ^ low,
            second & _LOW,
            (first >> _HALF) ^ c[3] ^ high,
            first & _LOW,
        ]
    return np.stack(c).astype(np.uint32)


@functools.cache
def normal_tables() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Makes (center, half), int32 [766] each, in units of 2^-21: piecewise uniform normal quantiles.

    A 32-bit word x gives s, the sum of its three low bytes, and b, the next 7 bits;
    z = center[s] + (2 b - 127) half[s] is one of 128 equidistant points of the cell that holds the
    normal's quantiles between P(S < s) and P(S <= s). Symmetric; mean 0 exactly, variance 1 to
    1e-6, |z| < 6; the distribution function is off by less than 1e-4 anywhere.
    """
    pmf = functools.reduce(np.convolve, [np.full(256, 1 / 256)] * 3)
    inverse = statistics.NormalDist().inv_cdf
    inner = np.array([inverse(p) for p in np.cumsum(pmf)[: _CELLS // 2 - 1]])
    # The outermost cell has no quantile on its left: its mean shall be the normal's mean there.
    outermost = 2 * (-statistics.NormalDist().pdf(float(inner[0])) / pmf[0]) - float(inner[0])
    edges = np.concatenate([[outermost], inner, [0.0]])
    ratio, whole = 1.0, edges
    for _ in range(20):  # rounding to the grid moves the variance: scale until it is 1 again
        whole = np.rint(edges * ratio / (2 * DITHERS * NORMAL_UNIT)).astype(np.int64)
        center, half = (table * NORMAL_UNIT for table in _centers_and_halves(whole))
        variance = float(np.sum(pmf * (center**2 + half**2 * (DITHERS**2 - 1) / 3)))
        ratio *= (1.0 / variance) ** 0.5
    centers, halves = _centers_and_halves(whole)
    return centers.astype(np.int32), halves.astype(np.int32)


def _centers_and_halves(edges: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # `edges` are those of the lower half's cells, in units of 256 * 2^-21; the rest is symmetric
    half = np.diff(edges)
    center = DITHERS * (edges[1:] + edges[:-1])
    return np.concatenate([center, -center[::-1]]), np.concatenate([half, half[::-1]])


def normals_of(words: Words) -> NDArray[np.int32]:
    """Returns z in units of 2^-21 for each 32-bit word, int32 of the same shape."""
    center, half = normal_tables()
    byte = np.uint32(255)
    s = (words & byte) + ((words >> np.uint32(8)) & byte) + ((words >> np.uint32(16)) & byte)
    b = ((words >> np.uint32(24)) & np.uint32(DITHERS - 1)).astype(np.int32)
    return center[s] + (2 * b - (DITHERS - 1)) * half[s]


@functools.cache
def largest_coordinate(distribution: str) -> float:
    """Returns an upper bound on |u[i]|."""
    if distribution == "rademacher":
        return 1.0
    center, half = normal_tables()
    widest = float(center[-1] + (DITHERS - 1) * half[-1]) * NORMAL_UNIT
    # The sphere rescales a Gaussian by sqrt(d)/||z|| and never passes sqrt(d), which is a bound for
    # d <= 149. Beyond, a factor 2 covers it but for an event below 2^-64 (a chi-square of d degrees
    # under d/4), and `DirectionStream.scale` checks the factor that is really used.
    return widest if distribution == "gaussian" else 2.0 * widest


class DirectionStream:
    """Reads the coordinates of one direction, any slice in any order.

    Args:
      direction: which direction.
      distribution: `rademacher` (u[i] = +-1; ||u||^2 = d exactly), `gaussian` (N(0, 1), see
        `normal_tables`), `sphere` (sqrt(d) z / ||z||).
      layout: (offset, size) of every tensor that belongs to the direction; the sphere's norm is
        taken over exactly these coordinates.
      sum_of_squares: a quicker `sum_of_squared_normals`, for spheres and norms.

    All three satisfy E[u u^T] = I, what DPZero needs of a direction (Zhang et al., Algorithm 2 and
    the remark under Eq. 2).
    """

    def __init__(
        self,
        direction: Direction,
        distribution: str,
        layout: list[tuple[int, int]],
        sum_of_squares: SumOfSquares | None = None,
    ) -> None:
        check_distribution(distribution)
        self._sum_of_squares = sum_of_squares or sum_of_squared_normals
        self.direction, self.distribution, self.layout = direction, distribution, layout
        self.key = stream_key(*direction, _DOMAIN_DIRECTION)
        self._words: dict[int, Words] = {}

    @functools.cached_property
    def scale(self) -> float:
        """What the raw coordinates are multiplied by: 1, or sqrt(d)/||z|| for the sphere."""
        if self.distribution != "sphere":
            return 1.0
        dimension, square = sum(size for _, size in self.layout), self.squared_norm()
        # 0 if z = 0, which does not happen: no raw coordinate is 0
        scale = math.sqrt(dimension / square) if square else 0.0
        if dimension > _SURE_DIMENSION and not 0.5 <= scale <= 2.0:
            raise ArithmeticError(
                f"sphere: sqrt(d)/||z|| = {scale} cannot happen; broken generator."
            )
        return scale

    def squared_norm(self) -> float:
        """Returns ||z||^2, summed in exact integers (multiples of 2^-42): chunks do not matter."""
        if self.distribution == "rademacher":
            return float(sum(size for _, size in self.layout))
        return self._sum_of_squares(self.key, self.layout) * NORMAL_UNIT**2

    def raw(self, start: int, count: int) -> Tensor:
        """Returns coordinates before `scale`, exact: float32 [count] on the CPU, from any index on."""
        integers = coordinates(self.key, self.distribution != "rademacher", start, count)
        values = torch.from_numpy(integers).float()
        return values if self.distribution == "rademacher" else values.mul_(NORMAL_UNIT)

    def tensor_words(self, numbers: NDArray[np.uint64], domain: int = _DOMAIN_TENSOR) -> Words:
        """Returns four public words for each tensor of those numbers, uint32 [4, n].

        Words 0 and 1 round a Rademacher update's coefficient, word 2 starts the dither of an update
        and word 3 that of weight decay. A tensor's number is its place in `layout`.
        """
        if domain not in self._words:  # those of all tensors at once, for a call of Philox is dear
            calls = np.arange(len(self.layout), dtype=np.uint64)
            self._words[domain] = philox_words(calls, stream_key(*self.direction, domain))
        return self._words[domain][:, numbers.astype(np.int64)]

    def coefficient_uniforms(
        self, numbers: NDArray[np.uint64], age: int = 0
    ) -> NDArray[np.float64]:
        """Returns one public uniform in [0, 1), a multiple of 2^-53, for each tensor, float64 [n].

        Args:
          numbers: places of the tensors in `layout`, [n].
          age: steps since the direction was released.
        """
        words = self.tensor_words(numbers).astype(np.uint64)
        first = (words[1] << np.uint64(32) | words[0]) >> np.uint64(11)
        # Uniforms of successive ages are the golden ratio apart (Weyl, 1916): the roundings of many
        # updates along one direction are spread evenly and cancel instead of adding up.
        moved = first + np.uint64(age * _UNIFORM_STEP % 2**53)
        return (moved % np.uint64(2**53)) * 2.0**-53

    def update_dither(self, numbers: NDArray[np.uint64], age: int = 0) -> Words:
        """Returns where each tensor's dither starts when an update is rounded, uint32 [n]."""
        return self.tensor_words(numbers)[2] + np.uint32(age * DITHER_STEP % 2**32)

    def perturbation_dither(self, numbers: NDArray[np.uint64]) -> Words:
        """Returns where each tensor's dither starts when a perturbation is rounded, uint32 [n]."""
        return self.tensor_words(numbers, _DOMAIN_PERTURBATION)[0]


def draw_words_together(streams: Sequence[DirectionStream]) -> None:
    """Draws the `tensor_words` of directions of one layout at once: a call of Philox has overhead."""
    missing = [stream for stream in streams if _DOMAIN_TENSOR not in stream._words]
    if len(missing) < 2:
        return
    tensors = len(missing[0].layout)
    keys = np.stack([stream_key(*stream.direction, _DOMAIN_TENSOR) for stream in missing], axis=1)
    calls = np.tile(np.arange(tensors, dtype=np.uint64), len(missing))
    words = philox_words(calls, np.repeat(keys, tensors, axis=1))
    for stream, own in zip(missing, np.split(words, len(missing), axis=1), strict=True):
        stream._words[_DOMAIN_TENSOR] = own


def coordinates(key: Words, gaussian: bool, start: int, count: int) -> NDArray[np.int32]:
    """Returns raw coordinates of a stream.

    Args:
      key: uint32 [4].
      gaussian: normals; False for signs.
      start: first index, any.
      count: how many.

    Returns:
      int32 [count]: +-1, or normals in units of 2^-21.
    """
    tile = NORMALS_TILE if gaussian else SIGNS_TILE
    first, last = start // tile, -(-(start + count) // tile)
    calls = np.arange(first * LANES, last * LANES, dtype=np.uint64)
    words = philox_words(calls, key).reshape(4, -1, LANES).transpose(1, 0, 2)
    if gaussian:
        rows = normals_of(words)
    else:  # words [tiles, 4, 32 lanes] -> [tiles, 4, 32 bits, 32 lanes]
        bits = (words[:, :, None, :] >> np.arange(32, dtype=np.uint32)[:, None]) & np.uint32(1)
        rows = 2 * bits.astype(np.int32) - 1
    return rows.reshape(-1)[start - first * tile :][:count]


def sum_of_squared_normals(key: Words, places: Places) -> int:
    """Returns the exact sum of z^2 over the coordinates of these places, in units of 2^-42."""
    total = 0
    for start, count in places:
        for first in range(start, start + count, _PART):
            z = coordinates(key, True, first, min(_PART, start + count - first)).astype(np.int64)
            total += int(np.dot(z, z))
    return total


def dither(start: Tensor | int, index: Tensor) -> Tensor:
    """Returns start + index * DITHER_STEP mod 2^32, the 32-bit dithers of a tensor's coordinates.

    Args:
      start: in [0, 2^32).
      index: int64, of the coordinates in their tensor.

    Returns:
      int64 of index's shape.
    """
    # With a uniform start every coordinate's dither is uniform, and neighbours' are spread evenly
    # (Weyl, 1916): one multiplication instead of a draw.
    return (start + (index & 0xFFFFFFFF) * DITHER_STEP) & 0xFFFFFFFF
