"""No private row is evaluated: evaluation data is compared with the training set, row by row.

Metrics are published without noise, so they may not be computed from private rows. Two things are looked
for: the same row of the same object or memory, however deeply it is wrapped, and rows of equal content.
Rows are equal if the texts and sequences are that both data sets have by the same name; labels, masks
and row numbers are left out, and so are single numbers, unless the rows are made of them. Data sets
without such a name in common are compared column by column. Public data may repeat a sentence that is
private too (SST-2's splits do), so equal content is refused from a share on: 5 %, or as often as private
rows repeat each other, if that is more often. Where several columns are compared, long ones are also
compared by themselves, because one of them may name rows; then most rows must match.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.fingerprint import Hasher
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from transformers.utils import logging

from hf_dpzero.checks.data import LABEL_COLUMNS
from hf_dpzero.estimators.random_state import isolated_randomness

logger = logging.get_logger(__name__)

SHARED = 0.05
"""Evaluation data is refused if more of its rows than this share, and more than one, are private; the
share of private rows that occur more than once, where that is larger."""

COPIES = 3
"""Rows that occur no more often than this are taken for copies: they do not end the comparison."""

STREAMED, READ = 10_000, 20_000
"""Rows compared of a stream (the first), and of a data set that makes its rows on access (spread)."""

_NO_INPUT = {
    *LABEL_COLUMNS,
    *("attention_mask", "decoder_attention_mask", "token_type_ids", "position_ids"),
    *("special_tokens_mask", "id", "idx", "index", "guid", "__index_level_0__"),
}
_BATCH, _LOOKED_AT = 1000, 16


class PrivateRows:
    """The training set, as evaluation data is compared with it; its digests are computed once.

    Args:
      dataset: the training set, or None.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._digests: dict[tuple[Any, ...], tuple[np.ndarray, float]] = {}
        self._passed: deque[tuple[Any, Any]] = deque(maxlen=16)

    def refuse(self, evaluation: Any) -> None:
        """Refuses evaluation data that holds private rows; warns where a few may be chance.

        Neither the refusal nor the warning says how many rows they are, or which.

        Args:
          evaluation: a data set, a stream, a dictionary of them, or None. Of a stream the first 10,000
            rows are compared; of data sets that make their rows on access 20,000, spread evenly. What
            was compared once, as the same object, of the same length, with the same few rows that are
            looked at, is not compared again.

        Raises:
          ValueError: it shows a row of the training set itself; or its rows have the content of private
            ones: all of them, or more than `SHARED`; or it can be read only once.
        """
        if isinstance(evaluation, Mapping):
            for part in evaluation.values():
                self.refuse(part)
            return
        if evaluation is None or _count(self.dataset) is None:  # then training is refused
            return
        state = (
            _count(evaluation),
            getattr(evaluation, "_fingerprint", None) or _glance(evaluation),
        )
        if any(evaluation is seen and state == then for seen, then in self._passed):
            return
        with isolated_randomness():
            share = self._share(evaluation)
        if share > 0:
            logger.warning(
                "some rows of the evaluation data also occur in train_dataset. That is sound where both "
                "come from public text that repeats itself; if they are private rows, remove them."
            )
        self._passed.append((evaluation, state))

    def _share(self, evaluation: Any) -> float:
        """The share of evaluation rows with private content, if it is small enough.

        Raises:
          ValueError: see `refuse`.
        """
        if _count(evaluation) is None:
            if iter(evaluation) is evaluation:
                raise ValueError(
                    f"the evaluation data is a {type(evaluation).__name__} that can be read only once, "
                    "so it cannot be compared with train_dataset: pass a list or a data set."
                )
            evaluation = list(itertools.islice(iter(evaluation), STREAMED))
        if _share_places(evaluation, self.dataset):
            raise ValueError(_REFUSAL)
        share = 0.0
        for own, other, least in _comparable(_inputs(self.dataset), _inputs(evaluation)):
            private, repeated = self._digests_of(own)
            if repeated > 0.5 or len(np.unique(private)) < least * len(private):
                continue  # as labels do, or tokens of a tiny vocabulary: equal ones say little
            seen = _digests(evaluation, other)
            found, part = int(np.isin(seen, private).sum()), len(private) / len(self.dataset)
            most = max(SHARED * part, repeated, least) * len(seen)
            if found and (found == len(seen) or found > max(1.0, most)):
                raise ValueError(_REFUSAL)
            share = max(share, found / max(1, len(seen)))
        return share

    def _digests_of(self, columns: tuple[Any, ...]) -> tuple[np.ndarray, float]:
        """The private rows' digests, and the share of rows that occur more than once."""
        if columns not in self._digests:
            digests = _digests(self.dataset, columns)
            counts = np.unique(digests, return_counts=True)[1]
            repeated = float(counts[counts > 1].sum() / max(1, len(digests)))
            if counts.max(initial=0) <= COPIES:
                repeated = min(repeated, 0.5)
            self._digests[columns] = digests, repeated
        return self._digests[columns]


