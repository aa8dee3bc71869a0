"""Ghost clipping: norms of per-example gradients without the gradients, then one weighted sum.

(Li et al. 2022, arXiv:2110.05679.) The gradient of a weight that meets an example's tokens is a sum of
outer products, sum_t left_t right_t^T, and its norm needs none of them:

||sum_t left_t right_t^T||_F^2 = sum_{s,t} (left_s . left_t) (right_s . right_t)

A weight with fewer numbers than the two `[T, T]` tables takes its gradient instead, which is
smaller (mixed ghost clipping, Bu et al. 2022, arXiv:2205.10683); so do biases and norm layers. The
norm is that of all uses of a weight together: of a layer that runs twice, of a tied embedding (Opacus
has no ghost clipping of tied weights).

The sum is made of what was measured: the backward pass is not repeated with weighted losses, as Opacus
does, but its left_t and right_t are kept and multiplied once more, sum_i w_i sum_t left_it right_it^T
(book-keeping, Bu et al. 2023, arXiv:2210.00038). A second pass rounds differently: where huge terms
cancel on the way back it gives a gradient that nobody measured, and one example then moves the sum by
up to 14 clipping norms (`test_huge_tokens_that_cancel_move_the_sum_by_no_more_than_the_clip`).

*Rounding.* The norm rounds in proportion to S = sum_t |left_t| |right_t|, not to itself. With float32's
2^-24, a squared norm is off by no more than about 2^-23 S^2; while S <= 16 ||g|| that is 2^-16 of the
norm at the very worst. Where S is larger, the example's gradient is multiplied out by itself, and what
is added is w times that very array. Factors are divided by powers of two first, which is exact, so that
their squares do not leave float32's range. The weighted sum is taken in float64. Gradients that were
taken for their norms are added as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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
VANISHING = 2.0**-34
"""Counts as rounding, for scaled factors below 2: products whose squares leave float32's range."""
SMALLEST = 2.0**-80
"""Smallest w ||g|| for which weighted factors below float32's range do not matter."""


def per_example_gradients(
    model: nn.Module,
    objective: PerExampleLoss,
    how: str,
    microbatch_size: int,
    autocast: bool = False,
) -> HookedGradients:
    """Dense or ghost gradients of a model's trainable parameters.

    Args:
      model: see `HookedGradients`.
      objective: (model, inputs) -> per-example losses [B] float.
      how: "dense", "ghost", or "auto": dense while the float32 gradients of one microbatch take less
        than 256 MiB, for they need no tables, and in half precision or TF32; ghost otherwise.
      microbatch_size: examples differentiated at a time.
      autocast: whether the objective computes in half precision.

    Returns:
      `PerExampleGradients` or `GhostGradients`.

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

    Guarantee: with weights w_i <= C / ||g_i|| an example moves the sum by at most C, to within 2^-16 of
    it (see the module on rounding).

    One forward and one backward pass. Memory: the plain gradient, the inputs and output gradients of
    every trained layer and, in turn, two `[B, T, T]` tables for each weight; one example's gradient
    where that is taken by itself. A microbatch of one is differentiated without any of it.

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
        count: int,
    ) -> Tensor:
        if rounds_products():
            _refuse_coarse("float32 products are taken in TF32 or bfloat16")
        if batch_size(part) == 1:
            return _add_gradient_(totals, self._alone(hooks, part), weigh).float().cpu()
        self._differentiate(hooks, part)
        with torch.no_grad():
            norms, scales = hooks.norms()
            weights = weigh(norms).to(norms)
            trusted = (scales <= CANCELLED * norms) & (weights * norms >= SMALLEST)
            finite = scales.isfinite()
            finite[count:] = False
            for i in (finite & ~trusted).nonzero().flatten().tolist():
                norms[i] = _add_gradient_(totals, hooks.gradient(self.parameters, i), weigh)[0]
            kept = finite & trusted & norms.isfinite()
            hooks.add_weighted_(totals, self.parameters, kept, weights)
            return torch.where(finite, norms, torch.nan).float().cpu()

    def _differentiate(self, hooks: Any, part: Batch) -> None:
        """What the hooks saw of each parameter must be all that the loss depends on."""
        self._losses(hooks, part).sum().backward()
        norms, scales = hooks.norms()
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.grad is None:
                continue  # not part of this loss
            if p not in hooks.totals:
                check_complete(name, p, hooks.size)  # there is no gradient at all: it raises
            check_total(name, p, hooks.totals[p], norms + 1e-3 * scales, hooks.coarse, _projected)
        forget_gradients(self.parameters)

    def _norms_by_parameter(self, hooks: Any, part: Batch) -> Tensor:
        self._differentiate(hooks, part)
        gradients = (hooks.gradient(self.parameters, i) for i in range(hooks.size))
        return torch.stack([parameter_norms(g) for g in gradients], dim=1)


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
        weight = float(weigh(norm))
        for total, g in used:
            total.add_(g.view(total.shape), alpha=weight)
    return norm


def _coarse(model: nn.Module) -> str | None:
    """Why sums over examples would be coarser than the clip's margin; None if they are not."""
    for name, p in model.named_parameters():
        if p.dtype != torch.float32:
            return f"{name} is {str(p.dtype).removeprefix('torch.')}"
    return "float32 products are taken in TF32 or bfloat16" if rounds_products() else None


