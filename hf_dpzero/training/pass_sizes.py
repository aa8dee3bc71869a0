"""How many rows a forward pass of each width takes, and how narrow the narrowest is.

A pass costs something whatever is in it: weights are read, kernels started. Few rows in a pass make many
passes; many rows make blanks, because every width that is drawn at all fills up a pass. The sizes here
minimise the expected time of a step from public numbers alone: the expected batch size, the widths that
rows may have (each taken to be as likely as the others, since the true shares are private) and what a
pass costs on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NARROWEST = 8
"""Tokens of the narrowest width that is considered; each further one is twice as wide."""
WIDEST = 512
"""Tokens of the widest where nothing says what rows may have."""

_GPU_PASS = 2e12
_GPU_BYTES, _GPU_OPERATIONS = 2.5e10, 3e14
_GPU_LEAST, _GPU_MOST = 150.0, 5000.0


@dataclass(frozen=True)
class PassSizes:
    """Rows of a forward pass by the width of what is in it.

    Attributes:
      rows: width in tokens -> rows of a pass, widths ascending; not empty.
    """

    rows: dict[int, int]

    @property
    def narrowest(self) -> int:
        """The narrowest width."""
        return min(self.rows)

    def of(self, width: int) -> int:
        """Rows of a pass that is so wide: those of the next width that was considered, or of the last.

        >>> PassSizes({8: 16, 64: 4}).of(8), PassSizes({8: 16, 64: 4}).of(9), PassSizes({8: 16}).of(99)
        (16, 4, 16)
        """
        fitting = [count for wide, count in self.rows.items() if wide >= width]
        return (fitting or [self.rows[max(self.rows)]])[0]

    def passes(self, expected_rows: float) -> float:
        """Passes that a step is expected to have, each width being equally likely.

        >>> round(PassSizes({8: 4, 16: 1}).passes(8.0), 2)
        5.37
        """
        mean = expected_rows / len(self.rows)
        return sum(expected_passes(mean, [count])[0] for count in self.rows.values())

    def tokens(self, expected_rows: float, cost: float) -> float:
        """What a step is expected to take, in tokens, each width being equally likely.

        Args:
          expected_rows: B.
          cost: of a pass beside its tokens, in tokens.

        Returns:
          Tokens that take the same time.

        >>> round(PassSizes({8: 4, 16: 1}).tokens(8.0, 0.0), 1)
        108.0
        """
        mean = expected_rows / len(self.rows)
        passes = {w: expected_passes(mean, [n])[0] for w, n in self.rows.items()}
        return sum(passes[w] * (cost + n * w) for w, n in self.rows.items())


def one_size(expected_rows: float, most_rows: int) -> int:
    """Rows of a pass where all have one shape: a little more than B, so that one mostly is enough.

    >>> one_size(64.0, 512), one_size(64.0, 16)
    (80, 16)
    """
    return max(1, min(most_rows, round(expected_rows + 2 * math.sqrt(expected_rows))))


def pass_cost(device: str, parameters: int, low_precision: bool, arriving: int = 0) -> float:
    """What a forward pass costs beside its tokens, in tokens.

    On the CPU measured on RoBERTa-base and MiniLM (docs/performance.md, "Private settings"): 40 in
    float32, 140 in bfloat16, whose products are faster while weights are read no faster. On a GPU
    estimated: half a millisecond to start the kernels of a layer, at 3e14 operations a second.

    Args:
      device: type of a torch device, such as "cpu".
      parameters: of the model.
      low_precision: whether products are taken in less than float32.
      arriving: bytes of offloaded weights, which come to a GPU in every pass: at 2.5e10 bytes a second
        (estimated: 16 lanes of PCIe 4), while a token takes two operations a parameter.

    Returns:
      Tokens that take the same time.

    >>> pass_cost("cpu", 10**8, False), pass_cost("cuda", 355_000_000, True) > 1000
    (40.0, True)
    >>> round(pass_cost("cuda", 13 * 10**9, True, arriving=26 * 10**9))
    12154
    """
    if device == "cpu":
        return 140.0 if low_precision else 40.0
    transfer = arriving / _GPU_BYTES * _GPU_OPERATIONS / (2 * max(parameters, 1))
    return transfer + min(_GPU_MOST, max(_GPU_LEAST, _GPU_PASS / max(parameters, 1)))


def pass_sizes(
    expected_rows: float, most_rows: int, widest: int | None, cost: float, multiples_of: int = 1
) -> PassSizes:
    """The sizes with the least expected time of a step, in which each width is equally likely.

    Args:
      expected_rows: B, of one process.
      most_rows: of a pass, for memory.
      widest: tokens of the longest row, where that is known.
      cost: of a pass beside its tokens, in tokens.
      multiples_of: which numbers of rows are considered; at most `most_rows`.

    Returns:
      At least one row at every width, or so many.

    >>> pass_sizes(64.0, 100, 64, cost=40.0).rows
    {8: 24, 16: 8, 32: 6, 64: 4}
    >>> pass_sizes(64.0, 100, 64, cost=4000.0).rows
    {64: 80}
    >>> pass_sizes(64.0, 4, 64, cost=40.0).rows
    {8: 4, 16: 4, 32: 4, 64: 4}
    >>> pass_sizes(64.0, 100, 64, cost=40.0, multiples_of=16).rows
    {8: 16, 16: 16, 32: 16, 64: 16}
    """
    widest = max(NARROWEST, widest or WIDEST)
    counts = _candidates(one_size(expected_rows, most_rows))
    counts = [n for n in counts if n % multiples_of == 0] or [multiples_of]
    options = [_with_narrowest(n, expected_rows, counts, widest, cost) for n in _doubled(widest)]
    return PassSizes(min(options, key=lambda option: option[0])[1])


def _with_narrowest(
    narrowest: int, expected_rows: float, counts: Sequence[int], widest: int, cost: float
) -> tuple[float, dict[int, int]]:
    widths = [width for width in _doubled(widest) if width >= narrowest]
    passes = expected_passes(expected_rows / len(widths), counts)
    seconds, rows = 0.0, {}
    for width in widths:
        times = [p * (cost + n * width) for n, p in zip(counts, passes, strict=True)]
        best = min(range(len(counts)), key=times.__getitem__)
        seconds, rows[width] = seconds + times[best], counts[best]
    return seconds, rows


def _doubled(widest: int) -> list[int]:
    """8, 16, 32, ... and the widest."""
    doubled = [NARROWEST << i for i in range(max(1, math.ceil(math.log2(widest / NARROWEST) + 1)))]
    return [*[width for width in doubled if width < widest], widest]


def _candidates(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to `most`, and it."""
    powers = [2**i for i in range(most.bit_length())]
    return sorted({n for p in powers for n in (p, p * 3 // 2) if n <= most} | {most})


def expected_passes(mean: float, counts: Sequence[int]) -> list[float]:
    """E[ceil(N / n)] of a Poisson variable N, for each n: the sum over k of P(N > k n).

    Args:
      mean: of N.
      counts: rows of a pass, n >= 1.

    Returns:
      One number for each count.

    >>> [round(p, 3) for p in expected_passes(4.0, [1, 1000])]
    [4.0, 0.982]
    """
    top = math.ceil(mean + 10 * math.sqrt(mean) + 20)
    k = np.arange(1, top + 1)
    logs = np.concatenate([[0.0], np.cumsum(math.log(mean) - np.log(k))]) - mean
    above = 1.0 - np.cumsum(np.exp(logs)).clip(max=1.0)  # P(N > k)
    return [float(above[::count].sum()) for count in counts]
