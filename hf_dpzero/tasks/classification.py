"""Text classification: rows of a file or of the Hub, their labels, and inputs of a model with a head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import numpy as np

from hf_dpzero.tasks.description import DataArguments, TaskDescription
from hf_dpzero.tasks.quickstart import generated
from hf_dpzero.tasks.rows import (
    TEXT_TYPES,
    column_of,
    load_splits,
    require_columns,
    subset,
    with_private_rows,
)
from hf_dpzero.tasks.templates import PromptEncoder, Template

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import Tensor
    from transformers import EvalPrediction, PreTrainedTokenizerBase

PAD_TO_MULTIPLE_OF = 8
PAIR_SUFFIX = "_pair"
_MAX_CLASSES = 1000  # a column with more values is no label column
_KINDS = {"bool": "truth values", "class": "class labels", "integer": "integers", "text": "text"}

Label = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class Task:
    """A text classification task with its rows.

    Attributes:
      name: its name in the task registry.
      label_names: names of the labels 0, 1, ...; assumed public.
      text_columns: the column with the text, or two for sentence pairs.
      max_seq_length: tokens a text is cut to.
      splits: "train" (the private rows), "validation" (assumed public) and perhaps "private" (to be
        evaluated with noise), with the text columns and an integer column "label".
      metric: the name of what `metrics` returns.
      head: what kind of model it is for; prompted tasks have others.
      template: makes one text of a row's; None leaves them as they are.
    """

    name: str
    label_names: tuple[str, ...]
    text_columns: tuple[str, ...]
    max_seq_length: int = 128
    splits: datasets.DatasetDict
    metric: str = "accuracy"
    head: str = "sequence_classification"
    template: Template | None = None

    @property
    def num_labels(self) -> int:
        """The number of classes."""
        return len(self.label_names)

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        pair_features: str = "joint",
        only: str | None = None,
    ) -> datasets.DatasetDict:
        """Encodes the rows as input_ids, attention_mask (and what else the model takes) and labels.

        Args:
          tokenizer: the model's.
          pair_features: as in `ModelArguments`: "joint" puts both texts of a pair into input_ids,
            cut together to `max_seq_length`; "siamese" cuts each to `max_seq_length` and puts the
            second into input_ids_pair, attention_mask_pair, ...
          only: the split that is wanted; None for all.

        Returns:
          The splits, a row an example.

        Raises:
          ValueError: siamese without two text columns.
        """
        siamese = pair_features == "siamese"
        if siamese and self.template is not None:
            raise ValueError(
                f"template={self.template.text!r} makes one text of both, and pair_features=siamese "
                "encodes each apart; use pair_features: joint, or leave template out."
            )
        if siamese and len(self.text_columns) != 2:
            raise ValueError(
                f"pair_features=siamese compares two texts, but task {self.name!r} has the text "
                f"columns {', '.join(self.text_columns)}; use pair_features: joint, or set "
                "text_pair_column."
            )
        settings = {
            "tokenizer": tokenizer,
            "columns": self.text_columns,
            "max_length": self.max_seq_length,
            "apart": siamese,
            "template": self.template,
        }
        encoded = datasets.DatasetDict()
        for split in self.splits if only is None else [only]:
            rows = self.splits[split]
            encoded[split] = rows.map(
                _encode,
                batched=True,
                remove_columns=rows.column_names,
                desc="tokenizing",
                fn_kwargs=settings,
            )
        return encoded

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        """Returns what pads rows into one batch; it also takes rows of precomputed features."""
        return Collator(tokenizer)

    def metrics(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> Callable[[EvalPrediction], dict[str, float]]:
        """Returns what makes {"accuracy": ...} of logits, and macro_f1 where that is the metric."""
        return functools.partial(chosen_scores, metric=self.metric)

    def objective(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Returns None: the model's head says what is minimised (`objectives.select_objective`)."""


