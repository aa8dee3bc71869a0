"""How long a recipe's steps take on this machine: a short calibration, extrapolated in layers.

Models of one layer and of a few, at full width and with random weights, take real steps at the
recipe's microbatch. Each part of a step is a straight line in the number of layers, in the number of
directions and in the number of examples. What is not on this machine cannot be timed and is not.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dpzero.experiments.memory.live_bytes import GIB
from hf_dpzero.experiments.memory.model_on_meta import frozen_layers
from hf_dpzero.experiments.memory.objective_passes import Pass
from hf_dpzero.experiments.memory.peaks import Peaks, own_dtype, quantised_bits
from hf_dpzero.experiments.memory.works import (
    Evaluation,
    FirstOrderStep,
    Parts,
    Timed,
    ZerothOrderStep,
    in_precision,
    mechanism_of,
)
from scripts.benchmarks.capacity import available_bytes

BUDGET = 20.0
"""Seconds that a calibration may take, about."""
ROUNDS = 5
"""Most timed rounds; the fastest counts, for whatever else runs only ever slows one down."""
DEEPER = 3
"""Layers of the second model, if there are so many."""
MEMORY_SHARE = 0.5
"""Of the memory that is free, what a calibration may take."""


class NotTimed(Exception):
    """Why there is no time, in words."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a step's work is.

    Attributes:
      prefix: first layers that run once a batch, because nothing before or in them trains.
      running: layers that every evaluation runs.
      directions: K.
      examples: in a logical batch, expected.
      microbatches: that these make.
      repeats_passes: whether the parameters are gone over anew for every microbatch.
    """

    prefix: int
    running: int
    directions: int
    examples: float
    microbatches: int
    repeats_passes: bool

    @property
    def depths(self) -> tuple[int, ...]:
        """Layers of the models that take steps: all of which run in every evaluation, if any do."""
        return (1,) if self.running < 2 else (1, min(DEEPER, self.running))

    @property
    def counts(self) -> tuple[int, ...]:
        """Directions of the steps that are timed; a head alone is cheap enough for all of them."""
        return (1, 2) if self.directions > 1 and self.running else (self.directions,)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a calibration found, of `examples` examples a step.

    Attributes:
      steps: (layers, directions) -> seconds of a step.
      layer: seconds of one frozen layer's forward pass.
    """

    steps: dict[tuple[int, int], Parts]
    layer: float
    examples: int


def step_seconds(found: Measured, layout: Layout) -> Parts:
    """Seconds of one step of the whole model on a whole logical batch."""
    by_count = [_at_depth(found, layout, count) for count in layout.counts]
    step = by_count[0]
    if len(by_count) == 2:
        step = by_count[0] + (by_count[1] - by_count[0]) * (layout.directions - 1)
    there = 1 if layout.running == 0 else 0  # frozen layers of the model that took the step
    prefix = max(0, layout.prefix - there) * found.layer
    evaluations = (step.evaluations + prefix) * layout.examples / found.examples
    times = layout.microbatches if layout.repeats_passes else 1
    return Parts(evaluations, step.passes * times, step.rest)


def _at_depth(found: Measured, layout: Layout, count: int) -> Parts:
    """The step of `running` layers, on the line through the two that were measured."""
    first, *more = (found.steps[depth, count] for depth in layout.depths)
    if not more:
        return first
    apart = layout.depths[1] - layout.depths[0]
    slope = (more[0] - first) * (1 / apart)
    grown = first + slope * (layout.running - layout.depths[0])
    return Parts(*(max(0.0, value) for value in (grown.evaluations, grown.passes, grown.rest)))


# ---------------------------------------------------------------- the calibration


def estimate_seconds(
    work: Pass, recipe: Any, plan: Any, peaks: Sequence[Peaks], rows: tuple[int | None, int | None]
) -> dict[str, Any]:
    """Times a step here and extrapolates: the `time` section of a plan.

    Args:
      plan: the privacy plan, or None.
      peaks: of the whole model; the calibration keeps within the memory that is free.
      rows: of training and of validation, for what is encoded once.
    Returns:
      `seconds_per_step` and `seconds_per_run` with their parts and what was run to find them; or
      `not_timed`, why not.
    """
    try:
        return _Calibration(work, recipe, plan, peaks).result(rows)
    except NotTimed as reason:
        return {"not_timed": str(reason)}


