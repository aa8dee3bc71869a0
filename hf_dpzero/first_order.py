"""Per-example gradients, clipped and summed: what first-order private training releases.

g_i = grad f(theta; xi_i),   sum_i min(1, C / ||g_i||) g_i      (Abadi et al. 2016, DP-SGD)

The gradients of each layer come from Opacus' hooks. Three things that Hugging Face models do are put
right around them: positions looked up once for the whole batch, embeddings called with more than
their ids, and layers that see `[B * T, h]` rows instead of `[B, T, h]`. What cannot be attributed
to single examples is refused by name, never skipped.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_dpzero.estimator import batch_size, evaluation_mode
from hf_dpzero.forwards import Forward, replaced_forward
from hf_dpzero.gradient_mechanisms import clip_factors, row_norms
from hf_dpzero.objectives import PerExampleLoss, check_per_example

Batch = Mapping[str, Tensor]


class HookedGradients:
    """Weighted sums of per-example gradients: what keeping them (dense) and not (ghost) share.

    Args:
      model: run in eval mode (no dropout), with gradients. Not compiled.
      objective: (model, inputs) -> per-example losses [B] float.

    Attributes:
      parameters: the trainable parameters, tied ones once, in `named_parameters` order.

    Raises:
      ValueError: nothing is trainable, or a layer with trainable parameters that Opacus has no
        per-example gradient for.
      ImportError: Opacus is not installed.
    """

    def __init__(self, model: nn.Module, objective: PerExampleLoss) -> None:
        self.model, self.objective = model, objective
        self.names, self.parameters = _trainable(model)
        _refuse_unsupported(model)
        self._embeddings = [
            m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad
        ]

    def clipped_sum(
        self, batch: Batch, clip: float, microbatch_size: int | None = None
    ) -> list[Tensor]:
        """sum_i min(1, clip / ||g_i||_2) g_i over the examples, the norm over all parameters.

        Its L2 sensitivity to adding or removing an example is `clip`. An example whose gradient is
        not finite counts as zero. No `grad` is left on the parameters.

        Args:
          batch: tensors with leading dimension B; B = 0 gives zeros.
          clip: C > 0.
          microbatch_size: examples differentiated at a time; None for all of them.
        Returns:
          float32 tensors, one for each of `parameters`, of its shape.
        """
        if not 0.0 < clip < float("inf"):
            raise ValueError(f"clip={clip}: the bound on a gradient's norm must be positive.")
        weigh = functools.partial(clip_factors, clip=clip)
        return self.weighted_sum(split(batch, microbatch_size), weigh)[0]

    def weighted_sum(
        self, microbatches: Sequence[Batch], weigh: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """(sum_i w_i g_i over all examples, their norms ||g_i|| float32 [B] on the CPU).

        Args:
          microbatches: differentiated one after the other; none gives zeros.
          weigh: norms [b] float64 of a microbatch -> w [b]. An example whose gradient is not finite
            counts as zero whatever its weight.
        """
        totals = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        norms = [torch.zeros(0)]
        with self._hooked() as hooks:
            for part in microbatches:
                norms.append(self._add_weighted_(totals, hooks, part, weigh))
        return totals, torch.cat(norms)

    def _hooks_class(self) -> Any:
        raise NotImplementedError

    def _add_weighted_(
        self,
        totals: Sequence[Tensor],
        hooks: Any,
        part: Batch,
        weigh: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Adds the weighted gradients of a microbatch; its norms [b], on the CPU."""
        raise NotImplementedError

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
                    stack.enter_context(_watched(module, hooks))
                yield hooks
        finally:
            hooks.remove_hooks()
            _forget(self.model)

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

    @torch.no_grad()
    def _add_weighted_(
        self,
        totals: Sequence[Tensor],
        hooks: Any,
        part: Batch,
        weigh: Callable[[Tensor], Tensor],
    ) -> Tensor:
        with torch.enable_grad():
            self._differentiate(hooks, part)
        used = [n for n, p in enumerate(self.parameters) if p.grad is not None]
        samples = [_samples(self.parameters[n]).flatten(1) for n in used]
        device = self.parameters[0].device
        none = torch.zeros(hooks.size, dtype=torch.float64, device=device)
        norms = torch.stack([none, *map(row_norms, samples)]).norm(dim=0)
        weights = _finite_weights(norms, samples, weigh)
        for n, g in zip(used, samples, strict=True):
            clipped, plain = _sums(weights, g)
            totals[n].add_(clipped.view(totals[n].shape))
            check_total(self.names[n], self.parameters[n], plain, norms, hooks.coarse)
        forget_gradients(self.parameters)
        return norms.float().cpu()


