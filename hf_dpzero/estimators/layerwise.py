"""Perturbs each module's own parameters (a layer's, on a GPU) while its forward runs, and only then.

theta stays settled in its own storage all the time. A module that owns trainable parameters gets
its `forward` wrapped: during the call its parameters' `.data` point to perturbed copies, afterwards
to theta again, so restoring is exact in every dtype by construction, and the extra memory is that of
the modules active at one moment. Embeddings copy only the rows that the call looks up.

Weights that live elsewhere and come for their module's forward (`offload`) are perturbed on arrival, in
the copy that came; of embeddings only the rows that the call looks up come at all.

A parameter that is read outside its owner's forward (`nn.MultiheadAttention` reads its out_proj's)
is not perturbed there; `choose_strategy` finds such reads.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_dpzero.estimators.forward_passes import P, R, replaced_forward
from hf_dpzero.estimators.offload import living_elsewhere, prefetched_of, prefetcher_of
from hf_dpzero.objectives.host import on_host, sent
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.parameter_space import Copies, ParameterSpace, Position

BLOCK = 2**30
"""Bytes of a layer's parameters that are perturbed together on a GPU, at most."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_GETTERS = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "_version")
_METHODS = ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_inference")
METADATA: frozenset[object] = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _GETTERS),
        *(getattr(Tensor, name) for name in (*_METHODS, "__len__", "__hash__")),
    )
)
"""Functions of a tensor that do not read its values."""
_ALIGNMENT = 256  # bytes; a copy is aligned as a fresh tensor is, so that kernels choose alike


class Owner:
    """A module with the trainable parameters that its own forward is to see perturbed.

    Args:
      module: whose forward is wrapped.
      parameters: number in the space -> parameter.
      arriving: ids of the parameters that come for a forward and are perturbed then.
    """

    def __init__(
        self, module: nn.Module, parameters: dict[int, Tensor], arriving: Set[int] = frozenset()
    ) -> None:
        self.module = module
        self.prefetched = (
            prefetched_of(module) if arriving & set(map(id, parameters.values())) else None
        )
        weight = module.weight if isinstance(module, nn.Embedding) else None
        self.lookup = next((n for n, p in parameters.items() if p is weight), None)
        here = {n: p for n, p in parameters.items() if id(p) not in arriving}
        served = here if self.prefetched is None else parameters
        self.table = {n: p for n, p in served.items() if n == self.lookup}
        self.others = {n: p for n, p in here.items() if n != self.lookup}


