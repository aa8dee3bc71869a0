"""Finite differences of a batch along K public directions (DPZero, Eq. 2).

central:  x[i, k] = (f(theta + lambda u_k; xi_i) - f(theta - lambda u_k; xi_i)) / (2 lambda)
forward:  x[i, k] = (f(theta + lambda u_k; xi_i) - f(theta; xi_i)) / lambda

Central differences take 2 K passes. Forward ones take K + 1, for the losses at theta serve all K; they
are u'g + lambda/2 u'Hu to second order. The second term is the same for u and -u, so that on average it
adds nothing to an update along u: it costs variance, and a part of the clip. Either way a row's K
numbers are clipped as one vector, so the sensitivity is the same.

Forward passes only, in eval mode, over physical microbatches. A strategy says where the perturbation is
while they run. Every strategy evaluates the very same perturbed parameters, and all but `stacked` give
the same bits:

- `whole_model`: the parameters themselves are moved, once for each direction and sign. The last
  perturbation is left on them, for the update to take off in the same pass; `settle_` takes it off
  when there is no update. The pass at theta comes first, after the update that waited.
- `layerwise`: each module's parameters are copied and perturbed while that module runs (`layerwise`),
  anew for every microbatch.
- `stacked`: copies of the trainable tensors, perturbed along many directions, go through one pass
  together (`stacked`). Batched kernels sum in another order, so losses differ from the others'
  by float32 rounding (a few units in the last place; checked to 1e-5 before training).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.forward_passes import FrozenPrefix, ParameterGuard
from hf_dpzero.estimators.layerwise import ModuleVisits
from hf_dpzero.estimators.offload import living_elsewhere, prefetcher_of
from hf_dpzero.estimators.stacked import StackedCopies
from hf_dpzero.objectives.losses import (
    PerExampleLoss,
    batch_size,
    check_per_example,
    evaluation_mode,
    is_compiled,
    num_examples,
    single_pass,
)
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace, Position
from hf_dpzero.perturbation.sharding import local
from hf_dpzero.perturbation.trainable import has_plain_storage

Microbatch = Mapping[str, Tensor]
Strategy = Literal["auto", "whole_model", "layerwise", "stacked"]
COPIED = 2**30
"""Bytes of half-precision weights that "auto" keeps twice, where a step has several microbatches."""
STRATEGIES: tuple[str, ...] = get_args(Strategy)
Differences = Literal["central", "forward"]
DIFFERENCES: tuple[str, ...] = get_args(Differences)


def passes_of(differences: str, num_directions: int) -> int:
    """Returns how often a step evaluates its batch: 2 K, or K + 1.

    >>> passes_of("central", 32), passes_of("forward", 32)
    (64, 33)
    """
    return num_directions + 1 if differences == "forward" else 2 * num_directions


class DirectionSplit(Protocol):
    """Shares of a step's directions; `parallel.mesh.ProcessMesh` is one."""

    def own(self, directions: Sequence[Direction]) -> Sequence[Direction]:
        """Those that are evaluated here."""

    def gathered(self, plus: Tensor, minus: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Losses [B, own] at both ends -> [B, total]."""


class FiniteDifferences:
    """Evaluates per-example finite differences for a model and an objective.

    Args:
      model: put into eval mode for every evaluation.
      space: its trainable parameters.
      objective: (model, inputs) -> per-example losses [B] float.
      smoothing: lambda > 0.
      reuse_frozen_prefix: run what precedes the first trainable parameter once per microbatch. Off
        for compiled models and for objectives that are not `single_pass`.
      strategy: where the perturbation is (see the module), or "auto": `whole_model` for float32,
        `layerwise` as soon as one trainable tensor is in half precision or comes from elsewhere
        (`offload`); see `_resolved`. `choose_strategy` goes over from `whole_model` to `stacked` where
        little trains along many directions.
      passes: microbatches that a step is expected to have, for each sign and direction.
      kind: "central" or "forward".

    Attributes:
      strategy: the one in use, never "auto".
      visits: perturbs module by module under `layerwise`, else None.
      stack: the perturbed copies under `stacked`, else None.
      prefix: the frozen prefix that is reused, or None.

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
        passes: float = 1.0,
        kind: str = "central",
    ) -> None:
        self.forward = kind == "forward"
        self.model, self.space, self.objective = model, space, objective
        self.smoothing = smoothing
        self._guard = ParameterGuard(
            (name, local(p)) for name, p in model.named_parameters() if has_plain_storage(local(p))
        )
        self._prefetcher = prefetcher_of(model)
        self.chosen_automatically = strategy == "auto"
        self.use(_resolved(strategy, model, space, objective, passes))
        prefix = FrozenPrefix(model)
        reuse = reuse_frozen_prefix and prefix.worthwhile and not is_compiled(model)
        reuse = reuse and not space.sharded  # its layers would be gathered all the same
        self.prefix = prefix if reuse and single_pass(objective) else None

    def use(self, strategy: str) -> None:
        """Goes over to another strategy, not "auto"."""
        self.visits = ModuleVisits(self.model, self.space) if strategy == "layerwise" else None
        stacked = strategy == "stacked"
        self.stack = (
            StackedCopies(self.model, self.space, self._per_example, self.forward)
            if stacked
            else None
        )
        self.strategy = strategy

    @torch.no_grad()
    def __call__(
        self, microbatches: Sequence[Microbatch], directions: Sequence[Direction]
    ) -> Tensor:
        """The finite differences of all examples.

        On return the parameters stand at theta - lambda u_K (`forward`: theta + lambda u_K) under
        `whole_model`, at theta otherwise and when B = 0; if anything raises, at theta.

        Args:
          microbatches: B examples in all, maybe none.
          directions: u_1, ..., u_K.

        Returns:
          x, float64 [B, K] on the CPU; B = 0 gives [0, K] and touches nothing.
        """
        return self.with_losses(microbatches, directions)[0]

    @torch.no_grad()
    def with_losses(
        self,
        microbatches: Sequence[Microbatch],
        directions: Sequence[Direction],
        split: DirectionSplit | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As a call, and each example's loss: at theta, or the mean over both signs and all directions.

        Args:
          microbatches: B examples in all, maybe none.
          directions: u_1, ..., u_K.
          split: evaluates a share of the directions here and has the others' losses from elsewhere;
            None evaluates all.

        Returns:
          (x, float64 [B, K]; losses, float64 [B]; both on the CPU).
        """
        self.space.check_is_of(self.model)
        if not microbatches:
            nothing = torch.zeros(0, len(directions), dtype=torch.float64)
            return nothing, nothing.sum(dim=1)
        if split is None:
            ends = self.losses(microbatches, directions)
        else:
            own = self.losses(microbatches, split.own(directions))
            ends = split.gathered(*own, len(directions))
        # In float64: float32 would round the quotient once more before the clip.
        first, second = (losses.double() for losses in ends)
        if self.forward:
            return (first - second) / self.smoothing, second.mean(dim=1)
        return (first - second) / (2.0 * self.smoothing), (first + second).mean(dim=1) / 2

    @torch.no_grad()
    def losses(
        self, microbatches: Sequence[Microbatch], directions: Sequence[Direction]
    ) -> tuple[Tensor, Tensor]:
        """The losses at both ends of the differences. Leaves the parameters where a call leaves them.

        Args:
          microbatches: B examples in all, at least one.
          directions: u_1, ..., u_K.

        Returns:
          (f(theta + lambda u_k), f(theta - lambda u_k)), float32 [B, K] each on the CPU; `forward`:
          (f(theta + lambda u_k), f(theta)).
        """
        scales = (self.smoothing,) if self.forward else (self.smoothing, -self.smoothing)
        positions: list[Position] = [((u, scale),) for u in directions for scale in scales]
        if (stack := self.stack) is not None:
            first, second = self._over(
                microbatches,
                lambda parts: stack.losses(parts, directions, self.smoothing, self._evaluating),
            )
            return first, second
        found = self.at(microbatches, [()] * self.forward + positions)
        if self.forward:
            return found[:, 1:], found[:, :1].expand(-1, len(directions))
        return found[:, ::2], found[:, 1::2]

    @torch.no_grad()
    def at(self, microbatches: Sequence[Microbatch], positions: Sequence[Position]) -> Tensor:
        """The losses at some positions, float32 [B, P] on the CPU. Not under `stacked`.

        Leaves the parameters at the last position under `whole_model`, at theta otherwise and where
        anything raises.
        """
        (found,) = self._over(microbatches, lambda parts: (self._sweep(parts, positions),))
        return found

    def _over(
        self,
        microbatches: Sequence[Microbatch],
        sweep: Callable[[Sequence[Microbatch]], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """What `sweep` makes of the microbatches, with everything installed."""
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(evaluation_mode(self.model))
                copies = self.visits or self.stack
                if copies is not None:  # theta itself does not move
                    self.space.settle_()
                    if not self.space.snapped:
                        self.space.snap_()  # now, while every parameter is at home
                    stack.enter_context(copies.installed())
                if self._prefetcher is not None and self.visits is None:  # none of them trains
                    stack.enter_context(self._prefetcher.ahead())
                if self.prefix is None:
                    return sweep(microbatches)
                stack.enter_context(self.prefix.installed())
                parts = []
                for microbatch in microbatches:  # so that only one's prefix is held in memory
                    self.prefix.forget()
                    parts.append(sweep([microbatch]))
                return tuple(torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
        except BaseException:
            self.space.settle_()
            raise

    def _sweep(self, microbatches: Sequence[Microbatch], positions: Sequence[Position]) -> Tensor:
        """`at`, with everything installed; the whole model is moved once for all microbatches."""
        columns = []
        for position in positions:
            if self.visits is None:
                self.space.move_to_(position)
            else:
                self.visits.position = position
            before = self._guard.state()
            losses = []
            for microbatch in microbatches:
                losses.append(self.evaluate(microbatch))
            self._guard.check(before)
            columns.append(torch.cat(losses))
        # the one moment at which the host waits for the device
        return torch.stack(columns, dim=1).cpu()

    def evaluate(self, microbatch: Microbatch) -> Tensor:
        """Returns one microbatch's per-example losses at the present parameters, float32 [B]."""
        if self.prefix is not None:
            self.prefix.begin_evaluation()
        losses = self._per_example(self.model, microbatch)
        # a copy: a compiled model writes its next outputs where its last ones are
        return losses[: num_examples(microbatch)].detach().clone()

    def _per_example(self, model: nn.Module, microbatch: Microbatch) -> Tensor:
        """The objective's losses, checked to be one an example, float32 [B]."""
        return check_per_example(self.objective(model, microbatch), batch_size(microbatch))

    def _evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Around one pass of stacked copies."""
        if self.prefix is not None:
            self.prefix.begin_evaluation()
        return self._guard.watching()


def _resolved(
    strategy: str, model: nn.Module, space: ParameterSpace, objective: PerExampleLoss, passes: float
) -> str:
    """The strategy that "auto" stands for, or the one asked for if the model allows it.

    "auto": float32 is moved in place, without extra memory; so are compiled models, and parts of
    parameters, of which a copy is small.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not known; choose one of {STRATEGIES}.")
    if strategy == "stacked" and not single_pass(objective):
        raise ValueError(
            "strategy='stacked' runs several perturbed models in one pass over a batch, but this "
            "objective runs every example by itself: use 'whole_model' or 'layerwise'."
        )
    if is_compiled(model) and strategy not in ("auto", "whole_model"):
        raise ValueError(
            f"strategy={strategy!r} replaces modules' forwards or parameters, which compiled "
            "code does not follow: use strategy='whole_model', or do not compile the model."
        )
    if set(map(id, space.tensors)).intersection(living_elsewhere(model)):
        if strategy not in ("auto", "layerwise"):
            raise ValueError(
                f"strategy={strategy!r} with offloaded weights that train would move all of them where "
                "they live, or hold copies of all: use 'layerwise', which perturbs each layer's weights "
                "as they come, or 'auto'."
            )
        return "layerwise"
    if space.sharded:
        if strategy in ("layerwise", "stacked"):
            raise ValueError(
                f"strategy={strategy!r} makes perturbed copies of whole parameters, and each process "
                "has a part of them (FSDP): use strategy='whole_model'."
            )
        return "whole_model"
    if strategy != "auto":
        return strategy
    # Half precision is restored from a copy, which layerwise does without; but layerwise perturbs anew
    # for every pass, so that several of them are worth a copy that is not large.
    copied = sum(t.nbytes for t in space.tensors if t.dtype != torch.float32)
    worth_a_copy = passes > 1 and copied <= COPIED
    return "layerwise" if copied and not worth_a_copy and not is_compiled(model) else "whole_model"
