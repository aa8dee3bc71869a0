"""Checks of the training data before step 0: its size, its labels, and what one of its rows is."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator, Mapping, Sized
from datetime import date
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

from hf_dpzero.batches.shapes import context_length
from hf_dpzero.batches.units import Units
from hf_dpzero.objectives.heads import is_language_model
from hf_dpzero.objectives.losses import base_model
from hf_dpzero.objectives.prompted import PromptObjective
from hf_dpzero.run import Dataset, Run
from hf_dpzero.settings.config import DPZeroConfig
from hf_dpzero.settings.row_groups import column_values

_NAMES = (str, int, float, bytes, date)
"""Values that are equal where they look so: objects of other classes may be one unit each."""

LABEL_COLUMNS = (
    *("labels", "label", "label_ids"),
    *("start_positions", "end_positions", "decoder_input_ids"),
)


def num_examples(dataset: Dataset | None) -> int:
    """n, which the privacy plan is computed from.

    Raises:
      ValueError: no data set, one that `check_rows` refuses, or an empty one.
    """
    if dataset is None:
        raise ValueError("train_dataset is None: the privacy plan needs the training data's size.")
    check_rows(dataset)
    if len(dataset) == 0:
        raise ValueError("train_dataset is empty.")
    return len(dataset)


def num_units(dataset: Dataset, args: DPZeroConfig) -> int:
    """n of the privacy plan: rows, or the values of `unit_column`.

    Raises:
      ValueError: see `num_examples` and `units_of`.
    """
    if args.unit_column is None:
        return num_examples(dataset)
    return len(units_of(dataset, args.unit_column, args.rows_per_unit))


def units_of(dataset: Dataset, column: str, most: int) -> Units:
    """Groups the rows that have the same value in a column.

    Raises:
      ValueError: no such column, a row without a value, one value for all rows, or one for each.
    """
    what, values = f"unit_column={column!r}", unit_values(dataset, column, "train_dataset")
    units = Units.of(values, most)
    if not 1 < len(units) < len(values):
        found = "one value for all rows" if len(units) == 1 else "another value for each row"
        raise ValueError(
            f"{what} has {found}: name the column that says whose rows they are, or leave it out where "
            "each row is a unit by itself."
        )
    return units


def unit_values(dataset: object, column: str, name: str) -> list[Any]:
    """Returns whose each row is.

    Raises:
      ValueError: no such column, or a row without a value, or with one of another kind than names,
        numbers and dates.
    """
    what, values = f"unit_column={column!r}", column_values(dataset, column)
    if values is None:
        raise ValueError(
            f"{what} is no column of {name}: keep it where the rows are tokenised (the trainer "
            "takes it away from the model's inputs itself), or name another."
        )
    if not all(isinstance(value, _NAMES) and value == value for value in values):
        raise ValueError(
            f"{what} of {name} has rows without a value, or with lists or objects: every row needs one "
            "name, number or date of its unit."
        )
    return values


def check_rows(dataset: object) -> None:
    """Refuses training data that has no rows by number. None passes: nothing is trained.

    Raises:
      ValueError: a stream, a dictionary of data sets, a name or a table of pandas.
    """
    if isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset):
        raise ValueError(
            "train_dataset is a stream (IterableDataset): it has no n, which noise and epsilon follow "
            "from, and no row by number for a step to draw. Write its rows down first, datasets.Dataset."
            "from_generator(lambda: iter(stream)); of one without an end as many as you decide, take(n)."
        )
    by_name = isinstance(dataset, (str, Mapping)) or hasattr(dataset, "iloc")
    if dataset is not None and (by_name or not isinstance(dataset, Dataset)):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__}, which has no rows by number: of a name or a "
            "dictionary of data sets pass load_dataset(...)['train'], of a table of pandas "
            "datasets.Dataset.from_pandas(frame), and a map-style data set of what is read once."
        )


def check_draws(collator: object, dataset: object) -> None:
    """Refuses generators of a collator's or a data set's own.

    What it draws for a row would follow from how many rows it saw before. The global generators run on
    fresh secret entropy for each row (`random_state`).

    Raises:
      ValueError: names what holds one.
    """
    held = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    for name, given in (("data_collator", collator), ("train_dataset", dataset)):
        closed = inspect.getclosurevars(given).nonlocals if inspect.isfunction(given) else {}
        for attribute, value in {**getattr(given, "__dict__", {}), **closed}.items():
            # transformers' masking collators make a generator of it when they are first called
            seeded = attribute == "seed" and value is not None and name == "data_collator"
            if isinstance(value, held) or seeded:
                raise ValueError(
                    f"{name} ({type(given).__name__}) draws from a generator of its own ({attribute}), "
                    "so what a row becomes follows from how many rows it saw before: leave it out. The "
                    "global generators are secret here, and fresh for each row."
                )


def check_all_kept(given: object, prepared: object) -> None:
    """Refuses preparation by another trainer that leaves out rows, or makes more or fewer of them.

    Raises:
      ValueError: they differ in length.
    """
    if isinstance(given, Sized) and isinstance(prepared, Sized) and len(given) != len(prepared):
        raise ValueError(
            "the trainer made another number of rows of train_dataset: it packed them (set "
            "packing=False), cut them up, or left some out, as TRL does where max_length leaves no "
            "label. How many these are is private, and the number of examples must not tell: raise "
            "max_length, or use DPZeroTrainer, which keeps such rows with loss 0."
        )


def check_labels(dataset: object) -> None:
    """Refuses labels missing or not finite, stored as numbers in a `datasets.Dataset`.

    The loss of such a row is NaN, which counts as zero, or stops the run when the row is drawn.

    Raises:
      ValueError: names the first row.
    """
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return
    for name in {"labels", "label"} & set(dataset.column_names):
        column = dataset.select_columns([name]).with_format("arrow")[:][name]
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            continue
        finite = pc.fill_null(pc.is_finite(column.cast(pa.float64(), safe=False)), False)
        if (row := pc.index(finite, False).as_py()) >= 0:
            raise ValueError(
                f"row {row} of train_dataset has no finite number as its {name}, so it has no loss: "
                "give it one, or leave such rows out."
            )


@contextlib.contextmanager
def of_first_row(done: str) -> Iterator[None]:
    """Says of an error that nothing else has words for that row 0 cannot be trained on, and why.

    The error's own words may quote a private row; they are in the traceback.
    """
    try:
        yield
    # no fault of the row, and torch says what to do
    except torch.OutOfMemoryError:
        raise
    except (TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"row 0 of train_dataset cannot be {done} ({type(error).__name__}): look whether rows are "
            "{column: value}, token ids lie within the model's vocabulary, texts within its length and "
            "labels are what its head takes; and at data_collator and compute_per_example_loss, if "
            "these are yours."
        ) from error


def check_unit(run: Run) -> None:
    """Refuses rows of a language model that look packed, of which nobody said what they are.

    Texts that were joined and cut into blocks before they arrive (`group_texts` of run_clm and run_mlm,
    packing) cannot be told from long examples, so the first 64 rows are judged by their lengths and
    positions alone: the tokens that the attention mask shows. Prompts, and models that are no causal or
    masked language models, pass.

    Raises:
      ValueError: the rows fill the model's context (95 % of it on average), 95 % of them have one length
        above 64 tokens, or positions start again within a row; says to set `rows_are`.
    """
    told = run.args.rows_are is not None or run.examples_known
    if told or isinstance(run.objective, PromptObjective) or not is_language_model(run.model):
        return
    lengths, restart = torch.zeros(min(len(run.dataset), SAMPLE)), False
    for number, row in enumerate(run.rows.collate_each(list(range(len(lengths))))):
        mask, ids, places = (row.get(n) for n in ("attention_mask", "input_ids", "position_ids"))
        if mask is not None and mask.dim() == 2:
            lengths[number] = int(mask.ne(0).sum())  # attended tokens
        elif ids is not None:
            lengths[number] = ids.numel()
        if places is not None and places.dim() == 2:
            restart = restart or bool((places.diff(dim=-1) < 0).any())
    most = getattr(getattr(base_model(run.model), "config", None), "max_position_embeddings", None)
    # In this order: a row that fills the context is of that one length too.
    what = None
    if most and lengths.mean() >= FULL * most:
        what = f"fill the {most} tokens that the model takes"
    elif lengths.max() > SHORT and (lengths == lengths.max()).float().mean() >= FULL:
        what = "have one length"
    elif restart:
        what = "have position_ids that start again"
    if what:
        raise ValueError(
            f"the rows of train_dataset look packed: the first ones {what}. The guarantee is for one "
            "row. If each is one example, set rows_are='examples'. If texts were joined and cut into "
            "blocks (group_texts, packing), an example or a document may lie in several: train on one "
            "example a row, or set rows_are='blocks'; the report then says that the unit is a block."
        )


SAMPLE, SHORT, FULL = 64, 64, 0.95
"""Rows that are looked at; the length up to which equal rows are usual; shares that look packed."""


def positions(model: nn.Module) -> int | None:
    """Tokens that a model with learned positions takes; None for others, which take any number."""
    learned = (
        isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
        for name, module in base_model(model).named_modules()
    )
    return context_length(model) if any(learned) else None


def check_lengths(run: Run) -> None:
    """Refuses rows longer than the model's positions, where that is told quickly.

    Looked at: the stored `input_ids` of a `datasets.Dataset`; the longest is collated, for a collator
    may cut it. Other data sets are not read through: there such a row stops the run when it is drawn.

    Raises:
      ValueError: says how rows are cut.
    """
    most, data = positions(run.model), run.dataset
    if most is None or not isinstance(data, datasets.Dataset):
        return
    if data.format["type"] == "custom" or "input_ids" not in data.column_names:
        return  # a transform makes the rows
    column = data.select_columns(["input_ids"]).with_format("arrow")[:]["input_ids"]
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return
    longest = int(pc.list_value_length(column).to_numpy(zero_copy_only=False).argmax())
    ids = run.rows.collate_each([longest])[0].get("input_ids")
    if ids is not None and ids.shape[-1] > most:
        raise ValueError(
            f"train_dataset has a row of more tokens than the model's {most} positions, which would "
            "stop the run when it is drawn: cut rows (truncation=True and max_length of the tokenizer; "
            "max_length for rows of text), or leave long ones out."
        )
