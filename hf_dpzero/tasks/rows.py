"""A task's rows: from local files or the Hub, with the columns that must be there, subsets by a seed."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import filecmp
import hashlib
import heapq
import io
import itertools
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from hf_dpzero.tasks.description import DataArguments, HubSource

_READERS = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
}  # fmt: skip


_UNLIKE = "its rows do not have the same columns"
TEXT_TYPES = ("string", "large_string", "string_view")


def load_splits(data: DataArguments, source: HubSource | None) -> datasets.DatasetDict:
    """Loads the raw "train" and "validation" rows: local files if given, else the Hub.

    Args:
      data: the recipe's files, or `dataset_name`, which replaces the task's own source altogether.
      source: the task's own; None if it has none.

    Returns:
      Both splits, whole, with all their columns; "train" alone of a train_file with `holdout`.

    Raises:
      ValueError: only one of the two files, no source at all, or a missing split.
      FileNotFoundError: a file that is not there.
      OSError: the Hub data set is neither cached nor reachable; names the command that fetches it.
    """
    if data.train_file or data.validation_file:
        if data.holdout and data.train_file and not data.validation_file:  # no public rows
            parts = read_alike(files_of(data.train_file))
            return datasets.DatasetDict(train=datasets.concatenate_datasets(parts))
        return _load_files(data.train_file, data.validation_file)
    if data.dataset_name is not None:
        source = HubSource(data.dataset_name, data.dataset_config_name)
    elif source is not None and data.dataset_config_name is not None:
        source = dataclasses.replace(source, config=data.dataset_config_name)
    if source is None:
        raise ValueError(
            f"task={data.task!r} has no data of its own: set train_file and validation_file "
            "(.jsonl, .csv, .tsv or .parquet), or dataset_name."
        )
    return _load_hub(source)


def with_private_rows(splits: datasets.DatasetDict, file: str | None) -> datasets.DatasetDict:
    """Adds the split "private", in place, of a file of rows that are to be evaluated with noise."""
    if file is not None:
        splits["private"] = read_rows(Path(file))
    return splits


def _load_files(train: str | None, validation: str | None) -> datasets.DatasetDict:
    if train is None or validation is None:
        absent = "train_file" if train is None else "validation_file"
        raise ValueError(
            f"{absent} is not set: give both train_file (private rows) and validation_file (rows that "
            "are public, or whose privacy is paid for elsewhere). Without public rows set holdout: 0.1, "
            "and class_names."
        )
    public = Path(validation)
    for private in (files := files_of(train)):
        both = private.is_file() and public.is_file()
        # Not shallow: a copy has another time, and files of one size and time may differ.
        if both and filecmp.cmp(private, public, shallow=False):
            raise ValueError(
                f"validation_file={validation!r} is "
                f"{'' if private.samefile(public) else 'a copy of '}the train_file: metrics on the "
                "private rows would be published without noise. Evaluate on rows that are public, or "
                "whose privacy is paid for elsewhere."
            )
    rows = datasets.concatenate_datasets(read_alike(files))
    return datasets.DatasetDict(train=rows, validation=read_rows(public))


def files_of(train_file: str) -> list[Path]:
    """The files of `train_file`: one, or a federation's, with the system's `os.pathsep` between them."""
    whole = Path(train_file)
    return [whole] if whole.exists() else list(map(Path, train_file.split(os.pathsep)))


def read_alike(files: Sequence[Path]) -> list[datasets.Dataset]:
    """Reads files whose columns agree.

    Raises:
      ValueError: one whose columns, or their types, are others than the first one's; or see `read_rows`.
    """
    parts = [read_rows(file) for file in files]

    def kinds(rows: datasets.Dataset) -> str:
        named = sorted((name, getattr(kind, "dtype", kind)) for name, kind in rows.features.items())
        return ", ".join(f"{name} ({kind})" for name, kind in named)

    for file, rows in zip(files, parts, strict=True):
        if kinds(rows) != kinds(parts[0]):
            raise ValueError(
                f"{file} has the columns {kinds(rows)}, and {files[0]} has {kinds(parts[0])}: give all "
                "files the same names and kinds of values."
            )
    return [parts[0], *(rows.select_columns(parts[0].column_names) for rows in parts[1:])]


def read_rows(path: Path) -> datasets.Dataset:
    """Reads the rows of a local file.

    Raises:
      ValueError: another kind of file, a column's name twice, one that cannot be parsed, or without
        rows; quotes no row.
      FileNotFoundError: no such file.
      IsADirectoryError: a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a folder; give one file of rows ({', '.join(_READERS)})."
        )
    kind = _READERS.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"{path}: rows are read from {', '.join(_READERS)} files.")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} not found (paths are relative to {Path.cwd()}); give a file of rows as "
            "train_file or validation_file."
        )
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; it needs at least one row.")
    _check_before(path, kind)
    tabs = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
    files, verbosity = {"rows": str(path)}, datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would quote rows
    try:
        rows = datasets.load_dataset(kind, data_files=files, split="rows", **tabs)
    except (datasets.exceptions.DatasetGenerationError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read as {kind} rows: {_broken(path, kind)}; mend or remove the row."
        ) from error
    finally:
        datasets.logging.set_verbosity(verbosity)
    if not len(rows) or not rows.column_names:
        raise ValueError(f"{path} has no rows; it needs at least one.")
    return rows