def split(batch: Batch, size: int | None) -> list[dict[str, Tensor]]:
    """Microbatches of at most `size` examples; an empty batch gives none.

    >>> [p["x"].tolist() for p in split({"x": torch.arange(5)}, 2)]
    [[0, 1], [2, 3], [4]]
    """
    count = batch_size(batch)
    if size is not None and size < 1:
        raise ValueError(f"microbatch_size={size}: it must be at least 1.")
    step = size or max(count, 1)
    return [
        {name: value[start : start + step] for name, value in batch.items()}
        for start in range(0, count, step)
    ]


def _sums(weights: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """(sum_i w_i g_i, sum_i g_i) float32 [n] of `[B, n]`.

    Half precision is added up in float32 too: to round the sum would move it, as the examples come
    and go, by more than their clip.
    """
    if gradients.dtype == torch.float32:
        weighted, plain = torch.stack([weights, torch.ones_like(weights)]) @ gradients
        return weighted, plain
    weighted = torch.zeros_like(gradients[0], dtype=torch.float32)
    for weight, row in zip(weights.tolist(), gradients, strict=True):
        weighted.add_(row, alpha=weight)
    return weighted, gradients.sum(dim=0, dtype=torch.float32)


def _finite_weights(
    norms: Tensor, gradients: Sequence[Tensor], weigh: Callable[[Tensor], Tensor]
) -> Tensor:
    """weigh(norms) float32 [B]; gradients that are not finite become 0, and their weights too."""
    finite = norms.isfinite()
    if not bool(finite.all()):
        for g in gradients:
            g[~finite] = 0
    return torch.where(finite, weigh(norms).float(), 0.0)


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
    """
    assert parameter.grad is not None
    error = float(total.sub_(project(parameter.grad)).norm(dtype=torch.float32))
    tolerance = 5e-2 if coarse else 1e-3
    if error > tolerance * float(norms.norm()) + 1e-12:  # never when either is not finite
        raise ValueError(
            f"{name}: the per-example gradients do not add up to the gradient of their loss (off by "
            f"{error:.3g}): it is also used outside its own layer's forward. Freeze it."
        )


def _trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise ValueError("no parameter is trainable: set requires_grad or loosen `trainable`.")
    names, parameters = zip(*found, strict=True)
    return list(names), list(parameters)


def _owned(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.requires_grad]


def _supported(module: nn.Module) -> bool:
    """Whether Opacus has a rule for the layer's per-example gradients."""
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    return type(module) in hooks_class().GRAD_SAMPLERS and not list(module.buffers(recurse=False))


def _refuse_unsupported(model: nn.Module) -> None:
    """ValueError for a trainable parameter that no supported layer owns."""
    covered = {id(p) for m in model.modules() if _supported(m) for p in _owned(m)}
    for name, module in model.named_modules():
        if any(id(p) not in covered for p in _owned(module)):
            raise ValueError(
                f"{name or 'the model itself'} ({type(module).__name__}) owns trainable parameters "
                "that have no per-example gradient in Opacus: freeze them, or use dpzero, which "
                "needs none."
            )


def _samples(parameter: nn.Parameter) -> Any:
    """Opacus' per-example gradients `[B, ...]`; None where its hooks saw none."""
    return getattr(parameter, "grad_sample", None)


def check_complete(name: str, parameter: nn.Parameter, size: int) -> None:
    """A parameter that the loss depends on must have one gradient for each example."""
    sample, shape = _samples(parameter), [size, *parameter.shape]
    if parameter.grad is None:
        return  # not part of this loss
    if not isinstance(sample, Tensor) or list(sample.shape) != shape:
        found = list(sample.shape) if isinstance(sample, Tensor) else type(sample).__name__
        raise ValueError(
            f"{name} has per-example gradients of shape {found} where {shape} is needed: it is used "
            "outside its own layer's forward, or for all examples at once. Freeze it."
        )


def forget_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        p.grad, p.grad_sample = None, None  # type: ignore[attr-defined]


def _forget(model: nn.Module) -> None:
    """Takes off what Opacus leaves on parameters and layers."""
    for p in model.parameters():
        p.grad = None
        for name in ("grad_sample", "_forward_counter", "_current_grad_sample"):
            if hasattr(p, name):
                delattr(p, name)
    for module in model.modules():
        for name in ("activations", "max_batch_len"):
            module.__dict__.pop(name, None)


# ---------------------------------------------------------------- Opacus


@functools.lru_cache(maxsize=1)
def hooks_class() -> Any:
    """Opacus' hooks, for eval mode, flattened rows and subclasses of nn.Embedding."""
    try:
        from opacus.grad_sample.grad_sample_module import GradSampleHooks
    except ImportError:
        raise ImportError(
            "per-example gradients need opacus: pip install -c constraints.txt '.[first-order]'."
        ) from None

    class Hooks(GradSampleHooks):
        GRAD_SAMPLERS = {**GradSampleHooks.GRAD_SAMPLERS, nn.Embedding: _embedding_gradients}  # noqa: RUF012
        size, coarse = 0, False
        """Examples in the present microbatch; whether it met half precision."""

        def __init__(self, model: nn.Module, **settings: Any) -> None:
            self.ids: dict[nn.Module, list[Tensor]] = {}
            super().__init__(model, **settings)

        def begin(self, size: int) -> None:
            """Forgets the last microbatch, outputs that its loss did not read included."""
            self.size, self.coarse = size, False
            self.ids.clear()
            _forget(self._module)
            for p in self._module.parameters():
                if p.requires_grad:
                    p.grad_sample, p._forward_counter = None, 0

        def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
            return (m for m in module.modules() if _supported(m) and _owned(m))

        def _get_module_type(self, module: nn.Module) -> Any:
            return nn.Embedding if isinstance(module, nn.Embedding) else type(module)

        def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
            """Opacus records in training mode only; a recorded layer behaves alike in both."""
            seen = [self.ids[module].pop()] if isinstance(module, nn.Embedding) else inputs
            mode, module.training = module.training, True
            try:
                super().capture_activations_hook(module, self._rows(module, seen), output)
            finally:
                module.training = mode

        def rearrange_grad_samples(
            self, *, module: nn.Module, backprops: Tensor, **how: Any
        ) -> Any:
            (backprops,) = self._rows(module, [backprops])
            self.coarse |= backprops.element_size() < 4
            return super().rearrange_grad_samples(module=module, backprops=backprops, **how)

        def _rows(self, module: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
            return [_by_example(module, t, self.size) for t in tensors]

    return Hooks


def _by_example(module: nn.Module, tensor: Tensor, size: int) -> Tensor:
    """`[B, ...]` as it is; rows flattened to `[B * T, h]` as `[B, T, h]` again."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows == size:
        return tensor
    if rows % size or rows == 0:
        raise ValueError(
            f"a {type(module).__name__} sees {rows} rows in a batch of {size} examples, so its "
            "gradient cannot be attributed to single examples: freeze it."
        )
    return tensor.reshape(size, rows // size, *tensor.shape[1:])


# ---------------------------------------------------------------- embeddings


def _embedding_gradients(
    layer: nn.Embedding, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Opacus' rule, with the padding row left without a gradient as autograd leaves it."""
    from opacus.grad_sample.embedding import compute_embedding_grad_sample

    (ids,) = activations
    backprops = without_padding(layer, ids, backprops)
    found: dict[nn.Parameter, Tensor] = compute_embedding_grad_sample(layer, [ids], backprops)
    return found


def without_padding(layer: nn.Embedding, ids: Tensor, backprops: Tensor) -> Tensor:
    """Backprops `[B, ..., h]` with zeros where the padding row was looked up."""
    if layer.padding_idx is None:
        return backprops
    return backprops.masked_fill((ids == layer.padding_idx).unsqueeze(-1), 0.0)


def lookup_norms(weight: nn.Parameter, ids: Tensor, backprops: Tensor) -> Tensor:
    """Norms [B] of an embedding's gradients by Opacus' ghost rule, from ids `[B, T]`, `[B, T, h]`."""
    from opacus.grad_sample.embedding import compute_embedding_norm_sample

    layer: Any = SimpleNamespace(weight=weight)
    norms: Tensor = compute_embedding_norm_sample(layer, [ids], backprops)[weight]
    return norms


@contextlib.contextmanager
def _watched(module: nn.Embedding, hooks: Any) -> Iterator[None]:
    """Notes the ids that an embedding looks up; what it finds once for all is given to each."""

    def wrap(forward: Forward) -> Forward:
        def watched(*args: Any, **kwargs: Any) -> Tensor:
            with _Lookups(module.weight) as lookups:
                output = forward(*args, **kwargs)
            ids = _only_lookup(module, lookups.seen, output)
            if ids.shape[0] == 1 < hooks.size:
                ids, output = (t.expand(hooks.size, *t.shape[1:]) for t in (ids, output))
            hooks.ids.setdefault(module, []).append(ids)
            return output

        return watched

    with replaced_forward(module, wrap):
        yield


class _Lookups(TorchFunctionMode):
    """Notes (ids, rows) of every `F.embedding` of one weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.seen = weight, list[tuple[Tensor, Tensor]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.embedding:
            call = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
            if call["weight"] is self.weight:
                self.seen.append((call["input"], output))
        return output


def _only_lookup(
    module: nn.Module, seen: Sequence[tuple[Tensor, Tensor]], output: Tensor
) -> Tensor:
    """The ids of the one lookup whose rows are the layer's output, untouched."""
    if len(seen) != 1 or seen[0][1] is not output:
        raise ValueError(
            f"{type(module).__name__} does more than look up rows, so Opacus' rule for embeddings "
            "does not give its per-example gradient: freeze it."
        )
    return seen[0][0]
