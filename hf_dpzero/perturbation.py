"""The perturbation engine: theta + lambda u in place, undone bit for bit, and the update.

A `ParameterSpace` holds the trainable tensors as one long vector theta of dimension d (tied weights
once) and remembers its `position`: the terms a_k u_k that currently stand on top of theta. Moving
from one position to the next, restoring and updating are one pass over the parameters each, and
are exact: float32 tensors live on a lattice (see `lattice`), lower precisions keep their settled
values beside them. Extra memory is a few MB for float32.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dpzero import lattice
from hf_dpzero.directions import (
    ALIGNMENT,
    Direction,
    DirectionStream,
    check_distribution,
    largest_coordinate,
)

CHUNK = 1 << 19  # coordinates worked on at a time: 2 MiB of float32
Position = tuple[tuple[Direction, float], ...]


class Change(NamedTuple):
    """One direction's share of a pass: its coefficient goes old -> new, theta gains `update`."""

    stream: DirectionStream
    old: float
    new: float
    update: float


class _LatticeTensor:
    """A float32 tensor on its grid: changes are added to it, exactly.

    `bound` is an upper bound on its magnitude computed from public numbers alone; when the next
    update could pass the grid's range, the tensor is measured and, if need be, moved to a coarser
    grid. Both depend only on theta and the updates, so a replay does the same at the same step.
    """

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self.tensor, self.offset = tensor, offset
        self.exponent: int | None = None
        self.bound = 0.0

    @property
    def flat(self) -> Tensor:
        return _flat(self.tensor)

    def snap_(self, reach: float) -> None:
        self.bound = lattice.largest_magnitude(self.flat)
        self.exponent = lattice.exponent_for(self.bound + reach)
        lattice.snap_(self.flat, self.spacing)

    def load_(self, exponent: int, bound: float) -> None:
        self.exponent, self.bound = exponent, bound

    @property
    def spacing(self) -> float:
        assert self.exponent is not None, "snap_() comes before the first perturbation"
        return lattice.quantum(self.exponent)

    def make_room_(self, growth: float, reach: float) -> None:
        """Ensures |theta| + growth + reach stays within the grid's range (theta is settled)."""
        assert self.exponent is not None
        if self.bound + growth + reach <= lattice.capacity(self.exponent):
            self.bound += growth
            return
        self.bound = lattice.largest_magnitude(self.flat)
        needed = lattice.exponent_for(self.bound + growth + reach)
        if needed > self.exponent:
            self.exponent = needed
            lattice.snap_(self.flat, self.spacing)
        self.bound += growth

    def apply_(self, changes: Sequence[Change], workspace: Tensor) -> None:
        flat = self.flat
        for start in range(0, flat.numel(), CHUNK):
            values = flat[start : start + CHUNK]
            for change in changes:
                self._add_(values, self.offset + start, change, workspace)

    def _add_(self, values: Tensor, start: int, change: Change, workspace: Tensor) -> None:
        stochastic = lattice.needs_stochastic_rounding(change.update, self.spacing)
        if change.stream.distribution == "rademacher":
            snap = lattice.snap_scalar
            amount = snap(change.new, self.spacing) - snap(change.old, self.spacing)
            amount += 0.0 if stochastic else snap(change.update, self.spacing)
            if amount:
                padded = workspace[: -(-values.numel() // 8) * 8]
                change.stream.signs_times_(padded, start, amount)
                values.add_(padded[: values.numel()])
            if stochastic:
                step = change.stream.raw(start, values.numel(), values.device) * change.update
                values.add_(self._rounded(change, step, start, True))
            return
        raw = change.stream.raw(start, values.numel(), values.device)
        for coefficient, sign, random in (
            (change.new, 1, False),
            (change.old, -1, False),
            (change.update, 1, stochastic),
        ):
            if coefficient:
                step = raw * (coefficient * change.stream.scale)
                values.add_(self._rounded(change, step, start, random), alpha=sign)

    def _rounded(self, change: Change, step: Tensor, start: int, stochastic: bool) -> Tensor:
        """`step` (float32, destroyed) rounded to the grid."""
        if not stochastic:
            return lattice.snap_(step, self.spacing)
        uniforms = change.stream.uniforms(start, step.numel(), step.device)
        return lattice.snap_stochastically_(step, self.spacing, uniforms)

    def add_dense_(self, start: int, values: Tensor, uniforms: Tensor, reach: float) -> None:
        self.make_room_(lattice.largest_magnitude(values), reach)
        step = lattice.snap_stochastically_(values, self.spacing, uniforms)
        self.flat[start : start + values.numel()].add_(step)

    def decay_(self, factor: float) -> None:
        lattice.snap_(self.flat.mul_(factor), self.spacing)


class _SnapshotTensor:
    """A bfloat16 tensor: its settled values are kept beside it (one more copy of this tensor).

    The bfloat16 grid is too coarse to perturb on, so theta + sum a_k u_k is computed in float32
    from the settled values and rounded; restoring copies them back. Updates are rounded
    stochastically with public uniforms, so that small ones are not lost on average.
    """

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self.tensor, self.offset = tensor, offset
        self.settled = _flat(tensor).clone()
        self.exponent: int | None = None
        self.bound = 0.0

    @property
    def flat(self) -> Tensor:
        return _flat(self.tensor)

    def snap_(self, reach: float) -> None:
        self.load_(0, 0.0)

    def load_(self, exponent: int, bound: float) -> None:
        self.exponent, self.bound = exponent, bound
        self.settled.copy_(self.flat)

    def make_room_(self, growth: float, reach: float) -> None:
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

    def decay_(self, factor: float) -> None:
        self.settled.mul_(factor)
        self.flat.copy_(self.settled)


def round_to_bfloat16_stochastically(values: Tensor, uniforms: Tensor) -> Tensor:
    """float32 -> bfloat16, to either neighbour with probability by distance.

    Adds a 16-bit public random integer below the mantissa's cut and truncates: exact, unbiased.
    """
    bits = values.contiguous().view(torch.int32)
    random = (uniforms * 65536.0).to(torch.int32)
    return (bits + random).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


class ParameterSpace:
    """The trainable coordinates of a model, perturbed and updated in place.

    Args:
      named_tensors: (name, tensor) of every trainable tensor, in the order that fixes the
        coordinates. float32 or bfloat16, contiguous, none sharing memory with another.
      distribution: `rademacher`, `gaussian` or `sphere`.
      smoothing: lambda, the largest coefficient of a perturbation (the grids leave room for it).
      decayed: names of the tensors that weight decay applies to; None for all.

    Raises:
      ValueError: nothing is trainable, an unsupported dtype, meta tensors, shared memory.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        distribution: str = "rademacher",
        smoothing: float = 1e-3,
        decayed: Collection[str] | None = None,
    ) -> None:
        check_distribution(distribution)
        named = [(name, _checked(name, tensor)) for name, tensor in named_tensors]
        if not named:
            raise ValueError("no parameter is trainable: set requires_grad or loosen `trainable`.")
        _refuse_shared_memory(named)
        self.distribution, self.smoothing = distribution, smoothing
        self.names = [name for name, _ in named]
        self.decayed = set(self.names if decayed is None else decayed)
        self.tensors = [tensor for _, tensor in named]
        self.offsets = _aligned_offsets(self.tensors)
        self.dimension = sum(tensor.numel() for tensor in self.tensors)
        self._cells = [
            (_LatticeTensor if tensor.dtype == torch.float32 else _SnapshotTensor)(tensor, offset)
            for tensor, offset in zip(self.tensors, self.offsets)
        ]
        self._workspaces: dict[torch.device, Tensor] = {}
        self._streams: dict[Direction, DirectionStream] = {}
        self.position: Position = ()

    @classmethod
    def from_model(cls, model: nn.Module, **settings: Any) -> ParameterSpace:
        """The space of the parameters with requires_grad; tied weights count once."""
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls(trainable, **settings)

    def check_is_of(self, model: nn.Module) -> None:
        """Raises RuntimeError unless these are the very tensors that `model` computes with."""
        own = {id(p) for p in model.parameters() if p.requires_grad}
        if own != {id(tensor) for tensor in self.tensors}:
            raise RuntimeError(
                "the model's trainable parameters were replaced after training was set up, so "
                "perturbations would not reach it: wrap or move the model before the trainer."
            )

    @property
    def layout(self) -> list[tuple[int, int]]:
        """(offset, size) of each tensor in the direction's index space."""
        return [(o, t.numel()) for o, t in zip(self.offsets, self.tensors)]

    @property
    def snapped(self) -> bool:
        """Whether `snap_` (or `load_state_dict`) has put the tensors on their grids."""
        return all(cell.exponent is not None for cell in self._cells)

    @torch.no_grad()
    def snap_(self) -> None:
        """Puts every float32 tensor on its grid; once, before the first perturbation.

        Moves weights by a relative rms of about 3e-6. Deterministic, so a replay does the same.
        """
        for cell in self._cells:
            cell.snap_(self._reach)

    @property
    def _reach(self) -> float:
        """The largest |a u[i]| of a perturbation."""
        return largest_coordinate(self.distribution) * abs(self.smoothing)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to stay on the same grids (public, JSON-safe)."""
        assert not self.position, "settle_() before saving"
        return {
            name: {"exponent": cell.exponent, "bound": cell.bound}
            for name, cell in zip(self.names, self._cells)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the tensors must already hold the values saved with it."""
        if list(state) != self.names:
            raise ValueError(
                f"the checkpoint's trainable tensors ({len(state)}) are not this model's "
                f"({len(self.names)}): resume with the same model and `trainable`."
            )
        for name, cell in zip(self.names, self._cells):
            cell.load_(state[name]["exponent"], state[name]["bound"])

    @torch.no_grad()
    def move_to_(self, position: Position) -> None:
        """Makes the tensors theta + sum_k a_k u_k for the position's (u_k, a_k); () restores.

        Exact: any sequence of moves that ends at () leaves theta bit for bit as it was.
        """
        self._ensure_snapped()
        old, new = dict(self.position), dict(position)
        self._refuse_out_of_reach(position, new)
        self._pass_({u: (old.get(u, 0.0), new.get(u, 0.0), 0.0) for u in {**old, **new}})
        self.position = tuple(position)

    def settle_(self) -> None:
        """Takes every perturbation off; afterwards the tensors may be read, saved, shared."""
        if self.position:
            self.move_to_(())

    @contextlib.contextmanager
    def perturbed(self, direction: Direction, scale: float) -> Iterator[None]:
        """theta + scale * u inside, theta bit for bit on exit, also after an exception."""
        before = self.position
        try:
            self.move_to_((*before, (direction, scale)))
            yield
        finally:
            self.move_to_(before)

    @torch.no_grad()
    def step_(
        self, directions: Sequence[Direction], coefficients: Sequence[float], decay: float = 0.0
    ) -> None:
        """theta <- (1 - decay) theta + sum_k c_k u_k, fused with the restore of the position.

        Args:
          directions: the step's K directions.
          coefficients: c_k, for DPZero -learning_rate * value_k (Algorithm 2, line 3).
          decay: learning_rate * weight_decay; 0 skips that pass.

        Raises:
          ValueError: a coefficient that is not finite; theta is settled and unchanged then.
        """
        self._ensure_snapped()
        if not all(math.isfinite(c) for c in (*coefficients, decay)):
            self.settle_()
            raise ValueError(
                f"update coefficients {tuple(coefficients)} are not finite; nothing was changed. "
                "Lower learning_rate."
            )
        if decay:
            self.settle_()
            for name, cell in zip(self.names, self._cells):
                if name in self.decayed:
                    cell.decay_(1.0 - decay)
        self._make_room_(coefficients)
        old = dict(self.position)
        update = dict(zip(directions, coefficients, strict=True))
        self._pass_({u: (old.get(u, 0.0), 0.0, update.get(u, 0.0)) for u in {**old, **update}})
        self.position = ()
        self._streams.clear()

    @torch.no_grad()
    def dense_step_(
        self, direction: Direction, coefficient: float, noise: Callable[[int, int], Tensor]
    ) -> None:
        """theta <- theta + coefficient * u + noise, noise a dense vector (DPGD-0th, Algorithm 1).

        The noise joins coefficient * u before anything is rounded, so that the rounding is a
        function of the noised vector alone and costs no privacy.

        Args:
          direction: u.
          coefficient: of u; private until the noise is on it.
          noise: (part, count) -> float32 [count], fresh for every part.
        """
        self._ensure_snapped()
        self.settle_()
        stream, part = self.stream(direction), 0
        for cell in self._cells:
            for start in range(0, cell.flat.numel(), CHUNK):
                count = min(CHUNK, cell.flat.numel() - start)
                u = stream.raw(cell.offset + start, count, cell.flat.device) * stream.scale
                values = u.mul_(coefficient).add_(noise(part, count).to(u.device))
                uniforms = stream.uniforms(cell.offset + start, count, u.device)
                cell.add_dense_(start, values, uniforms, self._reach)
                part += 1
        self._streams.clear()

    def stream(self, direction: Direction) -> DirectionStream:
        """The coordinates of `direction` in this space (kept until the step ends)."""
        if direction not in self._streams:
            self._streams[direction] = DirectionStream(direction, self.distribution, self.layout)
        return self._streams[direction]

    def direction_norm(self, direction: Direction) -> float:
        """||u||_2: sqrt(d) for rademacher and sphere, the drawn norm for gaussian."""
        if self.distribution != "gaussian":
            return math.sqrt(self.dimension)
        return math.sqrt(self.stream(direction).squared_norm())

    def _refuse_out_of_reach(self, position: Position, new: Mapping[Direction, float]) -> None:
        if len(new) != len(position):
            raise ValueError(f"position names a direction twice: {position}; add its coefficients.")
        size = sum(abs(a) for a in new.values())
        if not size <= self.smoothing * (1 + 1e-12):
            raise ValueError(
                f"a perturbation of {size} is larger than smoothing={self.smoothing}, for which the "
                "grids leave room: build the ParameterSpace with a larger smoothing."
            )

    def _ensure_snapped(self) -> None:
        if not self.snapped:
            self.snap_()

    def _make_room_(self, coefficients: Sequence[float]) -> None:
        growth = largest_coordinate(self.distribution) * sum(abs(c) for c in coefficients)
        reach = self._reach
        if any(_is_short(cell, growth, reach) for cell in self._cells):
            self.settle_()
        for cell in self._cells:
            cell.make_room_(growth, reach)

    def _pass_(self, moves: Mapping[Direction, tuple[float, float, float]]) -> None:
        changes = [Change(self.stream(u), *m) for u, m in moves.items() if any(m)]
        if not changes:
            return
        for cell in self._cells:
            cell.apply_(changes, self._workspace(cell.flat.device))

    def _workspace(self, device: torch.device) -> Tensor:
        if device not in self._workspaces:
            largest = min(CHUNK, max(t.numel() for t in self.tensors))
            self._workspaces[device] = torch.empty(-(-largest // 8) * 8, device=device)
        return self._workspaces[device]


def _flat(tensor: Tensor) -> Tensor:
    """The tensor's present storage as one row; read anew each time, for wrappers may replace it."""
    return tensor.detach().view(-1)


def _is_short(cell: _LatticeTensor | _SnapshotTensor, growth: float, reach: float) -> bool:
    if isinstance(cell, _SnapshotTensor) or cell.exponent is None:
        return False
    return cell.bound + growth + reach > lattice.capacity(cell.exponent)


def _checked(name: str, tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: load its weights before training.")
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{name} has dtype {tensor.dtype}, which cannot be perturbed exactly: load the model "
            "in float32 or bfloat16, or train float32 adapters on top of it."
        )
    if not tensor.is_contiguous():
        tensor.data = tensor.data.contiguous()
    return tensor


def _refuse_shared_memory(named: Sequence[tuple[str, Tensor]]) -> None:
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in named if t.nbytes)
    for (_, end, first), (start, _, second) in zip(spans, spans[1:]):
        if start < end:
            raise ValueError(
                f"{first} and {second} share memory without being one tied parameter: "
                "freeze one of them or clone it."
            )


def _aligned_offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor starts in the index space: multiples of ALIGNMENT, in order."""
    offsets, position = [], 0
    for tensor in tensors:
        offsets.append(position)
        position += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
    return offsets


@torch.no_grad()
def digest_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every tensor, in order."""
    digest = hashlib.sha256()
    for name, tensor in named_tensors:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().contiguous().view(-1)
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK].cpu().view(torch.uint8)
            digest.update(memoryview(part.numpy()))
    return digest.hexdigest()


def digest_model(model: nn.Module) -> str:
    """SHA-256 (hex) over every parameter of `model`, frozen ones included, tied ones once."""
    return digest_tensors(model.named_parameters())
