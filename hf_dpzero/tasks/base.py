"""What a task is, and how rows are found, chosen and turned into model inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from hf_dpzero.recipe_arguments import DataArguments

if TYPE_CHECKING:
    from transformers import EvalPrediction, PreTrainedTokenizerBase

SPLITS = ("train", "validation")
PAD_TO_MULTIPLE_OF = 8
_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A text classification task with its rows.

    Attributes:
      name: its name in the task registry.
      label_names: names of the labels 0, 1, ...; assumed public.
      text_columns: the column with the text, or two for sentence pairs.
      max_seq_length: tokens a text is cut to.
      splits: "train" (the private rows) and "validation" (assumed public), with the text columns
        and an integer column "label".
      metric: the name of what `compute_metrics` returns.
    """

    name: str
    label_names: tuple[str, ...]
    text_columns: tuple[str, ...]
    max_seq_length: int = 128
    splits: datasets.DatasetDict
    metric: str = "accuracy"

    @property
    def num_labels(self) -> int:
        """The number of classes."""
        return len(self.label_names)

    def tokenize(self, tokenizer: PreTrainedTokenizerBase) -> datasets.DatasetDict:
        """The rows as input_ids, attention_mask (and what else the model takes) and labels."""
        return self.splits.map(
            _encode,
            batched=True,
            remove_columns=self.splits["train"].column_names,
            desc="tokenizing",
            fn_kwargs={
                "tokenizer": tokenizer,
                "columns": self.text_columns,
                "max_length": self.max_seq_length,
            },
        )

    def collator(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[list[Mapping[str, Any]]], dict[str, Any]]:
        """Rows -> one padded batch of tensors; also takes rows of precomputed features."""
        return Collator(tokenizer)

    def compute_metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """{"accuracy": the share of rows whose largest logit is at the label}."""
        from hf_dpzero.tasks.metrics import accuracy

        logits: Any = prediction.predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        return accuracy(np.argmax(logits, axis=-1), np.asarray(prediction.label_ids))


