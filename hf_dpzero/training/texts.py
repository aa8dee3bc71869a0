"""Data sets whose rows are texts: tokenised for a causal language model, or refused in words.

`datasets.Dataset` rows are mapped by that library, with its cache: the tokens of a data set that was
read from files lie beside the cached texts. They are no part of `output_dir`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hf_dpzero.batches.shapes import context_length
from hf_dpzero.checks.data import LABEL_COLUMNS
from hf_dpzero.estimators.random_state import isolated_randomness
from hf_dpzero.objectives.heads import causal_lm_objective, select_objective
from hf_dpzero.objectives.losses import takes
from hf_dpzero.settings.config import DPZeroConfig

logger = logging.get_logger(__name__)

Row = Mapping[str, Any]


class TextRows:
    """Makes what a `DPZeroTrainer` trains on and evaluates of the data sets that it is given.

    Rows that a collator of the user's own reads are left as they are.

    Args:
      model: trained; texts are for causal language models.
      args: `max_length` is read.
      tokenizer: the trainer's `processing_class`, or None.
      collator: the trainer's `data_collator`, or None.
      formatting: row -> its text; None where rows have columns that are known.

    Attributes:
      collator: the one given, or one for the rows that were tokenised here.
      examples: True where every training row is a chat or a prompt, so one example.
    """

    def __init__(
        self,
        model: Any,
        args: DPZeroConfig,
        tokenizer: Any,
        collator: Any,
        formatting: Callable[[Any], str] | None = None,
    ) -> None:
        self.model, self.args, self.collator = model, args, collator
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.formatting = formatting
        self.examples = False
        module = "transformers." if collator is None else getattr(collator, "__module__", "")
        self._reads_rows = not str(module).startswith("transformers.")

    def train(self, dataset: Any) -> Any:
        """The training rows, tokenised where they are texts.

        Raises:
          ValueError: rows that the model cannot be trained on; says what to do.
        """
        shaped = self._formatted(dataset, "train_dataset")
        form = form_of(_first(shaped))
        made = self._rows(shaped, "train_dataset")
        if made is not dataset:
            self.examples = form != TEXT
        elif self.args.max_length != DPZeroConfig.max_length and dataset is not None:
            logger.warning(
                f"max_length={self.args.max_length} is ignored: the rows of train_dataset are not "
                "tokenised here."
            )
        return made

    def evaluated(self, dataset: Any, private: bool = False) -> Any:
        """Evaluation rows, or a dictionary of data sets with them, tokenised where they are texts.

        Nothing is said of how many of `private` rows lack a label.

        Raises:
          ValueError: as for training rows.
        """
        if isinstance(dataset, Mapping):
            return {name: self.evaluated(part) for name, part in dataset.items()}
        made = self._rows(self._formatted(dataset, "eval_dataset"), "eval_dataset")
        if private or made is dataset or isinstance(made, datasets.IterableDataset):
            return made
        # Of evaluation rows, which are public, it may be said.
        if empty := sum(set(row["labels"]) == {IGNORED} for row in made):
            logger.warning(
                f"{empty} of {len(made)} evaluation rows have no label within max_length="
                f"{self.args.max_length}: they count as rows, and a batch of them alone has no "
                "eval_loss (nan)."
            )
        return made

    def _formatted(self, dataset: Any, name: str) -> Any:
        """Rows with the one column `text`, where a formatting function was given."""
        row = None if self.formatting is None else _first(dataset)
        if row is None or self.formatting is None:
            return dataset
        if isinstance(row, Mapping) and "input_ids" in row:
            if name == "eval_dataset":  # rows that were tokenised before, this trainer's own say
                return dataset
            raise ValueError(
                f"formatting_func was given, and {name} has input_ids already: leave one of them out."
            )
        return self._mapped(dataset, Formatted(self.formatting, name), name, row)

    def _rows(self, dataset: Any, name: str) -> Any:
        row = None if self._reads_rows or self.model is None else _first(dataset)
        if row is None:
            return dataset
        if isinstance(row, str):
            raise ValueError(
                f"{name} holds texts without a column: make it rows, "
                "datasets.Dataset.from_dict({'text': texts})."
            )
        if not isinstance(row, Mapping):
            return dataset
        for column in LABEL_COLUMNS:
            if isinstance(row.get(column), str):
                raise ValueError(
                    f"the column {column!r} of {name} holds words: make them numbers from 0 on, with "
                    "names that may be public, dataset.cast_column(column, "
                    "datasets.ClassLabel(names=names)) or dataset.class_encode_column(column), and "
                    "label2id and id2label of the model's config."
                )
        unread = not any(takes(self.model, column) for column in set(row) - set(LABEL_COLUMNS))
        words = sorted(str(n) for n in row if n not in LABEL_COLUMNS and _is_text(row[n]))
        if not words or not unread:
            return dataset
        self._check(row, words, name)
        return self._tokenised(dataset, row, name)

    def _check(self, row: Row, words: list[str], name: str) -> None:
        form, causal = form_of(row), False
        with contextlib.suppress(ValueError):  # a head with a loss of the user's own
            causal = select_objective(self.model) is causal_lm_objective
        if form is None or not causal:
            raise ValueError(
                f"{name} has text in columns {words}, which {type(self.model).__name__} does not take. "
                "Tokenise it first, dataset.map(lambda row: tokenizer(row['...'], truncation=True)), or "
                "pass a data_collator that does. For causal language models the columns 'prompt' and "
                "'completion', 'messages', or 'text' are tokenised here."
            )
        if not callable(getattr(self.tokenizer, "apply_chat_template", None)):
            raise ValueError(
                f"{name} has text in columns {words} and no input_ids: pass processing_class=tokenizer, "
                "which tokenises it, or tokenise it first."
            )
        if {"image", "images"} & set(row):
            raise ValueError(
                f"{name} has pictures beside its text: pass a data_collator that encodes both."
            )
        kept = (PadTokens, DataCollatorForSeq2Seq, DataCollatorForTokenClassification)
        if self.collator is not None and not isinstance(self.collator, kept):
            raise ValueError(
                f"data_collator is a {type(self.collator).__name__}, which does not keep the labels of "
                f"{name}'s rows: leave data_collator out, or use DataCollatorForSeq2Seq."
            )
        if form != TEXT and not isinstance(row[form[0]], str):
            check_template(self.tokenizer, form, name)

    def _tokenised(self, dataset: Any, row: Row, name: str) -> Any:
        if self.collator is None:
            self.collator = PadTokens(pad_token(self.tokenizer))
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom":
            raise ValueError(
                f"{name} has a transform that makes its texts on access (with_transform): apply it "
                "with dataset.map first, or let it return input_ids and labels."
            )
        asked, most = self.args.max_length, context_length(self.model)
        length = min(asked or 1 << 30, most or 1 << 30)
        encode = Encoder(self.tokenizer, length, name, form_of(row))
        return self._mapped(dataset, encode, name, row)

    def _mapped(self, dataset: Any, function: Formatted | Encoder, name: str, row: Row) -> Any:
        """Rows that a function of each row and its number made, as many as before."""
        if isinstance(dataset, datasets.Dataset):
            # Formats decide what a cell looks like, and the function is to see what is stored.
            stored = dataset.with_format(None)
            # One process tokenises, and the others read its cache.
            with self.args.main_process_first(desc=f"preparing {name}"):
                return stored.map(function, with_indices=True, remove_columns=stored.column_names)
        if isinstance(dataset, datasets.IterableDataset):
            return dataset.map(function, with_indices=True, remove_columns=list(row))
        return [function(dataset[number], number) for number in range(len(dataset))]


@dataclass(frozen=True)
class Formatted:
    """(row, its number) -> a row with the column `text`.

    Attributes:
      function: of one row.
      name: of the data set, in errors.
    """

    function: Callable[[Any], str]
    name: str

    def __call__(self, row: Any, number: int) -> dict[str, str]:
        """Formats one row.

        Raises:
          ValueError: the function fails, or returns no text; names the row's number only.
        """
        try:
            text = self.function(row)
        except Exception as error:  # its words may quote the row
            raise ValueError(
                f"formatting_func fails on row {number} of {self.name} ({type(error).__name__})."
            ) from None
        if not isinstance(text, str):
            raise ValueError(
                f"formatting_func returns a {type(text).__name__} for row {number} of {self.name}: it "
                "gets one row and returns one text. A list for many rows is TRL's old form, under which "
                "a row need not be one example."
            )
        return {"text": text}


def _first(dataset: Any) -> Any:
    """Row 0; None where there is none, or reading it would use it up."""
    if isinstance(dataset, datasets.IterableDataset):
        return next(iter(dataset), None)
    has_rows = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has_rows or isinstance(dataset, (str, Mapping)) or len(dataset) == 0:
        return None
    with isolated_randomness():
        return dataset[0]


def _is_text(cell: object) -> bool:
    """A text, or a list of texts or messages."""
    return isinstance(cell, str) or (
        isinstance(cell, list) and bool(cell) and isinstance(cell[0], (str, Mapping))
    )


# ------------------------------------------------------------------ conversations
# Prompts, chats and texts become token ids and labels, one row at a time, as in TRL's SFTTrainer.
#
# | columns | loss on |
# |---|---|
# | `prompt` and `completion`, texts or lists of messages | the completion |
# | `messages` | the assistant's turns if the template marks them (`{% generation %}`), else its last |
# | `text` | the whole text |
#
# A row's tokens are a function of that row alone, and every row is kept: one that `max_length` leaves no
# label has loss 0. How many rows are too long is private, so dropping them would make the number of
# examples, which the plan takes as public, depend on private rows. For the same reason nothing is logged
# about a private row, and an error names its number and never its content.


IGNORED = -100
PROMPT, MESSAGES, TEXT = ("prompt", "completion"), ("messages",), ("text",)
FORMS = (MESSAGES, PROMPT, TEXT)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUESTION, _ANSWER = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes."}


def form_of(row: object) -> tuple[str, ...] | None:
    """The columns of one of `FORMS` that a row has; None for other rows, and for tokenised ones."""
    if not isinstance(row, Mapping) or "input_ids" in row:
        return None
    return next((form for form in FORMS if all(name in row for name in form)), None)


@dataclass(frozen=True)
class Encoder:
    """(row, its number) -> `input_ids` and `labels`, T <= max_length integers, -100 without loss.

    Attributes:
      tokenizer: with a chat template where rows are chats.
      max_length: T at most; the end of longer rows is cut off.
      name: of the data set, in errors.
      form: one of `FORMS` that all rows have, for what a row is follows from it; None for any.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    name: str = "train_dataset"
    form: tuple[str, ...] | None = None

    def __call__(self, row: Row, number: int) -> dict[str, list[int]]:
        """Encodes one row.

        Args:
          row: has the columns of one of `FORMS`.
          number: of the row, in errors.

        Raises:
          ValueError: other columns than the form's; a cell that is no text or no list of messages, or
            one that the template refuses.
        """
        form = form_of(row)
        if form is None or form != (self.form or form):
            raise ValueError(
                f"row {number} of {self.name} has not the columns that row 0 has: make all rows texts, "
                "prompts with completions, or chats."
            )
        for column in form:
            _check_cell(row[column], column, f"row {number} of {self.name}")
        if form == PROMPT and isinstance(row["prompt"], str) != isinstance(row["completion"], str):
            raise ValueError(
                f"row {number} of {self.name} has a prompt of type {type(row['prompt']).__name__} and a "
                f"completion of type {type(row['completion']).__name__}: make both texts or both chats."
            )
        try:
            ids, labels = self._encoded(row, form)
        except Exception as error:  # templates raise with the row's content in the message
            raise ValueError(
                f"row {number} of {self.name} cannot be encoded ({type(error).__name__}, column "
                f"{form[-1]!r}): see what the tokenizer or its chat template says to it, and mend it."
            ) from None
        if not ids:  # an empty text, of a tokenizer that adds nothing
            ids, labels = [pad_token(self.tokenizer)], [IGNORED]
        return {"input_ids": ids[: self.max_length], "labels": labels[: self.max_length]}

    def _encoded(self, row: Row, form: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """Token ids and labels, of any length."""
        tools = row.get("tools")
        if form == MESSAGES:
            return self._messages(row["messages"], tools)
        if form == TEXT:
            ids = self._ids(self._ended(row["text"]))
            return ids, ids
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str):
            return _after(self._ids(prompt), self._ids(prompt + self._ended(completion)))
        asked = self._chat(prompt, tools, add_generation_prompt=True)["input_ids"]
        return _after(asked, self._chat(prompt + completion, tools)["input_ids"])

    def _messages(self, messages: list[Row], tools: Any) -> tuple[list[int], list[int]]:
        if marks_generation(self.tokenizer):
            whole = self._chat(messages, tools, return_assistant_tokens_mask=True)
            marked = zip(whole["input_ids"], whole["assistant_masks"], strict=True)
            return whole["input_ids"], [token if mask else IGNORED for token, mask in marked]
        last = max(
            (i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=None
        )
        if last is None:
            ids = self._chat(messages, tools)["input_ids"]
            return ids, [IGNORED] * len(ids)
        # What follows the last answer has no loss, nor does it change the loss of what stands before.
        whole_ids = self._chat(messages[: last + 1], tools)["input_ids"]
        if last == 0:
            return whole_ids, whole_ids
        asked = self._chat(messages[:last], tools, add_generation_prompt=True)["input_ids"]
        return _after(asked, whole_ids)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, verbose=False)["input_ids"])  # verbose tells lengths

    def _ended(self, text: str) -> str:
        end = self.tokenizer.eos_token or ""
        return text if text.endswith(end) else text + end

    def _chat(self, messages: Sequence[Row], tools: Any, **how: Any) -> Any:
        """`input_ids`, and `assistant_masks` where asked for."""
        settings: dict[str, Any] = {"return_dict": True, "tokenizer_kwargs": {"verbose": False}}
        if tools is not None:
            settings["tools"] = tools
        return self.tokenizer.apply_chat_template([dict(m) for m in messages], **settings, **how)


