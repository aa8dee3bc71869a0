"""What takes turns on the clock: bare forward passes, our step, the published loop, DP-AdamW.

All run the same model, in eval mode and in the same arithmetic, on the same batch.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.choose_strategy import choose_strategy
from hf_dpzero.estimators.finite_differences import FiniteDifferences
from hf_dpzero.estimators.per_example_gradients import per_example_gradients
from hf_dpzero.ledger.trajectory import Trajectory
from hf_dpzero.objectives.heads import select_objective
from hf_dpzero.objectives.losses import Inputs, evaluation_mode, num_examples
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.trainable import select_trainable
from hf_dpzero.privacy.mechanisms import Mechanism, NonPrivateMean, ScalarMechanism
from hf_dpzero.privacy.mechanisms.gradient import clip_factors
from hf_dpzero.privacy.noise import InsecureSeededNoise, NoiseSource, SecureNoise
from hf_dpzero.training.zeroth_order_step import ZerothOrderStep
from scripts.benchmarks.drawn import DrawnBatches, random_rows
from scripts.benchmarks.settings import CLIP, GRADIENT_CLIP, LEARNING_RATE, SMOOTHING, StepBench
from scripts.benchmarks.shapes import (
    build_config,
    empty_model,
    fill_,
    model_inputs,
    quantise_,
    with_lora,
)

_KEY = 0x5EED_0F_BE7C4
_PROBE = 1 << 40  # a step number that no measured step reaches


def build(bench: StepBench) -> tuple[nn.Module, DrawnBatches]:
    """The shape's classifier with random weights, and microbatches of random tokens, no padding."""
    model = empty_model(bench.shape, bench.dtype, bench.device)
    fill_(model)
    if bench.load_in_4bit:
        quantise_(model, bench.dtype)
    if bench.lora_rank:
        model = with_lora(model, bench.lora_rank)
    select_trainable(model, bench.trainable)
    rows = random_rows(bench, build_config(bench.shape).vocab_size)
    return model, DrawnBatches(bench, rows)


def noise_source() -> NoiseSource:
    """The trainer's; where OpenDP is missing, seeded noise: as long, and no protection."""
    if importlib.util.find_spec("opendp") is not None:
        return SecureNoise()
    return InsecureSeededNoise(secrets.randbits(63))


class Forwards:
    """The yardstick: 2K bare forward passes over the same microbatches, at fixed weights.

    The objective's model call with its inputs: no labels, no loss, no key-value cache, no_grad,
    eval mode.
    """

    def __init__(self, bench: StepBench, model: nn.Module, batches: DrawnBatches) -> None:
        self.bench, self.model, self.batches = bench, model, batches

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        inputs = [model_inputs(self.model, part) for part in self.batches(step)]
        with evaluation_mode(self.model):
            for _ in range(2 * self.bench.num_directions):
                for part in inputs:
                    self.model(**part)


class Step:
    """A whole training step, the one that the trainer takes, with the ledger in memory.

    Updates are deferred as the trainer defers them: a step's first pass also makes the update of the
    step before it. The forwards of the yardstick between two steps leave a waiting update alone.
    """

    def __init__(self, bench: StepBench, model: nn.Module, batches: DrawnBatches) -> None:
        self.bench, self.batches, self.round = bench, batches, 0
        self.objective = select_objective(model)
        # On a grid, as the trainer puts weights: moves are exact then, and the restore too.
        self.space = ParameterSpace.from_model(
            model, distribution=bench.direction, smoothing=SMOOTHING
        )
        self.space.snap_()

        def objective(model: nn.Module, inputs: Inputs) -> Tensor:
            return self.objective(model, inputs)  # looked up anew: the breakdown puts a clock there

        self.differences = FiniteDifferences(
            model,
            self.space,
            objective,
            SMOOTHING,
            strategy=bench.strategy,
            passes=bench.passes,
            kind=bench.differences,
        )
        first = batches(0)[0]  # of which one short example
        self.probe = {n: v[:1, :8] if v.dim() > 1 else v[:1] for n, v in first.items()}
        self.notes = choose_strategy(self.differences, self.probe, Direction(_KEY, _PROBE))
        self.noise = noise_source()
        self.step = self.of(bench.num_directions)

    def of(self, directions: int) -> ZerothOrderStep:
        """The step with K = `directions` on these weights, with a ledger of its own."""
        sizes = {"expected_batch_size": self.bench.batch_size, "num_directions": directions}
        mechanism: Mechanism = (
            NonPrivateMean(**sizes)
            if self.bench.method == "mezo"
            else ScalarMechanism(clip=CLIP, noise_multiplier=1.0, **sizes)
        )
        header = {
            "direction_key": f"{_KEY:032x}",
            "num_directions": directions,
            "num_values": directions,
            "update_rule": {"name": "sgd"},
            "weight_decay": 0.0,
            "replayable": True,
        }
        return ZerothOrderStep(
            mechanism=mechanism,
            space=self.space,
            differences=self.differences,
            noise=self.noise,
            trajectory=Trajectory(header),
            defer=True,
        )

    def __call__(self, step: int) -> None:
        self.round = step
        self.take(self.step)

    def take(self, step: ZerothOrderStep) -> None:
        """The next step of `step`'s ledger on the microbatches of this round."""
        step(step.trajectory.next_step, self.batches(self.round), LEARNING_RATE)

    def restore_errors(self, cycles: int) -> tuple[float, float]:
        """max |theta after evaluations without an update - theta before|: after one, after all.

        0.0 means bit for bit. One short example, so that many cycles are affordable.
        """
        self.space.settle_()
        before = [tensor.detach().clone() for tensor in self.space.tensors]
        errors = []
        for cycle in range(cycles):
            queries = range(self.bench.num_directions)
            directions = [Direction(_KEY, _PROBE + cycle, k) for k in queries]
            self.differences([self.probe], directions)
            self.space.settle_()
            errors.append(largest_difference(before, self.space.tensors))
        return errors[0], errors[-1]


