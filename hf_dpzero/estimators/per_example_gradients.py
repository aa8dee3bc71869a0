"""Per-example gradients, clipped and summed: what first-order private training releases.

g_i = grad f(theta; xi_i),   sum_i min(1, C / ||g_i||) g_i      (Abadi et al. 2016, DP-SGD)

The gradients of each layer come from Opacus' hooks (`opacus_hooks`). What cannot be attributed to
single examples is refused by name, never skipped: shapes alone do not tell `[T, B, h]` from
`[B, T, h]`, so `check_attribution` tries the layers on a few rows before the first step.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.opacus_hooks import (
    WAY_OUT,
    forget,
    hooks_class,
    ids_noted,
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
PIECE = 1 << 13
"""Coordinates of a microbatch's gradients that are held in float64 at a time."""
Seen = Mapping[str, Sequence[int]]
"""Leading dimensions of what a layer was given in each of its calls, by the layer's name."""


class HookedGradients(ABC):
    """Weighted sums of per-example gradients: what keeping them (dense) and not (ghost) share.

    Args:
      model: run in eval mode (no dropout), with gradients. Not compiled.
      objective: (model, inputs) -> per-example losses [B] float.

    Attributes:
      parameters: the trainable parameters, tied ones once, in `named_parameters` order.

    Raises:
      ValueError: nothing is trainable, a layer with trainable parameters that Opacus has no
        per-example gradient for, or an objective that is not differentiable or not `single_pass`.
      ImportError: Opacus is not installed.
    """

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
        _refuse_unsupported(model)
        self._embeddings = [
            m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad
        ]

    def weighted_sum(
        self, microbatches: Sequence[Batch], weigh: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Per-example gradients, weighted by their norms and added.

        Args:
          microbatches: differentiated one after the other; none gives zeros. Rows of a `Filled` one that
            are no examples count for nothing.
          weigh: norms [b] float64 of a microbatch -> w [b]. An example whose gradient is not finite
            counts as zero whatever its weight.

        Returns:
          (sum_i w_i g_i over all examples, float64, one tensor for each of `parameters`;
          their norms ||g_i||, float32 [B] on the CPU).
        """
        totals = [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]
        norms = [torch.zeros(0)]
        with self._hooked() as hooks:
            for part in microbatches:
                count = num_examples(part)
                norms.append(self._add_weighted_(totals, hooks, part, weigh, count)[:count])
        return totals, torch.cat(norms)

    def check_attribution(self, batch: Batch, exact: bool = False) -> None:
        """Tries the hooks on a few rows: is what they give an example that example's own gradient?

        What a layer sees must grow with the number of examples, and each example's gradient must
        have, parameter by parameter, the norm that plain autograd finds for the example alone (to
        1e-3; to 5e-2 in half precision or TF32). Layers that are fed `[T, B, h]`, look up `[T]` or
        `[T, T]` positions for all examples at once, or mix examples do not pass. Nothing is kept.

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
        with self._hooked() as hooks:
            norms = self._norms_by_parameter(hooks, batch)
            if exact and hooks.coarse:
                raise ValueError(
                    "a layer computes in half precision (torch.autocast in its forward?), where one "
                    "example's gradient is rounded by what stands beside it: set microbatch_size=1, or "
                    "compute in float32."
                )
            seen, coarse = dict(hooks.seen), hooks.coarse or rounds_products()
            self._norms_by_parameter(hooks, _part(batch, 0, size - 1))
            _check_scaling(seen, size, hooks.seen, size - 1)
            for i in range(size):
                alone = self._alone(hooks, _part(batch, i, i + 1))
                _check_own(self.names, norms[:, i], parameter_norms(alone), coarse)

    @abstractmethod
    def _norms_by_parameter(self, hooks: Any, part: Batch) -> Tensor:
        """Norms `[parameters, B]` float64, on the CPU, of what the hooks attribute to examples."""

    def _alone(self, hooks: Any, example: Batch) -> list[Tensor | None]:
        """The gradient of a microbatch of one, by plain autograd."""
        hooks.disable_hooks()
        try:
            loss = self._losses(hooks, example).sum()
            return list(torch.autograd.grad(loss, self.parameters, allow_unused=True))
        finally:
            hooks.enable_hooks()

    @abstractmethod
    def _hooks_class(self) -> Any:
        """The class of Opacus' hooks that gather what is needed."""

    @abstractmethod
    def _add_weighted_(
        self,
        totals: Sequence[Tensor],
        hooks: Any,
        part: Batch,
        weigh: Callable[[Tensor], Tensor],
        count: int,
    ) -> Tensor:
        """Adds the weighted gradients of the first rows, none that is not finite; all norms [b]."""

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[Any]:
        """Opacus' hooks and the embeddings' wrappers inside; all gone on exit."""
        hooks = self._hooks_class()(self.model, loss_reduction="sum")
        try:
            with contextlib.ExitStack() as stack, torch.enable_grad():
                stack.enter_context(evaluation_mode(self.model))
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="Full backward hook is firing when")
                for module in self._embeddings:
                    stack.enter_context(ids_noted(module, hooks))
                yield hooks
        except RuntimeError as error:
            if "BackwardHookFunction" not in str(error):
                raise
            raise ValueError(
                "the model changes the output of a trained layer in place (sound classifiers: that of "
                f"the projector), which Opacus' hooks do not allow. {WAY_OUT}"
            ) from error
        finally:
            hooks.remove_hooks()
            forget(self.model)

    def _losses(self, hooks: Any, part: Batch) -> Tensor:
        """Losses [b] of a microbatch, watched by hooks that know of no other."""
        hooks.begin(batch_size(part))
        return check_per_example(self.objective(self.model, part), hooks.size)


