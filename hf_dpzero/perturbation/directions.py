"""Public random directions: u(key, step, query)[i], counter-based and random-access.

Any coordinate of any direction can be computed alone, so the same numbers come out whatever the
chunking, the thread count, the device or the order in which parameters are visited, and a release
can be replayed elsewhere. Directions are public: they carry no secret and pay no privacy.

The bit source is Philox4x32-10 (see `philox`). Everything after it is integer arithmetic and exact
float32 values, so no result depends on a maths library. Coordinates are laid out so that 32
consecutive ones come from 32 consecutive Philox calls: a vector register, or a warp, computes its
calls side by side and reads and writes memory in order.
"""

from __future__ import annotations

import functools
import math
import secrets
import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dpzero.perturbation.philox import Words, philox_words, stream_key

Distribution = Literal["rademacher", "gaussian", "sphere"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)

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
_DITHERS = 128  # equidistant points in a cell
_PART = 1 << 16  # squares below 2^47 that an int64 sum holds
_SURE_DIMENSION = 149  # above it, a sphere's sqrt(d)/||z|| lies in [1/2, 2] whatever happens
_DOMAIN_DIRECTION, _DOMAIN_TENSOR, _DOMAIN_PERTURBATION = 0, 1, 2


SumOfSquares = Callable[[Words, int, int], int]


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


@functools.cache
def normal_tables() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(center, half), int32 [766] each, in units of 2^-21: the normal's piecewise uniform quantiles.

    A 32-bit word x gives s, the sum of its three low bytes, and b, the next 7 bits;
    z = center[s] + (2 b - 127) half[s] is one of 128 equidistant points of the cell that holds the
    normal's quantiles between P(S < s) and P(S <= s). Symmetric; mean 0 exactly, variance 1 to
    1e-6, |z| < 6; the distribution function is off by less than 1e-4 anywhere.
    """
    pmf = functools.reduce(np.convolve, [np.full(256, 1 / 256)] * 3)
    inverse = statistics.NormalDist().inv_cdf
    inner = np.array([inverse(p) for p in np.cumsum(pmf)[: _CELLS // 2 - 1]])
    # The last cell's left end: its mean is the normal's mean below its right end.
    outermost = 2 * (-statistics.NormalDist().pdf(float(inner[0])) / pmf[0]) - float(inner[0])
    edges = np.concatenate([[outermost], inner, [0.0]])
    ratio, whole = 1.0, edges
    for _ in range(20):  # the variance of what the grid can hold
        whole = np.rint(edges * ratio / (2 * _DITHERS * NORMAL_UNIT)).astype(np.int64)
        center, half = (table * NORMAL_UNIT for table in _centers_and_halves(whole))
        variance = float(np.sum(pmf * (center**2 + half**2 * (_DITHERS**2 - 1) / 3)))
        ratio *= (1.0 / variance) ** 0.5
    centers, halves = _centers_and_halves(whole)
    return centers.astype(np.int32), halves.astype(np.int32)


def _centers_and_halves(edges: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """From the edges of the lower half's cells, in units of 256 * 2^-21; the rest by symmetry."""
    half = np.diff(edges)
    center = _DITHERS * (edges[1:] + edges[:-1])
    return np.concatenate([center, -center[::-1]]), np.concatenate([half, half[::-1]])


def normals_of(words: Words) -> NDArray[np.int32]:
    """z in units of 2^-21 for each 32-bit word, int32 of the same shape."""
    center, half = normal_tables()
    byte = np.uint32(255)
    s = (words & byte) + ((words >> np.uint32(8)) & byte) + ((words >> np.uint32(16)) & byte)
    b = ((words >> np.uint32(24)) & np.uint32(_DITHERS - 1)).astype(np.int32)
    return center[s] + (2 * b - (_DITHERS - 1)) * half[s]