class StepAfterItsOwn:
    """Steps of K directions that each follow one of their own kind.

    With deferred updates a step makes the update of the step before it; where steps of several K
    take turns, an untimed one in front gives each its own.
    """

    def __init__(self, step: Step, directions: int, differences: str = "central") -> None:
        self.step, self.own, self.forward = step, step.of(directions), differences == "forward"

    def prepare(self) -> None:
        """Takes an untimed step."""
        self.step.differences.forward = self.forward
        self.step.take(self.own)

    def __call__(self, step: int) -> None:
        self.step.round, self.step.differences.forward = step, self.forward
        self.step.take(self.own)


class ReferenceStep:
    """The published implementations' step: four passes, torch.normal, a new tensor in each.

    A generator of its own, re-seeded for each pass, stands for the global one of the original.
    The restore is not exact: run it last.
    """

    def __init__(self, bench: StepBench, model: nn.Module, batches: DrawnBatches) -> None:
        self.model, self.batches, self.count = model, batches, bench.num_directions
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.generator = torch.Generator(device=bench.device)
        self.objective = select_objective(model)

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        for k in range(self.count):
            seed = step * self.count + k
            with evaluation_mode(self.model):
                self.add(seed, SMOOTHING)
                plus = self.losses(step)
                self.add(seed, -2 * SMOOTHING)
                minus = self.losses(step)
                self.add(seed, SMOOTHING)
            value = float((plus - minus).div(2 * SMOOTHING).clamp(-CLIP, CLIP).mean())
            self.add(seed, -LEARNING_RATE * value)

    def losses(self, step: int) -> Tensor:
        """Of all examples of a round, [B]."""
        parts = self.batches(step)
        return torch.cat([self.objective(self.model, p)[: num_examples(p)] for p in parts])

    def add(self, seed: int, coefficient: float) -> None:
        """theta <- theta + coefficient * z, a standard normal vector drawn from `seed`."""
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
    """A step of DP-AdamW: per-example gradients, L2 clip, sum, noise of multiplier 1, / B, AdamW.

    The noise comes from a torch.Generator on the device, seeded with operating-system entropy, as
    Opacus' own optimizer draws it: numpy's on the CPU would make the yardstick slower than it is.
    """

    def __init__(self, bench: StepBench, model: nn.Module, batches: DrawnBatches) -> None:
        (batch,) = batches(0)
        self.bench, self.batch = bench, batch
        size = bench.microbatch_size or bench.batch_size
        self.gradients = per_example_gradients(
            model, select_objective(model), bench.per_example_gradients, size
        )
        self.optimizer = torch.optim.AdamW(self.gradients.parameters, lr=LEARNING_RATE)
        self.generator = torch.Generator(device=bench.device).manual_seed(secrets.randbits(63))

    def __call__(self, step: int) -> None:
        size = self.bench.microbatch_size or self.bench.batch_size
        pieces = zip(*(value.split(size) for value in self.batch.values()), strict=True)
        parts = [dict(zip(self.batch, piece, strict=True)) for piece in pieces]
        sums, _ = self.gradients.weighted_sum(
            parts, lambda norms: clip_factors(norms, GRADIENT_CLIP)
        )
        for p, total in zip(self.gradients.parameters, sums, strict=True):
            noise = torch.empty_like(total).normal_(0.0, GRADIENT_CLIP, generator=self.generator)
            p.grad = total.add_(noise).div_(self.bench.batch_size).to(p.dtype)
        del sums, total, noise
        self.optimizer.step()
        self.optimizer.zero_grad()


def largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """max |after - before| over all coordinates; 0.0 only if they are equal, infinity for NaN."""
    pairs = [(b, a.detach()) for b, a in zip(before, after, strict=True)]
    changed = [(a.float() - b.float()).abs().max() for b, a in pairs if not torch.equal(a, b)]
    return max((float(torch.nan_to_num(c, nan=torch.inf)) for c in changed), default=0.0)
