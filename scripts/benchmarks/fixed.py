"""What a step costs beside its model: whole `train()` steps, in turns with Hugging Face's Trainer.

Both train the same linear head on stored features by SGD, each in a thread of its own that hands over to
the other after every step, callbacks and logs included. The parts are measured in a run of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import pyarrow as pa
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, default_data_collator
from transformers.trainer_callback import CallbackHandler

from hf_dpzero import DPZeroConfig, DPZeroTrainer
from hf_dpzero.batches.logical_batch import StepBatches
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.recipes.sentence_classifier import SentenceClassifier
from hf_dpzero.training import zeroth_order_step
from scripts.benchmarks.clock import Stopwatch, quartiles, said

WARM_UP, BLOCK = 20, 1 << 17


@dataclass(frozen=True, kw_only=True)
class FixedBench:
    """What is measured; every field is an option of the command.

    Attributes:
      rows: n; of features and a label, in a file of columns.
      width: features of a row.
      batch_size: expected, and Trainer's own.
      num_directions: K.
      microbatch_size: rows of a pass, at most.
      steps: timed ones, after `WARM_UP`.
    """

    rows: int = 10_000
    width: int = 16
    batch_size: int = 64
    num_directions: int = 1
    microbatch_size: int = 64
    steps: int = 200


def columns(path: Path, rows: int, width: int) -> datasets.Dataset:
    """Stored features and labels in an Arrow file, written block by block."""
    generator, schema = np.random.default_rng(0), None
    with pa.OSFile(str(path), "wb") as sink:
        for start in range(0, rows, BLOCK):
            x = generator.standard_normal((min(BLOCK, rows - start), width), dtype=np.float32)
            flat, labels = pa.array(x.reshape(-1)), pa.array((x[:, 0] > 0).astype(np.int64))
            stored = pa.FixedSizeListArray.from_arrays(flat, width)
            block = pa.record_batch([stored, labels], ["sentence_embedding", "labels"])
            if schema is None:
                schema = pa.ipc.new_stream(sink, block.schema)
            schema.write_batch(block)
        assert schema is not None
        schema.close()
    return datasets.Dataset.from_file(str(path))


def head(width: int) -> SentenceClassifier:
    """A linear head behind an encoder that is never called."""
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1}
    encoder = BertModel(BertConfig(vocab_size=30, num_attention_heads=2, **sizes))
    return SentenceClassifier.from_encoder(encoder, num_labels=2)


def trainers(bench: FixedBench, rows: datasets.Dataset, folder: str) -> dict[str, Trainer]:
    """Ours, private, and Hugging Face's, with the same batch size, rate, logging and collator."""
    common: dict[str, Any] = {
        **{"max_steps": WARM_UP + bench.steps, "learning_rate": 1e-2, "report_to": "none"},
        **{"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 50},
    }
    args = DPZeroConfig(
        output_dir=f"{folder}/{time.monotonic_ns()}",
        **{"noise_multiplier": 1.0, "target_delta": 1e-9, "clip": 5.0, "trainable": "^classifier"},
        **{"expected_batch_size": bench.batch_size, "num_directions": bench.num_directions},
        microbatch_size=bench.microbatch_size,
        **common,
    )
    sgd = TrainingArguments(
        f"{folder}/sgd", optim="sgd", per_device_train_batch_size=bench.batch_size, **common
    )
    given: dict[str, Any] = {"train_dataset": rows, "data_collator": default_data_collator}
    return {
        "dpzero": DPZeroTrainer(model=head(bench.width), args=args, **given),
        "trainer": Trainer(model=head(bench.width), args=sgd, **given),
    }


def each_step(trainer: Trainer, between: Callable[[], None]) -> None:
    """Trains; calls `between` as each step begins: a callback would be foreign, and no update wait."""
    handler = trainer.callback_handler
    begin = handler.on_step_begin

    def called(*given: Any, **named: Any) -> Any:
        between()
        return begin(*given, **named)

    handler.on_step_begin = called  # type: ignore[method-assign]
    trainer.train()


def in_turns(both: Mapping[str, Trainer]) -> dict[str, list[float]]:
    """Seconds of each step of two trainers that take turns: from one step's begin to the next one's."""
    turn = {name: threading.Semaphore(0) for name in both}
    other = dict(zip(both, reversed(both), strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in both}

    def train(name: str) -> None:
        since: list[float] = []

        def hand_over() -> None:
            seconds[name] += [time.perf_counter() - began for began in since]
            turn[other[name]].release()
            turn[name].acquire()
            since[:] = [time.perf_counter()]

        turn[name].acquire()
        each_step(both[name], hand_over)
        turn[other[name]].release()

    threads = [threading.Thread(target=train, args=(name,)) for name in both]
    for thread in threads:
        thread.start()
    next(iter(turn.values())).release()
    for thread in threads:
        thread.join()
    return {name: taken[WARM_UP:] for name, taken in seconds.items()}


def parts(trainer: Trainer) -> dict[str, float]:
    """Median seconds of a step by part; each counts without the parts that are called inside it."""
    watch, rounds = Stopwatch("cpu"), list[dict[str, float]]()
    plan = trainer.plan
    kind = type(plan.mechanism)
    with contextlib.ExitStack() as patches, watch.running("loop"):
        for name, owner, call in (
            ("sample", type(plan.sampler), "batch"),
            ("collate", StepBatches, "__getitem__"),
            ("passes, restore and update", FiniteDifferences, "with_losses"),
            ("clip and sum", kind, "clip_sum"),
            ("noise", kind, "release"),
            ("ledger", Trajectory, "append"),
            ("apply", zeroth_order_step, "apply_release"),
            ("rest of the step", DPZeroTrainer, "training_step"),
            ("callbacks", CallbackHandler, "call_event"),
        ):
            real = getattr(owner, call)
            patches.enter_context(patch.object(owner, call, _timed(watch, name, real)))
        each_step(trainer, lambda: rounds.append(dict(watch.seconds)))
    pairs = list(itertools.pairwise(rounds))[WARM_UP:]
    return {
        k: statistics.median(b.get(k, 0.0) - a.get(k, 0.0) for a, b in pairs) for k in pairs[-1][1]
    }


def _timed(watch: Stopwatch, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    # a function, so that it becomes a method
    return lambda *given, **named: watch.wrap(name, call)(*given, **named)


def run_fixed(bench: FixedBench) -> dict[str, Any]:
    """Medians and quartiles of steps that took turns, and the parts of ours, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        said(f"writing {bench.rows:,} rows")
        rows = columns(Path(folder, "rows.arrow"), bench.rows, bench.width)
        said("taking turns")
        seconds = in_turns(trainers(bench, rows, folder))
        said("timing the parts")
        return {
            "settings": asdict(bench),
            "seconds": {name: quartiles(taken) for name, taken in seconds.items()},
            "parts": parts(trainers(bench, rows, folder)["dpzero"]),
        }


def fixed_table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [", ".join(f"{name} = {value:,}" for name, value in result["settings"].items())]
    for name, (low, middle, high) in result["seconds"].items():
        lines.append(f"{name:<28}{1e3 * middle:>8.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})")
    lines += [f"  {name:<26}{1e3 * taken:>8.2f} ms" for name, taken in result["parts"].items()]
    return "\n".join(lines)
