"""Where a task's rows come from: local files, or the Hub."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import datasets

from hf_dpzero.tasks.arguments import DataArguments

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class HubSource:
    """Where a task's rows are on the Hub.

    Attributes:
      name: the data set.
      config: its configuration, if it has several.
      revision: branch, tag or commit; None is the default branch.
      validation: the split that is evaluated on; "test" is taken where there is none.
    """

    name: str
    config: str | None = None
    revision: str | None = None
    validation: str = "validation"


def load_splits(data: DataArguments, source: HubSource | None) -> datasets.DatasetDict:
    """The raw "train" and "validation" rows: local files if given, else the Hub.

    `dataset_name` replaces the task's own `source` altogether.

    Raises:
      ValueError: only one of the two files, no source at all, or a missing split.
      FileNotFoundError: a file that is not there.
      OSError: the Hub data set is neither cached nor reachable; names the command that fetches it.
    """
    if data.train_file or data.validation_file:
        return _load_files(data)
    if data.dataset_name is not None:
        source = HubSource(data.dataset_name, data.dataset_config_name)
    elif source is not None and data.dataset_config_name is not None:
        source = dataclasses.replace(source, config=data.dataset_config_name)
    if source is None:
        raise ValueError(
            f"task={data.task!r} has no data of its own: set train_file and validation_file "
            "(.jsonl, .csv or .parquet), or dataset_name."
        )
    return _load_hub(source)


def _load_files(data: DataArguments) -> datasets.DatasetDict:
    files = {"train": data.train_file, "validation": data.validation_file}
    absent = [f"{split}_file" for split, file in files.items() if file is None]
    if absent:
        raise ValueError(
            f"{absent[0]} is not set: give both train_file (private rows) and validation_file "
            "(rows that are public, or whose privacy is paid for elsewhere)."
        )
    _refuse_same_file(Path(str(data.train_file)), Path(str(data.validation_file)))
    return datasets.DatasetDict({split: read_file(str(file)) for split, file in files.items()})


def _refuse_same_file(train: Path, validation: Path) -> None:
    """Evaluation on the private rows would publish their metrics without noise."""
    if not (train.is_file() and validation.is_file()):
        return
    same = train.samefile(validation)
    copied = train.stat().st_size == validation.stat().st_size and _digest(train) == _digest(
        validation
    )
    if same or copied:
        raise ValueError(
            f"validation_file={str(validation)!r} is {'' if same else 'a copy of '}the train_file: "
            "metrics on the private rows would be published without noise. Evaluate on rows that are "
            "public, or whose privacy is paid for elsewhere."
        )


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def read_file(path: str) -> datasets.Dataset:
    """The rows of one .jsonl, .json, .csv or .parquet file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: another kind of file, or one that does not hold rows.
    """
    kind = _READERS.get(Path(path).suffix.lower())
    if kind is None:
        raise ValueError(f"{path}: rows are read from {', '.join(_READERS)} files.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} not found (paths are relative to {Path.cwd()}).")
    try:
        return datasets.load_dataset(kind, data_files={"rows": path}, split="rows")
    except datasets.exceptions.DatasetGenerationError as error:
        line = _first_bad_line(Path(path)) if kind == "json" else None
        where = f"line {line} is not JSON" if line else "its rows do not have the same columns"
        raise ValueError(
            f"{path} cannot be read as {kind} rows: {where}; mend or remove the row."
        ) from error


def _first_bad_line(path: Path) -> int | None:
    """The number of the first line that is not JSON; its text may be private."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line.strip() or "null")
            except ValueError:
                return number
    return None


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
    return _public_splits(loaded, source)


def _public_splits(loaded: datasets.DatasetDict, source: HubSource) -> datasets.DatasetDict:
    """ "train" and "validation" ("test" where there is none) of a Hub data set."""
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
