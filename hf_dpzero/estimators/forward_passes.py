"""Around forward passes: nothing writes to the weights, everyone reads theta, frozen layers run once.

- `replaced_forward` and `ParameterGuard`: a module's own forward replaced for a while, and a check that
  it writes nothing. A pass that writes into the parameters would carry un-noised private data into the
  weights, and would leave the finite differences of something else than the model that is trained.
- `SettleBeforeRead`: lets an update wait for the next step's first pass (`ParameterSpace.step_` with
  `defer`), which saves a pass over the parameters, and makes it before anyone else reads the weights.
- `FrozenPrefix`: a zeroth-order step evaluates the same batch 2K times; whatever runs before a trainable
  parameter is first met is the same in all of them, so it runs once.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_dpzero.perturbation.parameter_space import ParameterSpace

P = ParamSpec("P")
R = TypeVar("R")

# Called through `map`: the cheapest way over ten thousand tensors.
_version: Callable[[Tensor], int] = operator.attrgetter("_version")
_address: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr


@contextlib.contextmanager
def replaced_forward(module: nn.Module, replacement: Callable[..., object]) -> Iterator[None]:
    """Inside, `module.forward(...)` is `replacement(the module's own forward, ...)`.

    An instance attribute that someone else had put there comes back after the block, whatever happens
    there; where there was none there is none.

    Args:
      module: any.
      replacement: called with the forward that it stands for, then with the call's arguments.
    """
    original = module.__dict__.get("forward")
    module.forward = functools.partial(replacement, module.forward)
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original


class ParameterChanged(RuntimeError):
    """A parameter was written to, or its storage was replaced, by code other than this package's."""


class ParameterGuard:
    """Notices writes to tensors between two moments by their version counters and addresses.

    About a millisecond for 10,000 tensors, whatever their size. Writes through `tensor.data` move
    neither and go unseen here; `digests.checksums` sees them.

    Args:
      named_tensors: (name, tensor); not inference tensors, which keep no version counter.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        named = dict(named_tensors)
        self.names, self.tensors = list(named), list(named.values())

    def state(self) -> tuple[list[int], list[int]]:
        """Returns version counter and address of every tensor."""
        return list(map(_version, self.tensors)), list(map(_address, self.tensors))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Checks on exit; an exception from inside comes through unchanged."""
        before = self.state()
        yield
        self.check(before)

    def check(self, before: tuple[list[int], list[int]]) -> None:
        """Compares with an earlier `state`.

        Raises:
          ParameterChanged: names the first tensor that was written to or replaced.
        """
        after = self.state()
        if after != before:
            pairs = zip(zip(*before, strict=True), zip(*after, strict=True), strict=True)
            name = next(n for n, (a, b) in zip(self.names, pairs, strict=True) if a != b)
            raise ParameterChanged(
                f"{name} was written to during a forward pass: that would put un-noised private data "
                "into the weights. Discard these weights; make forward() leave its parameters alone "
                "(compute into new tensors), or freeze and register what it must update as a buffer."
            )