class PerExampleGradients(HookedGradients):
    """Dense gradients, held for one physical microbatch at a time: its size times d numbers."""

    def _hooks_class(self) -> Any:
        return hooks_class()

    def per_example(self, batch: Batch) -> list[Tensor | None]:
        """g_i of every example of one microbatch, unclipped: `[B, *shape]` for each parameter.

        None for a parameter that the loss does not depend on. B times the model's size in memory.
        """
        with self._hooked() as hooks:
            self._differentiate(hooks, batch)
            return [p.grad_sample if p.grad is not None else None for p in self.parameters]  # type: ignore[attr-defined]

    def _differentiate(self, hooks: Any, part: Batch) -> None:
        self._losses(hooks, part).sum().backward()
        for name, p in zip(self.names, self.parameters, strict=True):
            check_complete(name, p, hooks.size)

    def _norms_by_parameter(self, hooks: Any, part: Batch) -> Tensor:
        self._differentiate(hooks, part)
        none = torch.zeros(hooks.size, dtype=torch.float64)
        norms = [
            none if p.grad is None else row_norms(_samples(p).flatten(1)).cpu()
            for p in self.parameters
        ]
        forget_gradients(self.parameters)
        return torch.stack(norms)

    @torch.no_grad()
    def _add_weighted_(
        self,
        totals: Sequence[Tensor],
        hooks: Any,
        part: Batch,
        weigh: Callable[[Tensor], Tensor],
        count: int,
    ) -> Tensor:
        with torch.enable_grad():
            self._differentiate(hooks, part)
        used = [n for n, p in enumerate(self.parameters) if p.grad is not None]
        samples = [_samples(self.parameters[n]).flatten(1) for n in used]
        device = self.parameters[0].device
        none = torch.zeros(hooks.size, dtype=torch.float64, device=device)
        norms = torch.stack([none, *map(row_norms, samples)]).norm(dim=0)
        finite = norms.isfinite()
        if not bool(finite.all()):
            for g in samples:
                g[~finite] = 0
        weights = torch.where(finite, weigh(norms).float(), 0.0)
        weights[count:] = 0.0
        for n, g in zip(used, samples, strict=True):
            plain = _add_sums_(totals[n].view(-1), weights, g)
            check_total(self.names[n], self.parameters[n], plain, norms, hooks.coarse)
        forget_gradients(self.parameters)
        return norms.float().cpu()


def _part(batch: Batch, start: int, stop: int) -> dict[str, Tensor]:
    return {name: value[start:stop] for name, value in batch.items()}


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


