"""Opacus' hooks for per-example gradients, made to fit Hugging Face's models.

Put right around them: eval mode, positions looked up once for the whole batch, embeddings called with
more than their ids, and layers that see `[B * T, h]` rows instead of `[B, T, h]`. The only module that
imports Opacus.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_dpzero.estimators.forward_passes import replaced_forward

WAY_OUT = "Freeze it, or use dpzero, which needs no gradients."


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def owned(module: nn.Module) -> list[nn.Parameter]:
    """The module's own trainable parameters."""
    return [p for p in module.parameters(recurse=False) if p.requires_grad]


def supported(module: nn.Module) -> bool:
    """Whether Opacus has a rule for the layer's per-example gradients."""
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    return type(module) in hooks_class().GRAD_SAMPLERS and not list(module.buffers(recurse=False))


def forget(model: nn.Module) -> None:
    """Takes off what Opacus leaves on parameters and layers."""
    for p in model.parameters():
        p.grad = None
        for name in ("grad_sample", "_forward_counter", "_current_grad_sample"):
            if hasattr(p, name):
                delattr(p, name)
    for module in model.modules():
        for name in ("activations", "max_batch_len"):
            module.__dict__.pop(name, None)


@functools.lru_cache(maxsize=1)
def hooks_class() -> Any:
    """Opacus' hooks, for eval mode, flattened rows and subclasses of nn.Embedding."""
    try:
        from opacus.grad_sample.grad_sample_module import GradSampleHooks
    except ImportError:
        raise ImportError(
            "per-example gradients need opacus, which is not installed; run "
            "pip install 'hf-dpzero[first-order]'"
        ) from None

    class Hooks(GradSampleHooks):
        GRAD_SAMPLERS = {**GradSampleHooks.GRAD_SAMPLERS, nn.Embedding: _embedding_gradients}  # noqa: RUF012
        size, coarse, looked_up = 0, False, 0
        """Examples in the microbatch; whether it met half precision; rows of its first lookup."""

        def __init__(self, model: nn.Module, **settings: Any) -> None:
            self.ids: dict[nn.Module, list[Tensor]] = {}
            self.rows: dict[nn.Module, list[int]] = {}
            """Leading dimensions of the recorded activations, of all calls whose turn is to come."""
            self.seen: dict[str, list[int]] = {}
            self.layer_names = {module: name for name, module in model.named_modules()}
            super().__init__(model, **settings)

        def begin(self, size: int) -> None:
            """Forgets the last microbatch, outputs that its loss did not read included."""
            self.size, self.coarse, self.looked_up = size, False, 0
            self.ids.clear()
            self.rows.clear()
            self.seen = {}
            forget(self._module)
            for p in self._module.parameters():
                if p.requires_grad:
                    p.grad_sample, p._forward_counter = None, 0

        def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
            return (m for m in module.modules() if supported(m) and owned(m))

        def _get_module_type(self, module: nn.Module) -> Any:
            return nn.Embedding if isinstance(module, nn.Embedding) else type(module)

        def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
            """Opacus records in training mode only; a recorded layer behaves alike in both."""
            seen = [self.ids[module].pop()] if isinstance(module, nn.Embedding) else inputs
            if not self.hooks_enabled:
                return
            if isinstance(module, CONVOLUTIONS):  # Opacus' rule reads their inputs' memory in order
                seen = [t.contiguous() for t in seen]
            recorded = len(getattr(module, "activations", ()))
            mode, module.training = module.training, True
            try:
                super().capture_activations_hook(module, self._by_example(module, seen), output)
            finally:
                module.training = mode
            if len(getattr(module, "activations", ())) > recorded:
                self.rows.setdefault(module, []).append(seen[0].shape[0])

        def rearrange_grad_samples(
            self, *, module: nn.Module, backprops: Tensor, **how: Any
        ) -> Any:
            if not self.rows.get(module) or self.rows[module].pop() != backprops.shape[0]:
                raise ValueError(f"{self._described(module)} {UNATTRIBUTED}")
            (backprops,) = self._by_example(module, [backprops])
            self.coarse |= backprops.element_size() < 4
            return super().rearrange_grad_samples(module=module, backprops=backprops, **how)

        def _by_example(self, module: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
            name = self._described(module)
            self.seen.setdefault(name, []).extend(t.shape[0] for t in tensors if t.dim())
            return [_by_example(name, t, self.size) for t in tensors]

        def _described(self, module: nn.Module) -> str:
            name = self.layer_names.get(module) or "the model itself"
            return f"{name} ({type(module).__name__})"

    return Hooks


UNATTRIBUTED = f"sees rows that cannot be attributed to single examples. {WAY_OUT}"


def _by_example(name: str, tensor: Tensor, size: int) -> Tensor:
    """`[B, ...]` as it is; rows flattened to `[B * T, h]` as `[B, T, h]` again."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows == size:
        return tensor
    if rows % size or rows == 0:
        raise ValueError(f"{name} {UNATTRIBUTED}")
    return tensor.reshape(size, rows // size, *tensor.shape[1:])


def _embedding_gradients(
    layer: nn.Embedding, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Opacus' rule, with the padding row left without a gradient as autograd leaves it."""
    from opacus.grad_sample.embedding import compute_embedding_grad_sample

    (ids,) = activations
    backprops = without_padding(layer, ids, backprops)
    samples: dict[nn.Parameter, Tensor] = compute_embedding_grad_sample(layer, [ids], backprops)
    return samples


def without_padding(layer: nn.Embedding, ids: Tensor, backprops: Tensor) -> Tensor:
    """Zeros where the padding row was looked up, as autograd leaves that row without a gradient.

    Args:
      layer: the embedding.
      ids: int64 [B, ...], what it looked up.
      backprops: [B, ..., h], gradients of its output.

    Returns:
      [B, ..., h].
    """
    if layer.padding_idx is None:
        return backprops
    return backprops.masked_fill((ids == layer.padding_idx).unsqueeze(-1), 0.0)


@contextlib.contextmanager
def ids_noted(module: nn.Embedding, hooks: Any) -> Iterator[None]:
    """Notes the ids that an embedding looks up; a row looked up once for all goes to each example.

    Args:
      module: its forward is wrapped inside.
      hooks: where the ids are noted, as `hooks.ids[module]`.

    Yields:
      Nothing.

    Raises:
      ValueError: inside, at a forward pass that does more than look up rows.
    """

    def noting(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with _Lookups(module.weight) as lookups:
            output = forward(*args, **kwargs)
        if len(lookups.seen) != 1 or lookups.seen[0][1] is not output:
            raise ValueError(
                f"{type(module).__name__} does more than look up rows, so Opacus' rule for embeddings "
                "does not give its per-example gradient: freeze it."
            )
        ids = lookups.seen[0][0]
        if ids.dim() > 1 and ids.shape[0] > 1:
            hooks.looked_up = hooks.looked_up or ids.shape[0]
        elif ids.dim() > 1 and hooks.size > 1:
            rows = hooks.looked_up or hooks.size  # C rows for each example where it has C choices
            ids, output = (t.expand(rows, *t.shape[1:]) for t in (ids, output))
        hooks.ids.setdefault(module, []).append(ids)
        return output

    with replaced_forward(module, noting):
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
