"""Per-example gradients, clipped and summed: what first-order private training releases.

g_i = grad f(theta; xi_i),   sum_i min(1, C / ||g_i||) g_i      (Abadi et al. 2016, DP-SGD)

What each layer's calls give an example comes from `ghost_clipping`. What cannot be attributed to
single examples is refused by name, never skipped: shapes alone do not tell `[T, B, h]` from
`[B, T, h]`, so `check_attribution` tries the layers on a few rows before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.ghost_clipping import (
    CANCELLED,
    SMALLEST,
    WAY_OUT,
    LayerRecord,
    owned,
    supported,
)
from hf_dpzero.objectives.losses import (
    PerExampleLoss,
    batch_size,
    check_differentiable,
    check_per_example,
    evaluation_mode,
    num_examples,
    single_pass,
)
from hf_dpzero.privacy.mechanisms.gradient import row_norms

Batch = Mapping[str, Tensor]
Weigh = Callable[[Tensor], Tensor]
"""Norms [b] float64 of a microbatch -> the weights of its examples [b]."""
DENSE_BYTES = 1 << 28
"""Per-example gradients of a microbatch that `auto` still holds."""


def per_example_gradients(
    model: nn.Module,
    objective: PerExampleLoss,
    how: str,
    microbatch_size: int,
    autocast: bool = False,
) -> PerExampleGradients:
    """Makes dense or ghost gradients of a model's trainable parameters.

    Args:
      model: see `PerExampleGradients`.
      objective: (model, inputs) -> per-example losses [B] float.
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
        raise ValueError(
            f"performance.per_example_gradients={how!r} is not one of auto, dense, ghost."
        )
    if how == "ghost" and autocast:
        _refuse_coarse("the run computes in half precision (autocast)")
    return kinds[how](model, objective)


