"""The tokens of label words, and what to do where a word is not one token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Token = TypeVar("Token", bound=Hashable)


def mask_word_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[int, ...]:
    """The token of each label word where it stands at a mask, that is after a space.

    Raises:
      ValueError: no mask token, a word that is not one token (names words that are), or two words
        with the same token.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"prompt=masked_lm needs a mask token, and {type(tokenizer).__name__} has none: use "
            "prompt: causal_lm with this model."
        )
    return distinct([_one_token(tokenizer, word) for word in words], words)


def distinct(ids: Sequence[Token], words: Sequence[str]) -> tuple[Token, ...]:
    """The ids (or tuples of them), none of which may be there twice.

    Raises:
      ValueError: names the two words.
    """
    first: dict[Token, str] = {}
    for token, word in zip(ids, words, strict=True):
        if token in first:
            raise ValueError(
                f"label words {first[token]!r} and {word!r} are the same token ({token}), so the "
                "model cannot tell these labels apart: choose other label_words."
            )
        first[token] = word
    return tuple(ids)


def _one_token(tokenizer: PreTrainedTokenizerBase, word: str) -> int:
    ids = _ids_after_space(tokenizer, word)
    if not _is_one_token(tokenizer, word):
        pieces = tokenizer.convert_ids_to_tokens(ids)
        what = (
            "is not in the vocabulary"
            if tokenizer.unk_token_id in ids
            else f"is {len(ids)} tokens ({', '.join(map(str, pieces))}) and a mask is filled by one"
        )
        raise ValueError(f"label word {word!r} {what}: {_advice(tokenizer, word)}")
    return ids[0]


def _ids_after_space(tokenizer: PreTrainedTokenizerBase, word: str) -> list[int]:
    return list(tokenizer(f" {word.strip()}", add_special_tokens=False)["input_ids"])


def _is_one_token(tokenizer: PreTrainedTokenizerBase, word: str) -> bool:
    ids = _ids_after_space(tokenizer, word)
    return bool(word.strip()) and len(ids) == 1 and ids[0] != tokenizer.unk_token_id


def _advice(tokenizer: PreTrainedTokenizerBase, word: str) -> str:
    """Other spellings that are one token, or the prompt that takes several."""
    spellings = (word.lower(), word.capitalize(), word.upper(), *word.split(), word.rstrip("s"))
    others = [other for other in dict.fromkeys(spellings) if other != word]
    fitting = [other for other in others if _is_one_token(tokenizer, other)]
    several = "prompt: causal_lm scores words of several tokens"
    if not fitting:
        return f"set label_words to words of the vocabulary; {several}."
    return f"set label_words to, for example, {' or '.join(map(repr, fitting))}; {several}."
