"""Text classification on a user's own files or Hub data set."""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import numpy as np

from hf_dpzero.recipe_arguments import DataArguments
from hf_dpzero.tasks.base import Task
from hf_dpzero.tasks.description import TaskDescription
from hf_dpzero.tasks.prompted_classification import PromptedClassification, prompted_classification
from hf_dpzero.tasks.sources import load_splits
from hf_dpzero.tasks.subsets import check_columns, column_of, subset

_MAX_CLASSES = 1000


def build(data: DataArguments) -> Task | PromptedClassification:
    """A task from `train_file`/`validation_file` or `dataset_name`.

    Text is in `text_column` ("text") and, for pairs, `text_pair_column`; the label in
    `label_column` ("label"), integers from 0 or strings. The set of label names is assumed public.

    Raises:
      ValueError: missing columns or labels, labels that are not classes, or unlabelled rows.
      OSError: the data cannot be found.
    """
    return classification_task(data, "text_classification")


def classification_task(
    data: DataArguments, name: str, known: TaskDescription | None = None
) -> Task | PromptedClassification:
    """Loads, checks, labels and subsets the rows; without `known`, the data names the labels.

    With `data.prompt` they become prompts; see `prompted_classification`.
    """
    splits = load_splits(data, known.source if known else None)
    columns, label = _text_columns(data, splits, known), _label_column(data, splits, known)
    check_columns(splits, _required(columns, known) if data.prompt else columns, label)
    if known and known.drop_unlabelled:
        splits = _labelled(splits, label)
    names = tuple(known.label_names if known else read_label_names(splits, label))
    task = Task(
        name=name,
        label_names=names,
        text_columns=columns,
        max_seq_length=data.max_seq_length,
        splits=subset(_with_class_labels(splits, columns, label, names), data),
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


def read_label_names(splits: datasets.DatasetDict, column: str) -> list[str]:
    """Names of the classes: the column's own, or the sorted strings, or "0" ... for integers.

    Raises:
      ValueError: fewer than two classes, negative integers, or labels that are not classes.
    """
    feature = splits["train"].features[column]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    values = sorted(set().union(*(rows.unique(column) for rows in splits.values())))
    if all(isinstance(value, bool) for value in values):
        return ["false", "true"]
    if all(isinstance(value, str) for value in values):
        return _checked_count(list(values), column)
    if not all(isinstance(value, int) for value in values):
        raise ValueError(
            f"column {column!r} holds {type(values[0]).__name__} values such as {values[0]!r}; "
            "class labels are integers from 0, or strings."
        )
    if values[0] < 0:
        raise ValueError(
            f"column {column!r} holds the label {values[0]}, which usually marks rows without a "
            "label; drop them or choose a labelled split."
        )
    return _checked_count([str(value) for value in range(values[-1] + 1)], column)


def _checked_count(names: list[str], column: str) -> list[str]:
    if not 2 <= len(names) <= _MAX_CLASSES:
        raise ValueError(
            f"column {column!r} holds {len(names)} classes; 2 to {_MAX_CLASSES} are supported. Is "
            "it the label column? Set label_column."
        )
    return names


def _with_class_labels(
    splits: datasets.DatasetDict, columns: Sequence[str], label: str, names: Sequence[str]
) -> datasets.DatasetDict:
    """Text columns and an integer column "label"; other columns are dropped."""
    feature = datasets.ClassLabel(names=list(names))
    return datasets.DatasetDict(
        {
            split: rows.select_columns([c for c in columns if c in rows.column_names])
            .add_column("label", _class_indices(rows, label, names))
            .cast_column("label", feature)
            for split, rows in splits.items()
        }
    )


def _class_indices(rows: datasets.Dataset, column: str, names: Sequence[str]) -> np.ndarray:
    """Labels as indices into `names`, int64 `[N]`.

    Raises:
      ValueError: a label outside the classes.
    """
    index = {name: position for position, name in enumerate(names)}
    values = rows[column][:]
    indices = [index.get(v, -1) if isinstance(v, str) else int(v) for v in values]
    wrong = [v for v, i in zip(values, indices, strict=True) if not 0 <= i < len(names)]
    if wrong:
        raise ValueError(
            f"column {column!r} holds the label {wrong[0]!r}, which is none of the {len(names)} "
            f"classes ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})."
        )
    return np.asarray(indices, dtype=np.int64)