def _add_sums_(total: Tensor, weights: Tensor, gradients: Tensor) -> Tensor:
    """total += sum_i w_i g_i, float64 [n], of gradients [B, n]; returns sum_i g_i, float32.

    In float64, whatever the gradients' dtype and however products are rounded: to round the sum would
    move it, as the examples come and go, by more than their clip.
    """
    both = torch.stack([weights.double(), torch.ones_like(weights, dtype=torch.float64)])
    plain = torch.empty_like(total, dtype=torch.float32)
    for piece, into, whole in zip(
        gradients.split(PIECE, dim=1), total.split(PIECE), plain.split(PIECE), strict=True
    ):
        weighted, added = both @ piece.double()
        into.add_(weighted)
        whole.copy_(added)
    return plain


def check_total(
    name: str,
    parameter: nn.Parameter,
    total: Tensor,
    norms: Tensor,
    coarse: bool,
    project: Callable[[Tensor], Tensor] = Tensor.flatten,
) -> None:
    """The examples' gradients must add up to the gradient of the summed loss; overwrites `total`.

    Args:
      total: their sum, through `project`, a linear map that keeps the length of most matrices.
      norms: ||g_i||, the scale of what rounding may do.
      coarse: whether some layer computed in half precision.

    Raises:
      ValueError: they do not; names the parameter.
    """
    assert parameter.grad is not None
    error = float(total.sub_(project(parameter.grad)).norm())
    tolerance = 5e-2 if coarse else 1e-3
    if error > tolerance * float(norms.norm()) + 1e-12:  # never when either is not finite
        raise ValueError(
            f"{name}: the per-example gradients do not add up to the gradient of their loss: it is "
            f"also used outside its own layer's forward. {WAY_OUT}"
        )


def parameter_norms(gradient: Sequence[Tensor | None]) -> Tensor:
    """Norms [parameters] float64, on the CPU, of one example's gradient."""
    none = torch.zeros(1, dtype=torch.float64)
    return torch.cat([none if g is None else row_norms(g.reshape(1, -1)).cpu() for g in gradient])


def _check_scaling(more: Seen, many: int, less: Seen, few: int) -> None:
    """Every call of every layer must see rows in proportion to the number of examples."""
    for name in [*more, *(name for name in less if name not in more)]:
        first, second = more.get(name, []), less.get(name, [])
        alike = len(first) == len(second)
        if not alike or any(a * few != b * many for a, b in zip(first, second, strict=True)):
            raise ValueError(f"{name}: what it sees does not grow with the examples. {WAY_OUT}")


def _check_own(names: Sequence[str], batched: Tensor, alone: Tensor, coarse: bool) -> None:
    """Norms [parameters] of an example in a batch must be those of the example alone."""
    own, share = (5e-2, 5e-2) if coarse else (1e-3, 1e-5)
    wrong = (batched - alone).abs() > own * alone + share * alone.norm()
    for n in wrong.nonzero().flatten().tolist():  # none where either is not finite
        raise ValueError(
            f"{names[n]}: an example's gradient in a batch is not its gradient alone. {WAY_OUT}"
        )


def _refuse_unsupported(model: nn.Module) -> None:
    """ValueError for a trainable parameter that no supported layer owns."""
    covered = {id(p) for m in model.modules() if supported(m) for p in owned(m)}
    for name, module in model.named_modules():
        if any(id(p) not in covered for p in owned(module)):
            raise ValueError(
                f"{name or 'the model itself'} ({type(module).__name__}) owns trainable parameters "
                "that have no per-example gradient in Opacus: freeze them, or use dpzero, which "
                "needs none."
            )


def _samples(parameter: nn.Parameter) -> Any:
    """Opacus' per-example gradients `[B, ...]`; None where its hooks saw none."""
    return getattr(parameter, "grad_sample", None)


def check_complete(name: str, parameter: nn.Parameter, size: int) -> None:
    """A parameter that the loss depends on must have one gradient for each example.

    Args:
      name: of the parameter.
      parameter: with what Opacus' hooks left on it.
      size: B.

    Raises:
      ValueError: it has not.
    """
    sample, shape = _samples(parameter), [size, *parameter.shape]
    if parameter.grad is None:
        return  # not part of this loss
    if not isinstance(sample, Tensor) or list(sample.shape) != shape:
        raise ValueError(
            f"{name} does not have one gradient for each example: it is used outside its own layer's "
            f"forward, or for all examples at once. {WAY_OUT}"
        )


def forget_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Takes the plain and the per-example gradients off the parameters."""
    for p in parameters:
        p.grad, p.grad_sample = None, None  # type: ignore[attr-defined]
