"""What it costs to go on: a replayed step against a trained one, a resume against a start.

    python scripts/resume_times.py --shape roberta-base --rows 16 --tokens 64 --steps 6

A model of random weights trains for some steps and is resumed twice, from its last checkpoint and from
its ledger alone on the base weights. Prints JSON: medians of seconds a step, their ratio, the seconds
from `train` to the first new step, and the bytes of a log of 10^4 steps with K = 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
    TrainerCallback,
    default_data_collator,
)

from hf_dpzero import DPZeroConfig, DPZeroTrainer
from hf_dpzero.ledger.trajectory import LEDGER_NAME, SHIPPING_NAME, Release, Trajectory
from hf_dpzero.reporting.weights import digest_weights

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64, "vocab_size": 100},
    "roberta-base": {},
}  # fmt: skip


class Clock(TrainerCallback):
    """Seconds since `began` at which each step started and ended; stops after step `last`."""

    def __init__(self, last: int) -> None:
        self.began, self.last = time.perf_counter(), last
        self.starts: list[float] = []
        self.ends: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.starts.append(time.perf_counter() - self.began)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter() - self.began)
        control.should_training_stop |= state.global_step >= self.last


def timed(given: Any, folder: Path, steps: int, last: int, resume: bool, save: bool) -> Clock:
    """Trains a run of `steps` steps until `last` of them are taken."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RobertaForSequenceClassification(RobertaConfig(**SHAPES[given.shape]))
    ids = torch.randint(5, 90, (20 * given.rows, given.tokens), generator=torch.Generator())
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    clock = Clock(last)
    args = DPZeroConfig(
        output_dir=str(folder), noise_multiplier=1.0, target_delta=1e-5, clip=5.0, max_steps=steps,
        expected_batch_size=given.rows, microbatch_size=given.rows, learning_rate=1e-6,
        save_strategy="steps" if save else "no", **({"save_steps": last} if save else {}),
        logging_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = DPZeroTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({name: value.tolist() for name, value in columns.items()}),
        data_collator=default_data_collator,
        callbacks=[clock],
    )
    clock.began = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume or None)
    return clock


def bytes_of_a_ledger(steps: int) -> dict[str, int]:
    """Bytes of both forms of a log with K = 1; a real run's header adds a few thousand."""
    log = Trajectory({"num_values": 1, "num_directions": 1})
    with tempfile.TemporaryDirectory() as name:
        ledger = Trajectory.create(Path(name) / LEDGER_NAME, dict(log.header))
        for step in range(10):
            ledger.append(Release(step, (0.5,), 0.1))
        record = len(ledger._pack(ledger.releases[0]))
        for step in range(steps):
            log.append(Release(step, (0.5,), 0.1))
        log.to_safetensors(Path(name) / SHIPPING_NAME)
        return {
            LEDGER_NAME: (Path(name) / LEDGER_NAME).stat().st_size + (steps - 10) * record,
            SHIPPING_NAME: (Path(name) / SHIPPING_NAME).stat().st_size,
        }


def main() -> None:
    """Prints the times as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="roberta-base")
    for name, default in {"rows": 16, "tokens": 64, "steps": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    taken, plan = given.steps, given.steps + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        warm = argparse.Namespace(**{**vars(given), "shape": "tiny"})
        timed(warm, Path(name) / "warm", 1, 1, resume=False, save=False)  # imports and compiles
        first = timed(given, folder, plan, taken, resume=False, save=True)
        began = time.perf_counter()
        digest_weights(folder / f"checkpoint-{taken}")
        hashed = time.perf_counter() - began
        ledger_only = Path(name) / "ledger"
        ledger_only.mkdir()
        for path in (folder / LEDGER_NAME, folder / "initial_values.safetensors"):
            if path.exists():
                shutil.copy(path, ledger_only)
        saved = timed(given, folder, plan, plan, resume=True, save=True)
        replayed = timed(given, ledger_only, plan, plan, resume=True, save=False)
    trains = [b - a for a, b in zip(first.starts, first.ends, strict=True)][1:]
    repeats = [b - a for a, b in zip(replayed.starts, replayed.ends, strict=True)][1:taken]
    result = {
        "shape": given.shape,
        "batch": [given.rows, given.tokens],
        "seconds_of_a_trained_step": statistics.median(trains),
        "seconds_of_a_replayed_step": statistics.median(repeats),
        "replay_is_faster": statistics.median(trains) / statistics.median(repeats),
        "seconds_to_first_step": {
            "of a start": first.starts[0],
            "from a checkpoint": saved.starts[0],
            "of that, digest of its weights": hashed,
            "from the ledger, its steps replayed": replayed.starts[taken],
            "of that, the replay": replayed.ends[taken - 1] - replayed.starts[0],
        },
        "bytes_of_10000_steps": bytes_of_a_ledger(10_000),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
