"""Finite differences of a batch along K public directions (DPZero, Eq. 2).

x[i, k] = (f(theta + lambda u_k; xi_i) - f(theta - lambda u_k; xi_i)) / (2 lambda)

Forward passes only, in eval mode, over physical microbatches. The perturbation last used is left on
the parameters, for the update to take off in the same pass; `ParameterSpace.settle_` takes it off
when there is no update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_dpzero.directions import Direction
from hf_dpzero.objectives import PerExampleLoss, check_per_example
from hf_dpzero.perturbation import ParameterSpace
from hf_dpzero.prefix import FrozenPrefix

Microbatch = Mapping[str, Tensor]


class FiniteDifferences:
    """Evaluates per-example finite differences for a model and an objective.

    Args:
      model: put into eval mode for every evaluation.
      space: its trainable parameters.
      objective: (model, inputs) -> per-example losses [B] float.
      smoothing: lambda > 0.
      reuse_frozen_prefix: run what precedes the first trainable parameter once per microbatch.
    """

    def __init__(
        self,
        model: nn.Module,
        space: ParameterSpace,
        objective: PerExampleLoss,
        smoothing: float,
        reuse_frozen_prefix: bool = True,
    ) -> None:
        self.model, self.space, self.objective = model, space, objective
        self.smoothing = smoothing
        prefix = FrozenPrefix(model)
        self.prefix = prefix if reuse_frozen_prefix and prefix.worthwhile else None

    @torch.no_grad()
    def __call__(
        self, microbatches: Sequence[Microbatch], directions: Sequence[Direction]
    ) -> Tensor:
        """x, float64 [B, K] on the CPU; B = 0 gives [0, K] and touches nothing.

        On return the parameters stand at theta - lambda u_K (or at theta when B = 0); if anything
        raises, at theta.
        """
        self.space.check_is_of(self.model)
        if not microbatches:
            return torch.zeros(0, len(directions), dtype=torch.float64)
        try:
            with evaluation_mode(self.model):
                plus, minus = self._losses(microbatches, directions)
        except BaseException:
            self.space.settle_()
            raise
        return (plus.double() - minus.double()) / (2.0 * self.smoothing)

    def _losses(
        self, microbatches: Sequence[Microbatch], directions: Sequence[Direction]
    ) -> tuple[Tensor, Tensor]:
        """(f(theta + lambda u_k), f(theta - lambda u_k)), float32 [B, K] each."""
        if self.prefix is None:
            return self._sweep(microbatches, directions)
        with self.prefix.installed():
            # One microbatch at a time, so that only its prefix is held in memory.
            parts = [self._sweep_with_prefix(m, directions) for m in microbatches]
        plus, minus = zip(*parts, strict=True)
        return torch.cat(plus), torch.cat(minus)

    def _sweep_with_prefix(
        self, microbatch: Microbatch, directions: Sequence[Direction]
    ) -> tuple[Tensor, Tensor]:
        assert self.prefix is not None
        self.prefix.forget()
        return self._sweep([microbatch], directions)

    def _sweep(
        self, microbatches: Sequence[Microbatch], directions: Sequence[Direction]
    ) -> tuple[Tensor, Tensor]:
        """Perturbs once per direction and sign, and evaluates all microbatches there."""
        columns: tuple[list[Tensor], list[Tensor]] = ([], [])
        for direction in directions:
            for column, sign in zip(columns, (1.0, -1.0), strict=True):
                self.space.move_to_(((direction, sign * self.smoothing),))
                column.append(torch.cat([self.evaluate(m) for m in microbatches]))
        return torch.stack(columns[0], dim=1), torch.stack(columns[1], dim=1)

    def evaluate(self, microbatch: Microbatch) -> Tensor:
        """Per-example losses of one microbatch at the present parameters, float32 [B] on the CPU."""
        if self.prefix is not None:
            self.prefix.begin_evaluation()
        losses = self.objective(self.model, microbatch)
        return check_per_example(losses, batch_size(microbatch)).detach().cpu()


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


def prefix_is_exact(
    differences: FiniteDifferences, microbatch: Microbatch, direction: Direction
) -> bool:
    """Whether reuse gives bit for bit the losses of full passes on this microbatch (theta settled)."""
    prefix = differences.prefix
    if prefix is None:
        return True
    try:
        with_reuse = _settled(differences, lambda: differences([microbatch], [direction]))
        differences.prefix = None
        without = _settled(differences, lambda: differences([microbatch], [direction]))
    except (RuntimeError, IndexError):
        return False
    finally:
        differences.prefix = prefix
    return torch.equal(with_reuse, without)


def _settled(differences: FiniteDifferences, call: Callable[[], Tensor]) -> Tensor:
    try:
        return call()
    finally:
        differences.space.settle_()
