"""A prompted forward pass: logits at the scored positions alone, against all logits.

Times both by turns in one process (medians, and their ratio). Random weights, random tokens.

  python -m scripts.prompted_forward --shape roberta-base --head masked_lm
  python -m scripts.prompted_forward --shape opt-125m --head causal_lm --batch_size 8 --seq_length 256
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.initialization import no_init_weights

from hf_dpzero.experiments.memory import SHAPES
from hf_dpzero.objectives.losses import model_logits
from hf_dpzero.objectives.prompted import LabelWords
from scripts.benchmarks.shapes import build_config, fill_

CLASSES = {"masked_lm": AutoModelForMaskedLM, "causal_lm": AutoModelForCausalLM}
WORDS = LabelWords((10, 20))


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="roberta-base")
    parser.add_argument("--head", choices=CLASSES, default="masked_lm")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seq_length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    model = build(asked, "cpu")
    fill_(model)
    batch = inputs(asked, model, "cpu")
    losses = {"selected": lambda: WORDS(model, batch), "full": lambda: full(model, batch)}
    torch.testing.assert_close(*(evaluate() for evaluate in losses.values()))
    seconds = timed(losses, asked.repeats)
    print(
        f"{asked.shape} {asked.head} {asked.batch_size} x {asked.seq_length}: "
        f"{seconds['selected']:.3f} s against {seconds['full']:.3f} s (ratio "
        f"{seconds['selected'] / seconds['full']:.2f})"
    )


def build(asked: Any, device: str) -> nn.Module:
    """The shape's language model, its weights not filled."""
    with no_init_weights(), torch.device(device):
        model: nn.Module = CLASSES[asked.head].from_config(build_config(asked.shape))
    return model.eval()


def inputs(asked: Any, model: Any, device: str) -> dict[str, Tensor]:
    """Random prompts of full length, scored at their last but one token."""
    size, generator = (asked.batch_size, asked.seq_length), torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(4, model.config.vocab_size, size, generator=generator),
        "attention_mask": torch.ones(size, dtype=torch.int64),
        "positions": torch.full(size[:1], asked.seq_length - 2),
        "labels": torch.randint(0, 2, size[:1], generator=generator),
    }
    return {name: value.to(device) for name, value in batch.items()}


def of_model(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model itself takes."""
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def full(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same losses from all logits."""
    logits = model_logits(model, of_model(batch))
    rows = torch.arange(len(logits))
    words = logits[rows, batch["positions"]][:, list(WORDS.token_ids)].float()
    return nn.functional.cross_entropy(words, batch["labels"], reduction="none")


@torch.no_grad()
def timed(losses: dict[str, Any], repeats: int) -> dict[str, float]:
    """Median seconds of each, taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(repeats):
        for name, run in losses.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


if __name__ == "__main__":
    main()
