"""How the microbatches of a step are dealt to processes, and a number that says how they were."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence


def deal(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Places of microbatches for each share: the costliest first, each to whoever has least so far.

    Args:
      costs: of the microbatches.
      shares: how many.

    Returns:
      Ascending places; one share gets all.

    >>> deal([8, 8, 8, 16, 16], 2)
    [[0, 2, 3], [1, 4]]
    """
    order = sorted(range(len(costs)), key=lambda place: -costs[place])
    loads = [0.0] * shares
    dealt: list[list[int]] = [[] for _ in range(shares)]
    for place in order:
        share = loads.index(min(loads))
        loads[share] += costs[place]
        dealt[share].append(place)
    return [sorted(share) for share in dealt]


def fingerprint(step: int, shares: Iterable[Sequence[int]]) -> int:
    """A number of a step and of which rows each share has; as good as never the same for another one."""
    told = repr((step, [list(map(int, share)) for share in shares]))
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little")
