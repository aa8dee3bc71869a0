"""A prompted forward pass: logits at the scored positions alone, against all logits.

Times both by turns in one process (medians, and their ratio). Random weights, random tokens.

  python -m scripts.prompted_forward --shape roberta-base --head masked_lm
  python -m scripts.prompted_forward --shape opt-125m --head causal_lm --batch_size 8 --seq_length 256
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.initialization import no_init_weights

from hf_dpzero.experiments.memory import SHAPES
from hf_dpzero.objectives.losses import model_logits
from hf_dpzero.objectives.prompted import LabelWords
from scripts.benchmarks.clock import interleaved
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
    for name, default in {"batch_size": 16, "seq_length": 64, "repeats": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    with no_init_weights():
        model: Any = CLASSES[asked.head].from_config(build_config(asked.shape)).eval()
    fill_(model)
    batch = inputs(asked, model)
    with torch.no_grad():
        # The same losses, or the times would be of different work.
        torch.testing.assert_close(WORDS(model, batch), full(model, batch))
        timed = interleaved([lambda _: WORDS(model, batch), lambda _: full(model, batch)],
                            asked.repeats, "cpu")  # fmt: skip
    selected, everything = map(statistics.median, timed)
    print(
        f"{asked.shape} {asked.head} {asked.batch_size} x {asked.seq_length}: {selected:.3f} s "
        f"against {everything:.3f} s (ratio {selected / everything:.2f})"
    )


def inputs(asked: Any, model: Any) -> dict[str, Tensor]:
    """Random prompts of full length, scored at their last but one token."""
    size, generator = (asked.batch_size, asked.seq_length), torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(4, model.config.vocab_size, size, generator=generator),
        "attention_mask": torch.ones(size, dtype=torch.int64),
        "positions": torch.full(size[:1], asked.seq_length - 2),
        "labels": torch.randint(0, 2, size[:1], generator=generator),
    }


def full(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same losses from all logits."""
    logits = model_logits(model, {name: batch[name] for name in ("input_ids", "attention_mask")})
    rows = torch.arange(len(logits))
    words = logits[rows, batch["positions"]][:, list(WORDS.token_ids)].float()
    return nn.functional.cross_entropy(words, batch["labels"], reduction="none")


if __name__ == "__main__":
    main()
