"""Prompts and label words -> token ids.

What is too long is cut from the end of the passage, then from other fields, never from the mask or the
answer. A batch's texts are tokenised in one call; only those that are too long are taken one by one.
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
    before: str  # the place of the mask or the answer
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
        """Each row's prompt.

        Args:
          rows: field -> text.
          limits: most tokens of each row's prompt.

        Returns:
          One `Encoded` a row.

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
        encoded: list[list[int]] = self.tokenizer(["a", *texts], verbose=False)["input_ids"]
        ends = (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        drop = self.kind == "causal_lm" and len(encoded[0]) > 1 and encoded[0][-1] in ends
        return [ids[:-1] if drop else ids for ids in encoded[1:]]

    def answer_ids(self, rows: Sequence[Row], answers: Sequence[str]) -> list[list[int]]:
        """The tokens of each row's answer, as they come out in one text with its prompt.

        Args:
          rows: field -> text.
          answers: the text after each row's prompt.

        Returns:
          Token ids; an answer that changes the prompt's last token is tokenised by itself.
        """
        halves = [self._halves(row) for row in rows]
        prompts = self.ids([self._joined(half) for half in halves])
        whole = self.ids([half.before + a for half, a in zip(halves, answers, strict=True)])
        answer_tokens = []
        for half, prompt, together, answer in zip(halves, prompts, whole, answers, strict=True):
            if together[: len(prompt)] == prompt and len(together) > len(prompt):
                answer_tokens.append(together[len(prompt) :])
            else:
                alone = half.before[len(half.before.rstrip(" ")) :] + answer
                answer_tokens.append(
                    list(self.tokenizer(alone, add_special_tokens=False)["input_ids"])
                )
        return answer_tokens

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

    def _encoded(
        self, half: _Halves, ids: list[int], cut: bool = False, left_out: int = 0
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
        place = places[half.before.count(str(self.tokenizer.mask_token))]
        return Encoded(ids, place, cut, left_out)

    def _fitted(self, row: Row, limit: int) -> Encoded:
        """A prompt that is too long: without some demonstrations, or without any and cut."""
        for left_out in range(1, len(self.demonstrations) + 1):
            half = self._halves(row, self.demonstrations[left_out:])
            ids = self.ids([self._joined(half)])[0]
            if len(ids) <= limit:
                return self._encoded(half, ids, left_out=left_out)
        longest_first = sorted(self.template.used_fields, key=lambda field: -len(row[field]))
        for name in sorted(longest_first, key=lambda field: field != self.passage):
            if encoded := self._cut_field(row, name, limit):
                return encoded
            row = {**row, name: ""}
        bare = len(self.ids([self._joined(self._halves(row))])[0])
        raise ValueError(
            f"the template alone has {bare} tokens, and only {limit} fit: raise max_seq_length, lower "
            "max_new_tokens, or shorten the template or the label words."
        )

    def _cut_field(self, row: Row, name: str, limit: int) -> Encoded | None:
        """The prompt with as much of one field as fits, from its start; None if none of it does."""
        text = row[name].strip()

        @functools.cache
        def cut(end: int) -> tuple[_Halves, list[int]]:
            half = self._halves({**row, name: text[:end]})
            return half, self.ids([self._joined(half)])[0]

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
        while (excess := size(ends[kept]) - limit) > 0:
            if kept == 0:
                return None
            too_many, kept = kept, max(0, kept - excess)
        while excess < 0 and kept + 1 < too_many:  # too much was left out
            excess = size(ends[kept + 1]) - limit
            kept += excess <= 0
        return ends[kept]


def mask_word_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[int, ...]:
    """The token of each label word where it stands at a mask, that is after a space.

    Args:
      tokenizer: a masked language model's.
      words: the label words.

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

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(f" {text.strip()}", add_special_tokens=False)["input_ids"])

    def fits(text: str) -> bool:
        return bool(text.strip()) and len(ids_of(text)) == 1 and unknown not in ids_of(text)

    unknown = tokenizer.unk_token_id
    for word in words:
        if fits(word):
            continue
        ids = ids_of(word)
        pieces = ", ".join(map(str, tokenizer.convert_ids_to_tokens(ids)))
        what = f"is {len(ids)} tokens ({pieces}) and a mask is filled by one"
        if unknown in ids:
            what = "is not in the vocabulary"
        spellings = (word.lower(), word.capitalize(), word.upper(), *word.split(), word.rstrip("s"))
        fitting = [
            repr(other) for other in dict.fromkeys(spellings) if other != word and fits(other)
        ]
        named = f", for example, {' or '.join(fitting)}" if fitting else " words of the vocabulary"
        raise ValueError(
            f"label word {word!r} {what}: set label_words to{named}; "
            "prompt: causal_lm scores words of several tokens."
        )
    return tuple(ids_of(word)[0] for word in words)
