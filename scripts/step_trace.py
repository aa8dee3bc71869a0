"""Counts the package's Python calls in one step of a tiny model, for `scripts/house.py --trace`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

WARM_UP = 2
"""Steps before the one that is counted: the first ones compile kernels and fill caches."""


def small_bert() -> Any:
    """A two-layer BERT with two classes, the same weights in every call."""
    from transformers import BertConfig, BertForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=50,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=16,
            )
        )


def small_trainer(output_dir: str) -> Any:
    """DPZero on it: K = 1, Rademacher directions, CPU, float32, everything else left at its default."""
    from datasets import Dataset
    from transformers import default_data_collator

    from hf_dpzero import DPZeroConfig, DPZeroTrainer

    ids = torch.randint(5, 50, (120, 8), generator=torch.Generator().manual_seed(1))
    rows = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    return DPZeroTrainer(
        model=small_bert(),
        args=DPZeroConfig(
            output_dir=output_dir,
            noise_multiplier=1.0,
            target_delta=1e-3,
            clip=5.0,
            expected_batch_size=12,
            microbatch_size=8,
            num_directions=1,
            direction="rademacher",
            max_steps=WARM_UP + 1,
            learning_rate=1e-2,
            testing={"direction_key": 7, "sampler_key": "ab" * 32},  # the same batches in every run
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({**rows, "labels": (ids[:, 0] > 27).long().tolist()}),
        data_collator=default_data_collator,
    )


def trace_one_step() -> dict[str, Any]:
    """Calls of the package's functions inside `training_step`, after the warm-up.

    Returns:
      Numbers of rooms, modules, distinct functions and calls, and the functions called most often.
    """
    import hf_dpzero

    package = Path(hf_dpzero.__file__).parent
    calls: Counter[tuple[Path, str]] = Counter()

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and package in path.parents:
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from Python 3.11 on
            calls[path.relative_to(package), name] += 1

    # The trainer prints its logs; standard output is for the counts.
    with tempfile.TemporaryDirectory() as output_dir, contextlib.redirect_stdout(sys.stderr):
        trainer = small_trainer(output_dir)
        training_step = trainer.training_step

        def counted(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.global_step < WARM_UP:
                return training_step(*args, **kwargs)
            sys.setprofile(count)
            try:
                return training_step(*args, **kwargs)
            finally:
                sys.setprofile(None)

        # On the instance: a subclass defined here would make the trainer settle every update at once.
        trainer.training_step = counted
        trainer.train()
    assert calls, "the step to be counted was not taken"
    files = {path for path, _ in calls}
    return {
        "rooms_entered": len(
            {path.parts[0] if len(path.parts) > 1 else "(root)" for path in files}
        ),
        "modules_entered": len(files),
        "functions_entered": len(calls),
        "calls": sum(calls.values()),
        "most_called": {f"{path}:{name}": n for (path, name), n in calls.most_common(8)},
    }
