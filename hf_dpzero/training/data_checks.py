"""Checks of the training data before step 0, and of evaluation data: no private row is evaluated."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import Subset

LABEL_COLUMNS = ("labels", "label", "label_ids", "start_positions", "decoder_input_ids")


def num_examples(dataset: Any) -> int:
    """n, which the privacy plan is computed from.

    Raises:
      ValueError: no data set, one without a length, or an empty one.
    """
    if dataset is None:
        raise ValueError("train_dataset is None: the privacy plan needs the training data's size.")
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__} without length or random access: a "
            "streamed data set cannot be sampled as the plan accounts; load it as a map-style one."
        )
    if len(dataset) == 0:
        raise ValueError("train_dataset is empty.")
    return len(dataset)


def check_labels(dataset: Any) -> None:
    """Refuses a data set whose columns hold no labels (needs `column_names`; else looks at row 0)."""
    columns = getattr(dataset, "column_names", None)
    if not columns:
        columns = list(dataset[0]) if hasattr(dataset[0], "keys") else None
    if columns is not None and not set(columns) & set(LABEL_COLUMNS):
        raise ValueError(
            f"train_dataset has columns {sorted(columns)} but no labels: name the label column "
            "'labels', or pass compute_per_example_loss."
        )


def refuse_training_rows(dataset: Any, private: Any) -> None:
    """Refuses evaluation on rows of the training set: the metrics would be un-noised releases.

    Recognised: the data set itself, views of it (`datasets` selections, `torch.utils.data.Subset`)
    that share a row, and a data set with the same fingerprint. A copy made elsewhere is not.

    Args:
      dataset: for evaluation, or None.
      private: the training set, or None.

    Raises:
      ValueError: `dataset` shares rows with `private`.
    """
    if dataset is None or private is None or not _shares_rows(dataset, private):
        return
    raise ValueError(
        "the evaluation data holds rows of train_dataset: evaluating on the private data would "
        "release un-noised statistics of it. Pass public or separately budgeted data."
    )


def _shares_rows(dataset: Any, private: Any) -> bool:
    same_print = getattr(dataset, "_fingerprint", None), getattr(private, "_fingerprint", None)
    if dataset is private or (same_print[0] is not None and same_print[0] == same_print[1]):
        return True
    if isinstance(dataset, Subset) or isinstance(private, Subset):
        return _subsets_overlap(dataset, private)
    if hasattr(dataset, "_data") and hasattr(private, "_data"):
        return not _places(dataset).isdisjoint(_places(private))
    return False


def _subsets_overlap(first: Any, second: Any) -> bool:
    """Whether `torch.utils.data.Subset` views of one data set show a row in common."""
    (source, rows), (other, other_rows) = (
        (d.dataset, set(d.indices)) if isinstance(d, Subset) else (d, None) for d in (first, second)
    )
    if source is not other:
        return False
    return rows is None or other_rows is None or not rows.isdisjoint(other_rows)


def _places(dataset: Any) -> set[tuple[int, int]]:
    """Where in memory a `datasets.Dataset` keeps each of its rows: (buffer address, position).

    Selections, splits and shuffles of one table share its buffers.
    """
    chunks = dataset._data.table.column(0).chunks if dataset._data.num_columns else []
    places = [
        (next((b.address for b in reversed(chunk.buffers()) if b), 0), chunk.offset + i)
        for chunk in chunks
        for i in range(len(chunk))
    ]
    if dataset._indices is None:
        return set(places)
    return {places[i] for i in dataset._indices.table.column(0).to_pylist()}
