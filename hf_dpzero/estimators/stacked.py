"""All perturbed copies of a few trainable tensors in one forward pass.

Where little trains (a head on stored features, small adapters), 2 K or K + 1 passes one after the
other cost their Python, not their arithmetic. Here the copies theta + lambda u_k, and theta - lambda u_k
or one of theta, are written into stacked tensors [copies, *shape] and `torch.func.vmap` runs the
objective once for all of them, on one batch that they share. Whatever does not depend on a copy, such as
a frozen encoder, is computed once. theta stays settled in its own storage.

A copy holds the very bits that `whole_model` would evaluate. Its losses are the same sums, which
batched kernels round in another order: they agree to float32 rounding, not to the bit.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_dpzero.estimators.forward_passes import ParameterChanged, ParameterGuard
from hf_dpzero.objectives.losses import PerExampleLoss, num_examples
from hf_dpzero.perturbation.directions import Direction
from hf_dpzero.perturbation.parameter_space import ParameterSpace, Stack

STACK_BYTES = 1 << 26
"""Copies held at a time: 64 MiB, at least those of one direction."""

WIDEST_FLOATS = 1 << 24
"""Elements of the largest intermediate result of all copies together (64 MiB in float32), at least
one copy's: more copies run one group after the other."""

# Arithmetic, not Python, is the cost of wider results, which one pass for all copies does not save.
AUTO_DIRECTIONS, AUTO_FLOATS = 4, 1 << 12
"""strategy="auto" stacks from 4 directions on, if no intermediate result that differs between copies
has more than 4096 elements an example."""

# vmap has no rule for the CPU's kernel of attention, and calls it once for each copy. The losses have
# the bits that one call with the copies as rows of its batch gives, and the passes take as long (a
# two-layer BERT of width 16 to 128: within 5 %).
HARMLESS = ".*batching rule for aten::_scaled_dot_product_flash_attention_for_cpu"
"""A warning of torch's that is not shown; of other kernels it is."""

Microbatch = Mapping[str, Tensor]
Evaluating = Callable[[], contextlib.AbstractContextManager[None]]
Copies = dict[str, Tensor]


