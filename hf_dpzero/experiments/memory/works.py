"""What is put on the clock: a training step as the trainer takes it, on a model of a few layers."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.exactness_checks import make_exact
from hf_dpzero.estimators.finite_differences import FiniteDifferences, evaluation_mode
from hf_dpzero.estimators.ghost_clipping import per_example_gradients
from hf_dpzero.ledger.trajectory import Trajectory, directions_of, space_from_header
from hf_dpzero.objectives.losses import PerExampleLoss
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.privacy.mechanisms import Mechanism, mechanism_from_dict
from hf_dpzero.privacy.noise import SecureNoise
from hf_dpzero.training.first_order_step import GradientStep, GroupMeans, PlainGradients
from hf_dpzero.training.random_state import isolated_randomness
from hf_dpzero.training.zeroth_order_step import PrivateStep
from scripts.benchmarks.clock import Stopwatch

_KEY = 0x5EED_0F_71A4
_PASSES = (
    "move_to_", "step_", "settle_", "dense_step_", "write_perturbed_", "write_perturbed_pair_",
    "write_perturbed_rows_", "write_stack_",
)  # fmt: skip
"""Methods of a parameter space that go over the parameters; those it has are timed."""
_RATE = 1e-8

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Parts:
    """Seconds of one step.

    Attributes:
      evaluations: forward passes (and backward ones); in proportion to the examples.
      passes: over the parameters, for directions and updates.
      rest: clipping, noise, optimizer, ledger.
    """

    evaluations: float
    passes: float
    rest: float

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(a + b for a, b in zip(self._all, other._all, strict=True)))

    def __mul__(self, factor: float) -> Parts:
        return Parts(*(a * factor for a in self._all))

    def __sub__(self, other: Parts) -> Parts:
        return self + other * -1.0

    @property
    def total(self) -> float:
        """Seconds of everything."""
        return sum(self._all)

    @property
    def _all(self) -> tuple[float, float, float]:
        return dataclasses.astuple(self)


class Timed(ABC):
    """A work that says where its seconds went.

    Args:
      device: synchronised at every change of label.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.watch = Stopwatch(device)

    def __call__(self) -> Parts:
        """Runs once."""
        self.watch = Stopwatch(self.device)
        with self.watch.running("rest"):
            self.run()
        seconds = self.watch.seconds
        return Parts(*(seconds.get(name, 0.0) for name in ("evaluations", "passes", "rest")))

    @abstractmethod
    def run(self) -> None:
        """The work."""

    def under(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with its time under `label`, whichever watch is running."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.watch.running(label):
                return call(*args, **kwargs)

        return measured


class Evaluation(Timed):
    """One evaluation of the objective without gradients."""

    def __init__(self, model: nn.Module, objective: PerExampleLoss, batch: Batch) -> None:
        super().__init__(next(model.parameters()).device.type)
        self.model, self.batch = model, batch
        self.objective = self.under("evaluations", objective)

    @torch.no_grad()
    def run(self) -> None:
        """In eval mode."""
        with isolated_randomness(), evaluation_mode(self.model):
            self.objective(self.model, self.batch)


class ZerothOrderStep(Timed):
    """A step of dpzero, dpgd-0th or mezo along `num_directions` directions on one microbatch."""

    def __init__(
        self,
        model: nn.Module,
        objective: PerExampleLoss,
        batch: Batch,
        args: Any,
        mechanism: Mechanism,
        num_directions: int,
    ) -> None:
        super().__init__(next(model.parameters()).device.type)
        header = _header(args, mechanism) | {"num_directions": num_directions}
        space = space_from_header(model, header)
        space.snap_()
        for name in _PASSES:
            if hasattr(space, name):
                setattr(space, name, self.under("passes", getattr(space, name)))
        differences = FiniteDifferences(
            model,
            space,
            self.under("evaluations", objective),
            args.smoothing,
            args.reuse_frozen_prefix,
            args.perturbation_strategy,
            forget_unread=args.not_private,
        )
        tried: Direction = directions_of(0, header)[0]
        with isolated_randomness():
            make_exact(differences, {n: v[:1] for n, v in batch.items()}, tried, num_directions)
        self.batch, self.strategy = batch, differences.strategy
        scalar: Any = mechanism
        self.step = PrivateStep(
            mechanism=dataclasses.replace(scalar, num_directions=num_directions),
            space=space,
            differences=differences,
            noise=SecureNoise(),
            trajectory=Trajectory(header),
            defer=args.defer_updates,
        )

    def run(self) -> None:
        """The next step."""
        self.step(self.step.trajectory.next_step, [self.batch], _RATE)


class FirstOrderStep(Timed):
    """A step of sgd, adamw, dp-sgd or dp-adamw on one microbatch, with torch's optimizer."""

    def __init__(
        self,
        model: nn.Module,
        objective: PerExampleLoss,
        batch: Batch,
        args: Any,
        mechanism: Mechanism,
    ) -> None:
        super().__init__(next(model.parameters()).device.type)
        gradients = _gradients(model, objective, args)
        gradients.weighted_sum = self.under("evaluations", gradients.weighted_sum)
        self.parts = [[batch]] if isinstance(gradients, GroupMeans) else [batch]
        header = _header(args, mechanism)
        self.step = GradientStep(mechanism, gradients, SecureNoise(), Trajectory(header))
        self.optimizer = _optimizer(gradients.parameters, args)

    def run(self) -> None:
        """The next step and the optimizer's."""
        self.step(self.step.trajectory.next_step, self.parts, _RATE)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _gradients(model: nn.Module, objective: PerExampleLoss, args: Any) -> Any:
    if args.not_private or args.clipping == "averaged":
        plain = PlainGradients(model, objective)
        return GroupMeans(plain) if args.clipping == "averaged" else plain
    how, size = args.per_example_gradients, args.physical_batch_size
    return per_example_gradients(model, objective, how, size, autocast=args.bf16)


def _optimizer(parameters: list[nn.Parameter], args: Any) -> torch.optim.Optimizer:
    if args.method in ("sgd", "dp-sgd"):
        return torch.optim.SGD(parameters, lr=_RATE)
    return torch.optim.AdamW(parameters, lr=_RATE, fused="fused" in args.optim_name)


def _header(args: Any, mechanism: Mechanism) -> dict[str, Any]:
    return {
        **args.direction_settings(),
        "direction_key": f"{_KEY:032x}",
        "weight_decay": 0.0,
        "decayed": [],
        "replayable": mechanism.replayable,
    }


def mechanism_of(args: Any, plan: Any) -> Mechanism:
    """The plan's, or without a plan one of the recipe's method with a noise multiplier of 1."""
    if plan is not None:
        found: Mechanism = plan.mechanism
        return found
    values = {"name": args.method, "expected_batch_size": float(args.expected_batch_size)}
    if not args.not_private:
        values |= {"clip": args.clip, "noise_multiplier": 1.0}
    if not args.first_order:
        values["num_directions"] = args.num_directions
    return mechanism_from_dict(values)


def in_precision(objective: PerExampleLoss, args: Any, device: str) -> PerExampleLoss:
    """The objective under the recipe's autocast, if it has one; no copy of a weight is kept."""

    def evaluate(model: nn.Module, inputs: Batch) -> Tensor:
        with (
            torch.autocast(device, torch.bfloat16, cache_enabled=False)
            if args.bf16
            else contextlib.nullcontext()
        ):
            return objective(model, inputs)

    return evaluate