class PerExampleGradients:
    """Weighted sums of dense gradients, held for one microbatch at a time: its size times d numbers.

    Args:
      model: run in eval mode (no dropout), with gradients. Not compiled.
      objective: (model, inputs) -> per-example losses [B] float.

    Attributes:
      parameters: the trainable parameters, tied ones once, in `named_parameters` order.

    Raises:
      ValueError: nothing is trainable, a layer with trainable parameters that no rule gives a
        per-example gradient of, or an objective that is not differentiable or not `single_pass`.
      ImportError: Opacus is needed and not installed.
    """

    ghost = False

    def __init__(self, model: nn.Module, objective: PerExampleLoss) -> None:
        self.model, self.objective = model, objective
        check_differentiable(objective)
        if not single_pass(objective):
            raise ValueError(
                "this objective runs the model on one example at a time, which per-example gradients of "
                "a batch cannot follow: use dpzero, or dp-sgd with clipping='averaged'."
            )
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not trained:
            raise ValueError("no parameter is trainable: set requires_grad or loosen `trainable`.")
        self.names = [name for name, _ in trained]
        self.parameters = [p for _, p in trained]
        owners = [(name, module) for name, module in model.named_modules() if owned(module)]
        covered = {id(p) for _, module in owners if supported(module) for p in owned(module)}
        for name, module in owners:
            if any(id(p) not in covered for p in owned(module)):
                raise ValueError(
                    f"{name or 'the model itself'} ({type(module).__name__}) owns trainable parameters "
                    "that have no per-example gradient, here or in Opacus: freeze them, or use dpzero, "
                    "which needs none."
                )

    def weighted_sum(
        self, microbatches: Sequence[Batch], weigh: Weigh
    ) -> tuple[list[Tensor], Tensor]:
        """Adds per-example gradients, weighted by their norms.

        Args:
          microbatches: differentiated one after the other; none gives zeros. Rows of a
            `PaddedMicrobatch` that are no examples count for nothing.
          weigh: norms [b] float64 of a microbatch -> w [b]. An example whose gradient is not finite
            counts as zero whatever its weight.

        Returns:
          (sum_i w_i g_i over all examples, float64, one tensor for each of `parameters`;
          their norms ||g_i||, float32 [B] on the CPU).
        """
        totals = [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]
        norms = [torch.zeros(0)]
        with evaluation_mode(self.model), torch.enable_grad():
            for part in microbatches:
                count = num_examples(part)
                found = self._add_weighted_(totals, part, weigh, count)
                norms.append(found[:count].float().cpu())
        return totals, torch.cat(norms)

    def check_attribution(self, batch: Batch, exact: bool = False) -> None:
        """Tries on a few rows whether what the rules give an example is that example's own gradient.

        What a layer sees must grow with the number of examples, and each example's gradient must
        have, parameter by parameter, the norm that plain autograd finds for the example alone (to
        1e-3; to 5e-2 in half precision or TF32). Nothing is kept.

        Args:
          batch: B >= 2 examples, better 3, padded together.
          exact: refuse layers that compute in half precision too, whose rounding of one example depends
            on the others in its microbatch.

        Raises:
          ValueError: a layer or parameter that does not pass, by its name; B < 2.
        """
        size = batch_size(batch)
        if size < 2:
            raise ValueError("attribution is tried on at least 2 examples: repeat one.")
        with evaluation_mode(self.model), torch.enable_grad():
            # Layers that are fed [T, B, h], look up [T] or [T, T] positions for all examples at once, or
            # mix examples do not pass what follows.
            record = self._differentiate(batch)[0]
            if exact and record.coarse:
                raise ValueError(
                    "a layer computes in half precision (torch.autocast in its forward?), where one "
                    "example's gradient is rounded by what stands beside it: set microbatch_size=1, or "
                    "compute in float32."
                )
            norms = [_norms(record.gradient(self.parameters, i)) for i in range(size)]
            seen, coarse = record.seen, bool(record.coarse) or rounds_products()
            del record  # with B times the model's size
            fewer = self._differentiate(_part(batch, 0, size - 1))[0].seen
            # every call of every layer must see rows in proportion to the number of examples
            for name in {**seen, **fewer}:
                many, few = seen.get(name, []), fewer.get(name, [])
                if [rows * (size - 1) for rows in many] != [rows * size for rows in few]:
                    raise ValueError(
                        f"{name}: what it sees does not grow with the examples. {WAY_OUT}"
                    )
            own, share = (5e-2, 5e-2) if coarse else (1e-3, 1e-5)
            for i in range(size):
                alone = _norms(self._alone(_part(batch, i, i + 1)))
                wrong = (norms[i] - alone).abs() > own * alone + share * alone.norm()
                if wrong.any():  # none where either is not finite
                    raise ValueError(
                        f"{self.names[int(wrong.nonzero()[0])]}: an example's gradient in a batch is "
                        f"not its gradient alone. {WAY_OUT}"
                    )

    def _alone(self, example: Batch) -> list[Tensor | None]:
        """The gradient of a microbatch of one, by plain autograd."""
        loss = check_per_example(self.objective(self.model, example), 1).sum()
        return list(torch.autograd.grad(loss, self.parameters, allow_unused=True))

    def _differentiate(self, part: Batch) -> tuple[LayerRecord, Tensor, Tensor]:
        """What the layers saw, which must be all that the loss depends on; its `measure`."""
        record = LayerRecord(batch_size(part), self.ghost)
        with record.recording(self.model):
            losses = check_per_example(self.objective(self.model, part), record.size)
        plain = torch.autograd.grad(losses.sum(), self.parameters, allow_unused=True)
        if self.ghost and record.coarse:
            _refuse_coarse(f"a {record.coarse} computes in half precision")
        with torch.no_grad():
            norms, scales = record.measure()
            sizes = norms + 1e-3 * scales
            # Gradients that all point one way add up their rounding: B numbers, in whatever order, to
            # within B u sum_i |g_i|. Both sums round, and those of half precision are float32's inside.
            lost = 2**-8 if record.coarse else record.size * 2**-23
            rounding = float(sizes.norm()) * (5e-2 if record.coarse else 1e-3)
            rounding += float(sizes.sum()) * lost
            for name, p, gradient in zip(self.names, self.parameters, plain, strict=True):
                if gradient is None:
                    continue  # not part of this loss
                if not record.complete(p):
                    raise ValueError(
                        f"{name} does not have one gradient for each example: it is used outside its "
                        "own layer's forward, for all examples at once, or its layer's output is "
                        "changed in place by the model (sound classifiers: that of the projector). "
                        f"{WAY_OUT}"
                    )
                if record.error(p, gradient) > rounding + 1e-12:  # never when one is not finite
                    raise ValueError(
                        f"{name}: the per-example gradients do not add up to the gradient of their "
                        f"loss: it is also used outside its own layer's forward. {WAY_OUT}"
                    )
        return record, norms, scales

    def _add_weighted_(
        self, totals: Sequence[Tensor], part: Batch, weigh: Weigh, count: int
    ) -> Tensor:
        """Adds the weighted gradients of the first rows, none that is not finite; all norms [b]."""
        record, norms, scales = self._differentiate(part)
        with torch.no_grad():
            weights = weigh(norms).to(norms)
            trusted = (scales <= CANCELLED * norms) & (weights * norms >= SMALLEST)
            trusted |= scales == 0  # nothing but gradients that were multiplied out
            finite = scales.isfinite()
            finite[count:] = False  # rows that fill the pass up are no examples
            for i in (finite & ~trusted).nonzero().flatten().tolist():
                norms[i] = _add_gradient_(totals, record.gradient(self.parameters, i), weigh)[0]
            kept = finite & trusted & norms.isfinite()
            record.add_weighted_(totals, self.parameters, kept, weights)
            return torch.where(finite, norms, torch.nan)


