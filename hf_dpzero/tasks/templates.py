"""Prompt templates, and the token ids that a row becomes with them.

A template is text with {field}s, and the place of the mask or of the answer. `{premise:no_stop}` passes
the field through a filter before it is put in:

- `no_stop` leaves out punctuation at the end (LM-BFF writes "<S1> ? <mask>, <S2>" after it);
- `upper_first`, `lower_first` change the first letter;
- `no_question_mark` leaves out question marks at the end.

Several filters are applied from left to right: `{question:no_question_mark:upper_first}`.

What is too long is cut from the end of the passage, then from other fields, never from the mask or the
answer. A batch's texts are tokenised in one call; only those that are too long are taken one by one.
"""

from __future__ import annotations

import bisect
import functools
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK, ANSWER = "mask", "answer"
PLACE = "\ue000"  # stands for either while a prompt is made; a character for private use
SEPARATORS = {"masked_lm": " ", "causal_lm": "\n\n"}

FILTERS = {
    "no_stop": lambda text: text.rstrip(string.punctuation + " "),
    "no_question_mark": lambda text: text.rstrip("? "),
    "upper_first": lambda text: text[:1].upper() + text[1:],
    "lower_first": lambda text: text[:1].lower() + text[1:],
}

Row = Mapping[str, str]


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

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"template {self.text!r} {why}")

    @functools.cached_property
    def lines(self) -> list[list[Piece]]:
        """The pieces of each line, checked."""
        lines, known = [], (*self.fields, MASK, ANSWER)
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
        """Returns how often a field occurs."""
        return sum(piece.field == field for line in self.lines for piece in line)

    def render(self, row: Row) -> str:
        """Puts the row's fields, `mask` and `answer` among them, in their places.

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
    """Parses a template, which must leave room for what the model is asked for.

    Args:
      text: the template.
      kind: "masked_lm": exactly one {mask}; "causal_lm": exactly one {answer}, at the end.
      fields: the fields that a row has.
      optional: those that may be empty.

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


