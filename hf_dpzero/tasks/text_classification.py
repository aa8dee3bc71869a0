"""Text classification on a user's own files or Hub data set."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import datasets
import numpy as np

from hf_dpzero.tasks.arguments import DataArguments
from hf_dpzero.tasks.description import TaskDescription
from hf_dpzero.tasks.prompted_classification import PromptedClassification, prompted_classification
from hf_dpzero.tasks.rows import column_of, load_splits, require_columns, require_texts, subset
from hf_dpzero.tasks.task import Task

_MAX_CLASSES = 1000
_KINDS = {"bool": "truth values", "class": "class labels", "integer": "integers", "text": "text"}


def build(data: DataArguments) -> Task | PromptedClassification:
    """A task from `train_file`/`validation_file` or `dataset_name`.

    Text is in `text_column` ("text") and, for pairs, `text_pair_column`; the label in
    `label_column` ("label"), integers from 0 or strings, named by `class_names` or by those of the
    validation rows. The set of label names is public.

    Raises:
      ValueError: missing columns or labels, labels that are not classes, or unlabelled rows.
      OSError: the data cannot be found.
    """
    return classification_task(data, "text_classification")


def classification_task(
    data: DataArguments, name: str, known: TaskDescription | None = None
) -> Task | PromptedClassification:
    """Loads, checks, labels and subsets the rows.

    A refusal never quotes a row: it is written into tables and logs that may be published.

    Args:
      data: the recipe's rows and columns; with `data.prompt` the rows become prompts.
      name: the task's.
      known: what is known of the task; None if the recipe or the data names the labels.

    Returns:
      The task with its rows, for a classification head or as prompts.

    Raises:
      ValueError: as `build`, and as `prompted_classification`.
      OSError: the data cannot be found.
    """
    if known and data.class_names is not None:
        raise ValueError(
            f"task {name!r} has labels of its own ({', '.join(known.label_names)}): leave class_names "
            "out, or use task: text_classification."
        )
    splits = load_splits(data, known.source if known else None)
    namings = list(known.fields.values()) if known else [("text",)]
    usual = [column_of(splits, several) for several in namings]
    second = [data.text_pair_column] if data.text_pair_column else usual[1:2]
    columns = (data.text_column or usual[0], *second, *usual[2:])
    label = data.label_column or column_of(splits, known.label_columns if known else ("label",))
    settings = dict(zip(columns, ("text_column", "text_pair_column"), strict=False))
    optional: list[str] = []
    if known and data.prompt:
        fields = zip(known.fields, columns, strict=False)
        optional = [column for field, column in fields if field in known.optional_fields]
    needed = [column for column in columns if column not in optional]
    require_columns(splits, [*needed, label], {**settings, label: "label_column"})
    if data.prompt is None:
        require_texts(splits, needed)
    if known and known.drop_unlabelled:  # the Hub marks rows without a label with -1
        for split, rows in splits.items():
            splits[split] = rows.select(np.flatnonzero(np.asarray(rows[label][:]) != -1))
    names = tuple(known.label_names if known else data.class_names or ())
    if not names:
        names = tuple(_read_label_names(splits, label))
        words = data.label_words
        if data.prompt and words is not None and len(words) != len(names):
            raise ValueError(
                f"label_words has {len(words)} words, and column {label!r} holds {len(names)} labels; "
                "give one each, and set class_names to the labels in this order."
            )
    kept = "labelled " if known and known.drop_unlabelled else ""
    labelled, feature = datasets.DatasetDict(), datasets.ClassLabel(names=list(names))
    values = _label_values(splits, label, names)
    for split, rows in splits.items():
        indices = _class_indices(values[split], label, names, f"{kept}{split} rows")
        stay = dict.fromkeys([*columns, *_kept(data, label)])
        texts = rows.select_columns([c for c in stay if c in rows.column_names])
        labelled[split] = texts.add_column("label", indices).cast_column("label", feature)
    task = Task(
        name=name,
        label_names=names,
        text_columns=columns,
        max_seq_length=data.max_seq_length,
        splits=subset(labelled, data),
        metric=known.metric if known else "accuracy",
    )
    if data.prompt is not None:
        own = TaskDescription(name=name, fields={c: (c,) for c in columns}, label_names=names)
        return prompted_classification(task, data, known or own)
    if len(columns) > 2:
        raise ValueError(
            f"task {name!r} has {len(columns)} texts ({', '.join(columns)}) and a classification head "
            "reads one or two: set prompt to masked_lm or causal_lm."
        )
    return task


def _kept(data: DataArguments, label: str) -> list[str]:
    """The further column that stays, where that is not the label itself."""
    column = data.keep_column
    if column == "label" != label:
        raise ValueError(
            f"keep_column (group_robust.column) 'label' beside label_column={label!r}, "
            "which is called 'label' "
            "here: rename one of the columns."
        )
    return [] if column in (None, "label") else [str(column)]


def _read_label_names(splits: datasets.DatasetDict, column: str) -> list[str]:
    """Names of the classes: those of the validation rows' column, or of its values.

    The sorted strings, or "0" ... for integers. They become public, so a training label that is not
    among them is refused, without naming it; so names that a training file brings along are not used.
    """
    named, public_names = {}, getattr(splits["validation"].features[column], "names", None)
    kinds = {_kind(rows.features[column], split, column) for split, rows in splits.items()}
    for split, rows in splits.items():
        plain = public_names is None and "text" not in kinds
        named[split] = set(rows.unique(column) if plain else _by_name(rows, column))
    public: Container[Any] = named["validation"]
    if public_names is not None:
        names, public = list(public_names), {*public_names, *range(len(public_names))}
        _refuse_unseen(named["train"], public, column)
        return names
    if kinds == {"bool"}:
        return ["false", "true"]
    if "text" in kinds and not kinds <= {"text", "class"}:
        said = " and ".join(_KINDS[kind] for kind in sorted(kinds))
        raise ValueError(
            f"column {column!r} holds {said} in one split and the other; write all labels alike."
        )
    if "text" in kinds:
        names = sorted(named["validation"])
    else:
        for split, labels in named.items():
            if min(labels) < 0:
                row = next(i for i, value in enumerate(splits[split][column][:], 1) if value < 0)
                raise ValueError(
                    f"row {row} of the {split} rows (counted from 1) has a negative integer in column "
                    f"{column!r}, which usually marks rows without a label; drop them or choose a "
                    "labelled split."
                )
        largest = min(_MAX_CLASSES, max(named["validation"]))  # one more than is supported
        names = [str(label) for label in range(largest + 1)]
        public = range(max(named["validation"]) + 1)
    _refuse_unseen(named["train"], public, column)
    if not 2 <= len(names) <= _MAX_CLASSES:
        many = len(names) if len(names) < 2 else f"more than {_MAX_CLASSES}"
        raise ValueError(
            f"column {column!r} of the validation rows holds {many} classes; 2 to {_MAX_CLASSES} are "
            "supported. Is it the label column? Set label_column."
        )
    return names


def _refuse_unseen(private: Iterable[Any], public: Container[Any], column: str) -> None:
    if not all(value in public for value in private):
        raise ValueError(
            f"column {column!r} of the train rows has labels that no validation row has. Names of "
            "labels become public (config.json holds them), and these would be read from private rows: "
            "set class_names to the names of all labels, in order. If it is not the label column, set "
            "label_column."
        )


def _by_name(rows: datasets.Dataset, column: str) -> list[Any]:
    """The values of a column; those of a class-label column as its names, -1 as it is."""
    feature, values = rows.features[column], rows[column][:]
    if not isinstance(feature, datasets.ClassLabel):
        return list(values)
    return [feature.names[value] if value >= 0 else value for value in values]


def _label_values(
    splits: datasets.DatasetDict, column: str, names: Sequence[str]
) -> dict[str, list[Any]]:
    """Labels of each split, to be found in `names`: class labels by their own names.

    Where none of these is in `names`, which then are other words for them, by their numbers.
    """
    features = [rows.features[column] for rows in splits.values()]
    own = {tuple(f.names) for f in features if isinstance(f, datasets.ClassLabel)}
    if any(set(found) & set(names) for found in own):
        return {split: _by_name(rows, column) for split, rows in splits.items()}
    if len(own) > 1:
        raise ValueError(
            f"column {column!r} has other class labels in the train than in the validation rows, so "
            "their numbers do not mean the same; give both files the same class labels, or text."
        )
    return {split: list(rows[column][:]) for split, rows in splits.items()}


def _kind(feature: Any, split: str, column: str) -> str:
    """What labels of a column are; a refusal names its type."""
    if isinstance(feature, datasets.ClassLabel):
        return "class"
    dtype = getattr(feature, "dtype", None) if isinstance(feature, datasets.Value) else "int64"
    if dtype == "bool":
        return "bool"
    if dtype in ("string", "large_string", "string_view"):
        return "text"
    is_class = isinstance(feature, datasets.Value)
    if is_class and str(dtype).startswith(("int", "uint")):
        return "integer"
    raise ValueError(
        f"column {column!r} of the {split} rows holds {dtype if is_class else type(feature).__name__} "
        "values; class labels are integers from 0, or strings."
    )


def _class_indices(
    values: Sequence[Any], column: str, names: Sequence[str], place: str
) -> np.ndarray:
    """Labels as indices into `names`, int64 `[N]`; `place` is what a refusal calls their rows."""
    index = {name: position for position, name in enumerate(names)}
    indices = []
    for row, value in enumerate(values, start=1):
        label = index.get(value) if isinstance(value, str) else value
        if (
            not isinstance(label, (int, float))
            or label != label // 1
            or not 0 <= label < len(names)
        ):
            what = f"a {type(value).__name__}"
            if isinstance(value, str):
                what = f"a text of {len(value)} characters"
            elif isinstance(value, int):
                what = "a negative integer" if value < 0 else "an integer"
            raise ValueError(
                f"row {row} of the {place} (counted from 1) has {what} in column "
                f"{column!r}, which is none of the {len(names)} classes ({', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}); correct or drop such rows, or for "
                "task: text_classification set class_names to all labels."
            )
        indices.append(int(label))
    return np.asarray(indices, dtype=np.int64)
