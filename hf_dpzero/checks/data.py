"""Checks of the training data before step 0: its size, its labels, and what one of its rows is."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from datasets.fingerprint import Hasher
from torch import Tensor, nn

from hf_dpzero.objectives.heads import is_language_model
from hf_dpzero.objectives.losses import base_model
from hf_dpzero.parallel import distributed
from hf_dpzero.run_folder.row_order import digest_of_rows

LABEL_COLUMNS = (
    *("labels", "label", "label_ids"),
    *("start_positions", "end_positions", "decoder_input_ids"),
)


def num_examples(dataset: Any) -> int:
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


def check_rows(dataset: Any) -> None:
    """Refuses training data that has no rows by number. None passes: nothing is trained.

    Raises:
      ValueError: a stream, a dictionary of data sets, a name or a table of pandas.
    """
    if dataset is None:
        return
    if isinstance(dataset, str):
        raise ValueError(f"train_dataset={dataset!r} is a text: load the rows, load_dataset(...).")
    if hasattr(dataset, "iloc"):
        raise ValueError(
            "train_dataset is a pandas DataFrame: make it rows, datasets.Dataset.from_pandas(frame)."
        )
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"train_dataset={type(dataset).__name__} holds the data sets {sorted(dataset)}: pass one of "
            "them, data['train'] say."
        )
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__} without length or random access: a "
            "streamed data set cannot be sampled as the plan accounts; load it as a map-style one."
        )


def passed_rows(init: Callable[..., None], positional: Sequence[Any], settings: Any) -> Any:
    """`train_dataset` of a call of a trainer's `__init__`, by name or by place; None without one.

    Args:
      init: bound.
      positional: arguments after model and args; an `init` that names none has Trainer's order.
      settings: arguments by name.
    """
    names = list(inspect.signature(init).parameters)[2:]
    if "train_dataset" not in names:
        names = ["data_collator", "train_dataset"]
    return {**dict(zip(names, positional, strict=False)), **settings}.get("train_dataset")


def check_draws(collator: Any, dataset: Any) -> None:
    """Refuses random generators of a collator's or a data set's own.

    What it draws for a row would follow from how many rows it saw before. The global generators run on
    fresh secret entropy for each row (`random_state`).

    Raises:
      ValueError: names what holds one.
    """
    held = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    for name, given in (("data_collator", collator), ("train_dataset", dataset)):
        cells = {n: c.cell_contents for n, c in _cells(given)}
        for attribute, value in {**getattr(given, "__dict__", {}), **cells}.items():
            seeded = attribute == "seed" and value is not None and name == "data_collator"
            if isinstance(value, held) or seeded:
                raise ValueError(
                    f"{name} ({type(given).__name__}) draws from a generator of its own ({attribute}), "
                    "so what a row becomes follows from how many rows it saw before: leave it out. The "
                    "global generators are secret here, and fresh for each row."
                )


def _cells(function: Any) -> list[tuple[str, Any]]:
    """Names and cells of what a function closes over."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return list(zip(code.co_freevars, cells, strict=True)) if code and cells else []


