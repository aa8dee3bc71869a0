"""The measurements of `step` but memory: ratios, marginal cost, breakdown, exactness."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.benchmarks.clock import Stopwatch, TimedStep, interleaved, quartiles, said
from scripts.benchmarks.settings import StepBench
from scripts.benchmarks.timed_steps import (
    FirstOrderStep,
    Forwards,
    ReferenceStep,
    Step,
    StepAfterItsOwn,
    build,
)

_OVER_PARAMETERS = (
    "move_to_",
    "step_",
    "settle_",
    "write_perturbed_each_",
    "write_perturbed_rows_",
)
"""Methods of ParameterSpace that go over the parameters; those it has are timed."""


def measure_time(bench: StepBench) -> dict[str, Any]:
    """Times of forwards, step and reference, with what they say about exactness and traffic.

    Each kind runs in rounds of its own beside bare forward passes, because the published loop and
    AdamW leave weights behind that are not those our step needs; ratios are taken round by round.
    """
    said(f"building {bench.shape}")
    model, batch = build(bench)
    forwards = Forwards(bench, model, batch)
    result: dict[str, Any] = {"seconds": {}, "all_seconds": {}}
    if bench.own_phase == "step":
        step = Step(bench, model, batch)
        _measure_step(bench, step, forwards, result)
        del step  # the published loop gives parameters new memory, and a space keeps theirs
    if bench.own_phase == "dp-adamw":
        _time_beside(bench, {"step": FirstOrderStep(bench, model, batch)}, forwards, result)
        result["restore_error"] = None  # nothing is perturbed
    if bench.with_reference:
        reference = ReferenceStep(bench, model, batch)
        _time_beside(bench, {"reference": reference}, forwards, result, "reference_")
        result["reference_restore_error"] = reference.restore_error()
        if bench.method == "reference":
            for name in ("ratio_to_two_forwards", "ratio_quartiles", "restore_error"):
                result[name] = result[f"reference_{name}"]
    seconds = {name: statistics.median(v) for name, v in result["all_seconds"].items()}
    result["seconds"] = {"two_forwards": next(iter(seconds.values())), **seconds}
    result |= {"rows_per_pass": batch.rows_per_pass(), "blank_share": batch.blank_share()}
    result["dimension"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return result


def _time_beside(
    bench: StepBench,
    steps: Mapping[str, TimedStep],
    forwards: Forwards,
    result: dict[str, Any],
    prefix: str = "",
) -> None:
    """Interleaves steps with forwards; notes all seconds, and the ratio of the first step."""
    names = list(steps)  # the first one has the ratio; others take turns to be compared with it
    said(f"timing {' and '.join(names)} beside bare forward passes, {bench.repeats} rounds")
    forwards.batches(1 + bench.repeats)  # rows are drawn and collated off the clock
    beside, *own = interleaved([forwards, *steps.values()], bench.repeats, bench.device)
    result["all_seconds"][f"two_forwards_beside_{names[0]}"] = beside
    result["all_seconds"].update(zip(names, own, strict=True))
    low, middle, high = quartiles([t / f for f, t in zip(beside, own[0], strict=True)])
    result[f"{prefix}ratio_to_two_forwards"] = middle
    result[f"{prefix}ratio_quartiles"] = [low, middle, high]


def _measure_step(bench: StepBench, step: Step, forwards: Forwards, result: dict[str, Any]) -> None:
    steps: dict[str, TimedStep] = {"step": step}
    if bench.num_directions > 1:
        steps["step"] = StepAfterItsOwn(step, bench.num_directions, bench.differences)
        steps["step_of_one_direction"] = StepAfterItsOwn(step, 1)
    if bench.differences == "forward":
        steps["central_step"] = StepAfterItsOwn(step, bench.num_directions)
    _time_beside(bench, steps, forwards, result)
    if bench.num_directions > 1:
        result |= marginal(result["all_seconds"], bench.num_directions)
    if bench.differences == "forward":
        seconds = result["all_seconds"]
        pairs = zip(seconds["step"], seconds["central_step"], strict=True)
        result["ratio_to_central"] = statistics.median(f / c for f, c in pairs)
        step.differences.forward = True
    result["noise"] = step.noise.name
    said("timing the parts of a step")
    result["strategy"], result["notes"] = step.differences.strategy, step.notes
    result["breakdown"] = _breakdown(bench, step)
    result["bytes_per_parameter"] = bytes_per_parameter(step)
    one, many = step.restore_errors(3)
    result["restore_error"], result["restore_error_after_3_cycles"] = one, many


def bytes_per_parameter(step: Step) -> float:
    """Bytes of parameters (and copies of them) that a step reads and writes to perturb them, over d.

    The engine counts them (`ParameterSpace.traffic`) over one step that follows one of its kind: 16
    for float32 weights moved in place with the update deferred (twice 4 bytes read and 4 written), 24
    with the update at once. What forward passes read is not in it.
    """
    step(0)  # its update waits, and is made in the pass that is counted
    before = step.space.traffic
    step(0)
    return (step.space.traffic - before) / step.space.dimension


def marginal(seconds: Mapping[str, Sequence[float]], directions: int) -> dict[str, float]:
    """What each direction after the first adds, from rounds of a K-step, a 1-step and 2K forwards.

    `seconds_per_direction`: median over rounds of (K-step - 1-step) / (K - 1);
    `marginal_ratio_per_direction`: the same in units of two bare forward passes.

    >>> rounds = {"step": [7.0], "step_of_one_direction": [3.0], "two_forwards_beside_step": [6.0]}
    >>> marginal(rounds, 3)
    {'seconds_per_direction': 2.0, 'marginal_ratio_per_direction': 1.0}
    """
    pairs = zip(seconds["step"], seconds["step_of_one_direction"], strict=True)
    added = [(many - one) / (directions - 1) for many, one in pairs]
    two = [f / directions for f in seconds["two_forwards_beside_step"]]
    return {
        "seconds_per_direction": statistics.median(added),
        "marginal_ratio_per_direction": statistics.median(
            a / f for a, f in zip(added, two, strict=True)
        ),
    }


def _breakdown(bench: StepBench, step: Step) -> dict[str, float]:
    """Median seconds of a step in forward passes, perturbation and update, and the rest.

    Measured apart: the device is synchronised at every change, so the sum may exceed a step's time.
    Perturbing inside a forward pass counts as perturbation.
    """
    rounds = []
    step(0)
    for _ in range(min(3, bench.repeats)):
        watch = Stopwatch(bench.device)
        with _watched(step, watch), watch.running("rest"):
            step(0)
        rounds.append({"forwards": 0.0, "perturbation": 0.0, **watch.seconds})
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


@contextlib.contextmanager
def _watched(step: Step, watch: Stopwatch) -> Iterator[None]:
    """The objective and what goes over the parameters, under the stopwatch."""
    space, objective = step.space, step.objective
    names = [name for name in _OVER_PARAMETERS if hasattr(space, name)]
    try:
        step.objective = watch.wrap("forwards", objective)
        for name in names:
            setattr(space, name, watch.wrap("perturbation", getattr(space, name)))
        yield
    finally:
        step.objective = objective
        for name in names:
            space.__dict__.pop(name, None)
