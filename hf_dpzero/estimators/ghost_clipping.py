"""Ghost clipping: norms of per-example gradients without the gradients, then one weighted sum.

(Li et al. 2022, arXiv:2110.05679.) The gradient of a weight that meets the tokens of an
example is a sum of outer products, sum_t left_t right_t^T, and its norm needs none of them:

||sum_t left_t right_t^T||_F^2 = sum_{s,t} (left_s . left_t) (right_s . right_t)

A weight with fewer numbers than the two `[T, T]` tables takes its gradient instead, which is
smaller (mixed ghost clipping, Bu et al. 2022, arXiv:2205.10683); so do biases and norm layers. The
norm is that of all uses of a weight together: of a layer that runs twice, of a tied embedding.

The sum is made of what was measured: the backward pass is not repeated with weighted losses, but its
left_t and right_t are kept and multiplied once more, sum_i w_i sum_t left_it right_it^T (book-keeping,
Bu et al. 2023, arXiv:2210.00038). A second pass would round differently, and where huge terms cancel
on the way back it gives a gradient that nobody measured.

Rounding
--------
Norm and sum round in proportion to S = sum_t |left_t| |right_t|, not to the norm. With float32's
2^-24, a squared norm is off by no more than about 2^-23 S^2, and a sum over n tokens (of all examples)
by sqrt(n) 2^-25 S. While S <= 16 ||g|| that is 2^-16 of the norm at the very worst, for each. Where S
is larger, or where numbers come near the end of float32's range, the example's gradient is multiplied
out by itself, and what is added is w times that very array. Gradients that were taken for their norms
are added as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.opacus_hooks import hooks_class, without_padding
from hf_dpzero.estimators.per_example_gradients import (
    HookedGradients,
    PerExampleGradients,
    check_complete,
    check_total,
    forget_gradients,
    parameter_norms,
    rounds_products,
)
from hf_dpzero.objectives.losses import PerExampleLoss, batch_size
from hf_dpzero.privacy.mechanisms.gradient import row_norms

Batch = Mapping[str, Tensor]
DENSE_BYTES = 1 << 28
"""Per-example gradients of a microbatch that `auto` still holds."""
CANCELLED = 16.0
"""Largest S / ||g|| that products without the gradient are trusted with."""
VANISHING = 2.0**-36
"""Share of max |left| max |right| that counts as rounding, for products below float32's range."""


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
        than 256 MiB, for they need no tables, and in half precision or TF32; ghost otherwise.
      microbatch_size: examples differentiated at a time.
      autocast: whether the objective computes in half precision.

    Raises:
      ValueError: a trainable layer that neither supports, by its name; another `how`; ghost with
        parameters that are not float32, frozen ones included, under autocast or with TF32.
    """
    kinds = {"dense": PerExampleGradients, "ghost": GhostGradients}
    if how == "auto":
        trained = [p for p in model.parameters() if p.requires_grad]
        few = 4 * sum(p.numel() for p in trained) * microbatch_size < DENSE_BYTES
        how = "dense" if few or autocast or _coarse(model) else "ghost"
    if how not in kinds:
        raise ValueError(f"per_example_gradients={how!r} is not one of auto, dense, ghost.")
    if how == "ghost" and autocast:
        _refuse_coarse("the run computes in half precision (autocast)")
    return kinds[how](model, objective)


class GhostGradients(HookedGradients):
    """Weighted sums without per-example gradients of large weights.

    One forward and one backward pass. Memory: the plain gradient, the inputs and output gradients of
    every trained layer and, in turn, two `[B, T, T]` tables for each weight; one example's gradient
    where that is taken by itself (see the module's docstring). A microbatch of one is differentiated
    without any of it.

    Raises:
      ValueError: as for dense gradients; a parameter that is not float32, frozen ones included;
        TF32; at the first pass, a layer under autocast.
    """

    def __init__(self, model: nn.Module, objective: PerExampleLoss) -> None:
        super().__init__(model, objective)
        if what := _coarse(model):
            _refuse_coarse(what)

    def _hooks_class(self) -> Any:
        return _norm_hooks_class()

    def _add_weighted_(
        self,
        totals: Sequence[Tensor],
        hooks: Any,
        part: Batch,
        weigh: Callable[[Tensor], Tensor],
    ) -> Tensor:
        if rounds_products():
            _refuse_coarse("float32 products are taken in TF32 or bfloat16")
        if batch_size(part) == 1:
            return _add_gradient_(totals, self._alone(hooks, part), weigh).float().cpu()
        self._differentiate(hooks, part)
        with torch.no_grad():
            return self._add_seen_(totals, hooks, weigh).float().cpu()

    def _add_seen_(
        self, totals: Sequence[Tensor], hooks: Any, weigh: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """totals += sum_i w_i g_i of what the hooks saw; norms [B] float64."""
        norms, scales, reach = hooks.norms()
        weights = weigh(norms).to(norms)
        trusted = (scales <= CANCELLED * norms) & (reach <= weights * norms)
        finite = scales.isfinite()
        for i in (finite & ~trusted).nonzero().flatten().tolist():
            norms[i] = _add_gradient_(totals, hooks.gradient(self.parameters, i), weigh)[0]
        kept = finite & trusted & norms.isfinite()
        hooks.add_weighted_(totals, self.parameters, kept, weights.float())
        return torch.where(finite, norms, torch.nan)

    def _differentiate(self, hooks: Any, part: Batch) -> None:
        self._losses(hooks, part).sum().backward()
        norms, scales, _ = hooks.norms()
        self._check(hooks, norms + 1e-3 * scales)
        forget_gradients(self.parameters)

    def _norms_by_parameter(self, hooks: Any, part: Batch) -> Tensor:
        self._differentiate(hooks, part)
        rows = range(hooks.size)
        return torch.stack(
            [parameter_norms(hooks.gradient(self.parameters, i)) for i in rows], dim=1
        )

    def _check(self, hooks: Any, norms: Tensor) -> None:
        """What the hooks saw of each parameter must be all that the loss depends on."""
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.grad is None:
                continue  # not part of this loss
            if p not in hooks.totals:
                check_complete(name, p, hooks.size)  # there is no gradient at all: it raises
            check_total(name, p, hooks.totals[p], norms, hooks.coarse, _projected)


def _add_gradient_(
    totals: Sequence[Tensor],
    gradient: Sequence[Tensor | None],
    weigh: Callable[[Tensor], Tensor],
) -> Tensor:
    """totals += w g for one example's gradient, w = weigh(||g||) of that very array; ||g|| [1].

    One that is not finite adds nothing.
    """
    used = [(total, g) for total, g in zip(totals, gradient, strict=True) if g is not None]
    none = torch.zeros(1, dtype=torch.float64, device=totals[0].device)
    norm = torch.stack([none, *(row_norms(g.reshape(1, -1)) for _, g in used)]).norm(dim=0)
    if bool(norm.isfinite()):
        weight = float(weigh(norm).float())
        for total, g in used:
            total.add_(g.view(total.shape), alpha=weight)
    return norm


def _coarse(model: nn.Module) -> str | None:
    """Why sums over examples would be coarser than the clip's margin; None if they are not."""
    for name, p in model.named_parameters():
        if p.dtype != torch.float32:
            return f"{name} is {str(p.dtype).removeprefix('torch.')}"
    return "float32 products are taken in TF32 or bfloat16" if rounds_products() else None


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

    def scaled(self) -> tuple[Products, Tensor]:
        """Factors of size at most 1, and what their products are to be multiplied by: float64 [B].

        Squares of small numbers, or of large ones, leave float32's range before the numbers do.
        """
        right, factor = _scaled(self.right)
        if not self.left.is_floating_point():
            return Products(self.left, right), factor
        left, other = _scaled(self.left)
        return Products(left, right), factor * other

    def scale(self) -> Tensor:
        """sum_t |left_t| |right_t| [B] float64: what the rounding of norm and sum goes by."""
        lengths = self.right.norm(dim=2, dtype=torch.float64)
        if self.left.is_floating_point():
            lengths = lengths * self.left.norm(dim=2, dtype=torch.float64)
        return lengths.sum(dim=1)

    def reach(self) -> Tensor:
        """Bound [B] float64 on what w left_t below 2^-126, rounded to 0, takes from the sum."""
        if not self.left.is_floating_point():
            return torch.zeros(len(self.right), dtype=torch.float64, device=self.right.device)
        lengths = self.right.norm(dim=2, dtype=torch.float64).sum(dim=1)
        return 2.0**-106 * math.sqrt(self.left.shape[2]) * lengths

    def squared_norm(self) -> Tensor:
        """||sum_t left_t right_t^T||_F^2 [B] float64 without that sum."""
        rights = self.right @ self.right.mT
        if self.left.is_floating_point():
            lefts = (self.left @ self.left.mT).double()
        else:
            lefts = (self.left.unsqueeze(2) == self.left.unsqueeze(1)).double()
        return (lefts * rights).sum(dim=(1, 2)).clamp(min=0)

    def add_weighted_(self, total: Tensor, weights: Tensor) -> None:
        """total += sum_i weights_i sum_t left_it right_it^T, `[n, m]`."""
        right = self.right.flatten(0, 1)
        if self.left.is_floating_point():
            left = (self.left * weights[:, None, None]).flatten(0, 1)
            total.addmm_(left.mT, right)
        else:
            scaled = (self.right * weights[:, None, None]).flatten(0, 1)
            total.index_add_(0, self.left.flatten(), scaled)

    def of(self, rows: Tensor | slice) -> Products:
        """Of some examples only."""
        return Products(self.left[rows], self.right[rows])

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


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, T, n]` over the largest number of each example; these [B] float64."""
    largest = rows.abs().amax(dim=(1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
    return rows / largest[:, None, None], largest.double()


def _is_small(weight: Tensor, uses: Sequence[Products]) -> bool:
    """Whether a weight's gradient takes less memory than its tables."""
    return weight.numel() < 2 * sum(u.right.shape[1] for u in uses) ** 2


def _squared_norms(joined: Sequence[Products]) -> tuple[Tensor, Tensor]:
    """||sum over the uses||_F^2 [B] float64 without the gradients, and the scale of its rounding."""
    scaled = [u.scaled() for u in joined]
    squares = _added(u.squared_norm() * f.square() for u, f in scaled)
    if len(scaled) == 2:
        (looked_up, f), (multiplied, g) = scaled
        squares = (squares + 2 * f * g * _inner_product(looked_up, multiplied)).clamp(min=0)
    lengths = _added(u.scale() for u in joined)
    return squares, lengths + VANISHING * _added(f for _, f in scaled)


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
            self.none = torch.zeros(size, dtype=torch.float64, device=device)
            self.measured: dict[nn.Parameter, tuple[Tensor, Tensor, Tensor]] = {}
            """Squared norm, scale and reach of each parameter, [B] float64."""
            self.totals: dict[nn.Parameter, Tensor] = {}
            """What was seen of the plain gradient, projected."""
            self.uses: dict[nn.Parameter, list[Products]] = {}
            self.samples: dict[nn.Parameter, Tensor] = {}
            """Per-example gradients `[B, *shape]` of small parameters."""

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
                self.measured.pop(weight, None)

        def _sample(self, p: nn.Parameter | None, samples: Tensor) -> None:
            if p is not None and p.requires_grad:
                self.samples[p] = self.samples[p] + samples if p in self.samples else samples
                self.measured.pop(p, None)

        def _finish(self, p: nn.Parameter) -> None:
            """Measures what was seen of a parameter; a small one's products are multiplied out."""
            uses = _joined(self.uses.pop(p, []))
            if uses and (p in self.samples or _is_small(p, uses)):
                for use in uses:
                    self._sample(p, use.dense(p))
                uses = []
            if uses:
                self.uses[p] = uses
                reach = _added(u.reach() for u in uses)
                self.measured[p] = (*_squared_norms(uses), reach)
                self.totals[p] = _added(u.total(p) for u in uses)
            else:
                self.measured[p] = (_dense_squares(self.samples[p]), self.none, self.none)
                self.totals[p] = _projected(self.samples[p].sum(0))

        def norms(self) -> tuple[Tensor, Tensor, Tensor]:
            """||g_i||, the scale S_i of its rounding, the reach: float64 [B], of all parameters.

            The scale is not finite where something that was seen is not.
            """
            for p in {**self.uses, **self.samples}:  # some outputs were not read
                if p not in self.measured:
                    self._finish(p)
            columns = zip((self.none,) * 3, *self.measured.values(), strict=True)
            squares, scales, reach = (torch.stack(column) for column in columns)
            return squares.sum(0).sqrt(), scales.norm(dim=0), reach.sum(0)

        def gradient(self, parameters: Sequence[nn.Parameter], i: int) -> list[Tensor | None]:
            """Example i's own gradient, multiplied out; None where nothing was seen."""
            return [self._gradient_of(p, i) for p in parameters]

        def _gradient_of(self, p: nn.Parameter, i: int) -> Tensor | None:
            if p in self.samples:
                return self.samples[p][i]
            uses = [u.of(slice(i, i + 1)).dense(p)[0] for u in self.uses.get(p, [])]
            return _added(uses) if uses else None

        def add_weighted_(
            self,
            totals: Sequence[Tensor],
            parameters: Sequence[nn.Parameter],
            kept: Tensor,
            weights: Tensor,
        ) -> None:
            """totals += sum_i weights_i g_i over the examples in `kept` [B] bool."""
            if not bool(kept.any()):
                return
            rows: Any = slice(None) if bool(kept.all()) else kept
            for total, p in zip(totals, parameters, strict=True):
                if p in self.samples:
                    found = self.samples[p][rows].flatten(1)
                    total.add_((weights[rows] @ found).view(total.shape))
                for use in self.uses.get(p, []):
                    use.of(rows).add_weighted_(total, weights[rows])

    return NormHooks


def _refuse_coarse(what: str) -> None:
    raise ValueError(
        f"{what}, and ghost clipping rounds sums over examples in that precision, which is coarser "
        "than the clip's margin: use per_example_gradients: dense, or float32 throughout."
    )


def _by_token(rows: Tensor) -> Tensor:
    """`[B, ..., h]` as `[B, T, h]`; T = 1 for `[B, h]`."""
    return rows.reshape(len(rows), -1, rows.shape[-1])
