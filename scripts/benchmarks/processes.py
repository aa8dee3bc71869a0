"""Several processes against one: seconds and bytes of a step, on the same logical batches.

    python -m scripts.benchmarks.processes --processes 1 2 --shape roberta-base --batch_size 64
    python -m scripts.benchmarks.processes --processes 1 2 --num_directions 8 --split 1 2 --json

Every setting trains in processes of its own (gloo on a CPU), each on `--threads` cores: with
`--threads 1` two processes have two cores where one has one. The settings take turns, round after round,
so that whatever else the machine does falls on all of them; medians over rounds are given, of each
round's median step. All take the same steps on the same batches (a fixed key), from random weights, on
random texts of several widths. A start tries the model before it trains, which of a large shape takes
longer than the steps. Bytes are what a process gives to collective operations in a step
(`parallel.collectives.sent_bytes`); a data-parallel first-order step sends 4 d in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from hf_dpzero.experiments.memory import SHAPES
from scripts.benchmarks.arguments import in_processes
from scripts.benchmarks.clock import said

KEY = "5a" * 32  # the same batches in all settings: a figure of speed, not a private run


def texts(rows: int, longest: int, vocabulary: int) -> Any:
    """Random rows of a quarter of the longest length to all of it."""
    from datasets import Dataset

    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 4, longest + 1, (rows,), generator=draws).tolist()
    ids = [torch.randint(5, vocabulary, (n,), generator=draws).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": [row[0] % 2 for row in ids]})


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator: pads to the longest row."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padding = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": padding(ids, batch_first=True, padding_value=1),
        "attention_mask": padding([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def train(settings: dict[str, Any], told: Path) -> None:
    """Trains in this process, one of perhaps several, and writes what a step took (rank 0)."""
    from hf_dpzero import DPZeroConfig, DPZeroTrainer
    from hf_dpzero.training.step_meter import StepMeter
    from scripts.benchmarks.shapes import build_config, empty_model, fill_

    torch.set_num_threads(settings["threads"])
    model = empty_model(settings["shape"], "float32", "cpu")
    fill_(model)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        args = DPZeroConfig(
            output_dir=folder, method=settings["method"], noise_multiplier=1.0, target_delta=1e-5,
            clip=1.0, num_directions=settings["num_directions"], learning_rate=1e-6,
            performance={
                "direction_parallel_size": settings["split"] if world > 1 else None,
                "perturbation_strategy": "whole_model",
            },
            expected_batch_size=settings["batch_size"], microbatch_size=settings["microbatch_size"],
            sampling="fixed_size_without_replacement", neighboring_relation="replace_one",
            max_steps=settings["steps"], base_is_public=True,
            testing={"direction_key": 1, "sampler_key": KEY, "insecure_noise_seed": 1},
            use_cpu=True, report_to="none",
            save_strategy="no", disable_tqdm=True, ddp_backend="gloo" if world > 1 else None,
        )  # fmt: skip
        vocabulary = build_config(settings["shape"]).vocab_size
        rows = texts(4 * settings["batch_size"], settings["seq_length"], vocabulary)
        meter = StepMeter()
        trainer = DPZeroTrainer(
            model=model, args=args, train_dataset=rows, data_collator=padded, callbacks=[meter]
        )
        trainer.train()
        digest = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
        if args.process_index == 0:
            first = meter.seconds[1:] or meter.seconds  # the first one builds and compiles
            numbers = {
                "seconds": statistics.median(first),
                "bytes": statistics.median(meter.sent),
                "weights": digest.item(),
                "dimension": sum(p.numel() for p in model.parameters()),
                "mesh": [trainer.run.mesh.rows, trainer.run.mesh.directions],
            }
            told.write_text(json.dumps(numbers))
        if world > 1:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()


def launch(settings: dict[str, Any], processes: int) -> dict[str, Any]:
    """One setting in so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        words = ["--child", json.dumps(settings), str(told)]
        statuses = in_processes(
            processes, __spec__.name, words, timeout=3600, ranks=processes > 1,
            env={"OMP_NUM_THREADS": str(settings["threads"])}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        if any(statuses):
            raise OSError(f"a process of {processes} failed: its output says why.")
        return dict(json.loads(told.read_text()))


def measure(
    settings: dict[str, Any], meshes: list[tuple[int, int | None]], rounds: int
) -> list[Any]:
    """Medians over rounds in which the settings take turns; the first one is what others are held to."""
    found: list[list[dict[str, Any]]] = [[] for _ in meshes]
    for number in range(rounds):
        for results, (processes, split) in zip(found, meshes, strict=True):
            said(f"round {number + 1} of {rounds}: {processes} processes")
            results.append(launch({**settings, "split": split}, processes))
    table = []
    for results, (processes, _) in zip(found, meshes, strict=True):
        pairs = zip(found[0], results, strict=True)
        table.append(
            {
                "processes": processes,
                "mesh": results[0]["mesh"],
                "seconds": statistics.median(one["seconds"] for one in results),
                "speedup": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
                "bytes": statistics.median(one["bytes"] for one in results),
                "first_order_bytes": 4 * results[0]["dimension"],
                "same_weights": {one["weights"] for one in results} == {found[0][0]["weights"]},
            }
        )
    return table


def main() -> None:
    """Options, measurements, a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--split", type=int, nargs="*", default=[], metavar="D",
                        help="direction_parallel_size of each; 0 or left out: automatic")  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, default="roberta-base")
    parser.add_argument("--method", default="dpzero")
    for name, default in {"batch_size": 64, "microbatch_size": 16, "seq_length": 64, "steps": 5,
                          "num_directions": 1, "rounds": 5, "threads": 1}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    child, as_json, rounds = given.pop("child"), given.pop("json"), given.pop("rounds")
    if child is not None:
        return train(json.loads(child[0]), Path(child[1]))
    splits = [d or None for d in given.pop("split")]
    processes = given.pop("processes")
    meshes = list(zip(processes, [*splits, *[None] * len(processes)], strict=False))
    table = measure(given, meshes, rounds)
    if as_json:
        print(json.dumps({"settings": given, "rounds": rounds, "table": table}, indent=1))
        return None
    print("processes  rows x directions  s a step  speed-up  bytes a step  4 d  same weights")
    for row in table:
        print("{processes:9}  {mesh[0]:6} x {mesh[1]:<8}  {seconds:8.3f}  {speedup:8.2f}  {bytes:12,.0f}"
              "  {first_order_bytes:,}  {same_weights}".format(**row))  # fmt: skip
    return None


if __name__ == "__main__":
    main()
