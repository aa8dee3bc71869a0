"""What a task is, and how rows are found, chosen and turned into model inputs."""

from __future__ import annotations

import dataclasses
import warnings
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
PAIR_SUFFIX = "_pair"
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

    def tokenize(
        self, tokenizer: PreTrainedTokenizerBase, pair_features: str = "joint"
    ) -> datasets.DatasetDict:
        """The rows as input_ids, attention_mask (and what else the model takes) and labels.

        Args:
          tokenizer: the model's.
          pair_features: as in `ModelArguments`: "joint" puts both texts of a pair into input_ids,
            cut together to `max_seq_length`; "siamese" cuts each to `max_seq_length` and puts the
            second into input_ids_pair, attention_mask_pair, ...
        Raises:
          ValueError: siamese without two text columns.
        """
        siamese = pair_features == "siamese"
        if siamese and len(self.text_columns) != 2:
            raise ValueError(
                f"pair_features=siamese compares two texts, but task {self.name!r} has the text "
                f"columns {', '.join(self.text_columns)}; use pair_features: joint, or set "
                "text_pair_column."
            )
        return self.splits.map(
            _encode_apart if siamese else _encode,
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

    The second texts of pairs (columns that end in "_pair") are padded by themselves. Rows of
    precomputed features have nothing to pad and are stacked.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        from transformers import default_data_collator

        if "input_ids" not in rows[0]:
            return default_data_collator(rows)
        first = [{k: v for k, v in row.items() if not k.endswith(PAIR_SUFFIX)} for row in rows]
        second = [
            {k.removesuffix(PAIR_SUFFIX): v for k, v in row.items() if k.endswith(PAIR_SUFFIX)}
            for row in rows
        ]
        if not second[0]:
            return self._padded(first)
        pair = {key + PAIR_SUFFIX: value for key, value in self._padded(second).items()}
        return {**self._padded(first), **pair}

    def _padded(self, rows: Any) -> dict[str, Any]:
        return dict(
            self.tokenizer.pad(rows, pad_to_multiple_of=PAD_TO_MULTIPLE_OF, return_tensors="pt")
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


def _encode_apart(
    rows: Mapping[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str],
    max_length: int,
) -> dict[str, Any]:
    """The two texts of each row as two texts: input_ids, ... and input_ids_pair, ..."""
    first, second = (
        tokenizer(rows[column], truncation=True, max_length=max_length) for column in columns
    )
    pair = {key + PAIR_SUFFIX: value for key, value in second.items()}
    return {**first, **pair, "labels": rows["label"]}


# ---------------------------------------------------------------- where rows come from


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
    held_out = source.validation if source.validation in loaded else "test"
    if "train" not in loaded or held_out not in loaded:
        raise ValueError(
            f"data set {source.name!r} has splits {sorted(loaded)}; 'train' and "
            f"{source.validation!r} (or 'test') are needed. Save them as files and set train_file "
            "and validation_file."
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
        settings = ("text_column", "text_pair_column")[: len(text_columns)]
        for column, setting in zip(
            (*text_columns, label_column), (*settings, "label_column"), strict=True
        ):
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

    `num_examples_per_class` is drawn first, `max_train_samples` from what it leaves. The rows that
    are left are the n of the accounting.

    Raises:
      ValueError: a class has fewer rows than num_examples_per_class, and no
        `allow_fewer_per_class`.
    """
    train, validation = splits["train"], splits["validation"]
    seeds = ([data.subset_seed, split] for split in range(2))
    generators = [np.random.Generator(np.random.PCG64(seed)) for seed in seeds]
    if data.num_examples_per_class is not None:
        train = _few_shot(train, data, generators[0])
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
    rows: datasets.Dataset, data: DataArguments, generator: np.random.Generator
) -> datasets.Dataset:
    """`num_examples_per_class` rows of each class, in their old order."""
    labels, wanted = np.asarray(rows["label"][:]), int(data.num_examples_per_class or 0)
    classes, sizes = np.unique(labels, return_counts=True)
    counts = dict(zip(classes.tolist(), sizes.tolist(), strict=True))
    _check_class_sizes(counts, data, rows.features["label"])
    chosen = [
        generator.choice(np.flatnonzero(labels == label), min(wanted, count), replace=False)
        for label, count in counts.items()
    ]
    return rows.select(np.sort(np.concatenate(chosen)))


def _check_class_sizes(counts: Mapping[int, int], data: DataArguments, feature: Any) -> None:
    """Refuses, or with `allow_fewer_per_class` names, classes with too few rows."""
    wanted = int(data.num_examples_per_class or 0)
    few = {label: count for label, count in counts.items() if count < wanted}
    if not few:
        return
    names = getattr(feature, "names", list(range(max(counts) + 1)))
    said = ", ".join(
        f"label {names[label]} has {count} training rows" for label, count in few.items()
    )
    if not data.allow_fewer_per_class:
        raise ValueError(
            f"num_examples_per_class={wanted}, but {said}; lower it, or set allow_fewer_per_class "
            "to take all rows of such a class."
        )
    warnings.warn(
        f"num_examples_per_class={wanted}, but {said}, all of which are taken.", stacklevel=2
    )