class SettleBeforeRead:
    """While open, everyone but our own steps sees theta in the model's weights.

    A read of a parameter as an attribute, without a forward pass, `state_dict`, a copy or a pickle, is
    not seen (`all_known`).

    Args:
      model: the model that is trained, not compiled.
      space: its trainable parameters; settled on exit, also after an exception.
      settle: called to settle them while open; None for the space's own.
    """

    # A step runs inside `own_step`, unwatched. If it leaves an update waiting, one hook is set on the
    # forward passes of all modules (torch's global one), so that a part of the model which is called by
    # itself is seen too. Whoever asks first settles the parameters, and then nothing of ours is left on
    # the model: copies and pickles hold none of it. Between steps that nobody looks into, what stands
    # on the modules stays there: to take it off and put it back would cost each step a pass over them.

    def __init__(
        self, model: nn.Module, space: ParameterSpace, settle: Callable[[], None] | None = None
    ) -> None:
        self.model, self.space, self.settle = model, space, settle or space.settle_
        self._forward_hook: RemovableHandle | None = None
        self._replaced = contextlib.ExitStack()
        self._watched = False

    def __enter__(self) -> SettleBeforeRead:
        self._watch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._unwatch()
        self.space.settle_()

    @contextlib.contextmanager
    def own_step(self) -> Iterator[None]:
        """Around a training step, which knows where the parameters stand."""
        self._unhook()
        try:
            yield
        finally:
            self._watch()

    def _watch(self) -> None:
        if self.space.settled:
            return
        self._forward_hook = register_module_forward_pre_hook(self._settle)
        if self._watched:
            return
        self._watched = True
        for module in self.model.modules():
            if any(p.requires_grad for p in module.parameters()):
                for name in ("state_dict", "__getstate__"):  # copy and pickle ask the instance
                    self._replaced.enter_context(self._asking(module, name))

    @contextlib.contextmanager
    def _asking(self, module: nn.Module, name: str) -> Iterator[None]:
        """Inside, a method of the module's settles the parameters first."""
        before = vars(module).get(name)

        def settled(*args: object, **kwargs: object) -> object:
            self._settle()
            own = getattr(module, name, None)  # object has no __getstate__ before Python 3.11
            return vars(module) if own is None else own(*args, **kwargs)

        vars(module)[name] = settled
        try:
            yield
        finally:
            vars(module).pop(name, None)
            if before is not None:
                vars(module)[name] = before

    def _unhook(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _unwatch(self) -> None:
        self._unhook()
        self._replaced.close()
        self._watched = False

    def _settle(self, *_: object) -> None:
        self._unwatch()
        self.settle()


def all_known(watchers: Iterable[object]) -> bool:
    """Whether every callback or trainer is Hugging Face's or ours: others may read the weights."""
    packages = {type(watcher).__module__.split(".")[0] for watcher in watchers}
    return packages <= {"transformers", "hf_dpzero"}


class StalePrefix(RuntimeError):
    """A remembered output was changed in place by later code, so reuse would be wrong."""


class _Remembered(NamedTuple):
    """A module's output, and the output's tensors with their version counters as they ran."""

    module: nn.Module
    output: object
    versions: list[tuple[Tensor, int]]


class FrozenPrefix:
    """Remembers the outputs of frozen modules that run before any trainable parameter.

    Usage: `with prefix.installed(): ...` around the forward passes of a step; `prefix.forget()`
    before each new batch. Parameters may be perturbed meanwhile; frozen modules' may not.

    Args:
      model: trainable parameters are those with requires_grad.

    Attributes:
      worthwhile: whether there is any frozen module with parameters of its own to skip.
    """

    # Frozen modules are recognised by their parameters and their place in the execution order, so any
    # architecture works; adapters in the first layer simply leave a short prefix.

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._outputs: list[_Remembered] = []  # as they ran
        self._cursor = 0
        self._forwards = 0
        self._recording = True
        self._tainted = False  # a trainable parameter was met in the present pass
        self._inside = False  # a remembered module is running
        self._frozen = _maximal_frozen_modules(model)
        self._owners = [m for m in model.modules() if _owns_trainable(m)]
        self.worthwhile = bool(self._frozen)

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

    def _begin(self, module: nn.Module, args: tuple[object, ...]) -> None:
        self._forwards += 1
        if self._forwards > 1:
            raise StalePrefix(
                "the objective runs the model more than once for a microbatch, so its passes cannot "
                "share a prefix; set performance.reuse_frozen_prefix=False."
            )
        self._tainted, self._cursor = _owns_trainable(module), 0

    def _end(self, *_: object) -> None:
        self._recording = False
        self._tainted = True  # what runs from here on is run by the objective

    def _taint(self, *_: object) -> None:
        self._tainted = True

    def _remember(
        self, module: nn.Module, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        if self._tainted or self._inside:
            return forward(*args, **kwargs)
        if self._recording:
            self._inside = True  # what runs inside belongs to this module's output
            try:
                output = forward(*args, **kwargs)
            finally:
                self._inside = False
            self._outputs.append(_Remembered(module, output, _versions(output)))
            return output
        known = self._outputs[self._cursor] if self._cursor < len(self._outputs) else None
        self._cursor += 1
        if known is None or known.module is not module or _changed(known.versions):
            raise StalePrefix(
                f"{type(module).__name__}: its output is changed in place, or modules run in "
                "another order each time; set performance.reuse_frozen_prefix=False for this model."
            )
        return cast("R", known.output)


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


def _versions(output: object) -> list[tuple[Tensor, int]]:
    """Every tensor in a nested output with its in-place version counter."""
    if isinstance(output, Tensor):
        return [] if output.is_inference() else [(output, output._version)]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [pair for part in output for pair in _versions(part)]
    return []


def _changed(versions: Sequence[tuple[Tensor, int]]) -> bool:
    return any(tensor._version != version for tensor, version in versions)