def check_all_kept(given: Any, prepared: Any) -> None:
    """Refuses preparation by another trainer that leaves out rows, or makes more or fewer of them.

    Args:
      given: the data set that was passed, or None.
      prepared: what the trainer made of it.

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


def check_labels(dataset: Any, names: Iterable[str] = ()) -> None:
    """Refuses a data set whose columns hold no labels (needs `column_names`; else looks at row 0).

    Args:
      dataset: rows.
      names: of labels that the model takes (`Trainer.label_names`), besides `LABEL_COLUMNS`.

    Raises:
      ValueError: there are none.
    """
    columns = getattr(dataset, "column_names", None)
    if not columns:
        columns = list(dataset[0]) if hasattr(dataset[0], "keys") else None
    if columns is not None and not set(columns) & {*LABEL_COLUMNS, *names}:
        raise ValueError(
            f"train_dataset has columns {sorted(columns)} but no labels: name the label column "
            "'labels' (of question answering: 'start_positions' and 'end_positions'), or pass "
            "compute_per_example_loss."
        )


def check_positions(
    collate: Callable[[list[int]], Mapping[str, Tensor]], rows: Sequence[int]
) -> None:
    """Refuses a collator that pads on the left but leaves the answers' positions where they were.

    Args:
      collate: row numbers -> batch.
      rows: some of them, of different lengths.

    Raises:
      ValueError: a row's tokens move in a batch, and its `start_positions` do not.
    """
    batch = collate(list(rows))
    if not isinstance(batch.get("attention_mask"), Tensor):
        return
    for place, row in enumerate(rows):
        alone = collate([row])
        moved, answer = (
            int(many[place] - one[0])
            for many, one in (
                (_first_tokens(batch), _first_tokens(alone)),
                (batch["start_positions"].reshape(-1), alone["start_positions"].reshape(-1)),
            )
        )
        if moved and answer != moved:
            raise ValueError(
                f"in a batch the tokens of a row stand {moved} columns further right, and its "
                f"start_positions {answer}: the collator pads on the left. Set "
                "tokenizer.padding_side='right', or move the positions along."
            )


def _first_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["attention_mask"].ne(0).int().argmax(dim=-1)


def check_unit(
    model: nn.Module, collate: Callable[[list[int]], Mapping[str, Tensor]], count: int
) -> None:
    """Refuses a language model's rows that look packed, of which nobody said what they are.

    Texts that were joined and cut into blocks before they arrive (`group_texts` of run_clm and run_mlm,
    packing) cannot be told from long examples, so the first 64 rows are judged by their lengths and
    positions alone: the tokens that the attention mask shows.

    Args:
      model: others than causal and masked language models pass.
      collate: row numbers -> batch.
      count: number of rows.

    Raises:
      ValueError: the rows fill the model's context (95 % of it on average), 95 % of them have one length
        above 64 tokens, or positions start again within a row; says to set `rows_are`.
    """
    if not is_language_model(model):
        return
    batches = [collate([row]) for row in range(min(count, SAMPLE))]
    lengths = torch.tensor([_tokens(batch) for batch in batches], dtype=torch.float64)
    most = getattr(getattr(base_model(model), "config", None), "max_position_embeddings", None)
    what = None
    if most and lengths.mean() >= FULL * most:
        what = f"fill the {most} tokens that the model takes"
    elif lengths.max() > SHORT and (lengths == lengths.max()).double().mean() >= FULL:
        what = "have one length"
    elif any(_restarts(batch) for batch in batches):
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


def _tokens(batch: Mapping[str, Tensor]) -> int:
    """Attended tokens of a batch of one row; all that there are where no mask is given."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return int(mask.ne(0).sum())
    return ids.numel() if isinstance(ids, Tensor) else 0


def _restarts(batch: Mapping[str, Tensor]) -> bool:
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return False
    return bool((positions[:, 1:] == 0).logical_and(positions[:, :-1] > 0).any())


def check_same_rows(dataset: Any) -> None:
    """Refuses processes that hold other rows, or the same in another order.

    Each takes its share of the drawn row numbers, so a row under two numbers would count twice.

    Args:
      dataset: of this process; rows by number.

    Raises:
      ValueError: on all processes; names the ranks.
    """
    if not distributed.active():
        return
    length, known = len(dataset), getattr(dataset, "_fingerprint", None)
    told = distributed.gather_objects((length, known))
    lengths = [length for length, _ in told]
    if len(set(lengths)) > 1:
        raise ValueError(f"train_dataset has {lengths} rows on ranks 0, 1, ...: {_SAME_ROWS}")
    if len(set(told)) == 1 and known is not None:
        digests = distributed.gather_objects(_digest_of_some(dataset))
        digests = [] if "" in digests else digests
    else:
        digest = hashlib.sha256()
        for row in range(length):
            digest.update(Hasher.hash(dataset[row]).encode())
        digests = distributed.gather_objects(digest.hexdigest())
    if len(set(digests)) > 1:
        raise ValueError(
            f"{distributed.differing(digests)} in the rows, or their order: {_SAME_ROWS}"
        )


def _digest_of_some(dataset: Any) -> str:
    """Of rows that one recipe made (`_fingerprint`), which may have shuffled them without a seed."""
    return digest_of_rows(dataset, b"", range(0, len(dataset), -(-len(dataset) // COMPARED)))


COMPARED = 1000
"""Rows that are compared, spread evenly, where the processes name the same origin of their rows."""

_SAME_ROWS = (
    "every process must load the same rows in the same order, or a row could count once for each (an "
    "unseeded shuffle or train_test_split?). Seed it, or prepare the data in one process and save it."
)
