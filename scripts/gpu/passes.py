"""Forward passes on this device: if a row's place or neighbours move its logits, and what one costs."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

from scripts.gpu.results import Item

SHAPES = ("roberta-large", "opt-1.3b", "opt-6.7b")
ROWS, WIDTHS, HIDDEN = (1, 2, 4, 8, 16, 32, 64), (64, 256), (64, 384, 1024)
ARCHITECTURES = ("bert", "roberta", "opt", "llama")
DTYPES = ("float32", "bfloat16", "float16")


def items(device: str, dry_run: bool) -> Iterator[Item]:
    """Rows of each architecture by place and neighbours, then seconds of a pass by rows and tokens."""
    rows, widths, hidden = ((1, 4), (8,), (32,)) if dry_run else (ROWS, WIDTHS, HIDDEN)
    for name in ARCHITECTURES:
        sizes = [size for size in rows if size > 1]
        yield Item(name, 6, functools.partial(other_bits, name, device, sizes, widths, hidden))
    for shape in ("tiny",) if dry_run else SHAPES:
        yield Item(shape, 6, functools.partial(seconds, shape, device, rows, widths))


def seconds(
    shape: str, device: str, rows: tuple[int, ...], widths: tuple[int, ...], left: float = 0.0
) -> Mapping[str, Any]:
    """Median seconds of five bfloat16 passes: "rows x tokens" -> seconds."""
    import torch

    from scripts.benchmarks.clock import synchronize
    from scripts.benchmarks.settings import StepBench
    from scripts.benchmarks.timed_steps import build

    bench = StepBench(shape=shape, dtype="bfloat16", device=device, one_batch=True, seq_length=8)
    model, found = build(bench)[0].eval(), {}
    for width, count in itertools.product(widths, rows):
        ids, mask = torch.full((2, count, width), 5, device=device)
        mask[:, -1] = 0  # as in a run, where each pass has a masked column
        taken = []
        for _ in range(6):
            synchronize(device)
            began = time.perf_counter()
            with torch.no_grad():
                model(input_ids=ids, attention_mask=mask)
            synchronize(device)
            taken.append(time.perf_counter() - began)
        found[f"{count} x {width}"] = statistics.median(taken[1:])
    return {"seconds": found}


def other_bits(
    name: str, device: str, sizes: list[int], widths: tuple[int, ...], hidden: tuple[int, ...],
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