def _refuse_coarse(what: str) -> None:
    raise ValueError(
        f"{what}, and ghost clipping rounds sums over examples in that precision, which is coarser "
        "than the clip's margin: use per_example_gradients: dense, or float32 throughout."
    )


@dataclass(frozen=True)
class Products:
    """Uses of a weight `[n, m]`: its gradient is factor sum_t left_t right_t^T for each example.

    Attributes:
      left: float32 `[B, T, n]`, or ids `[B, T]` that stand for one-hot rows.
      right: float32 `[B, T, m]`.
      factor: float64 `[B]`; None for 1.
    """

    left: Tensor
    right: Tensor
    factor: Tensor | None = None

    @property
    def looked_up(self) -> bool:
        """Whether `left` holds ids."""
        return not self.left.is_floating_point()

    def scaled(self) -> Products:
        """The same product of factors below 2: exact, for they are divided by powers of two."""
        right, factor = _over_power_of_two(self.right)
        if self.looked_up:
            return Products(self.left, right, factor)
        left, other = _over_power_of_two(self.left)
        return Products(left, right, factor * other)

    def _factored(self, rows: Tensor) -> Tensor:
        """`[B, ...]` times the factor, in float32."""
        if self.factor is None:
            return rows
        return rows * self.factor.float().view(-1, *[1] * (rows.dim() - 1))

    def dense(self, weight: Tensor) -> Tensor:
        """The gradients themselves, `[B, n, m]`."""
        if not self.looked_up:
            return self._factored(self.left.mT @ self.right)
        gradient = self.right.new_zeros(len(self.right), *weight.shape)
        index = self.left.unsqueeze(-1).expand_as(self.right)
        return self._factored(gradient.scatter_add_(1, index, self.right))

    def of(self, i: int) -> Products:
        """Of example i alone."""
        factor = None if self.factor is None else self.factor[i : i + 1]
        return Products(self.left[i : i + 1], self.right[i : i + 1], factor)

    def scale(self) -> Tensor:
        """sum_t |left_t| |right_t| [B] float64, of scaled ones: the rounding goes by it."""
        assert self.factor is not None
        lengths = self.right.norm(dim=2, dtype=torch.float64)
        if not self.looked_up:
            lengths = lengths * self.left.norm(dim=2, dtype=torch.float64)
        return self.factor * (lengths.sum(dim=1) + VANISHING)

    def squared_norm(self) -> Tensor:
        """||sum_t left_t right_t^T||_F^2 [B] float64 of scaled ones, without that sum."""
        assert self.factor is not None
        rights = self.right @ self.right.mT
        if self.looked_up:
            lefts = (self.left.unsqueeze(2) == self.left.unsqueeze(1)).double()
        else:
            lefts = (self.left @ self.left.mT).double()
        return (lefts * rights).sum(dim=(1, 2)).clamp(min=0) * self.factor.square()

    def add_weighted_(self, total: Tensor, kept: Any, weights: Tensor) -> None:
        """total += sum_i w_i g_i.

        Args:
          total: float64 `[n, m]`.
          kept: bool [B] or a slice, the examples that are added.
          weights: float64 [B].
        """
        w = (weights if self.factor is None else weights * self.factor)[kept][:, None, None]
        left, right = self.left[kept], self.right[kept].double()
        if self.looked_up:
            total.index_add_(0, left.flatten(), (right * w).flatten(0, 1))
        else:
            total.addmm_((left * w).flatten(0, 1).mT, right.flatten(0, 1))

    def total(self, weight: Tensor) -> Tensor:
        """Their sum over the examples, projected: `[n]`."""
        lengths = self._factored(self.right @ _signs(self.right))
        if not self.looked_up:
            return torch.einsum("btn,bt->n", self.left, lengths)
        return lengths.new_zeros(len(weight)).index_add_(0, self.left.flatten(), lengths.flatten())


