"""theta + lambda u in place, undone bit for bit, and the update.

A `ParameterSpace` holds the trainable tensors as one long vector theta of dimension d (tied weights
once) and remembers its `position`: the terms a_k u_k that currently stand on top of theta. Moving to
another position, restoring and updating each read and write the parameters once, and are exact:
float32 tensors live on a grid (see `exact_grid`), lower precisions are restored from a copy. An update
may be deferred until the next move, which then makes both at once. For float32 the extra memory is a
MB or two.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_dpzero.perturbation.coordinates import Coordinates
from hf_dpzero.perturbation.directions import LANES, Direction, largest_coordinate
from hf_dpzero.perturbation.kernels import dispatch
from hf_dpzero.perturbation.segments import CHUNK, Change, GridSegment

_LARGEST_GROWTH = 2.0**100
Position = tuple[tuple[Direction, float], ...]


class Stack(NamedTuple):
    """Copies of a space's tensors.

    Attributes:
      flats: [copies, n] of each segment.
      tensors: [copies, *shape] of each tensor, in the flats' memory.
    """

    flats: list[Tensor]
    tensors: list[Tensor]


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
        self._ages: dict[Direction, int] = {}  # of the update that waits
        self.position: Position = ()
        self._failed = False
        self.traffic = 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to stay on the same grids (public, JSON-safe)."""
        assert self.settled, "settle_() before saving"
        state: dict[str, Any] = {name: {} for name in self.names}
        for segment in self._grids:
            for m, number in enumerate(segment.numbers):
                state[self.names[int(number)]] = segment.state(m)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        for number, name in enumerate(self.names):
            segment, m = self._places[number]
            if isinstance(segment, GridSegment):
                try:
                    segment.load_(m, state[name])
                except ValueError as error:
                    raise ValueError(f"{name} {error}") from None
            segment.snapped = True

    @property
    def settled(self) -> bool:
        """Whether the tensors hold theta: no perturbation stands, no update waits."""
        return not self.position and not self._pending and not self._failed

    @property
    def waiting(self) -> bool:
        """Whether a deferred update is still to be made."""
        return bool(self._pending)

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
        ages, present = self._ages, max((u.step for u, c in update.items() if c), default=0)
        changes = [
            Change(self.stream(u), *move, age=ages.get(u, present - u.step) if move[2] else 0)
            for u in sorted({**update, **old, **new})  # the same order whatever the history
            if any(move := (old.get(u, 0.0), new.get(u, 0.0), update.get(u, 0.0)))
        ]
        with self._all_or_nothing():
            if changes:
                with dispatch.together():
                    self.traffic += sum(segment.apply_(changes) for segment in self._segments)
            self.position, self._pending = tuple(position), {}
        self._last_update = update or self._last_update  # the next shares its window's directions
        kept = {**new, **self._last_update}
        self._streams = {u: stream for u, stream in self._streams.items() if u in kept}

    def _get_ready_(self) -> None:
        if self.settled:
            self._follow_storage_()
        if not self.snapped:
            self.snap_()

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Ctrl-C inside waits until all tensors are written; after an error half-way the space refuses
        to go on."""
        if self._failed:
            raise RuntimeError(
                "a change of the parameters failed half-way, so they hold neither the old nor the new "
                "values: load the model anew and resume from a checkpoint."
            )
        with interrupts_held_back():
            self._failed = True
            yield
            self._failed = False

    def settle_(self) -> None:
        """Takes every perturbation off and makes the update that waits, if any.

        Afterwards the tensors may be read, saved, shared.

        Raises:
          RuntimeError: an earlier move failed half-way.
        """
        if self._failed or not self.settled:
            self.move_to_(())

    @contextlib.contextmanager
    def perturbed(self, direction: Direction, scale: float) -> Iterator[None]:
        """theta + scale * u inside, theta bit for bit on exit, also after an exception.

        Args:
          direction: u.
          scale: at most the smoothing in magnitude, with what already stands.

        Yields:
          Nothing.
        """
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

    def values(self, number: int) -> Tensor:
        """Tensor `number` of theta, settled, where it lives: a view, not to be written to."""
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
            return self._write(number, position, source, out, rows.cpu().numpy() * width)
        whole = torch.empty_like(table)
        self.write_perturbed_(number, position, whole)
        out.copy_(whole.index_select(0, chosen))

    def _write(
        self, number: int, position: Position, source: Tensor, out: Tensor, pieces: Any
    ) -> None:
        assert self.settled, "settle_() before writing perturbed copies"
        self._check_position(position)
        changes = [Change(self.stream(u), 0.0, a, 0.0) for u, a in sorted(position)]
        segment, m = self._places[number]
        segment.write_(m, changes, source.view(-1), out.view(-1), pieces)
        self.traffic += 2 * out.numel() * out.element_size()

    def new_stack(self, copies: int) -> Stack:
        """Memory for that many copies of all tensors, uninitialised."""
        flats = [segment.flat.new_empty(copies, segment.flat.numel()) for segment in self._segments]
        place = {id(segment): flat for segment, flat in zip(self._segments, flats, strict=True)}
        tensors = []
        for number, tensor in enumerate(self.tensors):
            segment, m = self._places[number]
            part = place[id(segment)].narrow(1, segment.starts[m], tensor.numel())
            tensors.append(part.view(copies, *tensor.shape).data)  # each with its own version
        return Stack(flats, tensors)

    @torch.no_grad()
    def write_stack_(self, directions: Sequence[Direction], scale: float, stack: Stack) -> None:
        """The stack's first K copies become theta + scale u_k, the last K theta - scale u_k.

        The bits of `move_to_`, with little overhead for many small tensors.

        Args:
          directions: the K of them, distinct.
          scale: at most the smoothing in magnitude.
          stack: of 2K copies, from `new_stack`; float32.
        """
        if not self.snapped:
            self.snap_()
        assert self.settled, "settle_() before writing perturbed copies"
        self._check_position(((directions[0], scale),))
        changes = [Change(self.stream(u), 0.0, scale, 0.0) for u in directions]
        for segment, flat in zip(self._segments, stack.flats, strict=True):
            assert isinstance(segment, GridSegment), "stacks are of float32 tensors"
            segment.write_stack_(changes, *flat.chunk(2))
            self.traffic += 2 * flat.numel() * flat.element_size()

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
        if decay:
            self.settle_()
        with interrupts_held_back():
            if decay:
                decayed = np.array([name in self.decayed for name in self.names])
                stream = self.stream(directions[0])
                for segment in self._segments:
                    segment.decay_(decay, stream, decayed[segment.numbers.astype(np.int64)])
            wanted = (growth, self._reach, len(coefficients))
            if any(segment.short(*wanted).any() for segment in self._grids):
                self.settle_()
            for segment in self._grids:
                segment.make_room_(*wanted)
            self._pending = dict(zip(directions, coefficients, strict=True))
            self._ages = dict(zip(directions, ages or (), strict=ages is not None))
        if not defer:
            self.settle_()

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
        with self._all_or_nothing():
            for number, (_, size) in enumerate(self.layout):
                segment, m = self._places[number]
                for start in range(0, size, CHUNK):
                    count = min(CHUNK, size - start)
                    combined = self._combination(number, start, count, streams, coefficients)
                    values = update(part, combined)
                    segment.add_dense_(m, start, values, streams[0], self._reach)
                    part += 1
        self._streams.clear()

    def _check_position(self, position: Position) -> None:
        if len({u for u, _ in position}) != len(position):
            raise ValueError(f"position names a direction twice: {position}; add its coefficients.")
        size = sum(abs(a) for _, a in position)
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
    received: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(*received[0])
