"""Prompts -> token ids that fit: what is too long is cut from the end of the passage, then from other
fields, never from the mask or the answer.

All texts of a batch are tokenised in one call; only those that are too long are taken one by one.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hf_dpzero.tasks.templates import ANSWER, MASK, PLACE, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATORS = {"masked_lm": " ", "causal_lm": "\n\n"}

Row = Mapping[str, str]


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


class _Halves(NamedTuple):
    """A prompt's text before and after the place of the mask or the answer."""

    before: str
    after: str


@dataclass(frozen=True)
class PromptEncoder:
    """Rows -> tokens of their prompts.

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
        """Each row's prompt in at most as many tokens as its limit says.

        Raises:
          ValueError: a limit leaves no room even for the template without its fields, or a prompt is
            empty.
        """
        halves = [self._halves(row, self.demonstrations) for row in rows]
        whole = self.ids([self._joined(half) for half in halves])
        return [
            self._encoded(half, ids) if len(ids) <= limit else self._fitted(row, limit)
            for row, half, ids, limit in zip(rows, halves, whole, limits, strict=True)
        ]

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids with special tokens; no end token after a text that is to be continued."""
        if not texts:
            return []
        found: list[list[int]] = self.tokenizer(list(texts), verbose=False)["input_ids"]
        return [ids[:-1] for ids in found] if self._drops_end else found

    def answer_ids(self, rows: Sequence[Row], answers: Sequence[str]) -> list[list[int]]:
        """The tokens of each row's answer after its prompt, as they come out in one text with it."""
        halves = [self._halves(row) for row in rows]
        prompts = self.ids([self._joined(half) for half in halves])
        whole = self.ids([half.before + a for half, a in zip(halves, answers, strict=True)])
        spaces = [half.before[len(half.before.rstrip(" ")) :] for half in halves]
        return [
            self._after(prompt, together, space + answer)
            for prompt, together, space, answer in zip(prompts, whole, spaces, answers, strict=True)
        ]

    def example(self, row: Row, answer: str) -> str:
        """The prompt with its answer, as a demonstration shows it."""
        half = self._halves(row)
        return half.before + answer + half.after

    # ---------------------------------------------------------------- text

    def _halves(self, row: Row, demonstrations: Sequence[str] = ()) -> _Halves:
        clean = {name: text.replace(PLACE, "") for name, text in row.items()}
        own = self.template.render({**clean, MASK: PLACE, ANSWER: PLACE})
        before, _, after = own.partition(PLACE)
        return _Halves(SEPARATORS[self.kind].join((*demonstrations, before)), after)

    def _joined(self, half: _Halves) -> str:
        """What is tokenised: with the mask token, or up to the spaces before the answer."""
        if self.kind == "causal_lm":
            return half.before.rstrip(" ")
        return half.before + str(self.tokenizer.mask_token) + half.after

    @functools.cached_property
    def _drops_end(self) -> bool:
        """Whether the tokenizer ends every text, and this one goes on."""
        ids = self.tokenizer("a", verbose=False)["input_ids"]
        ends = len(ids) > 1 and ids[-1] in (
            self.tokenizer.eos_token_id,
            self.tokenizer.sep_token_id,
        )
        return ends and self.kind == "causal_lm"

    # ---------------------------------------------------------------- tokens

    def _encoded(
        self, half: _Halves, ids: list[int], cut: bool = False, left_out: int = 0
    ) -> Encoded:
        if not ids:
            raise ValueError(
                f"a row and template {self.template.text!r} make an empty prompt, and this tokenizer "
                "puts no token in front of it: write some words before {answer}."
            )
        return Encoded(ids, self._position(half, ids), cut, left_out)

    def _position(self, half: _Halves, ids: Sequence[int]) -> int:
        """A row's text may spell the mask token too: ours is the one after those before it."""
        if self.kind == "causal_lm":
            return len(ids) - 1
        mask = self.tokenizer.mask_token_id
        places = [index for index, token in enumerate(ids) if token == mask]
        return places[half.before.count(str(self.tokenizer.mask_token))]

    def _after(self, prompt: list[int], together: list[int], written: str) -> list[int]:
        if together[: len(prompt)] == prompt and len(together) > len(prompt):
            return together[len(prompt) :]
        return list(self.tokenizer(written, add_special_tokens=False)["input_ids"])

    # ---------------------------------------------------------------- too long

    def _fitted(self, row: Row, limit: int) -> Encoded:
        """A prompt that is too long with all demonstrations, without some of them, or cut."""
        for left_out in range(1, len(self.demonstrations) + 1):
            half = self._halves(row, self.demonstrations[left_out:])
            ids = self.ids([self._joined(half)])[0]
            if len(ids) <= limit:
                return self._encoded(half, ids, left_out=left_out)
        return self._cut(row, limit)

    def _cut(self, row: Row, limit: int) -> Encoded:
        """Without demonstrations; cuts the passage from its end, then, if need be, other fields."""
        for name in self._in_order_of_cutting(row):
            found = self._cut_field(row, name, limit)
            if found is not None:
                return found
            row = {**row, name: ""}
        bare = len(self.ids([self._joined(self._halves(row))])[0])
        raise ValueError(
            f"the template alone has {bare} tokens, and only {limit} fit: raise max_seq_length, lower "
            "max_new_tokens, or shorten the template or the label words."
        )

    def _in_order_of_cutting(self, row: Row) -> list[str]:
        others = sorted(self.template.used_fields, key=lambda field: -len(row[field]))
        return sorted(others, key=lambda field: field != self.passage)

    def _cut_field(self, row: Row, name: str, limit: int) -> Encoded | None:
        """The prompt with as much of one field as fits, from its start; None if none of it does."""
        text = row[name].strip()

        @functools.cache
        def cut(end: int) -> tuple[_Halves, list[int]]:
            half = self._halves({**row, name: text[:end]})
            return half, self.ids([self._joined(half)])[0]

        def size(end: int) -> int:
            return len(cut(end)[1])

        end = (self._last_token if self.tokenizer.is_fast else _last_character)(text, size, limit)
        if end is None:
            return None
        return self._encoded(*cut(end), cut=True, left_out=len(self.demonstrations))

    def _last_token(self, text: str, size: Callable[[int], int], limit: int) -> int | None:
        """The end of the last token of a text with which the prompt's `size` is within its limit."""
        found = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ends = [0, *(end for _, end in found["offset_mapping"])]
        kept = too_many = len(ends) - 1
        while (excess := size(ends[kept]) - limit) > 0:
            if kept == 0:
                return None
            too_many, kept = kept, max(0, kept - excess)
        while excess < 0 and kept + 1 < too_many:  # too much was left out
            excess = size(ends[kept + 1]) - limit
            kept += excess <= 0
        return ends[kept]


def _last_character(text: str, size: Callable[[int], int], limit: int) -> int | None:
    """The same for a tokenizer in Python, which does not say where its tokens lie."""
    fitting = bisect.bisect_right(range(len(text) + 1), limit, key=size)
    return fitting - 1 if fitting else None
