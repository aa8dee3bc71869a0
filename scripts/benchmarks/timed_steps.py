"""What takes turns on the clock: bare forward passes, our step, the published loop, DP-AdamW.

All run the same model, in eval mode and in the same arithmetic, on the same batch.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.exactness_checks import make_exact
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.ghost_clipping import per_example_gradients
from hf_dpzero.estimators.per_example_gradients import split
from hf_dpzero.experiments.memory.shapes import model_inputs
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.losses import Inputs, PerExampleLoss, evaluation_mode, select_objective
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.privacy.mechanisms import Mechanism, NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.mechanisms.gradient import clip_factors
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep
from scripts.benchmarks.settings import (
    CLIP,
    GRADIENT_CLIP,
    LEARNING_RATE,
    SMOOTHING,
    StepBench,
)

_KEY = 0x5EED_0F_BE7C4
_PROBE = 1 << 40  # a step number that no measured step reaches


def arithmetic(bench: StepBench) -> contextlib.AbstractContextManager[Any]:
    """Autocast if asked for. One context for each forward pass: autocast caches cast weights."""
    if not bench.autocast:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(bench.device).type, torch.bfloat16)


def objective_of(bench: StepBench, model: nn.Module) -> PerExampleLoss:
    """The objective of the model's head, in the bench's arithmetic."""
    plain = select_objective(model)

    def objective(model: nn.Module, inputs: Inputs) -> Tensor:
        with arithmetic(bench):
            return plain(model, inputs)

    return objective


class Forwards:
    """The yardstick: 2K bare forward passes at fixed weights, of what the objective runs.

    The objective's model call with its inputs: no labels, no loss, no key-value cache, no_grad,
    eval mode.
    """

    def __init__(self, bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.bench, self.model = bench, model
        self.inputs = model_inputs(model, batch)

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        with evaluation_mode(self.model):
            for _ in range(2 * self.bench.num_directions):
                with arithmetic(self.bench):
                    self.model(**self.inputs)


class Step:
    """A whole training step, the one that the trainer takes, with the ledger in memory.

    Updates are deferred as the trainer defers them: a step's first pass also makes the update of the
    step before it. The forwards of the yardstick between two steps leave a waiting update alone.
    """

    def __init__(self, bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.bench, self.model, self.batch = bench, model, batch
        self.objective = objective_of(bench, model)
        self.space = ParameterSpace.from_model(
            model, distribution=bench.direction, smoothing=SMOOTHING
        )
        self.space.snap_()
        self.differences = FiniteDifferences(
            model, self.space, self._objective, SMOOTHING, strategy=bench.strategy
        )
        self.notes = make_exact(self.differences, self._probe, Direction(_KEY, _PROBE))
        self.step = self.of(bench.num_directions)

    def _objective(self, model: nn.Module, inputs: Inputs) -> Tensor:
        return self.objective(model, inputs)  # looked up anew: the breakdown puts a clock there

    @property
    def _probe(self) -> Mapping[str, Tensor]:
        """One short example; for compiled models the batch, for another shape is compiled anew."""
        return self.batch if self.bench.compile else _shortened(self.batch)

    def of(self, directions: int) -> ZerothOrderStep:
        """The step with K = `directions` on these weights, with a ledger of its own."""
        header = {
            "direction_key": f"{_KEY:032x}",
            "num_directions": directions,
            "num_values": directions,
            "update_rule": {"name": "sgd"},
            "weight_decay": 0.0,
            "replayable": True,
        }
        return ZerothOrderStep(
            mechanism=_mechanism(self.bench, directions),
            space=self.space,
            differences=self.differences,
            noise=SecureNoise(),
            trajectory=Trajectory(header),
            defer=self.bench.deferred,
        )

    def __call__(self, step: int) -> None:
        self.take(self.step)

    def take(self, private: ZerothOrderStep) -> None:
        """The next step of `private` on the batch."""
        private(private.trajectory.next_step, [self.batch], LEARNING_RATE)

    def restore_errors(self, cycles: int) -> tuple[float, float]:
        """max |theta after evaluations without an update - theta before|: after one, after all.

        0.0 means bit for bit. One short example, so that many cycles are affordable.
        """
        self.space.settle_()
        before = [tensor.detach().clone() for tensor in self.space.tensors]
        self._cycle(0)
        first = largest_difference(before, self.space.tensors)
        for cycle in range(1, cycles):
            self._cycle(cycle)
        return first, largest_difference(before, self.space.tensors)

    def _cycle(self, cycle: int) -> None:
        directions = [Direction(_KEY, _PROBE + cycle, k) for k in range(self.bench.num_directions)]
        self.differences([self._probe], directions)
        self.space.settle_()


class OwnRhythm:
    """Steps of K directions that each follow one of their own kind.

    With deferred updates a step makes the update of the step before it; where steps of several K
    take turns, an untimed one in front gives each its own.
    """

    def __init__(self, step: Step, directions: int) -> None:
        self.step, self.private = step, step.of(directions)

    def __call__(self, step: int) -> None:
        self.step.take(self.private)

    @contextlib.contextmanager
    def as_in_training(self) -> Iterator[None]:
        """Inside, an untimed step has gone before."""
        if self.step.bench.deferred:
            self.step.take(self.private)
        yield


def _shortened(batch: Mapping[str, Tensor], tokens: int = 8) -> dict[str, Tensor]:
    return {n: v[:1, :tokens] if v.dim() > 1 else v[:1] for n, v in batch.items()}


def _mechanism(bench: StepBench, directions: int) -> Mechanism:
    sizes: dict[str, Any] = {
        "expected_batch_size": bench.batch_size,
        "num_directions": directions,
    }
    if bench.method == "mezo":
        return NonPrivateMean(**sizes)
    return ScalarMechanism(clip=CLIP, noise_multiplier=1.0, **sizes)


class ReferenceStep:
    """The published implementations' step: four passes, torch.normal, a new tensor in each.

    A generator of its own, re-seeded for each pass, stands for the global one of the original.
    The restore is not exact: run it last.
    """

    def __init__(self, bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.model, self.batch, self.count = model, batch, bench.num_directions
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.generator = torch.Generator(device=bench.device)
        self.objective = objective_of(bench, model)

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        for k in range(self.count):
            seed = step * self.count + k
            with evaluation_mode(self.model):
                value = self._difference(seed)
            self.add(seed, -LEARNING_RATE * value)

    def _difference(self, seed: int) -> float:
        self.add(seed, SMOOTHING)
        plus = self.objective(self.model, self.batch)
        self.add(seed, -2 * SMOOTHING)
        minus = self.objective(self.model, self.batch)
        self.add(seed, SMOOTHING)
        return float((plus - minus).div(2 * SMOOTHING).clamp(-CLIP, CLIP).mean())

    def add(self, seed: int, coefficient: float) -> None:
        """theta <- theta + coefficient * z(seed)."""
        self.generator.manual_seed(seed)
        for p in self.parameters:
            z = torch.normal(
                0.0, 1.0, p.shape, generator=self.generator, device=p.device, dtype=p.dtype
            )
            p.data = p.data + coefficient * z

    @torch.no_grad()
    def restore_error(self) -> float:
        """max |theta after +1, -2, +1 - theta before|: float rounding, which adds up over steps."""
        before = [p.detach().clone() for p in self.parameters]
        for times in (1, -2, 1):
            self.add(_PROBE, times * SMOOTHING)
        return largest_difference(before, self.parameters)


class FirstOrderStep:
    """A step of DP-AdamW: per-example gradients, L2 clip, sum, noise, / B, AdamW.

    The noise comes from a torch.Generator on the device, seeded with operating-system entropy, as
    Opacus' own optimizer draws it: numpy's on the CPU would make the yardstick slower than it is.
    """

    def __init__(self, bench: StepBench, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.bench, self.batch = bench, batch
        size = bench.microbatch_size or bench.batch_size
        self.gradients = per_example_gradients(
            model, objective_of(bench, model), bench.per_example_gradients, size
        )
        self.optimizer = torch.optim.AdamW(self.gradients.parameters, lr=LEARNING_RATE)
        self.generator = torch.Generator(device=bench.device).manual_seed(secrets.randbits(63))

    def __call__(self, step: int) -> None:
        bench = self.bench
        parts = split(self.batch, bench.microbatch_size)
        sums, _ = self.gradients.weighted_sum(
            parts, lambda norms: clip_factors(norms, GRADIENT_CLIP)
        )
        for p, total in zip(self.gradients.parameters, sums, strict=True):
            p.grad = self._noised_mean(total).to(p.dtype)
        del sums, total
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _noised_mean(self, total: Tensor) -> Tensor:
        """(total + N(0, C^2)) / B: the noise multiplier is 1."""
        noise = torch.empty_like(total).normal_(0.0, GRADIENT_CLIP, generator=self.generator)
        return total.add_(noise).div_(self.bench.batch_size)


def largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """max |after - before| over all coordinates; 0.0 only if they are equal, infinity for NaN."""
    pairs = [(b, a.detach()) for b, a in zip(before, after, strict=True)]
    changed = [(a.float() - b.float()).abs().max() for b, a in pairs if not torch.equal(a, b)]
    return max((float(torch.nan_to_num(c, nan=torch.inf)) for c in changed), default=0.0)
