"""No private row is evaluated: evaluation data is compared with the training set, row by row.

Metrics are published without noise, so they may not be computed from private rows. Rows are equal if the
texts and sequences are that both data sets have by the same name; labels, masks and row numbers are left
out, and so are single numbers, unless the rows are made of them. Public data may repeat a sentence that
is private too (SST-2's splits do), so equal content is refused from a share on: 5 %, or as often as
private rows repeat each other, if that is more often. Where several columns are compared, long ones are
also compared by themselves, because one of them may name rows; then most rows must match.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset
from transformers.utils import logging

from hf_dpzero.checks.data import LABEL_COLUMNS, unit_values
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.run import Dataset
from hf_dpzero.settings.row_groups import column_values

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
Columns = tuple[object, ...]
_SEQUENCES = (str, bytes, Sequence, Mapping, np.ndarray, torch.Tensor)

_REFUSAL = (
    "the evaluation data holds rows of train_dataset: evaluating on the private data would "
    "release un-noised statistics of it. Pass public or separately budgeted data."
)


class PrivateRows:
    """The training set, as evaluation data is compared with it; its digests are computed once.

    Args:
      dataset: the training set, or other private rows, or None.
      refusal: what is said of evaluation data that holds some of them.
      named: what they are called where a few are tolerated; None tolerates none.
      unit_column: no row of a unit is public either, where the evaluation data has the column too.
    """

    def __init__(
        self,
        dataset: object,
        refusal: str = _REFUSAL,
        named: str | None = "train_dataset",
        unit_column: str | None = None,
    ) -> None:
        self.dataset, self.refusal, self.named = _by_number(dataset), refusal, named
        self.unit_column = unit_column
        self._digests: dict[Columns, np.ndarray] = {}
        # objects are kept, not their ids: a later one could have the same
        self._passed: deque[tuple[object, int | None]] = deque(maxlen=16)

    def refuse(self, evaluation: object) -> None:
        """Refuses evaluation data that holds private rows; warns where a few may be chance.

        Neither the refusal nor the warning says how many of these rows there are, or which.

        Args:
          evaluation: a data set, a stream, a dictionary of them, or None. Of a stream the first 10,000
            rows are compared; of data sets that make their rows on access 20,000, spread evenly. What
            was compared once, as the same object of the same length, is not compared again.

        Raises:
          ValueError: it is the training set; or its rows have the content of private ones: all of them,
            or more than `SHARED`; or it can be read only once.
        """
        if isinstance(evaluation, Mapping):
            for part in evaluation.values():
                self.refuse(part)
            return
        if evaluation is None or self.dataset is None:  # then training is refused
            return
        rows = _by_number(evaluation)
        count = None if rows is None else len(rows)
        if any(evaluation is seen and count == then for seen, then in self._passed):
            return
        # what rows draw when they are read must not move the generators that training draws from
        with isolated_randomness():
            if rows is None:
                if not isinstance(evaluation, Iterable) or iter(evaluation) is evaluation:
                    raise ValueError(
                        f"the evaluation data is a {type(evaluation).__name__} that can be read only "
                        "once, so it cannot be compared with train_dataset: pass a list or a data set."
                    )
                rows = list(itertools.islice(evaluation, STREAMED))
            column = self.unit_column
            if column is not None and column_values(evaluation, column) is not None:
                refuse_units(self.dataset, evaluation, column, _REFUSAL, "the evaluation data")
            share = self._share(rows, self.dataset)
        if share > 0:
            logger.warning_once(  # of one data set: texts are compared, and then their tokens
                f"some of the {len(rows)} rows of the evaluation data also occur in {self.named}. That "
                "is sound where both come from public text that repeats itself; if they are private, "
                "remove them."
            )
        self._passed.append((evaluation, count))

    def _private(self, dataset: Dataset, columns: Columns) -> np.ndarray:
        if columns not in self._digests:
            self._digests[columns] = _digests(dataset, columns)
        return self._digests[columns]

    def _share(self, evaluation: Dataset, dataset: Dataset) -> float:
        """The share of evaluation rows with private content, if it is small enough.

        Raises:
          ValueError: it is not.
        """
        share = 0.0
        for columns, least in _comparable(dataset, evaluation):
            private = self._private(dataset, columns)
            if self.named is None:  # a whole row's columns alone: one of several may be a label
                if not least and np.isin(_digests(evaluation, columns), private).any():
                    raise ValueError(self.refusal)
                continue
            counts = np.unique(private, return_counts=True)[1]
            repeated = float(counts[counts > 1].sum() / max(1, len(private)))
            if counts.max(initial=0) <= COPIES:
                repeated = min(repeated, 0.5)
            if repeated > 0.5 or len(counts) < least * len(private):
                continue  # as labels do, or tokens of a tiny vocabulary: equal ones say little
            seen = _digests(evaluation, columns)
            found, part = int(np.isin(seen, private).sum()), len(private) / len(dataset)
            most = max(SHARED * part, repeated, least) * len(seen)
            if found and (found == len(seen) or found > max(1.0, most)):
                raise ValueError(self.refusal)
            share = max(share, found / max(1, len(seen)))
        if evaluation is dataset:  # whose rows may be other ones at each access
            raise ValueError(self.refusal)
        return share


def refuse_units(
    train: object, other: object, column: str, refusal: str, name: str = "the private rows"
) -> None:
    """Refuses rows of units that have training rows too.

    Raises:
      ValueError: there is one, or nobody can tell: the column is missing, or other types in each.
    """
    found = {*unit_values(other, column, name)}
    trained = {*unit_values(train, column, "the training rows")}
    if {type(unit) for unit in trained} != {type(unit) for unit in found}:
        raise ValueError(
            f"unit_column={column!r} holds other types in the training rows than in {name} "
            "(1001 and '1001' are two units): write both alike."
        )
    if not trained.isdisjoint(found):
        raise ValueError(f"unit_column={column!r}: of some unit {refusal}")


def _by_number(dataset: object) -> Dataset | None:
    """The data set, if its rows have numbers; None for what has not, such as streams."""
    if isinstance(dataset, (datasets.IterableDataset, IterableDataset)):
        return None
    return dataset if isinstance(dataset, Dataset) else None


def _comparable(one: Dataset, other: Dataset) -> list[tuple[Columns, float]]:
    """Columns by which rows of two data sets are compared, and a share below which they may be equal.

    Texts and sequences of the same names, together; where neither has any, single numbers.
    """
    inputs: list[dict[object, int]] = [{}, {}]
    for dataset, kinds in zip((one, other), inputs, strict=True):
        for row in _read(dataset, range(min(len(dataset), _LOOKED_AT))):
            for name, cell in row.items():
                kind = 0  # a single number; 2 for more than eight characters or four numbers
                if isinstance(cell, _SEQUENCES) and getattr(cell, "ndim", 1) > 0:
                    kind = 1 + (len(cell) > (8 if isinstance(cell, str) else 4))
                if name not in _NO_INPUT:
                    kinds[name] = max(kinds.get(name, 0), kind)
    shared = tuple(name for name in inputs[0] if name in inputs[1])
    if not any([*inputs[0].values(), *inputs[1].values()]):
        return [(shared, 0.0)] if shared else []
    sequences = tuple(n for n in shared if inputs[0][n] and inputs[1][n])
    # A column of names may differ in rows that are the same: long ones are compared by themselves too.
    long = [n for n in sequences if inputs[0][n] == inputs[1][n] == 2 and len(sequences) > 1]
    return [(sequences, 0.0), *[((name,), 0.5) for name in long]] if sequences else []


def _digests(dataset: Dataset, columns: Columns) -> np.ndarray:
    """A 64-bit digest of `columns` of each row, uint64 `[N]`."""
    digests = []
    rows: Sequence[int] = range(len(dataset))
    if not isinstance(dataset, (datasets.Dataset, Sequence)) and len(rows) > READ:
        # spread, because the first rows may all be of one source
        rows = np.linspace(0, len(rows) - 1, READ).astype(np.int64).tolist()
    for row in _read(dataset, rows, columns):
        digest = hashlib.blake2b(digest_size=8)
        for name in columns:
            content = _content(row.get(name))
            # the length too, so that cells that end elsewhere are other rows
            digest.update(len(content).to_bytes(8, "little") + content)
        digests.append(digest.digest())
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _read(
    dataset: Dataset, rows: Sequence[int], columns: Columns | None = None
) -> Iterator[Mapping[object, object]]:
    """Rows by column; of a `datasets.Dataset` as they are stored, without its format or transform."""
    if not isinstance(dataset, datasets.Dataset):
        for number in rows:
            row = dataset[number]
            if not isinstance(row, (Mapping, tuple, list)) and not hasattr(row, "ndim"):
                row = getattr(row, "__dict__", row)
            if isinstance(row, Mapping):
                yield row
            else:  # by position in a tuple, or as the one cell that it is
                yield dict(enumerate(row if isinstance(row, (tuple, list)) else [row]))
        return
    names = [name for name in dataset.column_names if columns is None or name in columns]
    # a transform may draw, and encodes images anew: what is stored is the row
    stored = dataset.with_format("arrow").select_columns(names).select(rows)
    for table in cast(Iterable[pa.Table], stored.iter(_BATCH)):
        cells = (table.column(name).to_pylist() for name in names)
        yield from (dict(zip(names, row, strict=True)) for row in zip(*cells, strict=True))


def _content(cell: object) -> bytes:
    """Equal for equal contents, whether they are stored as a list, an array or a tensor."""
    if isinstance(cell, torch.Tensor):
        cell = (cell.double() if cell.is_floating_point() else cell).detach().cpu().numpy()
    if isinstance(cell, (list, tuple, np.ndarray)):
        array = np.empty(0, dtype=object)
        with contextlib.suppress(ValueError):  # rows of different lengths
            array = np.asarray(cell)
        if array.size == 0 and array.dtype != object:  # an empty list has no dtype
            return b"i0"
        if array.dtype.kind in "biuf":
            real = array.dtype.kind == "f"
            with np.errstate(over="ignore"):  # copies are often of another precision
                values = array.astype(np.float32 if real else np.int64).tobytes()
            return f"{'f' if real else 'i'}{array.shape}".encode() + values
        cell = cell.tolist() if isinstance(cell, np.ndarray) else cell
    return json.dumps(cell, sort_keys=True, default=repr).encode()