def _glance(evaluation: Any) -> str:
    """A digest of a few rows of a data set without a fingerprint: it may hold others by now."""
    count = _count(evaluation) or 0
    chosen = (
        sorted({i * (count - 1) // (_LOOKED_AT - 1) for i in range(_LOOKED_AT)}) if count else []
    )
    with isolated_randomness():
        return str(Hasher.hash([evaluation[i] for i in chosen]))


_REFUSAL = (
    "the evaluation data holds rows of train_dataset: evaluating on the private data would "
    "release un-noised statistics of it. Pass public or separately budgeted data."
)


def _count(dataset: Any) -> int | None:
    """The number of rows; None for what has no rows by number, such as streams."""
    if isinstance(dataset, (datasets.IterableDataset, IterableDataset)):
        return None
    has_rows = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return len(dataset) if has_rows else None


def _leaves(dataset: Any, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """The data sets under subsets and concatenations, and which of their rows are shown."""
    if isinstance(dataset, Subset):
        yield from _leaves(dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)[rows])
    elif isinstance(dataset, ConcatDataset):
        starts = [0, *dataset.cumulative_sizes]
        for part, start, stop in zip(dataset.datasets, starts, starts[1:], strict=False):
            yield from _leaves(part, rows[(rows >= start) & (rows < stop)] - start)
    else:
        yield dataset, rows


def _places(dataset: Any) -> dict[Any, list[np.ndarray]]:
    """Object, or address of memory -> positions in it that the data set shows.

    Selections, splits, shuffles and column views of a `datasets.Dataset` share its buffers.
    """
    places: dict[Any, list[np.ndarray]] = defaultdict(list)
    for leaf, shown in _leaves(dataset, np.arange(len(dataset))):
        if isinstance(leaf, Sequence):  # dictionaries are the same row; numbers and texts may recur
            found = (leaf[i] for i in shown)
            places["objects"].append(np.array([id(r) for r in found if isinstance(r, dict)], int))
        elif isinstance(leaf, datasets.Dataset):
            for address, positions in _in_memory(leaf, shown):
                places[address].append(positions)
        else:
            places[id(leaf)].append(shown)
    return places


def _in_memory(dataset: datasets.Dataset, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(address of a buffer, positions of the rows in it), for each column's chunks."""
    if dataset._indices is not None:
        rows = dataset._indices.column(0).to_numpy()[rows]
    rows = np.sort(rows)
    for column in dataset.data.table.columns:
        start = 0
        for chunk in column.chunks:
            first, last = np.searchsorted(rows, (start, start + len(chunk)))
            address = next((b.address for b in reversed(chunk.buffers()) if b and b.size), None)
            if address is not None and first < last:
                yield address, rows[first:last] - start + chunk.offset
            start += len(chunk)


def _share_places(first: Any, second: Any) -> bool:
    mine, theirs = _places(first), _places(second)
    return any(
        np.isin(np.concatenate(mine[key]), np.concatenate(theirs[key])).any()
        for key in mine.keys() & theirs.keys()
    )


def _inputs(dataset: Any) -> dict[Any, int]:
    """Columns without labels, masks and row numbers: 0 for single numbers, 1 for texts or sequences.

    2 for long ones, of more than eight characters or four numbers.
    """
    inputs: dict[Any, int] = {}
    for leaf, shown in _leaves(dataset, np.arange(len(dataset))):
        for row in _read(leaf, shown[:_LOOKED_AT]):
            for name, cell in row.items():
                if name not in _NO_INPUT:
                    inputs[name] = max(inputs.get(name, 0), _is_sequence(cell) + _is_long(cell))
    return inputs


def _is_sequence(cell: Any) -> bool:
    return isinstance(cell, (str, bytes, Sequence, Mapping)) or getattr(cell, "ndim", 0) > 0


def _is_long(cell: Any) -> bool:
    least = 8 if isinstance(cell, str) else 4
    return _is_sequence(cell) and hasattr(cell, "__len__") and len(cell) > least


def _comparable(
    own: Mapping[Any, int], other: Mapping[Any, int]
) -> list[tuple[tuple[Any, ...], tuple[Any, ...], float]]:
    """Columns of the private rows, those that may equal them, and a share below which they may.

    Texts and sequences of the same names, together; each with each; where neither has any, single
    numbers of the same names.
    """
    sequences = [[name for name in names if names[name]] for names in (own, other)]
    common = tuple(name for name in sequences[0] if name in sequences[1])
    if not any(sequences):
        common = tuple(name for name in own if name in other)
    crossed = [(a, b) for a in sequences[0] for b in sequences[1]]
    if not common:
        return [((a,), (b,), 0.0) for a, b in crossed]
    # A column of names may differ in rows that are the same: long ones are compared by themselves too.
    long = [((a,), (b,), 0.5) for a, b in crossed if own[a] == other[b] == 2]
    return [(common, common, 0.0), *(long if len(crossed) > 1 else ())]


def _digests(dataset: Any, columns: tuple[Any, ...]) -> np.ndarray:
    """A 64-bit digest of each row's `columns`, uint64 `[N]`."""
    digests = []
    for leaf, shown in _leaves(dataset, np.arange(len(dataset))):
        if not isinstance(leaf, (datasets.Dataset, Sequence)) and len(shown) > READ:
            shown = shown[np.linspace(0, len(shown) - 1, READ).astype(np.int64)]
        for row in _read(leaf, shown, columns):
            digest = hashlib.blake2b(digest_size=8)
            for name in columns:
                content = _content(row.get(name))
                digest.update(len(content).to_bytes(8, "little") + content)
            digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _read(
    leaf: Any, rows: np.ndarray, columns: tuple[Any, ...] | None = None
) -> Iterable[Mapping[Any, Any]]:
    """Rows by column; of a `datasets.Dataset` as they are stored, without its format or transform."""
    if not isinstance(leaf, datasets.Dataset):
        yield from (_fields(leaf[int(row)]) for row in rows)
        return
    names = [n for n in leaf.column_names if columns is None or n in columns]
    if not names:
        yield from ({} for _ in rows)
        return
    stored = leaf.with_format("arrow").select_columns(names)
    if len(rows) != len(leaf) or not np.array_equal(rows, np.arange(len(leaf))):
        stored = stored.select(rows)
    for batch in stored.iter(_BATCH):
        table: pa.Table = batch
        columns_of = [_cells(table.column(name)) for name in names]
        yield from (dict(zip(names, row, strict=True)) for row in zip(*columns_of, strict=True))


def _cells(column: pa.ChunkedArray) -> Sequence[Any]:
    """A column's cells; lists of numbers as arrays, which takes a tenth of the time of lists."""
    kind, numbers = column.type, False
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = kind.value_type
        numbers = pa.types.is_integer(inner) or pa.types.is_floating(inner)
    if not numbers or column.null_count:
        return list(column.to_pylist())
    cells: list[Any] = []
    for chunk in column.chunks:
        values, offsets = chunk.flatten(), chunk.offsets.to_numpy()
        if values.null_count:
            return list(column.to_pylist())
        array, starts = values.to_numpy(), (offsets - offsets[0]).tolist()
        cells += [array[start:stop] for start, stop in itertools.pairwise(starts)]
    return cells


def _fields(row: Any) -> Mapping[Any, Any]:
    """A row's cells by name, by position in a tuple, or as the one cell that it is."""
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "_asdict"):
        return dict(row._asdict())
    if isinstance(row, (tuple, list)):
        return dict(enumerate(row))
    return dict(vars(row)) if hasattr(row, "__dict__") and not hasattr(row, "ndim") else {0: row}


def _content(cell: Any) -> bytes:
    """Equal for equal contents, whether they are stored as a list, an array or a tensor."""
    if isinstance(cell, str):
        return b"s" + cell.encode("utf-8", "surrogatepass")
    if isinstance(cell, torch.Tensor):
        cell = cell.detach().cpu()
        cell = (cell.double() if cell.is_floating_point() else cell).numpy()
    if isinstance(cell, (list, tuple, np.ndarray)):
        try:
            array = np.asarray(cell)
        except ValueError:  # rows of different lengths
            array = np.empty(0, dtype=object)
        if array.dtype.kind != "O" and not array.size:
            return b"empty"
        shape = b"" if array.ndim == 1 else repr(array.shape).encode()
        if array.dtype.kind in "biu":
            return b"i" + shape + array.astype(np.int64).tobytes()
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):  # copies are often of another precision
                return b"f" + shape + array.astype(np.float32).tobytes()
        cell = cell.tolist() if isinstance(cell, np.ndarray) else cell
    return b"j" + json.dumps(cell, sort_keys=True, default=repr).encode()
