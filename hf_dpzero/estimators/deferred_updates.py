"""Lets an update wait for the next step's first pass, and makes it before anyone reads the weights.

Between two steps the tensors may hold theta - lambda u of a step whose restore and update are still to
be made (`ParameterSpace.step_(defer=True)`): the next step makes them in the pass that perturbs, which
saves a pass over the parameters. Whoever else comes first settles them: the forward pass of any module,
`state_dict`, a copy or a pickle.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hf_dpzero.perturbation.parameter_space import ParameterSpace


class WeightReads:
    """While open, everyone but our own steps sees theta in the model's weights.

    A step runs inside `own_step`, unwatched. If it leaves an update waiting, one hook is set on the
    forward passes of all modules (torch's global one), so a part of the model that is called by itself
    is seen too. The hook settles the parameters once and is gone, or the next step takes it away:
    nothing is called inside a step. `state_dict`, `copy.deepcopy` and pickling settle by hooks on the
    modules. A read of a parameter as an attribute, without any of these, is not seen (`all_known`).

    Args:
      model: the model that is trained, not compiled.
      space: its trainable parameters; settled on exit, also after an exception.
      settle: called to settle them while open; None for the space's own.
    """

    def __init__(
        self, model: nn.Module, space: ParameterSpace, settle: Callable[[], None] | None = None
    ) -> None:
        self.model, self.space, self.settle = model, space, settle or space.settle_
        self._forward_hook: Any = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> WeightReads:
        for module in self.model.modules():
            if any(p.requires_grad for p in module.parameters()):
                self._undo.enter_context(self._settled_copies(module))
        self._watch()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.close()
        self._unwatch()
        self.space.settle_()

    @contextlib.contextmanager
    def own_step(self) -> Iterator[None]:
        """Around a training step, which knows where the parameters stand."""
        self._unwatch()
        try:
            yield
        finally:
            self._watch()

    def _watch(self) -> None:
        if not self.space.settled:
            self._forward_hook = register_module_forward_pre_hook(self._settle)

    def _unwatch(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _settle(self, *_: Any) -> None:
        self._unwatch()
        self.settle()

    @contextlib.contextmanager
    def _settled_copies(self, module: nn.Module) -> Iterator[None]:
        """State dicts, copies and pickles of the module hold theta, and no hook of ours."""
        hook = module.register_state_dict_pre_hook(self._settle)

        def state() -> Any:
            self._settle()
            del vars(module)["__getstate__"]
            try:
                own = getattr(module, "__getstate__", None)  # object has one from Python 3.11 on
                held = vars(module) if own is None else own()
            finally:
                vars(module)["__getstate__"] = state
            if not isinstance(held, dict):
                return held
            hooks = module._state_dict_pre_hooks.items()
            kept = OrderedDict((number, other) for number, other in hooks if number != hook.id)
            ordinary = {name: value for name, value in held.items() if name != "__getstate__"}
            return ordinary | {"_state_dict_pre_hooks": kept}

        vars(module)["__getstate__"] = state  # copy and pickle ask the instance
        try:
            yield
        finally:
            vars(module).pop("__getstate__", None)
            hook.remove()


def all_known(watchers: Iterable[Any]) -> bool:
    """True if every callback or trainer is Hugging Face's or ours: others may read the weights."""
    packages = {type(watcher).__module__.split(".")[0] for watcher in watchers}
    return packages <= {"transformers", "hf_dpzero"}
