"""Text classification on a user's own files or Hub data set."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np

from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.tasks.description import TaskDescription
from hf_dpzero.tasks.prompted_classification import PromptedClassification, prompted_classification
from hf_dpzero.tasks.rows import load_splits
from hf_dpzero.tasks.subsets import check_columns, column_of, subset
from hf_dpzero.tasks.task import Task

logger = logging.getLogger(__name__)

_MAX_CLASSES = 1000
_KINDS = {"bool": "truth values", "integer": "integers", "text": "text"}


def build(data: DataArguments) -> Task | PromptedClassification:
    """A task from `train_file`/`validation_file` or `dataset_name`.

    Text is in `text_column` ("text") and, for pairs, `text_pair_column`; the label in
    `label_column` ("label"), integers from 0 or strings, named by `class_names` or by themselves. The
    set of label names is assumed public.

    Raises:
      ValueError: missing columns or labels, labels that are not classes, or unlabelled rows.
      OSError: the data cannot be found.
    """
    return classification_task(data, "text_classification")


def classification_task(
    data: DataArguments, name: str, known: TaskDescription | None = None
) -> Task | PromptedClassification:
    """Loads, checks, labels and subsets the rows; without `known`, recipe or data name the labels.

    With `data.prompt` they become prompts; see `prompted_classification`. What is refused is never
    quoted from a row: refusals are written into tables and logs.
    """
    _check_names(data, name, known)
    splits = load_splits(data, known.source if known else None)
    columns, label = _text_columns(data, splits, known), _label_column(data, splits, known)
    check_columns(splits, _required(columns, known) if data.prompt else columns, label)
    if known and known.drop_unlabelled:
        splits = _labelled(splits, label)
    names = tuple(known.label_names if known else data.class_names or _read(splits, label, data))
    task = Task(
        name=name,
        label_names=names,
        text_columns=columns,
        max_seq_length=data.max_seq_length,
        splits=subset(_with_class_labels(splits, columns, label, names, known), data),
        metric=known.metric if known else "accuracy",
    )
    if data.prompt is None:
        return _with_a_head(task)
    return prompted_classification(task, data, known or described(task))


def _required(columns: tuple[str, ...], known: TaskDescription | None) -> list[str]:
    """The columns of the fields that a prompt cannot do without."""
    fields = dict(zip(known.fields, columns, strict=False)) if known else {}
    optional = [fields[name] for name in known.optional_fields] if known else []
    return [column for column in columns if column not in optional]


def described(task: Task) -> TaskDescription:
    """A task that only its data describes: its columns are its fields."""
    return TaskDescription(
        name=task.name,
        fields={column: (column,) for column in task.text_columns},
        label_names=task.label_names,
        metric=task.metric,
    )


def _with_a_head(task: Task) -> Task:
    if len(task.text_columns) > 2:
        raise ValueError(
            f"task {task.name!r} has {len(task.text_columns)} texts ({', '.join(task.text_columns)}) "
            "and a classification head reads one or two: set prompt to masked_lm or causal_lm."
        )
    return task


def _text_columns(
    data: DataArguments, splits: datasets.DatasetDict, known: TaskDescription | None
) -> tuple[str, ...]:
    """The settings' columns; where they are silent, the first known naming that is there."""
    namings = list(known.fields.values()) if known else [("text",)]
    usual = [column_of(splits, names) for names in namings]
    first = data.text_column or usual[0]
    second = [data.text_pair_column] if data.text_pair_column else usual[1:2]
    return (first, *second, *usual[2:])


def _label_column(
    data: DataArguments, splits: datasets.DatasetDict, known: TaskDescription | None
) -> str:
    namings = known.label_columns if known else ("label",)
    return data.label_column or column_of(splits, namings)


def _labelled(splits: datasets.DatasetDict, column: str) -> datasets.DatasetDict:
    """The rows whose label is not -1, which is how the Hub marks those without one."""
    kept = {
        split: rows.select(np.flatnonzero(np.asarray(rows[column][:]) != -1))
        for split, rows in splits.items()
    }
    return datasets.DatasetDict(kept)


def _check_names(data: DataArguments, name: str, known: TaskDescription | None) -> None:
    if known and data.class_names is not None:
        raise ValueError(
            f"task {name!r} has labels of its own ({', '.join(known.label_names)}): leave class_names "
            "out, or use task: text_classification."
        )


def _read(splits: datasets.DatasetDict, column: str, data: DataArguments) -> list[str]:
    """`read_label_names`, where a prompt has a word for each.

    Raises:
      ValueError: as there; or another number of words, which is said without the names.
    """
    names, words = read_label_names(splits, column), data.label_words
    if data.prompt is not None and words is not None and len(words) != len(names):
        raise ValueError(
            f"label_words has {len(words)} words, and column {column!r} holds {len(names)} labels; give "
            "one each, and set class_names to the labels in this order."
        )
    return names


