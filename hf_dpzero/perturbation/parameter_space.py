"""theta + lambda u in place, undone bit for bit, and the update.

A `ParameterSpace` holds the trainable tensors as one long vector theta of dimension d (tied weights
once) and remembers its `position`: the terms a_k u_k that currently stand on top of theta. Moving to
another position, restoring and updating each read and write the parameters once, and are exact:
float32 tensors live on a grid (see `grids`), lower precisions are restored from a copy. An update
may be deferred until the next move, which then makes both at once. For float32 the extra memory is a
MB or two.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hf_dpzero.perturbation.coordinates import AnySegment, Coordinates
from hf_dpzero.perturbation.directions import LANES, Direction, largest_coordinate
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.kernels.torch_reference import Parts, Pieces, Sweep
from hf_dpzero.perturbation.segments import (
    CHUNK,
    Change,
    GridSegment,
    GridState,
    Stacked,
    WeightDecay,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_LARGEST_GROWTH = 2.0**100
Position = tuple[tuple[Direction, float], ...]


class Stack(NamedTuple):
    """Copies of a space's tensors.

    Attributes:
      segments: of each segment.
      tensors: [copies, *shape] of each tensor, in their memory.
    """

    segments: list[Stacked]
    tensors: list[Tensor]


class Copies(dict[int, Tensor]):
    """Perturbed copies of some tensors: number -> contiguous memory of its shape and dtype.

    `write_perturbed_each_` keeps here what it need not find out twice.
    """

    _moves = -1
    _parts: Sequence[tuple[AnySegment, Parts]] = ()


class ParameterSpace(Coordinates):
    """The trainable coordinates of a model, perturbed and updated in place.

    Args:
      named_tensors: (name, tensor) of every trainable tensor, in the order that fixes the
        coordinates. float32, bfloat16 or float16, none sharing memory with another.
      distribution: `rademacher`, `gaussian` or `sphere`.
      smoothing: lambda, the largest coefficient of a perturbation (the grids leave room for it).
      decayed: names of the tensors that weight decay applies to; None for all.

    Attributes:
      layout: (offset, size) of each tensor in the direction's index space.
      traffic: bytes of parameters read and written so far.

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
        super().__init__(named_tensors, distribution, smoothing)
        self.decayed = set(self.names if decayed is None else decayed)
        self._last_update: dict[Direction, float] = {}
        self._pending: dict[Direction, float] = {}
        self._decay: WeightDecay | None = None  # that waits, with an update
        self._ages: dict[Direction, int] = {}  # of the update that waits
        self.position: Position = ()
        self._late: Callable[[], object] | None = None
        self._failed = False
        self._written: Position = ()  # the position that `_sweeps` are of
        self._sweeps: dict[int, Sweep] = {}  # by segment
        self.traffic = 0

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        *,
        distribution: str = "rademacher",
        smoothing: float = 1e-3,
        decayed: Collection[str] | None = None,
    ) -> Self:
        """Makes the space of a model's parameters with `requires_grad`; tied weights count once."""
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return cls(trainable, distribution=distribution, smoothing=smoothing, decayed=decayed)

    def state_dict(self) -> dict[str, GridState | dict[str, float]]:
        """Returns what a resumed run needs to stay on the same grids (public, JSON-safe)."""
        assert self.settled, "settle_() before saving"
        state: dict[str, GridState | dict[str, float]] = {name: {} for name in self.names}
        for segment in self._grids:
            for m, number in enumerate(segment.numbers):
                state[self.names[int(number)]] = segment.state(m)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, GridState]) -> None:
        """Restores `state_dict`; the tensors must already hold the values saved with it.

        Raises:
          ValueError: the state of other tensors, or values that are not on its grids.
        """
        if list(state) != self.names:
            raise ValueError(
                f"the checkpoint's trainable tensors ({len(state)}) are not this model's "
                f"({len(self.names)}): resume with the same model and `trainable`."
            )
        self._follow_storage_()
        self._sweeps.clear()
        for number, name in enumerate(self.names):
            segment, m = self._places[number]
            if isinstance(segment, GridSegment):
                try:
                    segment.load_(m, state[name])
                except ValueError as error:
                    raise ValueError(f"{name} {error}") from None
        self.snapped = True

    @property
    def settled(self) -> bool:
        """Whether the tensors hold theta: no perturbation stands, no update waits."""
        waits = self.position or self._pending or self._decay is not None
        return not waits and not self._failed and self._late is None

    @property
    def waiting(self) -> bool:
        """Whether a deferred update is still to be made."""
        return bool(self._pending) or self._late is not None

    @torch.no_grad()
    def move_to_(self, position: Position) -> None:
        """Makes the tensors theta + sum_k a_k u_k for the position's (u_k, a_k); () restores.

        Exact: any sequence of moves that ends at () leaves theta bit for bit as it was. An update
        that waits is made together with the move.

        Raises:
          ValueError: a direction twice, or coefficients that together exceed the smoothing.
          RuntimeError: an earlier move failed half-way.
        """
        self._get_ready_()
        self._check_position(position)
        old, new, update = dict(self.position), dict(position), self._pending
        present = max((u.step for u, c in update.items() if c), default=0)
        changes = []
        for u in sorted({**update, **old, **new}):  # the same order whatever the history
            move = old.get(u, 0.0), new.get(u, 0.0), update.get(u, 0.0)
            if any(move):
                age = self._ages.get(u, present - u.step) if move[2] else 0
                changes.append(Change(self.stream(u), *move, age=age))
        with interrupts_held_back():
            self._failed = (
                True  # and remains so where a change raises: some tensors have moved then
            )
            if changes or self._decay is not None:
                with dispatch.together():
                    for segment in self._segments:
                        self.traffic += segment.apply_(changes, self._decay)
            self.position, self._pending, self._failed = tuple(position), {}, False
            self._decay = None
        self._last_update = update or self._last_update  # the next shares its window's directions
        for u in self._streams.keys() - new.keys() - self._last_update.keys():
            del self._streams[u]

    def _get_ready_(self) -> None:
        if self._failed:
            raise RuntimeError(
                "a change of the parameters failed half-way, so they hold neither the old nor the new "
                "values: load the model anew and resume from a checkpoint."
            )
        if (late := self._late) is not None:
            with interrupts_held_back():
                self._late = None
                late()
        self._sweeps.clear()  # grids may change
        if self.settled:
            self._follow_storage_()
        if not self.snapped:
            self.snap_()

    def settle_(self) -> None:
        """Takes every perturbation off and makes the update that waits, if any.

        Afterwards the tensors may be read, saved, shared.

        Raises:
          RuntimeError: an earlier move failed half-way.
        """
        if not self.settled:
            self.move_to_(())

    @contextlib.contextmanager
    def perturbed(self, direction: Direction, scale: float) -> Iterator[None]:
        """theta + scale * u inside, theta bit for bit on exit, also after an exception.

        Args:
          direction: u.
          scale: at most the smoothing in magnitude, with what already stands.
        """
        # A deferred step is done with its position, which comes off together with its update.
        before = () if self.waiting else self.position
        try:
            self.move_to_((*before, (direction, scale)))
            yield
        finally:
            self.move_to_(before)

    @torch.no_grad()
    def write_perturbed_(
        self, number: int, position: Position, out: Tensor, source: Tensor | None = None
    ) -> None:
        """out = tensor `number` of theta + sum_k a_k u_k, as `move_to_` would leave it there.

        Args:
          number: place of the tensor among `tensors`.
          position: as for `move_to_`; at least one term.
          out: contiguous, of the tensor's shape and dtype. theta, settled, is untouched, and read
            where it was, though the parameter may hold such a copy for the moment.
          source: a copy of `values(number)` on out's device, maybe out itself; None if that is where
            they are.
        """
        if not self.snapped:
            self.snap_()
        self._write(number, position, self.values(number) if source is None else source, out, None)

    @torch.no_grad()
    def write_perturbed_each_(self, position: Position, copies: Copies) -> None:
        """`write_perturbed_` into every copy, on a GPU by one launch for all of a dtype.

        Args:
          position: as for `move_to_`; at least one term.
          copies: on the device of the tensors themselves.
        """
        if not self.snapped:
            self.snap_()
        if copies._moves != self._moves:
            members: dict[int, list[int]] = {}
            for number in copies:
                members.setdefault(id(self._places[number][0]), []).append(number)
            copies._parts = [self._parts_of(numbers, copies) for numbers in members.values()]
            copies._moves = self._moves
        for segment, parts in copies._parts:
            dispatch.sweep_each(self._added(segment, position), parts)
            self.traffic += sum(2 * out.nbytes for out in parts.outs)

    def _parts_of(self, numbers: list[int], copies: Copies) -> tuple[AnySegment, Parts]:
        segment, members = self._places[numbers[0]][0], [self._places[n][1] for n in numbers]
        sources = [segment.member(m) for m in members]
        return segment, segment.parts([copies[n].view(-1) for n in numbers], sources, members)

    def values(self, number: int) -> Tensor:
        """Returns tensor `number` of theta, settled, where it lives: a view, not to be written to."""
        segment, m = self._places[number]
        return segment.member(m).view(self.tensors[number].shape)

    @torch.no_grad()
    def write_perturbed_rows_(
        self, number: int, rows: Tensor, position: Position, out: Tensor
    ) -> None:
        """`write_perturbed_` for some rows of a tensor [V, h].

        Args:
          number: place of the tensor among `tensors`.
          rows: int64 [U], in any order, repeated or not.
          position: as for `move_to_`; at least one term.
          out: [U, h], contiguous, of the tensor's dtype, on any device.
        """
        if not self.snapped:
            self.snap_()
        table = self.values(number)
        width, chosen = table.shape[1], rows.to(table.device)
        if width % LANES == 0:
            source = table.index_select(0, chosen).to(out.device)
            # a GPU that has the rows is not waited for
            first = chosen * width if out.is_cuda and table.is_cuda else rows.cpu().numpy() * width
            return self._write(number, position, source, out, first)
        whole = torch.empty_like(table)
        self.write_perturbed_(number, position, whole)
        out.copy_(whole.index_select(0, chosen))

    def _write(
        self, number: int, position: Position, source: Tensor, out: Tensor, pieces: Pieces
    ) -> None:
        segment, m = self._places[number]
        added = self._added(segment, position)
        segment.write_(m, added, source.view(-1), out.view(-1), pieces)
        self.traffic += 2 * out.numel() * out.element_size()

    def _added(self, segment: AnySegment, position: Position) -> Sweep:
        """What a position adds to the segment's tensors; computed once while many are written."""
        assert self.settled, "settle_() before writing perturbed copies"
        if position != self._written or not self._sweeps:
            self._check_position(position)
            self._written, self._sweeps = position, {}
        if id(segment) not in self._sweeps:
            changes = [Change(self.stream(u), 0.0, a, 0.0) for u, a in sorted(position)]
            self._sweeps[id(segment)] = segment.sweep(changes)
        return self._sweeps[id(segment)]

    def new_stack(self, copies: int) -> Stack:
        """Returns memory for that many copies of all tensors, uninitialised."""
        made = {id(segment): segment.new_stack(copies) for segment in self._grids}
        tensors = []
        for number, tensor in enumerate(self.tensors):
            segment, m = self._places[number]
            part = made[id(segment)].tensors[m]
            tensors.append(part.view(copies, *tensor.shape).data)  # each with its own version
        return Stack(list(made.values()), tensors)

    @torch.no_grad()
    def write_stack_(
        self, directions: Sequence[Direction], scale: float, stack: Stack, forward: bool = False
    ) -> None:
        """The stack's first K copies become theta + scale u_k, the last K theta - scale u_k.

        The bits of `move_to_`, with little overhead for many small tensors.

        Args:
          directions: the K of them, distinct.
          scale: at most the smoothing in magnitude.
          stack: of 2 K copies, from `new_stack`; float32.
          forward: K + 1 copies, of which the last becomes theta.
        """
        if not self.snapped:
            self.snap_()
        assert self.settled, "settle_() before writing perturbed copies"
        self._check_position(((directions[0], scale),))
        changes = [Change(self.stream(u), 0.0, scale, 0.0) for u in directions]
        for segment, stacked in zip(self._grids, stack.segments, strict=True):
            segment.write_stack_(changes, stacked, forward)
            self.traffic += sum(2 * flat.nbytes for flat in stacked.flats)

    @torch.no_grad()
    def step_(
        self,
        directions: Sequence[Direction],
        coefficients: Sequence[float],
        decay: float = 0.0,
        defer: bool = False,
        ages: Sequence[int] | None = None,
    ) -> None:
        """theta <- (1 - decay) theta + sum_k c_k u_k, at once with the restore of the position.

        Args:
          directions: the step's K directions.
          coefficients: c_k, for DPZero -learning_rate * value_k (Algorithm 2, line 3).
          decay: learning_rate * weight_decay; 0 skips the decay.
          defer: leave restore and update to the next `move_to_` or `settle_`, with the same result to
            the last bit. Until then the tensors may not be read.
          ages: for each direction, how many steps have moved along it before: the update is then
            rounded with other public bits than those. Default: the newest step less the direction's.

        Raises:
          ValueError: a coefficient that is not finite or absurdly large, a decay outside [0, 1];
            theta is settled and unchanged then.
        """
        self._get_ready_()
        if self._pending:
            self.settle_()
        self._check_pairs(directions, coefficients)
        growth = largest_coordinate(self.distribution) * sum(abs(c) for c in coefficients)
        if not (growth <= _LARGEST_GROWTH and 0.0 <= decay <= 1.0):
            self.settle_()
            raise ValueError(
                f"update coefficients {tuple(coefficients)} with decay {decay} are not finite, or "
                "out of range; nothing was changed. Lower learning_rate (or weight_decay)."
            )
        with interrupts_held_back():
            if decay:
                decayed = np.array([name in self.decayed for name in self.names])
                self._decay = WeightDecay(decay, self.stream(directions[0]), decayed)
            for segment in self._grids:
                segment.make_room_(growth, self._reach, len(coefficients), self.settle_)
            self._pending = dict(zip(directions, coefficients, strict=True))
            self._ages = dict(zip(directions, ages or (), strict=ages is not None))
        if not defer:
            self.settle_()

    def leave_(self, update: Callable[[], object]) -> None:
        """Leaves a deferred `step_` to the next `move_to_` or `settle_`, which call it first.

        So nobody knows the update before the tensors are needed. Where it raises, there is none.
        """
        if self.waiting:
            self.settle_()
        self._late = update

    def _check_pairs(self, directions: Sequence[Direction], coefficients: Sequence[float]) -> None:
        if len({*directions}) != len(coefficients) or len(directions) != len(coefficients):
            self.settle_()
            raise ValueError(
                f"{len(coefficients)} coefficients for {len(directions)} directions: an update needs "
                "as many distinct directions as coefficients."
            )

    @torch.no_grad()
    def dense_step_(
        self,
        directions: Sequence[Direction],
        coefficients: Sequence[float],
        update: Callable[[int, Tensor], Tensor],
    ) -> None:
        """theta <- theta + update(sum_k c_k u_k), one chunk at a time (DPGD-0th, Algorithm 1).

        Args:
          directions: u_k, at least one, distinct.
          coefficients: c_k, float64; private.
          update: (number of the chunk, its part of the sum, float64 [n]) -> float32 [n], what is added
            to the parameters. Here the sum is noised, before anything is rounded.

        Raises:
          ValueError: as many coefficients as directions are needed; theta is settled then.
        """
        self._get_ready_()
        self.settle_()
        self._check_pairs(directions, coefficients)
        streams, part = [self.stream(u) for u in directions], 0
        with interrupts_held_back():
            self._failed = True
            for number, (_, size) in enumerate(self.layout):
                segment, m = self._places[number]
                for start in range(0, size, CHUNK):
                    count = min(CHUNK, size - start)
                    combined = self._combination(number, start, count, streams, coefficients)
                    values = update(part, combined)
                    segment.add_dense_(m, start, values, streams[0], self._reach)
                    part += 1
            self._failed = False
        self._streams.clear()

    def _check_position(self, position: Position) -> None:
        if len(dict(position)) != len(position):
            raise ValueError(f"position names a direction twice: {position}; add its coefficients.")
        size = 0.0
        for _, coefficient in position:
            size += abs(coefficient)
        if not size <= self.smoothing * (1 + 1e-12):
            raise ValueError(
                f"a perturbation of {size} is larger than smoothing={self.smoothing}, for which the "
                "grids leave room: build the ParameterSpace with a larger smoothing."
            )


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Delivers Ctrl-C (SIGINT) on exit, to the handler that stood before.

    Only the main thread receives signals; elsewhere, and where the handler is not Python's, nothing
    is changed.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *given: received.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(*received[0])
