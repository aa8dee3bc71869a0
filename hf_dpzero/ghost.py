"""Ghost clipping: the norms of per-example gradients first, then one weighted backward pass.

sum_i w_i g_i = grad sum_i w_i f(theta; xi_i),   w_i = w(||g_i||) held fixed

(Li et al. 2022, arXiv:2110.05679.) The gradient of a weight that meets the tokens of an
example is a sum of outer products, sum_t left_t right_t^T, and its norm needs none of them:

||sum_t left_t right_t^T||_F^2 = sum_{s,t} (left_s . left_t) (right_s . right_t)

A weight with fewer numbers than the two `[T, T]` tables takes its gradient instead, which is
smaller (mixed ghost clipping, Bu et al. 2022, arXiv:2205.10683); so do biases and norm layers. The
norm is that of all uses of a weight together: of a layer that runs twice, of a tied embedding.

In float32 only: the backward pass adds the examples up, and a sum that is rounded to half precision
moves by more than the clip when an example comes or goes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.first_order import (
    HookedGradients,
    PerExampleGradients,
    check_complete,
    check_total,
    forget_gradients,
    hooks_class,
    lookup_norms,
    without_padding,
)
from hf_dpzero.gradient_mechanisms import row_norms
from hf_dpzero.objectives import PerExampleLoss

Batch = Mapping[str, Tensor]
DENSE_BYTES = 1 << 28
"""Per-example gradients of a microbatch that `auto` still holds."""
CANCELLED = 2.0**-6
"""Share of sum_t |left_t|^2 |right_t|^2 (1 for tokens without relation) that a squared norm must keep
to be right to 2^-16 after float32's rounding of 2^-24: what `CLIP_MARGIN` leaves room for."""


def per_example_gradients(
    model: nn.Module,
    objective: PerExampleLoss,
    how: str,
    microbatch_size: int,
    autocast: bool = False,
) -> HookedGradients:
    """Dense or ghost gradients of a model's trainable parameters.

    Args:
      how: "dense", "ghost", or "auto": dense while the float32 gradients of one microbatch take less
        than 256 MiB, for they need one forward and one backward pass only, and in half precision;
        ghost otherwise.
      microbatch_size: examples differentiated at a time.
      autocast: whether the objective computes in half precision.

    Raises:
      ValueError: a trainable layer that neither supports, by its name; another `how`; ghost in half
        precision (under autocast, at the first backward pass).
    """
    kinds = {"dense": PerExampleGradients, "ghost": GhostGradients}
    if how == "auto":
        trained = [p for p in model.parameters() if p.requires_grad]
        few = 4 * sum(p.numel() for p in trained) * microbatch_size < DENSE_BYTES
        half = autocast or any(p.dtype != torch.float32 for p in trained)
        how = "dense" if few or half else "ghost"
    if how not in kinds:
        raise ValueError(f"per_example_gradients={how!r} is not one of auto, dense, ghost.")
    return kinds[how](model, objective)


class GhostGradients(HookedGradients):
    """Weighted sums without per-example gradients of large weights.

    Two backward passes through one forward pass. Memory: the plain gradient, the inputs of every
    layer (which autograd keeps as well) and, in turn, two `[B, T, T]` tables for each weight.

    A squared norm from T^2 products has the rounding of the largest of them. Where an example's
    tokens cancel so far that little else is left, its gradient is taken by itself. The products are
    added up here in float64: Opacus' rule for linear layers does it in one float32 chain, which is
    2e-5 off at 512 tokens, more than the clip's margin.

    Raises:
      ValueError: as for dense gradients; a trainable parameter that is not float32.
    """

    def __init__(self, model: nn.Module, objective: PerExampleLoss) -> None:
        super().__init__(model, objective)
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.dtype != torch.float32:
                _refuse_coarse(f"{name} is {str(p.dtype).removeprefix('torch.')}")

    def _hooks_class(self) -> Any:
        return _norm_hooks_class()

    def _add_weighted_(
        self,
        totals: Sequence[Tensor],
        hooks: Any,
        part: Batch,
        weigh: Callable[[Tensor], Tensor],
    ) -> Tensor:
        losses = self._losses(hooks, part)
        losses.sum().backward(retain_graph=True)
        norms, cancelled = hooks.norms()
        self._check(hooks, norms)
        forget_gradients(self.parameters)
        with _paused(hooks):
            for i in cancelled:
                norms[i] = self._norm_alone(hooks, {n: v[i : i + 1] for n, v in part.items()})
            finite = norms.isfinite()
            weights = torch.where(finite, weigh(norms).float(), 0.0)
            if not bool(finite.all()):  # zero weights would not do: 0 * inf is not 0
                del losses
                part = {name: value[finite.to(value.device)] for name, value in part.items()}
                weights = weights[finite]
                losses = self._losses(hooks, part) if len(weights) else weights
            self._add_gradient_(totals, losses, weights)
        return norms.float().cpu()

    def _norm_alone(self, hooks: Any, example: Batch) -> Tensor:
        """||g|| of a microbatch of one."""
        loss = self._losses(hooks, example)
        found = torch.autograd.grad(loss.sum(), self.parameters, allow_unused=True)
        return torch.cat([row_norms(g.reshape(1, -1)) for g in found if g is not None]).norm()

    def _add_gradient_(self, totals: Sequence[Tensor], losses: Tensor, weights: Tensor) -> None:
        """totals += grad sum_i weights_i losses_i."""
        if not len(losses):
            return
        found = torch.autograd.grad(losses, self.parameters, weights, allow_unused=True)
        for total, gradient in zip(totals, found, strict=True):
            if gradient is not None:
                total.add_(gradient)

    def _check(self, hooks: Any, norms: Tensor) -> None:
        """What the hooks saw of each parameter must be all that the loss depends on."""
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.grad is None:
                continue  # not part of this loss
            if p not in hooks.totals:
                check_complete(name, p, hooks.size)  # there is no gradient at all: it raises
            check_total(name, p, hooks.totals[p], norms, hooks.coarse, _projected)


