"""Whether rows are the same, in the same order, as when a run began: for accounts that number them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
from datasets.fingerprint import Hasher
from torch.utils.data import Subset

from hf_dpzero.estimators.random_state import isolated_randomness

LOOKED_AT, TWICE = 10_000, 256
"""Rows whose order is compared; rows that tell what each access draws anew. Both are spread evenly."""

INDICES = "Subset.indices"
_UNNOTICED = 2.0**-20  # most chance of another order to pass for the same one


def steady_parts(dataset: Any, rows: Sequence[int] | None = None) -> list[str] | None:
    """Names of what two accesses to a row agree on: columns, or places of a tuple.

    Beneath a `Subset` (one of another, too) they are of the rows that it selects from, of a
    `datasets.Dataset` there of what is stored; and the selection itself is one (`INDICES`), unless it
    is a range.

    Args:
      dataset: rows by number.
      rows: numbers of the rows that are meant; None for all.

    Returns:
      None where rows agree as a whole; [] where nothing does.
    """
    chosen = _spread(range(len(dataset)) if rows is None else rows, TWICE)
    with isolated_randomness():
        if list(_hashes(dataset, chosen)) == list(_hashes(dataset, chosen)):
            return None
        agreed = [
            {name for name, part in once.items() if again.get(name) == part}
            for once, again in zip(_parts(dataset, chosen), _parts(dataset, chosen), strict=True)
        ]
        places = _beneath(dataset, chosen)[1]
        numbers = [
            {name for name, part in row.items() if part == Hasher.hash(place)}
            for place, row in zip(places, _parts(dataset, chosen), strict=True)
        ]
    # a column that is the row's number says where a row stands, not which it is
    names = set[str].intersection(*agreed) - set[str].intersection(*numbers)
    if len({b - a for a, b in itertools.pairwise(places)}) < 2:
        names.discard(INDICES)
    return sorted(names)


def digest_of_rows(
    dataset: Any, key: bytes, rows: Sequence[int] | None = None, parts: Sequence[str] | None = None
) -> str:
    """SHA-256 (hex) of a secret key, the number of rows, and up to `LOOKED_AT` rows in their order.

    Args:
      dataset: rows by number; of a `datasets.Dataset` what is stored, before any transform.
      key: 32 bytes; without it the digest tells nothing of a row that can be guessed.
      rows: numbers of the rows that are meant; None for all.
      parts: of `steady_parts`, to digest these alone; None for whole rows.

    Returns:
      "" where the digest could not tell another order: rows are drawn anew at each access, or the parts
      are so much alike that more than one shuffle in 2^20 would leave them as they are.
    """
    chosen = range(len(dataset)) if rows is None else rows
    digest = hashlib.sha256(key + len(chosen).to_bytes(8, "little"))
    looked_at = _spread(chosen, LOOKED_AT)
    if parts is None and steady_parts(dataset, chosen) is not None:
        return ""
    with isolated_randomness():
        if parts is None:
            found = list(_hashes(dataset, looked_at))
        else:
            each = list(_parts(dataset, looked_at))
            found = ["|".join(row.get(name, "") for name in parts) for row in each]
            # the numbers that a Subset selects say nothing of what lies there
            own = ("|".join(row.get(name, "") for name in parts if name != INDICES) for row in each)
            alike = sum(math.lgamma(count + 1) for count in Counter(own).values())
            if alike and alike - math.lgamma(len(found) + 1) > math.log(_UNNOTICED):
                return ""
    digest.update("".join(found).encode())
    return digest.hexdigest()


def _spread(rows: Sequence[int], most: int) -> Sequence[int]:
    return rows[:: max(1, -(-len(rows) // most))]


def _hashes(dataset: Any, rows: Sequence[int]) -> Iterator[str]:
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.with_format(None)
    return (Hasher.hash(dataset[int(row)]) for row in rows)


def _beneath(dataset: Any, rows: Sequence[int]) -> tuple[Any, list[int]]:
    """The data set that `Subset`s select from, as it is stored, and the rows' numbers there."""
    places = [int(row) for row in rows]
    while isinstance(dataset, Subset):
        places, dataset = [int(dataset.indices[place]) for place in places], dataset.dataset
    stored = isinstance(dataset, datasets.Dataset)
    return (dataset.with_format(None) if stored else dataset), places


def _parts(dataset: Any, rows: Sequence[int]) -> Iterator[dict[str, str]]:
    """Hashes of what each row is made of, by name."""
    below, places = _beneath(dataset, rows)
    for place in places:
        row = below[place]
        if isinstance(row, (tuple, list)):
            row = dict(enumerate(row))
        parts = row.items() if hasattr(row, "items") else ()
        own = {INDICES: str(place)} if isinstance(dataset, Subset) else {}
        yield {**{str(name): Hasher.hash(part) for name, part in parts}, **own}