class GhostGradients(PerExampleGradients):
    """Weighted sums without per-example gradients of large weights (see `ghost_clipping`).

    Guarantee: with weights w_i <= C / ||g_i|| an example moves the sum by at most C, to within 2^-16 of
    it (see `ghost_clipping` on rounding).

    One forward and one backward pass. Memory: the plain gradient, the inputs and output gradients of
    every trained layer and, in turn, two `[B, T, T]` tables for each weight; one example's gradient
    where that is taken by itself. A microbatch of one is differentiated without any of it.

    Raises:
      ValueError: as for dense gradients; a parameter that is not float32, frozen ones included;
        TF32; at the first pass, a layer under autocast.
    """

    ghost = True

    def __init__(self, model: nn.Module, objective: PerExampleLoss) -> None:
        super().__init__(model, objective)
        if what := _coarse(model):
            _refuse_coarse(what)

    def _add_weighted_(
        self, totals: Sequence[Tensor], part: Batch, weigh: Weigh, count: int
    ) -> Tensor:
        if rounds_products():
            _refuse_coarse("float32 products are taken in TF32 or bfloat16")
        if batch_size(part) > 1:
            return super()._add_weighted_(totals, part, weigh, count)
        return _add_gradient_(totals, self._alone(part), weigh if count else torch.zeros_like)


@torch.no_grad()
def _add_gradient_(
    totals: Sequence[Tensor], gradient: Sequence[Tensor | None], weigh: Weigh
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


def _part(batch: Batch, start: int, stop: int) -> dict[str, Tensor]:
    return {name: value[start:stop] for name, value in batch.items()}


def _norms(gradient: Sequence[Tensor | None]) -> Tensor:
    """Norms [parameters] float64, on the CPU, of one example's gradient."""
    none = torch.zeros(1, dtype=torch.float64)
    return torch.cat([none if g is None else row_norms(g.reshape(1, -1)).cpu() for g in gradient])


def rounds_products() -> bool:
    """Whether float32 matrix products may be taken in TF32 or bfloat16 (errors of 2^-11 or more).

    >>> rounds_products()
    False
    """
    try:
        allowed = torch.backends.cuda.matmul.allow_tf32
        return allowed or torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # precision was set per backend, which these getters do not express
        return True


def _coarse(model: nn.Module) -> str | None:
    """Why sums over examples would be coarser than the clip's margin; None if they are not."""
    for name, p in model.named_parameters():
        if p.dtype != torch.float32:
            return f"{name} is {str(p.dtype).removeprefix('torch.')}"
    return "float32 products are taken in TF32 or bfloat16" if rounds_products() else None


def _refuse_coarse(what: str) -> None:
    raise ValueError(
        f"{what}, and ghost clipping rounds sums over examples in that precision, which is coarser "
        "than the clip's margin: use performance.per_example_gradients: dense, or float32 throughout."
    )
