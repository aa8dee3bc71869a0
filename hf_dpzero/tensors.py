"""One trainable tensor: how it is perturbed, restored and updated, exactly, in its precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dpzero import lattice
from hf_dpzero.directions import DirectionStream

CHUNK = 1 << 19  # coordinates worked on at a time: 2 MiB of float32
_SLACK = 1.0 - 2.0**-10  # of a grid's range: room for the rounding of perturbations


class Change(NamedTuple):
    """One direction's share of a pass: its coefficient goes old -> new, theta gains `update`."""

    stream: DirectionStream
    old: float
    new: float
    update: float


class TrainableTensor:
    """What the two kinds below share.

    Args:
      tensor: contiguous.
      number: its place among the space's tensors.
      offset: of its first coordinate in the direction's index space.
    """

    def __init__(self, tensor: Tensor, number: int, offset: int) -> None:
        self.tensor, self.number, self.offset = tensor, number, offset
        self.exponent: int | None = None
        self.bound = 0.0

    @property
    def flat(self) -> Tensor:
        """The tensor as one row."""
        return flat_view(self.tensor)


class LatticeTensor(TrainableTensor):
    """A float32 tensor on its grid: changes are added to it, exactly.

    `bound` is an upper bound on its magnitude computed from public numbers alone; when the next
    update could pass the grid's range, the tensor is measured and, if need be, moved to a coarser
    grid. Both depend only on theta and the updates, so a replay does the same at the same step.
    """

    def snap_(self, reach: float) -> None:
        self.bound = lattice.largest_magnitude(self.flat)
        self.exponent = lattice.exponent_for(self.bound + reach)
        lattice.snap_(self.flat, self.spacing)
        self.bound += self.spacing

    def load_(self, exponent: int, bound: float) -> None:
        self.exponent, self.bound = exponent, bound
        if not self._fits():
            raise ValueError(
                "holds values that are not on the grid of the saved state: load the very weights that "
                "were saved with it, in float32."
            )

    def _fits(self) -> bool:
        parts = self.flat.split(CHUNK)
        on_grid = (torch.equal(lattice.snap_(part.clone(), self.spacing), part) for part in parts)
        return all(on_grid) and lattice.largest_magnitude(self.flat) <= self.bound

    @property
    def spacing(self) -> float:
        assert self.exponent is not None, "snap_() comes before the first perturbation"
        return lattice.quantum(self.exponent)

    def is_short(self, growth: float, reach: float, roundings: int) -> bool:
        """Whether |theta| could pass the grid's range after growing and on a perturbation."""
        assert self.exponent is not None
        grown = self.bound + growth + roundings * self.spacing
        return grown + reach > lattice.capacity(self.exponent) * _SLACK

    def make_room_(self, growth: float, reach: float, roundings: int) -> None:
        """Ensures that theta, settled now, may grow and be perturbed within the grid's range.

        Args:
          growth: sum of the |c_k u_k[i]| that the update may add to a coordinate.
          reach: what perturbations may add beyond that, at any moment.
          roundings: terms of the update, each of which may round by up to one grid step.
        """
        if self.is_short(growth, reach, roundings):
            self._regrid_(growth, reach)
        self.bound += growth + roundings * self.spacing

    def _regrid_(self, growth: float, reach: float) -> None:
        assert self.exponent is not None
        self.bound = lattice.largest_magnitude(self.flat)
        needed = lattice.exponent_for(self.bound + growth + reach)
        if needed > self.exponent:
            self.exponent = needed
            lattice.snap_(self.flat, self.spacing)
            self.bound += self.spacing

    def apply_(self, changes: Sequence[Change], workspace: Tensor) -> None:
        flat = self.flat
        for start in range(0, flat.numel(), CHUNK):
            values = flat[start : start + CHUNK]
            for change in changes:
                self._add_(values, self.offset + start, change, workspace)

    def _add_(self, values: Tensor, start: int, change: Change, workspace: Tensor) -> None:
        if change.stream.distribution == "rademacher":
            self._add_signs_(values, start, change, workspace)
        else:
            self._add_normals_(values, start, change)

    def _add_signs_(self, values: Tensor, start: int, change: Change, workspace: Tensor) -> None:
        """All of a coordinate's change is +-amount: one pass, whatever it is made of."""
        snap = lattice.snap_scalar
        amount = snap(change.new, self.spacing) - snap(change.old, self.spacing)
        amount += self._rounded_coefficient(change)
        if amount:
            padded = workspace[: -(-values.numel() // 8) * 8]
            change.stream.signs_times_(padded, start, amount)
            values.add_(padded[: values.numel()])

    def _rounded_coefficient(self, change: Change) -> float:
        """c in c u, u = +-1, on the grid; a small one stochastically, so that E[update] = c u.

        One rounding serves the tensor: as unbiased for a coordinate as one of its own, and free.
        """
        if not lattice.needs_stochastic_rounding(change.update, self.spacing):
            return lattice.snap_scalar(change.update, self.spacing)
        uniform = change.stream.tensor_uniform(self.number)
        return lattice.snap_scalar_stochastically(change.update, self.spacing, uniform)

    def _add_normals_(self, values: Tensor, start: int, change: Change) -> None:
        raw = change.stream.raw(start, values.numel(), values.device)
        for coefficient, times in _distinct(change.new, change.old):
            step = raw * (coefficient * change.stream.scale)
            values.add_(lattice.snap_(step, self.spacing), alpha=times)
        if change.update:
            step = raw.mul_(change.update * change.stream.scale)
            values.add_(self._rounded_update(change, step, start))

    def _rounded_update(self, change: Change, step: Tensor, start: int) -> Tensor:
        """`step` (float32, destroyed) on the grid; stochastically where it is small."""
        if not lattice.needs_stochastic_rounding(change.update, self.spacing):
            return lattice.snap_(step, self.spacing)
        uniforms = change.stream.uniforms(start, step.numel(), step.device)
        return lattice.snap_stochastically_(step, self.spacing, uniforms)

    def add_dense_(self, start: int, values: Tensor, uniforms: Tensor, reach: float) -> None:
        self.make_room_(lattice.largest_magnitude(values), reach, 1)
        step = lattice.snap_stochastically_(values, self.spacing, uniforms)
        self.flat[start : start + values.numel()].add_(step)

    def decay_(self, decay: float, stream: DirectionStream) -> None:
        """theta <- (1 - decay) theta, rounded stochastically: nearest would lose decays < 2^-24."""
        flat = self.flat
        for start in range(0, flat.numel(), CHUNK):
            values = flat[start : start + CHUNK]
            uniforms = stream.decay_uniforms(self.offset + start, values.numel(), values.device)
            values.add_(lattice.snap_stochastically_(values * -decay, self.spacing, uniforms))


def _distinct(new: float, old: float) -> list[tuple[float, int]]:
    """(coefficient, times) whose sum is new - old; rounding is odd, so -a costs no second pass.

    >>> _distinct(-0.5, 0.5), _distinct(0.5, 0.0), _distinct(0.5, 0.5)
    ([(-0.5, 2)], [(0.5, 1)], [])
    """
    if new == -old:
        return [(new, 2)] if new else []
    return [] if new == old else [(a, times) for a, times in ((new, 1), (old, -1)) if a]


class SnapshotTensor(TrainableTensor):
    """A bfloat16 tensor: its settled values are kept beside it (one more copy of this tensor).

    The bfloat16 grid is too coarse to perturb on, so theta + sum a_k u_k is computed in float32
    from the settled values and rounded; restoring copies them back. Updates are rounded
    stochastically with public uniforms, so that small ones are not lost on average.
    """

    def __init__(self, tensor: Tensor, number: int, offset: int) -> None:
        super().__init__(tensor, number, offset)
        self.settled = self.flat.clone()

    def snap_(self, reach: float) -> None:
        self.load_(0, 0.0)

    def load_(self, exponent: int, bound: float) -> None:
        self.exponent, self.bound = exponent, bound
        self.settled.copy_(self.flat)

    def is_short(self, growth: float, reach: float, roundings: int) -> bool:
        """Never: bfloat16 has float32's range."""
        return False

    def make_room_(self, growth: float, reach: float, roundings: int) -> None:
        """Nothing to do: bfloat16 has float32's range."""

    def apply_(self, changes: Sequence[Change], workspace: Tensor) -> None:
        flat = self.flat
        for start in range(0, flat.numel(), CHUNK):
            settled = self.settled[start : start + CHUNK]
            self._update_(settled, self.offset + start, changes)
            moved = settled.float()
            for change in changes:
                if change.new:
                    moved += self._term(change, change.new, self.offset + start, settled)
            flat[start : start + CHUNK].copy_(moved)

    @staticmethod
    def _term(change: Change, coefficient: float, start: int, like: Tensor) -> Tensor:
        raw = change.stream.raw(start, like.numel(), like.device)
        return raw * (coefficient * change.stream.scale)

    def _update_(self, settled: Tensor, start: int, changes: Sequence[Change]) -> None:
        updates = [change for change in changes if change.update]
        if not updates:
            return
        target = settled.float()
        for change in updates:
            target += self._term(change, change.update, start, settled)
        uniforms = updates[0].stream.uniforms(start, settled.numel(), settled.device)
        settled.copy_(round_to_bfloat16_stochastically(target, uniforms))

    def add_dense_(self, start: int, values: Tensor, uniforms: Tensor, reach: float) -> None:
        settled = self.settled[start : start + values.numel()]
        settled.copy_(round_to_bfloat16_stochastically(settled.float() + values, uniforms))
        self.flat[start : start + values.numel()].copy_(settled)

    def decay_(self, decay: float, stream: DirectionStream) -> None:
        """theta <- (1 - decay) theta, rounded stochastically; decays under 2^-25 are lost."""
        for start in range(0, self.settled.numel(), CHUNK):
            settled = self.settled[start : start + CHUNK]
            uniforms = stream.decay_uniforms(self.offset + start, settled.numel(), settled.device)
            decayed = settled.float()
            decayed -= decayed * decay
            settled.copy_(round_to_bfloat16_stochastically(decayed, uniforms))
        self.flat.copy_(self.settled)


def round_to_bfloat16_stochastically(values: Tensor, uniforms: Tensor) -> Tensor:
    """float32 -> bfloat16, to either neighbour with probability by distance.

    Adds a 16-bit public random integer below the mantissa's cut and truncates: exact, unbiased.
    """
    bits = values.contiguous().view(torch.int32)
    random = (uniforms * 65536.0).to(torch.int32)
    return (bits + random).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


def flat_view(tensor: Tensor) -> Tensor:
    """The tensor's present storage as one row; read anew each time, for wrappers may replace it."""
    return tensor.detach().view(-1)
