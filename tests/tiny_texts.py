"""Classified texts of 2 to 16 tokens, a collator that pads them, and their differences in a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_dpzero.batches.logical_batch import places_of
from hf_dpzero.batches.placement import Placement
from hf_dpzero.perturbation.directions import Direction


def texts(rows: int = 60, seed: int = 4) -> list[dict[str, Any]]:
    """Rows of 2 to 16 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 17, (rows,), generator=generator).tolist()
    ids = [torch.randint(5, 50, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": i, "attention_mask": [1] * len(i), "labels": i[0] % 2} for i in ids]


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Token 1 pads."""
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 1, "attention_mask": 0}
    tokens = {n: [row[n] + [v] * (width - len(row[n])) for row in rows] for n, v in fill.items()}
    return {
        n: torch.tensor(v) for n, v in {**tokens, "labels": [r["labels"] for r in rows]}.items()
    }


def differences(trainer: Any, chosen: list[int]) -> dict[int, float]:
    """x of each row, evaluated as a step evaluates it."""
    parts = trainer.run.shapes.microbatches(chosen)
    step = trainer.step.differences
    x = step(parts, [Direction(7, 0)])[:, 0].tolist()
    step.space.settle_()
    return dict(zip((chosen[i] for i in places_of(parts)), x, strict=True))


def passes_of(rows: int) -> Placement:
    """Passes of so many rows at every width."""
    return Placement(float(rows), (rows,), {0: 1.0}, cost=0.0)
