"""Between two steps nothing but the run writes to the trained weights.

What a callback makes of them that clips or averages weights, or steps an optimizer of its own, would be
saved under a report that speaks of the ledger's releases alone, which would no longer rebuild it.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import Tensor, nn

from hf_dpzero.estimators.forward_passes import ParameterGuard
from hf_dpzero.perturbation.sharding import is_sharded, local

WHOLE, SAMPLED = 1 << 22, 1 << 17
"""Trained elements up to which all values are compared; how many are beyond that, spread evenly."""

_BITS = {2: torch.int16, 4: torch.int32}


class WeightsBetweenSteps:
    """Remembers the trained tensors as the run left them, and refuses others.

    Compared are the parameters themselves, their addresses, version counters and values: `p.data.mul_()`
    moves neither of the first three. Not seen are writes through `.data` that spare the elements that
    are compared (see `WHOLE`), and those that were undone.

    Args:
      model: with the parameters that are trained; of those that are split (FSDP2) the parts here.
      watched: False compares nothing.
    """

    def __init__(self, model: nn.Module, watched: bool = True) -> None:
        self.model, self.watched = model, watched
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Parts of split parameters may be replaced between two steps, and are looked up each time.
        self._split = any(map(is_sharded, self._named.values()))
        self._guard = self._guard_of_parts()
        self._left: tuple[list[int], list[int]] | None = None
        self._addresses: list[int] = []
        self._changed = ""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        self._left = None  # an interrupted step leaves weights that were not noted

    def note(self) -> None:
        """Remembers what the run leaves."""
        if not self.watched:
            return
        if self._split:
            self._guard = self._guard_of_parts()
        self._left = self._guard.state()
        if self._addresses != self._left[1]:
            self._take_views(self._guard.tensors)
            self._addresses = self._left[1]
        for views, values, _ in self._groups:
            torch.cat(views, out=values)

    @contextlib.contextmanager
    def own_write(self) -> Iterator[None]:
        """Around what the run itself does to the weights, which are compared before it."""
        self.check()
        noted, self._left = self._left is not None, None
        yield
        if noted:
            self.note()

    def check(self) -> None:
        """Compares with what the run left; passes where nothing was noted.

        Raises:
          ValueError: names a parameter that something else wrote to; again at every later call.
        """
        if self._left is not None and not self._changed:
            self._changed = self._difference(self._left)
        if self._changed:
            raise ValueError(
                f"{self._changed} between two steps, by a callback or other code around training: the "
                "weights are no longer what the ledger's releases make of the base, may hold un-noised "
                "private data, and are not saved. Clip or average weights after training, on a copy "
                "(copy.deepcopy(model)), or in a run that is not private. Take that code out, load the "
                "model anew and train(resume_from_checkpoint=True): it goes on from the last "
                "checkpoint, or, by dpzero's and mezo's ledger, from the base."
            )

    def _guard_of_parts(self) -> ParameterGuard:
        parts = {name: local(p) if self._split else p for name, p in self._named.items()}
        return ParameterGuard((name, part) for name, part in parts.items() if part.numel())

    @torch.no_grad()
    def _take_views(self, tensors: list[Tensor]) -> None:
        """What is compared, as integers, by kind: (views, room for their values, room for new ones)."""
        total = sum(tensor.numel() for tensor in tensors)
        stride = 1 if total <= WHOLE else math.ceil(total / SAMPLED)
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            some = tensor.detach().as_strided((math.ceil(tensor.numel() / stride),), (stride,))
            # as integers a NaN equals itself, and -0.0 differs from 0.0
            kinds[tensor.device, tensor.dtype].append(some.view(_BITS[tensor.element_size()]))
        self._groups = [(views, torch.cat(views), torch.cat(views)) for views in kinds.values()]

    def _difference(self, left: tuple[list[int], list[int]]) -> str:
        # Gathered parameters may stand for split ones.
        for name, parameter in {} if self._split else self._named.items():
            try:
                replaced = attrgetter(name)(self.model) is not parameter
            except AttributeError:
                replaced = True
            if replaced:
                return f"{name} was replaced by another parameter"
        guard = self._guard_of_parts() if self._split else self._guard
        pairs = zip(guard.names, *left, *guard.state(), strict=True)
        for name, version, address, *new in pairs:
            if new[1] != address:
                return f"{name} was given other memory"
            if new[0] != version:
                return f"{name} was written to"
        # one comparison for each dtype and device, not each tensor: a GPU waits for each
        for views, values, room in self._groups:
            if not torch.equal(torch.cat(views, out=room), values):
                return "trained weights were written to through `.data`"
        return ""