class StackedCopies:
    """Evaluates an objective at theta +- lambda u_k for many k in one pass.

    Args:
      model: whose trainable parameters are replaced by copies while it runs.
      space: these parameters, in float32; settled whenever losses are asked for.
      objective: (model, inputs) -> per-example losses, checked to be float32 [B], in operations that
        vmap takes: no random numbers, no writes into what all copies share, no Python decision on a
        loss, logit or weight.
      forward: a copy for each direction and one of theta, instead of two for each direction.

    Attributes:
      floats_per_example: elements, for one copy and example, of the largest intermediate result that
        differed between copies, on the first microbatch that was seen; None before.

    Raises:
      ValueError: a trainable tensor is not float32, or is none of the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        space: ParameterSpace,
        objective: PerExampleLoss,
        forward: bool = False,
    ) -> None:
        for name, tensor in zip(space.names, space.tensors, strict=True):
            if tensor.dtype != torch.float32:
                raise ValueError(
                    f"strategy='stacked' with {name} in {tensor.dtype}: batched kernels round half "
                    "precision otherwise than single ones, which drowns the differences; use "
                    "'layerwise', or train in float32."
                )
        warnings.filterwarnings("ignore", HARMLESS, UserWarning)
        self.space, self.forward = space, forward
        self._evaluated = _Evaluated(model, objective)
        self._aliases = _aliases(self._evaluated, space)
        self._names = list(dict.fromkeys(self._aliases.values()))
        self._stack: Copies = {}
        self._memory: Stack | None = None
        self._guard = ParameterGuard([])
        self._standing: tuple[tuple[Direction, ...], float] | None = None
        self.floats_per_example: float | None = None
        self._floats_per_entry = 0.0

    @property
    def directions_at_once(self) -> int:
        """Number of directions whose copies are held at a time."""
        copies = STACK_BYTES // trained_bytes(self.space)
        return max(1, copies - 1 if self.forward else copies // 2)

    @contextlib.contextmanager
    def installed(self) -> Iterator[StackedCopies]:
        """Inside, theta stays as it is, so that copies are written once for all microbatches."""
        self._standing = None
        try:
            yield self
        finally:
            self._standing = None

    def losses(
        self,
        microbatches: Sequence[Microbatch],
        directions: Sequence[Direction],
        smoothing: float,
        evaluating: Evaluating = contextlib.nullcontext,
    ) -> tuple[Tensor, Tensor]:
        """Evaluates all examples at both ends of the differences along all directions.

        Args:
          microbatches: B examples in all, at least one.
          directions: u_1, ..., u_K, distinct.
          smoothing: lambda > 0.
          evaluating: entered around every forward pass.

        Returns:
          (f(theta + lambda u_k), f(theta - lambda u_k)), float32 [B, K] each on the CPU; `forward`:
          (f(theta + lambda u_k), f(theta)).

        Raises:
          ParameterChanged: the forward pass wrote to a parameter.
          RuntimeError: the objective does what vmap cannot.
        """
        parts, size = [], self.directions_at_once
        for start in range(0, len(directions), size):
            self._write(directions[start : start + size], smoothing)
            losses = torch.cat(
                [self._run(m, evaluating)[:, : num_examples(m)] for m in microbatches], dim=1
            )
            # theta's losses from the same kernels as the others': of its copy among them
            first = losses[: len(directions[start : start + size])]
            parts.append(torch.stack([first, losses[len(first) :].expand_as(first)]))
        first, second = torch.cat(parts, dim=1)
        return first.T.contiguous(), second.T.contiguous()

    def _write(self, directions: Sequence[Direction], smoothing: float) -> None:
        """The stack holds all theta + lambda u_k, then all theta - lambda u_k, or theta."""
        if self._standing == (tuple(directions), smoothing):
            return
        self._standing, copies = None, len(directions) + (1 if self.forward else len(directions))
        if self._memory is None or len(self._memory.tensors[0]) != copies:
            self._stack, self._memory = {}, None  # so that the old and the new never coexist
            self._memory = self.space.new_stack(copies)
            self._stack = dict(zip(self._names, self._memory.tensors, strict=True))
            self._guard = ParameterGuard(
                (name.removeprefix("model."), stacked) for name, stacked in self._stack.items()
            )
        self.space.write_stack_(directions, smoothing, self._memory, self.forward)
        self._standing = tuple(directions), smoothing

    def _run(self, microbatch: Microbatch, evaluating: Evaluating) -> Tensor:
        """Losses of one microbatch at every copy of the stack, float32 [copies, B] on the CPU."""
        if self.floats_per_example is None:  # a pass of two copies tells how wide their results are
            kernels = StackedKernels()
            rows = self._pass(0, 2, microbatch, evaluating, kernels).shape[1]
            self._floats_per_entry = kernels.widest / max(1, _entries(microbatch))
            self.floats_per_example = kernels.widest / max(1, rows)
        size, copies = self.copies_at_once(microbatch), len(self._stack[self._names[0]])
        starts = range(0, copies, size)
        return torch.cat([self._pass(i, i + size, microbatch, evaluating) for i in starts])

    def _pass(
        self,
        start: int,
        stop: int,
        microbatch: Microbatch,
        evaluating: Evaluating,
        kernels: StackedKernels | None = None,
    ) -> Tensor:
        """Losses at the stack's copies from `start` to `stop`, float32 [copies, B] on the CPU."""
        stack = {name: stacked[start:stop] for name, stacked in self._stack.items()}

        def one(copy: Copies) -> Tensor:
            given = {alias: copy[name] for alias, name in self._aliases.items()}
            left = dict(given)
            losses = functional_call(self._evaluated, left, (microbatch,), tie_weights=False)
            for name, tensor in given.items():
                if left.get(name) is not tensor:
                    raise ParameterChanged(
                        f"{name.removeprefix('model.')} was replaced during a forward pass: make "
                        "forward() leave its parameters alone (compute into new tensors)."
                    )
            return losses

        with evaluating(), self._guard.watching(), kernels or StackedKernels():
            return vmap(one)(stack).detach().cpu()

    def one_copy_a_pass(self) -> None:
        """Runs one copy at a time: for want of public rows that tell how wide results are."""
        self.floats_per_example = self._floats_per_entry = float("inf")

    def copies_at_once(self, microbatch: Microbatch) -> int:
        """How many copies run in one pass over a microbatch: widths grow with its entries."""
        floats = self._floats_per_entry * _entries(microbatch)
        return max(1, int(WIDEST_FLOATS // max(1.0, floats)))


class _Evaluated(nn.Module):
    """The objective as a module, so that its model's parameters can be given with each call."""

    def __init__(self, model: nn.Module, objective: PerExampleLoss) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, microbatch: Microbatch) -> Tensor:
        """Per-example losses [B]."""
        return self.objective(self.model, microbatch)


def _aliases(module: nn.Module, space: ParameterSpace) -> dict[str, str]:
    """Every name that `module` has for a tensor of the space -> its first name, in the space's order."""
    names: dict[int, list[str]] = {id(tensor): [] for tensor in space.tensors}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            names[id(parameter)].append(name)
    if not all(names.values()):
        raise ValueError("the space's tensors are not the model's parameters: build it from_model.")
    return {name: own[0] for own in names.values() for name in own}


def trained_bytes(space: ParameterSpace) -> int:
    """Returns the bytes of one copy of the trainable tensors."""
    return sum(t.nbytes for t in space.tensors)


def small_enough(space: ParameterSpace, num_directions: int, forward: bool) -> bool:
    """Whether "auto" may stack: K >= 4, float32 and a step's copies within `STACK_BYTES`."""
    copies = num_directions + (1 if forward else num_directions)
    wide = all(tensor.dtype == torch.float32 for tensor in space.tensors)
    fits = copies * trained_bytes(space) <= STACK_BYTES
    return wide and fits and num_directions >= AUTO_DIRECTIONS


def _entries(microbatch: Microbatch) -> int:
    """Numbers in all tensors of a microbatch."""
    return sum(value.numel() for value in microbatch.values() if isinstance(value, Tensor))


# ---------------------------------------------------------------- kernels

is_stacked = torch._C._functorch.is_batchedtensor
"""Whether a tensor, seen inside vmap, stands for one of the copies' own each."""


class StackedKernels(TorchFunctionMode):
    """Inside vmap, one kernel for all copies where torch's own rule for `F.linear` runs one for each.

    `F.linear` on an input that all copies share becomes one matrix product with the copies' weights
    side by side: the same sums, rounded in another order; no example meets another in them.

    Attributes:
      widest: elements, for each copy, of the largest tensor that differed between copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widest = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        run = _linear if func is F.linear else func
        result = run(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and is_stacked(result):
            self.widest = max(self.widest, result.numel())
        return result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_stacked(weight) and not is_stacked(input):
        return _SharedInput.apply(input, weight, bias)
    return F.linear(input, weight, bias)


class _SharedInput(torch.autograd.Function):
    """input [..., h], weight [L, h], bias [L] or None -> [..., L]; the input is every copy's."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        """Nothing is kept: there is no backward pass."""

    @staticmethod
    def vmap(
        info: object, in_dims: tuple[int, ...], input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        weights = weight.movedim(in_dims[1], 0)
        out = F.linear(input, weights.flatten(0, 1)).unflatten(-1, weights.shape[:2])
        if bias is not None:
            out = out + (bias if in_dims[2] is None else bias.movedim(in_dims[2], 0))
        return out, out.dim() - 2