@dataclass(frozen=True)
class Collator:
    """Pads token rows to the longest of the batch, rounded up to a multiple of 8.

    The second texts of pairs (columns that end in "_pair") are padded by themselves. Rows of
    precomputed features have nothing to pad and are stacked.
    """

    tokenizer: PreTrainedTokenizerBase
    collates_columns: ClassVar = True  # `batches.columns` may do its work
    pad_to_multiple_of: ClassVar = PAD_TO_MULTIPLE_OF

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        from transformers import default_data_collator

        if "input_ids" not in rows[0]:
            return default_data_collator(rows)
        batch: dict[str, Tensor] = {}
        for suffix in ("", PAIR_SUFFIX):
            names = [n for n in rows[0] if n.endswith(PAIR_SUFFIX) == bool(suffix)]
            if names:
                own = [{name.removesuffix(suffix): row[name] for name in names} for row in rows]
                padded = self.tokenizer.pad(
                    own, pad_to_multiple_of=PAD_TO_MULTIPLE_OF, return_tensors="pt"
                )
                batch |= {name + suffix: value for name, value in padded.items()}
        return batch


def _encode(
    rows: Mapping[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str],
    max_length: int,
    apart: bool,
    template: Template | None = None,
) -> dict[str, list[Any]]:
    """Both texts together, or with `apart` as input_ids, ... and input_ids_pair, ..."""
    if template is not None:
        # As a decoder's prompt: cut in a field and never in the template, and no token ends it.
        encoder = PromptEncoder(tokenizer, template, "causal_lm")
        texts = [rows.get(column, [""] * len(rows["label"])) for column in columns]
        fields = [
            {f: t or "" for f, t in zip(template.fields, row, strict=True)}
            for row in zip(*texts, strict=True)
        ]
        ids = [made.input_ids for made in encoder.encode(fields, [max_length] * len(fields))]
        masks = [[1] * len(tokens) for tokens in ids]
        return {"input_ids": ids, "attention_mask": masks, "labels": rows["label"]}
    texts = [rows[column] for column in columns]
    # The tokenizer joins two texts of one call, with its separators and token types.
    groups = [[text] for text in texts] if apart else [texts]
    first, *second = (tokenizer(*g, truncation=True, max_length=max_length) for g in groups)
    pair = {key + PAIR_SUFFIX: value for columns in second for key, value in columns.items()}
    return {**first, **pair, "labels": rows["label"]}


def chosen_scores(prediction: EvalPrediction, metric: str) -> dict[str, float]:
    """Scores the class with the largest of the logits `[N, L]` (see `classification_scores`)."""
    logits = prediction.predictions
    # A model with further outputs puts its logits first.
    logits = logits[0] if isinstance(logits, tuple) else logits
    return classification_scores(np.argmax(logits, axis=-1), prediction.label_ids, metric)


def classification_scores(
    predictions: ArrayLike, references: ArrayLike, metric: str
) -> dict[str, float]:
    """Returns what evaluation of a classification reports.

    Args:
      predictions, references: `[N]` integers or booleans, N >= 1.
      metric: "accuracy" or "macro_f1".

    Returns:
      {"accuracy": the share of equal entries}; if it is the metric also {"macro_f1": the mean over the
      classes that occur in either of 2 TP / (2 TP + FP + FN)}, as scikit-learn's `average="macro"`.

    Raises:
      ValueError: other shapes, or no rows.
    """
    predicted, true = np.asarray(predictions), np.asarray(references)
    if predicted.ndim != 1 or predicted.shape != true.shape or not len(predicted):
        raise ValueError(
            f"predictions have shape {predicted.shape}, references {true.shape}; give one class a row, "
            "for at least one row."
        )
    scores = {"accuracy": float(np.mean(predicted == true))}
    if metric == "macro_f1":
        by_class = []
        for label in np.union1d(predicted, true):
            hits = np.sum((predicted == label) & (true == label))
            by_class.append(2 * hits / (np.sum(predicted == label) + np.sum(true == label)))
        scores["macro_f1"] = float(np.mean(by_class))
    return scores