def _after(prompt: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """The whole row's ids, and labels from where they part from the prompt's.

    Mostly that is the prompt's end; where a token spans the border, the loss starts with that token.
    """
    same = (a == b for a, b in zip(prompt, whole, strict=False))
    common = next((i for i, equal in enumerate(same) if not equal), min(len(prompt), len(whole)))
    return whole, [IGNORED] * common + whole[common:]


def _check_cell(cell: object, column: str, where: str) -> None:
    turns = isinstance(cell, list) and all(isinstance(m, Mapping) and "role" in m for m in cell)
    if (turns and (cell or column == "prompt")) or (column != "messages" and isinstance(cell, str)):
        return
    takes = "a text" if column == "text" else "a list of {'role': ..., 'content': ...}"
    raise ValueError(
        f"{where} has a {type(cell).__name__} in column {column!r}, which takes {takes}"
        + (" or a text." if column in PROMPT else ".")
    )


def marks_generation(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template says which tokens the assistant wrote."""
    return bool(_GENERATION.search(str(tokenizer.get_chat_template())))


def check_template(tokenizer: PreTrainedTokenizerBase, form: tuple[str, ...], name: str) -> None:
    """Refuses a tokenizer that cannot tell an answer from what was asked.

    Tried on two made-up turns, so the outcome depends on no row.

    Raises:
      ValueError: it has no chat template; or the template does not begin a chat with the tokens of its
        prompt, and the loss is taken from where the prompt ends.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{name} holds chats, and the tokenizer has no chat template: set tokenizer.chat_template "
            "(an instruction-tuned checkpoint's tokenizer brings one), or write the chats out as text "
            "in columns 'prompt' and 'completion'."
        )
    if form == MESSAGES and marks_generation(tokenizer):
        return
    encode = Encoder(tokenizer, 1 << 30)
    try:
        prompt = encode._chat([_QUESTION], None, add_generation_prompt=True)["input_ids"]
        whole = encode._chat([_QUESTION, _ANSWER], None)["input_ids"]
    except Exception:  # a template that wants other turns: rows show what it takes
        return
    if whole[: len(prompt)] != prompt:
        raise ValueError(
            "under the tokenizer's chat template a prompt's tokens are no prefix of those of prompt and "
            f"answer, so where the loss of {name} begins is not clear: mark the assistant's turns in "
            "the template with {% generation %} and give whole chats as 'messages', or tokenise the "
            "rows into input_ids and labels yourself."
        )


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills rows up; they are masked, so any will do where there is no pad token."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(number) for number in ids if number is not None), 0)


@dataclass(frozen=True)
class PadTokens:
    """A collator of rows that `Encoder` made: padded on the right, without loss there.

    Attributes:
      pad: the id that fills up.
    """

    pad: int

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `labels`, `[B, T]` int64."""
        ids = [torch.as_tensor(row["input_ids"]) for row in rows]
        labels = [torch.as_tensor(row["labels"]) for row in rows]
        padded: Callable[..., Tensor] = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": padded(ids, batch_first=True, padding_value=self.pad),
            "attention_mask": padded([torch.ones_like(row) for row in ids], batch_first=True),
            "labels": padded(labels, batch_first=True, padding_value=IGNORED),
        }
