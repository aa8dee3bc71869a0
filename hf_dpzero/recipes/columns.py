"""What the columns of a user's rows are: texts and a label, answers, completions or chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import datasets

Kind = Literal["classification", "answers", "completion", "messages"]
LABELS = ("label", "labels", "class", "category", "target", "sentiment", "intent", "y")
TEXTS = ("text", "sentence", "body", "content", "message", "review", "comment", "question", "title")
PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2")),
    *(("text_a", "text_b"), ("text1", "text2"), ("question", "sentence"), ("question", "passage")),
)
PROMPTS = (("prompt", "completion"), ("instruction", "output"), ("input", "output"))


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What a file is for, by its columns.

    Attributes:
      kind: "classification" of one or two texts, "answers" to questions on a context, "completion" of
        a prompt, or "messages" of a chat.
      texts: columns with texts: one or two; (question, context); the prompt; or the chat.
      label: column with the label, the answers or the completion; None of a chat.
    """

    kind: Kind
    texts: tuple[str, ...]
    label: str | None = None

    def __str__(self) -> str:
        label = "" if self.label is None else f", {_CALLED[self.kind]} {self.label!r}"
        return f"{self.kind}: {' and '.join(map(repr, self.texts))}{label}"


_CALLED: Mapping[Kind, str] = {
    "classification": "label",
    "answers": "answers",
    "completion": "completion",
}


def detect_columns(
    rows: datasets.Dataset,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
) -> Columns:
    """Reads off the columns' names and types what the rows are for.

    Args:
      rows: the file's rows.
      text: the text column, if it was said.
      pair: the second text column, if it was said.
      label: the label column, if it was said.

    Returns:
      The columns.

    Raises:
      ValueError: a column that is not there, or no column that could be the text or the label.
    """
    there = {name.lower(): name for name in rows.column_names}
    for option, column in (("text", text), ("text_pair", pair), ("label", label)):
        if column is not None and column not in rows.column_names:
            raise ValueError(
                f"--{option}_column {column}: the rows have the columns {', '.join(there.values())}."
            )
    if text is pair is label is None and (found := _without_labels(there)):
        return found
    label = label or next((there[name] for name in LABELS if name in there), None)
    if label is None:
        raise ValueError(
            f"none of the columns {', '.join(there.values())} is called as a label "
            f"({', '.join(LABELS)}); say which one it is: --label_column NAME."
        )
    if text is None and pair is None:
        for first, second in PAIRS:
            if first in there and second in there:
                both = (there[first], there[second])
                return Columns(kind="classification", texts=both, label=label)
    text = text or _text_column(rows, there, (pair, label))
    texts = (text,) if pair is None else (text, pair)
    _check_held(rows, texts, label)
    return Columns(kind="classification", texts=texts, label=label)


def _check_held(rows: datasets.Dataset, texts: Sequence[str], label: str) -> None:
    """Refuses texts that are none, a label that is a text too, and labels that are no classes."""
    if label in texts:
        raise ValueError(
            f"{label!r} is both text and label: say which, --text_column, --label_column."
        )
    for name in texts:
        held = str(getattr(rows.features[name], "dtype", "lists"))
        if held not in ("string", "large_string", "string_view"):
            raise ValueError(
                f"the column {name!r} holds {held}, no text: choose another --text_column."
            )
    if str(getattr(rows.features[label], "dtype", "")).startswith(("float", "double")):
        raise ValueError(
            f"the label column {label!r} holds floats or has empty rows: classes are integers from 0 or "
            "words, and every row needs one."
        )


def _without_labels(there: Mapping[str, str]) -> Columns | None:
    """Chats, completions or answers, by the names of their columns."""
    if "messages" in there:
        return Columns(kind="messages", texts=(there["messages"],))
    for prompt, completion in PROMPTS:
        if prompt in there and completion in there:
            return Columns(kind="completion", texts=(there[prompt],), label=there[completion])
    answer = there.get("answers") or there.get("answer")
    if answer and "question" in there and "context" in there:
        return Columns(kind="answers", texts=(there["question"], there["context"]), label=answer)
    return None


def _text_column(
    rows: datasets.Dataset, there: Mapping[str, str], others: Sequence[str | None]
) -> str:
    """The column that is called as a text, else the only one that holds text."""
    for name in TEXTS:
        if name in there and there[name] not in others:
            return there[name]
    texts = [
        name
        for name, feature in rows.features.items()
        if name not in others and getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    if len(texts) != 1:
        held = f"{', '.join(texts)} hold text" if texts else "none of the others holds text"
        raise ValueError(f"{held}; say which column is the text: --text_column NAME.")
    return texts[0]
