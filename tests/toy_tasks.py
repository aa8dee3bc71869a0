"""A toy language, models that have read it, and tasks in it that they cannot do yet.

The public text tells reviews and rooms. A review's opinion shows in its words, and the text goes on with
"It was good." or "It was bad." accordingly, but with "great" or "terrible" at random: whoever has read
it knows what an opinion is, and not which of the two words means which. A question about a room with two
things is answered by either of them, the second one seven times in ten. What the private rows teach
(`review_rows`, `room_rows`) is what the public text leaves open: "great" praises, and the first thing is
what was asked for. The first is learnt from the labels alone, the second from the answers alone.

Rows and models depend on nothing but their arguments; global generators are left as they are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from tiny_language_models import LABEL_WORDS, POSITIONS, opt_tokenizer, roberta_tokenizer, seeded
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PRAISE = ("lovely", "fine", "sweet", "bright", "warm", "clever")
BLAME = ("dull", "ugly", "sour", "grim", "cold", "silly")
SUBJECTS = ("film", "play", "song", "book", "meal", "trip")
COLOURS = ("red", "blue", "green", "white", "black", "brown")
THINGS = ("ball", "box", "cup", "hat", "lamp", "chair")
OFTEN = ("the", "The", "was", "is", "and", "It", "one", "Question", "Answer", "which", "a")
WORDS = (*LABEL_WORDS, *PRAISE, *BLAME, *SUBJECTS, *COLOURS, *THINGS, *OFTEN)

QUESTION = "which one?"
ROOM_TEMPLATE = "{context}\nQuestion: {question}\nAnswer: {answer}"
_KNOWN, _OPEN = ("bad", "good"), ("terrible", "great")
_SECOND = 0.7

Row = dict[str, Any]


# ---------------------------------------------------------------- rows


def review_rows(count: int, seed: int) -> list[Row]:
    """{"sentence": ..., "label": 1 for praise, 0 for blame}, as SST-2's."""
    draw = random.Random(seed)
    return [_review(draw) for _ in range(count)]


def room_rows(count: int, seed: int) -> list[Row]:
    """{"context": ..., "question": ..., "answer": the first of two things, with its colour}."""
    draw = random.Random(seed)
    return [_room(draw, second=False) for _ in range(count)]


def _review(draw: random.Random) -> Row:
    label = draw.randrange(2)
    first, second = draw.sample(PRAISE if label else BLAME, 2)
    return {"sentence": f"The {draw.choice(SUBJECTS)} was {first} and {second}.", "label": label}


def _room(draw: random.Random, second: bool) -> Row:
    colours, things = draw.sample(COLOURS, 2), draw.sample(THINGS, 2)
    one, two = (f"{colour} {thing}" for colour, thing in zip(colours, things))
    context = f"The {things[0]} is {colours[0]} and the {things[1]} is {colours[1]}."
    return {"context": context, "question": QUESTION, "answer": two if second else one}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ---------------------------------------------------------------- public text


def public_text(count: int, seed: int, rooms: bool) -> list[tuple[str, str]]:
    """What reviews, and with `rooms` as many rooms, begin with, and how they go on."""
    draw = random.Random(seed)
    kinds = (_review_text, _room_text) if rooms else (_review_text,)
    return [draw.choice(kinds)(draw) for _ in range(count)]


def _review_text(draw: random.Random) -> tuple[str, str]:
    row = _review(draw)
    word = _KNOWN[row["label"]] if draw.random() < 0.6 else draw.choice(_OPEN)
    return row["sentence"], f" It was a {word} one." if draw.random() < 0.5 else f" It was {word}."


def _room_text(draw: random.Random) -> tuple[str, str]:
    row = _room(draw, second=draw.random() < _SECOND)
    return f"{row['context']}\nQuestion: {row['question']}\nAnswer:", f" {row['answer']}\n"


# ---------------------------------------------------------------- models that have read it


def pretrained_masked_lm(folder: Path, steps: int = 300, seed: int = 0) -> Path:
    """A RoBERTa that fills in words of reviews, with its tokenizer in `folder`, which is returned."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    tokenizer = roberta_tokenizer(WORDS)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS + 2,
        type_vocab_size=1,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = seeded(lambda: RobertaForMaskedLM(config), seed)
    text = [start + end for start, end in public_text(4096, seed, rooms=False)]
    batch = dict(tokenizer(text, padding=True, return_tensors="pt"))
    ids = batch["input_ids"]
    opinions = tokenizer.convert_tokens_to_ids([f"Ġ{word}" for word in (*_KNOWN, *_OPEN)])
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    hidden = (hidden | torch.isin(ids, torch.tensor(opinions))) & (ids > 3)  # no special token
    batch["input_ids"] = ids.masked_fill(hidden, tokenizer.mask_token_id)
    batch["labels"] = ids.masked_fill(~hidden, -100)
    read_(model, batch, steps)
    return _saved(folder, model, tokenizer)


def pretrained_causal_lm(folder: Path, steps: int = 500, seed: int = 0) -> Path:
    """An OPT that goes on with reviews and rooms, with its tokenizer in `folder`."""
    from transformers import OPTConfig, OPTForCausalLM

    tokenizer = opt_tokenizer(WORDS)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        max_position_embeddings=POSITIONS,
        init_std=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = seeded(lambda: OPTForCausalLM(config), seed)
    text = public_text(4096, seed, rooms=True)
    starts = torch.tensor([len(tokenizer(start)["input_ids"]) for start, _ in text])
    batch = dict(tokenizer([start + end for start, end in text], padding=True, return_tensors="pt"))
    ids, places = batch["input_ids"], torch.arange(batch["input_ids"].shape[1])
    goes_on = (places >= starts.unsqueeze(1)) & (batch["attention_mask"] > 0)
    batch["labels"] = ids.masked_fill(~goes_on, -100).roll(-1, dims=1)  # the first is not labelled
    read_(model, batch, steps)
    return _saved(folder, model, tokenizer)


def read_(model: PreTrainedModel, text: Mapping[str, Tensor], steps: int) -> list[float]:
    """AdamW in place, without dropout, on `labels` `[N, T]` at the positions of the logits."""
    order = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(text["labels"]), (64,), generator=order)
        batch = {name: rows[chosen] for name, rows in text.items()}
        labels = batch.pop("labels")
        loss = F.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def _saved(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
