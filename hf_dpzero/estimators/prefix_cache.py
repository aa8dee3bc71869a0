"""Runs the frozen prefix of a model once per batch.

A zeroth-order step evaluates the same batch 2K times. Whatever a forward pass computes before it
first touches a trainable parameter is the same in all of them, so its outputs are remembered: the
first pass runs the prefix, the others only the rest. Frozen modules are recognised by their
parameters and their place in the execution order, so any architecture works; adapters in the first
layer simply leave a short prefix.

What only other remembered modules read need not be kept: `learn` finds out, in one trial pass, which
outputs the rest of the model reads, and from then on only those take memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dpzero.estimators.flow import Flow
from hf_dpzero.estimators.module_patching import Forward, replaced_forward


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
        self._wanted: list[tuple[nn.Module, set[int]]] | None = None  # None: everything is kept
        self._flow: Flow | None = None
        self._cursor = 0
        self._forwards = 0
        self._recording = True
        self._tainted = self._inside = False
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
        handles = [m.register_forward_pre_hook(self._taint) for m in self._owners]
        handles.append(self.model.register_forward_pre_hook(self._begin, prepend=True))
        handles.append(self.model.register_forward_hook(self._end))
        with contextlib.ExitStack() as stack:
            for handle in handles:
                stack.callback(handle.remove)
            stack.callback(self.forget)
            for module in self._frozen:
                stack.enter_context(replaced_forward(module, self._wrapper(module)))
            yield self

    def learn(self, evaluate: Callable[[], object]) -> None:
        """Runs `evaluate`, one forward pass, and keeps from now on only what it needs of the prefix.

        An output is needed if code that is not remembered reads it, or something derived from it,
        once a trainable parameter was met. The others are replaced by NaN that takes no memory, so a
        pass that does read one shows it. A model that runs other modules in another pass keeps all.
        """
        self.keep_everything()
        self._flow = Flow(lambda: self._inside, lambda: self._tainted)
        try:
            with self.installed(), self._flow:
                self.begin_evaluation()
                evaluate()
                modules = [module for module, _, _ in self._outputs]
            needed = self._flow.needed
        finally:
            self._flow = None
        self._wanted = [
            (module, {leaf for place, leaf in needed if place == index})
            for index, module in enumerate(modules)
        ]

    @property
    def forgetful(self) -> bool:
        """Whether `learn` is in force."""
        return self._wanted is not None

    def keep_everything(self) -> None:
        """Undoes `learn`."""
        self._wanted = None

    @property
    def bytes_held(self) -> int:
        """Memory of what is remembered now."""
        leaves = pytree.tree_leaves([output for _, output, _ in self._outputs])
        storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._forwards += 1
        if self._forwards > 1:
            raise StalePrefix(
                "the objective runs the model more than once for a microbatch, so its passes cannot "
                "share a prefix; set reuse_frozen_prefix=False."
            )
        self._tainted, self._cursor = _owns_trainable(module), 0

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._recording = False
        self._tainted = True  # what is read from here on is read by the objective

    def _taint(self, module: nn.Module, args: Any) -> None:
        self._tainted = True

    def _wrapper(self, module: nn.Module) -> Callable[[Forward], Forward]:
        return lambda forward: self._remembering(module, forward)

    def _remembering(self, module: nn.Module, forward: Forward) -> Forward:
        def remembered(*args: Any, **kwargs: Any) -> Any:
            if self._tainted or self._inside:
                return forward(*args, **kwargs)
            if not self._recording:
                return self._recall(module)
            self._inside = True  # what runs inside belongs to this module's output
            try:
                output = forward(*args, **kwargs)
            finally:
                self._inside = False
            self._record(module, output)
            return output

        return remembered

    def _record(self, module: nn.Module, output: Any) -> None:
        index = len(self._outputs)
        if self._flow is not None:
            self._flow.remember(index, output)
        kept = output
        if self._as_learned(module, index):
            assert self._wanted is not None
            kept = _without_unwanted(output, self._wanted[index][1])
        self._outputs.append((module, kept, _versions(kept)))

    def _as_learned(self, module: nn.Module, index: int) -> bool:
        """Whether this pass has run, so far, the modules that `learn` saw."""
        if self._wanted is None or index >= len(self._wanted):
            return False
        return [*(m for m, _, _ in self._outputs), module] == [
            m for m, _ in self._wanted[: index + 1]
        ]

    def _recall(self, module: nn.Module) -> Any:
        known = self._cursor < len(self._outputs)
        owner, output, versions = self._outputs[self._cursor] if known else (None, None, [])
        self._cursor += 1
        if owner is not module or any(t._version != v for t, v in versions):
            raise StalePrefix(
                f"{type(module).__name__}: its output is changed in place, or modules run in "
                "another order each time; set reuse_frozen_prefix=False for this model."
            )
        return output


def _owns_trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _maximal_frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Modules with parameters, none trainable, whose parent has some trainable: outermost first."""
    found: list[nn.Module] = []
    for child in model.children():
        parameters = list(child.parameters())
        if parameters and not any(p.requires_grad for p in parameters) and _callable(child):
            found.append(child)
        else:
            found.extend(_maximal_frozen_modules(child))
    return list(dict.fromkeys(found))


def _callable(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _versions(output: Any) -> list[tuple[Tensor, int]]:
    """Every tensor in a nested output with its in-place version counter."""
    if isinstance(output, Tensor):
        return [] if output.is_inference() else [(output, output._version)]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [pair for part in output for pair in _versions(part)]
    return []


def _without_unwanted(output: Any, wanted: set[int]) -> Any:
    """The nested output with NaN that takes no memory for floating tensors not among `wanted`."""
    leaves, structure = pytree.tree_flatten(output)
    return structure.unflatten(
        [leaf if i in wanted else _stand_in(leaf) for i, leaf in enumerate(leaves)]
    )


def _stand_in(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.new_full((), torch.nan).expand(leaf.shape)
