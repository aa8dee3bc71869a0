"""The measurements of `bench step` but memory: ratios, marginal cost, breakdown, exactness."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hf_dpzero.experiments.memory.shapes import build_batch, build_config, build_model
from scripts.benchmarks.clock import Stopwatch, Work, interleaved, quartiles
from scripts.benchmarks.settings import StepBench
from scripts.benchmarks.timed_steps import FirstOrderStep, Forwards, OwnRhythm, ReferenceStep, Step

_PASSES = (
    "move_to_", "step_", "settle_", "write_perturbed_",
    "write_perturbed_rows_",
)  # fmt: skip
"""Methods of ParameterSpace that go over the parameters; those it has are timed."""


def measure_time(bench: StepBench) -> dict[str, Any]:
    """Times of forwards, step and reference, with what they say about exactness and traffic.

    Each work runs in rounds of its own beside bare forward passes, because the published loop and
    AdamW leave weights behind that are not those our step needs; ratios are taken round by round.
    """
    model = build_model(bench)
    batch = build_batch(bench, build_config(bench.shape).vocab_size)
    found: dict[str, Any] = {"seconds": {}, "all_seconds": {}}
    if bench.own_phase == "step":
        _measure_step(bench, model, batch, found)
    if bench.own_phase == "dp-adamw":
        _measure_first_order(bench, model, batch, found)
    if bench.with_reference:
        _measure_reference(bench, model, batch, found)
    found["seconds"] = {n: statistics.median(v) for n, v in found["all_seconds"].items()}
    first = next(iter(found["seconds"].values()))
    found["seconds"] = {"two_forwards": first, **found["seconds"]}
    found["dimension"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return found


def _beside_forwards(
    bench: StepBench, works: Mapping[str, Work], forwards: Forwards, found: dict[str, Any]
) -> list[float]:
    """Interleaves works with forwards, notes all seconds; the first's ratio in each round."""
    names, calls = list(works), list(works.values())
    untimed = 3 if bench.compile else 1  # a second call may be compiled once more
    beside, *own = interleaved([forwards, *calls], bench.repeats, bench.device, untimed)
    found["all_seconds"][f"two_forwards_beside_{names[0]}"] = beside
    found["all_seconds"].update(zip(names, own, strict=True))
    return [t / f for f, t in zip(beside, own[0], strict=True)]


def _measure_step(
    bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor], found: dict[str, Any]
) -> None:
    step, forwards = Step(bench, model, batch), Forwards(bench, model, batch)
    works: dict[str, Work] = {"step": step}
    if bench.num_directions > 1:
        works["step"] = OwnRhythm(step, bench.num_directions)
        works["step_of_one_direction"] = OwnRhythm(step, 1)
    _note_ratios("", _beside_forwards(bench, works, forwards, found), found)
    if bench.num_directions > 1:
        found |= marginal(found["all_seconds"], bench.num_directions)
    found["strategy"], found["notes"] = step.differences.strategy, step.notes
    found["breakdown"] = breakdown(bench, step)
    found["bytes_per_parameter"] = bytes_per_parameter(step)
    one, many = step.restore_errors(bench.cycles)
    found["restore_error"], found[f"restore_error_after_{bench.cycles}_cycles"] = one, many


def bytes_per_parameter(step: Step) -> float:
    """Bytes of parameters (and copies of them) that a step's passes read and write, over d.

    The engine counts them (`ParameterSpace.traffic`) over one step that follows one of its kind: 16
    for float32 weights moved in place with the update deferred (two passes, 4 bytes read and 4
    written in each), 24 with the update at once. What forward passes read is not in it.
    """
    step(0)
    before = step.space.traffic
    step(0)
    return (step.space.traffic - before) / step.space.dimension


def _measure_reference(
    bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor], found: dict[str, Any]
) -> None:
    reference = ReferenceStep(bench, model, batch)
    forwards = Forwards(bench, model, batch)
    ratios = _beside_forwards(bench, {"reference": reference}, forwards, found)
    _note_ratios("reference_", ratios, found)
    found["reference_restore_error"] = reference.restore_error()
    if bench.method == "reference":
        _note_ratios("", ratios, found)
        found["restore_error"] = found["reference_restore_error"]


def _measure_first_order(
    bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor], found: dict[str, Any]
) -> None:
    """No restore error: nothing is perturbed."""
    work, forwards = FirstOrderStep(bench, model, batch), Forwards(bench, model, batch)
    _note_ratios("", _beside_forwards(bench, {"step": work}, forwards, found), found)
    found["restore_error"] = None


def _note_ratios(prefix: str, ratios: Sequence[float], found: dict[str, Any]) -> None:
    low, middle, high = quartiles(ratios)
    found[f"{prefix}ratio_to_two_forwards"] = middle
    found[f"{prefix}ratio_quartiles"] = [low, middle, high]


def marginal(seconds: Mapping[str, Sequence[float]], directions: int) -> dict[str, float]:
    """What each direction after the first adds, from rounds of a K-step, a 1-step and forwards.

    Returns:
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


def breakdown(bench: StepBench, step: Step, repeats: int = 3) -> dict[str, float]:
    """Median seconds of a step in forward passes, passes over the parameters, and the rest.

    A pass of its own: the device is synchronised at every change, so the sum may exceed a step's
    time. Perturbing inside a forward pass counts as a pass over the parameters.
    """
    rounds = []
    step(0)
    for _ in range(min(repeats, bench.repeats)):
        watch = Stopwatch(bench.device)
        with _watched(step, watch), watch.running("rest"):
            step(0)
        rounds.append({"forwards": 0.0, "perturbation": 0.0, **watch.seconds})
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


@contextlib.contextmanager
def _watched(step: Step, watch: Stopwatch) -> Iterator[None]:
    """The objective and the space's passes under the stopwatch."""
    space, objective = step.space, step.objective
    names = [name for name in _PASSES if hasattr(space, name)]
    try:
        step.objective = watch.wrap("forwards", objective)
        for name in names:
            setattr(space, name, watch.wrap("perturbation", getattr(space, name)))
        yield
    finally:
        step.objective = objective
        for name in names:
            space.__dict__.pop(name, None)
