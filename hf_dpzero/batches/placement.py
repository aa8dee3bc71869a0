"""Which forward pass a place belongs to: a public function of width and place. Why that is enough.

At the end: how many rows fit into a pass, by arithmetic on bytes before step 0 (`rows_that_fit`).

The placement lemma
-------------------
A step draws a set S of rows. A row's shape (the bucket of its width, whether a mask covers all of it,
whatever else changes a pass) follows from that row alone. Rows of one shape take numbered places: in one
secret uniform order of S each row takes the next place of its shape. Which pass a place belongs to, how
many rows that pass has and which process computes it follow from shape and place alone (`Placement`),
fixed before the run from public numbers. The rest of the last pass begun holds a constant blank row.

Assume
  A1  what a row adds to the step's sum depends on its own tensors and its place alone: not on what
      stands in other slots, nor on which passes came before;
  A2  another place moves what is added, after the clip, by at most 2^-8 of the clip radius, in the norm
      that the mechanism clips in; a row that is finite in one place is finite in all.
Then adding or removing one row moves the sum by at most (1 + 2^-8) clip radii. The radius is
C / (1 + 2^-8) (`mechanisms.base.NoisedSum.radius`), so the sensitivity is C.

Proof. In each shape the order is uniform, and independent of other shapes'. A uniform order of b + 1
rows is a uniform order of b rows with the new row put at place b + 1 and exchanged with the row at a
uniform place j <= b + 1. So orders of S and of S + {x} can be coupled such that x stands at j, the
row that stood at j stands at b + 1, and every other row keeps its place. S + {x} may begin one pass
more; by A1 nobody feels it. The sums differ by clip(x) and by one row's change of place. Divergences
(hockey-stick) are jointly convex: condition on all other rows' samples and orders and on every j,
never on whether x was drawn. What is left is the noise's pair of shifted distributions, subsampled or
not, in both directions, and so in composition; with correlated noise the displaced row is in the same
step as x. Replacing a row: both sums lie within C of the sum without it, so 2 C. QED

Without A2, however kernels treat places, the sum moves by at most 3 clip radii: one row, never the
batch. `smoke_test` tests A1 and A2 on invented rows before a run. In an order by row number, or with
passes whose sizes follow from how many rows were drawn, every later row would be displaced.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from hf_dpzero.estimators.per_example_gradients import DENSE_BYTES

STEPS = (8, 16, 64, 512)
"""Widths are multiples of so many tokens, whichever is cheaper; of more where they are long. On a CPU
padding costs more than passes; on a GPU each pass takes the time of thousands of tokens."""

WIDEST = 512
"""Tokens of the widest bucket that is expected where nothing says what rows may have."""

SIZES = (1, 4, 16)
"""Rows of a pass that are considered below its cap."""

_BEYOND, _COVERED = 16, 40
"""Rows of a pass beyond those that a width is expected to have, at most; places that are planned for."""

_STRAY, _STRAYS = 0.3, 4.0
"""With such a chance a width's share tells nothing, and its rows are geometric of at least that mean.

