"""Perturbs each module's own parameters while its forward runs, and only then.

theta stays settled in its own storage all the time. A module that owns trainable parameters gets
its `forward` wrapped: during the call its parameters' `.data` point to perturbed copies, afterwards
to theta again, so restoring is exact in every dtype by construction, and the extra memory is that of
the modules active at one moment. Embeddings copy only the rows that the call looks up.

A parameter that is read outside its owner's forward (`nn.MultiheadAttention` reads its out_proj's)
is not perturbed there; `poisoned` makes such a read show up as NaN, for the check at set-up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_dpzero.estimators.flow import METADATA
from hf_dpzero.estimators.module_patching import Forward, replaced_forward
from hf_dpzero.estimators.scratch import Scratch
from hf_dpzero.perturbation.parameter_space import ParameterSpace, Position

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Owner:
    """A module with the trainable parameters that its own forward is to see perturbed.

    Args:
      module: whose forward is wrapped.
      parameters: number in the space -> parameter; may be empty.
    """

    def __init__(self, module: nn.Module, parameters: dict[int, Tensor]) -> None:
        self.module, self.parameters = module, parameters
        weight = module.weight if isinstance(module, nn.Embedding) else None
        self.lookup = next((n for n, p in parameters.items() if p is weight), None)
        self.table = {n: p for n, p in parameters.items() if n == self.lookup}
        self.others = {n: p for n, p in parameters.items() if n != self.lookup}


class ModuleVisits:
    """Makes the forward passes of a model see theta + sum a_k u_k, one module at a time.

    Usage: `with visits.installed():` around forward passes, setting `visits.position` before each;
    () runs the model at theta. The space must be settled, and stay so inside the block.

    Args:
      model: whose forward is called.
      space: its trainable parameters.

    Raises:
      ValueError: an embedding renormalises its weight while it looks rows up.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace) -> None:
        self.space, self.scratch = space, Scratch()
        self.position: Position = ()
        self.visited: set[int] = set()
        self.owners = self._owners(model)
        self._standing: set[int] = set()  # numbers of the parameters that point to a copy now
        for owner in self.owners:
            _refuse_renormalising(owner)

    def _owners(self, model: nn.Module) -> list[Owner]:
        return [owner for owner in owners_of(model, self.space) if owner.parameters]

    @property
    def never_visited(self) -> list[str]:
        """Names of the parameters that no forward pass so far has seen perturbed."""
        return [name for n, name in enumerate(self.space.names) if n not in self.visited]

    @contextlib.contextmanager
    def installed(self) -> Iterator[ModuleVisits]:
        """Wraps the owners' forwards inside the block; afterwards they are as they were."""
        with contextlib.ExitStack() as stack:
            for owner in self.owners:
                stack.enter_context(replaced_forward(owner.module, self._wrapper(owner)))
            try:
                yield self
            finally:
                self.position = ()

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        """Inside, parameters are NaN outside their owners' forwards: no stray read goes unnoticed."""
        with poisoned_tensors(self.space.tensors):
            yield

    def _wrapper(self, owner: Owner) -> Callable[[Forward], Forward]:
        def wrap(forward: Forward) -> Forward:
            def visiting(*args: Any, **kwargs: Any) -> Any:
                return self._run(owner, forward, args, kwargs)

            return visiting

        return wrap

    def _run(self, owner: Owner, forward: Forward, args: Any, kwargs: Any) -> Any:
        """One call of the owner's forward at the present position."""
        if not self.position or not owner.parameters:
            return forward(*args, **kwargs)
        if owner.lookup is None:
            with self.copied(owner.parameters):
                return forward(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if owner.others:
                stack.enter_context(self.copied(owner.others))
            if owner.lookup not in self._standing:
                stack.enter_context(_RowLookup(self, owner, stack))
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def copied(self, parameters: dict[int, Tensor]) -> Iterator[None]:
        """The parameters are perturbed inside; those that an outer call has perturbed stay so."""
        with self.scratch.like(parameters) as copies:
            fresh = self.fresh(parameters)
            for number in fresh:
                self.space.write_perturbed_(number, self.position, copies[number])
            with self.pointed(parameters, fresh, copies):
                yield

    def fresh(self, parameters: dict[int, Tensor]) -> list[int]:
        """The numbers of those that no running call has perturbed yet; another copy would be equal."""
        return [number for number in parameters if number not in self._standing]

    @contextlib.contextmanager
    def pointed(
        self, parameters: dict[int, Tensor], numbers: Sequence[int], copies: dict[int, Tensor]
    ) -> Iterator[None]:
        """Inside, the parameters of these numbers have the storage of their copies."""
        homes = [(parameters[number], parameters[number].data) for number in numbers]
        self._standing.update(numbers)
        self.visited.update(numbers)
        try:
            for number in numbers:
                parameters[number].data = copies[number]
            torch.clear_autocast_cache()  # its casts of parameters know nothing of new storage
            yield
        finally:
            for parameter, home in homes:
                parameter.data = home
            self._standing.difference_update(numbers)
            torch.clear_autocast_cache()


class _RowLookup(TorchFunctionMode):
    """Serves an embedding's lookups from perturbed rows; any other use of its weight copies it.

    Args:
      visits: where it runs.
      owner: the embedding.
      stack: of the running call; a full copy, if one is needed, is taken off with it.
    """

    def __init__(self, visits: ModuleVisits, owner: Owner, stack: contextlib.ExitStack) -> None:
        super().__init__()
        assert owner.lookup is not None
        self.visits, self.stack, self.number = visits, stack, owner.lookup
        self.weight = owner.parameters[owner.lookup]
        self.table = owner.table
        self.copied = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.copied or func in METADATA or not _among(self.weight, (*args, *kwargs.values())):
            return func(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        self._copy()
        return func(*args, **kwargs)

    def _copy(self) -> None:
        self.stack.enter_context(self.visits.copied(self.table))
        self.copied = True

    def _embedding(self, ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if weight is not self.weight or not ids.numel():
            self._copy()
            return F.embedding(ids, weight, *args, **kwargs)
        rows, inverse = torch.unique(ids.long(), return_inverse=True)
        return F.embedding(inverse, self._perturbed(rows))

    def _perturbed(self, rows: Tensor) -> Tensor:
        """Those rows of the weight at the visits' position, [U, h]."""
        out = self.weight.new_empty(rows.numel(), self.weight.shape[1], requires_grad=False)
        space, position = self.visits.space, self.visits.position
        space.write_perturbed_rows_(self.number, rows, position, out)
        self.visits.visited.add(self.number)
        return out


def _among(weight: Tensor, values: Sequence[Any]) -> bool:
    return any(
        v is weight or (isinstance(v, (tuple, list)) and any(part is weight for part in v))
        for v in values
    )


@contextlib.contextmanager
def poisoned_tensors(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the tensors are NaN; their values come back on exit."""
    thetas = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = not_a_number(tensor)
        yield
    finally:
        for tensor, theta in zip(tensors, thetas, strict=True):
            tensor.data = theta


def not_a_number(tensor: Tensor) -> Tensor:
    """NaN in the tensor's shape, dtype and device; takes no memory."""
    return tensor.new_full((), torch.nan, requires_grad=False).expand(tensor.shape)


def owners_of(model: nn.Module, space: ParameterSpace) -> list[Owner]:
    """Every module that owns parameters, with those of the space among them, maybe none.

    What a container holds belongs to the module around it, for a container has no forward.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(space.tensors)}
    found: dict[nn.Module, list[Tensor]] = {}

    def collect(module: nn.Module, around: nn.Module) -> None:
        acting = around if isinstance(module, _CONTAINERS) else module
        if module in found:
            return  # it is used in two places
        found.setdefault(acting, []).extend(module.parameters(recurse=False))
        for child in module.children():
            collect(child, acting)

    collect(model, model)
    return [
        Owner(module, {numbers[id(p)]: p for p in own if id(p) in numbers})
        for module, own in found.items()
        if own
    ]


def _refuse_renormalising(owner: Owner) -> None:
    if owner.parameters and getattr(owner.module, "max_norm", None) is not None:
        raise ValueError(
            f"{type(owner.module).__name__} with max_norm={owner.module.max_norm} rewrites its own "
            "weight in forward: set max_norm=None, or freeze it."
        )