@functools.cache
def largest_coordinate(distribution: str) -> float:
    """An upper bound on |u[i]|: 1 for rademacher, the table's end for gaussian.

    The sphere rescales a Gaussian by sqrt(d)/||z|| and never passes sqrt(d), which is a bound for
    d <= 149. Beyond, a factor 2 covers it but for an event below 2^-64 (a chi-square of d degrees
    under d/4), and `DirectionStream` checks the factor it really uses.
    """
    if distribution == "rademacher":
        return 1.0
    center, half = normal_tables()
    widest = float(center[-1] + (_DITHERS - 1) * half[-1]) * NORMAL_UNIT
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
        """What the raw coordinates are multiplied by: 1, or sqrt(d)/||z|| for the sphere.

        0 if z = 0, which does not happen: no raw coordinate is 0.
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

    def squared_norm(self) -> float:
        """||z||^2, summed in exact integers (multiples of 2^-42), so independent of chunking."""
        if self.distribution == "rademacher":
            return float(sum(size for _, size in self.layout))
        total = sum(self._sum_of_squares(self.key, *place) for place in self.layout)
        return total * NORMAL_UNIT**2

    def raw(self, start: int, count: int) -> Tensor:
        """Coordinates before `scale`, exact.

        Args:
          start: first index, any.
          count: how many.

        Returns:
          float32 [count] on the CPU.
        """
        integers = coordinates(self.key, self.distribution != "rademacher", start, count)
        values = torch.from_numpy(integers).float()
        return values if self.distribution == "rademacher" else values.mul_(NORMAL_UNIT)

    def tensor_words(self, numbers: NDArray[np.uint64]) -> Words:
        """Four public words for each tensor of those numbers, uint32 [4, n].

        Words 0 and 1 round a Rademacher update's coefficient, word 2 starts the dither of an update
        and word 3 that of weight decay. A tensor's number is its place in `layout`.
        """
        return self._words_of_all(_DOMAIN_TENSOR)[:, numbers.astype(np.int64)]

    def _words_of_all(self, domain: int) -> Words:
        """Those of every tensor of the layout, computed once for each domain."""
        if domain not in self._words:
            calls = np.arange(len(self.layout), dtype=np.uint64)
            self._words[domain] = philox_words(calls, stream_key(*self.direction, domain))
        return self._words[domain]

    def coefficient_uniforms(
        self, numbers: NDArray[np.uint64], age: int = 0
    ) -> NDArray[np.float64]:
        """One public uniform in [0, 1), a multiple of 2^-53, for each tensor.

        Args:
          numbers: places of the tensors in `layout`, [n].
          age: steps since the direction was released. Uniforms of successive ages are the golden
            ratio apart (Weyl, 1916), so that the roundings of many updates along one direction are
            spread evenly and cancel instead of adding up.

        Returns:
          float64 [n].
        """
        words = self.tensor_words(numbers).astype(np.uint64)
        first = (words[1] << np.uint64(32) | words[0]) >> np.uint64(11)
        moved = first + np.uint64(age * _UNIFORM_STEP % 2**53)
        return (moved % np.uint64(2**53)) * 2.0**-53

    def update_dither(self, numbers: NDArray[np.uint64], age: int = 0) -> Words:
        """Where each tensor's dither starts when an update is rounded.

        Args:
          numbers, age: as for `coefficient_uniforms`.

        Returns:
          uint32 [n].
        """
        return self.tensor_words(numbers)[2] + np.uint32(age * DITHER_STEP % 2**32)

    def perturbation_dither(self, numbers: NDArray[np.uint64]) -> Words:
        """Where each tensor's dither starts when a perturbation is rounded, uint32 [n]."""
        return self._words_of_all(_DOMAIN_PERTURBATION)[0, numbers.astype(np.int64)]


def draw_words_together(streams: Sequence[DirectionStream]) -> None:
    """Draws the `tensor_words` of directions of one layout at once, which spares K - 1 calls' overhead.

    Directions that have theirs already are left out.
    """
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
    """Raw coordinates of a stream.

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


def sum_of_squared_normals(key: Words, start: int, count: int) -> int:
    """Sum of z^2, exact.

    Args:
      key: uint32 [4].
      start: first index, any.
      count: how many coordinates.

    Returns:
      In units of 2^-42.
    """
    total = 0
    for first in range(start, start + count, _PART):
        z = coordinates(key, True, first, min(_PART, start + count - first)).astype(np.int64)
        total += int(np.dot(z, z))
    return total


def dither(start: Tensor | int, index: Tensor) -> Tensor:
    """start + index * DITHER_STEP mod 2^32, the 32-bit dithers of a tensor's coordinates.

    With a uniform start every coordinate's dither is uniform; neighbours' are spread evenly (Weyl,
    1916), which costs one multiplication instead of a draw.

    Args:
      start: in [0, 2^32).
      index: int64, of the coordinates in their tensor.

    Returns:
      int64 of index's shape.
    """
    return (start + (index & 0xFFFFFFFF) * DITHER_STEP) & 0xFFFFFFFF
