"""Both signs of a finite difference in one forward pass, on a batch that holds every row twice.

[x; x] goes through the model once; each module with parameters runs its first half at theta + a u
and its second half at theta - a u (in float32, u is generated once for both). Every such module,
frozen ones too, sees batches of the size that it would see alone, so that matrix products round
alike; what runs between them (attention, activations) sees both halves together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dpzero.estimators.layerwise import ModuleVisits, Owner, owners_of
from hf_dpzero.estimators.module_patching import Forward
from hf_dpzero.perturbation.directions import Direction


class NotPairable(RuntimeError):
    """A module's arguments or outputs cannot be told apart into the two halves of the batch."""


class PairedVisits(ModuleVisits):
    """`ModuleVisits` that run both halves of a doubled batch, each with its sign."""

    _pair: tuple[Direction, float, int] | None = None

    def _owners(self, model: nn.Module) -> list[Owner]:
        return owners_of(model, self.space)

    @contextlib.contextmanager
    def pair(self, direction: Direction, scale: float, rows: int) -> Iterator[None]:
        """Inside, batches are [x; x] with `rows` rows each, at theta + scale u and theta - scale u."""
        self._pair = direction, scale, rows
        try:
            yield
        finally:
            self._pair, self.position = None, ()

    def _run(self, owner: Owner, forward: Forward, args: Any, kwargs: Any) -> Any:
        if self._pair is None or self.position:  # inside one half there is one sign
            return super()._run(owner, forward, args, kwargs)
        rows = self._pair[2]
        first, second, divided = halves((args, kwargs), rows)
        if not divided and not owner.parameters:
            return forward(*args, **kwargs)
        run = self._in_two if owner.lookup is None and owner.parameters else self._one_by_one
        plus, minus = run(owner, forward, first, second)
        return joined(plus, minus, rows, divided)

    @contextlib.contextmanager
    def _at_sign(self, sign: float) -> Iterator[None]:
        assert self._pair is not None
        direction, scale, _ = self._pair
        self.position = ((direction, sign * scale),)
        try:
            yield
        finally:
            self.position = ()

    def _one_by_one(self, owner: Owner, forward: Forward, first: Any, second: Any) -> list[Any]:
        outputs = []
        for sign, (args, kwargs) in ((1.0, first), (-1.0, second)):
            with self._at_sign(sign):
                outputs.append(super()._run(owner, forward, args, kwargs))
        return outputs

    def _in_two(self, owner: Owner, forward: Forward, first: Any, second: Any) -> list[Any]:
        """As `_one_by_one`, with u generated once."""
        assert self._pair is not None
        direction, scale, _ = self._pair
        own, outputs = owner.parameters, []
        numbers = self.fresh(own)
        with self.scratch.like(own) as plus, self.scratch.like(own) as minus:
            for n in numbers:
                self.space.write_perturbed_pair_(n, direction, scale, plus[n], minus[n])
            for sign, copies, (args, kwargs) in ((1.0, plus, first), (-1.0, minus, second)):
                with self._at_sign(sign), self.pointed(own, numbers, copies):
                    outputs.append(forward(*args, **kwargs))
        return outputs


def halves(arguments: Any, rows: int) -> tuple[Any, Any, bool]:
    """Nested arguments of a doubled batch -> those of each half, and whether any was divided.

    Tensors whose leading dimension is a multiple of 2 * rows are divided there; those with leading
    dimension 1, numbers and objects go to both.

    Raises:
      NotPairable: a tensor with another leading dimension.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    parts = [_divided(leaf, rows) for leaf in leaves]
    first, second = ([part[i] for part in parts] for i in (0, 1))
    divided = any(part[0] is not leaf for part, leaf in zip(parts, leaves, strict=True))
    return structure.unflatten(first), structure.unflatten(second), divided


def _divided(leaf: Any, rows: int) -> tuple[Any, Any]:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] == 1:
        return leaf, leaf
    if leaf.shape[0] == 0 or leaf.shape[0] % (2 * rows):
        raise NotPairable(
            f"a module takes a tensor of shape {list(leaf.shape)}, which is not divided between the "
            f"two halves of {rows} rows; use strategy='layerwise'."
        )
    first, second = leaf.chunk(2)
    return first, second


def joined(first: Any, second: Any, rows: int, divided: bool) -> Any:
    """The nested outputs of both halves as those of the doubled batch.

    Raises:
      NotPairable: they differ in structure or in what is no tensor, or have no dimension to join at.
    """
    leaves, structure = pytree.tree_flatten(first)
    others, other_structure = pytree.tree_flatten(second)
    if structure != other_structure:
        raise NotPairable("a module's outputs for the two halves differ in structure.")
    return structure.unflatten(
        [_joined(a, b, rows, divided) for a, b in zip(leaves, others, strict=True)]
    )


def _joined(first: Any, second: Any, rows: int, divided: bool) -> Any:
    if not isinstance(first, Tensor):
        if first is not second and first != second:
            raise NotPairable(f"a module returns {first} for one half and {second} for the other.")
        return first
    if first.dim() == 0 or (first.shape[0] % rows if divided else first.shape[0] != 1):
        raise NotPairable(
            f"a module returns a tensor of shape {list(first.shape)} for {rows} rows."
        )
    if divided:
        return torch.cat([first, second])
    return torch.cat([part.expand(rows, *part.shape[1:]) for part in (first, second)])