# ---------------------------------------------------------------- what one use of a weight adds


@dataclass(frozen=True)
class Products:
    """One use of a weight `[n, m]`: its gradient is sum_t left_t right_t^T for each example.

    Attributes:
      left: float32 `[B, T, n]`, or ids `[B, T]` that stand for one-hot rows.
      right: float32 `[B, T, m]`.
    """

    left: Tensor
    right: Tensor

    def dense(self, weight: Tensor) -> Tensor:
        """The gradients themselves, `[B, n, m]`."""
        if self.left.is_floating_point():
            return self.left.mT @ self.right
        found = self.right.new_zeros(len(self.right), *weight.shape)
        return found.scatter_add_(1, self.left.unsqueeze(-1).expand_as(self.right), self.right)

    def lengths(self) -> Tensor:
        """sum_t |left_t|^2 |right_t|^2 [B], the scale of the largest products."""
        lengths = self.right.square().sum(dim=2)
        if self.left.is_floating_point():
            lengths = lengths * self.left.square().sum(dim=2)
        return lengths.sum(dim=1)

    def squared_norm(self, weight: nn.Parameter) -> Tensor:
        """||sum_t left_t right_t^T||_F^2 [B] float64 without that sum."""
        if not self.left.is_floating_point():
            return lookup_norms(weight, self.left, self.right).double().square()
        lefts, rights = self.left @ self.left.mT, self.right @ self.right.mT
        return (lefts.double() * rights).sum(dim=(1, 2)).clamp(min=0)

    def total(self, weight: Tensor) -> Tensor:
        """Their sum over the examples, projected: `[n]`."""
        lengths = self.right @ _signs(self.right)
        if self.left.is_floating_point():
            return torch.einsum("btn,bt->n", self.left, lengths)
        total = lengths.new_zeros(len(weight))
        return total.index_add_(0, self.left.flatten(), lengths.flatten())


def _joined(uses: Sequence[Products]) -> list[Products]:
    """Uses of one kind are one use of more tokens."""
    looked_up = [u for u in uses if not u.left.is_floating_point()]
    multiplied = [u for u in uses if u.left.is_floating_point()]
    return [
        Products(torch.cat([u.left for u in kind], 1), torch.cat([u.right for u in kind], 1))
        for kind in (looked_up, multiplied)
        if kind
    ]


def _squared_norms(weight: nn.Parameter, uses: Sequence[Products]) -> tuple[Tensor, Tensor]:
    """||sum over the uses||_F^2 [B] float64, without the gradients if that takes less memory.

    And `lengths`, the scale of its rounding; 0 with gradients.
    """
    tokens = sum(u.right.shape[1] for u in uses)
    joined = _joined(uses)
    if joined[-1].left.is_floating_point() and weight.numel() < 2 * tokens**2:
        squares = _dense_squares(_added(u.dense(weight) for u in joined))
        return squares, torch.zeros_like(squares)
    squares = _added(u.squared_norm(weight) for u in joined)
    if len(joined) == 2:
        squares = (squares + 2 * _inner_product(*joined)).clamp(min=0)
    return squares, _added(u.lengths() for u in joined).double()


def _inner_product(looked_up: Products, multiplied: Products) -> Tensor:
    """<g_i, g'_i>_F [B] of an embedding's and a linear layer's gradient of their tied weight."""
    rights = multiplied.right @ looked_up.right.mT
    tokens = looked_up.left.unsqueeze(1).expand_as(rights)
    return (multiplied.left.gather(2, tokens).double() * rights).sum(dim=(1, 2))