class ModuleVisits:
    """Makes the forward passes of a model see theta + sum a_k u_k, one module at a time.

    Usage: `with visits.installed():` around forward passes, setting `visits.position` before each;
    () runs the model at theta. The space must be settled, and stay so inside the block.

    Args:
      model: whose forward is called.
      space: its trainable parameters.

    Attributes:
      visited: numbers of the parameters that some forward pass has seen perturbed.
      arriving: id -> number of the parameters that come for their module's forward.

    Raises:
      ValueError: an embedding renormalises its weight while it looks rows up.
    """

    def __init__(self, model: nn.Module, space: ParameterSpace) -> None:
        self.space, self.scratch = space, Scratch()
        self.position: Position = ()
        self.visited: set[int] = set()
        self.prefetcher, elsewhere = prefetcher_of(model), living_elsewhere(model)
        self.arriving = {id(t): n for n, t in enumerate(space.tensors) if id(t) in elsewhere}
        self.owners = _owners(model, space, self.arriving.keys())
        self._standing: set[int] = set()  # numbers of the parameters that point to a copy now
        for module in (owner.module for owner in self.owners):
            if getattr(module, "max_norm", None) is not None:
                raise ValueError(
                    f"{type(module).__name__} with max_norm={module.max_norm} rewrites its own "
                    "weight in forward: set max_norm=None, or freeze it."
                )

    @contextlib.contextmanager
    def installed(self) -> Iterator[ModuleVisits]:
        """Wraps the owners' forwards inside the block; afterwards they are as they were."""
        with contextlib.ExitStack() as stack:
            if self.prefetcher is not None:
                stack.enter_context(self.prefetcher.ahead(self._home, self._perturb))
            for owner in self.owners:
                visit = functools.partial(self._visit, owner)
                stack.enter_context(replaced_forward(owner.module, visit))
            try:
                yield self
            finally:
                self.position = ()

    def _visit(self, owner: Owner, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """One call of the owner's forward at the present position."""
        with contextlib.ExitStack() as stack:
            if self.position and owner.others:
                stack.enter_context(self.copied(owner.others))
            if self.position and owner.table and owner.lookup not in self._standing:
                [table] = owner.table.values()
                there = None if owner.prefetched is None else owner.prefetched.prefetcher
                # A table that is here has been perturbed for an outer call; else rows of it will do.
                if there is None or not there.is_here(table):
                    if there is not None:
                        stack.enter_context(there.left_at_home(table))
                    stack.enter_context(_RowLookup(self, owner, stack))
            return forward(*args, **kwargs)

    def _home(self, tensor: Tensor) -> Tensor:
        """What is to come for a tensor: theta, whatever its parameter holds for the moment."""
        number = self.arriving.get(id(tensor)) if self.position else None
        return tensor.data if number is None else self.space.values(number)

    def _perturb(self, tensors: Sequence[Tensor]) -> None:
        """Perturbs those that train among tensors that have come."""
        for tensor in tensors if self.position else ():
            number = self.arriving.get(id(tensor))
            if number is not None:
                self.space.write_perturbed_(number, self.position, tensor.data, tensor.data)
                self.visited.add(number)

    @contextlib.contextmanager
    def copied(self, parameters: dict[int, Tensor]) -> Iterator[None]:
        """Inside, the parameters have the storage of their perturbed copies.

        Those that an outer call has perturbed stay so: another copy would be equal.
        """
        with self.scratch.like(parameters) as copies:
            numbers = [number for number in parameters if number not in self._standing]
            homes = [(parameters[number], parameters[number].data) for number in numbers]
            fresh = (
                copies if len(numbers) == len(copies) else Copies({n: copies[n] for n in numbers})
            )
            self.space.write_perturbed_each_(self.position, fresh)
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
        self.visits, self.stack, self.owner = visits, stack, owner
        [(self.number, self.weight)] = owner.table.items()
        self.copied = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        read = any(
            v is self.weight
            or (isinstance(v, (tuple, list)) and any(part is self.weight for part in v))
            for v in (*args, *kwargs.values())
        )
        if self.copied or func in METADATA or not read:
            return func(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        self._copy()
        return func(*args, **kwargs)

    def _copy(self) -> None:
        prefetched, table = self.owner.prefetched, self.owner.table
        copied = (
            self.visits.copied(table)
            if prefetched is None
            else prefetched.prefetcher.brought(prefetched, list(table.values()))
        )
        self.stack.enter_context(copied)
        self.copied = True

    def _embedding(self, ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if weight is not self.weight or not ids.numel():
            self._copy()
            return F.embedding(ids, weight, *args, **kwargs)
        if (
            ids.is_cuda and weight.is_cuda
        ):  # as many rows as ids, or the host would wait for a number
            rows, inverse = ids.reshape(-1).long(), torch.arange(ids.numel(), device=ids.device)
            inverse = inverse.view(ids.shape)
        else:
            rows, inverse = torch.unique(on_host(ids).long(), return_inverse=True)
            inverse = sent(inverse, ids.device)
        shape = rows.numel(), weight.shape[1]
        perturbed = weight.new_empty(shape, device=ids.device, requires_grad=False)
        space, position = self.visits.space, self.visits.position
        space.write_perturbed_rows_(self.number, rows, position, perturbed)
        self.visits.visited.add(self.number)
        if self.owner.prefetched is not None:
            self.owner.prefetched.prefetcher.bytes_in += perturbed.nbytes
        return F.embedding(inverse, perturbed)


class Scratch:
    """Memory for tensors like those of a set, valid while a block runs and then used again.

    Blocks nest: a level of nesting has one buffer for each device, as large as the largest set that
    has run at that level. Nothing is given back before the object goes.
    """

    def __init__(self) -> None:
        self._levels: dict[torch.device, list[_Level]] = {}
        self._depth: dict[torch.device, int] = {}

    @contextlib.contextmanager
    def like(self, tensors: Mapping[int, Tensor]) -> Iterator[Copies]:
        """Key -> uninitialised tensor with the shape and dtype of that one of `tensors`.

        Args:
          tensors: at least one, all on one device; the same mapping object gets the same views.
        """
        device = next(iter(tensors.values())).device
        depth, levels = self._depth.get(device, 0), self._levels.setdefault(device, [])
        known = levels[depth].views.get(id(tensors)) if depth < len(levels) else None
        if known is None:
            size = sum(map(_padded, tensors.values()))
            if depth >= len(levels) or size > levels[depth].buffer.numel():
                del levels[depth:]  # first, so that the old and the new buffer never coexist
                levels.append(_Level(torch.empty(size, dtype=torch.uint8, device=device), {}))
            views, start = Copies(), 0
            for key, tensor in tensors.items():
                part = levels[depth].buffer[start : start + tensor.nbytes]
                views[key] = part.view(tensor.dtype).view(tensor.shape)
                start += _padded(tensor)
            # the mapping is kept too, for the id of one that is gone may come again
            known = levels[depth].views[id(tensors)] = tensors, views
        self._depth[device] = depth + 1
        try:
            yield known[1]
        finally:
            self._depth[device] = depth


class _Level(NamedTuple):
    """One buffer, and its views for every set of tensors that has used it."""

    buffer: Tensor
    views: dict[int, tuple[Mapping[int, Tensor], Copies]]


def _padded(tensor: Tensor) -> int:
    """Bytes of a tensor, rounded up to the alignment."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _owners(model: nn.Module, space: ParameterSpace, arriving: Set[int]) -> list[Owner]:
    """Every module that owns parameters of the space, with these.

    What a container holds belongs to the module around it, for a container has no forward.
    """
    numbers = {id(tensor): number for number, tensor in enumerate(space.tensors)}
    owned: dict[nn.Module, list[Tensor]] = {}

    def collect(module: nn.Module, around: nn.Module) -> None:
        acting = around if isinstance(module, _CONTAINERS) else module
        if module in owned:
            return  # it is used in two places
        owned.setdefault(acting, []).extend(module.parameters(recurse=False))
        for child in module.children():
            collect(child, acting)

    collect(model, model)
    trained = {
        module: {numbers[id(p)]: p for p in own if id(p) in numbers}
        for module, own in owned.items()
    }
    _join_blocks(model, trained, arriving)
    return [Owner(module, own, arriving) for module, own in trained.items() if own]


def _join_blocks(
    model: nn.Module, trained: dict[nn.Module, dict[int, Tensor]], arriving: Set[int]
) -> None:
    """Gives each layer of a stack what its modules own, where one launch perturbs all of it.

    A launch takes some 30 microseconds of Python, as long as a GPU takes for several million parameters.
    Modules in two places, tables that rows are looked up in, and what is offloaded stay apart.
    """
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    for block in _layers(model):
        if isinstance(block, _CONTAINERS):
            continue  # it has no forward, in which its copies could stand
        inside = [
            module
            for module in block.modules()
            if trained.get(module)
            and not isinstance(module, nn.Embedding)
            and places[id(module)] == 1
        ]
        joined = {n: p for module in inside for n, p in trained[module].items()}
        reached = all(dispatch.together_on(p.device) for p in joined.values())
        small = sum(p.nbytes for p in joined.values()) <= BLOCK
        if joined and reached and small and not arriving & set(map(id, joined.values())):
            for module in inside:
                trained[module] = {}
            trained[block] = joined


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)
