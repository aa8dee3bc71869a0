"""Whether rows are the same, in the same order, as when a run began: for accounts that number them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
from datasets.fingerprint import Hasher

from hf_dpzero.training.random_state import isolated_randomness

LOOKED_AT, TWICE = 10_000, 4
"""Rows whose order is compared, spread evenly; rows that tell whether each access draws them anew."""


def digest_of_rows(dataset: Any, key: bytes, rows: Sequence[int] | None = None) -> str:
    """SHA-256 (hex) of a secret key, the number of rows, and up to `LOOKED_AT` rows in their order.

    Args:
      dataset: rows by number; of a `datasets.Dataset` what is stored, before any transform.
      key: 32 bytes; without it the digest tells nothing of a row that can be guessed.
      rows: numbers of the rows that are meant; None for all.

    Returns:
      "" where rows are drawn anew at each access, so that nothing can be compared.
    """
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.with_format(None)
    chosen = range(len(dataset)) if rows is None else rows
    digest = hashlib.sha256(key + len(chosen).to_bytes(8, "little"))
    step = max(1, -(-len(chosen) // LOOKED_AT))
    with isolated_randomness():
        first = chosen[:TWICE]
        if list(_hashes(dataset, first)) != list(_hashes(dataset, first)):
            return ""
        for row in _hashes(dataset, chosen[::step]):
            digest.update(row.encode())
    return digest.hexdigest()


def _hashes(dataset: Any, rows: Sequence[int]) -> Iterator[str]:
    return (Hasher.hash(dataset[int(row)]) for row in rows)