class _Calibration:
    def __init__(self, work: Pass, recipe: Any, plan: Any, peaks: Sequence[Peaks]) -> None:
        self.work, self.args, self.plan = work, recipe.training, plan
        self.started = time.perf_counter()
        if quantised_bits(recipe.model) is not None:
            raise NotTimed("the kernels of a quantised base are not calibrated")
        self.device = "cuda" if torch.cuda.is_available() and not self.args.use_cpu else "cpu"
        self.dtype = own_dtype(work.blueprint)
        self.peaks = next((p for p in peaks if p.precision == self.dtype), peaks[0])
        self.layout = layout_of(work, self.args)
        busy = busy_note() if self.device == "cpu" else None
        self.notes = [busy] if busy else []
        self.examples = self._affordable()

    def result(self, rows: tuple[int | None, int | None]) -> dict[str, Any]:
        """Measures and extrapolates."""
        found = self._measure()
        step = step_seconds(found, self.layout)
        steps = self.plan.steps if self.plan is not None else max(0, self.args.max_steps)
        once = self._encoding(rows)
        run = steps * step.total + once if steps else None
        return {
            "device": self._machine(),
            "seconds_per_step": step.total,
            "evaluations": step.evaluations,
            "passes_over_parameters": step.passes,
            "rest": step.rest,
            "steps": steps or None,
            "seconds_encoding_once": once or None,
            "seconds_per_run": run,
            "calibration": {
                "layers": list(self.layout.depths),
                "microbatch_size": self.examples,
                "sequence_length": self.work.length,
                "dtype": self.dtype,
                "seconds": time.perf_counter() - self.started,
            },
            "notes": self.notes,
        }

    # ---------------------------------------------------------------- how much

    def _affordable(self) -> int:
        """The microbatch, or as much of it as fits into half of the free memory and the budget."""
        wanted = min(self.args.physical_batch_size, math.ceil(self.layout.examples))
        size = wanted
        while size > 1 and self._bytes(size) > self._room:
            size //= 2
        if self._bytes(size) > self._room:
            raise NotTimed(
                f"{self._bytes(size) / GIB:.1f} GiB would be needed for a model of "
                f"{self.layout.depths[-1]} layers, and {self._room / GIB:.1f} GiB may be used"
            )
        self._all_steps(1)  # libraries loaded, kernels compiled
        size = affordable(size, self._all_steps, sum(self.layout.depths), BUDGET * 0.6)
        if size < wanted:
            self.notes.append(
                f"calibrated with {size} example{'s' * (size > 1)} at a time instead of {wanted}, to "
                f"stay within {BUDGET:g} s and half of the free memory"
            )
        return size

    @property
    def _room(self) -> float:
        return MEMORY_SHARE * available_bytes(self.device)

    def _bytes(self, size: int) -> float:
        """About what the deeper models' steps take with `size` examples."""
        whole = _parameter_bytes(self.work.blueprint.whole(self.dtype))
        depths, blueprint = self.layout.depths, self.work.blueprint
        own = [_parameter_bytes(blueprint.shortened(d, self.dtype, "meta")) for d in depths]
        beside = (self.peaks.training or self.peaks.evaluation) - self.peaks.weights
        if self.args.first_order:
            beside = int(beside * own[-1] / whole)
        return len(self.layout.counts) * sum(own) + beside * size / self.args.physical_batch_size

    def _all_steps(self, size: int) -> float:
        """Seconds of one step of every kind at one layer, once each."""
        return sum(work().total for work in self._steps(1, size))

    # ---------------------------------------------------------------- what

    @property
    def _features(self) -> bool:
        return bool(self.work.blueprint.arguments.precompute_features)

    @property
    def _forwards_too(self) -> bool:
        """Whether frozen layers have to be timed by themselves."""
        return self._features or self.layout.prefix > 0

    def _measure(self) -> Measured:
        works: dict[Any, Timed] = {}
        for depth in self.layout.depths:
            steps = self._steps(depth, self.examples)
            works |= {(depth, k): w for k, w in zip(self.layout.counts, steps, strict=True)}
        if self._forwards_too:
            self.forward_examples = self._forward_examples()
            for depth in self._forward_depths:
                works["forward", depth] = self._forward(depth, self.forward_examples)
        remaining = BUDGET - (time.perf_counter() - self.started)
        fastest = dict(zip(works, in_turns(list(works.values()), remaining), strict=True))
        steps_found = {key: value for key, value in fastest.items() if key[0] != "forward"}
        self.forward = {
            d: fastest[n, d].evaluations / self.forward_examples
            for n, d in fastest
            if n == "forward"
        }
        layer = 0.0 if self._features else self._layer() * self.examples
        return Measured(steps=steps_found, layer=layer, examples=self.examples)

    def _forward_examples(self) -> int:
        """As many as the step's, or fewer where the step starts from stored features."""

        def seconds(size: int) -> float:
            return self._forward(1, size)().total

        most = self.args.per_device_eval_batch_size if self._features else self.examples
        return affordable(most, seconds, sum(self._forward_depths), BUDGET / 4)

    def _layer(self) -> float:
        """Seconds of one layer's forward pass of one example, by the difference."""
        if len(self.forward) < 2:
            return 0.0
        (shallow, less), (deep, more) = sorted(self.forward.items())
        return max(0.0, (more - less) / (deep - shallow))

    @property
    def _forward_depths(self) -> tuple[int, ...]:
        whole = self.work.blueprint.num_layers
        return (1,) if whole == 1 else (1, min(DEEPER, whole))

    def _steps(self, depth: int, size: int) -> list[Timed]:
        """One work for each number of directions, on models of their own: none disturbs another."""
        mechanism = mechanism_of(self.args, self.plan)
        works: list[Timed] = []
        for count in self.layout.counts:
            model = self.work.blueprint.shortened(depth, self.dtype, self.device)
            objective = in_precision(self.work.objective(model), self.args, self.device)
            batch = self.work.batch(size, self.device)
            if self.args.first_order:
                works.append(FirstOrderStep(model, objective, batch, self.args, mechanism))
            else:
                settings = (self.args, mechanism, count)
                works.append(ZerothOrderStep(model, objective, batch, *settings))
        return works

    def _forward(self, depth: int, size: int) -> Timed:
        work = self.work.on_tokens()
        model = work.blueprint.shortened(depth, self.dtype, self.device)
        objective = in_precision(work.objective(model), self.args, self.device)
        return Evaluation(model, objective, work.batch(size, self.device))

    def _encoding(self, rows: tuple[int | None, int | None]) -> float:
        """Seconds of running a frozen encoder over all rows once; 0 without precompute_features."""
        if not self._features:
            return 0.0
        layers = self.work.blueprint.num_layers - 1
        return sum(n or 0 for n in rows) * (self.forward[1] + layers * self._layer())

    def _machine(self) -> str:
        from scripts.benchmarks.command import machine

        threads = f", {torch.get_num_threads()} threads" if self.device == "cpu" else ""
        return f"this machine ({machine(self.device)}{threads})"