def _dense_squares(samples: Tensor) -> Tensor:
    """float64 [B]."""
    return row_norms(samples.flatten(1)).square()


def _added(tensors: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


def _projected(gradient: Tensor) -> Tensor:
    """A matrix times a fixed vector of signs, `[n]`; a vector as it is.

    Over random signs, the mean square of its length is the square of the matrix' Frobenius norm.
    """
    return gradient @ _signs(gradient) if gradient.dim() == 2 else gradient.flatten()


def _signs(like: Tensor) -> Tensor:
    """Fixed +-1, as many as the last dimension of `like`; they only serve a check."""
    drawn = torch.randint(0, 2, like.shape[-1:], generator=torch.Generator().manual_seed(0))
    return drawn.to(like) * 2 - 1


# ---------------------------------------------------------------- hooks


@functools.lru_cache(maxsize=1)
def _norm_hooks_class() -> Any:
    """Hooks that turn what a layer sees into squared norms at once and keep nothing else."""

    class NormHooks(hooks_class()):  # type: ignore[misc]
        def begin(self, size: int) -> None:
            super().begin(size)
            device = next(self._module.parameters()).device
            self.squares = [torch.zeros(size, dtype=torch.float64, device=device)]
            self.scales = self.squares[:]
            self.totals: dict[nn.Parameter, Tensor] = {}
            """What was seen of the plain gradient, projected."""
            self.uses: dict[nn.Parameter, list[Products]] = {}
            self.samples: dict[nn.Parameter, Tensor] = {}

        def capture_backprops_hook(
            self, module: nn.Module, _: Any, outputs: Any, **how: Any
        ) -> None:
            """A weight is done with when all layers that used it have been heard."""
            if not self.hooks_enabled:
                return
            seen = self.rearrange_grad_samples(module=module, backprops=outputs[0].detach(), **how)
            if self.coarse:
                _refuse_coarse(f"a {type(module).__name__} computes in half precision")
            self._note(module, *seen)
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    p._forward_counter -= 1  # type: ignore[attr-defined]
                    if p._forward_counter == 0:  # type: ignore[attr-defined]
                        self._finish(p)

        def _note(self, module: nn.Module, inputs: list[Tensor], backprops: Tensor) -> None:
            if isinstance(module, nn.Embedding):
                rows = without_padding(module, inputs[0], backprops)
                self._use(module.weight, inputs[0].flatten(1), _by_token(rows))
            elif type(module) is nn.Linear:
                rows = _by_token(backprops)
                self._use(module.weight, rows, _by_token(inputs[0].to(rows.dtype)))
                self._sample(module.bias, rows.sum(1))
            else:
                rule = self.GRAD_SAMPLERS[type(module)]
                for p, samples in rule(module, inputs, backprops).items():
                    self._sample(p, samples)

        def _use(self, weight: Any, left: Tensor, right: Tensor) -> None:
            if weight.requires_grad:
                self.uses.setdefault(weight, []).append(Products(left, right))

        def _sample(self, p: nn.Parameter | None, samples: Tensor) -> None:
            if p is not None and p.requires_grad:
                self.samples[p] = self.samples[p] + samples if p in self.samples else samples

        def _finish(self, p: nn.Parameter) -> None:
            uses, samples = self.uses.pop(p, []), self.samples.pop(p, None)
            if samples is None:
                squares, scale = _squared_norms(p, uses)
                self.squares.append(squares)
                self.scales.append(scale)
                self.totals[p] = _added(u.total(p) for u in uses)
            else:
                samples = _added([samples, *(u.dense(p) for u in uses)])
                self.squares.append(_dense_squares(samples))
                self.totals[p] = _projected(samples.sum(0))

        def norms(self) -> tuple[Tensor, list[int]]:
            """||g_i|| float64 [B] over all parameters; the examples whose terms cancelled."""
            for p in list({**self.uses, **self.samples}):  # some outputs were not read
                self._finish(p)
            squares, scales = torch.stack(self.squares).sum(0), torch.stack(self.scales).sum(0)
            cancelled = (squares < CANCELLED * scales).nonzero().flatten()
            return squares.sqrt(), cancelled.tolist()

    return NormHooks


def _refuse_coarse(what: str) -> None:
    raise ValueError(
        f"{what}, and ghost clipping adds examples up in the precision of the backward pass, where "
        "rounding exceeds the clip: use per_example_gradients: dense, or float32."
    )


def _by_token(rows: Tensor) -> Tensor:
    """`[B, ..., h]` as `[B, T, h]`; T = 1 for `[B, h]`."""
    return rows.reshape(len(rows), -1, rows.shape[-1])


@contextlib.contextmanager
def _paused(hooks: Any) -> Iterator[None]:
    hooks.disable_hooks()
    try:
        yield
    finally:
        hooks.enable_hooks()