def classification_task(
    data: DataArguments, known: TaskDescription | None, private_file: str | None = None
) -> Task:
    """Loads, checks, labels and subsets the rows.

    Without a description text is in `text_column` ("text") and, for pairs, `text_pair_column`; the label
    in `label_column` ("label"), integers from 0 or strings, named by `class_names` or by those of the
    validation rows. A refusal never quotes a row: it is written into tables and logs that may be
    published.

    Args:
      data: the recipe's rows and columns.
      known: what is known of the task; None if the recipe or the data names the labels.
      private_file: rows for the split "private".

    Returns:
      The task with its rows, which `data.prompt` may turn into prompts (`prompted_classification`).

    Raises:
      ValueError: missing columns or labels, labels that are not classes, or unlabelled rows.
      OSError: the data cannot be found.
    """
    name = known.name if known else "text_classification"
    if known and data.class_names is not None:
        raise ValueError(
            f"task {name!r} has labels of its own ({', '.join(known.label_names)}): leave class_names "
            "out, or use task: text_classification."
        )
    if data.task == "quickstart":
        splits = generated(data)
    else:
        splits = load_splits(data, known.source if known else None)
    splits = with_private_rows(splits, private_file)
    fields = known.fields if known else {"text": ("text",)}
    usual = [column_of(splits, namings) for namings in fields.values()]
    second = [data.text_pair_column] if data.text_pair_column else usual[1:2]
    columns = (data.text_column or usual[0], *second, *usual[2:])
    label = data.label_column or column_of(splits, known.label_columns if known else ("label",))
    # A prompt leaves out the line of an optional text; a head has nothing in its place.
    optional = known.optional_fields if known and (data.prompt or data.template) else ()
    may_lack = [c for field, c in zip(fields, columns, strict=False) if field in optional]
    needed = [column for column in columns if column not in may_lack]
    settings = dict(zip(columns, ("text_column", "text_pair_column"), strict=False))
    texts = needed if data.prompt is None else ()
    require_columns(splits, [*needed, label], {**settings, label: "label_column"}, texts)
    unlabelled = known is not None and known.drop_unlabelled
    if unlabelled:  # the Hub marks rows without a label with -1
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
    if data.keep_column == "label" != label:
        raise ValueError(
            f"keep_column (group_robust.column, unit_column) 'label' beside label_column={label!r}, "
            "which is called 'label' here: rename one of the columns."
        )
    kept = [] if data.keep_column in (None, "label") else [str(data.keep_column)]
    labelled, feature = datasets.DatasetDict(), datasets.ClassLabel(names=list(names))
    values = _label_values(splits, label, names)
    for split, rows in splits.items():
        place = f"{'labelled ' * unlabelled}{split} rows"
        indices = _class_indices(values[split], label, names, place)
        stay = dict.fromkeys([*columns, *kept])
        kept_rows = rows.select_columns([c for c in stay if c in rows.column_names])
        labelled[split] = kept_rows.add_column("label", indices).cast_column("label", feature)
    template = None
    if data.prompt is None and data.template is not None:
        # Columns of the recipe's own are the fields, where the task does not name so many.
        names_of = tuple(fields) if known and len(fields) == len(columns) else columns
        template = Template(data.template, names_of, optional)
    elif data.prompt is None and len(columns) > 2:
        raise ValueError(
            f"task {name!r} has {len(columns)} texts ({', '.join(columns)}) and a classification head "
            "reads one or two: set template, or prompt to masked_lm or causal_lm."
        )
    return Task(
        name=name,
        label_names=names,
        text_columns=columns,
        max_seq_length=data.max_seq_length,
        splits=subset(labelled, data),
        metric=known.metric if known else "accuracy",
        template=template,
    )


