"""Microbatches that a step of a private run evaluates: a Poisson batch in fixed shapes, with blanks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hf_dpzero.batches.shapes import PassShapes
from hf_dpzero.objectives.losses import batch_size, num_examples
from hf_dpzero.privacy.sampling import PoissonSampler, place_order
from scripts.benchmarks.settings import StepBench

Batch = Mapping[str, Tensor]
POOL = 4
"""Rows to draw from, in expected batches."""
_KEY = b"benchmark draws, not secret data"


class DrawnBatches:
    """Round -> microbatches: those of a private run, or the one full batch in every round.

    Args:
      bench: its batch size is what a Poisson batch is expected to have; empty draws are passed over.
      rows: `[POOL * batch_size, T]` tokens without padding, and labels; or the one batch.
    """

    def __init__(self, bench: StepBench, rows: Batch) -> None:
        self.bench, self.rows = bench, rows
        self._draws = self._drawn() if bench.fixed_shapes else itertools.repeat([rows])
        self._rounds: list[Sequence[Batch]] = []

    def __call__(self, number: int) -> Sequence[Batch]:
        """The microbatches of a round; the same ones for the same number."""
        while len(self._rounds) <= number:
            self._rounds.append(next(self._draws))
        return self._rounds[number]

    def rows_per_pass(self) -> float:
        """Rows of a pass, blanks included: the mean over the rounds so far."""
        run = [batch_size(part) for drawn in self._rounds for part in drawn]
        return sum(run) / len(run)

    def blank_share(self) -> float:
        """Rows that only fill up, over all rows of the rounds so far."""
        parts = [part for drawn in self._rounds for part in drawn]
        return 1.0 - sum(map(num_examples, parts)) / sum(map(batch_size, parts))

    def _drawn(self) -> Iterator[Sequence[Batch]]:
        size = batch_size(self.rows)
        sampler = PoissonSampler(
            num_examples=size, expected_batch_size=float(self.bench.batch_size)
        )
        shapes = PassShapes(self._each, self.bench.placement, max_length=self.bench.seq_length)
        for number in itertools.count():
            if len(chosen := sampler.batch(number, _KEY)):
                order = place_order(len(chosen), number, _KEY)
                yield shapes.microbatches(chosen[order].tolist())

    def _each(self, chosen: list[int]) -> list[Batch]:
        return [{name: value[i : i + 1] for name, value in self.rows.items()} for i in chosen]


def random_rows(bench: StepBench, vocabulary: int) -> dict[str, Tensor]:
    """Random tokens without padding: the one microbatch, or what a Poisson batch is drawn from."""
    generator = torch.Generator().manual_seed(0)
    count = bench.batch_size * (POOL if bench.fixed_shapes else 1)
    size = (count, bench.seq_length)
    rows = {
        "input_ids": torch.randint(4, vocabulary, size, generator=generator),
        "attention_mask": torch.ones(size, dtype=torch.int64),
        "labels": torch.randint(0, 2, size[:1], generator=generator),
    }
    return {name: value.to(bench.device) for name, value in rows.items()}