@dataclass(frozen=True)
class Collator:
    """Pads token rows to the longest of the batch, rounded up to a multiple of 8.

    Rows of precomputed features have nothing to pad and are stacked.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        from transformers import default_data_collator

        if "input_ids" not in rows[0]:
            return default_data_collator(rows)
        examples: Any = rows
        return dict(
            self.tokenizer.pad(examples, pad_to_multiple_of=PAD_TO_MULTIPLE_OF, return_tensors="pt")
        )


def _encode(
    rows: Mapping[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str],
    max_length: int,
) -> dict[str, Any]:
    texts = [rows[column] for column in columns]
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    return {**encoded, "labels": rows["label"]}


# ---------------------------------------------------------------- where rows come from


def load_splits(data: DataArguments, hub_name: str | None) -> datasets.DatasetDict:
    """The raw "train" and "validation" rows: local files if given, else the Hub.

    Raises:
      ValueError: only one of the two files, no source at all, or a missing split.
      FileNotFoundError: a file that is not there.
      OSError: the Hub data set is neither cached nor reachable; names the command that fetches it.
    """
    if data.train_file or data.validation_file:
        return _load_files(data)
    name = data.dataset_name or hub_name
    if name is None:
        raise ValueError(
            f"task={data.task!r} has no data of its own: set train_file and validation_file "
            "(.jsonl, .csv or .parquet), or dataset_name."
        )
    return _load_hub(name, data.dataset_config_name)


def _load_files(data: DataArguments) -> datasets.DatasetDict:
    files = {"train": data.train_file, "validation": data.validation_file}
    absent = [f"{split}_file" for split, file in files.items() if file is None]
    if absent:
        raise ValueError(
            f"{absent[0]} is not set: give both train_file (private rows) and validation_file "
            "(rows that are public, or whose privacy is paid for elsewhere)."
        )
    return datasets.DatasetDict({split: read_file(str(file)) for split, file in files.items()})


def read_file(path: str) -> datasets.Dataset:
    """The rows of one .jsonl, .json, .csv or .parquet file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: another kind of file.
    """
    kind = _READERS.get(Path(path).suffix.lower())
    if kind is None:
        raise ValueError(f"{path}: rows are read from {', '.join(_READERS)} files.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} not found (paths are relative to {Path.cwd()}).")
    return datasets.load_dataset(kind, data_files={"rows": path}, split="rows")


def _load_hub(name: str, config: str | None) -> datasets.DatasetDict:
    try:
        loaded = datasets.load_dataset(name, config)
    except (ConnectionError, FileNotFoundError) as error:
        raise OSError(
            f"data set {name!r} is neither cached nor reachable ({type(error).__name__}); fetch it "
            f"once with `hf download {name} --repo-type dataset`, or set train_file and "
            "validation_file to local files."
        ) from error
    return _public_splits(loaded, name)


def _public_splits(loaded: datasets.DatasetDict, name: str) -> datasets.DatasetDict:
    """ "train" and "validation" ("test" where there is none) of a Hub data set."""
    held_out = "validation" if "validation" in loaded else "test"
    if "train" not in loaded or held_out not in loaded:
        raise ValueError(
            f"data set {name!r} has splits {sorted(loaded)}; 'train' and 'validation' (or 'test') "
            "are needed. Save them as files and set train_file and validation_file."
        )
    return datasets.DatasetDict(train=loaded["train"], validation=loaded[held_out])


# ---------------------------------------------------------------- which rows


def check_columns(
    splits: datasets.DatasetDict, text_columns: Sequence[str], label_column: str
) -> None:
    """Refuses rows without the text or label columns, naming the columns that there are.

    Raises:
      ValueError: a column is missing, or some row of it is empty (None).
    """
    for split, rows in splits.items():
        for column in (*text_columns, label_column):
            setting = "label_column" if column == label_column else "text_column"
            if column not in rows.column_names:
                raise ValueError(
                    f"the {split} rows have no column {column!r} (they have "
                    f"{', '.join(rows.column_names)}); set {setting}."
                )
            if rows.data.column(column).null_count:
                raise ValueError(
                    f"column {column!r} of the {split} rows is empty in "
                    f"{rows.data.column(column).null_count} of {len(rows)} rows; fill or drop them."
                )


def subset(splits: datasets.DatasetDict, data: DataArguments) -> datasets.DatasetDict:
    """The rows that a recipe asks for, drawn by `subset_seed`, never by position.

    `num_examples_per_class` is drawn first, `max_train_samples` from what it leaves.

    Raises:
      ValueError: a class has fewer rows than num_examples_per_class.
    """
    train, validation = splits["train"], splits["validation"]
    seeds = ([data.subset_seed, split] for split in range(2))
    generators = [np.random.Generator(np.random.PCG64(seed)) for seed in seeds]
    if data.num_examples_per_class is not None:
        train = _few_shot(train, data.num_examples_per_class, generators[0])
    return datasets.DatasetDict(
        train=_at_most(train, data.max_train_samples, generators[0]),
        validation=_at_most(validation, data.max_eval_samples, generators[1]),
    )


def _at_most(
    rows: datasets.Dataset, size: int | None, generator: np.random.Generator
) -> datasets.Dataset:
    """`size` rows without replacement, in their old order; all of them if there are no more."""
    if size is None or size >= len(rows):
        return rows
    return rows.select(np.sort(generator.choice(len(rows), size, replace=False)))


def _few_shot(
    rows: datasets.Dataset, per_class: int, generator: np.random.Generator
) -> datasets.Dataset:
    labels = np.asarray(rows["label"][:])
    chosen = [_draw(labels, label, per_class, generator) for label in np.unique(labels)]
    return rows.select(np.sort(np.concatenate(chosen)))


def _draw(labels: np.ndarray, label: int, size: int, generator: np.random.Generator) -> np.ndarray:
    of_class = np.flatnonzero(labels == label)
    if len(of_class) < size:
        raise ValueError(
            f"num_examples_per_class={size}, but label {label} has {len(of_class)} training rows; "
            "lower it."
        )
    return generator.choice(of_class, size, replace=False)
