"""Prompts, chats and texts become token ids and labels, one row at a time, as in TRL's SFTTrainer.

| columns | loss on |
|---|---|
| `prompt` and `completion`, texts or lists of messages | the completion |
| `messages` | the assistant's turns if the template marks them (`{% generation %}`), else its last |
| `text` | the whole text |

A row's tokens are a function of that row alone, and every row is kept: one that `max_length` leaves no
label has loss 0. How many rows are too long is private, so dropping them would make the number of
examples, which the plan takes as public, depend on private rows. For the same reason nothing is logged
about a private row, and an error names its number and never its content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
PROMPT, MESSAGES, TEXT = ("prompt", "completion"), ("messages",), ("text",)
FORMS = (MESSAGES, PROMPT, TEXT)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUESTION, _ANSWER = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes."}


def form_of(row: Any) -> tuple[str, ...] | None:
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

    tokenizer: Any
    max_length: int
    name: str = "train_dataset"
    form: tuple[str, ...] | None = None

    def __call__(self, row: Mapping[str, Any], number: int) -> dict[str, list[int]]:
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

    def _encoded(
        self, row: Mapping[str, Any], form: tuple[str, ...]
    ) -> tuple[list[int], list[int]]:
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

    def _messages(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[int]]:
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

    def _chat(self, messages: Sequence[Mapping[str, Any]], tools: Any, **how: Any) -> Any:
        """`input_ids`, and `assistant_masks` where asked for."""
        settings = {"return_dict": True, "tokenizer_kwargs": {"verbose": False}}
        if tools is not None:
            settings["tools"] = tools
        return self.tokenizer.apply_chat_template(list(messages), **settings, **how)


def _after(prompt: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """The whole row's ids, and labels from where they part from the prompt's.

    Mostly that is the prompt's end; where a token spans the border, the loss starts with that token.
    """
    same = (a == b for a, b in zip(prompt, whole, strict=False))
    common = next((i for i, equal in enumerate(same) if not equal), min(len(prompt), len(whole)))
    return whole, [IGNORED] * common + whole[common:]


def _check_cell(cell: Any, column: str, where: str) -> None:
    turns = isinstance(cell, list) and all(isinstance(m, Mapping) and "role" in m for m in cell)
    if (turns and (cell or column == "prompt")) or (column != "messages" and isinstance(cell, str)):
        return
    takes = "a text" if column == "text" else "a list of {'role': ..., 'content': ...}"
    raise ValueError(
        f"{where} has a {type(cell).__name__} in column {column!r}, which takes {takes}"
        + (" or a text." if column in PROMPT else ".")
    )


def marks_generation(tokenizer: Any) -> bool:
    """Whether the chat template says which tokens the assistant wrote."""
    return bool(_GENERATION.search(str(tokenizer.get_chat_template())))


def check_template(tokenizer: Any, form: tuple[str, ...], name: str) -> None:
    """Refuses a tokenizer that cannot tell an answer from what was asked.

    Tried on two made-up turns, so the outcome depends on no row.

    Args:
      tokenizer: for rows of chats.
      form: their columns.
      name: of the data set, in errors.

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


def pad_token(tokenizer: Any) -> int:
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

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `labels`, `[B, T]` int64."""
        ids = [torch.as_tensor(row["input_ids"]) for row in rows]
        labels = [torch.as_tensor(row["labels"]) for row in rows]
        padded: Callable[..., Tensor] = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": padded(ids, batch_first=True, padding_value=self.pad),
            "attention_mask": padded([torch.ones_like(row) for row in ids], batch_first=True),
            "labels": padded(labels, batch_first=True, padding_value=IGNORED),
        }
