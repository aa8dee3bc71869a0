"""Finite differences of a batch along K public directions (DPZero, Eq. 2).

x[i, k] = (f(theta + lambda u_k; xi_i) - f(theta - lambda u_k; xi_i)) / (2 lambda)

Forward passes only, in eval mode, over physical microbatches. Where the perturbation is while they
run is the strategy's business. Every strategy evaluates the very same perturbed parameters, and all
but `stacked` give the same bits:

- `whole_model`: the parameters themselves are moved, once for each direction and sign. The last
  perturbation is left on them, for the update to take off in the same pass; `settle_` takes it off
  when there is no update.
- `layerwise`: each module's parameters are copied and perturbed while that module runs (`layerwise`),
  anew for every microbatch.
- `paired`: the same with both signs in one pass over a doubled batch (`paired`).
- `stacked`: perturbed copies of the trainable tensors, both signs of many directions, go through one
  pass together (`stacked`). Batched kernels sum in another order, so losses differ from the others'
  by float32 rounding (a few units in the last place; checked to 1e-5 before training).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.layerwise import ModuleVisits
from hf_dpzero.estimators.paired import PairedVisits
from hf_dpzero.estimators.parameter_guard import ParameterGuard
from hf_dpzero.estimators.prefix_cache import FrozenPrefix
from hf_dpzero.estimators.stacked import StackedCopies
from hf_dpzero.objectives.losses import PerExampleLoss, check_per_example, is_compiled, single_pass
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace
from hf_dpzero.perturbation.trainable import has_plain_storage

Microbatch = Mapping[str, Tensor]
Strategy = Literal["auto", "whole_model", "layerwise", "paired", "stacked"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
_VISITS = {"layerwise": ModuleVisits, "paired": PairedVisits}


class FiniteDifferences:
    """Evaluates per-example finite differences for a model and an objective.

    Args:
      model: put into eval mode for every evaluation.
      space: its trainable parameters.
      objective: (model, inputs) -> per-example losses [B] float.
      smoothing: lambda > 0.
      reuse_frozen_prefix: run what precedes the first trainable parameter once per microbatch. Off
        for compiled models, under `paired`, which runs another batch, and for objectives that are
        not `single_pass`.
      strategy: where the perturbation is (see the module). "auto" takes `whole_model` for float32
        parameters, which are moved in place without extra memory, and for compiled models;
        `layerwise` as soon as one trainable tensor is in half precision, whose settled values would
        otherwise be kept beside it. `exactness.make_exact` goes on from there to `stacked` where
        little trains along many directions. `paired` is taken only when asked for: it saves half of
        the generator's work and doubles the activations. Many microbatches a step make
        `whole_model` the faster one in half precision too, at the price of that copy: ask for it.
      forget_unread: of the frozen prefix, keep only the outputs that a trial batch read. Not for
        private runs: a batch on which other code runs could be computed from stand-ins.

    Attributes:
      strategy: the one in use, never "auto".

    Raises:
      ValueError: an unknown strategy, or one that the model or the objective does not allow.
    """

    def __init__(
        self,
        model: nn.Module,
        space: ParameterSpace,
        objective: PerExampleLoss,
        smoothing: float,
        reuse_frozen_prefix: bool = True,
        strategy: str = "auto",
        forget_unread: bool = False,
    ) -> None:
        self.model, self.space, self.objective = model, space, objective
        self.forget_unread = forget_unread
        self.smoothing = smoothing
        self._guard = ParameterGuard(
            (name, p) for name, p in model.named_parameters() if has_plain_storage(p)
        )
        self.chosen_automatically = strategy == "auto"
        self.use(_resolved(strategy, model, space, objective))
        prefix = FrozenPrefix(model)
        reuse = reuse_frozen_prefix and prefix.worthwhile and not is_compiled(model)
        reuse = reuse and single_pass(objective)
        self.prefix = prefix if reuse and self.strategy != "paired" else None

    def use(self, strategy: str) -> None:
        """Goes over to another strategy, not "auto"."""
        kind = _VISITS.get(strategy)
        self.visits = kind(self.model, self.space) if kind else None
        self.stack = None
        if strategy == "stacked":
            self.stack = StackedCopies(self.model, self.space, self._per_example)
        self.strategy = strategy

    @torch.no_grad()
    def __call__(
        self, microbatches: Sequence[Microbatch], directions: Sequence[Direction]
    ) -> Tensor:
        """x, float64 [B, K] on the CPU; B = 0 gives [0, K] and touches nothing.

        On return the parameters stand at theta - lambda u_K under `whole_model`, at theta otherwise
        and when B = 0; if anything raises, at theta.
        """
        self.space.check_is_of(self.model)
        if not microbatches:
            return torch.zeros(0, len(directions), dtype=torch.float64)
        plus, minus = self.losses(microbatches, directions)
        return (plus.double() - minus.double()) / (2.0 * self.smoothing)

    @torch.no_grad()
    def losses(
        self, microbatches: Sequence[Microbatch], directions: Sequence[Direction]
    ) -> tuple[Tensor, Tensor]:
        """(f(theta + lambda u_k), f(theta - lambda u_k)), float32 [B, K] each on the CPU.

        Leaves the parameters where a call leaves them.
        """
        try:
            with evaluation_mode(self.model), self._ready():
                return self._all_losses(microbatches, directions)
        except BaseException:
            self.space.settle_()
            raise

    @contextlib.contextmanager
    def _ready(self) -> Iterator[None]:
        """What watches the model's modules is in place inside."""
        with contextlib.ExitStack() as stack:
            beside = self.visits or self.stack
            if beside is not None:  # theta itself does not move
                self.space.settle_()
                if not self.space.snapped:
                    self.space.snap_()  # now, while every parameter is at home
                stack.enter_context(beside.installed())
            if self.prefix is not None:
                stack.enter_context(self.prefix.installed())
            yield

    def _all_losses(
        self, microbatches: Sequence[Microbatch], directions: Sequence[Direction]
    ) -> tuple[Tensor, Tensor]:
        if self.prefix is None:
            return self._sweep(microbatches, directions)
        # One microbatch at a time, so that only its prefix is held in memory.
        parts = [self._sweep_with_prefix(m, directions) for m in microbatches]
        plus, minus = zip(*parts, strict=True)
        return torch.cat(plus), torch.cat(minus)

    def _sweep_with_prefix(
        self, microbatch: Microbatch, directions: Sequence[Direction]
    ) -> tuple[Tensor, Tensor]:
        assert self.prefix is not None
        self.prefix.forget()
        plus, minus = self._sweep([microbatch], directions)
        if self.prefix.forgetful and bool((plus + minus).isnan().any()):
            # Either the losses are NaN, or this pass reads what the trial pass did not.
            self.prefix.keep_everything()
            return self._sweep_with_prefix(microbatch, directions)
        return plus, minus

    def _sweep(
        self, microbatches: Sequence[Microbatch], directions: Sequence[Direction]
    ) -> tuple[Tensor, Tensor]:
        if self.stack is not None:
            return self.stack.losses(microbatches, directions, self.smoothing, self._watched)
        columns = [self._column(microbatches, direction) for direction in directions]
        plus, minus = zip(*columns, strict=True)
        return torch.stack(plus, dim=1), torch.stack(minus, dim=1)

    def _column(
        self, microbatches: Sequence[Microbatch], direction: Direction
    ) -> tuple[Tensor, Tensor]:
        """Losses [B] at both signs; the whole model is moved once for all microbatches."""
        if isinstance(self.visits, PairedVisits):
            pairs = [self._evaluate_pair(m, direction) for m in microbatches]
            plus, minus = (torch.cat(part) for part in zip(*pairs, strict=True))
            return plus, minus
        found = []
        for sign in (1.0, -1.0):
            self._perturb(direction, sign * self.smoothing)
            found.append(torch.cat([self.evaluate(m) for m in microbatches]))
        return found[0], found[1]

    def _perturb(self, direction: Direction, scale: float) -> None:
        position = ((direction, scale),)
        if self.visits is None:
            self.space.move_to_(position)
        else:
            self.visits.position = position

    def evaluate(self, microbatch: Microbatch) -> Tensor:
        """Per-example losses of one microbatch at the present parameters, float32 [B] on the CPU.

        Raises:
          ParameterChanged: the forward pass wrote to a trainable parameter.
        """
        with self._watched():
            return self._per_example(self.model, microbatch).detach().cpu()

    def _per_example(self, model: nn.Module, microbatch: Microbatch) -> Tensor:
        """The objective's losses, checked to be one an example, float32 [B]."""
        return check_per_example(self.objective(model, microbatch), batch_size(microbatch))

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Around one evaluation of the objective."""
        if self.prefix is not None:
            self.prefix.begin_evaluation()
        return self._guard.watching()

    def _evaluate_pair(self, microbatch: Microbatch, direction: Direction) -> tuple[Tensor, Tensor]:
        assert isinstance(self.visits, PairedVisits)
        rows = batch_size(microbatch)
        with self.visits.pair(direction, self.smoothing, rows):
            plus, minus = self.evaluate(_doubled(microbatch, rows)).split(rows)
        return plus, minus


def _resolved(
    strategy: str, model: nn.Module, space: ParameterSpace, objective: PerExampleLoss
) -> str:
    """The strategy that "auto" stands for, or the one asked for if the model allows it."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not known; choose one of {STRATEGIES}.")
    if strategy in ("paired", "stacked") and not single_pass(objective):
        raise ValueError(
            f"strategy={strategy!r} runs several perturbed models in one pass over a batch, but this "
            "objective runs every example by itself: use 'whole_model' or 'layerwise'."
        )
    if is_compiled(model):
        return _for_compiled(strategy)
    if strategy != "auto":
        return strategy
    half = any(tensor.dtype != torch.float32 for tensor in space.tensors)
    return "layerwise" if half else "whole_model"


def _for_compiled(strategy: str) -> str:
    if strategy in (*_VISITS, "stacked"):
        raise ValueError(
            f"strategy={strategy!r} replaces modules' forwards or parameters, which compiled "
            "code does not follow: use strategy='whole_model', or do not compile the model."
        )
    return "whole_model"


def _doubled(microbatch: Microbatch, rows: int) -> Microbatch:
    """[x; x] for every tensor with a batch dimension; the rest as it is."""

    def twice(value: Tensor) -> Tensor:
        batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
        return torch.cat([value, value]) if batched else value

    return {name: twice(value) for name, value in microbatch.items()}


def batch_size(microbatch: Microbatch) -> int:
    """The number of examples of a collated microbatch: the first tensor's leading dimension."""
    for value in microbatch.values():
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    raise ValueError(f"the microbatch {sorted(microbatch)} holds no tensor with a batch dimension.")


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[nn.Module]:
    """model.eval() inside; on exit every module is back in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model
    finally:
        for module, training in modes:
            module.training = training