def layout_of(work: Pass, args: Any) -> Layout:
    """Where the work of a recipe's step is."""
    blueprint = work.blueprint
    whole = blueprint.num_layers
    prefix = frozen_layers(blueprint, blueprint.whole("float32"))
    reused = args.reuse_frozen_prefix and not args.first_order
    if not reused and not args.first_order and args.perturbation_strategy != "stacked":
        prefix = 0
    half = own_dtype(blueprint) != "float32"
    layerwise = args.perturbation_strategy in ("layerwise", "paired")
    return Layout(
        prefix=0 if blueprint.arguments.precompute_features else prefix,
        running=0 if blueprint.arguments.precompute_features else whole - prefix,
        directions=1 if args.first_order else args.num_directions,
        examples=float(args.expected_batch_size),
        microbatches=max(1, math.ceil(args.expected_batch_size / args.physical_batch_size)),
        repeats_passes=layerwise or (half and args.perturbation_strategy == "auto"),
    )


def _parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def affordable(most: int, seconds: Callable[[int], float], layers: int, budget: float) -> int:
    """The largest size up to `most`, tried in steps of four, whose rounds stay within the budget.

    A size is tried only if it would stay within it at four times the seconds of the last one.

    Args:
      seconds: runs one layer at a size.
      layers: that a round runs in all; three rounds are to be afforded.
    """
    size, reached = 1, 1
    while True:
        rounds = 3 * layers * seconds(size)
        if rounds > budget:
            return reached
        reached = size
        grown = min(most, 4 * size)
        if size == most or rounds * grown / size > budget:
            return reached
        size = grown


def in_turns(
    works: Sequence[Callable[[], Parts]],
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Parts]:
    """The fastest parts of each work: they take turns, after an untimed round, while time is left.

    One timed round at least, `ROUNDS` at most.
    """
    start = clock()
    for work in works:
        work()
    rounds: list[list[Parts]] = []
    while not rounds or (len(rounds) < ROUNDS and clock() - start < budget):
        rounds.append([work() for work in works])
    return [_fastest(column) for column in zip(*rounds, strict=True)]


def _fastest(found: Sequence[Parts]) -> Parts:
    return Parts(
        min(p.evaluations for p in found),
        min(p.passes for p in found),
        min(p.rest for p in found),
    )


def busy_note() -> str | None:
    """That other work would make the times too long, if there is some."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < 0.75 * cores:
        return None
    return (
        f"other work runs here (load {load:.1f} on {cores} cores), so the times may be several times "
        "too long: plan again on an idle machine"
    )
