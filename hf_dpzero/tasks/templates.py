"""Prompt templates: text with {field}s, and the place of the mask or of the answer.

`{premise:no_stop}` passes the field through a filter before it is put in:

- `no_stop` leaves out punctuation at the end (LM-BFF writes "<S1> ? <mask>, <S2>" after it);
- `upper_first`, `lower_first` change the first letter;
- `no_question_mark` leaves out question marks at the end.

Several filters are applied from left to right: `{question:no_question_mark:upper_first}`.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MASK, ANSWER = "mask", "answer"
PLACE = "\ue000"  # stands for either while a prompt is made; a character for private use

FILTERS = {
    "no_stop": lambda text: text.rstrip(string.punctuation + " "),
    "no_question_mark": lambda text: text.rstrip("? "),
    "upper_first": lambda text: text[:1].upper() + text[1:],
    "lower_first": lambda text: text[:1].lower() + text[1:],
}


class Piece(NamedTuple):
    """Literal text, then perhaps a field with its filters."""

    text: str
    field: str | None
    filters: tuple[str, ...]


@dataclass(frozen=True)
class Template:
    """A parsed template; `render` puts a row into it.

    Attributes:
      text: the template.
      fields: the fields that a row has.
      optional: those that may be empty; lines with an empty one are left out.

    Raises:
      ValueError: braces that do not match, an unknown field or filter, no field at all, the
        character U+E000.
    """

    text: str
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if PLACE in self.text:
            self._refuse("holds U+E000, which is for internal use.")
        if not self.used_fields:
            self._refuse(f"shows nothing of the row; put in one of {_braced(self.fields)}.")

    def _refuse(self, why: str) -> None:
        raise ValueError(f"template {self.text!r} {why}")

    @functools.cached_property
    def lines(self) -> list[list[Piece]]:
        """The pieces of each line, checked."""
        known = (*self.fields, MASK, ANSWER)
        lines = []
        for line in self.text.split("\n"):
            try:
                parsed = list(string.Formatter().parse(line))
            except ValueError as error:
                raise ValueError(
                    f"template line {line!r}: {error}; write {{{{ for a brace."
                ) from error
            if any(field == "" or conversion for _, field, _, conversion in parsed):
                raise ValueError(f"template line {line!r}: write {{field}} or {{field:filter}}.")
            lines.append(
                [Piece(t, field, tuple(f.split(":") if f else ())) for t, field, f, _ in parsed]
            )
        for piece in (piece for line in lines for piece in line):
            if piece.field is not None and piece.field not in known:
                self._refuse(f"has a field {{{piece.field}}}; there are {_braced(known)}.")
            if piece.filters and piece.field in (MASK, ANSWER):
                self._refuse(f"filters {{{piece.field}}}: filters are for fields of the row.")
            for name in piece.filters:
                if name not in FILTERS:
                    self._refuse(f"has a filter {name!r}; there are {', '.join(FILTERS)}.")
        return lines

    @property
    def used_fields(self) -> list[str]:
        """The row's fields that are shown, each once."""
        fields = dict.fromkeys(piece.field for line in self.lines for piece in line if piece.field)
        return [name for name in fields if name not in (MASK, ANSWER)]

    def count(self, field: str) -> int:
        """How often a field occurs."""
        return sum(piece.field == field for line in self.lines for piece in line)

    def render(self, row: Mapping[str, str]) -> str:
        """The template with the row's fields, `mask` and `answer` among them, in their places.

        >>> Template("{a} It was {mask}.", ("a",)).render({"a": " Nice! ", "mask": "<mask>"})
        'Nice! It was <mask>.'
        """

        def value(piece: Piece) -> str:
            if piece.field in (None, MASK, ANSWER):  # an answer keeps the white space around it
                return row[piece.field] if piece.field else ""
            text = row[piece.field].strip()
            for name in piece.filters:
                text = FILTERS[name](text)
            return text

        lines = []
        for line in self.lines:
            fields = {piece.field for piece in line}
            if all(row[name].strip() for name in self.optional if name in fields):
                lines.append("".join(piece.text + value(piece) for piece in line))
        return "\n".join(lines)


def _braced(names: Sequence[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in names)


def checked_template(
    text: str, kind: str, fields: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Template:
    """A template that leaves room for what the model is asked for.

    Args:
      text: the template.
      kind: "masked_lm": exactly one {mask}; "causal_lm": exactly one {answer}, at the end.
      fields: the fields that a row has.
      optional: those that may be empty.

    Returns:
      The parsed template.

    Raises:
      ValueError: the label has no place, more than one, or one that may be left out; or as `Template`.
    """
    template = Template(text, fields, optional)
    wanted, other = (MASK, ANSWER) if kind == "masked_lm" else (ANSWER, MASK)
    if template.count(wanted) != 1 or template.count(other):
        raise ValueError(
            f"template {text!r} has {template.count(wanted)} {{{wanted}}} and "
            f"{template.count(other)} {{{other}}}: prompt={kind} needs exactly one {{{wanted}}}, "
            "where the model says the label."
        )
    line = next(line for line in template.lines if any(piece.field == wanted for piece in line))
    for piece in line:
        if piece.field in optional:
            raise ValueError(
                f"template {text!r} has {{{wanted}}} on a line with the optional {{{piece.field}}}, "
                f"which is left out where that is empty: put {{{wanted}}} on another line."
            )
    last = template.lines[-1][-1:]
    if kind == "causal_lm" and (not last or last[0].field != ANSWER):
        raise ValueError(
            f"template {text!r} goes on after {{answer}}: a decoder only sees what comes before, so "
            "put {answer} last."
        )
    return template