def _joined(uses: Sequence[Products]) -> list[Products]:
    """Scaled; uses of one kind are one use of more tokens. Those looked up come first."""
    kinds = [[u for u in uses if u.looked_up], [u for u in uses if not u.looked_up]]
    return [
        Products(
            torch.cat([u.left for u in kind], 1),
            torch.cat([u._factored(u.right) for u in kind], 1),
        ).scaled()
        for kind in kinds
        if kind
    ]


def _over_power_of_two(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, T, n]` over a power of two for each example, so that it is below 2; these [B] float64."""
    largest = rows.abs().amax(dim=(1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # its exponent alone
    return rows / power[:, None, None], power.double()


def _is_small(weight: Tensor, uses: Sequence[Products]) -> bool:
    """Whether a weight's gradient takes less memory than its tables."""
    return weight.numel() < 2 * sum(u.right.shape[1] for u in uses) ** 2


def _squared_norms(joined: Sequence[Products]) -> tuple[Tensor, Tensor]:
    """||sum over the uses||_F^2 [B] float64 without the gradients, and the scale of its rounding."""
    squares = functools.reduce(torch.add, [u.squared_norm() for u in joined])
    if len(joined) == 2:  # a tied weight: twice the inner product of its two gradients
        looked_up, multiplied = joined
        assert looked_up.factor is not None and multiplied.factor is not None
        rights = multiplied.right @ looked_up.right.mT
        tokens = looked_up.left.unsqueeze(1).expand_as(rights)
        inner = (multiplied.left.gather(2, tokens).double() * rights).sum(dim=(1, 2))
        squares = (squares + 2 * looked_up.factor * multiplied.factor * inner).clamp(min=0)
    return squares, functools.reduce(torch.add, [u.scale() for u in joined])


def _projected(gradient: Tensor) -> Tensor:
    """A matrix times a fixed vector of signs, `[n]`; a vector as it is.

    Over random signs, the mean square of its length is the square of the matrix' Frobenius norm.
    """
    return gradient @ _signs(gradient) if gradient.dim() == 2 else gradient.flatten()


def _signs(like: Tensor) -> Tensor:
    """Fixed +-1, as many as the last dimension of `like`; they only serve a check."""
    drawn = torch.randint(0, 2, like.shape[-1:], generator=torch.Generator().manual_seed(0))
    return drawn.to(like) * 2 - 1


@functools.lru_cache(maxsize=1)
def _norm_hooks_class() -> Any:
    """Hooks that turn what a layer sees into squared norms, and keep it for the sum."""

    class NormHooks(hooks_class()):  # type: ignore[misc]
        def begin(self, size: int) -> None:
            super().begin(size)
            device = next(self._module.parameters()).device
            self.none = torch.zeros(size, dtype=torch.float64, device=device)
            self.measured: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
            """Squared norm and scale of each parameter, [B] float64."""
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
            if uses and p not in self.samples and not _is_small(p, uses):
                self.uses[p] = uses
                self.measured[p] = _squared_norms(uses)
                self.totals[p] = functools.reduce(torch.add, [u.total(p) for u in uses])
                return
            for use in uses:
                self._sample(p, use.dense(p))
            samples = self.samples[p]
            self.measured[p] = (row_norms(samples.flatten(1)).square(), self.none)
            self.totals[p] = _projected(samples.sum(0))

        def norms(self) -> tuple[Tensor, Tensor]:
            """||g_i|| and the scale S_i of its rounding: float64 [B], of all parameters.

            The scale is not finite where something that was seen is not.
            """
            for p in {**self.uses, **self.samples}:  # some outputs were not read
                if p not in self.measured:
                    self._finish(p)
            columns = zip((self.none,) * 2, *self.measured.values(), strict=True)
            squares, scales = (torch.stack(column) for column in columns)
            return squares.sum(0).sqrt(), scales.norm(dim=0)

        def gradient(self, parameters: Sequence[nn.Parameter], i: int) -> list[Tensor | None]:
            """Example i's own gradient, multiplied out; None where nothing was seen."""
            gradients: list[Tensor | None] = []
            for p in parameters:
                uses = [use.of(i).dense(p)[0] for use in self.uses.get(p, [])]
                own = [self.samples[p][i]] if p in self.samples else uses
                gradients.append(functools.reduce(torch.add, own) if own else None)
            return gradients

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
                    samples = self.samples[p][rows].flatten(1)
                    total.add_((weights[rows] @ samples.double()).view(total.shape))
                for use in self.uses.get(p, []):
                    use.add_weighted_(total, rows, weights)

    return NormHooks


def _by_token(rows: Tensor) -> Tensor:
    """`[B, ..., h]` as `[B, T, h]`; T = 1 for `[B, h]`."""
    return rows.reshape(len(rows), -1, rows.shape[-1])
