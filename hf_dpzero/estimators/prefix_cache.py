"""Runs the frozen prefix of a model once per batch.

A zeroth-order step evaluates the same batch 2K times. Whatever a forward pass computes before it
first touches a trainable parameter is the same in all of them, so its outputs are remembered: the
first pass runs the prefix, the others only the rest. Frozen modules are recognised by their
parameters and their place in the execution order, so any architecture works; adapters in the first
layer simply leave a short prefix.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from hf_dpzero.estimators.forward_passes import replaced_forward


class StalePrefix(RuntimeError):
    """A remembered output was changed in place by later code, so reuse would be wrong."""


class FrozenPrefix:
    """Remembers the outputs of frozen modules that run before any trainable parameter.

    Usage: `with prefix.installed(): ...` around the forward passes of a step; `prefix.forget()`
    before each new batch. Parameters may be perturbed meanwhile; frozen modules' may not.

    Args:
      model: trainable parameters are those with requires_grad.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._outputs: list[tuple[nn.Module, Any, list[tuple[Tensor, int]]]] = []
        """(module, its output, the output's tensors with their version counters), as they ran."""
        self._cursor = 0
        self._forwards = 0
        self._recording = True
        self._tainted = False  # a trainable parameter was met in the present pass
        self._inside = False  # a remembered module is running
        self._frozen = _maximal_frozen_modules(model)
        self._owners = [m for m in model.modules() if _owns_trainable(m)]

    @property
    def worthwhile(self) -> bool:
        """Whether there is any frozen module with parameters of its own to skip."""
        return bool(self._frozen)

    def begin_evaluation(self) -> None:
        """Called before each evaluation of the objective, which may run the model once."""
        self._forwards = 0

    def forget(self) -> None:
        """Drops what is remembered: the next pass is on another batch."""
        self._outputs.clear()
        self._recording = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[FrozenPrefix]:
        """Watches the model's forward passes inside the block."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.forget)
            for owner in self._owners:
                stack.callback(owner.register_forward_pre_hook(self._taint).remove)
            begin = self.model.register_forward_pre_hook(self._begin, prepend=True)
            stack.callback(begin.remove)
            stack.callback(self.model.register_forward_hook(self._end).remove)
            for module in self._frozen:
                remember = functools.partial(self._remember, module)
                stack.enter_context(replaced_forward(module, remember))
            yield self

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._forwards += 1
        if self._forwards > 1:
            raise StalePrefix(
                "the objective runs the model more than once for a microbatch, so its passes cannot "
                "share a prefix; set performance.reuse_frozen_prefix=False."
            )
        self._tainted, self._cursor = _owns_trainable(module), 0

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._recording = False
        self._tainted = True  # what runs from here on is run by the objective

    def _taint(self, module: nn.Module, args: Any) -> None:
        self._tainted = True

    def _remember(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._tainted or self._inside:
            return forward(*args, **kwargs)
        if not self._recording:
            return self._recall(module)
        self._inside = True  # what runs inside belongs to this module's output
        try:
            output = forward(*args, **kwargs)
        finally:
            self._inside = False
        self._outputs.append((module, output, _versions(output)))
        return output

    def _recall(self, module: nn.Module) -> Any:
        known = self._cursor < len(self._outputs)
        owner, output, versions = self._outputs[self._cursor] if known else (None, None, [])
        self._cursor += 1
        if owner is not module or any(t._version != v for t, v in versions):
            raise StalePrefix(
                f"{type(module).__name__}: its output is changed in place, or modules run in "
                "another order each time; set performance.reuse_frozen_prefix=False for this model."
            )
        return output


def _owns_trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _maximal_frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Modules with parameters, none trainable, whose parent has some trainable: outermost first."""
    frozen: list[nn.Module] = []
    for child in model.children():
        parameters = list(child.parameters())
        callable_ = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if parameters and callable_ and not any(p.requires_grad for p in parameters):
            frozen.append(child)
        else:
            frozen.extend(_maximal_frozen_modules(child))
    return list(dict.fromkeys(frozen))


def _versions(output: Any) -> list[tuple[Tensor, int]]:
    """Every tensor in a nested output with its in-place version counter."""
    if isinstance(output, Tensor):
        return [] if output.is_inference() else [(output, output._version)]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [pair for part in output for pair in _versions(part)]
    return []