def _check_before(path: Path, kind: str) -> None:
    """Refuses what `datasets` would read and get wrong.

    Raises:
      ValueError: JSON in another encoding, which fails where a row is looked at, and quotes it; a CSV
        header with one name twice, of which only the first column is read; or a header alone.
    """
    if kind == "csv":
        with (
            contextlib.suppress(UnicodeDecodeError),
            path.open(encoding="utf-8-sig", newline="") as file,
        ):
            lines = csv.reader(file, delimiter=_delimiter(path))
            names = next(lines, [])
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(
                    f"{path}: line 1 names the column {twice[0]!r} more than once; rename or drop one."
                )
            if any(names) and not any(lines):
                raise ValueError(
                    f"{path} has no rows: line 1 names the columns, and no line follows."
                )
    with path.open("rb") as file:
        if kind == "json" and file.peek(2)[:2] != b"\x1f\x8b":  # those of a compressed file
            for number, line in enumerate(file, start=1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError:
                    raise ValueError(
                        f"{path}: line {number} is not UTF-8 text; save the file as UTF-8."
                    ) from None


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _broken(path: Path, kind: str) -> str:
    """Where a file is broken, without its text, which may be private."""
    if kind == "parquet":
        return "it is not a Parquet file"
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"line {content[: error.start].count(10) + 1} is not UTF-8 text (save it as UTF-8)"
    if not text.strip():
        return "it holds only white space"
    if kind == "csv":
        reader = csv.reader(io.StringIO(text), delimiter=_delimiter(path))
        columns = len(next(reader))
        if any(len(row) > columns for row in reader):  # it stops at the line
            return f"line {reader.line_num} has more values than there are columns"
        return _UNLIKE
    if path.suffix.lower() == ".json":
        with contextlib.suppress(json.JSONDecodeError):  # a list of objects, or one object a line
            json.loads(text)
            return _UNLIKE
    whole = path.suffix.lower() == ".json" and text.lstrip()[0] == "["
    try:
        for number, line in enumerate([text] if whole else text.split("\n"), start=1):
            if not isinstance(json.loads(line.strip() or "{}"), list if whole else dict):
                return f"line {number} is no JSON object {{column: value}}"
    except json.JSONDecodeError as error:
        return f"line {error.lineno if whole else number} is not JSON"
    return _UNLIKE


def _load_hub(source: HubSource) -> datasets.DatasetDict:
    try:
        loaded = datasets.load_dataset(source.name, source.config, revision=source.revision)
    except (ConnectionError, FileNotFoundError) as error:
        revision = f" --revision {source.revision}" if source.revision else ""
        raise OSError(
            f"data set {source.name!r} is neither cached nor reachable ({type(error).__name__}); "
            f"fetch it once with `hf download {source.name} --repo-type dataset{revision}`, or set "
            "train_file and validation_file to local files."
        ) from error
    # "test" stands in where nothing was named: of some data sets "validation" does not exist.
    held_out = source.validation
    if held_out == "train":
        raise ValueError(
            f"data set {source.name!r} would be evaluated on its split 'train', which holds the private "
            "rows: name another validation split."
        )
    if held_out not in loaded and held_out == "validation":
        held_out = "test"
    if "train" not in loaded or held_out not in loaded:
        raise ValueError(
            f"data set {source.name!r} has splits {sorted(loaded)}; 'train' and "
            f"{source.validation!r} (or 'test') are needed. Save them as files and set train_file "
            "and validation_file."
        )
    return datasets.DatasetDict(train=loaded["train"], validation=loaded[held_out])


def column_of(splits: datasets.DatasetDict, namings: Sequence[str]) -> str:
    """Returns the first of several names that is a column of the rows; where none is, the first."""
    there = next(iter(splits.values())).column_names
    return next((naming for naming in namings if naming in there), namings[0])


def require_columns(
    splits: datasets.DatasetDict,
    columns: Sequence[str],
    settings: Mapping[str, str] | None = None,
    texts: Container[str] = (),
) -> None:
    """Refuses rows without the columns, naming the columns that there are.

    Args:
      splits: the raw rows.
      columns: those that a task needs.
      settings: column -> the setting that would choose another.
      texts: of the columns, those that a model reads as they are.

    Raises:
      ValueError: a column is missing, some row of it is empty (None), or it holds something else than
        the texts that it should.
    """
    for split, rows in splits.items():
        for column in columns:
            if column not in rows.column_names:
                setting = (settings or {}).get(column, "the fields of the task")
                raise ValueError(
                    f"the {split} rows have no column {column!r} (they have "
                    f"{', '.join(rows.column_names)}); set {setting}."
                )
            if rows.data.column(column).null_count:  # not how many: that is a count of private rows
                raise ValueError(
                    f"column {column!r} of the {split} rows is empty in some rows; fill or drop them."
                )
            feature = rows.features[column]
            held = getattr(feature, "dtype", type(feature).__name__)
            if isinstance(feature, (list, datasets.Sequence, datasets.LargeList)):
                held = "lists"
            elif isinstance(feature, dict):
                held = "mappings"
            if column in texts and held not in TEXT_TYPES:
                raise ValueError(
                    f"column {column!r} of the {split} rows holds {held}, and a model reads text: "
                    "choose another column, or write one text in each row."
                )


def subset(splits: datasets.DatasetDict, data: DataArguments) -> datasets.DatasetDict:
    """Draws the rows that a recipe asks for: those whose keyed hashes, by `subset_seed`, are smallest.

    `num_examples_per_class` is drawn first, `max_train_samples` from what it leaves: rows, or with
    `whole_units` units. What is left is the n of the accounting. Splits beside these two stay whole.

    Guarantee: for every seed, adding or removing one row (unit) takes at most one from the draw and puts
    at most one into it, and so does replacing one; where its class changes, of few-shot draws, two. So
    the claim about the file under adding or removing is that about the draw under replacing one. The
    columns' names and types count as fixed.

    Args:
      splits: "train" and "validation", with an integer column "label" if classes are counted.
      data: the recipe's numbers of rows.

    Returns:
      All splits, rows in their old order.

    Raises:
      ValueError: a class has fewer rows than num_examples_per_class, and no
        `allow_fewer_per_class`.
    """
    kept, sizes = dict(splits), (data.max_train_samples, data.max_eval_samples)
    for split, size in zip(("train", "validation"), sizes, strict=True):
        rows, train = splits.get(split), split == "train"
        few = train and data.num_examples_per_class is not None
        if not rows or (not few and (size is None or size >= len(rows))):
            continue
        unit = data.keep_column if train and data.whole_units else None
        hashes = _hashes(rows, f"{data.subset_seed} {split}", unit)
        drawn = _few_shot(rows, hashes, data) if few else set(hashes)
        if size is not None:
            drawn = set(heapq.nsmallest(size, drawn))
        kept[split] = rows.select([i for i, digest in enumerate(hashes) if digest in drawn])
    return datasets.DatasetDict(kept)


def keyed_digests(key: str, values: Iterable[Any]) -> list[bytes]:
    """Returns a SHA-256 digest of each value, such as a row, with a key: of equal values the same."""
    written = (json.dumps(value, sort_keys=True, default=str) for value in values)
    return [hashlib.sha256(f"{key} {text}".encode()).digest() for text in written]


def _hashes(rows: datasets.Dataset, key: str, unit: str | None) -> list[bytes]:
    """A hash of each row, which tells equal rows apart by counting them; or of its unit, a column."""
    if unit in rows.column_names:
        return keyed_digests(key, rows[unit][:])
    tables = rows.with_format("arrow").iter(1000)
    copies: defaultdict[bytes, Iterator[int]] = defaultdict(itertools.count)
    return [
        hashlib.sha256(digest + b"%d" % next(copies[digest])).digest()
        for digest in keyed_digests(key, (row for table in tables for row in table.to_pylist()))
    ]


def _few_shot(rows: datasets.Dataset, hashes: Sequence[bytes], data: DataArguments) -> set[bytes]:
    """The `num_examples_per_class` smallest hashes of each class."""
    labels, wanted = np.asarray(rows["label"][:]), int(data.num_examples_per_class or 0)
    classes, sizes = np.unique(labels, return_counts=True)
    names = getattr(rows.features["label"], "names", list(range(max(classes) + 1)))
    few = ", ".join(
        f"label {names[label]} has fewer training rows"
        for label, count in zip(classes, sizes, strict=True)
        if count < wanted
    )
    if few and not data.allow_fewer_per_class:
        raise ValueError(
            f"num_examples_per_class={wanted}, but {few}; lower it, or set allow_fewer_per_class "
            "to take all rows of such a class."
        )
    if few:
        warnings.warn(
            f"num_examples_per_class={wanted}, but {few}, all of which are taken.", stacklevel=2
        )
    words = np.array(hashes, dtype=object)
    return {w for label in classes for w in heapq.nsmallest(wanted, words[labels == label])}
