"""What the examples share: the data set and the end of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset
from transformers import HfArgumentParser


@dataclass
class Arguments:
    """The model and the data: files, or a data set of the Hub."""

    model_name_or_path: str = field(metadata={"help": "folder or Hub id"})
    train_file: str | None = field(default=None, metadata={"help": "csv or json; private"})
    validation_file: str | None = field(default=None, metadata={"help": "csv or json; public"})
    dataset_name: str | None = field(default=None, metadata={"help": "Hub id or folder instead"})
    max_tokens: int = field(default=128, metadata={"help": "longer texts are cut"})


def parsed(settings_class: Any, words: list[str] | None) -> tuple[Arguments, Any]:
    """The model and data, and the training arguments, of a command line."""
    return HfArgumentParser((Arguments, settings_class)).parse_args_into_dataclasses(words)  # type: ignore[return-value]


def read(arguments: Arguments) -> DatasetDict:
    """`train`, which is private, and `validation`, which is public."""
    if arguments.dataset_name:
        return load_dataset(arguments.dataset_name)
    files = {"train": arguments.train_file, "validation": arguments.validation_file}
    kind = "csv" if Path(str(arguments.train_file)).suffix == ".csv" else "json"
    return load_dataset(kind, data_files=files)


def names_of(labels: Any) -> list[str]:
    """Names of labels, to be read from public rows: the model's configuration publishes them."""
    return sorted({str(label) for label in labels})


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of labels that are predicted, of those that are not ignored."""
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right[prediction.label_ids != -100].mean())}


def finish(trainer: Any) -> dict[str, float]:
    """Trains, saves, evaluates on the public rows, and says what the run cost."""
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    if hasattr(trainer, "privacy_report"):  # private: the (epsilon, delta) of this run
        print(trainer.privacy_report().statement)
    return metrics
