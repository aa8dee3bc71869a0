"""Tiny checkpoints of real architectures, with the tokenizers that belong to them, made in-process.

`save_masked_lm` and `save_causal_lm` write a folder that `from_pretrained` reads like a published one:
a configuration, random weights and a byte-level BPE tokenizer, trained here on the few sentences of
`TOY_TEXT`. Special tokens and their places are those of RoBERTa (`<s> ... </s>`, a mask that takes the
space in front of it) and of OPT (GPT-2's tokenizer with `</s>` put in front). The label words of the
paper's prompts are single tokens, as they are in the published tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LABEL_WORDS = (
    *("terrible", "bad", "okay", "good", "great"),
    *("Yes", "No", "Maybe"),
    *("Description", "Entity", "Expression", "Human", "Location", "Number"),
)
"""Words that published prompts ask for; each is one token, with and without a space in front."""

TOY_TEXT = (
    "The film was slow at first, and then it was the best that they had seen in years.",
    "It was a great evening: the actors were good, the music was okay, the chairs were bad.",
    "Question: does the river end in a lake? Answer: it was said to, but nobody went to see.",
    "Passage: in 1900 the town had 200 houses and one school. Title: the town of the river.",
    "A man with a red hat is riding a horse. A person is outdoors.",
    "How many people live in the town? Who was the first teacher? What does the word mean?",
)

POSITIONS = 256
"""Tokens that a tiny model has positions for."""

_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def drawn(model: Any) -> Any:
    """The model, its matrices drawn anew, large enough to tell rows apart."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model


def save_masked_lm(folder: Path, seed: int = 0) -> Path:
    """A RobertaForMaskedLM (tied embeddings) with its tokenizer in `folder`, which is returned."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    tokenizer = roberta_tokenizer()
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        intermediate_size=32,
        max_position_embeddings=POSITIONS + 2,  # positions start at pad_token_id + 1 = 2
        type_vocab_size=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **_SIZES,
    )
    return _save(folder, seeded(lambda: RobertaForMaskedLM(config), seed), tokenizer)


def save_causal_lm(folder: Path, seed: int = 0) -> Path:
    """An OPTForCausalLM (tied embeddings) with its tokenizer in `folder`, which is returned."""
    from transformers import OPTConfig, OPTForCausalLM

    tokenizer = opt_tokenizer()
    config = OPTConfig(
        vocab_size=len(tokenizer),
        word_embed_proj_dim=_SIZES["hidden_size"],
        ffn_dim=32,
        max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **_SIZES,
    )
    return _save(folder, seeded(lambda: OPTForCausalLM(config), seed), tokenizer)


WORDS = (
    *("[PAD]", "[UNK]", "good", "bad", "film", "very"),
    *("great", "terrible", "awful", "it", "was", "a"),
)


def word_tokenizer(side: str = "right") -> Any:
    """Words between spaces to their places in `WORDS`; unknown words are 1, and nothing is added."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side=side, model_max_length=24, **special
    )


def save_encoder(folder: Path) -> Path:
    """A bare BERT of width 16 whose weights tell words and positions apart, and `word_tokenizer`."""
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": len(WORDS), "intermediate_size": 24, "max_position_embeddings": 24}
    model, generator = BertModel(BertConfig(**_SIZES, **sizes)), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    return _save(folder, model, word_tokenizer())


def seeded(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """Builds with weights that depend only on `seed`; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


def _save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- tokenizers


def roberta_tokenizer(words: Sequence[str] = LABEL_WORDS) -> Any:
    """RoBERTa's: `<s> text </s>`; " <mask>" and "<mask>" are one token, and the same."""
    from transformers import AddedToken, RobertaTokenizer

    special = ("<s>", "<pad>", "</s>", "<unk>")  # 0 to 3 in every published RoBERTa; <mask> is last
    vocabulary, merges = byte_level_bpe(words, special)
    vocabulary["<mask>"] = len(vocabulary)
    return _checked(
        RobertaTokenizer(
            vocab=vocabulary,
            merges=merges,
            mask_token=AddedToken("<mask>", lstrip=True, special=True),
            model_max_length=POSITIONS,
        ),
        words,
    )


def opt_tokenizer(words: Sequence[str] = LABEL_WORDS) -> Any:
    """OPT's: GPT-2's byte-level BPE, `</s>` in front of the text and nothing after it."""
    from transformers import GPT2Tokenizer

    special = ("<s>", "<pad>", "</s>", "<unk>")  # 0 to 3 in the published OPT
    vocabulary, merges = byte_level_bpe(words, special)
    return _checked(
        GPT2Tokenizer(
            vocab=vocabulary,
            merges=merges,
            bos_token="</s>",
            eos_token="</s>",
            unk_token="</s>",
            pad_token="<pad>",
            add_bos_token=True,
        ),
        words,
    )


def byte_level_bpe(
    words: Sequence[str], special: Sequence[str], vocab_size: int = 600
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary (the special tokens first) and merges, trained on `TOY_TEXT` and `words`.

    The words occur often, with and without a space in front, so that each becomes one token.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    often = [text for word in words for text in (word, f" {word}")] * 100
    tokenizer.train_from_iterator([*TOY_TEXT, *often], trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    return dict(trained["vocab"]), [tuple(merge) for merge in trained["merges"]]


def _checked(tokenizer: Any, words: Sequence[str]) -> Any:
    for text in (*words, *(f" {word}" for word in words)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == 1, f"{text!r} is {len(ids)} tokens"
    return tokenizer