Shares are of evaluation rows, which may have other widths: SST-2's are sentences, where training has
phrases too (tokens over the rows' own: docs/performance.md, "Private settings")."""

_CPU_PASS, _CPU_MOST = 5e7, 2000.0
_GPU_PASS, _GPU_PERTURBED = 3e12, 400.0
_GPU_BYTES, _GPU_OPERATIONS = 2.5e10, 5e14
_GPU_MOST = 8000.0

CAPS = (64, 32, 16)
"""Rows of a pass that are tried where `microbatch_size` is not set; else one."""

_UNLIKELY, FREQUENT = 0.05, 16
"""Passes of a shape that a likely one has in a run; how many shapes compile before it, at most."""

_SHARE = 0.5  # of free memory: what is free changes, and allocators round up

ALIVE = 4.0
"""Largest results of modules that are alive at a time: inputs, outputs, what is in between."""


def bucket(
    width: int, most: int | None = None, cut: int | None = None, step: int = STEPS[0]
) -> int:
    """Returns the width of a row's shape, which follows from that row's width and from settings alone.

    It leaves a masked column where it can: attention takes another kernel where no row of a pass is
    masked, so rows without one stand apart.

    Args:
      width: of the row, as the collator makes it alone.
      most: tokens that the model takes; None for any number.
      cut: length at which rows of text are cut, the last bucket; None for any number.
      step: widths are multiples of it, and of an eighth of the power of two below where that is more.

    Returns:
      At least `width`.

    >>> bucket(5), bucket(8), bucket(33, 38), bucket(38, 38), bucket(130), bucket(38, 512, cut=38)
    (8, 16, 38, 38, 144, 38)
    """
    known = [tokens for tokens in (most, cut) if tokens is not None and tokens >= width]
    step = max(step, 1 << (width.bit_length() - 1) >> 3)
    return min([*known, (width // step + 1) * step])


def buckets(
    widest: int, most: int | None = None, cut: int | None = None, step: int = STEPS[0]
) -> list[int]:
    """Returns all widths up to the bucket of `widest`, ascending.

    >>> buckets(30), buckets(30, cut=30)
    ([8, 16, 24, 32], [8, 16, 24, 30])
    """
    found = [bucket(1, most, cut, step)]
    while found[-1] < widest:
        found.append(bucket(found[-1], most, cut, step))
    return found


def pass_cost(device: str, parameters: int, low_precision: bool, arriving: int = 0) -> float:
    """Returns what a forward pass costs beside its tokens, in tokens.

    On the CPU measured on RoBERTa-base and MiniLM (docs/performance.md, "Private settings"): 40 in
    float32, 140 in bfloat16, whose products are faster while weights are read no faster; more for small
    models, whose passes are mostly Python: about a millisecond at 5e10 operations a second. On an H100
    in bfloat16 a pass takes at least the 11 to 16 ms in which Python starts its kernels, as long as
    8,000 tokens of RoBERTa-large, 2,500 of OPT-1.3B and 700 of OPT-6.7B take; and 400 tokens, whatever
    the model, in which half-precision weights are perturbed anew.

    Args:
      device: type of a torch device, such as "cpu".
      parameters: of the model.
      low_precision: whether products are taken in less than float32.
      arriving: bytes of offloaded weights, which come to a GPU in every pass: at 2.5e10 bytes a second
        (estimated: 16 lanes of PCIe 4), while a token takes two operations a parameter.

    >>> pass_cost("cpu", 10**8, False), pass_cost("cuda", 355_000_000, True) > 1000
    (40.5, True)
    """
    if device == "cpu":
        started = min(_CPU_MOST, _CPU_PASS / max(parameters, 1))
        return (140.0 if low_precision else 40.0) + started
    transfer = arriving / _GPU_BYTES * _GPU_OPERATIONS / (2 * max(parameters, 1))
    perturbed = _GPU_PERTURBED if low_precision else 0.0
    return transfer + perturbed + min(_GPU_MOST, _GPU_PASS / max(parameters, 1))


def pass_sequence(mean: float, sizes: Sequence[int], cost: float, width: int) -> tuple[int, ...]:
    """Chooses the rows of the first, second, ... pass of a width, for the least expected time.

    The number of rows N of that width is taken to be Poisson, or stray (`_STRAY`). A pass is begun
    where N exceeds the places before it, so the sum over passes of P(N > places before) (cost + rows
    width) is minimised, exactly, by dynamic programming over the places that are taken.

    Args:
      mean: of N, public.
      sizes: rows that a pass may have.
      cost: of a pass beside its tokens, in tokens.
      width: tokens of a row.

    Returns:
      At least one pass; more rows than these hold take further passes like the last.

    >>> pass_sequence(20.0, (1, 4, 16), cost=40.0, width=8)
    (16, 4, 4, 4, 4, 16, 16)
    """
    largest, spread = max(sizes), 10 * math.sqrt(mean)
    # Ten deviations: what is left out has a chance below 1e-20.
    sure = max(0, math.floor((mean - spread) / largest))  # passes that are as good as always full
    first, top = sure * largest, math.ceil(mean + spread + 2 * _COVERED)
    expected = max(mean + 4 * math.sqrt(mean) + 4, _COVERED)
    stray = max(mean, _STRAYS)
    above = (1 - _STRAY) * _exceeds(mean, first, top)
    above += _STRAY * (stray / (1 + stray)) ** np.arange(first + 1, top + 1)
    times = np.zeros(top - first + 1)
    best = np.ones(top - first, dtype=int)
    for place in range(top - first - 1, -1, -1):
        options = [
            above[place] * (cost + n * width) + times[min(place + n, top - first)] for n in sizes
        ]
        times[place], best[place] = min(options), sizes[int(np.argmin(options))]
    sequence, place = [largest] * sure, 0
    while first + place <= expected:
        sequence.append(int(best[place]))
        place += sequence[-1]
    # where more rows have this width than its share says, the share is wrong and many more may have it
    return (*sequence, max((n for n in sizes if n <= _BEYOND), default=min(sizes)))


def _exceeds(mean: float, first: int, top: int) -> np.ndarray:
    """P(N > s) of a Poisson variable, for s = first, ..., top - 1."""
    k = np.arange(1, top + 1)
    logs = np.concatenate([[0.0], np.cumsum(math.log(mean) - np.log(k))]) - mean
    below = np.cumsum(np.exp(logs)).clip(max=1.0)
    return (1.0 - below)[first:top]


@dataclass
class Placement:
    """Passes by width and place, for all steps of a run.

    Guarantee: everything here follows from the attributes, which are public.

    Attributes:
      expected: B, rows that a step is expected to have.
      sizes: rows that a pass may have, ascending.
      shares: width -> the public share of rows that have it; other widths are taken to be rare.
      cost: of a pass beside its tokens, in tokens.
      tokens: in one pass at most, for memory; None for any number. One row always goes.
      repeats: each pass so many times: for processes whose share of the rows would be one pass.
      step: of the widths.
    """

    expected: float
    sizes: tuple[int, ...]
    shares: Mapping[int, float]
    cost: float
    tokens: int | None = None
    repeats: int = 1
    step: int = STEPS[0]
    _sequences: dict[int, tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _deals: dict[int, tuple[dict[int, list[int]], float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def restrict_(self, sizes: tuple[int, ...]) -> None:
        """Has passes of these sizes alone from now on; before the first step."""
        self.sizes = sizes
        self._sequences.clear()
        self._deals.clear()
        self.__dict__.pop("_costs", None)

    @property
    def largest(self) -> int:
        """Rows of the largest pass; 1 where every example is evaluated by itself."""
        return max(self.sizes)

    def passes(self, width: int) -> tuple[int, ...]:
        """Returns the rows of the passes of a width, in order; more take further ones like the last."""
        if width not in self._sequences:
            fitting = (n for n in self.sizes if n * max(width, 1) <= (self.tokens or math.inf))
            sizes = list(fitting) or [1]  # other widths' places are no places of its rows
            # Also for a width that is not expected: its rows may come, and need passes.
            mean = max(self.expected * self.shares.get(width, 0.0) / self.repeats, 0.1)
            sequence = pass_sequence(mean, sizes, self.cost, max(width, 1))
            self._sequences[width] = tuple(n for n in sequence for _ in range(self.repeats))
        return self._sequences[width]

    def rows_of(self, width: int, number: int) -> int:
        """Returns the rows of pass `number`, from 0, of a width."""
        sequence = self.passes(width)
        return sequence[min(number, len(sequence) - 1)]

    def filled(self, width: int, count: int) -> list[range]:
        """Lists the places of each pass that so many rows of a width begin; of the last, those taken.

        >>> Placement(8.0, (1, 4), {8: 1.0}, cost=40.0).filled(8, 6)
        [range(0, 4), range(4, 6)]
        """
        parts, start = list[range](), 0
        while start < count:
            stop = start + self.rows_of(width, len(parts))
            parts.append(range(start, min(stop, count)))
            start = stop
        return parts

    def process_of(self, width: int, number: int, processes: int) -> int:
        """Says which of so many processes computes pass `number` of a width."""
        if processes == 1:
            return 0
        # Passes beyond the table, and rare widths, go round: any public rule is sound.
        table = self._dealt(processes)[0].get(width, ())
        return table[number] if number < len(table) else (number + width) % processes

    def busiest(self, processes: int) -> float:
        """Returns what the busiest process is expected to evaluate a direction and sign, in tokens."""
        return self._dealt(processes)[1]

    def expected_passes(self) -> float:
        """Returns the passes that a step is expected to have."""
        return sum(chance for chance, _, _, _ in self._costs)

    def shapes_of(self, steps: int) -> list[tuple[int, int]]:
        """Returns (width, rows) of the `FREQUENT` likeliest passes in so many steps; no unlikely one.

        >>> Placement(8.0, (1, 4), {8: 1.0, 16: 1e-9}, cost=40.0).shapes_of(100)
        [(8, 4)]
        """
        expected = dict[tuple[int, int], float]()
        for chance, _, width, number in self._costs:
            shape = width, self.rows_of(width, number)
            expected[shape] = expected.get(shape, 0.0) + chance * steps
        most = sorted(expected, key=lambda shape: -expected[shape])[:FREQUENT]
        return sorted(shape for shape in most if expected[shape] > _UNLIKELY)

    def expected_tokens(self) -> float:
        """Returns what a step is expected to evaluate for one direction and sign, in tokens."""
        return sum(chance * cost for chance, cost, _, _ in self._costs)

    @cached_property
    def _costs(self) -> list[tuple[float, float, int, int]]:
        """(chance that it is begun, its cost in tokens, width, number) of every pass expected."""
        found = []
        for width, share in self.shares.items():
            sequence, start = self.passes(width), 0
            chances = _exceeds(max(self.expected * share, 1e-9), 0, sum(sequence))
            for number, rows in enumerate(sequence):
                found.append((float(chances[start]), self.cost + rows * width, width, number))
                start += rows
        return found

    def _dealt(self, processes: int) -> tuple[dict[int, list[int]], float]:
        """Processes of each width's passes, the costliest first to whoever has least; the most."""
        if processes in self._deals:
            return self._deals[processes]
        loads = [0.0] * processes
        table = {width: [0] * len(self.passes(width)) for width in self.shares}
        for chance, cost, width, number in sorted(self._costs, key=lambda c: -c[0] * c[1]):
            least = loads.index(min(loads))
            table[width][number] = least
            loads[least] += chance * cost
        return self._deals.setdefault(processes, (table, max(loads)))


def sizes_up_to(cap: int) -> tuple[int, ...]:
    """Returns the rows that passes may have: the cap, and 16, 4 and 1 below it.

    >>> sizes_up_to(64), sizes_up_to(8), sizes_up_to(1)
    ((1, 4, 16, 64), (1, 4, 8), (1,))
    """
    return (*(n for n in SIZES if n < cap), cap)


def public_shares(widths: Sequence[int], expected: Sequence[int]) -> dict[int, float]:
    """Returns the share of rows of each width: of public rows, half a row being added to each width.

    Args:
      widths: buckets of public rows, perhaps none; then all widths are alike.
      expected: buckets that rows may have.

    >>> public_shares([8, 8, 8], [8, 16])
    {8: 0.875, 16: 0.125}
    """
    counts = dict.fromkeys(expected, 0.5)
    for width in widths:
        counts[width] = counts.get(width, 0.5) + 1.0
    total = sum(counts.values())
    return {width: count / total for width, count in counts.items()}


def cheapest(
    widths: Sequence[int], text: bool, most: int | None, cut: int | None, **settings: Any
) -> Placement:
    """Returns the placement whose step of widths takes the least expected time.

    Args:
      widths: of public rows, perhaps none.
      text: whether rows may have other widths too, as text may and sounds do not.
      most, cut: see `bucket`.
      settings: the other attributes of `Placement`.
    """
    widest = min([n for n in (most, cut) if n is not None] + [WIDEST])

    def in_steps(step: int) -> Placement:
        of_public = [bucket(width, most, cut, step) for width in widths]
        possible = buckets(widest, most, cut, step) if text or not widths else []
        return Placement(shares=public_shares(of_public, possible), step=step, **settings)

    return min(map(in_steps, STEPS), key=Placement.expected_tokens)


# ---------------------------------------------------------------- rows that fit
#
# An operating system kills a process that takes too much memory; it does not raise. So nothing is found
# out by trying, and no private row chooses anything: bytes of one measured pass of invented rows are
# held against what is free.


@dataclass
class PassBytes:
    """What the modules of a model returned in one pass.

    Attributes:
      largest: bytes of the largest result.
      total: of all results, which a backward pass keeps.
    """

    largest: int = 0
    total: int = 0


Hook = Callable[[nn.Module, tuple[Tensor, ...], object], object]


@contextlib.contextmanager
def hooked(modules: Iterable[nn.Module], hook: Hook) -> Iterator[None]:
    """Calls `hook(module, inputs, output)` after each forward of the modules inside."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def innermost(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that hold no others."""
    return [module for module in model.modules() if next(module.children(), None) is None]


@contextlib.contextmanager
def measured(model: nn.Module) -> Iterator[PassBytes]:
    """Adds up, inside, what the model's innermost modules return."""
    found = PassBytes()

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        if isinstance(output, Tensor):
            found.largest = max(found.largest, output.nbytes)
            found.total += output.nbytes

    with hooked(innermost(model), look):
        yield found


def free_bytes(device: torch.device) -> int:
    """Returns the memory of a device that nothing has taken."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def tokens_that_fit(found: PassBytes, tokens: int, free: int, trained: int, backward: bool) -> int:
    """Returns how many tokens of one pass fit into memory, or rows where a row counts as one token.

    Args:
      found: of a measured pass.
      tokens: that it had.
      free: bytes.
      trained: parameters; each may be copied once.
      backward: whether results are kept for a backward pass, and gradients come on top.

    Returns:
      At least 0.

    >>> tokens_that_fit(PassBytes(largest=1000, total=9000), 10, 2_000_000, trained=1000, backward=False)
    2480
    """
    each = (2.0 * found.total if backward else ALIVE * found.largest) / tokens
    left = _SHARE * free - (8 if backward else 2) * trained * 4
    return int(max(left, 0.0) / max(each, 1.0))


def rows_that_fit(free: int, trained: int, dense: bool) -> int:
    """Returns the cap of a pass: the most of `CAPS` whose per-example gradients fit, else 1.

    Args:
      free: bytes.
      trained: parameters.
      dense: whether each example has a gradient of its own in memory.
    """
    room = max(_SHARE * free, DENSE_BYTES) if dense else math.inf
    return next((rows for rows in CAPS if 2 * rows * 4 * trained <= room), 1)
