"""Forward passes on this device: if a row's place or neighbours move its logits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from scripts.gpu.results import Item

ROWS, WIDTHS, HIDDEN = (2, 4, 8, 16, 32, 64), (64, 256), (64, 384, 1024)
ARCHITECTURES = ("bert", "roberta", "opt", "llama")
DTYPES = ("float32", "bfloat16", "float16")


def items(device: str, dry_run: bool) -> Iterator[Item]:
    """One for each architecture."""
    rows, widths, hidden = ((2, 4), (8,), (32,)) if dry_run else (ROWS, WIDTHS, HIDDEN)
    for name in ARCHITECTURES:
        yield Item(name, 6, functools.partial(other_bits, name, device, rows, widths, hidden))


def other_bits(
    name: str, device: str, sizes: tuple[int, ...], widths: tuple[int, ...], hidden: tuple[int, ...],
    left: float = 0.0,
) -> Mapping[str, Any]:  # fmt: skip
    """How many passes give a row other logits in another place, or beside other rows.

    Each pass has copies of one row, then that row in the middle of rows of other lengths.
    """
    import torch

    found = {"passes": 0, "by_place": 0, "by_neighbours": 0}
    draw = torch.Generator().manual_seed(1)
    for size, dtype in itertools.product(hidden, DTYPES):
        model = _model(name, size).to(device, getattr(torch, dtype)).eval()
        for width, count in itertools.product(widths, sizes):
            ids = torch.randint(4, 200, (count, width), generator=draw)
            lengths = torch.randint(2, width, (count, 1), generator=draw)
            middle = count // 2
            lengths[middle] = width - 2
            mask = (torch.arange(width) < lengths).long()
            with torch.no_grad():
                rows = (ids.to(device), mask.to(device))
                alone = model(*(t[middle].expand_as(t).contiguous() for t in rows)).logits
                mixed = model(*rows).logits
            found["passes"] += 1
            found["by_place"] += not bool((alone == alone[:1]).all())
            found["by_neighbours"] += not torch.equal(alone[middle], mixed[middle])
    return found


def _model(name: str, hidden: int) -> Any:
    """Two layers of random weights under a head of two classes."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    width = {"ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden} if name == "opt" else {}
    config = AutoConfig.for_model(
        name, vocab_size=200, hidden_size=hidden, num_hidden_layers=2, pad_token_id=1,
        num_attention_heads=hidden // 32, max_position_embeddings=300,
        **width or {"intermediate_size": 4 * hidden},
    )  # fmt: skip
    torch.manual_seed(hidden)
    return AutoModelForSequenceClassification.from_config(config)