def read_label_names(splits: datasets.DatasetDict, column: str) -> list[str]:
    """Names of the classes: the column's own, or the sorted strings, or "0" ... for integers.

    They become public. Where the private rows have labels that no public row has, this is said in a
    warning that does not name them.

    Raises:
      ValueError: fewer than two classes, negative integers, or labels that are not classes.
    """
    feature = splits["train"].features[column]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    kinds = {_kind(rows.features[column], split, column) for split, rows in splits.items()}
    if kinds == {"bool"}:
        return ["false", "true"]
    if "text" in kinds and len(kinds) > 1:
        said = " and ".join(_KINDS[kind] for kind in sorted(kinds))
        raise ValueError(
            f"column {column!r} holds {said} in one split and the other; write all labels alike."
        )
    values = {split: set(rows.unique(column)) for split, rows in splits.items()}
    names = _strings(values, column) if kinds == {"text"} else _integers(splits, values, column)
    public = values["validation"] if kinds == {"text"} else {*range(max(values["validation"]) + 1)}
    if not values["train"] <= public:
        logger.warning(
            "The set of label names is read from the private rows, for the validation rows do not "
            "have all labels of column %r: it becomes public (config.json holds it). Set class_names "
            "to names that do not come from the rows.",
            column,
        )
    return names


def _kind(feature: Any, split: str, column: str) -> str:
    """What labels of a column are; a refusal names its type."""
    dtype = getattr(feature, "dtype", None) if isinstance(feature, datasets.Value) else "int64"
    if dtype == "bool":
        return "bool"
    if dtype in ("string", "large_string", "string_view"):
        return "text"
    is_class = isinstance(feature, (datasets.Value, datasets.ClassLabel))
    if is_class and str(dtype).startswith(("int", "uint")):
        return "integer"
    raise ValueError(
        f"column {column!r} of the {split} rows holds {dtype if is_class else type(feature).__name__} "
        "values; class labels are integers from 0, or strings."
    )


def _strings(values: Mapping[str, set[str]], column: str) -> list[str]:
    found = sorted(set().union(*values.values()))
    _check_count(len(found), column)
    return found


def _integers(
    splits: datasets.DatasetDict, values: Mapping[str, set[int]], column: str
) -> list[str]:
    """ "0" to the largest label."""
    for split, found in values.items():
        if min(found) < 0:
            row = next(i for i, value in enumerate(splits[split][column][:], 1) if value < 0)
            raise ValueError(
                f"row {row} of the {split} rows (counted from 1) has a negative integer in column "
                f"{column!r}, which usually marks rows without a label; drop them or choose a "
                "labelled split."
            )
    count = 1 + max(max(found) for found in values.values())
    _check_count(count, column)
    return [str(label) for label in range(count)]


def _check_count(count: int, column: str) -> None:
    if not 2 <= count <= _MAX_CLASSES:
        found = f"{count}" if count < 2 else f"more than {_MAX_CLASSES}"
        raise ValueError(
            f"column {column!r} holds {found} classes; 2 to {_MAX_CLASSES} are supported. Is "
            "it the label column? Set label_column."
        )


def _with_class_labels(
    splits: datasets.DatasetDict,
    columns: Sequence[str],
    label: str,
    names: Sequence[str],
    known: TaskDescription | None,
) -> datasets.DatasetDict:
    """Text columns and an integer column "label"; other columns are dropped."""
    feature = datasets.ClassLabel(names=list(names))
    kept = "labelled " if known and known.drop_unlabelled else ""
    return datasets.DatasetDict(
        {
            split: rows.select_columns([c for c in columns if c in rows.column_names])
            .add_column("label", _class_indices(rows, label, names, f"{kept}{split} rows"))
            .cast_column("label", feature)
            for split, rows in splits.items()
        }
    )


def _class_indices(
    rows: datasets.Dataset, column: str, names: Sequence[str], place: str
) -> np.ndarray:
    """Labels as indices into `names`, int64 `[N]`; `place` is what a refusal calls the rows.

    Raises:
      ValueError: a label outside the classes; names its row and says of what kind it is.
    """
    index = {name: position for position, name in enumerate(names)}
    values = rows[column][:]
    indices = [_class_index(value, index) for value in values]
    if None in indices:
        row = indices.index(None)
        raise ValueError(
            f"row {row + 1} of the {place} (counted from 1) has {_described(values[row])} in column "
            f"{column!r}, which is none of the {len(names)} classes ({', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}); correct or drop such rows, or for "
            "task: text_classification set class_names to all labels."
        )
    return np.asarray(indices, dtype=np.int64)


def _class_index(value: Any, index: Mapping[str, int]) -> int | None:
    """The class of a name or a whole number; None for everything else."""
    if isinstance(value, str):
        return index.get(value)
    if not isinstance(value, (int, float)) or value != value // 1:
        return None
    return int(value) if 0 <= value < len(index) else None


def _described(value: Any) -> str:
    """A label's kind, without what it says."""
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    if isinstance(value, int):
        return "a negative integer" if value < 0 else "an integer"
    return f"a {type(value).__name__}"