def _read_label_names(splits: datasets.DatasetDict, column: str) -> list[str]:
    """Names of the classes: those of the validation rows' column, or of its values.

    The sorted strings, or "0" ... for integers. They become public, so a training label that is not
    among them is refused, without naming it; so names that a training file brings along are not used.
    """
    if "validation" not in splits:
        raise ValueError(
            "without a validation_file nothing public names the labels: set class_names to all of them, "
            "in order."
        )
    known = getattr(splits["validation"].features[column], "names", None)
    kinds = {_kind(rows.features[column], split, column) for split, rows in splits.items()}
    plain = known is None and "text" not in kinds
    labels = {s: set(r.unique(column) if plain else _by_name(r, column)) for s, r in splits.items()}
    public: Container[Label] = labels["validation"]
    if known is not None:
        names, public = list(known), {*known, *range(len(known))}
    elif kinds == {"bool"}:  # both are named, whichever the rows hold
        return ["false", "true"]
    elif "text" not in kinds:
        for split, held in labels.items():
            if min(held) < 0:
                row = next(i for i, value in enumerate(splits[split][column][:], 1) if value < 0)
                raise ValueError(
                    f"row {row} of the {split} rows (counted from 1) has a negative integer in column "
                    f"{column!r}, which usually marks rows without a label; drop them or choose a "
                    "labelled split."
                )
        # A column of identifiers would make a list of 10^15 names: one too many says enough.
        largest = max(labels["validation"])
        names = [str(label) for label in range(min(_MAX_CLASSES, largest) + 1)]
        public = range(largest + 1)
    elif kinds <= {"text", "class"}:
        names = sorted(labels["validation"])
    else:
        said = " and ".join(_KINDS[kind] for kind in sorted(kinds))
        raise ValueError(
            f"column {column!r} holds {said} in one split and the other; write all labels alike."
        )
    if not all(value in public for value in labels["train"]):
        raise ValueError(
            f"column {column!r} of the train rows has labels that no validation row has. Names of "
            "labels become public (config.json holds them), and these would be read from private rows: "
            "set class_names to the names of all labels, in order. If it is not the label column, set "
            "label_column."
        )
    if known is None and not 2 <= len(names) <= _MAX_CLASSES:
        many = len(names) if len(names) < 2 else f"more than {_MAX_CLASSES}"
        raise ValueError(
            f"column {column!r} of the validation rows holds {many} classes; 2 to {_MAX_CLASSES} are "
            "supported. Is it the label column? Set label_column."
        )
    return names


def _by_name(rows: datasets.Dataset, column: str) -> list[Label]:
    """The values of a column; those of a class-label column as its names, -1 as it is."""
    feature, values = rows.features[column], rows[column][:]
    if not isinstance(feature, datasets.ClassLabel):
        return list(values)
    return [feature.names[value] if value >= 0 else value for value in values]


def _label_values(
    splits: datasets.DatasetDict, column: str, names: Sequence[str]
) -> dict[str, list[Label]]:
    """Labels of each split, to be found in `names`: class labels by their own names."""
    features = [rows.features[column] for rows in splits.values()]
    own = {tuple(f.names) for f in features if isinstance(f, datasets.ClassLabel)}
    if any(set(found) & set(names) for found in own):
        return {split: _by_name(rows, column) for split, rows in splits.items()}
    # The names are other words for the class labels, which then count by their numbers.
    if len(own) > 1:
        raise ValueError(
            f"column {column!r} has other class labels in the train than in the validation rows, so "
            "their numbers do not mean the same; give both files the same class labels, or text."
        )
    return {split: list(rows[column][:]) for split, rows in splits.items()}


def _kind(feature: Any, split: str, column: str) -> str:
    """What labels of a column are, a key of `_KINDS`; a refusal names its type."""
    if isinstance(feature, datasets.ClassLabel):
        return "class"
    held = feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__
    if held == "bool" or held in TEXT_TYPES:
        return "bool" if held == "bool" else "text"
    if held.startswith(("int", "uint")):
        return "integer"
    raise ValueError(
        f"column {column!r} of the {split} rows holds {held} values; class labels are integers from 0, "
        "or strings."
    )


def _class_indices(
    values: Sequence[Label], column: str, names: Sequence[str], place: str
) -> np.ndarray:
    """Labels as indices into `names`, int64 `[N]`; `place` is what a refusal calls their rows."""
    index = {name: position for position, name in enumerate(names)}
    indices = []
    for row, value in enumerate(values, start=1):
        label = index.get(value, -1) if isinstance(value, str) else value
        # A column with a gap somewhere holds its integers as floats; another may hold anything.
        number = isinstance(label, (int, float))  # NaN is refused below, for it differs from itself
        if not number or label != label // 1 or not 0 <= label < len(names):
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
