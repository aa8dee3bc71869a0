"""Tokenizers of the families that prompts meet, trained in-process on the toy text.

They differ in what a prompt's tokens depend on: what stands at the start and the end of a text, how a
space is written, whether case is kept, whether a character may be several tokens, and whether the
tokenizer knows where its tokens lie in the text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from tiny_language_models import LABEL_WORDS, TOY_TEXT, opt_tokenizer, roberta_tokenizer
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

QWEN_PIECES = (  # as in the published tokenizer.json, less its English contractions
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> Iterator[str]:
    yield from TOY_TEXT
    yield from [text for word in LABEL_WORDS for text in (word, f" {word}")] * 100


@functools.cache
def bert() -> PreTrainedTokenizerFast:
    """WordPiece without case: `[CLS] text [SEP]`, `[MASK]`."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=256,
        **dict(zip(names, special, strict=True)),
    )


@functools.cache
def llama(ends: bool = False, legacy: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece BPE with bytes for what it does not know: `<s> text`, or with `</s>` after it.

    Args:
      ends: end every text with `</s>`.
      legacy: write the first space as Llama 2 does (a normaliser), not as newer ones (Metaspace).
    """
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁")  # no piece has a space inside
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*special, *pieces], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in trained["merges"]]
    tokenizer = Tokenizer(
        models.BPE(trained["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(special)  # and not the bytes
    _write_spaces(tokenizer, legacy)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def _write_spaces(tokenizer: Tokenizer, legacy: bool) -> None:
    if legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)


@functools.cache
def qwen() -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds nothing to a text and joins new lines to the punctuation before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus(), *["?\n", ".\n", ":\n"] * 300], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


class Slow(PreTrainedTokenizer):
    """A tokenizer in Python, which does not know where tokens lie; words are cut into threes.

    "abcdefg" is `abc`, `##def`, `##g`, while a digit is a token by itself, so tokens are spread
    unevenly over a text.
    """

    def __init__(self, **settings: Any) -> None:
        self.known: dict[str, int] = {"<pad>": 0, "<unk>": 1, "</s>": 2, "<mask>": 3}
        special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
        super().__init__(**{**special, "mask_token": "<mask>", **settings})

    @property
    def vocab_size(self) -> int:
        return len(self.known)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.known)

    def _tokenize(self, text: str, **settings: Any) -> list[str]:
        found: list[str] = []
        for word in text.replace("\n", " \n ").split(" "):
            size = 1 if word.isdigit() else 3
            parts = [word[i : i + size] for i in range(0, len(word), size)]
            found += [part if i == 0 else f"##{part}" for i, part in enumerate(parts)]
        return found

    def _convert_token_to_id(self, token: str) -> int:
        return self.known.setdefault(token, len(self.known))

    def _convert_id_to_token(self, index: int) -> str:
        return next(token for token, known in self.known.items() if known == index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens).replace(" ##", "")


MASKED = {"roberta": roberta_tokenizer, "bert": bert, "slow": Slow}
CAUSAL = {
    "opt": opt_tokenizer,
    "llama": llama,
    "llama_metaspace": lambda: llama(legacy=False),
    "llama_with_end": lambda: llama(ends=True),
    "qwen": qwen,
    "slow": Slow,
}
"""Family -> a function that makes its tokenizer."""