class Encoded(NamedTuple):
    """A prompt's tokens.

    Attributes:
      input_ids: with the tokenizer's special tokens.
      position: index of the token whose logits answer: the mask, or the last token.
      cut: whether part of the passage was left out.
      left_out: how many demonstrations were.
    """

    input_ids: list[int]
    position: int
    cut: bool = False
    left_out: int = 0


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes rows as the tokens of their prompts.

    Attributes:
      tokenizer: the model's.
      template: with {mask} for "masked_lm", {answer} at its end for "causal_lm".
      kind: which of the two.
      passage: the field that is cut first; None takes the row's longest.
      demonstrations: complete examples to put in front; where they do not fit, the first are left
        out before any passage is cut.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template
    kind: str
    passage: str | None = None
    demonstrations: tuple[str, ...] = ()

    def encode(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Encoded]:
        """Encodes each row's prompt.

        Args:
          rows: field -> text.
          limits: most tokens of each row's prompt.

        Raises:
          ValueError: a limit leaves no room even for the template without its fields, or a prompt is
            empty.
        """
        halves = [self._halves(row, self.demonstrations) for row in rows]
        whole = self.ids([self._joined(*half) for half in halves])
        return [
            self._encoded(half[0], ids) if len(ids) <= limit else self._fitted(row, limit)
            for row, half, ids, limit in zip(rows, halves, whole, limits, strict=True)
        ]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns token ids with special tokens; no end token after a text that is to be continued."""
        if not texts:
            return []
        # One letter shows whether this tokenizer ends every text with a token.
        encoded: list[list[int]] = self.tokenizer(["a", *texts], verbose=False)["input_ids"]
        ends = (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        drop = self.kind == "causal_lm" and len(encoded[0]) > 1 and encoded[0][-1] in ends
        return [ids[:-1] if drop else ids for ids in encoded[1:]]

    def answer_ids(self, rows: Sequence[Row], answers: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each row's answer, as they come out in one text with its prompt.

        Args:
          rows: field -> text.
          answers: the text after each row's prompt.

        Returns:
          Token ids; an answer that changes the prompt's last token is tokenised by itself.
        """
        before = [self._halves(row)[0] for row in rows]
        prompts = self.ids([self._joined(text, "") for text in before])
        whole = self.ids([text + answer for text, answer in zip(before, answers, strict=True)])
        answer_tokens = []
        for text, prompt, together, answer in zip(before, prompts, whole, answers, strict=True):
            if together[: len(prompt)] == prompt and len(together) > len(prompt):
                answer_tokens.append(together[len(prompt) :])
            else:
                alone = text[len(text.rstrip(" ")) :] + answer
                found = self.tokenizer(alone, add_special_tokens=False)["input_ids"]
                answer_tokens.append(list(found))
        return answer_tokens

    def _halves(self, row: Row, demonstrations: Sequence[str] = ()) -> tuple[str, str]:
        """The text before the place of the mask or the answer, and the text after it."""
        clean = {name: text.replace(PLACE, "") for name, text in row.items()}
        own = self.template.render({**clean, MASK: PLACE, ANSWER: PLACE})
        before, _, after = own.partition(PLACE)
        return SEPARATORS[self.kind].join((*demonstrations, before)), after

    def _joined(self, before: str, after: str) -> str:
        """What is tokenised: with the mask token, or up to the spaces before the answer."""
        # Most tokenizers put the space into the token of the word that follows it.
        if self.kind == "causal_lm":
            return before.rstrip(" ")
        return before + str(self.tokenizer.mask_token) + after

    def _encoded(
        self, before: str, ids: list[int], cut: bool = False, left_out: int = 0
    ) -> Encoded:
        if not ids:
            raise ValueError(
                f"a row and template {self.template.text!r} make an empty prompt, and this tokenizer "
                "puts no token in front of it: write some words before {answer}."
            )
        if self.kind == "causal_lm":
            return Encoded(ids, len(ids) - 1, cut, left_out)
        # A row's text may spell the mask token too: ours is the one after those before it.
        places = [i for i, token in enumerate(ids) if token == self.tokenizer.mask_token_id]
        place = places[before.count(str(self.tokenizer.mask_token))]
        return Encoded(ids, place, cut, left_out)

    def _fitted(self, row: Row, limit: int) -> Encoded:
        """A prompt that is too long: without some demonstrations, or without any and cut."""
        for left_out in range(1, len(self.demonstrations) + 1):
            before, after = self._halves(row, self.demonstrations[left_out:])
            ids = self.ids([self._joined(before, after)])[0]
            if len(ids) <= limit:
                return self._encoded(before, ids, left_out=left_out)
        longest_first = sorted(self.template.used_fields, key=lambda field: -len(row[field]))
        for name in sorted(longest_first, key=lambda field: field != self.passage):
            if encoded := self._cut_field(row, name, limit):
                return encoded
            row = {**row, name: ""}
        bare = len(self.ids([self._joined(*self._halves(row))])[0])
        raise ValueError(
            f"the template alone has {bare} tokens, and only {limit} fit: raise max_seq_length, lower "
            "max_new_tokens, or shorten the template or the label words."
        )

    def _cut_field(self, row: Row, name: str, limit: int) -> Encoded | None:
        """The prompt with as much of one field as fits, from its start; None if none of it does."""
        text = row[name].strip()

        @functools.cache  # the search asks for one end twice, and tokenising is what takes time
        def cut(end: int) -> tuple[str, list[int]]:
            before, after = self._halves({**row, name: text[:end]})
            return before, self.ids([self._joined(before, after)])[0]

        def size(end: int) -> int:
            return len(cut(end)[1])

        if self.tokenizer.is_fast:
            end = self._last_token(text, size, limit)
        else:  # a tokenizer in Python does not say where its tokens lie
            end = bisect.bisect_right(range(len(text) + 1), limit, key=size) - 1
        if end is None or end < 0:
            return None
        return self._encoded(*cut(end), cut=True, left_out=len(self.demonstrations))

    def _last_token(self, text: str, size: Callable[[int], int], limit: int) -> int | None:
        """The end of the last token of a text with which the prompt's `size` is within its limit."""
        offsets = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        ends = [0, *(end for _, end in offsets)]
        kept = too_many = len(ends) - 1
        # A cut may merge tokens or split them, so the first guess is a token or two off.
        while (excess := size(ends[kept]) - limit) > 0:
            if kept == 0:
                return None
            too_many, kept = kept, max(0, kept - excess)
        while excess < 0 and kept + 1 < too_many:  # too much was left out
            excess = size(ends[kept + 1]) - limit
            kept += excess <= 0
        return ends[kept]


def mask_word_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[int, ...]:
    """Returns the token of each label word where it stands at a mask, that is after a space.

    Returns:
      L token ids.

    Raises:
      ValueError: no mask token, or a word that is not one token; names words that are.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"prompt=masked_lm needs a mask token, and {type(tokenizer).__name__} has none: use "
            "prompt: causal_lm with this model."
        )
    unknown = tokenizer.unk_token_id

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(f" {text.strip()}", add_special_tokens=False)["input_ids"])

    def fits(text: str) -> bool:
        return bool(text.strip()) and len(ids_of(text)) == 1 and unknown not in ids_of(text)

    for word in words:
        if fits(word):
            continue
        ids = ids_of(word)
        pieces = ", ".join(map(str, tokenizer.convert_ids_to_tokens(ids)))
        what = f"is {len(ids)} tokens ({pieces}) and a mask is filled by one"
        if unknown in ids:
            what = "is not in the vocabulary"
        others = (word.lower(), word.capitalize(), word.upper(), *word.split(), word.rstrip("s"))
        fitting = [repr(o) for o in dict.fromkeys(others) if o != word and fits(o)]
        named = f", for example, {' or '.join(fitting)}" if fitting else " words of the vocabulary"
        raise ValueError(
            f"label word {word!r} {what}: set label_words to{named}; "
            "prompt: causal_lm scores words of several tokens."
        )
    return tuple(ids_of(word)[0] for word in words)
